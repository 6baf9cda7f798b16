"""Several threads share an image: each computes a band of the result's rows.

Loop nest in NCHW, for blocks of `thread_y` images x `thread_x` channels, `turns` times over::

    blockIdx.x = (n / (turns * thread_y)) * (c / thread_x)
      filters[thread_x, KH * KW] = weight as float32
      ahead = data                                                   (all threads)
      for turn:
        planes[thread_y, thread_x planes] = ahead;  ahead = the next images
        threadIdx.z = band    threadIdx.y = n    threadIdx.x = c
          for row of planes that the band sees:
            for kh, kw: for those oh, ow of the band whose input it is:
              acc[oh, ow] += row[ow * SW + kw * DW - left] * filters[kh, kw]
          results = epilogue(acc)
        out = results                                                (all threads)

In NHWC a thread loads rows itself, those `ahead` of the one in use.

All loops of a band are written out, but for the taps in the padding. Bands with the same
taps have the same code, as have those that are one another upside down: of 14 rows in
4 bands, 4 + 3 + 3 + 4, there are two codes. A warp should have one band.

Registers: a band's sums, the weights, and some rows; in NCHW with several turns a thread's
share of the next images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, ClassVar

from ..epilogue import Epilogue
from ..images import Images, courses
from ..shape import DepthwiseConv2dShape
from ..target import Target
from .base import Strategy, with_guesses
from .cost import registers_for
from .tiles import BLOCK_COUNTS, MAX_SUMS, divisors, even_split

if TYPE_CHECKING:
    from tvm import tirx
    from tvm.s_tir import Schedule

__all__ = ["SplitImage"]

_MOST_PIXELS = 1024
"""Of an image and of a result."""

_MOST_TAPS = 128
"""Weights of a channel: each is a register."""

_MOST_WRITTEN, _MOST_CACHED = 12000, 7000
"""Multiply-adds of all courses: to compile, and what the instruction cache holds."""

_OTHERS = 12
"""Registers for addresses and what else a thread has."""

_BANDS = (1, 2, 3, 4, 5, 7, 8, 10, 14, 16)


@dataclass(frozen=True)
class SplitImage(Strategy):
    """Tile of the split images.

    Parameters
    ----------
    thread_x, thread_y : int
        Threads of a block over channels and images.
    bands : int
        Bands of a result, each of a thread.
    min_blocks : int
        Blocks that an SM shall have room for at a time.
    turns : int
        Images that a thread has a band of, one after the other. The next one's rows are
        loaded while one is computed.
    ahead : int
        Rows that are loaded ahead in NHWC, with several turns.
    """

    name: ClassVar[str] = "split_image"
    operations: ClassVar[tuple[str, ...]] = ("forward", "grad_data")
    device: ClassVar[str] = (
        f"a GPU (images and results of 2 to {_MOST_PIXELS} pixels, at most {_MOST_TAPS} taps and "
        f"{_MOST_WRITTEN} different products, channel_multiplier 1; a gradient: with stride 1)"
    )

    thread_x: int
    thread_y: int
    bands: int
    min_blocks: int = 1
    turns: int = 1
    ahead: int = 1
    form: str = "written"

    @classmethod
    def _is_for(cls, shape: DepthwiseConv2dShape, target: Target) -> bool:
        sizes = shape.height * shape.width, shape.out_height * shape.out_width
        return (
            super()._is_for(shape, target)
            and (shape.operation == "forward" or shape.stride == (1, 1))
            and shape.channel_multiplier == 1
            and min(sizes) > 1
            and max(sizes) <= _MOST_PIXELS
            and prod(shape.kernel) <= _MOST_TAPS
            and shape.result_height <= 64
            and _written(shape, shape.result_height) <= _MOST_WRITTEN
        )

    @classmethod
    def pays(cls, shape: DepthwiseConv2dShape, target: Target) -> bool:
        """Tell whether "manual" takes it: not before there is a model of its time."""
        return False

    @classmethod
    def choose(cls, shape: DepthwiseConv2dShape, target: Target) -> SplitImage:
        """Choose a warp of channels, and the fewest bands whose registers suffice."""
        tiles = (
            cls(x, 1, bands, blocks)
            for x in _channels(shape)
            for bands in _bands(shape)
            for blocks in (max(1, 12 // bands),)
        )
        fitting = (t for t in tiles if t._fits(shape, target) and t.is_promising(shape))
        return next(fitting, cls(2, 1, shape.result_height))

    @classmethod
    def space(cls, shape: DepthwiseConv2dShape, target: Target) -> dict[str, tuple[int, ...]]:
        values = {
            "thread_x": _channels(shape),
            "thread_y": tuple(dict.fromkeys(min(shape.batch, n) for n in (1, 2, 4))),
            "bands": _bands(shape),
            "min_blocks": BLOCK_COUNTS,
            "turns": tuple(dict.fromkeys(min(shape.batch, n) for n in (1, 2, 3, 4, 6, 8))),
            "ahead": (1, 2, 3) if shape.layout == "NHWC" else (1,),
        }
        return with_guesses(values, cls.guesses(shape, target))

    def is_promising(self, shape: DepthwiseConv2dShape) -> bool:
        """Tell whether registers suffice and the code is cached."""
        images = self._images(shape)
        threads = self.thread_x * self.thread_y * self.bands
        rows = -(-shape.result_height // self.bands)
        needed = rows * images.result[1] + prod(shape.kernel) + images.source[1] + _OTHERS
        if self.turns > 1:
            share = self.thread_x * self.bands
            own = -(-self.thread_x * prod(images.source) // share) * shape.itemsize // 4
            needed += own if shape.layout == "NCHW" else self.ahead * images.source[1]
        return (
            needed <= registers_for(threads, self.min_blocks)
            and _written(shape, self.bands) <= _MOST_CACHED
        )

    def check(self, shape: DepthwiseConv2dShape, target: Target) -> None:
        height, written = shape.result_height, _written(shape, self.bands)
        self._require(self.bands <= height, "bands", self.bands, f"at most {height}")
        self._require(self.turns <= shape.batch, "turns", self.turns, f"at most {shape.batch}")
        # TVM confuses the loops of a block whose threads are all of one channel.
        self._require(self.thread_x > 1, "thread_x", self.thread_x, "at least 2")
        sums = -(-height // self.bands) * shape.result_width
        self._require(sums <= MAX_SUMS, "sums of a thread", sums, f"at most {MAX_SUMS}")
        self._require(
            written <= _MOST_WRITTEN, "multiply-adds", written, f"at most {_MOST_WRITTEN}"
        )
        self._require_launch(
            target,
            threads=self.thread_x * self.thread_y * self.bands,
            shared_bytes=self._images(shape).shared_bytes,
        )

    def _fits(self, shape: DepthwiseConv2dShape, target: Target) -> bool:
        threads = self.thread_x * self.thread_y * self.bands
        return (
            self._images(shape).shared_bytes <= target.shared_bytes_per_block
            and threads * self.min_blocks <= target.max_threads_per_block
            and -(-shape.result_height // self.bands) * shape.result_width <= MAX_SUMS
        )

    def _images(self, shape: DepthwiseConv2dShape) -> Images:
        return Images(shape, self.thread_x, self.thread_y, shape.result_height)

    def define(self, shape: DepthwiseConv2dShape, epilogue: Epilogue) -> tirx.PrimFunc:
        from ..compute import split_images

        return split_images(
            self._images(shape), epilogue, self.bands, self.turns, self.ahead, self.form
        )

    def apply(self, sch: Schedule, shape: DepthwiseConv2dShape) -> None:
        if shape.layout == "NHWC":
            n, c, z = sch.get_loops(sch.get_sblock("depthwise_conv2d"))
            bn, tn = sch.split(n, [None, self.thread_y])
            bc, tc = sch.split(c, [None, self.thread_x])
            sch.reorder(bn, bc, z, tn, tc)
            sch.bind(sch.fuse(bn, bc), "blockIdx.x")
            sch.bind(z, "threadIdx.z")
            sch.bind(tn, "threadIdx.y")
            sch.bind(tc, "threadIdx.x")
            return
        sch.bind(sch.fuse(*sch.get_loops(sch.get_sblock("images"))), "blockIdx.x")
        for name in (
            "first",
            "gather",
            "ahead",
            "filters",
            "depthwise_conv2d",
            "epilogue",
            "store",
        ):
            *_, z, y, x = sch.get_loops(sch.get_sblock(name))
            sch.bind(z, "threadIdx.z")
            sch.bind(y, "threadIdx.y")
            sch.bind(x, "threadIdx.x")


@lru_cache(maxsize=1024)
def _written(shape: DepthwiseConv2dShape, bands: int) -> int:
    """Count the multiply-adds of all courses."""
    images = Images(shape, 1, 1, shape.result_height)
    width = shape.result_width
    columns = sum(len(images.meets(1, kw, 0, width)) for kw in range(shape.kernel[1]))
    return columns * sum(len(course.products) for course in courses(images, bands))


def _channels(shape: DepthwiseConv2dShape) -> tuple[int, ...]:
    """List the channels of a block: divisors, where there are some, a warp first."""
    channels = shape.result_channels
    found = sorted(divisors(channels), key=lambda n: (abs(n - 32), n))
    return tuple(n for n in found if 8 <= n <= 64) or (max(2, even_split(channels, 32)),)


def _bands(shape: DepthwiseConv2dShape) -> tuple[int, ...]:
    """List the bands that are worth trying, of which the code is not too long."""
    height = shape.result_height
    counts = sorted({min(n, height) for n in (*_BANDS, height)})
    found = (n for n in counts if _written(shape, n) <= _MOST_CACHED)
    return tuple(found) or (height,)
