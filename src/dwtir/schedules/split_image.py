"""Several threads share an image: each computes a band of the result's rows.

Loop nest, for blocks of `thread_y` images x `thread_x` channels::

    blockIdx.x = (n / thread_y) * (c / thread_x)
      planes[thread_y, thread_x planes] = data                     (all threads)
      filters[thread_x, KH * KW] = weight as float32
      threadIdx.z = band    threadIdx.y = n    threadIdx.x = c
        for row of planes that the band sees, if it is not padding:
          window[W] = row as float32
          for oh of the band that the row meets under a row of the kernel, kh:
            for kw, ow whose input is not padding:
              acc[oh, ow] += window[ow * SW + kw * DW - left] * filters[kh, kw]
        results = epilogue(acc)
      out = results                                                (all threads)

The loop over rows has the same code for all bands, so that it is short, and warps may have
several. Planes and weights lie in shared memory as those of `whole_image`.

With a stride, a band of the data's gradient has whole groups of rows, each of which meets other
rows of the kernel, so that all bands still have one code.

In NHWC each thread copies pixels of its own channel, neighbouring threads those of neighbouring channels.

Registers: a band's sums, a row of the image, a row of the kernel, and a few more. Shared bytes:
thread_x * (thread_y * H * W elements + 4 * KH * KW).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from ..epilogue import Epilogue
from ..images import Images, is_small
from ..shape import Shape
from ..target import Target
from .banded_matrix import BandedMatrix
from .banded_planes import BandedPlanes
from .base import Strategy, paying, varied, with_guesses
from .channel_vector import ChannelVector
from .cost import registers_for
from .loops import bind_threads
from .register_window import RegisterWindow
from .row_stream import RowStream
from .split_cost import expected_seconds
from .tiles import BLOCK_COUNTS, MAX_BLOCKS, MAX_SUMS, MAX_THREADS, MAX_UNROLLED, SHARED

if TYPE_CHECKING:
    from tvm import tirx
    from tvm.s_tir import Schedule

_MOST_PIXELS, _MOST_TAPS = 2304, 1024
"""Of an image and of a result, and of a kernel: a block has them in shared memory. With a stride,
the results of a gradient are as many times more."""

_OTHERS, _OTHERS_STRIDED = 9, 6
"""Registers for addresses, tests and loads on the way; and of a gradient with a stride."""

_BEST_SUMS = 64
"""Of a thread: with more of them fewer warps wait for shared memory in turns."""

_MANY_TAPS = 100
"""Of a kernel whose weights take so long to load that two images share them."""

_NARROW, _FEW_TAPS = 16, 25
"""Columns of an image, and taps, that are too few for tensor cores to be ahead."""


@dataclass(frozen=True)
class SplitImage(Strategy):
    """Tile of the split images."""

    name = "split_image"
    operations = ("forward", "grad_data")
    device = (
        f"a GPU (images and results of 2 to {_MOST_PIXELS} pixels, a gradient's times the stride, "
        f"and at most {MAX_SUMS} columns; at most {_MOST_TAPS} taps, channel_multiplier 1)"
    )

    thread_x: int
    thread_y: int
    """Threads of a block over channels and images."""
    bands: int
    """Bands of a result, each of a thread."""
    min_blocks: int = 1

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        return (
            super()._is_for(shape, target)
            and is_small(shape, _MOST_PIXELS * _parts(shape))
            and max(shape.width, shape.out_width) <= MAX_SUMS
            and prod(shape.kernel) <= _MOST_TAPS
            and _least_sums(shape) <= MAX_SUMS
            and shape.kernel[1] * _least_sums(shape) <= MAX_UNROLLED
            and cls(2, 1, 1)._has_room(shape, target)
            # Where no image is read, TVM lets threads write results before all have come.
            and cls(2, 1, 1)._images(shape).multiply_adds > 0
        )

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        """Tell whether it is expected to be faster than windows and streams.

        Others are left halves in NHWC, where copies are of single numbers.
        """
        if shape.layout == "NHWC" and (shape.itemsize == 2 or shape.stride != (1, 1)):
            return False
        others = BandedPlanes, BandedMatrix, RowStream, RegisterWindow, ChannelVector
        own, other = cls.choose(shape, target), next(paying(others, shape, target))
        expected = other.expected_seconds(shape, target)
        if not own._passes(shape, target):
            return False
        if expected is None:  # of tensor cores
            return shape.batch > 1 and shape.result_width < _NARROW and prod(shape.kernel) <= _FEW_TAPS
        return own.expected_seconds(shape, target) < _margin(shape, other) * expected

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> tuple[SplitImage, ...]:
        return _ranked(shape, target)

    @classmethod
    def tiles(cls, shape: Shape, target: Target) -> Iterator[SplitImage]:
        """List the tiles worth comparing, each with as many blocks as an SM has room for."""
        for x, y, bands in product(_channels(shape, target), _batches(shape), _bands(shape)):
            tile = cls(x, y, bands)
            tile = cls(x, y, bands, max(1, tile._at_a_time(shape)))
            if tile._passes(shape, target):
                yield tile

    @classmethod
    def space(cls, shape: Shape, target: Target) -> dict[str, tuple[int, ...]]:
        values = {
            "thread_x": _channels(shape, target),
            "thread_y": _batches(shape),
            "bands": _bands(shape),
            "min_blocks": BLOCK_COUNTS,
        }
        return with_guesses(values, cls.guesses(shape, target))

    def is_promising(self, shape: Shape) -> bool:
        return self._registers(shape) <= registers_for(self._threads, self.min_blocks)

    def check(self, shape: Shape, target: Target) -> None:
        sums = self._images(shape).band(self.bands) * shape.result_width
        self._require_most("bands", self.bands, _most_bands(shape))
        # TVM confuses the loops of a block whose threads are all of one channel.
        self._require(self.thread_x > 1, "thread_x", self.thread_x, "at least 2")
        self._require_most("sums of a thread", sums, MAX_SUMS)
        self._require_most("multiply-adds", sums * shape.kernel[1], MAX_UNROLLED)
        self._require_launch(target, threads=self._threads, shared_bytes=self._images(shape).shared_bytes_on(target))

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        """Estimate the time of the kernel, by the instructions that it issues and its bytes."""
        at_a_time = max(self.min_blocks, self._at_a_time(shape))
        return expected_seconds(self._images(shape), self.bands, at_a_time, target.units)

    @property
    def _threads(self) -> int:
        return self.thread_x * self.thread_y * self.bands

    def _registers(self, shape: Shape) -> int:
        images = self._images(shape)
        sums = images.band(self.bands) * shape.result_width
        taps, others = shape.kernel[1], _OTHERS
        if _is_strided(shape):
            taps, others = -(-taps // shape.stride[1]), _OTHERS_STRIDED
        return sums + images.source[1] + taps + others

    def _at_a_time(self, shape: Shape) -> int:
        """Count the blocks that an SM has room for."""
        threads = -(-self._threads // 32) * 32
        counts = range(1, min(MAX_BLOCKS, MAX_THREADS // threads) + 1)
        needed, taken = self._registers(shape), self._images(shape).shared_bytes + 1024
        fitting = (n for n in counts if needed <= registers_for(threads, n))
        return min(max(fitting, default=1), SHARED // taken)

    def _passes(self, shape: Shape, target: Target) -> bool:
        sums = self._images(shape).band(self.bands) * shape.result_width
        return (
            self.is_promising(shape)
            and self._threads > 32
            and sums <= max(_BEST_SUMS, _least_sums(shape))
            and sums * shape.kernel[1] <= MAX_UNROLLED
            and self._threads <= target.max_threads_per_block
            and self._has_room(shape, target)
        )

    def _has_room(self, shape: Shape, target: Target) -> bool:
        return self._images(shape).shared_bytes_on(target) <= target.shared_bytes_per_block

    def _images(self, shape: Shape) -> Images:
        return Images(shape, self.thread_x, self.thread_y, shape.result_height)

    def define(self, shape: Shape, epilogue: Epilogue) -> tirx.PrimFunc:
        from ..compute import split_images

        return split_images(self._images(shape), epilogue, self.bands)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        sch.bind(sch.fuse(*sch.get_loops(sch.get_sblock("images"))), "blockIdx.x")
        for name in ("gather", "filters", "depthwise_conv2d", "epilogue", "store"):
            *_, z, y, x = sch.get_loops(sch.get_sblock(name))
            bind_threads(sch, z, y, x)


@lru_cache(maxsize=256)
def _ranked(shape: Shape, target: Target) -> tuple[SplitImage, ...]:
    tiles = list(SplitImage.tiles(shape, target))
    tiles.sort(key=lambda tile: tile.expected_seconds(shape, target))
    return varied(tiles, lambda tile: (tile.thread_x, tile.thread_y)) or (SplitImage(2, 1, _most_bands(shape)),)


def _margin(shape: Shape, other: Strategy) -> float:
    """Find the share of the other's expected time, which errs, that it may take.

    Windows whose rows are no vectors take longer than expected.
    """
    if not isinstance(other, RegisterWindow):
        return 0.95 if isinstance(other, BandedMatrix) else 0.93 if shape.layout == "NHWC" else 1.0
    if shape.stride != (1, 1) and (shape.operation == "grad_data" or shape.itemsize == 4):
        return 1.2 if shape.operation == "grad_data" else 0.8
    return 1.18 if other.lanes == 1 else 1.07


def _is_strided(shape: Shape) -> bool:
    """Tell whether it is a gradient, and a result sees but a part of the kernel."""
    return _parts(shape) > 1


def _parts(shape: Shape) -> int:
    """Count the parts of the kernel, of which a result sees one."""
    return 1 if shape.operation == "forward" else prod(shape.stride)


def _channels(shape: Shape, target: Target) -> tuple[int, ...]:
    """List the channels of a block: in NHWC a sector of memory's or more, where there is room."""
    counts = (2, 4, 8, 16, 32)
    if shape.layout == "NCHW":
        return counts
    roomy = tuple(n for n in counts if SplitImage(n, 1, 1)._has_room(shape, target))
    return tuple(n for n in roomy if n * shape.itemsize >= 32) or roomy[-1:]


def _batches(shape: Shape) -> tuple[int, ...]:
    """List the images of a block, which share its weights."""
    return (1,) if shape.batch == 1 or prod(shape.kernel) < _MANY_TAPS else (1, 2)


def _bands(shape: Shape) -> tuple[int, ...]:
    """List the bands that differ in the most rows that one has, in whole phases.

    With a stride, rows below each other see but few of the same rows of the image.
    """
    most = _most_bands(shape)
    if shape.operation == "forward" and shape.stride[0] > 1:
        return (most,)
    return tuple(dict.fromkeys(-(-most // rows) for rows in (1, 2, 3, 4, 5, 7, 8)))


def _least_sums(shape: Shape) -> int:
    """Count the sums of a band that is as small as can be."""
    return Images(shape, 1, 1, 1).phases * shape.result_width


def _most_bands(shape: Shape) -> int:
    return -(-shape.result_height // Images(shape, 1, 1, 1).phases)
