"""The gradient of the weight of NHWC images as products of matrices: sizes and places.

A unit is 8 gradients: of some neighbouring channels (`together`) and columns. Eight units of a
pair of images are the depth of a product, one for each row of the kernel and each `2 * columns`
inputs of a unit's window::

    sums[input, channel; column, channel] = sum over units of input * gradient

Of it, what has the same channel twice is of use: a tap is the sum of the diagonal with
``input = column * SW + kw * DW``. Images come in pairs, whose pixels are neighbours in the depth.

The rows of all images of a channel are numbered one after the other, as steps, with as many
between images as keep the gradients of one from the inputs of the next; `parts` blocks share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

from .shape import DepthwiseConv2dShape

LANES = 8
"""Rows and columns of a fragment, and channels of a vector that is loaded."""


@dataclass(frozen=True)
class Units:
    """Sizes for a shape."""

    shape: DepthwiseConv2dShape
    """A gradient of the weight."""
    channels: int
    together: int
    """Channels of a block, and of a unit."""
    images: int
    warps: int
    parts: int
    """Images that a block takes at a time, its warps, and blocks that share all steps."""
    ahead: int
    """Steps whose loads are under way."""

    @property
    def columns(self) -> int:
        """Columns of a unit."""
        return LANES // self.together

    @cached_property
    def spans(self) -> int:
        """Products that the window of a unit takes."""
        shape = self.shape
        last = (self.columns - 1) * shape.stride[1] + (shape.kernel[1] - 1) * shape.dilation[1]
        return last // (2 * self.columns) + 1

    @property
    def pairs(self) -> int:
        """Pairs of images that a block takes at a time."""
        return self.images // 2

    @cached_property
    def across(self) -> int:
        """Units of a row."""
        return -(-self.shape.out_width // self.columns)

    @cached_property
    def groups(self) -> int:
        """Products in depth, of 8 units each of a pair of images."""
        return -(-self.pairs * self.across // LANES)

    @cached_property
    def pitch(self) -> int:
        """Columns of inputs in shared memory from a pair of images to the next.

        Neighbouring units are in other banks, those of two pairs too.
        """
        shape = self.shape
        step, banks = self.columns * shape.stride[1], 32 // self.together
        least = max((self.across - 1) * step + self.window, shape.padding[1] + shape.width)
        return least + (self.across * step - least) % banks

    @property
    def window(self) -> int:
        """Columns of inputs that the products of a unit see."""
        return 2 * self.columns * self.spans

    @property
    def input_columns(self) -> int:
        """Columns in shared memory of a row of inputs of all images."""
        return max(self.pairs * self.pitch, int(self.place(LANES * self.groups - 1)) + self.window)

    @property
    def grad_columns(self) -> int:
        return LANES * self.groups * self.columns

    @property
    def stride(self) -> int:
        """Pairs of halves from a column to the next, so that lanes find them in all banks."""
        return self.channels + (self.together if self.channels // self.together % 2 == 0 else 0)

    @property
    def shared_halves(self) -> int:
        return 2 * self.stride * (self.shape.stride[0] * self.input_columns + self.grad_columns)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of shared memory; sums take the place of the operands, if those are larger."""
        staged, sums = 2 * self.shared_halves, 512 * self.warps * self.own * self.spans
        return staged if staged >= sums else staged + sums + 32

    @cached_property
    def own(self) -> int:
        """Channels of a warp, by units."""
        return self.channels // (self.together * self.warps)

    @property
    def ring(self) -> int:
        """Rows of gradients that a row of inputs meets."""
        shape = self.shape
        return (shape.kernel[0] - 1) * shape.dilation[0] // shape.stride[0] + 1

    @cached_property
    def steps(self) -> int:
        """Steps from an image's first to the next one's."""
        shape = self.shape
        first = shape.padding[0] // shape.stride[0]
        last = (shape.padding[0] + shape.height - 1) // shape.stride[0]
        return max(last + 1, shape.out_height + self.ring - 1 - first)

    @property
    def all_steps(self) -> int:
        return -(-self.shape.batch // self.images) * self.steps

    @property
    def part_steps(self) -> int:
        return -(-self.all_steps // self.parts)

    @cached_property
    def unrolled(self) -> int:
        """Steps in straight line."""
        return lcm(self.ring, self.ahead)

    @property
    def turns(self) -> int:
        """Turns of a part, the first of which has the gradients before it."""
        return -(-(self.part_steps + self.ring - 1) // self.unrolled)

    def even_parts(self, most: int) -> int:
        """Find the fewest parts that take no more turns than `most` do."""
        turns = replace(self, parts=min(most, self.all_steps)).turns
        return -(-self.all_steps // (turns * self.unrolled - self.ring + 1))

    @cached_property
    def loads(self) -> tuple[int, int]:
        """Vectors of inputs and of gradients of a step, each of a pair of images."""
        shape = self.shape
        vectors = self.pairs * self.channels // LANES
        return shape.stride[0] * vectors * shape.width, vectors * shape.out_width

    @cached_property
    def thread_loads(self) -> tuple[int, ...]:
        """Those of a thread."""
        return tuple(-(-loads // (32 * self.warps)) for loads in self.loads)

    @property
    def sums(self) -> int:
        """Sums of a thread."""
        return 4 * self.own * self.shape.kernel[0] * self.spans

    @property
    def products(self) -> int:
        """Products of a warp in a step."""
        return self.own * self.groups * self.shape.kernel[0] * self.spans

    def place(self, unit: Any) -> Any:
        """Find the first column of a unit's window in shared memory."""
        step = self.columns * self.shape.stride[1]
        return unit // self.across * self.pitch + unit % self.across * step
