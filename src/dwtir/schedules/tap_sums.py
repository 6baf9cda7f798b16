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

In the second, these are summed: see `part_sums`.

Registers: the taps' sums and a tile's inputs, `vector` times. In NCHW the inputs and
gradients of a row are loaded as aligned vectors, as in `register_window`.
"""

from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .base import Values
from .cost import LINE
from .loops import compute_at, get_blocks, number, unroll_all, unroll_in_source
from .part_sums import PartSums, sum_parts
from .tap_cost import Tiles, allocated_bytes, estimate, is_held, threads_of, tiles_of_channel, window
from .tap_tiles import MAX_KERNEL_THREADS, MAX_TAP_SUMS, grad_lanes_of, lanes_of, ranked, vectors_of
from .tiles import BLOCK_COUNTS, MAX_LOADS, MAX_UNROLLED, divisors, even_split

_MOST_TAPS = 25
"""Taps up to which whole lines pay."""


@dataclass(frozen=True)
class TapSums(PartSums):
    """Tile of the weight's gradient."""

    hoist = True
    simplify = True
    # of a tile beyond the last: one test for all its products

    rows: int
    cols: int
    """Outputs that a thread takes at a time."""
    kernel_rows: int
    kernel_cols: int
    """Taps that a block computes; they divide the kernel."""
    vector: int
    """Channels of one thread; 1 in NCHW."""
    channels: int
    """Threads over vectors of channels; 1 in NCHW."""
    threads: int
    """Threads over tiles of outputs."""
    parts: int
    """Blocks that share the outputs of a channel."""
    part_threads: int
    kernel_threads: int = 1
    """Threads over kernel rows, each with `kernel_rows` of its own: what one of them loads, the
    others find in the L1 cache."""
    lanes: int = 1
    """Inputs of a vector load in NCHW. It divides the inputs from one tile to the next."""
    grad_lanes: int = 1
    """Gradients of the output of a vector load in NCHW. It divides those of a tile's row."""
    min_blocks: int = 1
    """Of the first kernel."""

    @classmethod
    def claims(cls, shape: Shape, target: Target) -> bool:
        """Tell whether the second kernel has a thread for each tap of a row (NCHW)."""
        wide = shape.layout == "NCHW" and shape.kernel[1] > target.max_threads_per_block
        return super().claims(shape, target) and not wide

    @classmethod
    def choose(cls, shape: Shape, target: Target) -> Self:
        tiles = (cls(*numbers) for numbers in ranked(shape, target))
        return next((tile for tile in tiles if not tile._is_mixed_up(shape)), cls(1, 1, 1, 1, 1, 1, 1, 1, 1))

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        chosen = cls.choose(shape, target)
        nhwc = shape.layout == "NHWC"
        return {
            "rows": [even_split(shape.out_height, most) for most in (1, 2, 4, 8)],
            "cols": [even_split(shape.out_width, most) for most in (1, 2, 4, 8)],
            "kernel_rows": (1, shape.kernel[0]),
            "kernel_cols": (1, shape.kernel[1]),
            "vector": vectors_of(shape),
            "channels": (8, 16, 32, 64) if nhwc else (),
            "threads": (4, 8, 16, 32, 64, 128),
            "parts": (1, max(1, chosen.parts // 2), 2 * chosen.parts),
            "part_threads": (1, 2, 4, 8, 16),
            "kernel_threads": divisors(shape.kernel[0]),
            "lanes": () if nhwc else divisors(shape.row_lanes),
            "grad_lanes": () if nhwc else divisors(shape.lanes),
            "min_blocks": BLOCK_COUNTS,
        }

    def takes_lines(self, shape: Shape) -> bool:
        """Tell whether blocks read parts of lines; kernels of many taps wait for their instructions."""
        piece = gcd(self.channels * self.vector, shape.in_channels) * shape.itemsize
        return prod(shape.kernel) <= _MOST_TAPS and (shape.layout == "NCHW" or piece % LINE > 0)

    def check(self, shape: Shape, target: Target) -> None:
        for name, part, whole in (
            ("kernel_rows", self.kernel_rows * self.kernel_threads, shape.kernel[0]),
            ("kernel_cols", self.kernel_cols, shape.kernel[1]),
        ):
            self._require(whole % part == 0, name, part, f"a divisor of {whole}")
        self._require_most("kernel_threads", self.kernel_threads, min(MAX_KERNEL_THREADS, shape.kernel[0]))
        self._require_in("vector", vectors_of(shape))
        self._require_in("lanes", lanes_of(shape, self.cols, self.kernel_cols))
        self._require_in("grad_lanes", grad_lanes_of(shape, self.cols))
        if shape.layout == "NCHW":
            self._require(self.channels == 1, "channels", self.channels, "1 in NCHW")
        # Loops over nothing lose their variable, and then their thread.
        channels, tiles = shape.in_channels // self.vector, self._tiles(shape)
        self._require_fields(rows=shape.out_height, cols=shape.out_width, channels=channels, threads=tiles)
        self._require_fields(parts=-(-tiles // self.threads))
        self._require(
            not self._is_mixed_up(shape),
            "threads",
            self.threads,
            "more or less, for thread and tap move the window equally far",
        )
        self._require_most("unrolled loads", self._loads(shape), MAX_LOADS)
        self._require_most("sums of a thread", self._sums, MAX_TAP_SUMS)
        self._require_parts(shape, target, self.channels)
        self._require_launch(target, threads=threads_of(self), shared_bytes=int(allocated_bytes(self, shape)))

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        return float(estimate(Tiles(*map(np.float64, self.parameters.values())), shape, target))

    def is_promising(self, shape: Shape) -> bool:
        short = self._sums * self.rows * self.cols <= MAX_UNROLLED
        return bool(is_held(self, shape)) and (short or self._sums == 1)

    @property
    def _sums(self) -> int:
        return self.kernel_rows * self.kernel_cols * self.vector

    def _tiles(self, shape: Shape) -> int:
        return int(tiles_of_channel(self, shape))

    def _is_mixed_up(self, shape: Shape) -> bool:
        """Tell whether TVM may fail to count the columns or the rows of the window.

        Where a thread or turn moves the window as far as a tile of taps, it can take the one for
        the other: along a row if each tile of a row, or of an image, is a thread, and down an image
        if nothing but threads and turns tells one row from the next.
        """
        across = -(-shape.out_width // self.cols)
        of_image = across * -(-shape.out_height // self.rows)
        turns = -(-self._tiles(shape) // (self.threads * self.parts))
        several = shape.batch > 1
        in_a_row = (
            self.parts == 1
            and 1 < self.threads in ((across, of_image) if several else (across,))
            and self.kernel_cols < shape.kernel[1]
            and self.cols * shape.stride[1] == self.kernel_cols * shape.dilation[1]
        )
        by_threads = across == 1 and self.threads == of_image
        by_turns = turns > 1 and of_image % (self.threads * turns) == 0
        in_an_image = (
            several
            and across < of_image
            and (by_threads or (by_turns and (across == 1 or self.threads == across)))
            and (self.kernel_threads > 1 or (self.parts == 1 and self.kernel_rows < shape.kernel[0]))
            and self.rows * shape.stride[0] == self.kernel_rows * shape.dilation[0]
        )
        return in_a_row or in_an_image

    def _loads(self, shape: Shape) -> int:
        height, width = window(self, shape)
        return int(height * width) + self.rows * self.cols

    def apply(self, sch: Schedule, shape: Shape) -> None:
        pad, conv, epilogue = get_blocks(sch)
        has_parts = number(sch, self.parts) > 1
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
        block_sum = sch.rfactor(part, 0) if has_parts else conv
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
        compute_at(sch, grad, turn)
        *outer, innermost = sch.get_loops(grad)[-4:]
        if nchw:
            vectors, innermost = sch.split(innermost, [None, self.grad_lanes])
            outer.append(vectors)
        unroll_all(sch, outer)
        sch.vectorize(innermost)
        compute_at(sch, window, turn)
        if not nchw:
            lanes = sch.get_loops(pad)[-1]
        unroll_all(sch, sch.get_loops(window)[-4:] if nchw else sch.get_loops(pad)[-4:-1])
        sch.vectorize(lanes)
        unroll_in_source(sch, oh)

        # 4. Sums of a thread: in registers until its turns are over, then to the others.
        sch.set_scope(thread_sum, 0, "shared")
        leave = sch.cache_write(thread_sum, 0, "local")
        sch.reverse_compute_at(leave, tc, preserve_unit_loops=True)
        unroll_all(sch, sch.get_loops(leave)[-len(sch.get(leave).iter_vars) :])
        unroll_in_source(sch, sch.get_loops(sch.decompose_reduction(thread_sum, turn))[4])

        # 5. Sums of a block: its threads share the taps and channels among them.
        sch.reverse_compute_at(block_sum, block, preserve_unit_loops=True)
        partial = sch.cache_write(block_sum, 0, "local")
        if not has_parts:
            sch.reverse_compute_inline(epilogue)
        sch.reverse_compute_at(partial, block, preserve_unit_loops=True)
        taps = sch.fuse(*sch.get_loops(partial)[1:])
        _, tz, ty, tx = sch.split(taps, [None, self.kernel_threads, self.threads, self.channels])
        sch.bind(tz, "threadIdx.z")
        sch.bind(ty, axes[0])
        sch.bind(tx, axes[1])
        compute_at(sch, block_sum, tx)

        # 6. Sums of all blocks, by the second kernel.
        if has_parts:
            sum_parts(sch, shape, self.part_threads, self.channels)
