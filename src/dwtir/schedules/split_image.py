"""Several threads share an image: each computes a band of the result's rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from ..epilogue import Epilogue
from ..images import Images
from ..shape import DepthwiseConv2dShape
from ..target import Target
from .base import Strategy

if TYPE_CHECKING:
    from tvm import tirx
    from tvm.s_tir import Schedule

__all__ = ["SplitImage"]

_MOST_COLUMNS, _MOST_TAPS = 64, 128


@dataclass(frozen=True)
class SplitImage(Strategy):
    """Tile of the split images."""

    name: ClassVar[str] = "split_image"
    operations: ClassVar[tuple[str, ...]] = ("forward", "grad_data")
    device: ClassVar[str] = "a GPU"

    thread_x: int
    thread_y: int
    bands: int
    min_blocks: int = 1
    turns: int = 1
    ahead: int = 1

    @classmethod
    def _is_for(cls, shape: DepthwiseConv2dShape, target: Target) -> bool:
        return (
            super()._is_for(shape, target)
            and (shape.operation == "forward" or shape.stride == (1, 1))
            and shape.channel_multiplier == 1
            and max(shape.width, shape.out_width) <= _MOST_COLUMNS
            and prod(shape.kernel) <= _MOST_TAPS
        )

    @classmethod
    def pays(cls, shape: DepthwiseConv2dShape, target: Target) -> bool:
        return False

    @classmethod
    def choose(cls, shape: DepthwiseConv2dShape, target: Target) -> SplitImage:
        return cls(32, 1, 4, 3)

    @classmethod
    def space(cls, shape: DepthwiseConv2dShape, target: Target) -> dict[str, tuple[int, ...]]:
        return {}

    def check(self, shape: DepthwiseConv2dShape, target: Target) -> None:
        height = shape.result_height
        self._require(self.bands <= height, "bands", self.bands, f"at most {height}")
        self._require_launch(
            target,
            threads=self.thread_x * self.thread_y * self.bands,
            shared_bytes=self._images(shape).shared_bytes,
        )

    def _images(self, shape: DepthwiseConv2dShape) -> Images:
        return Images(shape, self.thread_x, self.thread_y, shape.result_height)

    def define(self, shape: DepthwiseConv2dShape, epilogue: Epilogue) -> tirx.PrimFunc:
        from ..compute import split_images

        return split_images(self._images(shape), epilogue, self.bands, self.turns, self.ahead)

    def apply(self, sch: Schedule, shape: DepthwiseConv2dShape) -> None:
        if shape.layout == "NHWC":
            n, c, z = sch.get_loops(sch.get_sblock("depthwise_conv2d"))
            bn, tn = sch.split(n, [None, self.thread_y])
            bc, tc = sch.split(c, [None, self.thread_x])
            sch.reorder(bn, bc, z, tn, tc)
            sch.bind(sch.fuse(bn, bc), "blockIdx.x")
            sch.bind(z, "threadIdx.z")
            sch.bind(tn, "threadIdx.y")
            sch.bind(tc, "threadIdx.x")
            return
        sch.bind(sch.fuse(*sch.get_loops(sch.get_sblock("images"))), "blockIdx.x")
        for name in ("first", "gather", "ahead", "filters", "depthwise_conv2d", "epilogue", "store"):
            *_, z, y, x = sch.get_loops(sch.get_sblock(name))
            sch.bind(z, "threadIdx.z")
            sch.bind(y, "threadIdx.y")
            sch.bind(x, "threadIdx.x")
