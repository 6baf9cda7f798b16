"""The convolution of NHWC halves as products of matrices through shared memory: sizes and places.

The products are those of `dwtir.bands`. A block of threads has some channels of a panel of
tiles, each of `rows` x 8 results; its warps have some channels each, of all the tiles. So that
the lanes of a warp read from all banks, a channel's inputs do not lie in shared memory in their
order: of a row of inputs there are first those that tiles begin with, four of each tile, then the
four that follow each of these, and so on. What is called a slot is an input of a warp's channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from .bands import COLUMNS, DEPTH, TILES, Bands
from .shape import DepthwiseConv2dShape

QUAD = 4
"""Inputs that lie side by side: lanes of a warp that hold the inputs of one tile."""

_VECTOR = 8
"""Channels that move together between global and shared memory: 16 bytes."""


@dataclass(frozen=True)
class Panels:
    """Sizes of a block's share of a convolution, or of the data's gradient with stride 1.

    Parameters
    ----------
    shape : DepthwiseConv2dShape
    rows : int
        Rows of a tile.
    down, across : int
        Tiles of a panel in a column and a row of an image; as many images as give 16 tiles.
    warps, channels : int
        Warps of a block, and channels of each.
    """

    shape: DepthwiseConv2dShape
    rows: int
    down: int
    across: int
    warps: int
    channels: int

    @property
    def bands(self) -> Bands:
        """The sizes that do not depend on the panel."""
        return Bands(self.shape, self.rows, self.shape.kernel[0], is_copied=True)

    @property
    def before(self) -> tuple[int, int]:
        """Rows and columns of padding before the image that is read."""
        bands = self.bands
        return bands.top, bands.left - bands.shift

    @property
    def span(self) -> tuple[int, int]:
        """Rows and columns of inputs that a tile reads."""
        shape, sizes = self.shape, (self.rows, COLUMNS)
        down, across = (
            (size - 1) * shape.stride[axis] + (shape.kernel[axis] - 1) * shape.dilation[axis] + 1
            for axis, size in enumerate(sizes)
        )
        return down, across

    @property
    def meetings(self) -> dict[int, list[tuple[int, int]]]:
        """List which of a tile's rows a row of its inputs meets, at which of the kernel's."""
        found: dict[int, list[tuple[int, int]]] = {}
        for r, kh in product(range(self.rows), range(self.shape.kernel[0])):
            row = r * self.shape.stride[0] + kh * self.shape.dilation[0]
            found.setdefault(row, []).append((r, kh))
        return dict(sorted(found.items()))

    @property
    def depth_steps(self) -> int:
        """Products that a row of the kernel takes, to its last tap."""
        return -(-self.span[1] // DEPTH)

    @property
    def pitch(self) -> int:
        """Numbers of tiles from one row of them to the next: a power of two."""
        return 1 << (self.across - 1).bit_length()

    @property
    def images(self) -> int:
        """Images of a panel."""
        return min(self.shape.batch, max(1, TILES // (self.down * self.pitch)))

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """Panels over images, rows and columns, and blocks over channels."""
        shape = self.shape
        return (
            -(-shape.batch // self.images),
            -(-shape.result_height // (self.down * self.rows)),
            -(-shape.result_width // (self.across * COLUMNS)),
            -(-shape.result_channels // (self.warps * self.channels)),
        )

    @property
    def staged_rows(self) -> int:
        """Rows of inputs of a panel, of one image: those that results of the image need."""
        height = min(self.down * self.rows, self.shape.result_height)
        return (
            (height - 1) * self.shape.stride[0] + self.span[0] - self._tall + self.shape.stride[0]
        )

    @property
    def _tall(self) -> int:
        """Rows of inputs from one tile's first to that of the tile below."""
        return self.rows * self.shape.stride[0]

    @property
    def beyond(self) -> int:
        """Elements after all inputs that tiles below the image may read, whose results none has."""
        rows = (self.down - 1) * self._tall + self.span[0] - self.staged_rows
        return rows * self.row_slots * self.channels

    @property
    def quads(self) -> tuple[int, int]:
        """Quads from one tile's first to the next one's, and of each of these how many."""
        apart = COLUMNS // QUAD * self.shape.stride[1]
        return apart, self.across + (DEPTH // QUAD * self.depth_steps - 1) // apart

    @property
    def used_slots(self) -> int:
        """Slots of a row of inputs that hold any."""
        apart, each = self.quads
        return apart * each * QUAD

    @cached_property
    def row_slots(self) -> int:
        """Slots from one row of inputs to the next: tiles below each other use other banks."""
        return min(
            range(self.used_slots, self.used_slots + QUAD * QUAD),
            key=lambda slots: self._conflicts(slots * self._tall, 0),
        )

    @property
    def slots(self) -> int:
        """Slots of a warp's inputs."""
        return self.images * self.image_slots

    @cached_property
    def image_slots(self) -> int:
        """Slots from one image to the next: tiles of some images use other banks."""
        down = self._tall * self.row_slots
        rows = self.staged_rows * self.row_slots
        return min(
            range(rows, rows + 2 * QUAD * QUAD), key=lambda slots: self._conflicts(down, slots)
        )

    def _conflicts(self, down: int, image: int) -> int:
        """Count the lanes whose banks others have, with tiles and images so many slots apart."""
        banks = 64 // self.channels
        tiles = (self.place(tile) for tile in range(banks // QUAD))
        firsts = {n * image + y * down + min(x, self.across - 1) * QUAD for n, y, x in tiles}
        return len(firsts) * QUAD - len(
            {(first + x) % banks for first in firsts for x in range(QUAD)}
        )

    def gathered(self, together: int) -> int:
        """Slots of a row that some threads load together, who all have one at a time."""
        return math.gcd(self.used_slots, together)

    @property
    def result_slots(self) -> int:
        """Slots of a warp's results."""
        return self.rows * TILES * COLUMNS

    @property
    def pieces(self) -> int:
        """Vectors of a block's channels."""
        return self.warps * self.channels // _VECTOR

    def apart(self, slots: int) -> int:
        """Elements from one warp's slots to the next one's, so that vectors use all banks."""
        return (slots + (_VECTOR // self.pieces - slots) % (2 * _VECTOR)) * self.channels

    @property
    def tap_stride(self) -> int:
        """Elements from one tap's weights to the next one's, so that lanes use other banks."""
        return (self.warps + 1) * self.channels

    def planes(self, has_residual: bool) -> tuple[int, int]:
        """Elements from one warp's inputs to the next one's, and from its results to the next's.

        With a residual, which is there before, results have a place of their own.
        """
        slots = self.slots, self.result_slots
        if not has_residual:
            slots = max(slots), max(slots)
        return self.apart(slots[0]), self.apart(slots[1])

    def shared_bytes(self, has_residual: bool) -> int:
        """Bytes of shared memory: the inputs, the results and the weights."""
        staged, finished = self.planes(has_residual)
        elements = self.warps * (staged + finished * has_residual) + self.beyond
        filters = self.tap_stride * self.shape.kernel[0] * self.shape.kernel[1]
        return (elements + filters) * self.shape.itemsize

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        """Find a tile of a panel: its image, and its place in a column and in a row of tiles."""
        return (
            tile // (self.down * self.pitch),
            tile // self.pitch % self.down,
            tile % self.pitch,
        )

    def quad(self, number: int) -> int:
        """Find the first slot of a quad of a tile, beside the tile's own first."""
        apart, each = self.quads
        return (number % apart * each + number // apart) * QUAD
