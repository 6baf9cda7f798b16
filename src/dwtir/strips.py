"""The strips of `row_stream`: which columns and channels a thread has, in vectors."""

from __future__ import annotations

from dataclasses import dataclass

from .shape import DepthwiseConv2dShape

__all__ = ["Strip"]


@dataclass(frozen=True)
class Strip:
    """Sizes of a strip of `cols` columns, whose rows are loaded as vectors.

    A vector is of channels in NHWC. In NCHW it is of columns: a row is loaded from the
    aligned vector that holds its first input on, so that each lies wholly in the image or
    beside it.

    Parameters
    ----------
    shape : DepthwiseConv2dShape
        A forward convolution, or the data's gradient, of stride 1.
    cols, vector : int
        Columns of the result, and elements of a load.
    """

    shape: DepthwiseConv2dShape
    cols: int
    vector: int

    @property
    def has_planes(self) -> bool:
        """Whether vectors are of columns."""
        return self.shape.layout == "NCHW"

    @property
    def channels(self) -> int:
        """Channels of a thread."""
        return 1 if self.has_planes else self.vector

    @property
    def step(self) -> int:
        """Columns of a load."""
        return self.vector if self.has_planes else 1

    @property
    def store_step(self) -> int:
        """Columns of a store: up to 16 bytes, where results of a row divide into them."""
        widths = (8, 4, 2) if self.has_planes else ()
        size, width = self.shape.itemsize, self.shape.result_width
        return next((n for n in widths if n * size <= 16 and not (self.cols % n or width % n)), 1)

    @property
    def left(self) -> int:
        """Columns of padding on the left of what is read."""
        left = self.shape.padding[1]
        return left if self.shape.operation == "forward" else self.shape.kernel[1] - 1 - left

    @property
    def shift(self) -> int:
        """Columns of a row before its first input."""
        return -self.left % self.step

    @property
    def loads(self) -> int:
        """Vectors of a row."""
        return -(-(self.shift + self.cols + self.shape.kernel[1] - 1) // self.step)
