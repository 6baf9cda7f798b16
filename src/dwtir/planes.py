"""The images of a convolution copied for `Bands`: where each input and weight has its place.

A plane is one channel of all images, row after row, in one line of positions, so that
rows of any width begin with an aligned pair. In NHWC, whose weights are as far apart as
its pixels, the weights of the channel follow the images.

"tested" planes hold the images alone, and who reads them asks what is padding. "stored" ones
hold the padding too, and loads need no test. The rows below an image and above the next are the
same, as are the columns right of a row and left of the next, which are as many as a tile reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .bands import COLUMNS, DEPTH, Bands

__all__ = ["Planes"]

THREADS = 256
"""Threads of a block of the copies."""

_VECTOR = 8


@dataclass(frozen=True)
class Planes:
    """Sizes of the planes for `bands`, whose `zeros` are "stored" or "tested"."""

    bands: Bands

    @property
    def is_stored(self) -> bool:
        """Whether the padding has places of its own."""
        return self.bands.zeros == "stored"

    @property
    def top(self) -> int:
        """Rows above the first image."""
        return self.bands.top if self.is_stored else 0

    @property
    def left(self) -> int:
        """Positions left of the first column."""
        return self.bands.left if self.is_stored else 0

    @property
    def rows(self) -> int:
        """Rows from one image to the next."""
        bands, (height, _) = self.bands, self.bands.source
        if not self.is_stored:
            return height
        shape, last = bands.shape, bands.kernel_steps * bands.kernel_rows - 1
        seen = (shape.result_height - 1) * shape.stride[0] + last * shape.dilation[0] + 1
        return max(self.top + height, seen - max(0, self.top))

    @property
    def pitch(self) -> int:
        """Positions from one row to the next."""
        _, width = self.bands.source
        if not self.is_stored:
            return width + width % 2
        needed = max(self.left + width, self._last_columns - max(0, self.left))
        return -(-needed // _VECTOR) * _VECTOR

    @property
    def _last_columns(self) -> int:
        """Columns up to the last that a tile reads."""
        bands = self.bands
        first = (bands.across - 1) * COLUMNS * bands.shape.stride[1]
        return first + bands.depth_steps * DEPTH

    @property
    def images(self) -> int:
        """Positions of all images, and of what the last tile reads below them."""
        bands, batch = self.bands, self.bands.shape.batch
        if not self.is_stored:
            return batch * self.rows * self.pitch
        last = (bands.down - 1) * bands.rows * bands.shape.stride[0]
        last += bands.window_rows(bands.kernel_steps * bands.kernel_rows) - 1
        return ((batch - 1) * self.rows + last) * self.pitch + self._last_columns

    @property
    def weights(self) -> int:
        """Positions of the weights of a channel behind its images."""
        shape = self.bands.shape
        taps = shape.kernel[0] * shape.kernel[1] * shape.channel_multiplier
        return taps if shape.layout == "NHWC" else 0

    @property
    def positions(self) -> int:
        """All positions of a plane, in whole blocks of the copy."""
        _, threads, places = self.split
        step = threads * places
        return -(-(self.images + self.weights) // step) * step

    @property
    def split(self) -> tuple[tuple[int, int], int, int]:
        """Threads over channels and channels of one, threads over positions and positions of one.

        A thread turns 8 channels of 8 pixels round in registers; threads of neighbouring
        channels read a pixel together, and four of neighbouring positions write 64 bytes.
        """
        if self.bands.shape.layout == "NCHW":
            return (1, 1), THREADS, 4
        channels = channel_threads(self.bands.source_channels)
        return channels, THREADS // channels[0], _VECTOR

    def place(self, position: Any) -> tuple[Any, Any, Any]:
        """Find the image, the row and the column of a position; some are outside of the image."""
        row = position // self.pitch
        return (
            row // self.rows,
            row % self.rows - self.top,
            position % self.pitch - self.left,
        )


def channel_threads(channels: int) -> tuple[int, int]:
    """Deal channels out: to at most 8 threads side by side, with vectors of 16 bytes each."""
    vector = next(lanes for lanes in (8, 4, 2, 1) if channels % lanes == 0)
    return next(n for n in range(8, 0, -1) if channels // vector % n == 0), vector
