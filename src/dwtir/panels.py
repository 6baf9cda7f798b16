"""The convolution of NHWC halves as products of matrices through shared memory: sizes and places.

The products are those of `dwtir.bands`. A block of threads has some channels of a panel of tiles, each of `rows` x 8
results; its warps have some channels each, of all the tiles. For a warp's lanes to read from all banks, a row of a
channel's inputs has in shared memory first those that tiles begin with, four of each tile, then the four that follow
each of these, and so on. What is called a slot is an input of a warp's channels.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from .bands import COLUMNS, DEPTH, TILES, place_of
from .shape import Shape

QUAD = 4
"""Inputs that lie side by side: lanes of a warp that hold the inputs of one tile."""

VECTOR = 8
"""Channels that move together between global and shared memory: 16 bytes."""


@dataclass(frozen=True)
class Panels:
    """Sizes of a block's share of a convolution with stride and dilation 1, or of its data's gradient."""

    shape: Shape
    rows: int
    """Rows of a tile."""
    down: int
    across: int
    """Tiles of a panel in a column and a row of an image; as many images as give 16 tiles."""
    warps: int
    channels: int
    """Warps of a block, and channels of each."""

    @property
    def input_rows(self) -> int:
        return self.rows + self.shape.kernel[0] - 1

    @property
    def depth_steps(self) -> int:
        """Products that a row of the kernel takes, to its last tap."""
        return -(-(COLUMNS + self.shape.kernel[1] - 1) // DEPTH)

    @property
    def pitch(self) -> int:
        """Numbers of tiles from one row of them to the next: a power of two."""
        return 1 << (self.across - 1).bit_length()

    @property
    def images(self) -> int:
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
        return min(self.down * self.rows, self.shape.result_height) + self.shape.kernel[0] - 1

    @property
    def beyond(self) -> int:
        """Elements after all inputs that tiles below the image may read, whose results none has."""
        rows = (self.down - 1) * self.rows + self.input_rows - self.staged_rows
        return rows * self.row_slots * self.channels

    @property
    def quads(self) -> int:
        """Quads in one line: the first ones of all tiles, and those that the last tile reads after it."""
        return self.across + DEPTH // COLUMNS * self.depth_steps - 1

    @property
    def used_slots(self) -> int:
        """Slots of a row of inputs that hold any."""
        return self.quads * COLUMNS

    @cached_property
    def row_slots(self) -> int:
        """Slots from one row of inputs to the next: tiles below each other use other banks."""
        return min(
            range(self.used_slots, self.used_slots + QUAD * QUAD),
            key=lambda slots: self._conflicts(slots * self.rows, 0),
        )

    @cached_property
    def image_slots(self) -> int:
        """Slots from one image to the next: tiles of some images use other banks."""
        down = self.rows * self.row_slots
        rows = self.staged_rows * self.row_slots
        return min(range(rows, rows + 2 * QUAD * QUAD), key=lambda slots: self._conflicts(down, slots))

    def _conflicts(self, down: int, image: int) -> int:
        """Count the lanes whose banks others have, with tiles and images so many slots apart."""
        banks = 64 // self.channels
        tiles = (self.place(tile) for tile in range(banks // QUAD))
        firsts = {n * image + y * down + min(x, self.across - 1) * QUAD for n, y, x in tiles}
        return len(firsts) * QUAD - len({(first + x) % banks for first in firsts for x in range(QUAD)})

    @property
    def result_slots(self) -> int:
        return self.rows * TILES * COLUMNS

    @property
    def pieces(self) -> int:
        """Vectors of a block's channels."""
        return self.warps * self.channels // VECTOR

    def apart(self, slots: int) -> int:
        """Elements from one warp's slots to the next one's, so that vectors use all banks."""
        return (slots + (VECTOR // self.pieces - slots) % (2 * VECTOR)) * self.channels

    @property
    def tap_stride(self) -> int:
        """Elements from one tap's weights to the next one's, so that lanes use other banks."""
        return (self.warps + 1) * self.channels

    def planes(self, has_residual: bool) -> tuple[int, int]:
        """Elements from one warp's inputs to the next one's, and from its results to the next's.

        With a residual, which is there before, results have a place of their own.
        """
        slots = self.images * self.image_slots, self.result_slots
        if not has_residual:
            slots = max(slots), max(slots)
        return self.apart(slots[0]), self.apart(slots[1])

    def shared_bytes(self, has_residual: bool) -> int:
        """Bytes of shared memory: the inputs, the results and the weights."""
        staged, finished = self.planes(has_residual)
        elements = self.warps * (staged + finished * has_residual) + self.beyond
        filters = self.tap_stride * prod(self.shape.kernel)
        return (elements + filters) * self.shape.itemsize

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        return place_of(tile, self.down, self.pitch)

    def quad(self, number: int) -> int:
        """Find the first slot of a quad of a tile, beside the tile's own first."""
        return (number % 2 * self.quads + number // 2) * QUAD
