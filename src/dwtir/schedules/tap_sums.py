"""The gradient of the weight: every thread keeps the sums of its taps in registers.

Two kernels. In the first, a block takes one of `parts` shares of all tiles of
rows x cols outputs, for a few channels and all taps, or some of a large kernel,
and leaves one partial sum a tap::

    blockIdx.x = parts * (channel tiles) * m * (kernel tiles)
      threads = kernel rows of a large kernel, channel vectors (NHWC) and tiles
        for turn:                                one tile of outputs a thread
          window[...] = data or 0, grad[rows, cols] = grad_out
          for oh, ow: for kh, kw: sums += window * grad
        shared[thread, kh, kw] = sums
      threads = taps and channels
        partial[part, kh, kw] = sum over threads of shared

In the second, `part_threads` threads sum the partials of one tap, and one of them
their sums. The order is the same in every run, and so are the bits of the result.

Registers: the taps' sums and a tile's inputs, `vector` times. In NCHW the inputs and
gradients of a row are loaded as aligned vectors, as in `register_window`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, ClassVar

from ..shape import DepthwiseConv2dShape
from ..target import Target
from .base import Strategy, get_blocks, unroll_in_source
from .part_sums import sum_parts
from .tiles import (
    BLOCK_COUNTS,
    MAX_LOADS,
    MAX_UNROLLED,
    divisors,
    even_split,
    largest_divisor,
    threads_over,
    with_value,
)

if TYPE_CHECKING:
    from tvm.s_tir import Schedule

__all__ = ["TapSums"]

_REGISTERS = 190
"""Registers for the sums and the inputs of a tile, of 255."""

_THREADS = 128
"""Threads of a block, at most: each brings its sums to shared memory."""

_THREADS_OF_A_UNIT = 768
"""Threads that a multiprocessor is given, over all its blocks. With more of them, each
has fewer turns between its start and the sums at its end."""

_MOST_THREADS_Z = 64
"""Threads of a block along z, at most."""

_MOST_PART_THREADS = 16
"""Threads over the parts in the second kernel, at most."""


@dataclass(frozen=True)
class TapSums(Strategy):
    """Tile of the weight's gradient.

    Parameters
    ----------
    rows, cols : int
        Outputs that a thread takes at a time.
    kernel_rows, kernel_cols : int
        Taps that a block computes; they divide the kernel.
    vector : int
        Channels of one thread; 1 in NCHW.
    channels : int
        Threads over vectors of channels; 1 in NCHW.
    threads : int
        Threads over tiles of outputs.
    parts : int
        Blocks that share the outputs of a channel.
    part_threads : int
        Threads of the second kernel over the parts, which it divides.
    kernel_threads : int
        Threads over kernel rows, each with `kernel_rows` of its own: what one of them loads,
        the others find in the L1 cache.
    lanes : int
        Inputs of a vector load in NCHW. It divides the inputs from one tile to the next.
    grad_lanes : int
        Gradients of the output of a vector load in NCHW. It divides those of a tile's row.
    min_blocks : int
        Blocks of the first kernel that an SM shall have room for at a time: the fewer, the
        more registers has a thread, and the more loads under way.
    """

    name: ClassVar[str] = "tap_sums"
    operations: ClassVar[tuple[str, ...]] = ("grad_weight",)
    hoist: ClassVar[bool] = True  # of a tile beyond the last: one test for all its products

    rows: int
    cols: int
    kernel_rows: int
    kernel_cols: int
    vector: int
    channels: int
    threads: int
    parts: int
    part_threads: int
    kernel_threads: int = 1
    lanes: int = 1
    grad_lanes: int = 1
    min_blocks: int = 1

    @classmethod
    def claims(cls, shape: DepthwiseConv2dShape, target: Target) -> bool:
        """Tell whether the second kernel has a thread for each tap of a row (NCHW)."""
        wide = shape.layout == "NCHW" and shape.kernel[1] > target.max_threads_per_block
        return super().claims(shape, target) and not wide

    @classmethod
    def choose(cls, shape: DepthwiseConv2dShape, target: Target) -> TapSums:
        """Choose the tile by registers first, and the parts so that the device is busy.

        All taps at once if registers hold their sums, else those of one kernel row.
        The taller a tile, the less of its window is loaded twice; the wider, the
        fewer loads a product takes.
        """
        kernel_h, kernel_w = shape.kernel
        tiles = (
            cls(rows, cols, *taps, vector, 1, 1, 1, 1)
            for taps in ((kernel_h, kernel_w), (1, kernel_w), (1, 1))
            for vector in reversed(_vectors(shape))
            for rows, cols in ((8, 4), (4, 4), (2, 4), (4, 2), (2, 2), (1, 4), (1, 1))
        )
        tile = next(tile for tile in tiles if tile._fits(shape))
        rows = even_split(shape.out_height, tile.rows)
        cols = even_split(shape.out_width, tile.cols)

        # A block: channels first, then tiles, as far as shared memory holds their sums.
        channels = 1
        if shape.layout == "NHWC":
            vectors = shape.in_channels // tile.vector
            channels = largest_divisor(vectors, 64)
            if channels < 16:
                channels = threads_over(vectors, 64)
        tile = replace(tile, rows=rows, cols=cols, channels=channels)
        tiles_of_channel = tile._tiles(shape)
        room = target.shared_bytes_per_block // (4 * tile._sums * channels)
        threads = max(1, min(_THREADS // channels, room, tiles_of_channel))

        # Parts: as many threads as the device has places for, if each finds a tile.
        taps = tile.kernel_rows * tile.kernel_cols
        blocks = shape.out_channels // (tile.vector * channels) * (kernel_h * kernel_w // taps)
        parts = -(-target.units * _THREADS_OF_A_UNIT // (channels * threads * max(1, blocks)))
        parts = max(1, min(parts, -(-tiles_of_channel // threads)))
        width = channels if shape.layout == "NHWC" else kernel_w
        most = max(1, min(parts, _MOST_PART_THREADS, target.max_threads_per_block // width))
        part_threads = 1 << (most.bit_length() - 1)
        parts -= parts % part_threads
        chosen = replace(
            tile,
            threads=threads,
            parts=parts,
            part_threads=part_threads,
            lanes=tile._allowed_lanes(shape)[-1],
            grad_lanes=tile._allowed_grad_lanes(shape)[-1],
        )
        return replace(chosen, threads=threads - 1) if chosen._is_mixed_up(shape) else chosen

    @classmethod
    def space(cls, shape: DepthwiseConv2dShape, target: Target) -> dict[str, tuple[int, ...]]:
        chosen = cls.choose(shape, target)
        heights = [even_split(shape.out_height, most) for most in (1, 2, 4, 8)]
        widths = [even_split(shape.out_width, most) for most in (1, 2, 4, 8)]
        nhwc = shape.layout == "NHWC"
        return {
            "rows": with_value(chosen.rows, heights),
            "cols": with_value(chosen.cols, widths),
            "kernel_rows": with_value(chosen.kernel_rows, (1, shape.kernel[0])),
            "kernel_cols": with_value(chosen.kernel_cols, (1, shape.kernel[1])),
            "vector": _vectors(shape),
            "channels": with_value(chosen.channels, (8, 16, 32, 64) if nhwc else ()),
            "threads": with_value(chosen.threads, (1, 2, 4, 8, 16, 32, 64, 128)),
            "parts": with_value(chosen.parts, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
            "part_threads": with_value(chosen.part_threads, (1, 2, 4, 8, 16)),
            "kernel_threads": with_value(chosen.kernel_threads, divisors(shape.kernel[0])),
            "lanes": (1,) if nhwc else divisors(shape.row_lanes),
            "grad_lanes": (1,) if nhwc else divisors(16 // shape.itemsize),
            "min_blocks": with_value(chosen.min_blocks, BLOCK_COUNTS),
        }

    def check(self, shape: DepthwiseConv2dShape, target: Target) -> None:
        for name, part, whole in (
            ("kernel_rows", self.kernel_rows * self.kernel_threads, shape.kernel[0]),
            ("kernel_cols", self.kernel_cols, shape.kernel[1]),
        ):
            self._require(whole % part == 0, name, part, f"a divisor of {whole}")
        most = min(_MOST_THREADS_Z, shape.kernel[0])
        self._require(
            self.kernel_threads <= most, "kernel_threads", self.kernel_threads, f"at most {most}"
        )
        for name, value, allowed in (
            ("vector", self.vector, _vectors(shape)),
            ("lanes", self.lanes, self._allowed_lanes(shape)),
            ("grad_lanes", self.grad_lanes, self._allowed_grad_lanes(shape)),
        ):
            self._require(value in allowed, name, value, f"one of {allowed}")
        if shape.layout == "NCHW":
            self._require(self.channels == 1, "channels", self.channels, "1 in NCHW")
        # Loops over nothing lose their variable, and then their thread.
        for name, value, most in (
            ("rows", self.rows, shape.out_height),
            ("cols", self.cols, shape.out_width),
            ("channels", self.channels, shape.in_channels // self.vector),
            ("threads", self.threads, self._tiles(shape)),
            ("parts", self.parts, -(-self._tiles(shape) // self.threads)),
        ):
            self._require(value <= most, name, value, f"at most {most}")
        self._require(
            not self._is_mixed_up(shape),
            "threads",
            self.threads,
            "more or less, for thread and kernel column move the window equally far",
        )
        loads = self._loads(shape)
        self._require(loads <= MAX_LOADS, "unrolled loads", loads, f"at most {MAX_LOADS}")
        self._require(self._sums <= 128, "sums of a thread", self._sums, "at most 128")
        self._require(
            self.parts % self.part_threads == 0,
            "part_threads",
            self.part_threads,
            f"a divisor of the parts, {self.parts}",
        )
        width = self.channels if shape.layout == "NHWC" else shape.kernel[1]
        share = width * self.part_threads
        replace(self, min_blocks=1)._require_launch(target, threads=share, shared_bytes=4 * share)
        threads = self.channels * self.threads * self.kernel_threads
        self._require_launch(target, threads=threads, shared_bytes=4 * self._sums * threads)

    def is_promising(self, shape: DepthwiseConv2dShape) -> bool:
        return self._fits(shape)

    def _allowed_lanes(self, shape: DepthwiseConv2dShape) -> tuple[int, ...]:
        """List the vectors whose multiples all windows begin at, of outputs and of taps."""
        if shape.layout == "NHWC":
            return (1,)
        apart = self.cols * shape.stride[1]
        if self.kernel_cols < shape.kernel[1]:
            apart = gcd(apart, self.kernel_cols * shape.dilation[1])
        # A row of the padded input is more than one vector, or TVM loses the loop over them.
        _, width = replace(self, cols=shape.out_width, kernel_cols=shape.kernel[1])._window(shape)
        width += -shape.padding[1] % shape.row_lanes
        return tuple(n for n in divisors(gcd(apart, shape.row_lanes)) if n == 1 or n < width)

    def _allowed_grad_lanes(self, shape: DepthwiseConv2dShape) -> tuple[int, ...]:
        """List the vectors, up to 16 bytes, that a tile's outputs of a row divide into."""
        if shape.layout == "NHWC":
            return (1,)
        return divisors(gcd(self.cols, shape.out_width, 16 // shape.itemsize))

    @property
    def _sums(self) -> int:
        return self.kernel_rows * self.kernel_cols * self.vector

    def _tiles(self, shape: DepthwiseConv2dShape) -> int:
        """Count the tiles of outputs of one channel."""
        rows, cols = -(-shape.out_height // self.rows), -(-shape.out_width // self.cols)
        return shape.batch * rows * cols

    def _fits(self, shape: DepthwiseConv2dShape) -> bool:
        """Tell whether registers hold the sums and all inputs, and the code stays short.

        One sum always fits.
        """
        fits = self._sums + self._loads(shape) * self.vector <= _REGISTERS
        return self._sums == 1 or (fits and self._sums * self.rows * self.cols <= MAX_UNROLLED)

    def _window(self, shape: DepthwiseConv2dShape) -> tuple[int, int]:
        """Count rows and columns of the input that a tile's products take."""
        height, width = (
            (outputs - 1) * stride + (taps - 1) * dilation + 1
            for outputs, taps, stride, dilation in zip(
                (self.rows, self.cols),
                (self.kernel_rows, self.kernel_cols),
                shape.stride,
                shape.dilation,
                strict=True,
            )
        )
        return height, width

    def _is_mixed_up(self, shape: DepthwiseConv2dShape) -> bool:
        """Tell whether TVM cannot count the columns of the window.

        Where a row of tiles is a thread each, and neither a thread nor a tile of taps moves
        the window farther than the other, it takes the one for the other.
        """
        return (
            self.parts == 1
            and 1 < self.threads == -(-shape.out_width // self.cols)
            and self.kernel_cols < shape.kernel[1]
            and self.cols * shape.stride[1] == self.kernel_cols * shape.dilation[1]
        )

    def _loads(self, shape: DepthwiseConv2dShape) -> int:
        height, width = self._window(shape)
        return height * width + self.rows * self.cols

    def apply(self, sch: Schedule, shape: DepthwiseConv2dShape) -> None:
        pad, conv, _ = get_blocks(sch)
        nchw = shape.layout == "NCHW"
        lanes = sch.get_loops(pad)[-1]
        window = pad
        if nchw:
            _, lanes = sch.split(lanes, [None, self.lanes])
            window = sch.blockize(lanes)

        # 1. Tiles of outputs, dealt out to parts and threads; neighbours to neighbours. Blocks
        #    that read the same tiles follow one another, and find them in the L2 cache.
        if nchw:
            c, m, kh, kw, n, oh, ow = sch.get_loops(conv)
        else:
            kh, kw, c, m, n, oh, ow = sch.get_loops(conv)
        bkh, tkh, kh = sch.split(kh, [None, self.kernel_threads, self.kernel_rows])
        bkw, kw = sch.split(kw, [None, self.kernel_cols])
        bc, tc, lane = sch.split(c, [None, self.channels, self.vector])
        by, oh = sch.split(oh, [None, self.rows])
        bx, ow = sch.split(ow, [None, self.cols])
        sch.reorder(n, by, bx, bc, m, bkh, bkw, tkh, tc, oh, ow, kh, kw, lane)
        part, turn, thread = sch.split(sch.fuse(n, by, bx), [self.parts, None, self.threads])
        sch.reorder(part, bc, m, bkh, bkw, tkh, thread, tc, turn, oh, ow, kh, kw, lane)

        # 2. The sums of a thread, of a block, and of all blocks.
        block_sum = sch.rfactor(part, 0)
        thread_sum = sch.rfactor(sch.get_loops(block_sum)[6], 0)
        part, bc, m, bkh, bkw, tkh, thread, tc, turn, oh, *_ = sch.get_loops(thread_sum)
        block = sch.fuse(part, bc, m, bkh, bkw)
        axes = ("threadIdx.x", "threadIdx.y") if nchw else ("threadIdx.y", "threadIdx.x")
        sch.bind(block, "blockIdx.x")
        sch.bind(tkh, "threadIdx.z")
        sch.bind(thread, axes[0])
        sch.bind(tc, axes[1])

        # 3. The products of a tile in straight line, with its inputs in registers.
        grad = sch.cache_read(thread_sum, 1, "local")
        sch.set_scope(pad, 0, "local")
        sch.compute_at(grad, turn, preserve_unit_loops=True)
        *outer, innermost = sch.get_loops(grad)[-4:]
        if nchw:
            vectors, innermost = sch.split(innermost, [None, self.grad_lanes])
            outer.append(vectors)
        for loop in outer:
            sch.unroll(loop)
        sch.vectorize(innermost)
        sch.compute_at(window, turn, preserve_unit_loops=True)
        if not nchw:
            lanes = sch.get_loops(pad)[-1]
        for loop in sch.get_loops(window)[-4:] if nchw else sch.get_loops(pad)[-4:-1]:
            sch.unroll(loop)
        sch.vectorize(lanes)
        unroll_in_source(sch, oh)

        # 4. Sums of a thread: in registers until its turns are over, then to the others.
        sch.set_scope(thread_sum, 0, "shared")
        leave = sch.cache_write(thread_sum, 0, "local")
        sch.reverse_compute_at(leave, tc, preserve_unit_loops=True)
        for loop in sch.get_loops(leave)[-6:]:
            sch.unroll(loop)
        zero = sch.decompose_reduction(thread_sum, turn)
        unroll_in_source(sch, sch.get_loops(zero)[4])

        # 5. Sums of a block: its threads share the taps and channels among them.
        sch.reverse_compute_at(block_sum, block, preserve_unit_loops=True)
        partial = sch.cache_write(block_sum, 0, "local")
        sch.reverse_compute_at(partial, block, preserve_unit_loops=True)
        taps = sch.fuse(*sch.get_loops(partial)[1:])
        _, tz, ty, tx = sch.split(taps, [None, self.kernel_threads, self.threads, self.channels])
        sch.bind(tz, "threadIdx.z")
        sch.bind(ty, axes[0])
        sch.bind(tx, axes[1])
        sch.compute_at(block_sum, tx, preserve_unit_loops=True)

        # 6. Sums of all blocks, by the second kernel.
        sum_parts(sch, shape, self.part_threads, self.channels)


def _vectors(shape: DepthwiseConv2dShape) -> tuple[int, ...]:
    """List the vectors of channels: powers of two up to 16 bytes, where they are contiguous."""
    if shape.layout == "NCHW" or shape.channel_multiplier > 1:
        return (1,)
    return tuple(
        lanes
        for lanes in (1, 2, 4, 8)
        if lanes * shape.itemsize <= 16 and shape.in_channels % lanes == 0
    )
