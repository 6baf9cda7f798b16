"""The gradient of the weight of halves on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..diagonals import Diagonals
from ..epilogue import Epilogue
from ..shape import DepthwiseConv2dShape
from ..target import Target
from .base import Strategy, unroll_all, unroll_in_source
from .part_sums import sum_parts
from .tiles import BLOCK_COUNTS, MAX_LOADS, MAX_SIDE, even_split, with_value

if TYPE_CHECKING:
    from tvm import tirx
    from tvm.s_tir import Schedule

__all__ = ["BandedSums"]


@dataclass(frozen=True)
class BandedSums(Strategy):
    """Tile of the products.

    Parameters
    ----------
    rows : int
        Output rows of a tile, of 8 columns each.
    warps : int
        Warps of a block.
    parts : int
        Blocks that share the outputs of a channel.
    part_threads : int
        Threads of the second kernel over the parts, which it divides.
    min_blocks : int
        Blocks that an SM shall have room for at a time.
    """

    name: ClassVar[str] = "banded_sums"
    layouts: ClassVar[tuple[str, ...]] = ("NCHW",)
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")
    operations: ClassVar[tuple[str, ...]] = ("grad_weight",)
    needs_mma: ClassVar[bool] = True
    device: ClassVar[str] = "a GPU from sm_80 on"

    rows: int
    warps: int
    parts: int
    part_threads: int
    min_blocks: int = 1

    @classmethod
    def choose(cls, shape: DepthwiseConv2dShape, target: Target) -> BandedSums:
        return cls(even_split(shape.out_height, 14), 4, 22, 2, 4)

    @classmethod
    def space(cls, shape: DepthwiseConv2dShape, target: Target) -> dict[str, tuple[int, ...]]:
        return {}

    def check(self, shape: DepthwiseConv2dShape, target: Target) -> None:
        pass

    def sizes(self, shape: DepthwiseConv2dShape) -> Diagonals:
        return Diagonals(shape, self.rows, self.warps, self.parts)

    def define(self, shape: DepthwiseConv2dShape, epilogue: Epilogue) -> tirx.PrimFunc:
        from ..compute import diagonal_sums

        return diagonal_sums(self.sizes(shape))

    def apply(self, sch: Schedule, shape: DepthwiseConv2dShape) -> None:
        from ..compute.mma import intrinsic

        pad, pairs, grads, conv, leave, taps = map(
            sch.get_sblock, ("pad", "pairs", "grads", "products", "leave", "diagonals")
        )

        # 1. Blocks, and their taps.
        partial = sch.cache_write(taps, 0, "local")
        p, c, m, kh, kw = sch.get_loops(partial)
        sch.reorder(p, c, m, kh, kw)
        block = sch.fuse(p, c, m)
        _, ty, tx = sch.split(sch.fuse(kh, kw), [None, self.warps, 32])
        sch.bind(block, "blockIdx.x")
        sch.bind(ty, "threadIdx.y")
        sch.bind(tx, "threadIdx.x")
        sch.compute_at(taps, tx, preserve_unit_loops=True)
        unroll_in_source(sch, sch.get_loops(taps)[-2])

        # 2. The sums of warps.
        sch.set_scope(leave, 0, "shared")
        sch.compute_at(leave, block, preserve_unit_loops=True)
        _, _, _, warp, kh, s, lane, h, e = sch.get_loops(leave)
        sch.reorder(warp, lane, kh, s, h, e)
        sch.bind(warp, "threadIdx.y")
        sch.bind(lane, "threadIdx.x")
        unroll_all(sch, [kh, s, h])
        sch.vectorize(e)

        sch.set_scope(conv, 0, "local")
        sch.compute_at(conv, warp, preserve_unit_loops=True)
        *_, kh, s, turn, oh, lane, h, e, k = sch.get_loops(conv)
        sch.reorder(turn, oh, kh, s, lane, h, e, k)
        zero = sch.decompose_reduction(conv, turn)
        *_, kh_zero, s_zero, lane_zero, h_zero, e_zero = sch.get_loops(zero)
        sch.reorder(lane_zero, kh_zero, s_zero, h_zero, e_zero)
        sch.bind(lane_zero, "threadIdx.x")
        unroll_all(sch, [kh_zero, s_zero, h_zero, e_zero])

        # 3. Inputs and gradients of a group of tiles, in the registers of the lanes.
        for load, count in ((pairs, 6), (pad, 6), (grads, 4)):
            sch.set_scope(load, 0, "local")
            sch.compute_at(load, turn, preserve_unit_loops=True)
            loops = sch.get_loops(load)[-count:]
            holder = loops.pop(-4 if load is not grads else -3)
            sch.reorder(holder, *loops)
            sch.bind(holder, "threadIdx.x")
            if load is pad:
                sch.vectorize(loops.pop())
            unroll_all(sch, loops)

        # 4. All products of a group in straight line.
        unroll_all(sch, [oh, kh, s])
        sch.tensorize(lane, intrinsic(shape.dtype))

        # 5. Sums of all blocks, by the second kernel.
        sum_parts(sch, shape, self.part_threads, 1)
