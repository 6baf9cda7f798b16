"""Rows of planes of NCHW, which begin at any element, copied to shared memory and back in vectors.

In shared memory rows begin as far into the first vector as in memory. What is here writes statements while a script is
parsed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from .parts import Part, when


class Stretch(NamedTuple):
    """Rows of a plane, of which a thread copies a share."""

    whole: Part
    """The tensor, from its first element on."""
    total: int
    """Elements of the tensor."""
    start: Any
    """The first of the rows'."""
    lanes: int
    """Elements of a vector."""
    threads: tuple[int, Any]
    """All that share, and the number of this one."""

    @property
    def beside(self) -> Any:
        """Elements before the first in its vector."""
        return tirx.floormod(self.start, self.lanes)

    def load(self, shared: Part, vectors: int) -> None:
        """Copy so many vectors to shared memory, from the first element's on.

        In place of vectors that are not there the last is loaded, as in `parts.share`.
        """
        last, over = divmod(self.total, self.lanes)
        for _, number, tests in self._turns(vectors):
            vector = tirx.floordiv(self.start, self.lanes) + number
            if over:
                tests = [*tests, vector < last]
            else:
                vector = tirx.min(vector, last - 1)
            with when(*tests), T.vectorized(self.lanes) as lane:
                shared.take(number * self.lanes + lane, self.whole, vector * self.lanes + lane)
        if over:
            _, thread = self.threads
            after = last * self.lanes - (self.start - self.beside) + thread
            with when(thread < over, after < vectors * self.lanes):
                shared.take(after, self.whole, last * self.lanes + thread)

    def store(self, shared: Part, count: Any, least: int, most: int) -> None:
        """Copy so many elements from shared memory, known to be from `least` to `most`: whole vectors, and the ends."""
        each, thread = self.threads
        end, first = self.beside + count, tirx.floordiv(self.start, self.lanes) * self.lanes
        for turn, number, tests in self._turns((most + 2 * self.lanes - 2) // self.lanes):
            at = number * self.lanes
            tests += [self.beside <= at] * (turn == 0)
            tests += [at + self.lanes <= end] * ((turn + 1) * each * self.lanes > least)
            with when(*tests), T.vectorized(self.lanes) as lane:
                self.whole.take(first + at + lane, shared, at + lane)
        head, tail = self.beside + thread, tirx.floordiv(end, self.lanes) * self.lanes + thread
        for place, tests in ((head, [0 < self.beside, head < self.lanes]), (tail, [tail < end])):
            with when(*tests):
                self.whole.take(first + place, shared, place)

    def _turns(self, vectors: int) -> Iterator[tuple[int, Any, list[Any]]]:
        each, thread = self.threads
        for turn in range(-(-vectors // each)):
            number = thread + turn * each
            yield turn, number, [number < vectors] * ((turn + 1) * each > vectors)
