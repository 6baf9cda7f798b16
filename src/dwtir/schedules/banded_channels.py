"""NHWC halves on tensor cores by way of shared memory.

Loop nest, for a panel of 16 tiles of rows x 8 results, of some channels::

    blockIdx.x = (images / images of a panel) * panels down * across * channels
      threads:  filters = weight;  staged = data or 0            shared memory
      threadIdx.y = warp, with `channels` channels
        threadIdx.x = lane:  band[KH, depth] = filters or 0      registers
        for row of a tile's inputs:
          threadIdx.x = lane:  window = staged
          for the tile's rows that it meets:  acc += window x band[kh]     one instruction
        threadIdx.x = lane:  staged = epilogue(acc)
      threads:  out = staged

The products are those of `banded_matrix`. Global memory is loaded and stored by vectors of 8 channels; how inputs lie
in shared memory, `dwtir.panels` says. Results take the place of their channels' inputs there.

Below 7x7 the float32 units are as fast.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod

from ..bands import COLUMNS, TILES
from ..epilogue import Epilogue
from ..panels import Panels
from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .base import Strategy, Values, by_time, expected, is_beaten
from .channel_vector import ChannelVector
from .cost import registers_for
from .loops import bind_threads, block_names, loops_of
from .row_stream import RowStream
from .tiles import BLOCK_COUNTS, LEAST_SHARED, REGISTERS, SHARED, even_split

_MAX_PRODUCTS = 1024
"""Products of a warp, in straight line."""

_LAUNCH, _TURN = 2.3e-6, 1e-6
_PER_LOAD, _PER_RESULT, _PER_PRODUCT, _PER_WINDOW = 0.16e-9, 0.94e-9, 1.3e-9, 1.6e-9
"""Seconds of the kernel, of each time that blocks follow others, and of an SM for a vector of inputs,
one of results, a product and a row of inputs of a warp, as measured on an H200."""


@dataclass(frozen=True)
class BandedChannels(Strategy):
    """Tile of the products with banded matrices, as `Panels` has it, with 2 or 4 channels of a warp."""

    layouts = ("NHWC",)
    dtypes = ("float16", "bfloat16")
    needs_mma = True
    device = "a GPU from sm_80 on (with channels by eights, channel_multiplier 1, stride 1 and dilation 1)"

    rows: int
    down: int
    across: int
    warps: int
    channels: int
    min_blocks: int = 1

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        return (
            super()._is_for(shape, target)
            and shape.channel_multiplier == 1
            and shape.in_channels % 8 == 0
            and shape.stride == shape.dilation == (1, 1)
        )

    @classmethod
    def claims(cls, shape: Shape, target: Target) -> bool:
        """Tell whether there is a tile whose inputs shared memory has room for."""
        return super().claims(shape, target) and any(True for _ in cls._tiles(shape, target))

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        if not RowStream.claims(shape, target):
            return False
        others = ChannelVector, RowStream  # the quicker to choose first
        return not is_beaten(expected(cls, shape, target), others, shape, target)

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> tuple[Self, ...]:
        return by_time(cls._tiles(shape, target), shape, target)[:8] or (cls(1, 1, 1, 4, 2),)

    @classmethod
    def _tiles(cls, shape: Shape, target: Target) -> Iterator[Self]:
        height, width = shape.result_height, -(-shape.result_width // COLUMNS)
        heights, widths = (
            {even_split(n, most) for most in sizes} for n, sizes in ((height, (2, 4, 5, 7)), (width, (4, 8)))
        )
        for rows, across, (warps, channels) in product(heights, widths, ((4, 4), (8, 2))):
            down = min(-(-height // rows), TILES // (1 << (across - 1).bit_length()))
            tile = cls(rows, down, across, warps, channels)
            taken = tile.sizes(shape).shared_bytes(shape.operation == "forward")
            needed = 32 * warps * -(-tile._registers(shape) // 8) * 8
            blocks = min(REGISTERS // needed, SHARED // (taken + 1024))
            tile = replace(tile, min_blocks=max(1, blocks))
            if taken <= min(LEAST_SHARED, target.most_shared_bytes) and tile.is_promising(shape):
                yield tile

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        height, width = shape.result_height, -(-shape.result_width // COLUMNS)
        return {
            "rows": [even_split(height, n) for n in (2, 3, 4, 5, 7)],
            "down": (1, 2, 4),
            "across": [even_split(width, n) for n in (1, 2, 4, 8)],
            "warps": (4, 8),
            "channels": (2, 4),
            "min_blocks": BLOCK_COUNTS[:4],
        }

    def is_promising(self, shape: Shape) -> bool:
        return self._registers(shape) <= registers_for(32 * self.warps, self.min_blocks)

    def _registers(self, shape: Shape) -> int:
        band = 2 * self.sizes(shape).depth_steps * shape.kernel[0]
        return (band + 4 * self.rows + 8) * self.channels + 16

    def check(self, shape: Shape, target: Target) -> None:
        panels = self.sizes(shape)
        height, across = shape.result_height, -(-shape.result_width // COLUMNS)
        self._require_fields(rows=height, down=-(-height // self.rows), across=across)
        self._require_most("tiles of an image", self.down * panels.pitch, TILES)
        self._require_in("channels", (2, 4))
        together = self.warps * self.channels
        self._require(together % 8 == 0, "channels of a block", together, "a multiple of 8")
        products = self.rows * shape.kernel[0] * panels.depth_steps * self.channels
        self._require_most("unrolled products", products, _MAX_PRODUCTS)
        self._require_most("shared bytes per block", panels.shared_bytes(shape.operation == "forward"), LEAST_SHARED)
        self._require_launch(target, threads=32 * self.warps)

    def suits(self, shape: Shape, epilogue: Epilogue) -> bool:
        """Refuse much arithmetic behind the sums of small images: all warps wait for it."""
        exponentials = epilogue.has_exponential and shape.result_width < 32
        return not exponentials and (self.sizes(shape).images < 4 or not epilogue.waits)

    def dynamic_bytes(self, shape: Shape, epilogue: Epilogue) -> int:
        return self.sizes(shape).shared_bytes("residual" in epilogue.operands(shape))

    def sizes(self, shape: Shape) -> Panels:
        return Panels(shape, self.rows, self.down, self.across, self.warps, self.channels)

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        panels = self.sizes(shape)
        blocks = prod(panels.blocks) / target.units
        at_a_time = min(self.min_blocks, ceil(blocks))
        turns = ceil(blocks / at_a_time)
        steps = self.warps * self.channels * panels.depth_steps
        block = (
            _PER_LOAD * panels.images * panels.staged_rows * panels.used_slots * panels.pieces
            + _PER_RESULT * prod(shape.result_shape) / (8 * prod(panels.blocks))
            + (_PER_PRODUCT * self.rows * shape.kernel[0] + _PER_WINDOW * panels.input_rows) * steps
        )
        return _LAUNCH + (turns - 1) * _TURN + max(blocks, min(turns, 2) * at_a_time) * block

    def apply(self, sch: Schedule, shape: Shape) -> None:
        from ..compute.mma import intrinsic

        sch.bind(sch.fuse(*loops_of(sch, "panels")), "blockIdx.x")
        for name in block_names(sch):
            if name in ("gather", "filters", "band", "residual", "epilogue", "store"):
                bind_threads(sch, *loops_of(sch, name)[-2:])
            elif name == "products":
                sch.bind(loops_of(sch, name)[-1], "threadIdx.y")
            elif name == "zero" or name.startswith("window"):
                bind_threads(sch, loops_of(sch, name)[-1])
            elif name.startswith("products"):
                sch.tensorize(loops_of(sch, name)[-4], intrinsic(shape.dtype))
