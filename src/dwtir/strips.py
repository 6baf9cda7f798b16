"""The strips of `row_stream`: which columns and channels a thread has, in vectors."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from .shape import DepthwiseConv2dShape

__all__ = ["Strip"]

_RESIDUAL = 8
"""Registers that more than one row of a residual may take."""


@dataclass(frozen=True)
class Strip:
    """Sizes of a strip of `cols` columns, whose rows are loaded as vectors.

    Those are of channels in NHWC. In NCHW they are of columns, from the aligned one on that
    holds the first input, so that each lies wholly in the image or beside it.

    Parameters
    ----------
    shape : DepthwiseConv2dShape
    cols, vector : int
        Columns of the result, and elements of a load.
    """

    shape: DepthwiseConv2dShape
    cols: int
    vector: int

    @property
    def channels(self) -> int:
        """Channels of a thread."""
        return 1 if self.shape.layout == "NCHW" else self.vector

    @property
    def step(self) -> int:
        """Columns of a load."""
        return self.vector // self.channels

    @property
    def store_step(self) -> int:
        """Columns of a store."""
        if self.shape.layout == "NHWC":
            return 1
        return gcd(16 // self.shape.itemsize, self.cols, self.shape.result_width)

    @property
    def left(self) -> int:
        """Columns of padding."""
        left = self.shape.padding[1]
        return left if self.shape.operation == "forward" else self.shape.kernel[1] - 1 - left

    @property
    def shift(self) -> int:
        """Columns of a row before its first input."""
        return -self.left % self.step

    def residual_rows(self, depth: int) -> int:
        """Count the rows of a residual that are loaded ahead, of a window of so many rows.

        More than one where few registers hold them, for then a row takes little time.
        """
        most = _RESIDUAL // (self.cols * self.channels)
        return max(
            rows for rows in range(1, depth + 1) if depth % rows == 0 and rows <= max(1, most)
        )

    @property
    def loads(self) -> int:
        """Vectors of a row."""
        return -(-(self.shift + self.cols + self.shape.kernel[1] - 1) // self.step)
