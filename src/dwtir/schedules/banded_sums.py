"""The gradient of the weight of NCHW halves on tensor cores: diagonals of products.

Two kernels. In the first, a warp takes 16 tiles of rows x 8 or 16 outputs at a time, and multiplies
their rows of inputs by their rows of gradients, the tiles being the depth::

    blockIdx.x = parts * channels
      threadIdx.y = warp of the block
        for turn:                                16 tiles
          threadIdx.x = lane:  window[...] = data or 0, grads[rows] = grad_out or 0
          for oh, kh:          sums[kh] += window[oh + kh] x grads[oh]      an instruction for 8 columns
        shared[warp, kh] = sums
      threads = taps
        partial[part, kh, kw] = sum over warps and a diagonal of shared

In the second, these are summed: see `part_sums`. What lies where: `dwtir.diagonals`.

A product takes one instruction where others take 64, halves need no conversion, and of what it computes KW diagonals of
23 are of use. Inputs are loaded in pairs, and with 16 columns gradients too.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod

from ..bands import COLUMNS, window_of
from ..diagonals import Diagonals
from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .base import Values
from .cost import registers_for
from .loops import bind_threads, compute_at, number, unroll_all
from .matrix_sums import MAX_PRODUCTS, MatrixSums
from .part_sums import part_threads_for, sum_parts
from .tap_cost import LAUNCH, parts_seconds
from .tiles import BLOCK_COUNTS, CLOCK, MAX_LOADS, MAX_SUMS, SHARED, even_split, longer

_MANY_TAPS = 25
"""Taps from which on it mostly pays: with fewer, loads take longer than products."""

_APART = 32, 2
"""Banks: how far apart rows of the kernel begin, of which threads read several."""

# Registers beside sums and the inputs of a row of gradients: of every thread, and by row, for loads under way, without
# which ptxas spills a few bytes; and all that a thread needs. With 16 columns those of every thread, for 4 loads of a
# row, and for a row that meets a row.
_REGISTERS, _PER_ROW, _ALL = 47, 3.55, 248
_WIDE, _PER_LOAD, _PER_MEETING = 22, 2.96, 0.25

# Time, fitted to 297 kernels of 13 layers on an H200: the choice is 2.4 % behind the best, 3 % of layers left
# out: cycles of an SM for a load and a product of a warp; of a lone warp's turn, and more by those of the SM; of a
# block's end. Bytes a second. The share of a last round.
_BANDWIDTH, _LAST_ROUND = 4.98e12, 0.8
_LOAD, _PRODUCT, _WAIT, _ALONE, _END = 1.23, 1.29, 304, 9.9, 2050
# With 16 columns a load of tiles as wide as images, of others, and more of a block's end. Of 69 layers the choice is
# 1.3 % behind the best.
_LOAD_ALONE, _LOAD_BESIDE, _WIDE_END = 1.43, 1.05, 1400
_ODD = 45  # more cycles of a turn, of an odd width: of 27 layers the choice is 3.4 % behind the best of both strategies
_WITH_MEMORY = 1.47  # an exponent: a large one takes the longest of two times


@dataclass(frozen=True)
class BandedSums(MatrixSums):
    """Tile of the products, as `Diagonals` has it."""

    layouts = ("NCHW",)
    device = "a GPU from sm_80 on"
    least = (1, 1, 1, 1)
    likeness = ("rows",)

    rows: int
    warps: int
    parts: int
    part_threads: int
    min_blocks: int = 1
    columns: int = COLUMNS

    @classmethod
    def sure(cls, shape: Shape) -> float:
        few = prod(shape.kernel) < _MANY_TAPS and shape.width % 2 == 0 and shape.out_width > 2 * COLUMNS
        return 0.9 if few else super().sure(shape)

    def takes_lines(self, shape: Shape) -> bool:
        return True

    @classmethod
    def tiles(cls, shape: Shape, target: Target) -> Iterator[Self]:
        heights = {even_split(shape.out_height, most) for most in (4, 7, 10, 14)}
        if shape.width % 2:
            heights |= {rows + 1 for rows in heights if rows % 2}
        widths = cls.widths(shape)
        for rows, warps, rounds, columns in product(sorted(heights), (1, 2, 4), (1, 2), widths):
            groups = Diagonals(shape, rows, 1, 1, columns).groups
            warps = min(warps, groups)
            fitting = [n for n in BLOCK_COUNTS if cls(rows, warps, 1, 1, n, columns).is_promising(shape)]
            if not fitting:
                continue
            turns, most = -(-groups // warps), max(1, target.units * fitting[-1] * rounds // shape.out_channels)
            for parts in sorted({min(turns, most), even_split(turns, most)}):
                yield cls(rows, warps, parts, part_threads_for(parts, shape, 1, target), fitting[-1], columns)

    @classmethod
    def widths(cls, shape: Shape) -> tuple[int, ...]:
        """List the columns that tiles may have."""
        return (COLUMNS, 2 * COLUMNS) if Diagonals(shape, 1, 1, 1).can_be_wide else (COLUMNS,)

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        parts = cls.choose(shape, target).parts
        return {
            "rows": [even_split(shape.out_height, most) for most in (1, 2, 4, 7, 10, 14)],
            "warps": (1, 2, 4, 8),
            "parts": (1, max(1, parts // 2), 2 * parts),
            "part_threads": (1, 2, 4, 8),
            "min_blocks": BLOCK_COUNTS,
            "columns": cls.widths(shape),
        }

    def check(self, shape: Shape, target: Target) -> None:
        # Loops over nothing lose their variable, and then their thread.
        sizes = self.sizes(shape)
        self._require_in("columns", self.widths(shape))
        groups = sizes.groups
        rows = shape.out_height + shape.out_height % 2
        self._require_fields(rows=rows, warps=groups, parts=-(-groups // self.warps))
        self._require_most("unrolled loads", int(self._loads(shape, sizes.window_rows, self.rows)), MAX_LOADS)
        self._require_most("unrolled products", self._products(shape), MAX_PRODUCTS)
        self._require_most("sums of a thread", self._sums(shape), MAX_SUMS)
        self._require_parts(shape, target, 1)
        self._require_launch(target, threads=32 * self.warps, shared_bytes=self.shared_bytes(shape))

    def shared_bytes(self, shape: Shape) -> int:
        rows = shape.kernel[0] * self.sizes(shape).kinds
        return 4 * self.warps * (32 * self._sums(shape) + rows * _APART[1])

    def _sums(self, shape: Shape) -> int:
        sizes = self.sizes(shape)
        return 4 * shape.kernel[0] * sizes.kinds * sizes.spans * sizes.beside

    def _loads(self, shape: Shape, inputs: float, grads: float) -> float:
        sizes = self.sizes(shape)
        return 4 * (sizes.spans * (2 - sizes.has_pairs) * inputs + grads)

    def _products(self, shape: Shape) -> int:
        sizes = self.sizes(shape)
        return self.rows * shape.kernel[0] * sizes.spans * sizes.beside

    def _registers(self, shape: Shape) -> float:
        """Estimate what a thread needs for its loads not to wait, and not to spill more than a few bytes."""
        sizes = self.sizes(shape)
        held = self._sums(shape) + 4 * sizes.spans * window_of(shape, 0, 1)
        if self.columns > COLUMNS:
            of_row = _PER_LOAD * (sizes.spans * shape.stride[0] + 1) + _PER_MEETING * shape.kernel[0]
            return _WIDE + held + of_row * self.rows
        least = _REGISTERS + held
        return max(least, min(least + _PER_ROW * self.rows, _ALL))

    def is_promising(self, shape: Shape) -> bool:
        has_room = self.min_blocks * (self.shared_bytes(shape) + 1024) <= SHARED
        return has_room and self._registers(shape) <= registers_for(32 * self.warps, self.min_blocks)

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        sizes, is_wide = self.sizes(shape), self.columns > COLUMNS
        load = (_LOAD_ALONE if sizes.across == 1 else _LOAD_BESIDE) if is_wide else _LOAD
        work = load * self._loads(shape, *sizes.mean_rows) + _PRODUCT * self._products(shape) + _ODD * (shape.width % 2)
        blocks = self.parts * shape.out_channels / target.units
        at_a_time = min(self.min_blocks, ceil(blocks)) * self.warps
        turn = max(_WAIT + _ALONE * work, at_a_time * work)
        rounds = max(1.0, blocks / self.min_blocks)
        rounds += _LAST_ROUND * (ceil(rounds) - rounds)
        block = sizes.turns * turn + _END + _WIDE_END * is_wide
        first = longer(rounds * block / CLOCK, shape.least_bytes / _BANDWIDTH, _WITH_MEMORY)
        return LAUNCH + first + float(parts_seconds(shape, self.parts))

    def sizes(self, shape: Shape) -> Diagonals:
        return Diagonals(shape, self.rows, self.warps, self.parts, self.columns)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        from ..compute.mma import intrinsic

        names = ("pad", "pairs", "grad_pairs", "grads", "products", "leave", "diagonals")
        pad, pairs, grad_pairs, grads, conv, leave, taps = map(sch.get_sblock, names)
        drawn = {field: number(sch, getattr(self, field)) for field in ("rows", "columns")}
        sizes = replace(self, **drawn).sizes(shape)

        # 1. Blocks, and their taps.
        has_parts = number(sch, self.parts) > 1
        tap = sch.cache_write(taps, 0, "local")
        if not has_parts:
            sch.reverse_compute_inline(sch.get_sblock("epilogue"))
        p, c, m, kh, kw = sch.get_loops(tap)
        sch.reorder(p, c, m, kh, kw)
        block = sch.fuse(p, c, m)
        _, ty, tx = sch.split(sch.fuse(kh, kw), [None, self.warps, 32])
        sch.bind(block, "blockIdx.x")
        bind_threads(sch, ty, tx)
        compute_at(sch, taps, tx)

        # 2. The sums of warps.
        compute_at(sch, leave, block, "shared")
        sch.storage_align(leave, 0, 3, *_APART)
        _, _, _, warp, kh, o, s, i, j = sch.get_loops(leave)
        m, h = sch.split(i, [None, 2])
        x, e = sch.split(j, [None, 2])
        sch.reorder(warp, m, x, kh, o, s, h, e)
        bind_threads(sch, warp, sch.fuse(m, x))
        unroll_all(sch, [kh, o, s, h])
        sch.vectorize(e)

        compute_at(sch, conv, warp, "local")
        *_, kh, s, turn, oh, lane, h, e, k = sch.get_loops(conv)
        sch.reorder(turn, oh, kh, s, lane, h, e, k)
        *_, kh_zero, s_zero, lane_zero, h_zero, e_zero = sch.get_loops(sch.decompose_reduction(conv, turn))
        sch.reorder(lane_zero, kh_zero, s_zero, h_zero, e_zero)
        sch.bind(lane_zero, "threadIdx.x")
        unroll_all(sch, [kh_zero, s_zero, h_zero, e_zero])

        # 3. Inputs and gradients of a group of tiles, in the registers of the lanes.
        loads = [(pairs, 6, -4, False), (pad, 6, -4, sizes.has_pairs), (grads, 5, -3, False), (grad_pairs, 5, -4, True)]
        for load, count, place, is_pair in loads:
            compute_at(sch, load, turn, "local")
            loops = sch.get_loops(load)[-count:]
            holder = loops.pop(place)
            sch.reorder(holder, *loops)
            sch.bind(holder, "threadIdx.x")
            if is_pair:
                sch.vectorize(loops.pop())
            unroll_all(sch, loops)

        # 4. All products of a group in straight line.
        unroll_all(sch, [oh, kh, s])
        sch.tensorize(lane, intrinsic(shape.dtype))

        # 5. Sums of all blocks, by the second kernel.
        if has_parts:
            sum_parts(sch, shape, self.part_threads, 1)
