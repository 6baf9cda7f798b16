"""The tensor cores' instruction as TensorIR sees it: 16 x 8 sums of products, 16 deep."""

from __future__ import annotations

from functools import cache
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from . import script
from .blocks import product

_PTX = {"float16": "fp16", "bfloat16": "bf16"}


def left(*place: Any) -> tuple[Any, ...]:
    """Find who holds what of the first operand, and where, for a lane's sums of a half."""
    *outer, lane, half, k = place
    return (*outer, lane // 4 * 4 + k % 8 // 2, k // 8, half, k % 2)


def right(*place: Any) -> tuple[Any, ...]:
    """Find who holds what of the second operand, and where, for a lane's sum of a pair."""
    *outer, lane, one, k = place
    return (*outer, (lane % 4 * 2 + one) * 4 + k % 8 // 2, k // 8, k % 2)


def multiply(
    name: str,
    sizes: tuple[int, int, int, int],
    operands: tuple[tirx.Buffer, tirx.Buffer],
    acc: tirx.Buffer,
    warp: Any,
    first: tuple[int, int],
    apart: tuple[int, int] = (1, 1),
) -> None:
    """Add a row of inputs' products with rows of a banded matrix to rows of sums.

    `sizes` are the rows of sums, the products of each, the channels or pairs, and the depth. `first` are the first
    rows of the sums and of the matrix, and `apart` how much further down, and up, the next ones are.
    """
    (rows, count, channels, depth), (held, band), (result, tap), (down, up) = sizes, operands, first, apart
    with (
        T.unroll(rows) as r,
        T.unroll(count) as s,
        T.unroll(channels) as c,
        T.grid(32, 2, 2, depth) as (lane, half, one, k),
        T.sblock(name),
    ):
        vr, vs = T.axis.spatial(rows, r), T.axis.reduce(count, s)
        vc, vl, vh = T.axis.spatial(channels, c), T.axis.spatial(32, lane), T.axis.spatial(2, half)
        vo, vk = T.axis.spatial(2, one), T.axis.reduce(depth, k)
        added = product(held[left(vs, vc, vl, vh, vk)], band[right(warp, tap - vr * up, vs, vc, vl, vo, vk)])
        place = (warp, result + vr * down, vc, vl, vh, vo)
        T.buffer_store(acc, acc[place] + added, place)


@cache
def intrinsic(dtype: str, depth: int = 16) -> str:
    """Register ``mma.sync.m16n8k16``, or k8, with float32 sums for halves; return its name for `Schedule.tensorize`.

    Its operands are what the 32 lanes of a warp hold, as `compute.banded` has them. They are
    buffers of scope "local" although one lane reads another's: TVM keeps of such a buffer what a
    lane itself addresses, and the instruction addresses no more than that.
    """
    name = f"dwtir.mma_m16n8k{depth}_{dtype}"
    kind, parts = _PTX[dtype], depth // 8

    @script.inline
    def products(first, second, sums):
        for lane, h, e, k in T.grid(32, 2, 2, depth):
            with T.sblock("product"):
                vl, vh, ve, vk = T.axis.remap("SSSR", [lane, h, e, k])
                sums[vl, vh, ve] += product(first[left(vl, vh, vk)], second[right(vl, ve, vk)])

    @script.inline
    def instruction(first, second, sums):
        for lane in T.thread_binding(0, 32, "threadIdx.x"):
            T.evaluate(
                T.ptx_legacy.mma(
                    *(f"m16n8k{depth}", "row", "col", kind, kind, "fp32"),
                    *(T.address_of(first[lane, 0, 0, 0]), 0),
                    *(T.address_of(second[lane, 0, 0]), 0),
                    *(T.address_of(sums[lane, 0, 0]), 0),
                    False,
                    dtype="float32",
                )
            )

    def of(body: Any) -> tirx.PrimFunc:
        @script.prim_func(s_tir=True)
        def func(a: T.handle, b: T.handle, c: T.handle) -> None:
            sa, sb, sc = T.int32(), T.int32(), T.int32()
            A = T.match_buffer(a, (32, parts, 2, 2), dtype, strides=(sa, 4, 2, 1), offset_factor=1, scope="local")
            B = T.match_buffer(b, (32, parts, 2), dtype, strides=(sb, 2, 1), offset_factor=1, scope="local")
            C = T.match_buffer(c, (32, 2, 2), "float32", strides=(sc, 2, 1), offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(C[0:32, 0:2, 0:2], A[0:32, 0:parts, 0:2, 0:2], B[0:32, 0:parts, 0:2])
                T.writes(C[0:32, 0:2, 0:2])
                body(A, B, C)

        return func

    TensorIntrin.register(name, of(products), of(instruction), override=True)
    return name
