"""The gradient of the weight as products of matrices: sizes and places.

Sixteen tiles of 8 outputs of a row are the depth of a product, one for each row of the kernel::

    sums[i, j] = sum over tiles of input[tile, i] * grad[tile, j]

Of it, the diagonals are of use: a tap of the kernel is the sum of those with
``i = shift + j * SW + kw * DW``. The tiles of a channel are numbered through all images,
columns first, and 16 that follow one another are a group.

In images of even widths a tile may have 16 columns, of which even and odd ones take a product each: gradients then
come in pairs as well, and meet the inputs of the same 16 columns. Where those do not suffice, tiles overlap, and a
gradient is of the one that has all inputs that it meets.
"""

from dataclasses import dataclass
from typing import Any

from .bands import COLUMNS, TILES, place_of, window_of
from .shape import Shape

INPUTS = 16
"""Rows of a product: inputs that lie side by side."""


@dataclass(frozen=True)
class Diagonals:
    """Sizes for a shape, if tiles have `rows` rows."""

    shape: Shape
    """A gradient of the weight."""
    rows: int
    """Rows of a tile."""
    warps: int
    parts: int
    """Warps of a block, and blocks that share the groups of a channel."""
    columns: int = COLUMNS
    """Columns of a tile: 8, or 16."""

    @property
    def beside(self) -> int:
        """Products that the gradients of a tile's row take."""
        return self.columns // COLUMNS

    @property
    def can_be_wide(self) -> bool:
        """Whether tiles may have 16 columns: all rows are pairs, tiles of 8 are not full, and some are own."""
        shape, (first, last) = self.shape, self.own
        is_even = shape.width % 2 == shape.out_width % 2 == 0
        return is_even and COLUMNS < shape.out_width != 2 * COLUMNS and first < last

    @property
    def own(self) -> tuple[int, int]:
        """The columns of 16 that meet inputs of these alone: the first, and the next beyond. Of even numbers."""
        shape = self.shape
        (_, left, *_), stride = shape.padding, shape.stride[1]
        first = -(-left // (2 * stride)) * 2
        last = min(INPUTS - 1, (INPUTS * stride + left - window_of(shape, 1, 1)) // stride)
        return first, first + (last + 1 - first) // 2 * 2

    @property
    def apart(self) -> int:
        """Columns from tile to tile."""
        first, last = self.own
        return last - first if self.beside > 1 else COLUMNS

    @property
    def alternates(self) -> bool:
        """Whether rows of an odd width come in aligned pairs, which begin a column earlier in every other row.

        All tiles begin with a row of a kind. With a stride registers do not suffice.
        """
        shape = self.shape
        return (
            shape.width % 2 == shape.stride[0] % 2 == 1
            and self.rows % 2 == shape.in_channels * shape.height % 2 == 0
            and window_of(shape, 1, COLUMNS) < INPUTS
        )

    @property
    def has_pairs(self) -> bool:
        return self.shape.width % 2 == 0 or self.alternates

    @property
    def kinds(self) -> int:
        """Kinds of rows of gradients: those that meet other kinds of rows of inputs have other sums."""
        return 1 + self.alternates

    def shift(self, channel: Any, row: Any) -> Any:
        """Count the columns added on the left of a row, for inputs to begin with an aligned pair, or with the image."""
        (top, left, *_), height = self.shape.padding, self.shape.height
        if self.beside > 1:
            return -left
        return (left + (channel * (height % 2) + row + top) * self.alternates) % 2

    @property
    def spans(self) -> int:
        """Products that the inputs of a tile's row take."""
        if self.beside > 1:
            return self.shape.stride[1]
        most = 1 if self.alternates else self.shift(0, 0)
        return -(-(most + window_of(self.shape, 1, COLUMNS)) // INPUTS)

    @property
    def window_rows(self) -> int:
        return window_of(self.shape, 0, self.rows)

    @property
    def down(self) -> int:
        return -(-self.shape.out_height // self.rows)

    @property
    def mean_rows(self) -> tuple[float, float]:
        """Rows of inputs and of gradients that a tile has in an image, on the average."""
        shape, top = self.shape, self.shape.padding[0]
        below = max(0, window_of(shape, 0, self.down * self.rows) - top - shape.height)
        inputs = self.down * self.window_rows - top - below
        return max(1.0, inputs / self.down), shape.out_height / self.down

    @property
    def across(self) -> int:
        shape = self.shape
        if self.beside == 1:
            return -(-shape.out_width // COLUMNS)
        # The last tile's own columns reach the end, or inputs end in it.
        own = -(-(shape.out_width - self.own[1]) // self.apart)
        ends = max(shape.out_width - INPUTS, -(-shape.width // shape.stride[1]) - INPUTS)
        return 1 + max(0, min(own, -(-ends // self.apart)))

    @property
    def groups(self) -> int:
        """Groups of 16 tiles, for each channel."""
        return -(-self.shape.batch * self.down * self.across // TILES)

    @property
    def turns(self) -> int:
        """Groups of a warp."""
        return -(-self.groups // (self.warps * self.parts))

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        return place_of(tile, self.down, self.across)
