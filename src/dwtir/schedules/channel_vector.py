"""NHWC: every thread computes a few pixels of one vector of channels.

Loop nest, for a thread's rows x cols outputs of `vector` channels::

    blockIdx.x = n * (oh tiles) * (ow tiles) * (channel tiles)
      threadIdx.z = oh / rows    threadIdx.y = ow / cols    threadIdx.x = c / vector
        weight_local[KH, KW, vector] = weight                            "tile"
        window[(rows-1)*SH + (KH-1)*DH + 1, same for w, vector] = data or 0
        for kh:
          weight_local[KW, vector], window[rows, ..., vector]            "row"
          for kw:
            weight_local[vector], window[rows, cols, vector]             "tap"
            for oh, ow: for lanes: acc += window * weight_local
        out_local = epilogue(acc)
        out = out_local

All tensors move as vectors of `vector` channels, of 16 bytes if channels allow it; a warp's accesses are contiguous.

Registers: vector * (KH rows of the window + sums + weights). No shared memory:
threads share their halo through L1.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd

from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .loops import bind, compute_at, get_blocks, unroll_all, unroll_in_source
from .tiles import BLOCK_COUNTS, even_split, even_tiles, inputs_of, largest_divisor, loads_of, taps, vectors
from .window import Access, Footprint, Window


@dataclass(frozen=True)
class ChannelVector(Window):
    """Tile of the NHWC channel vectors."""

    layouts = ("NHWC",)
    most_registers = 196
    most_values = 300

    rows: int
    cols: int
    """Output pixels of one thread."""
    vector: int
    """Output channels of one thread: a power of two that divides them, and that divides the channel
    multiplier or is a multiple of it."""
    thread_x: int
    thread_y: int
    thread_z: int
    """Threads of a block over channel vectors, columns and rows of tiles."""
    min_blocks: int = 1
    window: str = "tile"
    split: str = "none"

    @classmethod
    def tiles(cls, shape: Shape, window: str) -> Iterator[Self]:
        """List tiles whose blocks take channels first, for a warp's access is as long as these are contiguous.

        No more than divide them, where possible, or every access has a test of its own.
        """
        heights = even_tiles(shape, 0, (1, 2, 4, 7, 8, 14), window)
        widths = even_tiles(shape, 1, (1, 2, 3, 4, 5, 7, 8, 14), window)
        for rows, cols, vector in product(heights, widths, _vectors(shape)):
            if not cls(rows, cols, vector, 1, 1, 1, window=window).is_promising(shape):
                continue
            across, down = -(-shape.result_width // cols), -(-shape.result_height // rows)
            blocks = set()
            counts = _thread_counts(shape.result_channels // vector)
            for x, most in product(counts, (32, 128, 256)):
                y = even_split(across, max(1, most // x))
                blocks.add((x, y, min(64, even_split(down, max(1, most // (x * y))))))
                z = min(64, even_split(down, max(1, most // x)))
                blocks.add((x, even_split(across, max(1, most // (x * z))), z))
            for x, y, z in blocks:
                yield cls(rows, cols, vector, x, y, z, window=window)

    @classmethod
    def _least_block(cls, shape: Shape) -> tuple[int, ...]:
        vector = _vectors(shape)[0]
        return vector, even_split(shape.result_channels // vector, 128), 1, 1

    @classmethod
    def usual_values(cls, shape: Shape, window: str) -> dict[str, Iterable[int]]:
        counts = {count for lanes in _vectors(shape) for count in _thread_counts(shape.result_channels // lanes)}
        return {
            "rows": even_tiles(shape, 0, (1, 2, 4, 7, 8, 14), window),
            "cols": even_tiles(shape, 1, (1, 2, 3, 4, 7, 8), window),
            "vector": _vectors(shape),
            "thread_x": (8, 16, 32, 64, *counts),
            "thread_y": (1, 2, 4, 7, 8, 16),
            "thread_z": (1, 2, 4, 8),
            "min_blocks": BLOCK_COUNTS,
        }

    def takes_lines(self, shape: Shape) -> bool:
        return True

    def check(self, shape: Shape, target: Target) -> None:
        super().check(shape, target)
        self._require_in("vector", _vectors(shape))

    @property
    def sums(self) -> int:
        return self.rows * self.cols * self.vector

    def _registers(self, shape: Shape) -> int:
        """Count inputs, sums and a kernel row of weights, but none of a single tap.

        ptxas loads weights when it comes to their row. A half is kept as a float.
        """
        if self.window == "tap":
            return 0
        return self.vector * (self._live_inputs(shape) + taps(shape)[1]) + self.sums

    def _in_use(self, shape: Shape) -> int:
        """Count the halves that a kernel of one column leaves in registers as they came, too: those of all rows."""
        found = super()._in_use(shape)
        if self.window == "tile" and shape.itemsize == 2 and shape.kernel[1] == 1:
            found += loads_of(shape, self.rows, self.cols, "tile") // 2
        return found

    def _accesses(self, shape: Shape, width: int) -> tuple[int, int, int]:
        return width, self.vector, self.vector

    def _block(self, shape: Shape) -> tuple[int, int, int]:
        return self.rows * self.thread_z, self.cols * self.thread_y, self.thread_x * self.vector

    def footprint(self, shape: Shape) -> Footprint:
        inputs, down, right = self._inputs_apart(shape)
        width, channels = shape.result_width, shape.result_channels
        *_, input_width, input_channels = next(iter(shape.input_shapes.values()))
        split = self._split(shape)
        below, beside = self.rows * split.down, self.cols * split.across
        piece = self.thread_x * self.vector
        return Footprint(
            inputs=Access(
                max(1, int(self.vector * inputs)),
                self.vector * inputs,
                beside * right * input_channels,
                below * down * input_width * input_channels,
            ),
            results=Access(self.vector, self.vector, beside * channels, below * width * channels),
            weights=Access(self.vector, self.vector, 0, 0),
            piece=piece if piece < channels else 0,
            begins=gcd(piece, channels),
        )

    def apply(self, sch: Schedule, shape: Shape) -> None:
        pad, conv, epilogue = get_blocks(sch)
        weight_local = sch.cache_read(conv, 1, "local")
        store = self._staged(sch, epilogue)  # CUDA has no vectors of 8 floats to round 8 halves from

        # 1. Threads over channel vectors, columns and rows; all the rest are blocks.
        n, oh, ow, c = sch.get_loops(store)
        bz, tz, oh = sch.split(oh, [None, self.thread_z, self.rows])
        by, ty, ow = sch.split(ow, [None, self.thread_y, self.cols])
        bx, tx, c = sch.split(c, [None, self.thread_x, self.vector])
        sch.reorder(n, bz, by, bx, tz, ty, tx, oh, ow, c)
        bind(sch, (n, bz, by, bx), tz, ty, tx)

        # 2. Outputs are rounded one by one and leave as one vector a pixel.
        row = self._place(sch, shape, epilogue, oh, tx)
        sch.unroll(oh)
        sch.unroll(ow)
        sch.vectorize(c)

        # 3. Sums in registers, all taps of a kernel row for all outputs in straight line.
        compute_at(sch, conv, row, "local")
        *_, conv_n, conv_oh, conv_ow, conv_c, kh, kw = sch.get_loops(conv)
        sch.reorder(conv_n, kh, kw, conv_oh, conv_ow, conv_c)

        # 4. Window and weights in registers, loaded as vectors.
        at, unrolled = {"tile": (tx, conv_n), "row": (kh, kw), "tap": (kw, conv_oh)}[self.window]
        sch.set_scope(pad, 0, "local")
        for load in (pad, weight_local):
            compute_at(sch, load, at)
        # The channels that a thread reads of a pixel may be no vector of the device.
        vectorize = sch.unroll if shape.lanes % inputs_of(shape) else sch.vectorize
        *outer, channels = sch.get_loops(pad)[-3:]
        unroll_all(sch, outer)
        vectorize(channels)
        *outer, channels, filters = sch.get_loops(weight_local)[-4:]
        unroll_all(sch, outer)
        vectorize(sch.fuse(channels, filters))
        unroll_in_source(sch, unrolled)


def _thread_counts(count: int) -> list[int]:
    """List the threads that share so many vectors of a pixel: divisors, where they have some."""
    most = [largest_divisor(count, limit) for limit in (32, 64, 128, 256)]
    counts = {n for n in most if n >= min(16, count)}
    return sorted(counts or {even_split(count, 32), even_split(count, 128)})


def _vectors(shape: Shape) -> tuple[int, ...]:
    """List the vectors that a thread may compute.

    It has all outputs of its input channels, or of one alone, for its inputs to be a vector too. The data's gradient
    reads all outputs of a channel: that is the vector, if there are several.
    """
    multiplier = shape.channel_multiplier
    if shape.operation == "grad_data" and multiplier > 1:
        return (1,)
    found = vectors(shape, shape.result_channels)
    return tuple(lanes for lanes in found if lanes % multiplier == 0 or multiplier % lanes == 0)
