"""The strips of `row_stream`: which columns and channels a thread has, in vectors."""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from .shape import Shape

_RESIDUAL = 8
"""Registers that more than one row of a residual may take."""


def apart(shape: Shape) -> tuple[int, int]:
    """Count the rows and columns from a result of a thread to its next.

    A dilation parts the image into as many, each a convolution without. Columns of NCHW stay together, for vectors. A
    single tap has no dilation.
    """
    down, right = (distance if taps > 1 else 1 for distance, taps in zip(shape.dilation, shape.kernel, strict=True))
    return down, 1 if shape.layout == "NCHW" else right


def has_parts(shape: Shape) -> bool:
    """Tell whether the parts of an image are convolutions: none empty, all padded alike."""
    sizes = min(shape.height, shape.out_height), min(shape.width, shape.out_width)
    return all(
        padding % distance == 0 and distance <= size
        for padding, distance, size in zip(shape.padding, 2 * apart(shape), 2 * sizes, strict=True)
    )


def part_sizes(shape: Shape) -> tuple[int, int]:
    """Count the rows and columns of the result's first part, which no other has more of."""
    down, right = apart(shape)
    return -(-shape.result_height // down), -(-shape.result_width // right)


@dataclass(frozen=True)
class Strip:
    """Sizes of a strip of `cols` columns, whose rows are loaded as vectors.

    Those are of channels in NHWC. In NCHW they are of columns, from the aligned one on that
    holds the first input, so that each lies wholly in the image or beside it.
    """

    shape: Shape
    cols: int
    vector: int
    """Columns of the result, and elements of a load."""

    @property
    def channels(self) -> int:
        return 1 if self.shape.layout == "NCHW" else self.vector

    @property
    def step(self) -> int:
        return self.vector // self.channels

    @property
    def store_step(self) -> int:
        if self.shape.layout == "NHWC":
            return 1
        return gcd(self.shape.lanes, self.cols, self.shape.result_width)

    @property
    def spread(self) -> int:
        """Columns of the window from a tap to the next."""
        return self.shape.dilation[1] // apart(self.shape)[1]

    @property
    def reach(self) -> int:
        """Columns of the window, all taps' together."""
        return self.cols + (self.shape.kernel[1] - 1) * self.spread

    @property
    def left(self) -> int:
        """Columns of padding."""
        return self.shape.before[1] // apart(self.shape)[1]

    @cached_property
    def inside(self) -> tuple[int, int]:
        """The window's columns, from which to which: of strips that are a whole row those in the image."""
        if self.cols < part_sizes(self.shape)[1]:
            return 0, self.reach
        first, end = max(0, self.left), self.left - -self.shape.source[1] // apart(self.shape)[1]
        return first, max(first + 1, min(self.reach, end))  # a gradient may begin and end inside

    @cached_property
    def columns(self) -> int:
        return self.inside[1] - self.inside[0]

    @cached_property
    def products(self) -> int:
        """Products of a row of the window and a row of the kernel."""
        first, end = self.inside
        columns = (column + tap * self.spread for column in range(self.cols) for tap in range(self.shape.kernel[1]))
        return sum(first <= column < end for column in columns)

    @cached_property
    def shift(self) -> int:
        """Columns of a row before its first input."""
        return -self.left % self.step

    def residual_rows(self, depth: int) -> int:
        """Count the rows of a residual that are loaded ahead, of a window of so many: several where they are small."""
        most = _RESIDUAL // (self.cols * self.channels)
        return max(rows for rows in range(1, depth + 1) if depth % rows == 0 and rows <= max(1, most))

    @cached_property
    def loads(self) -> int:
        return -(-(self.shift + self.reach) // self.step)

    @cached_property
    def taken(self) -> int:
        """Those of them that hold a column inside."""
        first, end = self.inside
        columns = (load * self.step - self.shift for load in range(self.loads))
        return sum(first < column + self.step and column < end for column in columns)
