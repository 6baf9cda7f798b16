"""The convolution of images as products of matrices: sizes and places.

Eight neighbouring results of a row are one row of a product with a banded matrix::

    out[x] = sum over k of input[k] * band[k, x]    band[k, x] = weight[(k - shift - x * SW) / DW]

A tensor core multiplies 16 rows of 16 inputs by 16 rows of such a band. Its rows are
tiles of the result: 8 columns, and `rows` rows, of which each takes a product for each
row of the kernel. The tiles of a channel are numbered through all images, columns first,
so that small images fill a product together.

A dilation parts an image into as many images down, of every other row and so on, and an even one
into two across. Tiles are of one part, and an even column lies in a product with the odd one
beside it: what lies between a part's columns is loaded for the other part.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from .shape import Shape
from .sheets import LEAST_VECTOR, VECTOR, Rows, Sheet, lay_out

TILES, COLUMNS, DEPTH = 16, 8, 16
"""Rows, columns and depth of the product: tiles of results, results of a row, inputs."""

LANES = 8
"""Tiles, and those beside them, that lanes of a warp have, four each."""


def place_of(tile: Any, down: Any, across: Any) -> tuple[Any, Any, Any]:
    """Find a tile of those numbered through images, columns first: its image, its place in a column and in a row."""
    return tile // (down * across), tile // across % down, tile % across


def window_of(shape: Shape, axis: int, results: int) -> int:
    """Count the rows (axis 0) or columns (axis 1) of inputs that neighbouring results see."""
    return (results - 1) * shape.stride[axis] + (shape.kernel[axis] - 1) * shape.dilation[axis] + 1


@dataclass(frozen=True)
class Bands:
    """Sizes for a shape, if tiles have `rows` rows and a step takes `kernel_rows` of the kernel."""

    shape: Shape
    """A forward convolution, or the data's gradient of one with stride 1 and multiplier 1, which is
    a forward convolution of the output's gradient with the kernel turned round."""
    rows: int
    kernel_rows: int
    """Rows of a tile, and of the kernel in a step; of the image, where products go by these."""
    is_copied: bool = False
    """Whether `Planes` are read, to which the images were copied, or the images themselves."""
    run: int = 2
    """Inputs side by side that a lane loads."""
    is_staged: bool = False
    """Whether warps have planes of inputs and results in shared memory, which come and leave by vectors."""

    @property
    def is_turned(self) -> bool:
        return self.shape.operation == "grad_data"

    @property
    def has_pairs(self) -> bool:
        """Whether inputs are loaded in pairs, aligned to 4 bytes."""
        return self.is_copied or not self.is_odd or self.alternates

    @property
    def is_odd(self) -> bool:
        return self.shape.source[1] % 2 == 1

    @property
    def alternates(self) -> bool:
        """Whether rows of an odd width begin with a pair and in the middle of one, in turn.

        The pairs of half of the rows then begin a column earlier, and so does their band. All tiles, and steps, have to
        begin with a row of the same kind.
        """
        shape, (height, _) = self.shape, self.shape.source
        return (
            not self.is_copied
            and self.is_odd
            and self.source_channels * height % 2 == 0
            and (self.rows * shape.stride[0] % 2 == 0 or self.down == 1)
            and (self.kernel_steps == 1 or self.kernel_rows * shape.dilation[0] % 2 == 0)
        )

    @property
    def alternates_results(self) -> bool:
        """Whether results are stored in aligned pairs in rows of an odd width, too.

        Those of half of the rows then begin a column before the image.
        """
        shape = self.shape
        return (
            self.alternates
            and not self.goes_by_image
            and shape.result_width % 2 == 1
            and shape.result_channels * shape.result_height % 2 == 0
            and (self.rows % 2 == 0 or self.down == 1)
        )

    @property
    def parts(self) -> tuple[int, int]:
        """Parts of an image down and across, each a convolution with less of a dilation."""
        shape = self.shape
        if self.is_copied or self.is_odd or shape.stride != (1, 1):
            return 1, 1
        down, right = shape.dilation
        return down, 1 + (right % 2 == 0 and self.shape.before[1] % 2 == 0)

    @property
    def dilation(self) -> tuple[int, int]:
        """That is left in a part."""
        (down, right), (rows, columns) = self.shape.dilation, self.parts
        return down // rows, right // columns

    @property
    def can_stage(self) -> bool:
        """Whether groups of tiles can have planes of vectors, and each channel of results inputs of its own."""
        shape = self.shape
        planes = prod(shape.source), shape.result_height * shape.result_width
        return (
            not self.is_copied
            and not self.is_odd
            and self.parts == (1, 1)
            and shape.channel_multiplier == shape.stride[1] == self.depth_steps == 1
            and shape.result_width % 2 == 0
            and all(plane % LEAST_VECTOR == 0 for plane in planes)
            and LANES % self.stacked == 0
            and not self.goes_by_image
        )

    @property
    def images(self) -> int:
        """Images of which groups have planes that are staged."""
        return LANES // self.stacked

    @cached_property
    def stacked(self) -> int:
        """Tiles of a column that a group has of planes that are staged: all, but one of four that share banks.

        Narrow vectors and 5x5, which take more registers, are not faster for it.
        """
        if not self.down == self.across == 2 or self.shape.batch < 2 * LANES:
            return self.down
        together = self._sheet(2)
        is_held = together.vector < VECTOR and self.shape.kernel[0] == 5
        return 2 if is_held or together.alike == 1 else 1

    @property
    def sides(self) -> int:
        """Groups of the same planes, if these are staged: of two tiles side by side of each row of tiles."""
        return self.across // 2 * (self.down // self.stacked)

    @cached_property
    def sheet(self) -> Sheet:
        """Sizes of a plane of inputs that is staged, with all that tiles read of it."""
        return self._sheet(self.stacked)

    def _sheet(self, stacked: int) -> Sheet:
        shape, (height, width) = self.shape, self.shape.source
        down = (self.down * self.rows - 1) * shape.stride[0]
        down += (self.kernel_steps * self.kernel_rows - 1) * shape.dilation[0]
        rows = Rows(width, self.rows * shape.stride[0], stacked, self.top, max(height, down - self.top + 1))
        return lay_out(rows, height * width, LANES // stacked)

    @cached_property
    def leaving(self) -> Sheet:
        """Sizes of a plane of results that is staged."""
        height, width = self.shape.result_height, self.shape.result_width
        return lay_out(Rows(width, self.rows, self.stacked, 0, height), height * width, self.images)

    def staged_bytes(self, turns: int, has_residual: bool = False) -> int:
        """Count the bytes of planes of so many groups one after another: with more than one, of the next ones too."""
        read = self.sheet.pitch + self.leaving.pitch * has_residual
        return 2 * self.images * (read * (1 + (turns > 1)) + self.leaving.pitch)

    @property
    def source_channels(self) -> int:
        return self.shape.out_channels if self.is_turned else self.shape.in_channels

    @property
    def top(self) -> int:
        return self.shape.before[0]

    @property
    def left(self) -> int:
        """Columns of padding, and `shift`."""
        return self.shape.before[1] + self.shift

    @property
    def shift(self) -> int:
        """Columns added on the left, so that inputs begin with a pair, at the most."""
        if self.alternates:
            return 1 + self.shape.stride[1] * self.alternates_results
        return -self.shape.before[1] % self.run if self.has_pairs else 0

    @property
    def has_fours(self) -> bool:
        """Whether inputs can be loaded by fours, aligned to 8 bytes."""
        return not self.is_copied and self.parts[1] == 1 and self.shape.source[1] % 4 == 0

    @property
    def depth_steps(self) -> int:
        """Products that a row of the kernel takes: of 16 inputs each, to the image's last."""
        shape, (_, width) = self.shape, self.shape.source
        span = (COLUMNS - 1) * shape.stride[1] + (shape.kernel[1] - 1) * self.dilation[1]
        return -(-min(self.shift + span + 1, (self.left + width) // self.parts[1]) // DEPTH)

    @property
    def goes_by_image(self) -> bool:
        """Whether a result's products go by rows of the image, not of the kernel.

        So they do in tiles of the whole height, if every result sees every row.
        """
        shape, (height, _) = self.shape, self.shape.source
        return (
            self.down == 1
            and shape.dilation[0] == 1
            and self.top - (self.rows - 1) * shape.stride[0] >= 0
            and self.top + height <= shape.kernel[0]
        )

    @property
    def product_rows(self) -> int:
        """Rows of the kernel, or of the image, that the products go by."""
        return self.shape.source[0] if self.goes_by_image else self.shape.kernel[0]

    @property
    def kernel_steps(self) -> int:
        """Steps that these rows take; the last may have rows of zeros."""
        return -(-self.product_rows // self.kernel_rows)

    @property
    def down(self) -> int:
        parts, _ = self.parts
        return -(-self.shape.result_height // (self.rows * parts)) * parts

    @property
    def across(self) -> int:
        """Tiles in a row of an image.

        Of an odd width three are four, and so on, the last one empty: 8 tiles then lie in fewer rows, which costs less.
        Of staged planes two are side by side.
        """
        tiles = -(-self.shape.result_width // (COLUMNS * self.parts[1]))
        if self.is_staged:
            return tiles + tiles % 2
        return tiles + 1 if self.alternates and tiles % 4 == 3 else tiles

    @property
    def groups(self) -> int:
        """Groups of 16 tiles, for each channel."""
        if self.is_staged:
            return -(-self.shape.batch // self.images) * self.sides
        return -(-self.shape.batch * self.down * self.across * self.parts[1] // TILES)

    def window_rows(self, kernel_rows: int) -> int:
        """Count the input rows that a tile reads in a step of so many rows."""
        if self.goes_by_image:
            return kernel_rows
        return (self.rows - 1) * self.shape.stride[0] + (kernel_rows - 1) * self.dilation[0] + 1

    def band_rows(self, kernel_rows: int) -> int:
        """Count the rows of the kernel that a tile reads in a step of so many rows."""
        others = (self.rows - 1) * self.shape.stride[0] if self.goes_by_image else 0
        return others + kernel_rows

    @property
    def loads(self) -> int:
        return 4 * self.depth_steps * self.window_rows(self.kernel_rows)

    @property
    def products(self) -> int:
        return self.rows * self.kernel_rows * self.depth_steps

    @property
    def band_registers(self) -> int:
        return 2 * self.depth_steps * self.band_rows(self.kernel_rows) * (1 + self.alternates)

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        return place_of(tile, self.down, self.across)
