"""Several threads share an image: each computes a band of the result's rows, or a part of it.

Loop nest, for blocks of `thread_y` images x `thread_x` channels, where images are whole::

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

Bands have the same code, for warps may have several: a short loop over rows or, where products are few, a straight
line, in which weights stay in registers from the first row of the band that meets them to the last. Planes
lie in shared memory an odd number of vectors apart: of the widest, which takes the fewest copies, or of a row's, whose
loads then share no banks. Weights lie as those of `whole_image`.

With a stride, a band of the data's gradient has whole groups of rows, each of which meets other
rows of the kernel, so that all bands still have one code.

In NHWC each thread copies pixels of its own channel, and writes its results itself.

A large image of NCHW is in `pieces` of whole rows, each of a block, which reads a few of its neighbours' rows too.
They begin anywhere in a vector, and are copied in vectors all the same. A row may be in `parts`, each of a thread,
which then are `threadIdx.y`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod

from ..bands import COLUMNS
from ..images import WIDEST, Images, is_small, lane_counts
from ..pieces import WARP, Pieces, divisions
from ..shape import Shape
from ..target import Target
from ..typed import Schedule
from .banded_channels import BandedChannels
from .banded_matrix import BandedMatrix
from .banded_planes import BandedPlanes
from .base import Strategy, Values, by_time, is_beaten, paying, varied
from .channel_pairs import ChannelPairs
from .channel_vector import ChannelVector
from .cost import registers_for
from .loops import bind_threads, loops_of
from .register_window import RegisterWindow
from .row_stream import RowStream
from .split_cost import expected_seconds
from .tiles import BLOCK_COUNTS, MAX_BLOCKS, MAX_SIDE, MAX_SUMS, MAX_THREADS, MAX_UNROLLED, SHARED, phases

_MOST_PIXELS, _WHOLE, _MOST_TAPS = 1 << 22, 2304, 1024
"""Pixels of an image and of a result, where pieces are worth while, and taps of a kernel. With a stride, a gradient's
results are as many times more."""

_MOST_BANDS = 64
"""Threads of a block in `threadIdx.z`."""

_OTHERS, _OTHERS_STRIDED = 9, 6
"""Registers for addresses, tests and loads on the way; and of a gradient with a stride."""

_HELD = 14
"""Columns of a row of float32, under many taps, that a thread of one row has at a time, at most."""

_ONE_WARP, _MANY, _MUCH = 23, 8, 2600
"""Threads too few for a block of one warp; such blocks of an SM, and bytes of each, of which gradients with a stride
take 5 % less time (16 layers)."""

_FEW_BANDS, _BEST_SUMS, _PAIRED_SUMS = 4, 63, range(32, 97)
"""Bands; sums of a thread: with more, too few warps wait for shared memory in turns. Blocks of one warp and few bands,
of pairs of halves, take up to 14 % less time from 11x11 to 19x19, 3x3."""

_MANY_TAPS = 100
"""Of a kernel whose weights take so long to load that two images share them."""

# The share of others' expected time that it may take: of products on tensor cores, of very few taps, of large images
# and with a stride; and of windows in registers, whose rows take longer than expected where they are no vectors.
# Of large images; of vectors of 4 halves; or of many taps, wide vectors and strided gradients.
_OF_PRODUCTS, _OF_PAIRS, _OF_CHANNELS, _OF_SINGLES, _OF_VECTORS = (1.0, 1.1, 0.93, 0.8), 1.02, 0.93, 1.18, 1.07
_OF_LARGE = 1.03, 0.97, 0.8
# Of rows a dilation apart; of blocks that are all there at once, and vectors of 4; and of its own time, of whole rows.
_OF_DILATED, _OF_ROUND, _OF_WIDE = 1.05, 0.95, 0.85
_OF_MUCH = 0.88  # of many taps, whose windows of vectors take less than expected
_OF_LOOPS = 0.75  # of large images under many taps, in a loop over rows
_OF_STRIDED = {"forward": 0.8, "grad_data": 1.2}
_OF_SMALL, _SMALL = 1.1, 144  # of images of no more pixels

_FILLED = 0.7
"""Of tensor cores' columns: with less 10x10 takes 18 % less time."""

_FEW = (2, 4, 8)
"""Channels of a block of pieces."""

_NARROW, _NARROW_STRIDED, _FEW_TAPS, _VERY_FEW_TAPS = 16, 24, 25, 9
"""Columns of an image, of a strided result, and taps, too few for tensor cores to be ahead. Of large images with more
taps windows and streams have less arithmetic."""


@dataclass(frozen=True)
class SplitImage(Strategy):
    """Tile of the split images."""

    device = (
        f"a GPU (at least 2 pixels, in NHWC as many as shared memory has room for, and at most {MAX_SUMS} columns; "
        f"at most {_MOST_TAPS} taps, channel_multiplier 1)"
    )

    thread_x: int
    thread_y: int
    """Threads of a block over channels and images."""
    bands: int
    """Bands of a block's rows, each of a thread, or several."""
    min_blocks: int = 1
    parts: int = 1
    """Threads of a row, if not one."""
    pieces: int = 1
    """Blocks of an image, if not one. Parts and pieces are of single images, in NCHW."""
    lanes: int = WIDEST
    """Elements that are copied together at most, in NCHW: all that can be, or those of a row's vectors."""

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        return (
            super()._is_for(shape, target)
            and is_small(shape, _MOST_PIXELS)
            and prod(shape.kernel) <= _MOST_TAPS
            and any(tile.fits(shape, target) for tile in _small_tiles(shape))
            # Where no image is read, TVM lets threads write results before all have come.
            and Images(shape, 1, 1, 1).multiply_adds > 0
        )

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        """Tell whether it is expected to be faster than windows and streams; in NHWC halves, than all."""
        if shape.layout == "NHWC" and shape.stride != (1, 1):
            return False
        own, taps = cls.choose(shape, target), prod(shape.kernel)
        seconds, sizes = own.expected_seconds(shape, target), own.sizes(shape)
        loops = taps > _FEW_TAPS and _is_large(shape) and shape.dilation == (1, 1) and not sizes.is_unrolled
        if (loops and (shape.layout == "NHWC" or taps <= _MANY_TAPS)) or not own._passes(shape, target):
            return False
        if shape.layout == "NHWC" and shape.itemsize == 2:
            rivals = BandedPlanes, ChannelPairs, BandedChannels, RowStream, ChannelVector
            return not is_beaten(seconds, rivals, shape, target)
        others = BandedPlanes, BandedMatrix, RowStream, RegisterWindow, ChannelVector
        other = next(paying(others, shape, target))
        expected = other.expected_seconds(shape, target)
        if expected is None:  # of tensor cores
            width, loads = shape.result_width, other.loads if isinstance(other, BandedMatrix) else ""
            if shape.batch == 1:
                return False
            if loads == "pairs" and shape.stride != (1, 1):
                return width < _NARROW_STRIDED
            if loads == "planes":
                is_empty = COLUMNS < width < _FILLED * (-(-width // COLUMNS) * COLUMNS)
                return is_empty and width < _NARROW and taps <= _VERY_FEW_TAPS
            return width < _NARROW and taps <= _FEW_TAPS
        together = target.units * max(1, own._at_a_time(shape))
        margin = _margin(shape, other, sizes.blocks <= together, sizes.takes_pairs)
        return seconds < (min(margin, _OF_LOOPS) if loops else margin) * expected

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> "tuple[SplitImage, ...]":
        return _ranked(shape, target)

    @classmethod
    def tiles(cls, shape: Shape, target: Target) -> "Iterator[SplitImage]":
        """List the tiles worth comparing, each with as many blocks as an SM has room for."""
        sizes = _channels(shape, target), _batches(shape), _bands(shape), lane_counts(shape)
        whole = (cls(x, y, bands, lanes=lanes) for x, y, bands, lanes in product(*sizes))
        found = [*cls._passing(whole, shape, target)]
        yield from found
        if shape.layout == "NCHW" and (not found or _is_large(shape)):
            pieces = (cls(x, 1, bands, 1, *rest) for x, (bands, *rest) in product(_FEW, divisions(shape)))
            yield from cls._passing(pieces, shape, target)

    @classmethod
    def _passing(cls, tiles: "Iterable[SplitImage]", shape: Shape, target: Target) -> "Iterator[SplitImage]":
        """Give tiles as many blocks as an SM has room for, or as there are for each."""
        for tile in tiles:
            blocks = tile.sizes(shape).blocks
            tile = replace(tile, min_blocks=max(1, min(tile._at_a_time(shape), -(-blocks // target.units))))
            if tile._passes(shape, target):
                yield tile

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        return {
            "thread_x": _channels(shape, target),
            "thread_y": _batches(shape),
            "bands": _bands(shape),
            "min_blocks": BLOCK_COUNTS,
            "parts": (1,),
            "pieces": (1,),
            "lanes": lane_counts(shape),
        }

    def is_promising(self, shape: Shape) -> bool:
        return self._registers(shape) <= registers_for(self._threads, self.min_blocks)

    def check(self, shape: Shape, target: Target) -> None:
        pieces, sums = self.sizes(shape), self._sums(shape)
        self._require_most("bands", self.bands * self.pieces, _most_bands(shape))
        self._require(
            pieces.is_plain or (shape.layout == "NCHW" and self.thread_y == 1),
            "parts and pieces",
            (self.parts, self.pieces),
            "1 but in NCHW, of single images",
        )
        self._require_in("lanes", lane_counts(shape) if pieces.is_plain else (WIDEST,))
        self._require(pieces.fewest > 0, "parts", self.parts, "as many as have columns")
        self._require_most("bands of a block", self.bands, _MOST_BANDS)
        vector = shape.lanes
        self._require(
            self.pieces == 1 or min(pieces.each, pieces.least * shape.result_width) >= vector,
            "threads or results of an image",
            pieces.each,
            "a vector's elements or more",
        )
        # TVM confuses the loops of a block whose threads are all of one channel.
        self._require(self.thread_x > 1, "thread_x", self.thread_x, "at least 2")
        self._require_most("sums of a thread", sums, MAX_SUMS)
        self._require_most("multiply-adds", sums * shape.kernel[1], MAX_UNROLLED)
        self._require_launch(target, threads=self._threads, shared_bytes=self._shared_bytes(shape, target))

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        at_a_time = max(self.min_blocks, self._at_a_time(shape))
        pieces = self.sizes(shape)
        seconds = expected_seconds(pieces, at_a_time, target.units)
        is_wide = pieces.is_plain and shape.stride == (1, 1) and _is_large(shape) and not pieces.takes_pairs
        return seconds * _OF_WIDE if is_wide else seconds

    @property
    def _threads(self) -> int:
        return self.thread_x * self.thread_y * self.bands * self.parts

    def _registers(self, shape: Shape) -> int:
        pieces = self.sizes(shape)
        taps, others = pieces.held, _OTHERS
        if _is_strided(shape):
            taps, others = -(-taps // shape.stride[1]), _OTHERS_STRIDED
        is_one = pieces.is_plain and pieces.rows == 1 and shape.stride == (1, 1) and shape.itemsize == 4
        held = _HELD if is_one and prod(shape.kernel) >= _FEW_TAPS else pieces.window
        return self._sums(shape) + min(pieces.window, held) + taps + others

    def _at_a_time(self, shape: Shape) -> int:
        threads = -(-self._threads // 32) * 32
        counts = range(1, min(MAX_BLOCKS, MAX_THREADS // threads) + 1)
        needed, taken = self._registers(shape), self.sizes(shape).shared_bytes + 1024
        fitting = (n for n in counts if needed <= registers_for(threads, n))
        return min(max(fitting, default=1), SHARED // taken)

    def _passes(self, shape: Shape, target: Target) -> bool:
        is_plain = self.sizes(shape).is_plain
        by_pairs = is_plain and self._is_one_by_pairs(shape)
        most = max(_BEST_SUMS, _least_sums(shape)) if is_plain and not by_pairs else MAX_SUMS
        enough = self.is_promising(shape) and (self._threads > WARP or by_pairs or self._has_much(shape))
        return enough and self._sums(shape) <= most and self.fits(shape, target)

    def _is_one_by_pairs(self, shape: Shape) -> bool:
        is_few = self._threads == WARP and self.bands <= _FEW_BANDS and prod(shape.kernel) <= _VERY_FEW_TAPS
        return is_few and self._sums(shape) in _PAIRED_SUMS and self.sizes(shape).takes_pairs

    def _has_much(self, shape: Shape) -> bool:
        """Tell whether one warp is enough."""
        pieces, is_large = self.sizes(shape), self._threads > _ONE_WARP and self.min_blocks >= _MANY
        return pieces.is_plain and _is_strided(shape) and is_large and pieces.shared_bytes >= _MUCH

    def _sums(self, shape: Shape) -> int:
        pieces = self.sizes(shape)
        return pieces.rows * pieces.cols

    def _shared_bytes(self, shape: Shape, target: Target) -> int:
        return self.sizes(shape).shared_bytes * target.widening(shape.dtype)

    def sizes(self, shape: Shape) -> Pieces:
        images = Images(shape, self.thread_x, self.thread_y, shape.result_height, most_lanes=self.lanes)
        return Pieces(images, self.bands, self.parts, self.pieces)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        sch.bind(sch.fuse(*loops_of(sch, "images")), "blockIdx.x")
        for name in ("gather", "filters", "depthwise_conv2d", "epilogue", *["store"] * (shape.layout == "NCHW")):
            *_, z, y, x = loops_of(sch, name)
            bind_threads(sch, z, y, x)


@lru_cache(maxsize=256)
def _ranked(shape: Shape, target: Target) -> tuple[SplitImage, ...]:
    tiles = by_time(SplitImage.tiles(shape, target), shape, target)
    small = sorted(_small_tiles(shape), key=lambda tile: not tile.fits(shape, target))
    return varied(tiles, lambda tile: (tile.thread_x, tile.thread_y)) or tuple(small[:1])


def _small_tiles(shape: Shape) -> tuple[SplitImage, ...]:
    """List tiles of few registers and little shared memory, one of which fits where any does."""
    most = _most_bands(shape)
    whole = SplitImage(2, 1, min(most, _MOST_BANDS))
    if shape.layout == "NHWC":
        return (whole,)
    vector, across = shape.lanes, phases(shape, 1)
    cols = max(across, min(MAX_SIDE, shape.result_width // vector) // across * across)
    parts = -(-shape.result_width // cols)
    return whole, SplitImage(2, 1, 1, 1, parts, most), SplitImage(2, 1, vector, 1, 1, max(1, most // vector))


def _margin(shape: Shape, other: Strategy, is_round: bool, by_pairs: bool) -> float:
    """Find the share of the other's expected time, which errs, that it may take, if blocks are all there at once."""
    is_large = _is_large(shape)
    if isinstance(other, BandedMatrix):
        plain, few, large, strided = _OF_PRODUCTS
        if shape.stride != (1, 1):
            return _OF_PAIRS if by_pairs and not is_large else strided
        if is_large:
            return _OF_PAIRS if by_pairs else large
        return few if prod(shape.kernel) <= _VERY_FEW_TAPS else plain
    lanes = other.lanes if isinstance(other, RegisterWindow) else 0
    if lanes == 4 and shape.itemsize == 4 and shape.stride == (1, 1) and prod(shape.kernel) > _FEW_TAPS:
        return _OF_MUCH
    if max(shape.dilation) > 1 and shape.layout == "NCHW" and lanes != 1:
        return _OF_DILATED
    if not lanes:
        return _OF_CHANNELS if shape.layout == "NHWC" else 1.0
    if is_large and lanes > 1:
        sure, of_four_halves, unsure = _OF_LARGE
        if lanes == 8 or prod(shape.kernel) > _VERY_FEW_TAPS or _is_strided(shape):
            return unsure
        return of_four_halves if shape.itemsize == 2 and lanes == 4 else sure
    if shape.stride != (1, 1) and (shape.operation == "grad_data" or shape.itemsize == 4):
        return _OF_SMALL if is_small(shape, _SMALL) and shape.operation == "forward" else _OF_STRIDED[shape.operation]
    if lanes == 1:
        return _OF_SINGLES
    return _OF_ROUND if is_round and lanes >= 4 else _OF_VECTORS


def _is_large(shape: Shape) -> bool:
    return not is_small(shape, _WHOLE * _parts(shape))


def _is_strided(shape: Shape) -> bool:
    return _parts(shape) > 1


def _parts(shape: Shape) -> int:
    return 1 if shape.operation == "forward" else prod(shape.stride)


def _channels(shape: Shape, target: Target) -> tuple[int, ...]:
    counts = (2, 4, 8, 16, 32)
    if shape.layout == "NCHW":
        return counts
    most = target.shared_bytes_per_block
    roomy = tuple(n for n in counts if SplitImage(n, 1, 1)._shared_bytes(shape, target) <= most)
    return tuple(n for n in roomy if n * shape.itemsize >= 32) or roomy[-1:]


def _batches(shape: Shape) -> tuple[int, ...]:
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
    return Images(shape, 1, 1, 1).phases * shape.result_width


def _most_bands(shape: Shape) -> int:
    return -(-shape.result_height // Images(shape, 1, 1, 1).phases)
