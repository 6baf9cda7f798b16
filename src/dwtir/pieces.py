"""What blocks and threads of `split_image` have of their images."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import Any

from .images import WIDEST, Images
from .shape import Shape

WARP = 32
"""Threads of it."""

_ROWS, _BANDS, _COLUMNS = (1, 2, 3, 4, 5, 6, 8), (1, 2, 3, 4, 6, 8, 12, 16), range(7, 65)
"""Rows and columns of a thread, and bands of a block, that are worth comparing."""

_IDLE, _AGAIN, _SUMS = 1.06, 0.36, range(14, 81)
"""Results that threads have room for, of those in whole phases; what two blocks read, of all that is read or written,
whichever is more; sums of a thread."""

_UNROLLED = 2400
"""Multiply-adds of a thread in straight line, at most."""


@dataclass(frozen=True)
class Pieces:
    """Images in pieces of whole rows, each of a block, whose threads have bands of rows and parts across."""

    images: Images
    bands: int
    """Of a piece."""
    parts: int = 1
    """Of a row. If there are more, or more pieces, a block has one image, in NCHW."""
    pieces: int = 1
    """Of an image."""

    @property
    def shape(self) -> Shape:
        return self.images.shape

    @property
    def is_plain(self) -> bool:
        """Whether a block has images, and a thread rows, whole."""
        return self.parts == self.pieces == 1

    @property
    def all_bands(self) -> int:
        return self.bands * self.pieces

    @property
    def blocks(self) -> int:
        images = self.images
        return -(-self.shape.batch // images.images) * -(-self.shape.result_channels // images.channels) * self.pieces

    @property
    def each(self) -> int:
        """Threads of an image."""
        return self.bands * self.parts

    @property
    def rows(self) -> int:
        """Count the most rows of the result that a thread has."""
        return self.images.band(self.all_bands)

    @property
    def cols(self) -> int:
        """Count the most columns of the result that a thread has."""
        width, phases = self.images.result[1], self._phases
        return width if self.parts == 1 else -(-width // (phases * self.parts)) * phases

    @property
    def _phases(self) -> int:
        return 1 if self.shape.operation == "forward" else self.shape.stride[1]

    @property
    def fewest(self) -> int:
        """Count the columns that the last part has."""
        return self.images.result[1] - (self.parts - 1) * self.cols

    @property
    def step(self) -> int:
        """Columns of the image from one part's to those of the next."""
        return self.cols * self.shape.stride[1] if self.shape.operation == "forward" else self.cols // self._phases

    @property
    def lead(self) -> int:
        """Columns, or a few more, of whole vectors, that a part sees before its own."""
        if self.parts == 1:
            return 0
        before = self.shape.before[1] // self._phases
        return -(-before // self.lanes_in) * self.lanes_in

    @property
    def window(self) -> int:
        """Columns of the image that a thread loads."""
        if self.parts == 1:
            return self.images.source[1]
        seen = self.lead - self.shape.before[1] // self._phases + self.images.seen(self.cols, 1)
        return -(-seen // self.lanes_in) * self.lanes_in

    @property
    def lanes_in(self) -> int:
        """Columns of a row that a thread loads together from shared memory."""
        return gcd(self.shape.lanes, self.images.source[1], 0 if self.parts == 1 else self.step)

    @property
    def lanes_out(self) -> int:
        """Columns that it writes there together."""
        return gcd(self.shape.lanes, self.images.result[1], self.cols)

    @property
    def is_narrow(self) -> bool:
        """Tell whether narrower vectors are copied than could be."""
        return self.images.most_lanes < WIDEST

    @property
    def takes_pairs(self) -> bool:
        """Tell whether a thread loads aligned pairs of halves, wherever its rows begin."""
        return self._by_two(self.lanes_in, self.read)

    @property
    def puts_pairs(self) -> bool:
        return self._by_two(self.lanes_out, self.written)

    def _by_two(self, lanes: int, elements: int) -> bool:
        is_planar = self.shape.layout == "NCHW" and self.shape.itemsize == 2
        return is_planar and lanes == 1 and self.images.channels * self.stride(elements) % 2 == 0

    def is_beyond(self, col: int) -> bool:
        """Tell whether a column of a window may be beyond the image, in the last part or one before."""
        return (self.parts - 1) * self.step + col - self.lead >= self.images.source[1]

    @property
    def runs(self) -> Iterator[tuple[int, int]]:
        """List vectors of a window by their first column, and how many follow of which none is beside an image."""
        firsts = range(0, self.window, self.lanes_in)
        inside = [first for first in firsts if first >= self.lead and not self.is_beyond(first)]
        yield from ((first, 1) for first in firsts if first not in inside)
        if inside:
            yield inside[0], len(inside)

    def at(self, kw: int, col: int) -> int | None:
        """Find the place in its window of what a column of a part has under a tap, if it has one."""
        beside = kw * self.shape.dilation[1] + col - self.shape.before[1]
        return None if beside % self._phases else self.lead + self.images.under(1, kw, col)

    def columns(self, kw: int) -> tuple[range, int]:
        """List a thread's columns that a tap has an input for, and find the first one's place in its window."""
        if self.parts == 1:
            met = self.images.meets(1, kw, 0, self.cols)
            return met, self.images.under(1, kw, met.start) if met else 0
        first = next((col for col in range(self._phases) if self.at(kw, col) is not None), self.cols)
        return range(first, self.cols, self._phases), self.at(kw, first) or 0

    @property
    def is_unrolled(self) -> bool:
        """Tell whether each row that a thread sees has a code of its own, and weights stay while rows meet them.

        That takes up to 20 % less than a loop (130 kernels of 32 layers).
        """
        return self.images.phases == 1 and self.rows * self.cols * prod(self.shape.kernel) <= _UNROLLED

    @property
    def held(self) -> int:
        """Count the weights that a thread has registers for."""
        height, width = self.shape.kernel
        return min(height, self.rows) * width if self.is_unrolled else width

    @property
    def read(self) -> int:
        """Elements of a plane of the image that a block needs at most."""
        height, width = self.images.source
        return min(height, self.images.seen(self.most)) * width if self.pieces > 1 else height * width

    @property
    def written(self) -> int:
        """Elements of a plane of the result that a block has at most."""
        return self.most * self.images.result[1]

    @property
    def most(self) -> int:
        """Rows of the result that a block has at most."""
        return min(self.images.result[0], self.images.band(self.pieces))

    @property
    def least(self) -> int:
        """Rows of the result that a block has at least."""
        groups, phases = -(-self.images.result[0] // self.images.phases), self.images.phases
        return groups // self.pieces * phases - (groups * phases - self.images.result[0])

    @property
    def is_ragged(self) -> bool:
        """Tell whether the last rows are less than a group of a gradient's."""
        return self.images.result[0] % self.images.phases > 0

    def vectors_of(self, elements: int) -> float:
        """Count the vectors in which so many elements of a plane are copied."""
        return elements / self.images.lanes(elements) if self.pieces == 1 else self.vectors(elements)

    def vectors(self, elements: int) -> int:
        """Count the vectors that so many elements touch, wherever they begin."""
        lanes = self.shape.lanes
        return -(-(elements + lanes - 1) // lanes)

    def stride(self, elements: int) -> int:
        """Elements from a plane to the next in shared memory: an odd number of vectors."""
        if self.pieces == 1:
            return self.images.stride(elements)
        return (self.vectors(elements) | 1) * self.shape.lanes

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: the images or, in their place, the results; and the weights."""
        if self.pieces == 1:
            return self.images.shared_bytes
        more = max(map(self.stride, (self.read, self.written))) * self.shape.itemsize
        images = self.images.images * self.images.channels * more
        return -(-images // 64) * 64 + self.images.channels * self.images.taps * 4

    def top(self, piece: Any) -> Any:
        """Find the first row of the image that a piece may see, in the padding too."""
        return self.images.top(self.images.first(piece * self.bands, self.all_bands))


def divisions(shape: Shape) -> Iterator[tuple[int, int, int]]:
    """List ways worth comparing to divide an image: bands of a piece, parts of a row, and pieces."""
    images = Images(shape, 1, 1, 1)
    height, width = images.result
    down, across = (1, 1) if shape.operation == "forward" else shape.stride
    room = -(-height // down) * down * -(-width // across) * across
    parts = {-(-width // cols) for cols in _COLUMNS}
    for number, bands, rows in product(sorted(parts), _BANDS, _ROWS):
        pieces = -(-height // (rows * down * bands))
        tile = Pieces(images, bands, number, pieces)
        results = tile.rows * bands * pieces * tile.cols * number
        own = prod(images.source) / height * tile.most
        if (
            tile.fewest > 0
            and tile.cols % across == 0
            and tile.rows * tile.cols in _SUMS
            and results <= _IDLE**2 * room
            and tile.read <= own + _AGAIN * max(own, tile.written)
        ):
            yield bands, number, pieces
