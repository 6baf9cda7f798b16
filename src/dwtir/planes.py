"""The images of a convolution copied for `Bands`: where each input and weight has its place.

A plane is one channel of all images, row after row, in one line of positions, so that
rows of any width begin with an aligned pair. In NHWC, whose weights are as far apart as
its pixels, the weights of the channel follow the images.
"""

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from .bands import Bands

_THREADS, _FEW_THREADS, _MANY = 256, 32, 2**22
"""Threads of a block of the copies, and of fewer elements than so many: for all SMs."""

_VECTOR = 8


@dataclass(frozen=True)
class Planes:
    """Sizes of the planes for `bands`."""

    bands: Bands

    @property
    def pitch(self) -> int:
        """Positions from one row to the next."""
        _, width = self.bands.shape.source
        return width + width % 2

    @property
    def images(self) -> int:
        height, _ = self.bands.shape.source
        return self.bands.shape.batch * height * self.pitch

    @property
    def weights(self) -> int:
        """Positions of the weights of a channel behind its images."""
        shape = self.bands.shape
        return prod(shape.kernel) * shape.channel_multiplier if shape.layout == "NHWC" else 0

    @property
    def positions(self) -> int:
        """All positions of a plane, in whole blocks of the copy."""
        _, threads, places = self.split
        step = threads * places
        return -(-(self.images + self.weights) // step) * step

    @property
    def split(self) -> tuple[tuple[int, int], int, int]:
        """Threads over channels and channels of one, threads over positions and positions of one.

        A thread turns 8 channels of 8 pixels round in registers; threads of neighbouring channels read a pixel
        together, four of positions write 64 bytes.
        """
        count = self.bands.source_channels
        threads = _THREADS if count * (self.images + self.weights) > _MANY else _FEW_THREADS
        if self.bands.shape.layout == "NCHW":
            return (1, 1), threads, 4
        channels = channel_threads(count)
        return channels, threads // channels[0], _VECTOR

    def place(self, position: Any) -> tuple[Any, Any, Any]:
        """Find the image, the row and the column of a position; a column may be beyond the last."""
        row, (height, _) = position // self.pitch, self.bands.shape.source
        return row // height, row % height, position % self.pitch


def channel_threads(channels: int) -> tuple[int, int]:
    """Deal channels out: to at most 8 threads side by side, with vectors of 16 bytes each."""
    vector = gcd(channels, _VECTOR)
    return next(n for n in range(8, 0, -1) if channels // vector % n == 0), vector
