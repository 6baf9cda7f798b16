"""Planes of images in shared memory, whose rows lie for lanes to find as many as can be in other banks. In halves."""

from collections import Counter
from itertools import product
from math import gcd
from typing import Any, NamedTuple

VECTOR, LEAST_VECTOR = 8, 4
"""Halves that planes are copied by, at the most and at least."""

BANKS = 64
"""Halves that lie in different banks."""


class Rows(NamedTuple):
    """Rows of an image, of which each tile has as many, and rows of zeros around them."""

    width: int
    of_tile: int
    tiles: int
    before: int
    """Rows of zeros before the image, and of it and zeros that follow."""
    after: int


class Sheet(NamedTuple):
    """Planes of such rows, with a pad after each tile's."""

    rows: Rows
    vector: int
    pad: int
    begin: int
    """Where the image begins, with zeros before it."""
    vectors: int
    pitch: int
    """From plane to plane."""
    alike: int
    """Of what lanes load at once, the most that lies in one bank."""

    @property
    def own(self) -> int:
        return self.rows.of_tile * self.rows.width

    def place(self, tile: Any, row: Any) -> Any:
        """Find a row, counted from a tile's first."""
        padded = tile * (self.own + self.pad) + row // self.rows.of_tile * self.pad
        return self.begin + padded + row * self.rows.width

    def source(self, place: Any) -> tuple[Any, list[Any]]:
        """Find what lies at a place, by its number in the image, and tell whether anything does."""
        place -= self.begin
        if not self.pad:
            return place, [place >= 0]
        tile, at = place // (self.own + self.pad), place % (self.own + self.pad)
        return tile * self.own + at, [place >= 0, at < self.own]


def lay_out(rows: Rows, size: int, images: int) -> Sheet:
    """Lay planes of so many halves out for lanes, each with four pairs of a row of a tile and an image.

    Pads are worth while where a block has one image: up to 15 % less time.
    """
    widest, own = gcd(VECTOR, size), rows.of_tile * rows.width
    padded = [v for v in (VECTOR, LEAST_VECTOR) if images == 1 and widest % v == own % v == 0]
    layouts = [(widest, 0), *((v, pad) for v in padded for pad in range(v, BANKS, v))]
    return min((_sheet(rows, *layout, images) for layout in layouts), key=lambda sheet: sheet.alike)


def _sheet(rows: Rows, vector: int, pad: int, images: int) -> Sheet:
    together = 2 * vector if vector == VECTOR else vector  # whole sectors
    begin = -(-(rows.before * rows.width - -rows.before // rows.of_tile * pad) // together) * together
    vectors = -(-(begin + rows.after * rows.width + (rows.after - 1) // rows.of_tile * pad) // vector)

    def alike(pitch: int, apart: int = rows.of_tile * rows.width + pad) -> int:
        places = product(range(images), range(rows.tiles), range(4))
        return max(Counter((n * pitch + tile * apart + lane * 2) % BANKS for n, tile, lane in places).values())

    pitch = min(range(vectors * vector, vectors * vector + BANKS, vector), key=alike)
    return Sheet(rows, vector, pad, begin, vectors, pitch, alike(pitch))
