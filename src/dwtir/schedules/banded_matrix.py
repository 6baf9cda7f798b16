"""NCHW halves on tensor cores: every warp multiplies its inputs by a banded matrix.

Loop nest, for the 16 tiles of rows x 8 outputs of one channel that are a warp's::

    blockIdx.x = (groups of 16 tiles / warps) * c
      threadIdx.y = warp of the block
        for step of the kernel's rows:
          threadIdx.x = lane:  window[rows + kernel_rows - 1, depth] = data or 0
          threadIdx.x = lane:  band[kernel_rows, depth] = weight or 0
          for kh, oh, depth:   acc[oh] += window[oh + kh] x band[kh]       one instruction
        threadIdx.x = lane:    out = epilogue(acc)

Of a product's multiply-adds KW / 16 are of use, of wider kernels KW / 32 and so on; but it takes one instruction where
others take 64, and halves need no conversion.

Where blocks have whole planes, these come by vectors into shared memory, with rows of zeros around, while those before
are multiplied, and results go back the same way. Halves of a product are then tiles side by side, which share what
lies between. Planes, and tiles of large images, lie apart as banks want it.

Else an input row is loaded for the lanes that multiply it, 4 bytes each, and serves all `rows` outputs above it; 8
bytes are half as many loads, which pay in low tiles. Lanes with the same inputs in a row hold neighbouring tiles, so
that a warp loads whole cache lines.

Of an odd width every other row begins in the middle of a pair: its loads, band and results begin a column earlier, and
what lies beside the image is taken off. See `dwtir.bands`.

Where every output sees all of a small image, a tile of the whole height goes by rows of the image: none of its products
is with padding.

Registers: the window and the band of a step, or two bands, and 4 * rows sums; if one step takes the whole kernel, the
window goes by row after row. Rows of an odd width wait for many warps: registers are few, and tiles low; with a stride
lower still.

A zero times an input that is not finite is NaN, here as in all products on tensor cores: it may make outputs NaN that
do not see it, here up to 7 * SW + 15 columns away, of those of a dilation's part.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import ClassVar

from ..bands import Bands
from ..epilogue import Epilogue
from ..shape import Shape
from ..target import Target
from ..typed import LoopRV, SBlockRV, Schedule, Self
from . import band_cost, band_tiles, plane_tiles
from .band_tiles import FEW_TAPS, HIGH, LOW, height, heights, kernel_rows
from .base import Strategy, Values, by_time, varied
from .cost import registers_for
from .loops import bind, compute_at, unroll_all
from .register_window import RegisterWindow
from .tiles import BLOCK_COUNTS, CLOCK, MAX_LOADS, MAX_SIDE, SHARED, even_split

_MAX_PRODUCTS = 1024
"""Products of a step, in straight line."""

_LEAST_TAPS = 25
"""Products of an input with weights from which on the tensor cores pay: of a 5x5 kernel."""

_ODD_TAPS = FEW_TAPS, 144
"""The same in rows of an odd width, which others load one by one; and of an input, where copies begin to pay."""

_SECOND_KIND = 40
"""Registers for the addresses and tests of a second kind of row, and for what is taken off."""

_CROWD, _MOST_TAPS = 20, 49
"""Warps for each SM from which on, and taps up to which, some multiply while others wait."""

_LOW_TAPS = 25
"""Taps up to which low tiles are faster."""

_OWN, _NARROW, _MOST_LOADS = 8, (16, 12), 140
"""With a stride, rows of inputs that are a tile's own; too few columns, of few taps and of more; and most loads."""


@dataclass(frozen=True)
class BandedMatrix(Strategy):
    """Tile of the products with banded matrices."""

    layouts: ClassVar[tuple[str, ...]] = ("NCHW",)
    dtypes = ("float16", "bfloat16")
    needs_mma = True
    registers = (295, 350)
    """That a tile may count on without spilling, if it takes some steps, or one."""
    cycles = (2.0, 2.5, 1.6, 2.0, 50.0, 100.0)
    """Of an SM for an input, a weight, a product and a store of a warp; a step; and a start."""
    device = "a GPU from sm_80 on (a gradient: with stride 1 and channel_multiplier 1)"

    rows: int
    """Output rows of a tile, of 8 columns each."""
    kernel_rows: int
    """Rows of the kernel in a step; of the image, if a tile has all of its rows and no result sees
    but a part of them."""
    warps: int
    """Warps of a block."""
    min_blocks: int = 1
    loads: str = "pairs"
    """What is loaded at once: "pairs" of inputs by a lane, "fours" where rows are aligned to 8 bytes, or whole
    "planes" by a block, into shared memory, by which results leave, too."""
    turns: int = 1
    """Groups that a warp has one after another, if they are of planes."""

    @classmethod
    def claims(cls, shape: Shape, target: Target) -> bool:
        """Tell whether there are so many taps to an input that the tensor cores may pay."""
        if not super().claims(shape, target):
            return False
        taps, to_an_input = prod(shape.kernel), prod(shape.kernel) / prod(shape.stride)
        is_odd = Bands(shape, 1, 1).is_odd
        pays = taps >= _ODD_TAPS[0] and to_an_input < _ODD_TAPS[1] if is_odd else to_an_input >= _LEAST_TAPS
        has_tile = pays and len(cls._tiles(shape)) > 0
        return has_tile or (cls._by_planes(shape, target) or cls._strided(shape, target)) is not None

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        """Tell whether it is faster than a window in registers.

        It is where rows are even; of odd ones the window's model does not know that memory is slower.
        """
        own = cls.choose(shape, target).expected_seconds(shape, target)
        if own is None:
            return True
        other = RegisterWindow.choose(shape, target).expected_seconds(shape, target)
        return own < other + shape.least_bytes * band_cost.OF_ANY_ROWS

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        forward = shape.operation == "forward"
        turned = shape.stride == (1, 1) and shape.channel_multiplier == 1
        return super()._is_for(shape, target) and (forward or turned)

    @classmethod
    def choose(cls, shape: Shape, target: Target) -> Self:
        """Choose the tile that has planes, or a stride, or else that whose loads and products take the least time."""
        if tile := cls._by_planes(shape, target) or cls._strided(shape, target):
            return tile
        tiles = cls._tiles(shape)
        return min(tiles, key=lambda tile: tile._cycles(shape, target), default=cls(1, 1, 1))._in_turns(shape, target)

    def _in_turns(self, shape: Shape, target: Target) -> Self:
        """Of many warps, hold down registers or tiles, that more have room."""
        bands, taps = self.sizes(shape), prod(shape.kernel)
        is_whole = _is_in_one_step(bands) and bands.depth_steps * prod(bands.parts) == 1
        if not is_whole or taps > _MOST_TAPS:
            return self
        if bands.groups * shape.result_channels < _CROWD * target.units:
            return self
        if bands.has_fours and taps <= _LOW_TAPS:
            return replace(self, rows=even_split(height(shape), LOW), min_blocks=6, loads="fours")
        return replace(self, warps=min(2, self.warps), min_blocks=10)

    @classmethod
    def _by_planes(cls, shape: Shape, target: Target) -> Self | None:
        def bands(rows: int) -> Bands:
            return cls(rows, shape.kernel[0], 1, loads="planes").sizes(shape)

        found = plane_tiles.choose(bands, shape, target)
        return None if found is None else cls(kernel_rows=shape.kernel[0], loads="planes", **found)

    @classmethod
    def _strided(cls, shape: Shape, target: Target) -> Self | None:
        """Return the low tile of many blocks of one warp, if there is a stride and each scheduler has a warp."""
        taps, stride = prod(shape.kernel), shape.stride[0]
        is_low = taps <= _LOW_TAPS
        if max(shape.stride) == 1 or taps < _LEAST_TAPS or shape.result_width < _NARROW[not is_low]:
            return None
        tile = cls(even_split(height(shape), max(1, _OWN // stride)), shape.kernel[0], 1, 16)
        bands = tile.sizes(shape)
        is_few = bands.groups * shape.result_channels < 4 * target.units
        if is_few or bands.is_copied or bands.is_odd or bands.loads > _MOST_LOADS or not tile.is_promising(shape):
            return None
        return replace(tile, loads="fours", min_blocks=12 if is_low else 16) if bands.has_fours else tile

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> tuple[Self, ...]:
        """List the tile chosen; of an odd width the tiles expected to be fastest, in order."""
        chosen = cls.choose(shape, target)
        if not chosen.sizes(shape).alternates:
            return (chosen,)
        tiles = by_time(dict.fromkeys(cls._tiles(shape)), shape, target)
        return varied(tiles, lambda tile: tile.rows)

    @classmethod
    def _tiles(cls, shape: Shape) -> list[Self]:
        """List the tiles worth comparing; in rows of an odd width those of few registers, if any has enough."""
        tiles = [cls(*rows, 1) for rows in product(heights(shape), kernel_rows(shape))]
        tiles = [tile for tile in tiles if band_tiles.is_known(tile.sizes(shape))]
        usual = ((tile, blocks) for tile in tiles for blocks in band_tiles.blocks(tile.sizes(shape)))
        for of_blocks in (usual, product(tiles, [band_tiles.ROOMY])):
            found = (replace(tile, warps=warps, min_blocks=blocks) for tile, (warps, blocks) in of_blocks)
            if promising := [tile for tile in found if tile.is_promising(shape)]:
                return promising
        return []

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        return {
            "rows": heights(shape),
            "kernel_rows": kernel_rows(shape),
            "warps": (1, 2, 4, 8),
            "min_blocks": BLOCK_COUNTS,
            "turns": (1, 2, 4) if cls.choose(shape, target).loads == "planes" else (1,),
        }

    def is_promising(self, shape: Shape) -> bool:
        bands = self.sizes(shape)
        needed = 30 + bands.loads + 4 * self.rows + bands.band_registers + _SECOND_KIND * bands.alternates
        return (
            self.kernel_rows <= bands.product_rows
            and needed <= self.registers[bands.kernel_steps == 1]
            and bands.loads <= MAX_LOADS
            and bands.products <= _MAX_PRODUCTS
            and not (bands.alternates and self._least(bands, needed) > self._has)
        )

    def with_room_for(self, shape: Shape, epilogue: Epilogue, target: Target) -> Self:
        """Take small blocks: others start while some end with an epilogue."""
        if self.loads == "planes":
            blocks = SHARED // (self.dynamic_bytes(shape, epilogue) + 1024)
            return replace(self, min_blocks=min(self.min_blocks, max(1, blocks)))
        rows = self.rows if self.loads == "pairs" else even_split(height(shape), HIGH)
        tile = replace(self, rows=rows, warps=min(2, self.warps), min_blocks=8, loads="pairs")
        bands = tile.sizes(shape)
        fits = max(shape.stride) == 1 and _is_in_one_step(bands) and tile._least(bands, 0) <= tile._has
        return tile if fits and epilogue.waits else self

    def dynamic_bytes(self, shape: Shape, epilogue: Epilogue) -> int:
        bands = self.sizes(shape)
        if not bands.is_staged:
            return 0
        return self.warps // bands.sides * bands.staged_bytes(self.turns, "residual" in epilogue.operands(shape))

    @property
    def _has(self) -> int:
        return registers_for(32 * self.warps, self.min_blocks)

    def _least(self, bands: Bands, needed: int) -> int:
        """Estimate the registers without which a tile spills; in one step, rows come and go."""
        least = _SECOND_KIND + 4 * self.rows + bands.band_registers * bands.depth_steps
        return least if bands.kernel_steps == 1 else needed

    def check(self, shape: Shape, target: Target) -> None:
        self._require_most("rows", self.rows, MAX_SIDE)
        bands = self.sizes(shape)
        self._require_in("loads", ("pairs", *["fours"] * bands.has_fours, *["planes"] * bands.can_stage))
        self._require_most("kernel_rows", self.kernel_rows, bands.product_rows)
        self._require_most("warps", self.warps, bands.groups, ", one a group")
        if bands.is_staged:
            self._require(self.warps % bands.sides == 0, "warps", self.warps, f"a multiple of {bands.sides}")
            most = bands.groups // self.warps
            self._require_most("turns", self.turns, most, ", one a group of each warp")
        else:
            self._require_in("turns", (1,))
        self._require_most("unrolled loads", bands.loads, MAX_LOADS)
        self._require_most("unrolled products", bands.products, _MAX_PRODUCTS)
        self._require_launch(target, threads=32 * self.warps)

    def sizes(self, shape: Shape) -> Bands:
        is_staged = self.loads == "planes"
        return Bands(shape, self.rows, self.kernel_rows, run=4 if self.loads == "fours" else 2, is_staged=is_staged)

    def expected_seconds(self, shape: Shape, target: Target) -> float | None:
        return self._cycles(shape, target) / CLOCK if self.sizes(shape).alternates else None

    def _cycles(self, shape: Shape, target: Target) -> float:
        """Estimate the cycles of an SM, which needs four warps to be busy, for comparison with other tiles."""
        bands = self.sizes(shape)
        if bands.alternates:
            return CLOCK * band_cost.expected_seconds(bands, self.warps, self._has, target.units)
        load, weight, multiply, store, begin, start = self.cycles
        weights = 4 * bands.band_rows(self.kernel_rows) * bands.depth_steps
        step = load * bands.loads + weight * weights + multiply * bands.products + begin
        stores = 2 * self.rows * (1 + shape.result_width % 2)
        warp = bands.kernel_steps * step + stores * store + start
        warps = bands.groups * shape.result_channels / target.units
        return warp * max(4.0, warps)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        pad, band, conv, epilogue, store = map(sch.get_sblock, ("pad", "band", "depthwise_conv2d", "epilogue", "store"))
        bands = self.sizes(shape)
        warp, lane = self._deal(sch, shape, store)

        # Results leave in pairs, and so come what they are added to.
        compute_at(sch, epilogue, lane)
        sch.set_scope(epilogue, 0, "local")
        unroll_all(sch, sch.get_loops(epilogue)[-3:])
        loads = place_residual(sch, epilogue, lane)
        has_residual = bool(loads)
        if bands.alternates_results:
            unroll_all(sch, sch.get_loops(store)[-2:])
        else:
            loads.append(store)
        for block in loads:
            *outer, pair = sch.get_loops(block)[-3:]
            unroll_all(sch, outer)
            sch.vectorize(pair) if shape.result_width % 2 == 0 else sch.unroll(pair)
        self._multiply(sch, shape, (pad, band, conv), warp)
        if bands.is_staged:
            plane_tiles.stage(sch, bands, store, self.warps, self.turns, has_residual=has_residual)

    def _deal(self, sch: Schedule, shape: Shape, store: SBlockRV) -> tuple[LoopRV, LoopRV]:
        """Give a warp a group of tiles; lanes hold what the tensor cores want of them."""
        c, group, rows, lane, *pair = sch.get_loops(store)
        bands = self.sizes(shape)
        blocks, *turns, warp = sch.split(group, [None, *[self.turns] * bands.is_staged, self.warps])
        outer = (c, blocks) if bands.is_copied else (blocks, c)  # as planes lie
        sch.reorder(*outer, *turns, warp, lane, rows, *pair)
        bind(sch, outer, warp, lane)
        return warp, lane

    def _multiply(self, sch: Schedule, shape: Shape, blocks: tuple[SBlockRV, SBlockRV, SBlockRV], warp: LoopRV) -> None:
        """Compute the sums of a warp from the blocks `pad`, `band` and `depthwise_conv2d`."""
        from ..compute.mma import beside, intrinsic

        pad, band, conv = blocks
        bands = self.sizes(shape)

        # 1. The sums of a warp, for a few rows of the kernel at a time.
        compute_at(sch, conv, warp, "local")
        *_, tile, oh, kh, depth, lane, half, pair, k = sch.get_loops(conv)
        step, kh = sch.split(kh, [None, self.kernel_rows])
        sch.reorder(tile, step, kh, oh, depth, lane, half, pair, k)
        *_, oh_zero, lane_zero, half_zero, pair_zero = sch.get_loops(sch.decompose_reduction(conv, step))
        sch.reorder(lane_zero, oh_zero)
        sch.bind(lane_zero, "threadIdx.x")
        unroll_all(sch, [oh_zero, half_zero, pair_zero])

        # 2. Inputs and weights of a step, in the registers of the lanes that multiply them.
        for load, count in ((pad, 6 - bands.is_staged), (band, 5)):
            early = load is band and bands.is_staged and bands.kernel_steps == 1
            compute_at(sch, load, sch.get_loops(conv)[0] if early else step, "local")
            loops = sch.get_loops(load)[-count:]
            holder = loops.pop(2)
            sch.reorder(holder, *loops)
            sch.bind(holder, "threadIdx.x")
            if load is pad and self.loads == "fours":
                *loops, further, half, one = loops
                sch.reorder(half, further, one)
                sch.vectorize(sch.fuse(further, one))
                loops.append(half)
            elif load is pad and (bands.is_copied or not bands.is_odd):
                sch.vectorize(loops.pop())
            unroll_all(sch, loops)

        # 3. All products of a step in straight line.
        unroll_all(sch, [kh, oh, depth])
        sch.tensorize(lane, beside(shape.dtype) if bands.is_staged else intrinsic(shape.dtype))


def place_residual(sch: Schedule, epilogue: SBlockRV, thread: LoopRV) -> list[SBlockRV]:
    """Load the image that the epilogue adds, if it adds one, where the threads want it."""
    if "held" not in [region.source.name for region in sch.get(epilogue).reads]:
        return []
    load = sch.get_sblock("residual")
    compute_at(sch, load, thread)
    sch.set_scope(load, 0, "local")
    return [load]


def _is_in_one_step(bands: Bands) -> bool:
    return bands.kernel_steps == 1 and not (bands.is_copied or bands.alternates)
