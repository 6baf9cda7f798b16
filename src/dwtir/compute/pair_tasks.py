"""Which thread of `compute.paired` has what: its share of copies, of results and of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tvm import tirx
from tvm.script import tirx as T

from ..pairs import COLUMNS, LAG, STRIPS, VECTOR, Pairs

Find: TypeAlias = Callable[[Any, Any], tuple[Any, ...]]
"""Tells by turn and element whether a vector is wanted, whether it is there, the element, and the vector's place."""

_Task: TypeAlias = tuple[Any, Any, Any]


class Tasks:
    """Tasks of threads: line, column and vector. A block is its place in images, rows, columns and channels."""

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        self._lanes = 32 * pairs.warps // pairs.vectors  # threads with the same vector
        self._loads = self._deal(pairs.images * pairs.stage_rows, pairs.width)
        self._stores = self._deal(pairs.images * pairs.rows, COLUMNS * pairs.across)
        self.loads, self.stores = (across * down for _, across, down in (self._loads, self._stores))

    def _deal(self, lines: int, columns: int) -> tuple[int, int, int]:
        """Deal lines of columns out to threads: columns at a time, and turns over lines and over columns."""
        lanes = self._lanes
        deals = ((n, -(-lines * n // lanes), -(-columns // n)) for n in (8, 16, 32) if lanes % n == 0)
        return min(deals, key=lambda deal: deal[1] * deal[2])

    def _task(self, turn, deal: tuple[int, int, int], thread) -> _Task:
        wide, _, across = deal
        place = thread // self.pairs.vectors
        line = turn // across * (self._lanes // wide) + place // wide
        return line, turn % across * wide + place % wide, thread % self.pairs.vectors

    def result(self, block, step, turn, thread) -> tuple[Any, tuple[Any, ...], _Task]:
        """Tell whether a step has results for a thread's turn; find them, and their place in shared memory."""
        pairs, shape = self.pairs, self.pairs.shape
        line, column, vector = task = self._task(turn, self._stores, thread)
        n, y, x, c = block
        columns = pairs.across * COLUMNS
        image, down = n * pairs.images + line // pairs.rows, step * pairs.rows + line % pairs.rows
        down += pairs.begun - pairs.delay
        row, right = y * pairs.height + down, x * columns + column
        channel = (c * pairs.vectors + vector) * VECTOR
        inside = [line < pairs.images * pairs.rows, image < shape.batch, 0 <= down, row < shape.result_height]
        inside += [column < columns, right < shape.result_width, channel < shape.result_channels]
        return tirx.all(*inside), (image, row, right, channel), task

    def inputs(self, image, block, stage, thread) -> Find:
        """Find what a thread has of a stage."""
        pairs, shape = self.pairs, self.pairs.shape
        (height, width), (sh, sw), left = shape.source, shape.stride, shape.before[1]

        def find(turn, lane) -> tuple[Any, ...]:
            line, column, vector = task = self._task(turn, self._loads, thread)
            n, y, x, c = block
            n, down = n * pairs.images + line // pairs.stage_rows, stage * pairs.stage_rows + line % pairs.stage_rows
            row = y * (pairs.height * sh) + pairs.first_row + down
            right = x * (pairs.across * COLUMNS * sw) - left + column
            channel = (c * pairs.vectors + vector) * VECTOR
            here = [n < shape.batch, 0 <= row, row < height, 0 <= right, right < width]
            here += [channel < shape.result_channels, down < pairs.input_rows]
            wanted = [line < pairs.images * pairs.stage_rows, column < pairs.width, stage < pairs.steps]
            at = pairs.input_at(stage % pairs.stages, 0, *task)
            return tirx.all(*wanted), tirx.all(*here), image[n, row, right, channel + lane], at

        return find

    def residuals(self, residual, block, step, thread) -> Find:
        """Find what a thread adds to the results of a step."""

        def find(turn, lane) -> tuple[Any, ...]:
            wanted, (n, row, column, channel), task = self.result(block, step, turn, thread)
            return wanted, T.bool(True), residual[n, row, column, channel + lane], self.residual_at(step, task)

        return find

    def residual_at(self, step, task: _Task) -> Any:
        """Find a vector of a residual in shared memory."""
        pairs = self.pairs
        return (step + LAG) % pairs.buffers * pairs.results + pairs.result_at(*task, VECTOR)

    def strip(self, warp, half, lane) -> tuple[Any, Any, Any]:
        """Find a strip of a product: whether it is one, its image and its place there."""
        across, strips = self.pairs.across, self.pairs.images * self.pairs.across
        number = warp // self.pairs.parts * STRIPS + half * (STRIPS // 2) + lane // 4
        if strips % STRIPS == 0:
            return True, number // across, number % across
        inside = T.min(number, strips - 1)
        return number < strips, inside // across, inside % across

    def channels(self, warp) -> tuple[Any, Any]:
        """Find a warp's vector, and its first channel there."""
        first = warp % self.pairs.parts * (2 * self.pairs.words)
        return first // VECTOR, first % VECTOR
