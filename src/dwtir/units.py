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

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd
from typing import Any

from .bands import window_of
from .pairs import ALIGNED
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
    """Images that a block takes at a time, its warps, which share its channels, and blocks that share all steps."""
    ahead: int
    """Steps whose copies are under way."""

    @property
    def columns(self) -> int:
        return LANES // self.together

    @property
    def window(self) -> int:
        """Columns of inputs that the gradients of a unit see."""
        return window_of(self.shape, 1, self.columns)

    @cached_property
    def spans(self) -> int:
        """Products that the window of a unit takes; what they see beyond it is of no use."""
        return -(-self.window // (2 * self.columns))

    @property
    def pairs(self) -> int:
        """Pairs of images that a block takes at a time."""
        return self.images // 2

    @cached_property
    def across(self) -> int:
        return -(-self.shape.out_width // self.columns)

    @property
    def units(self) -> int:
        return self.pairs * self.across

    @cached_property
    def groups(self) -> int:
        """Products in depth, of 8 units each of a pair of images."""
        return -(-self.units // LANES)

    @property
    def vectors(self) -> int:
        return self.channels // LANES

    @property
    def swaps(self) -> bool:
        """Whether a sector's two vectors change places in every second column of a unit.

        Then all sectors may begin where `cp.async` moves one at once, and lanes still read from all banks.
        """
        return self.vectors % 2 == 0

    def swapped(self, vector: Any, column: Any) -> Any:
        """Find the place of a vector of a pixel, by the column in its unit."""
        return vector // 2 * 2 + (vector + column) % 2 if self.swaps else vector

    @cached_property
    def together_read(self) -> int:
        """Neighbouring channels, of a unit each, that a lane reads together."""
        return gcd(self.own, max(2, LANES // self.together))

    @property
    def step(self) -> int:
        """Columns of inputs from a unit to the next."""
        return self.columns * self.shape.stride[1]

    @cached_property
    def apart(self) -> tuple[int, int]:
        """Vectors from a unit's inputs to the next unit's, and from its gradients."""
        inputs, grads = self._spread
        return inputs[1], grads[1]

    @cached_property
    def wavefronts(self) -> int:
        """Wavefronts of shared memory that all warps take to read the operands of a step."""
        of_each = max(1, self.together_read // 2) * max(crowd for crowd, _ in self._spread)
        reads = 2 * self.warps * self.own // self.together_read * self.groups
        return reads * (2 + 4 * self.shape.stride[0] * self.spans) * of_each

    @property
    def _spread(self) -> list[tuple[int, int]]:
        rows = min(LANES, 2 * LANES // self.together_read)  # of a fragment, read together
        columns = -(-rows // self.together)
        return [_spread(step, self.vectors, columns, self.swaps) for step in (self.step, self.columns)]

    def input_column(self, column: Any) -> Any:
        """Find a column of inputs in shared memory, in vectors."""
        return column // self.step * self.apart[0] + column % self.step * self.vectors

    def grad_column(self, column: Any) -> Any:
        return column // self.columns * self.apart[1] + column % self.columns * self.vectors

    @cached_property
    def pitch(self) -> int:
        """Vectors from an image's row of inputs to the next image's.

        The units of neighbouring images are in other banks too.
        """
        seen = (self.across - 1) * self.step + self.window
        least = self.input_column(max(seen, self.shape.padding[1] + self.shape.width) - 1) + self.vectors
        return int(least + (self.across * self.apart[0] - least) % LANES)

    @property
    def input_vectors(self) -> int:
        """Vectors in shared memory of a step, of the first images of all pairs."""
        return self.shape.stride[0] * self.pairs * self.pitch

    @property
    def grad_vectors(self) -> int:
        """Those of gradients, with zeros for all units that the last product has beside."""
        return min(self.units + 1, LANES * self.groups) * self.apart[1]

    @property
    def slot_halves(self) -> int:
        return 2 * LANES * (self.input_vectors + self.grad_vectors)

    @property
    def slots(self) -> int:
        """Steps in shared memory: those under way, the next one, and those that warps take or have just taken."""
        return self.ahead + 3

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of shared memory: of a barrier, and of operands, whose place sums take, unless 16 times as large."""
        few, many = sorted((2 * self.slots * self.slot_halves, self.rows_left * 4 * self.row_sums))
        return ALIGNED + many + (many > 16 * few) * -(-few // ALIGNED) * ALIGNED

    @cached_property
    def rows_left(self) -> int:
        """Rows of taps that a block leaves in shared memory at a time, in place of the operands."""
        room = 2 * self.slots * self.slot_halves // (4 * self.row_sums)
        rows = self.shape.kernel[0]
        return max(n for n in range(1, rows + 1) if rows % n == 0 and n <= max(1, room))

    @property
    def unit_sums(self) -> int:
        """Sums from a unit in shared memory to the next, in other banks."""
        return 128 * self.spans + 2

    @property
    def row_sums(self) -> int:
        return self.warps * self.own * self.unit_sums - 2

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

    @property
    def block_steps(self) -> int:
        """Steps of a block, which has the gradients before its part first."""
        return self.part_steps + self.ring - 1

    @property
    def turns(self) -> int:
        """Turns of a block, the last of which may have fewer steps."""
        return -(-self.block_steps // self.ring)

    def even_parts(self, most: int) -> int:
        """Find the fewest parts that take no more steps each than `most` do."""
        return -(-self.all_steps // replace(self, parts=min(most, self.all_steps)).part_steps)

    @cached_property
    def loads(self) -> tuple[int, int]:
        """Vectors of inputs and of gradients of a step."""
        shape = self.shape
        vectors = self.images * self.vectors
        return shape.stride[0] * vectors * shape.width, vectors * shape.out_width

    @cached_property
    def thread_loads(self) -> tuple[int, ...]:
        return tuple(-(-loads // (32 * self.warps)) for loads in self.loads)

    @property
    def sums(self) -> int:
        return 4 * self.own * self.shape.kernel[0] * self.spans

    @property
    def products(self) -> int:
        return self.own * self.groups * self.shape.kernel[0] * self.spans

    def place(self, unit: Any) -> Any:
        """Find the window of a unit in shared memory, in vectors."""
        return unit // self.across * self.pitch + unit % self.across * self.apart[0]


@cache
def _spread(step: int, pitch: int, columns: int, swaps: bool) -> tuple[int, int]:
    """Find how many vectors of four units lie in the same banks, at best, and how far apart units then are."""

    def crowd(apart: int) -> int:
        read = {column * pitch + unit * apart + column % 2 * swaps for column in range(columns) for unit in range(4)}
        return max(Counter(vector % LANES for vector in read).values())

    return min((crowd(apart), apart) for apart in range(step * pitch, step * pitch + LANES, 1 + swaps))
