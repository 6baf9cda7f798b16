"""Which tiles to try next: evolved, at random, or all of the 2017 article's grid."""

import itertools
import random
from abc import ABC, abstractmethod

from ..errors import InvalidScheduleError
from ..schedules import STRATEGIES, Ladder, SharedTile, Strategy
from ..shape import Shape
from ..target import Target
from .outcome import Task


class Search(ABC):
    """Proposes strategies that pass their own check, each at most once, repeatably by a seed."""

    def __init__(self, task: Task, target: Target, seed: int) -> None:
        self.shape = task.shape
        self.target = target
        self._rng = random.Random(f"{task} {target.name} {seed}")
        self._seen: set[Strategy] = set()

    def tell(self, strategy: Strategy, seconds: float | None) -> None:
        """Learn what a strategy took, or None if it failed. It is not proposed again."""
        self._seen.add(strategy)

    @abstractmethod
    def propose(self, count: int) -> list[Strategy]:
        """Return up to `count` strategies to measure; none when the space is exhausted."""

    def is_new(self, strategy: Strategy) -> bool:
        """Tell whether a strategy is worth a trial and was not seen before; now it is seen."""
        if strategy in self._seen:
            return False
        self._seen.add(strategy)
        return is_worth_a_trial(strategy, self.shape, self.target)


class RandomSearch(Search):
    """Draws the strategy and each of its parameters evenly and independently."""

    _DRAWS_PER_PROPOSAL = 200  # most of a small space is seen or invalid after a while

    def __init__(self, task: Task, target: Target, seed: int) -> None:
        super().__init__(task, target, seed)
        place = task.shape, target
        self._spaces = [
            (strategy, strategy.choose(*place).parameters, strategy.space(*place))
            for strategy in searched_strategies(*place)
        ]

    def propose(self, count: int) -> list[Strategy]:
        found: list[Strategy] = []
        for _ in range(count * self._DRAWS_PER_PROPOSAL):
            if len(found) == count:
                break
            kind, chosen, space = self._rng.choice(self._spaces)
            strategy = kind(**chosen | {field: self._rng.choice(values) for field, values in space.items()})
            if self.is_new(strategy):
                found.append(strategy)
        return found


class GridSearch(Search):
    """The 2017 article's search: every num_thread_y and num_thread_x for its tile."""

    def __init__(self, task: Task, target: Target, seed: int) -> None:
        super().__init__(task, target, seed)
        if not SharedTile.claims(task.shape, target):
            raise InvalidScheduleError(
                f"the grid search is the article's, for NCHW on a GPU, got {task} on {target.name}"
            )
        chosen = SharedTile.choose(task.shape, target).parameters
        grid = itertools.product((1, 2, 4, 8, 16, 32), repeat=2)
        self._tiles = filter(self.is_new, (SharedTile(**chosen | {"thread_y": y, "thread_x": x}) for y, x in grid))

    def propose(self, count: int) -> list[Strategy]:
        return list(itertools.islice(self._tiles, count))


SEARCHES = ("evolutionary", "random", "grid")
"""The searches by name."""


def open_search(name: str, task: Task, target: Target, seed: int) -> Search:
    """Make a search by its name."""
    if name == "evolutionary":
        from .evolutionary import EvolutionarySearch

        return EvolutionarySearch(task, target, seed)
    if name == "random":
        return RandomSearch(task, target, seed)
    if name == "grid":
        return GridSearch(task, target, seed)
    raise InvalidScheduleError(f"search must be one of {', '.join(SEARCHES)}, got {name!r}")


def is_worth_a_trial(strategy: Strategy, shape: Shape, target: Target) -> bool:
    """Tell whether a strategy takes the shape, and is not known to be slow there."""
    try:
        strategy.check_use(shape, target)
    except InvalidScheduleError:
        return False
    return strategy.is_promising(shape)


def searched_strategies(shape: Shape, target: Target) -> list[type[Strategy]]:
    """Return the strategies whose parameters are searched.

    The ladder of 2025 is there to be read: none of its steps reuses a value.
    """
    return [strategy for strategy in STRATEGIES.values() if strategy is not Ladder and strategy.claims(shape, target)]
