"""The gradient of the weight of NHWC halves on tensor cores: products over units of channels.

Two kernels. In the first, a block takes some channels of a pair of images or more, and goes down
their rows; what a warp multiplies has units of 8 gradients as its depth::

    blockIdx.x = parts * channels
      shared = 0
      copies of the first `ahead + 1` steps begin
      for turn, step:                                 a row of inputs and one of gradients
        wait until all threads have copied it
        copies of a later step begin                  by 16 bytes, into a ring of steps in shared
        the next step's copies are there              no thread waits for others in the same step
        threadIdx.y = warp, of some of the channels
          grads[step] = shared                        kept for as many rows as the kernel has
          for kh:      sums[kh] += shared x grads[step - kh]             one instruction
      for kh:
        shared = sums[kh]
        partial[part, kh, kw] = sum over a diagonal of shared

In the second, these are summed: see `part_sums`. What lies where: `dwtir.units`.

Inputs and gradients are copied once, through no register, and not converted. What lies between images stays 0, and a
copy of what is not there brings zeros. Registers hold 4 * KH sums for each unit, and the gradients of KH rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, lcm, prod

from ..epilogue import Epilogue
from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from ..units import LANES, Units
from .base import Values
from .cost import registers_for
from .loops import bind_threads, loops_of, unroll_all
from .matrix_sums import MAX_PRODUCTS, MatrixSums
from .part_sums import part_threads_for, sum_parts
from .tap_cost import LAUNCH, parts_seconds
from .tiles import BLOCK_COUNTS, CLOCK, MAX_LOADS, MAX_SUMS, SHARED

_TOGETHER = (1, 2, 4, 8)
_CHANNELS = tuple(range(LANES, 129, LANES))
_AHEAD = (1, 2, 3, 4, 5)
_PRODUCTS = MAX_PRODUCTS // 2  # 968 take ptxas half a minute
_WARPS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)
_SURE_TAPS = 25  # of fewer it is expected up to 6 % too early, and `tap_sums` 9 % too late
_MOST_COLUMNS = 300  # in all images of a block: of more nothing was measured
# Registers of a thread beside its sums and operands: of every one, and of one more group.
_REGISTERS, _PER_GROUP = 34, 6

# Time: cycles of an SM for 32 bytes of DRAM, a run of channels, a wavefront of shared memory, a product; until a copy
# is there; of a step besides; of a block's end, and a thread's sum there for each column of a tap; what few warps add.
# Fitted to 208 kernels of 20 layers on an H200: the choice is 2.2 % behind the best.
_SECTOR, _RUN, _WAVEFRONT, _PRODUCT = 1.195, 0.118, 0.22, 2.10
_LATENCY, _STEP, _END, _TAP, _FEW = 1384, 11.3, 673, 4.04, 0.418
_UNALIGNED = 1.5  # how often L2 is asked for a sector whose vectors are not side by side in shared memory
_BANDWIDTH = 4.25e12 / 132  # of an SM there
_MUCH, _AT_LEAST = 0.103, 0.7  # of each 64 KB of an SM under way beyond so many: blocks of the same pixels drift apart


@dataclass(frozen=True)
class UnitSums(MatrixSums):
    """Tile of the products, as `Units` has it."""

    layouts = ("NHWC",)
    device = "a GPU from sm_80 on, of whole vectors of channels"
    least = (LANES, 1, 2, 1, 1, 1)
    likeness = ("channels", "together", "warps")

    channels: int
    together: int
    """Channels of a unit, which has 8 gradients: 1, 2, 4 or 8."""
    images: int
    warps: int
    parts: int
    part_threads: int
    ahead: int = 1
    min_blocks: int = 1

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        return super()._is_for(shape, target) and shape.channel_multiplier == 1 and shape.in_channels % LANES == 0

    @classmethod
    def sure(cls, shape: Shape) -> float:
        return 0.91 if prod(shape.kernel) < _SURE_TAPS else super().sure(shape)

    @classmethod
    def tiles(cls, shape: Shape, target: Target) -> Iterator[Self]:
        channels = [n for n in _CHANNELS if shape.in_channels % n == 0]
        for block, together, images, own, ahead in product(channels, _TOGETHER[:3], (2, 4, 8), (1, 2, 4, 8), (1, 2, 3)):
            warps = block // (together * own)
            if block % (together * own) or warps not in _WARPS or images - 2 >= shape.batch:
                continue
            tile = cls(block, together, images, warps, 1, 1, ahead)
            sizes = tile.sizes(shape)
            fitting = [n for n in BLOCK_COUNTS if tile._has_room(sizes, n)]
            if not fitting or sizes.ring * sizes.products > _PRODUCTS or images * shape.out_width > _MOST_COLUMNS:
                continue
            for rounds in (1, 2):
                parts = target.units * fitting[-1] * rounds // (shape.in_channels // block)
                parts = sizes.even_parts(max(1, parts))
                threads = part_threads_for(parts, shape, block, target)
                yield replace(tile, parts=parts, part_threads=threads, min_blocks=fitting[-1])

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        parts = cls.choose(shape, target).parts
        return {
            "channels": [n for n in _CHANNELS if shape.in_channels % n == 0],
            "together": _TOGETHER,
            "images": (2, 4, 8),
            "warps": _WARPS,
            "parts": (1, max(1, parts // 2), 2 * parts),
            "part_threads": (1, 2, 4, 8),
            "ahead": _AHEAD,
            "min_blocks": BLOCK_COUNTS,
        }

    def check(self, shape: Shape, target: Target) -> None:
        self._require_in("together", _TOGETHER)
        for name, factor in (("channels", lcm(LANES, self.together * self.warps)), ("images", 2)):
            value = getattr(self, name)
            self._require(value % factor == 0, name, value, f"a multiple of {factor}")
        whole = shape.in_channels
        self._require(whole % self.channels == 0, "channels", self.channels, f"a divisor of {whole}")
        sizes = self.sizes(shape)
        for name, value, most in (
            ("parts", self.parts, sizes.all_steps),
            ("unrolled loads", sizes.ring * sum(sizes.thread_loads), MAX_LOADS),
            ("unrolled products", sizes.ring * sizes.products, MAX_PRODUCTS),
            ("sums of a thread", sizes.sums, MAX_SUMS),
            ("shared bytes per block", sizes.shared_bytes, target.most_shared_bytes),
        ):
            self._require_most(name, value, most)
        self._require_parts(shape, target, self.channels)
        self._require_launch(target, threads=32 * self.warps)

    def dynamic_bytes(self, shape: Shape, epilogue: Epilogue) -> int:
        return self.sizes(shape).shared_bytes

    def is_promising(self, shape: Shape) -> bool:
        return self._has_room(self.sizes(shape), self.min_blocks)

    def _has_room(self, sizes: Units, blocks: int) -> bool:
        held = sizes.sums + 2 * sizes.own * sizes.groups * sizes.ring
        held += 4 * sizes.together_read * sizes.shape.stride[0] * sizes.spans
        has_room = blocks * (sizes.shared_bytes + 1024) <= SHARED
        needed = _REGISTERS + held + _PER_GROUP * (sizes.groups - 1)
        return has_room and needed <= registers_for(128 * ceil(self.warps * blocks / 4), 1)

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        sizes = self.sizes(shape)
        blocks = self.parts * shape.in_channels / (self.channels * target.units)
        at_a_time = min(self.min_blocks, ceil(blocks))
        runs = sum(sizes.loads) / sizes.vectors
        sector = _SECTOR * (_BANDWIDTH * target.units / target.bandwidth if target.bandwidth else 1)
        sectors = runs * ceil(sizes.vectors / 2) * (1 if sizes.swaps else _UNALIGNED)
        cache = sector * sectors + _RUN * runs + _WAVEFRONT * sizes.wavefronts
        products = _PRODUCT * 4 * ceil(at_a_time * self.warps / 4) * sizes.products
        step = ((at_a_time * cache) ** 3 + products**3 + (_LATENCY / self.ahead) ** 3) ** (1 / 3) + _STEP
        step *= 1 + _MUCH * max(0.0, at_a_time * 2 * sizes.slot_halves * self.ahead / 65536 - _AT_LEAST)
        step *= 1 + _FEW / (at_a_time * self.warps)
        end = _END + _TAP * self.channels * prod(shape.kernel) * sizes.columns / (32 * self.warps)
        first = ceil(blocks / self.min_blocks) * (sizes.block_steps * step + end) / CLOCK
        return float(LAUNCH + first + parts_seconds(shape, self.parts))

    def sizes(self, shape: Shape) -> Units:
        return Units(shape, self.channels, self.together, self.images, self.warps, self.parts, self.ahead)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        from ..compute import async_copy, mma

        for name in ("zero", "clear", "first", "pad", "leave", "taps"):
            bind_threads(sch, *loops_of(sch, name)[-2:])
        copy = async_copy.intrinsic(shape.dtype)
        for name in ("copy", "copy_1", "copy_2", "copy_3"):
            sch.tensorize(loops_of(sch, name)[-1], copy)
        for name in ("right", "left"):
            _, _, lane, *others = loops_of(sch, name)
            sch.bind(lane, "threadIdx.x")
            unroll_all(sch, others)
        _, _, *others, lane, _, _, _ = loops_of(sch, "products")
        unroll_all(sch, others)
        sch.tensorize(lane, mma.intrinsic(shape.dtype))
        sch.bind(loops_of(sch, "multiply")[-1], "threadIdx.y")
        sch.bind(sch.fuse(*loops_of(sch, "block")), "blockIdx.x")
        sum_parts(sch, shape, self.part_threads, self.channels)
