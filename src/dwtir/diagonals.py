"""The gradient of the weight as products of matrices: sizes and places.

Sixteen tiles of 8 outputs of a row are the depth of a product, one for each row of the kernel::

    sums[i, j] = sum over tiles of input[tile, i] * grad[tile, j]

Of it, the diagonals are of use: a tap of the kernel is the sum of those with
``i = shift + j * SW + kw * DW``. The tiles of a channel are numbered through all images,
columns first, and 16 that follow one another are a group.
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
    """Rows of a tile, each of 8 columns."""
    warps: int
    parts: int
    """Warps of a block, and blocks that share the groups of a channel."""

    @property
    def shift(self) -> int:
        """Columns added on the left, so that inputs begin with an aligned pair."""
        return self.shape.padding[1] % 2

    @property
    def spans(self) -> int:
        """Products that the inputs of a tile's row take."""
        return -(-(self.shift + window_of(self.shape, 1, COLUMNS)) // INPUTS)

    @property
    def window_rows(self) -> int:
        """Rows of inputs of a tile."""
        return window_of(self.shape, 0, self.rows)

    @property
    def down(self) -> int:
        """Tiles in a column of an image."""
        return -(-self.shape.out_height // self.rows)

    @property
    def across(self) -> int:
        """Tiles in a row of an image."""
        return -(-self.shape.out_width // COLUMNS)

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
