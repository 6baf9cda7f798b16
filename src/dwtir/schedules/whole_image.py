"""Every thread computes one channel of one small image, all of which it has in registers.

Loop nest in NCHW, for blocks of `thread_y` images x `thread_x` channels, `turns` times over::

    blockIdx.x = (n / (turns * thread_y)) * (c / thread_x)
      ahead = data                                                 (all threads)
      filters[thread_x, KH * KW] = weight as float32
      for turn:
        planes[thread_y, thread_x planes] = ahead;  ahead = data of the next turn
        threadIdx.y = n    threadIdx.x = c
          window[H, W] = planes as float32
          for some of the result's rows:
            for kh, kw: for those oh, ow of the rows whose input is not padding:
              acc[oh, ow] += window[oh * SH + kh * DH - top, ...] * filters[kh, kw]
          results = epilogue(acc)
        out = results                                              (all threads)

All loops of a thread are written out, for each tap over the results that it has an input for.

Planes lie apart in shared memory by an odd number of vectors, so that a warp reads all banks, and are copied as one
piece. In NHWC neighbouring threads have neighbouring channels: loads, weights and stores are a thread's own. With
several turns it goes through the image row by row there, and loads each row half an image ahead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, log2, prod

from ..epilogue import Epilogue
from ..images import Images, is_small
from ..shape import Shape
from ..target import Target
from ..typed import Schedule
from .base import Strategy, Values, expected, is_beaten, paying, varied
from .channel_vector import ChannelVector
from .cost import registers_for
from .loops import bind, bind_threads, loops_of
from .register_window import RegisterWindow
from .row_stream import RowStream
from .split_image import SplitImage
from .stream_cost import shared_bytes
from .tiles import BLOCK_COUNTS, CLOCK, divisors, even_split, longer

_MOST_PIXELS = 64
"""Of an image and of a result: each is a register."""

_MOST_TAPS = 512
"""Of a kernel, whose weights a block has in shared memory."""

_MOST_TURNING, _TURNING = 64, 1.028
"""Taps of a kernel for which several images a thread pay, and how much they must promise."""

_OTHERS = 20
"""Registers for weights, addresses and loads on the way."""

_VECTOR = 4
"""Registers of a load at its widest."""

# Time: a launch, bytes a second of memory and of weights that blocks load again, and warps of an SM that take no longer
# than fewer. By layout: cycles of an instruction; the exponent as in `split_image`, for only other blocks compute while
# one loads. Fitted to 903 kernels of 64 layers on an H200.
_LAUNCH, _BANDWIDTH, _WEIGHT_BANDWIDTH, _LEAST_WARPS = 1.9e-6, 4.4e12, 25e12, 6.6
_CYCLES = {"NCHW": 1.25, "NHWC": 1.5}
_LONGER = {"NCHW": (1.0, 0.105), "NHWC": (1.4, 0.205)}
_WINDOW_MARGIN = 0.93
"""By which it has to be faster than windows in NHWC, which are nearly as fast."""
_SPLIT_MARGIN = 1.15
"""By which `split_image` has to be. Of 44 layers it then is."""


@dataclass(frozen=True)
class WholeImage(Strategy):
    """Tile of the whole images."""

    device = (
        f"a GPU (images and results of 2 to {_MOST_PIXELS} pixels, at most {_MOST_TAPS} taps, "
        "channel_multiplier 1; a gradient: with stride 1; no halves of 4n + 2 pixels and odd results in NCHW)"
    )

    thread_x: int
    thread_y: int
    """Threads of a block over channels and images."""
    rows: int
    """Rows of the result that are summed together. With all a weight is loaded once and used at once; with fewer the
    first results are ready sooner."""
    min_blocks: int = 1
    turns: int = 1
    """Images of a thread, one after the other. The next one is loaded while one is computed."""

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        return (
            super()._is_for(shape, target)
            and is_small(shape, _MOST_PIXELS)
            and (shape.operation == "forward" or shape.stride == (1, 1))
            and prod(shape.kernel) <= _MOST_TAPS
            and not _is_miscompiled(shape)
        )

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        """Tell whether it is expected to be faster than windows and streams: tensor cores multiply padding too."""
        others = paying((RowStream, RegisterWindow, ChannelVector), shape, target)
        other, own = next(others), expected(cls, shape, target)
        if is_beaten(own / _SPLIT_MARGIN, (SplitImage,), shape, target) and SplitImage.pays(shape, target):
            return False
        seconds = other.expected_seconds(shape, target)
        margin = _WINDOW_MARGIN if isinstance(other, ChannelVector) else 1.0
        return seconds is None or own < margin * seconds

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> "tuple[WholeImage, ...]":
        return _ranked(shape, target)

    @classmethod
    def tiles(cls, shape: Shape) -> "Iterator[WholeImage]":
        """List the tiles worth comparing: a few warps, whose registers suffice."""
        sizes = _warps(shape), _channels(shape), _batches(shape), _heights(shape), _turns(shape)
        for together, x, y, rows, turns in product(*sizes):
            warps = -(-x * y // 32)
            tile = cls(x, y, rows, together // warps, turns)
            if together % warps == 0 and tile._sums_all(shape) and tile.is_promising(shape):
                yield tile

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        return {
            "thread_x": _channels(shape),
            "thread_y": _batches(shape),
            "rows": _heights(shape),
            "min_blocks": BLOCK_COUNTS,
            "turns": _turns(shape),
        }

    def is_promising(self, shape: Shape, others: int = 0) -> bool:
        images = self.sizes(shape)
        rows, cols = images.source
        held = prod(shape.kernel) if self.rows < shape.result_height else 0
        if self.turns > 1 and shape.layout == "NHWC":
            rows, held = images.ahead + 1, prod(shape.kernel)
        elif self.turns > 1:
            held += rows * cols * shape.itemsize // 4
        needed = rows * cols + self.rows * shape.result_width + held + _OTHERS + others
        return needed <= registers_for(self.thread_x * self.thread_y, self.min_blocks)

    def with_room_for(self, shape: Shape, epilogue: Epilogue, target: Target) -> "WholeImage":
        """Take one image a thread, where the next leaves no registers for a residual on its way."""
        adds = "residual" in epilogue.steps and shape.layout == "NCHW"
        return replace(self, turns=1) if adds and not self.is_promising(shape, _VECTOR) else self

    def check(self, shape: Shape, target: Target) -> None:
        height = shape.result_height
        self._require_fields(rows=height, turns=shape.batch)
        self._require(self._sums_all(shape), "rows", self.rows, f"{height} in NHWC with turns")
        # TVM confuses the loops of a block whose threads are all of one channel.
        self._require(self.thread_x > 1, "thread_x", self.thread_x, "at least 2")
        shared = self._shared_bytes(shape, target)
        self._require_launch(target, threads=self.thread_x * self.thread_y, shared_bytes=shared)

    def _shared_bytes(self, shape: Shape, target: Target) -> int:
        if shape.layout == "NHWC":
            return 0
        return self.sizes(shape).shared_bytes * target.widening(shape.dtype)

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        """Estimate the time by instructions and bytes: an image that is loaded ahead is worth as much as a block."""
        x, y = self.thread_x, self.thread_y
        blocks = -(-shape.batch // (y * self.turns)) * -(-shape.result_channels // x)
        on_each = blocks / target.units
        warps = max(_LEAST_WARPS, ceil(on_each) * -(-x * y // 32))
        busy = self._instructions(shape) * _CYCLES[shape.layout] * warps / 4 / CLOCK
        again = (blocks * x - shape.result_channels) * prod(shape.kernel) * shape.itemsize
        memory = (shape.least_bytes + shared_bytes(shape, x)) / _BANDWIDTH + again / _WEIGHT_BANDWIDTH
        memory /= min(1.0, 2 * on_each)  # an SM alone draws about two shares
        one, twice = _LONGER[shape.layout]
        together = min(self.min_blocks, ceil(on_each)) * min(2, self.turns)
        return _LAUNCH + longer(busy, memory, one + twice * log2(together))

    def _instructions(self, shape: Shape) -> float:
        images, taps, is_half = self.sizes(shape), prod(shape.kernel), shape.itemsize == 2
        read, written = prod(images.source), prod(images.result)
        count = float(images.multiply_adds + is_half * (read + written))
        if shape.layout == "NHWC":
            return self.turns * (count + read + written) + taps + is_half * taps
        for pixels in (read, written):
            count += pixels / images.vector(pixels) + 2 * pixels / images.lanes(pixels)
        return self.turns * (count + taps) + 2 * taps / self.thread_y

    def _sums_all(self, shape: Shape) -> bool:
        """Tell whether all rows are summed together, where they have to be."""
        is_free = self.turns == 1 or shape.layout == "NCHW"
        return is_free or self.rows == shape.result_height

    def sizes(self, shape: Shape) -> Images:
        return Images(shape, self.thread_x, self.thread_y, self.rows, self.turns)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        if shape.layout == "NHWC":
            n, c = loops_of(sch, "depthwise_conv2d")
            bn, tn = sch.split(n, [None, self.thread_y])
            bc, tc = sch.split(c, [None, self.thread_x])
            sch.reorder(bn, bc, tn, tc)
            bind(sch, (bn, bc), tn, tc)
            return
        sch.bind(sch.fuse(*loops_of(sch, "images")), "blockIdx.x")
        for name in ("gather", "filters", "planes", "depthwise_conv2d", "epilogue", "store"):
            *_, y, x = loops_of(sch, name)
            bind_threads(sch, y, x)


def _is_miscompiled(shape: Shape) -> bool:
    """Tell whether ptxas of CUDA 13.0 may store results in wrong places."""
    has_pairs = prod(shape.source) % 4 == 2 and shape.result_height * shape.result_width % 2 == 1
    return has_pairs and shape.itemsize == 2 and shape.layout == "NCHW"


@lru_cache(maxsize=256)
def _ranked(shape: Shape, target: Target) -> tuple[WholeImage, ...]:
    most = target.shared_bytes_per_block
    tiles = [tile for tile in WholeImage.tiles(shape) if tile._shared_bytes(shape, target) <= most]
    tiles.sort(key=lambda tile: tile.expected_seconds(shape, target) * (_TURNING if tile.turns > 1 else 1))
    found = varied(tiles, lambda tile: (tile.thread_x, tile.thread_y, tile.turns))
    return found or (WholeImage(2, 1, shape.result_height),)


def _warps(shape: Shape) -> tuple[int, ...]:
    """List the warps of an SM at a time that are worth comparing, the likeliest first.

    float32 in NCHW by 20 takes 14 % longer than by 16, where memory is the limit.
    """
    return (16, 12, 8) if shape.layout == "NCHW" and shape.itemsize == 4 else (16, 20, 24, 12, 8)


def _channels(shape: Shape) -> tuple[int, ...]:
    """List the channels of a block: divisors, where there are some, the nearest to a warp first.

    In NHWC they are what a warp reads side by side.
    """
    channels, least = shape.result_channels, 32 if shape.layout == "NHWC" else 16
    found = sorted(divisors(channels), key=lambda n: (abs(n - 32), n))
    return tuple(n for n in found if least <= n <= 64) or (max(2, even_split(channels, 32)),)


def _batches(shape: Shape) -> tuple[int, ...]:
    return tuple(dict.fromkeys(min(shape.batch, n) for n in (4, 2, 8, 1, 3, 6)))


def _heights(shape: Shape) -> tuple[int, ...]:
    return tuple(dict.fromkeys(even_split(shape.result_height, n) for n in (8, 4, 2, 1)))


def _turns(shape: Shape) -> tuple[int, ...]:
    most = shape.batch if prod(shape.kernel) <= _MOST_TURNING else 1
    return tuple(n for n in (1, 2, 3, 4) if n <= most)
