"""What the strategies that keep an input window in registers have in common: their choice."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from ..shape import DepthwiseConv2dShape
from ..target import Target
from .base import Strategy
from .cost import Work, fastest
from .tiles import windows_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Window"]


class Window(Strategy):
    """A strategy whose tile and `min_blocks` are chosen by the model of `cost`."""

    @classmethod
    def choose(cls, shape: DepthwiseConv2dShape, target: Target) -> Self:
        """Choose the tile that the model expects the least time of, of the two best windows."""
        return cast("Self", _choose(cls, shape, target))

    @classmethod
    @abstractmethod
    def tiles(cls, shape: DepthwiseConv2dShape, window: str) -> Iterator[Self]:
        """List the tiles worth comparing, all of which are promising."""

    @classmethod
    @abstractmethod
    def least(cls, shape: DepthwiseConv2dShape) -> Self:
        """Return a tile for shapes of which no larger one fits."""

    @abstractmethod
    def work(self, shape: DepthwiseConv2dShape) -> Work:
        """Count what a thread does."""


@lru_cache(maxsize=256)
def _choose(cls: type[Window], shape: DepthwiseConv2dShape, target: Target) -> Window:
    tiles = [tile for window in windows_of(shape)[:2] for tile in cls.tiles(shape, window)]
    tiles = tiles or [cls.least(shape)]
    number, min_blocks = fastest((tile.work(shape) for tile in tiles), shape, target)
    return replace(tiles[number], min_blocks=min_blocks)  # type: ignore[type-var]  # a dataclass
