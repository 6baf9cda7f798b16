"""What strategies share that sum the weight's gradient of halves on tensor cores."""

from abc import abstractmethod
from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar

from ..shape import Shape
from ..target import Target
from ..typed import Self
from .base import by_time, expected, varied
from .part_sums import PartSums
from .tap_sums import TapSums

MAX_PRODUCTS = 1024
"""Products of a turn, in straight line."""


class MatrixSums(PartSums):
    """Products, of which the first kernel sums diagonals."""

    dtypes = ("float16", "bfloat16")
    needs_mma = True

    least: ClassVar[tuple[int, ...]]
    """The smallest tile."""
    likeness: ClassVar[tuple[str, ...]]
    """Fields by which guesses differ."""

    @classmethod
    def claims(cls, shape: Shape, target: Target) -> bool:
        return super().claims(shape, target) and bool(_ranked(cls, shape, target))

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        return expected(cls, shape, target) < cls.sure(shape) * expected(TapSums, shape, target)

    @classmethod
    def sure(cls, shape: Shape) -> float:
        """Return the share of the expected time of `tap_sums`, which errs, that it may take."""
        return 0.97

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> tuple[Self, ...]:
        return varied(_ranked(cls, shape, target), attrgetter(*cls.likeness)) or (cls(*cls.least),)

    @classmethod
    @abstractmethod
    def tiles(cls, shape: Shape, target: Target) -> Iterable[Self]:
        """List tiles worth comparing: as many blocks as fit, and parts for a few rounds of them."""


@lru_cache(maxsize=1024)
def _ranked(kind: Any, shape: Shape, target: Target) -> tuple[Any, ...]:
    tiles = dict.fromkeys(kind.tiles(shape, target))
    return by_time((tile for tile in tiles if tile.fits(shape, target)), shape, target)
