"""CPU: channels in parallel, outputs in vector registers.

Loop nest::

    NCHW                                     NHWC
    parallel n * c                           parallel n * (oh / rows)
      padded[...] = one channel or 0           padded[...] = the input rows or 0
      for oh / rows, ow / (cols*lanes)         for ow / cols, c / lanes
        for kh: for kw:                          for kh: for kw:
          rows x cols sums of `lanes` columns      rows x cols sums of `lanes` channels
        out = epilogue(sums)                     out = epilogue(sums)

The sums of a tile stay in rows * cols vector registers, of 16 or 32, while the taps go by; each broadcasts one weight
(NCHW) or loads a vector of them (NHWC). The padded copy costs one pass through the cache and frees the taps of all
tests. In NCHW with a stride it is of the rows of a tile, which stay in the first cache, and goes on to
``phases[..., w % SW, w / SW]``.
"""

from dataclasses import dataclass

from ..shape import Shape
from ..target import Target
from ..typed import LoopRV, SBlockRV, Schedule, Self
from .base import Strategy, Values
from .loops import compute_at, get_blocks, unroll_all
from .tiles import even_tile, phases, step

_SUMS = 12
"""Vector registers for sums, of 16; AVX-512 has 32."""

_STACK = 1023
"""Bytes of sums that TVM has on the stack, where LLVM sees that nothing else is there: it stores
larger ones after each tap (5x5 NHWC: 1.6 to 2 times as slow)."""


@dataclass(frozen=True)
class Cpu(Strategy):
    """Tile of the CPU schedule."""

    on_gpu = False
    device = "a CPU"

    rows: int
    cols: int
    """Output rows of a tile, and its width in vectors (NCHW) or pixels (NHWC)."""
    lanes: int
    """float32 values of one vector."""

    @classmethod
    def choose(cls, shape: Shape, target: Target) -> Self:
        """Fill the registers with sums, in vectors no wider than what they run over.

        A tall tile of one vector shares the input rows of its taps. In NHWC neighbours share as well where kernels are
        large or maps small; and cores share the rows, so that a tile leaves some for each.
        """
        lanes = max(_lanes(shape, target))
        if shape.layout == "NCHW":
            return cls(even_tile(shape, 0, max(1, 8 // phases(shape, 1))), 1, lanes)
        if shape.channel_multiplier > 1:  # a vector of outputs gathers its inputs
            lanes = max(n for n in _lanes(shape, target) if n <= 4)
        rows = even_tile(shape, 0, 4)
        wide = 4 if shape.kernel[1] >= 5 or shape.result_height <= 8 else 2
        most = min(_SUMS if target.vector_bytes < 64 else 16, _STACK // (4 * lanes))
        return cls(rows, max(1, min(wide, most // rows, shape.result_width)), lanes)

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        sizes = (1, 2, 3, 4, 6, 7, 8)
        return {"rows": sizes, "cols": sizes, "lanes": _lanes(shape, target)}

    def check(self, shape: Shape, target: Target) -> None:
        self._require_in("lanes", _lanes(shape, target))
        self._require_most("sums of a tile", self.rows * self.cols, 64)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        pad, conv, epilogue = get_blocks(sch)
        phased = phases(shape, 1) > 1
        vector = [self.lanes, phases(shape, 1)] if phased else [self.lanes]

        # 1. Cores share the channels (NCHW) or the rows (NHWC); `tile` is one set of sums.
        if shape.layout == "NCHW":
            n, c, oh, ow = sch.get_loops(epilogue)
            by, oh = sch.split(oh, [None, self.rows])
            bx, ow, *lane = sch.split(ow, [None, self.cols, *vector])
            core = sch.fuse(n, c)
            sch.reorder(core, by, bx, oh, ow, *lane)
            tile, copied = bx, by if step(shape, 1) > 1 else core
        else:
            n, oh, ow, c = sch.get_loops(epilogue)
            by, oh = sch.split(oh, [None, self.rows])
            bx, ow = sch.split(ow, [None, self.cols])
            bc, lane = sch.split(c, [None, self.lanes])
            sch.reorder(n, by, bx, bc, oh, ow, lane)
            core = copied = sch.fuse(n, by)
            tile = bc
        sch.parallel(core)

        # 2. The padded input of a core, once, or of a row of tiles.
        compute_at(sch, conv, tile)
        copy_input(sch, pad, conv, copied, step(shape, 1) if shape.layout == "NCHW" else 1)

        # 3. The taps around the sums, the sums in registers: unrolled, they are scalars and
        #    vectors to LLVM. Columns past the edge are computed in the slack and not stored.
        if shape.layout == "NCHW":
            *_, conv_oh, conv_ow, kh, kw = sch.get_loops(conv)
            if phased:  # the columns that have the same taps are a vector
                conv_ow, conv_lane, phase = sch.split(conv_ow, [None, self.lanes, phases(shape, 1)])
                sch.reorder(conv_ow, phase, conv_lane)
                conv_ow = sch.fuse(conv_ow, phase)
            else:
                conv_ow, conv_lane = sch.split(conv_ow, [None, self.lanes])
        else:
            *_, conv_oh, conv_ow, conv_lane, kh, kw = sch.get_loops(conv)
        sch.reorder(kh, kw, conv_oh, conv_ow, conv_lane)
        sch.vectorize(conv_lane)
        unroll_all(sch, [conv_oh, conv_ow, oh, ow])
        *_, zero_oh, zero_ow, zero_lane = sch.get_loops(sch.decompose_reduction(conv, kh))
        unroll_all(sch, [zero_oh, zero_ow])
        sch.vectorize(zero_lane)
        if shape.layout == "NHWC":
            sch.vectorize(lane)


def copy_input(sch: Schedule, pad: SBlockRV, conv: SBlockRV, at: LoopRV, stride: int) -> None:
    """Copy the padded input below a loop.

    With a stride, columns that neighbouring outputs read at a tap come side by side, for a vector to load. LLVM makes
    shuffles of unrolled columns, else it copies one by one.
    """
    if stride > 1:
        columns = sch.cache_read(conv, 0, "global")
        sch.transform_layout(
            columns, ("write", 0), lambda n, c, h, w: [n, c, h, w % stride, w // stride], pad_value=0.0
        )
        compute_at(sch, columns, at)
        *_, across = sch.get_loops(columns)
        sch.unroll(sch.split(across, [None, stride])[1])
    compute_at(sch, pad, at)


def _lanes(shape: Shape, target: Target) -> tuple[int, ...]:
    widest = max(1, target.vector_bytes // 4)
    if shape.layout == "NHWC":
        return tuple(n for n in range(1, widest + 1) if shape.result_channels % n == 0)
    width = -(-shape.result_width // phases(shape, 1))
    return tuple(n for n in (1, 2, 4, 8, 16) if n <= widest and (n == 1 or n // 2 < width))
