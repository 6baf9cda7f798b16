"""A dilated convolution as one of smaller images: space to batch.

Rows that are a dilation apart are an image of their own, in which taps are one below the other, and so
are columns: a thread then has use for all inputs that lie between its first and its last.
"""

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from .shape import Shape

SPLITS = ("none", "rows", "both")
"""What may be an image of its own: none, every so many rows, or of these every so many columns."""


class SpaceToBatch(NamedTuple):
    """What becomes of the images of a shape."""

    shape: Shape
    small: Shape
    """The same convolution of small images, whose last rows and columns may lie beside an image: in NCHW those
    of an image are channels, in NHWC a batch."""
    down: int
    across: int
    """Rows and columns from one of a small image to the next, and small images below and beside each other."""

    @property
    def images(self) -> int:
        return self.down * self.across


def splits_of(shape: Shape) -> tuple[str, ...]:
    """List the splits that a shape can have; in NHWC, whose channels are side by side anyway, of both or none."""
    is_turned = shape.operation == "grad_data" and shape.channel_multiplier == 1
    is_for = max(shape.dilation) > 1 and shape.stride == (1, 1) and (shape.operation == "forward" or is_turned)
    if not is_for or not _has_indices(shape):
        return SPLITS[:1]
    return SPLITS if shape.layout == "NCHW" else ("none", "both")


def _has_indices(shape: Shape) -> bool:
    """Tell whether all small images, which may be a dilation larger together, have indices of 32 bits."""
    sides = (shape.height, shape.width), shape.padding[:2], shape.padding[2:], shape.dilation
    largest = prod(size + above + below + apart for size, above, below, apart in zip(*sides, strict=True))
    return shape.batch * shape.out_channels * largest < 2**31


@lru_cache(maxsize=256)
def space_to_batch(shape: Shape, split: str) -> SpaceToBatch:
    """Split the images of a shape by its dilation."""
    if split == "none":
        return SpaceToBatch(shape, shape, 1, 1)
    (top, left, bottom, right), (down, across) = shape.padding, shape.dilation
    across, apart = (across, 1) if split == "both" else (1, across)
    height, width = -(-shape.height // down), -(-shape.width // across)
    above, before = top // down, left // across
    below = -(-(shape.height + top + bottom) // down) - height - above
    behind = -(-(shape.width + left + right) // across) - width - before
    images, is_planar = down * across, shape.layout == "NCHW"
    small = replace(
        shape,
        batch=shape.batch * (1 if is_planar else images),
        in_channels=shape.in_channels * (images if is_planar else 1),
        height=height,
        width=width,
        padding=(above, before, below, behind),
        dilation=(1, apart),
    )
    return SpaceToBatch(shape, small, down, across)
