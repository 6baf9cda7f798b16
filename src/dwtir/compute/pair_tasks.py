"""Which thread of `compute.paired` has what: its share of copies, of results and of products."""

from collections.abc import Callable
from math import gcd, prod
from typing import Any, NamedTuple, TypeAlias

from tvm import tirx
from tvm.script import tirx as T

from ..pairs import COLUMNS, LAG, STRIPS, VECTOR, Pairs
from .parts import all_hold

Find: TypeAlias = Callable[[Any, Any], tuple[Any, ...]]
"""Tells by turn and element whether a vector is wanted, how much is there, the element, and the vector's place."""

_Task: TypeAlias = tuple[Any, Any, Any, Any]


class _Deal(NamedTuple):
    """Lines of columns of spans, dealt out to threads: columns at a time, and turns over columns and over lines."""

    span: int  # channels that move together
    spans: int  # of a pixel
    lanes: int  # threads with the same span
    wide: int
    across: int
    down: int

    @property
    def turns(self) -> int:
        return self.across * self.down

    def task(self, turn, thread) -> _Task:
        place, number, parts = thread // self.spans, thread % self.spans, VECTOR // self.span
        line = turn // self.across * (self.lanes // self.wide) + place // self.wide
        first = number % parts * self.span if parts > 1 else 0
        return line, turn % self.across * self.wide + place % self.wide, number // parts, first


def _deal(pairs: Pairs, lines: int, columns: int, vectors: int, span: int) -> _Deal:
    spans = vectors * (VECTOR // span)
    lanes = 32 * pairs.warps // spans
    wide = [n for n in (8, 16, 32) if lanes % n == 0] or [gcd(lanes, 8)]
    deals = (_Deal(span, spans, lanes, n, -(-columns // n), -(-lines * n // lanes)) for n in wide)
    return min(deals, key=lambda deal: deal.turns)


class Tasks:
    """Tasks of threads: line, column, vector and the first channel there.

    A block is its place in images, rows, columns and channels.
    """

    def __init__(self, pairs: Pairs) -> None:
        self.pairs = pairs
        lines, wide = pairs.images * pairs.stage_rows, pairs.width
        self._loads = _deal(pairs, lines, wide, pairs.source_pieces, pairs.source_span)
        lines, wide = pairs.images * pairs.rows, COLUMNS * pairs.across
        self._stores = _deal(pairs, lines, wide, pairs.vectors, pairs.result_span)
        self.loads, self.stores = self._loads.turns, self._stores.turns

    def result(self, block, at, turn, thread) -> tuple[Any, tuple[Any, ...], _Task]:
        """Tell whether a step has results for a thread; find them, and their place in shared memory."""
        pairs, shape = self.pairs, self.pairs.shape
        line, column, vector, first = task = self._stores.task(turn, thread)
        n, y, x, c = block
        columns = pairs.across * COLUMNS
        (of, step), inside = at, []
        if pairs.turns > 1:
            n, inside = of * pairs.blocks[0] + n, [0 <= of]
        image, down = n * pairs.images + line // pairs.rows, step * pairs.rows + line % pairs.rows
        down += pairs.begun - pairs.delay
        row, right = y * pairs.height + down, x * columns + column
        channel = (c * pairs.vectors + vector) * VECTOR + first
        inside += [line < pairs.images * pairs.rows, image < shape.batch, 0 <= down, row < shape.result_height]
        inside += [column < columns, right < shape.result_width, channel < shape.result_channels]
        return tirx.all(*inside), (image, row, right, channel), task

    def left(self, of, step) -> tuple[Any, Any]:
        """Find the turn and the step whose results are stored: the first steps have those of the turn before."""
        if self.pairs.turns == 1:
            return of, step - LAG
        is_before = step < LAG
        return of - T.cast(is_before, "int32"), step - LAG + T.Select(is_before, self.pairs.leaving, 0)

    def inputs(self, image, block, stage, thread) -> Find:
        """Find what a thread has of a stage."""
        pairs, shape = self.pairs, self.pairs.shape
        height, width = shape.source

        def find(turn, lane):
            line, column, vector, first = self._loads.task(turn, thread)
            place = line // pairs.stage_rows, line % pairs.stage_rows, column
            n, row, right, down = self._pixel(block, stage, *place)
            here = [n < shape.batch, 0 <= row, row < height, 0 <= right, right < width, down < pairs.input_rows]
            wanted = [line < pairs.images * pairs.stage_rows, column < pairs.width]
            wanted.append(all_hold(stage < pairs.steps * pairs.turns))
            at = pairs.input_at(stage % pairs.stages, *place, vector) + first
            channel = (block[3] * pairs.source_vectors + vector) * VECTOR + first
            if not pairs.is_shifted:
                there = T.if_then_else(tirx.all(*here, channel < shape.in_channels), 2 * pairs.source_span, 0)
                return tirx.all(*wanted), there, image[n, row, right, channel + lane], at
            pixel = self._elements_before(n, row, right)
            first = (pixel + channel) // VECTOR * VECTOR
            to_the_end = T.min(VECTOR, prod(image.shape) - first)
            there = T.if_then_else(tirx.all(*here, first < pixel + shape.in_channels), 2 * to_the_end, 0)
            return tirx.all(*wanted), there, image[0, 0, 0, first + lane], at

        return find

    def _pixel(self, block, stage, image, line, column) -> tuple[Any, ...]:
        """Find a pixel of a stage among all, and its row among those of a block."""
        pairs, (sh, sw), (n, y, x, _) = self.pairs, self.pairs.shape.stride, block
        step = stage
        if pairs.turns > 1:
            n, step = stage // pairs.steps * pairs.blocks[0] + n, stage % pairs.steps
        down = step * pairs.stage_rows + line
        row = y * (pairs.height * sh) + pairs.first_row + down
        return n * pairs.images + image, row, x * (pairs.across * COLUMNS * sw) - pairs.shape.before[1] + column, down

    def _elements_before(self, n, row, column) -> Any:
        shape, (height, width) = self.pairs.shape, self.pairs.shape.source
        return ((n * height + row) * width + column) * shape.in_channels

    def shift(self, block, stage, *place) -> Any:
        """Count what a pixel that is shifted is copied with before its own, or the block's, first channel."""
        return self._elements_before(*self._pixel(block, stage, *place)[:3]) % VECTOR

    def residuals(self, residual, block, at, thread) -> Find:
        """Find what a thread adds to the results of a step."""

        def find(turn, lane):
            wanted, (n, row, column, channel), task = self.result(block, at, turn, thread)
            value = residual[n, row, column, channel + lane]
            return wanted, 2 * self.pairs.result_span, value, self.residual_at(at, task)

        return find

    def residual_at(self, at, task: _Task) -> Any:
        pairs, (line, column, vector, first) = self.pairs, task
        place = pairs.result_at(line // pairs.rows, line % pairs.rows, column, vector, VECTOR) + first
        return (pairs.number(*at) + LAG) % pairs.buffers * pairs.results + place

    def strip(self, warp, half, lane) -> tuple[Any, Any, Any]:
        """Find a strip of a product: whether it is one, its image and its place there."""
        pairs, across = self.pairs, self.pairs.line
        strips, first = pairs.images * across, warp // pairs.parts * STRIPS
        number = first + (lane // 4 * 2 + half if pairs.beside else half * (STRIPS // 2) + lane // 4)
        conditions = [number % across < pairs.across] if across > pairs.across else []
        if strips % STRIPS:
            conditions.append(number < strips)
            number = T.min(number, strips - 2 + half if pairs.beside else strips - 1)
        return tirx.all(*conditions) if conditions else True, number // across, number % across

    def channels(self, warp) -> tuple[Any, Any]:
        """Find a warp's vector, and its first channel there."""
        first = warp % self.pairs.parts * (2 * self.pairs.words)
        return first // VECTOR, first % VECTOR

    def sources(self, warp) -> list[tuple[Any, Any, int]]:
        """List what a warp reads of a pixel: each vector of inputs, its first channel there, and how many."""
        words, repeats, M = self.pairs.words, self.pairs.repeats, self.pairs.shape.channel_multiplier
        together = words // repeats if repeats == M else 1
        firsts = (warp % self.pairs.parts * words + word for word in range(0, words, together * repeats))
        return [(first // M * 2 // VECTOR, first // M * 2 % VECTOR, 2 * together) for first in firsts]
