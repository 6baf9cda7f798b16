"""The images of `whole_image` and `split_image`: what a thread and a block have, in vectors."""

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from .shape import Shape

WIDEST = 8
"""Elements that are ever copied together."""

_ALIKE = 16
"""How many times as large one of two buffers may be that TVM puts in one place."""


def is_small(shape: Shape, most: int) -> bool:
    """Tell whether it is one that `Images` is for, with 2 to so many pixels an image."""
    sizes = shape.height * shape.width, shape.out_height * shape.out_width
    return shape.channel_multiplier == 1 and min(sizes) > 1 and max(sizes) <= most


def lane_counts(shape: Shape) -> tuple[int, ...]:
    """List the most elements of a vector: all, and of float32 in NCHW those of a row's, if fewer."""
    planes, rows = (shape.source, (shape.result_height, shape.result_width)), lanes_of_rows(shape)
    is_less = any(gcd(shape.lanes, prod(size)) > rows for size in planes)
    return (WIDEST, rows) if is_less and shape.layout == "NCHW" and shape.itemsize == 4 else (WIDEST,)


def lanes_of_rows(shape: Shape) -> int:
    """Count the elements of the widest vectors of rows, read or computed."""
    return max(shape.row_lanes, gcd(shape.lanes, shape.result_width))


@dataclass(frozen=True)
class Images:
    """Sizes of a block's share of a convolution, or of the data's gradient."""

    shape: Shape
    channels: int
    images: int
    """Of a block."""
    rows: int
    """Rows of the result that a thread sums together."""
    turns: int = 1
    """Images of a thread, one after the other."""
    most_lanes: int = WIDEST
    """Elements of NCHW that are copied together at most."""

    @property
    def source(self) -> tuple[int, int]:
        """Rows and columns of the image that is read."""
        return self.shape.source

    @property
    def result(self) -> tuple[int, int]:
        """Rows and columns of the image that is computed."""
        return self.shape.result_height, self.shape.result_width

    @property
    def ahead(self) -> int:
        """Rows of an image that are loaded ahead in NHWC, if another image comes before."""
        return -(-self.source[0] // 2)

    def meets(self, axis: int, tap: int, first: int, end: int) -> range:
        """List the results, of those from one to before another, that a tap has an input for."""
        stride, size = self.shape.stride[axis], self.source[axis]
        before = self.shape.before[axis] - tap * self.shape.dilation[axis]
        if self.shape.operation == "forward":
            last = (size - 1 + before) // stride
            return range(max(first, -(-before // stride)), min(end, last + 1))
        last, passed = (size - 1) * stride + before, max(0, -(-(first - before) // stride))
        return range(before + passed * stride, min(end, last + 1), stride)

    @property
    def phases(self) -> int:
        """Rows of the result that meet different rows of the kernel: those of a gradient's stride.

        Bands have all of them.
        """
        return 1 if self.shape.operation == "forward" else self.shape.stride[0]

    def band(self, bands: int) -> int:
        """Count the most rows of the result that one of so many bands has."""
        return -(-self.result[0] // (self.phases * bands)) * self.phases

    def seen(self, rows: int, axis: int = 0) -> int:
        """Count the rows (axis 0) or columns (axis 1) of the image that so many neighbours of the result may see."""
        stride, reach = self.shape.stride[axis], (self.shape.kernel[axis] - 1) * self.shape.dilation[axis]
        if self.shape.operation == "forward":
            return (rows - 1) * stride + reach + 1
        return (rows - 1 + reach) // stride + 1

    def first(self, band: Any, bands: int) -> Any:
        """Find the first row of the result of one of so many bands."""
        return band * -(-self.result[0] // self.phases) // bands * self.phases

    def above(self, seen: int, row: int) -> int:
        """Find how far down the dilated kernel a row of a band is, for the row of the image that it sees so late."""
        down = self.shape.stride[0]
        if self.shape.operation == "forward":
            return seen - row * down
        return self.shape.before[0] % down + seen * down - row

    def are_apart(self, rows: int) -> bool:
        """Tell whether no two of so many neighbours of the result have a tap over the same row of the image."""
        return self.phases == 1 and (rows - 1) * self.shape.stride[0] < self.shape.dilation[0] > 1

    def top(self, result: Any) -> Any:
        """Find the first row of the image that a row of the result may see, or a group of a gradient's `phases`."""
        if self.shape.operation == "forward":
            return result * self.shape.stride[0] - self.shape.before[0]
        return result // self.phases - self.shape.before[0] // self.phases

    def turned(self, tap: Any) -> Any:
        """Find the weight of a tap: a gradient has the kernel turned round."""
        return tap if self.shape.operation == "forward" else prod(self.shape.kernel) - 1 - tap

    def under(self, axis: int, tap: int, result: int) -> int:
        """Find the row (axis 0) or column (axis 1) of the image that a result has under a tap."""
        stride = self.shape.stride[axis]
        beside = tap * self.shape.dilation[axis] - self.shape.before[axis]
        return result * stride + beside if self.shape.operation == "forward" else (result + beside) // stride

    @property
    def multiply_adds(self) -> int:
        """Products of one result image: of the taps that do not lie in the padding."""
        return prod(
            sum(len(self.meets(axis, tap, 0, size)) for tap in range(self.shape.kernel[axis]))
            for axis, size in enumerate(self.result)
        )

    def vector(self, pixels: int) -> int:
        """Elements of a plane that a thread reads or writes together in shared memory: in NHWC of a row at most."""
        most = self.most_lanes if self.shape.layout == "NCHW" else lanes_of_rows(self.shape)
        return gcd(self.shape.lanes, most, pixels)

    def stride(self, pixels: int) -> int:
        """Elements from one plane to the next in shared memory.

        They are an odd number of vectors, so that neighbouring threads use other banks.
        """
        vector = self.vector(pixels)
        return pixels + (vector if pixels // vector % 2 == 0 else 0)

    def lanes(self, pixels: int) -> int:
        """Elements of a vector that is copied between global and shared memory: in NHWC one."""
        shape, most = self.shape, gcd(self.shape.lanes, self.most_lanes)
        if shape.layout == "NHWC":
            return 1
        if self.stride(pixels) > pixels:
            return gcd(most, pixels)
        return gcd(most, self.channels * pixels, shape.result_channels * pixels)

    @property
    def taps(self) -> int:
        """Elements from one channel's weights to the next in shared memory."""
        return prod(self.shape.kernel) | 1

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, if used: the images and, in NCHW in their place, the results; and the weights."""
        sides = self.source, self.result if self.shape.layout == "NCHW" else self.source
        less, more = sorted(self.stride(prod(size)) for size in sides)
        pixels = more if more <= _ALIKE * less else more + less
        images = self.images * self.channels * pixels * self.shape.itemsize
        return -(-images // 16) * 16 + self.channels * self.taps * 4
