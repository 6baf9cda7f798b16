"""Every thread goes down the rows of a strip of columns, and loads them ahead.

Loop nest in NHWC, for a thread's rows x cols results of `vector` channels::

    blockIdx.x = n * (row segments) * (strips) * (channel tiles)
      threadIdx.z = segment    threadIdx.y = strip    threadIdx.x = c / vector
        weight[KH, KW, vector] as float32
        window[depth, cols + KW - 1, vector] = the first rows of data
        for row of the data:
          row as float32;  window = the row `depth` further down
          for kh, from the last: for kw, cols, vector:
            acc[kh] = acc[kh - 1] + row * weight[kh]
          out = epilogue(acc[KH - 1])
        the last rows of out, which see padding below the data

The sums move on as `compute.streamed` has it: the loop's body is one row, which the instruction cache keeps. Each input
of a strip is loaded once for all its rows, a row's time before it is wanted.

Where a strip is cut into segments of `rows`, the KH - 1 rows around a cut are gone through twice. Rows of padding take
no time, nor do columns where a strip is all of a row.

In NCHW a thread has one channel, neighbours have neighbouring strips, and `vector` columns
are loaded together, as `Strip` says: ``threadIdx.y = n * c    threadIdx.x = strip``.

A dilation parts an image into as many each way, each a convolution without: segments and strips are of one part. In
NCHW columns stay together, and a strip's window is wider by the dilation.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from ..epilogue import Epilogue
from ..shape import Shape
from ..strips import Strip, apart, has_parts, part_sizes
from ..target import Target
from ..typed import PrimFunc, Schedule
from .base import Strategy, Values, by_time, expected, varied
from .channel_vector import ChannelVector
from .cost import LINE, SECTOR, touched
from .loops import bind, loops_of
from .register_window import RegisterWindow
from .stream_cost import STORE_BANDWIDTH, Stream, seconds, shared_bytes
from .tiles import BLOCK_COUNTS, MAX_SIDE, MAX_SUMS, MAX_UNROLLED, divisors, even_split

_MAX_TAPS = 128
"""Weights of a channel: each is a register."""

_OTHERS = 12
"""Registers for addresses, tests and the loop."""

_SLACK, _SLACK_OF_FEW = 14, 2
"""Registers by which ptxas may do with less than are counted; of 128 and fewer it spills, unless of halves, which are
not all there twice, as loaded and as float32."""

_PLANES_SLACK, _PLANES_SLACK_OF_LARGE, _HANGING = 10, 8, 12
"""The same in NCHW, up to 7x7 and above, and registers more where strips hang over the image."""

_WARPS = (8, 12, 15, 16, 20, 24)
"""Warps of an SM worth comparing. A scheduler has registers of its own: nine have no more than twelve, but ptxas, which
shares out all, gives them some with which six run."""

_MARGINS = {("NHWC", 4): 0.9, ("NHWC", 2): 0.95, ("NCHW", 4): 0.84}
_DOUBT = 1.5e-6
"""Share of a window's time that it may be expected to take, for models err, and where rows of NCHW are read in vectors
so many seconds less (68 layers, choice with `split_image` 1.3 % behind the best)."""

_LEAST_TAPS = {4: 49, 2: 25}
"""From which on, by an element's bytes: kernels of fewer take as long either way."""


@dataclass(frozen=True)
class RowStream(Strategy):
    """Tile of the streamed rows."""

    device = (
        f"a GPU (with stride 1, at most {_MAX_TAPS} taps, and less padding than the kernel's rows; "
        "a dilation that divides the padding, of no more than the image; a gradient: with "
        "channel_multiplier 1)"
    )

    rows: int
    cols: int
    """Results of one thread: the rows it goes down, and the columns of its strip."""
    vector: int
    """Elements of a load, a power of two: in NHWC a thread's channels, in NCHW columns, and it divides `cols` and the
    rows of the input."""
    thread_x: int
    thread_y: int
    thread_z: int
    """Threads of a block over channel vectors, strips and segments of rows; in NCHW over strips,
    channels of all images and segments."""
    min_blocks: int = 1
    depth: int = 1
    """Rows of inputs in registers as they were loaded: those on the way, and with float32 the one in use."""

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        return (
            super()._is_for(shape, target)
            and shape.stride == (1, 1)
            and (shape.operation == "forward" or shape.channel_multiplier == 1)
            and prod(shape.kernel) <= _MAX_TAPS
            and max(shape.padding[0], shape.padding[2]) < shape.kernel[0] * apart(shape)[0]
            and has_parts(shape)
        )

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        """Tell whether it is expected to be faster than a window; of halves in NCHW, and narrow images, none is."""
        planes = shape.layout == "NCHW"
        if (
            part_sizes(shape)[1] <= shape.kernel[1]
            or prod(shape.kernel) < _LEAST_TAPS[shape.itemsize]
            or (planes and shape.itemsize == 2)
        ):
            return False
        window = RegisterWindow if planes else ChannelVector
        margin, doubt = _MARGINS[shape.layout, shape.itemsize], _DOUBT if planes and shape.row_lanes > 1 else 0.0
        return expected(cls, shape, target) + doubt < margin * expected(window, shape, target)

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> "tuple[RowStream, ...]":
        return _ranked(cls, shape, target)

    @classmethod
    def tiles(cls, shape: Shape) -> "Iterator[RowStream]":
        least = _least_depth(shape)
        for rows, cols, vector in product(_heights(shape), _widths(shape), _vectors(shape)):
            for x, y in _threads(shape, cols, vector):
                warps = -(-x * y // 32)
                for together, depth in product(_WARPS, range(least, least + 3)):
                    tile = cls(rows, cols, vector, x, y, 1, max(1, together // warps), depth)
                    if together % warps == 0 and tile.is_promising(shape):
                        yield tile

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        least = _least_depth(shape)
        return {
            "rows": _heights(shape),
            "cols": _widths(shape),
            "vector": _vectors(shape),
            "thread_x": (1, 2, 4, 7, 8) if shape.layout == "NCHW" else (16, 32, 64),
            "thread_y": (1, 2, 4, 8),
            "thread_z": (1, 2),
            "min_blocks": BLOCK_COUNTS,
            "depth": range(least, least + 3),
        }

    def is_promising(self, shape: Shape, others: int = 0) -> bool:
        if self._multiply_adds(shape) > MAX_UNROLLED:
            return False
        registers = self._limit()
        slack = _SLACK if registers > 128 or shape.itemsize == 2 else _SLACK_OF_FEW
        if shape.layout == "NCHW":
            slack = _PLANES_SLACK_OF_LARGE if prod(shape.kernel) > 49 else _PLANES_SLACK
        return self._registers(shape) + others <= registers + slack

    def with_room_for(self, shape: Shape, epilogue: Epilogue, target: Target) -> "RowStream":
        """Load a row less ahead of results that wait, of halves; of float32, if it has to be.

        In NCHW fewer blocks of float32 run then, and where registers are short of those of a bias or scale.
        """
        strip, is_float = self.sizes(shape), shape.itemsize == 4
        planes = is_float and shape.layout == "NCHW"
        if epilogue.waits:
            rows = strip.residual_rows(self.depth) if "residual" in epilogue.steps else planes
            more = rows * self.cols * strip.channels
        elif planes:
            more = 2 * len(epilogue.operands(shape))
        else:
            return self
        if is_float and self.is_promising(shape, more):
            return self
        if planes:
            return replace(self, min_blocks=-(-3 * self.min_blocks // 4))
        return replace(self, depth=max(_least_depth(shape), self.depth - 1))

    def check(self, shape: Shape, target: Target) -> None:
        least = _least_depth(shape)
        self._require(least <= self.depth <= 4, "depth", self.depth, f"{least} to 4")
        self._require_in("vector", _vectors(shape))
        if shape.layout == "NCHW":
            self._require(self.cols % self.vector == 0, "vector", self.vector, "a divisor of cols")
        self._require_fields(cols=MAX_SIDE, rows=part_sizes(shape)[0], thread_z=64)
        self._require_most("sums of a row", self.cols * self.sizes(shape).channels, MAX_SUMS)
        self._require_most("multiply-adds", self._multiply_adds(shape), MAX_UNROLLED)
        self._require_launch(target, threads=self.thread_x * self.thread_y * self.thread_z)

    def _multiply_adds(self, shape: Shape) -> int:
        return self.depth * self.cols * self.sizes(shape).channels * prod(shape.kernel)

    def sizes(self, shape: Shape) -> Strip:
        return _strip(shape, self.cols, self.vector)

    @property
    def _warps(self) -> int:
        return -(-self.thread_x * self.thread_y * self.thread_z // 32)

    def _limit(self) -> int:
        return min(255, 64 // -(-self._warps * self.min_blocks // 4) * 8)

    def _registers(self, shape: Shape) -> int:
        kernel_h, kernel_w = shape.kernel
        strip = self.sizes(shape)
        held = kernel_h * (kernel_w + self.cols) * strip.channels
        loaded = self.depth * strip.taken * max(1, self.vector * shape.itemsize // 4)
        wide = strip.columns * strip.channels if shape.itemsize == 2 else 0
        hangs = part_sizes(shape)[1] % self.cols
        return held + loaded + wide + _OTHERS + (_HANGING if hangs else 0)

    def _split(self, shape: Shape) -> tuple[tuple[int, int], ...]:
        (height, width), (down, right) = part_sizes(shape), apart(shape)
        segments = -(-height // self.rows) * down, self.thread_z
        strips = -(-width // self.cols) * right
        channels = shape.result_channels
        if shape.layout == "NCHW":
            return segments, (shape.batch * channels, self.thread_y), (strips, self.thread_x)
        return segments, (strips, self.thread_y), (channels // self.vector, self.thread_x)

    def _pieces(self, shape: Shape) -> float:
        """Count the pieces of memory of a warp's access: in NCHW, lines that it does not fill.

        Single columns fill those of the strip together, for the L1 cache keeps them as long.
        """
        if shape.layout == "NHWC":
            return max(1.0, 32 / self.thread_x)
        x, size = min(32, self.thread_x), shape.itemsize
        plane = shape.result_height * shape.result_width * size
        piece = (self.cols if self.vector == 1 else self.vector) * size
        lines = touched(LINE, piece, ((x, self.cols * size), (32 / x, plane)))
        return 1 + max(0.0, lines - 32 * piece / LINE)

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        kernel_h, strip = shape.kernel[0], self.sizes(shape)
        sums, inputs = (n * strip.channels for n in (self.cols, strip.columns))
        is_half = shape.itemsize == 2
        height, _ = part_sizes(shape)
        segments = -(-height // self.rows)
        blocks = (1 if shape.layout == "NCHW" else shape.batch) / target.units
        for count, size in self._split(shape):
            blocks *= -(-count // size)
        work = Stream(
            rows=(height + (segments - 1) * (kernel_h - 1)) / segments,
            multiply_adds=kernel_h * strip.products * strip.channels,
            accesses=strip.taken + self.cols // strip.store_step,
            conversions=inputs + sums / 2 if is_half else 0,
            pieces=self._pieces(shape),
            depth=self.depth,
            ahead=self.depth if is_half else self.depth - 1,
            spare=self._limit() - self._registers(shape),
            warps=self._warps,
            blocks=blocks,
            min_blocks=self.min_blocks,
        )
        expected = seconds(work, shape.layout, shape.least_bytes + shared_bytes(shape, self.thread_x, self.vector))
        return max(expected, self._stored_bytes(shape) / STORE_BANDWIDTH)

    def _stored_bytes(self, shape: Shape) -> float:
        """Count the bytes of the sectors of all stores, in NCHW some more than once."""
        store = self.sizes(shape).store_step
        often = min(self.cols, max(store, SECTOR // shape.itemsize)) / store
        return prod(shape.result_shape) * shape.itemsize * (often if shape.layout == "NCHW" else 1)

    def define(self, shape: Shape, epilogue: Epilogue) -> PrimFunc:
        from ..compute import define

        return define(self.sizes(shape), epilogue, self.rows, self.depth)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        n, segment, strip, vector = loops_of(sch, "stream")
        outer = [n]
        if shape.layout == "NCHW":
            sch.reorder(n, vector, segment, strip)
            outer, strip, vector = [], sch.fuse(n, vector), strip
        bz, tz = sch.split(segment, [None, self.thread_z])
        by, ty = sch.split(strip, [None, self.thread_y])
        bx, tx = sch.split(vector, [None, self.thread_x])
        # In NCHW, the parts of an image share sectors of memory: their blocks run together.
        blocks = [by, bz, bx] if not outer and shape.dilation[0] > 1 else [*outer, bz, by, bx]
        sch.reorder(*blocks, tz, ty, tx)
        bind(sch, blocks, tz, ty, tx)


_strip = lru_cache(maxsize=1024)(Strip)
"""Sizes of a strip, which many tiles have."""


@lru_cache(maxsize=256)
def _ranked(cls: type[RowStream], shape: Shape, target: Target) -> tuple[RowStream, ...]:
    tiles = by_time(cls.tiles(shape), shape, target)
    if not tiles:
        across = shape.result_width if shape.layout == "NCHW" else shape.result_channels
        return (cls(part_sizes(shape)[0], 1, 1, even_split(across, 64), 1, 1, 1, _least_depth(shape)),)
    return varied(tiles, lambda tile: (tile.rows, tile.cols))


def _least_depth(shape: Shape) -> int:
    return 2 if shape.itemsize == 4 else 1


def _vectors(shape: Shape) -> tuple[int, ...]:
    if shape.layout == "NCHW":
        return divisors(shape.row_lanes)
    channels, one = shape.result_channels, shape.channel_multiplier == 1
    return tuple(n for n in (1, 2, 4) if n == 1 or (one and channels % n == 0))


def _threads(shape: Shape, cols: int, vector: int) -> Iterator[tuple[int, int]]:
    width = part_sizes(shape)[1]
    strips = -(-width // cols) * apart(shape)[1]
    if shape.layout == "NCHW":
        if vector != max(n for n in _vectors(shape) if cols % n == 0):
            return
        for x, warps in product({even_split(strips, n) for n in (8, 32)}, (1, 2, 3, 4, 5, 6, 8)):
            y = min(32 * warps // x, shape.batch * shape.result_channels)
            if x * y >= 28 * warps or warps == 1:
                yield x, y
        return
    vectors = shape.result_channels // vector
    counts = {n for n in divisors(vectors) if 16 <= n <= 192} or {min(vectors, 32)}
    for x, y in product(sorted({*counts, even_split(vectors, 256)}), (1, 2, 4, 8)):
        if x * y <= 256 and y <= strips and (x * y % 32 == 0 or x * y <= 32 or x * y % 32 >= 26):
            yield x, y


def _heights(shape: Shape) -> list[int]:
    height, _ = part_sizes(shape)
    return sorted({height, *(-(-height // n) for n in (2, 4) if height >= 7 * n)})


def _widths(shape: Shape) -> list[int]:
    _, width = part_sizes(shape)
    widths = {even_split(width, n) for n in (2, 3, 4, 5, 7, 8, 10, 14, 16)}
    if shape.layout == "NCHW":  # whole vectors too: the last may hang over
        lanes = shape.row_lanes
        widths |= {-(-width // lanes) * lanes for width in widths}
    return sorted(widths)
