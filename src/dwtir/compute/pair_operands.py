"""The operands of `compute.paired`'s products, as the lanes of a warp hold them: the weights' bands, and inputs."""

from tvm import tirx
from tvm.script import tirx as T

from .. import cuda_functions
from ..pairs import COLUMNS, VECTOR, Pairs
from .pair_tasks import Tasks
from .parts import by_lane, copy_vector, local, untold


class Operands:
    """How a warp fills its operands. A bias may be the weight of a pixel behind the window, which then is 1."""

    def __init__(self, pairs: Pairs, has_bias: bool) -> None:
        self.pairs, self._tasks, self._has_bias = pairs, Tasks(pairs), has_bias

    def bands(self, bands: list[tirx.Buffer], weight, operands, c, vw, vl) -> None:
        """Make the banded matrices: a lane has a column's, of one of its channels.

        That of a pair of results is multiplied by one of a pair of inputs: with a multiplier, by either.
        """
        pairs, shape, M = self.pairs, self.pairs.shape, self.pairs.shape.channel_multiplier
        (KH, KW), SW, DW = shape.kernel, shape.stride[1], shape.dilation[1]
        own = self._own()
        vector, first = self._tasks.channels(vw)
        channel = T.min((c * pairs.vectors + vector) * VECTOR, shape.result_channels - pairs.result_span) + first
        by_pairs = M == 1 and pairs.result_span == VECTOR
        for row in range(KH):
            for quad in range(pairs.quads):
                apart = quad * COLUMNS + vl % 4 - vl // 8 * SW
                column = apart // DW if DW > 1 else apart
                seen = [0 <= apart, column < KW] + ([apart % DW == 0] if DW > 1 else [])
                tap = (KH - 1 - row, KW - 1 - column) if shape.operation == "grad_data" else (row, column)
                has_bias = self._has_bias and (row, quad) == (pairs.common_tap, pairs.quads - 1)

                def value(number, tap=tap, seen=seen, has_bias=has_bias):
                    at, other = (*tap, number // M, number % M), T.cast(0, shape.dtype)
                    if has_bias:
                        other = T.if_then_else(vl % 4 == 3, operands["bias"][number], other)
                    return T.if_then_else(tirx.all(*seen), weight[at], other)

                if by_pairs:
                    with T.vectorized(2 * pairs.words) as e:
                        T.buffer_store(own, value(channel + e), [e])
                for e in range(0 if by_pairs else 2 * pairs.words):
                    mine = e // 2 * 2 + vl // 4 % 2
                    is_half = (vector * VECTOR + first + mine) // M % 2 == e % 2
                    only = value(T.min(channel + mine, shape.result_channels - 1))
                    T.buffer_store(own, T.if_then_else(is_half, only, T.cast(0, shape.dtype)), [e])
                band, step, further = self._part_of(bands, quad)
                for word in range(pairs.words):
                    pair = own[tirx.Ramp(word * 2, 1, 2)]
                    if by_pairs:
                        pair = self._by_word(cuda_functions.HALF_OF, own, word, vl // 4 % 2)
                    T.buffer_store(band, pair, [vw, row, step, word, vl, further, tirx.Ramp(0, 1, 2)])

    def window(self, name: str, row: int, staged, held: list[tirx.Buffer], block, stage, vw) -> None:
        pairs = self.pairs
        with by_lane(name) as vl:
            untold()
            own = self._own()
            for seen in pairs.loads:
                half, quad = seen[0]
                _, n, x = self._tasks.strip(vw, half, vl)
                column = x * (COLUMNS * pairs.shape.stride[1]) + vl % 4 + quad * COLUMNS
                for part, (vector, first, size) in enumerate(self._tasks.sources(vw)):
                    at = pairs.input_at(stage % pairs.stages, n, row, column, vector) + first
                    if pairs.is_shifted:
                        at += self._tasks.shift(block, stage, n, row, column)
                        to_last = (
                            pairs.shape.in_channels - 1 - ((block[3] * pairs.source_vectors + vector) * VECTOR + first)
                        )
                        self._take_shifted(staged, at, to_last, own, part * size, size)
                    else:
                        copy_vector(staged, at, own, part * size, size)
                for half, quad in seen:
                    part, place, further = self._part_of(held, quad)
                    for word in range(pairs.words):
                        held_word = self._by_word(cuda_functions.WORD, own, word // pairs.repeats)
                        if self._has_bias and quad == pairs.quads - 1:
                            ones = tirx.Broadcast(tirx.const(1, pairs.shape.dtype), 2)
                            held_word = T.Select(vl % 4 == 3, ones, held_word)
                        T.buffer_store(part, held_word, [place, word, vl, further, half, tirx.Ramp(0, 1, 2)])

    def _take_shifted(self, staged, at, to_last, own, to: int, size: int) -> None:
        """Read pairs that may begin in the middle of one. Beside an image's last channel is what is another pixel's."""
        pairs = local(own.dtype, size + 2)
        for first in range(0, size + 2, 2):
            copy_vector(staged, at // 2 * 2 + first, pairs, first, 2)
        for first in range(0, size, 2):
            later, pair = (pairs[tirx.Ramp(place, 1, 2)] for place in (first + 1, first))
            T.buffer_store(own, T.if_then_else(at % 2 == 1, later, pair), [tirx.Ramp(to + first, 1, 2)])
            if (self.pairs.shape.in_channels - 1 - first) % size == 0:
                alone = self._by_word(cuda_functions.HALF_OF, own, (to + first) // 2, 0)
                kept = T.if_then_else(to_last == first, alone, own[tirx.Ramp(to + first, 1, 2)])
                T.buffer_store(own, kept, [tirx.Ramp(to + first, 1, 2)])

    def _own(self) -> tirx.Buffer:
        return local(self.pairs.shape.dtype, 2 * self.pairs.words)

    def _by_word(self, name: str, own, word: int, *others) -> tirx.Expr:
        both = T.reinterpret("uint32", own[tirx.Ramp(word * 2, 1, 2)])
        return T.reinterpret(f"{self.pairs.shape.dtype}x2", T.call_pure_extern("uint32", name, both, *others))

    def _part_of(self, buffers: list[tirx.Buffer], quad: int) -> tuple[tirx.Buffer, int, int]:
        """Find the operands that a quad is part of: of products of both depths."""
        quads = self.pairs.quads
        return (buffers[-1], 0, 0) if quad == quads - 1 and quads % 2 else (buffers[0], quad // 2, quad % 2)
