"""Which tiles to try next: at random, or all of the 2017 article's grid."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator

from ..errors import InvalidScheduleError
from ..schedules import STRATEGIES, Ladder, SharedTile, Strategy
from ..shape import DepthwiseConv2dShape
from ..target import Target

__all__ = ["SEARCHES", "GridSearch", "RandomSearch", "Search"]


class Search(ABC):
    """Proposes strategies that pass their own check, each at most once.

    Parameters
    ----------
    shape, target
        What is tuned, and for which device.
    seed : int
        Makes the proposals repeatable.
    """

    def __init__(self, shape: DepthwiseConv2dShape, target: Target, seed: int) -> None:
        self.shape = shape
        self.target = target
        self._rng = random.Random(f"{shape} {target.name} {seed}")
        self._seen: set[Strategy] = set()

    @abstractmethod
    def propose(self, count: int) -> list[Strategy]:
        """Return up to `count` strategies to measure; none when the space is exhausted."""

    def is_new(self, strategy: Strategy) -> bool:
        """Tell whether a strategy is valid and was not seen before; from now on it was."""
        if strategy in self._seen:
            return False
        self._seen.add(strategy)
        try:
            strategy.check_use(self.shape, self.target)
        except InvalidScheduleError:
            return False
        return True


class RandomSearch(Search):
    """Draws the strategy and each of its parameters evenly and independently."""

    _DRAWS_PER_PROPOSAL = 200  # most of a small space is seen or invalid after a while

    def __init__(self, shape: DepthwiseConv2dShape, target: Target, seed: int) -> None:
        super().__init__(shape, target, seed)
        self._spaces = [
            (strategy, strategy.choose(shape, target).parameters, strategy.space(shape, target))
            for strategy in STRATEGIES.values()
            # The ladder of 2025 is there to be read: none of its steps reuses a value.
            if strategy is not Ladder and strategy.claims(shape, target)
        ]

    def propose(self, count: int) -> list[Strategy]:
        found: list[Strategy] = []
        for _ in range(count * self._DRAWS_PER_PROPOSAL):
            if len(found) == count:
                break
            kind, chosen, space = self._rng.choice(self._spaces)
            drawn = {field: self._rng.choice(values) for field, values in space.items()}
            strategy = kind(**chosen | drawn)
            if self.is_new(strategy):
                found.append(strategy)
        return found


class GridSearch(Search):
    """The 2017 article's search: every num_thread_y and num_thread_x for its tile."""

    def __init__(self, shape: DepthwiseConv2dShape, target: Target, seed: int) -> None:
        super().__init__(shape, target, seed)
        if not SharedTile.claims(shape, target):
            raise InvalidScheduleError(
                f"the grid search is the article's, for NCHW on a GPU, got {shape} on {target.name}"
            )
        self._tiles = self._all_tiles()

    def _all_tiles(self) -> Iterator[Strategy]:
        chosen = SharedTile.choose(self.shape, self.target).parameters
        counts = (1, 2, 4, 8, 16, 32)
        for thread_y, thread_x in itertools.product(counts, counts):
            strategy = SharedTile(**chosen | {"thread_y": thread_y, "thread_x": thread_x})
            if self.is_new(strategy):
                yield strategy

    def propose(self, count: int) -> list[Strategy]:
        return list(itertools.islice(self._tiles, count))


SEARCHES: dict[str, type[Search]] = {"random": RandomSearch, "grid": GridSearch}
"""The searches by name."""
