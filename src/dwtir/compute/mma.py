"""The tensor cores' instruction as TensorIR sees it: 16 x 8 sums of products, 16 deep."""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from .. import cuda_functions
from . import script
from .blocks import product

_PTX = {"float16": "fp16", "bfloat16": "bf16"}


def left(*place: Any) -> tuple[Any, ...]:
    """Find who holds what of the first operand, and where, for a lane's sums of a half."""
    *outer, lane, half, k = place
    return (*outer, lane // 4 * 4 + k % 8 // 2, k // 8, half, k % 2)


def left_beside(*place: Any) -> tuple[Any, ...]:
    """Find the same where halves are tiles side by side, and the further inputs of one the first of the other."""
    *outer, lane, half, k = place
    return (*outer, lane // 4 * 4 + k % 8 // 2, half + k // 8, k % 2)


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
def beside(dtype: str) -> str:
    """Register the instruction whose halves are tiles side by side; return its name for `Schedule.tensorize`.

    Of three words that a lane holds of both, the second is in two of the registers that the instruction wants. ptxas
    would copy it anew for each product, if it knew.
    """
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    mma = T.ptx[f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"]

    def instruct(first, second, sums, lane):
        held, band = ([_word(buffer, lane, n) for n in range(count)] for buffer, count in ((first, 3), (second, 2)))
        other = T.call_pure_extern("uint32", cuda_functions.WORD, held[1])
        own = [sums[lane, n // 2, n % 2] for n in range(4)]
        T.evaluate(mma(*own, held[0], held[1], other, held[2], *band, *own))

    return _register(f"dwtir.mma_beside_{dtype}", dtype, (3, 2), 2, left_beside, instruct)


def _word(buffer, lane: Any, number: int) -> Any:
    return T.call_pure_extern("uint32", cuda_functions.WORD_AT, T.address_of(buffer[lane, number, 0]))


@cache
def intrinsic(dtype: str, depth: int = 16) -> str:
    """Register ``mma.sync.m16n8k16``, or k8, with float32 sums for halves; return its name for `Schedule.tensorize`.

    Its operands are what the 32 lanes of a warp hold, as `compute.banded` has them. They have the scope "local"
    although one lane reads another's: TVM keeps what a lane itself addresses, and the instruction addresses no more.
    """
    kind, parts = _PTX[dtype], depth // 8

    def instruct(first, second, sums, lane):
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

    return _register(f"dwtir.mma_m16n8k{depth}_{dtype}", dtype, (parts, 2, 2), parts, left, instruct)


def _register(
    name: str, dtype: str, held: tuple[int, ...], parts: int, find: Callable[..., Any], instruct: Callable[..., None]
) -> str:
    """Register an instruction that finds the first operand among what each lane holds of it."""
    strides = [prod(held[i + 1 :]) for i in range(len(held))]

    @script.inline
    def products(first, second, sums):
        for lane, h, e, k in T.grid(32, 2, 2, 8 * parts):
            with T.sblock("product"):
                vl, vh, ve, vk = T.axis.remap("SSSR", [lane, h, e, k])
                sums[vl, vh, ve] += product(first[find(vl, vh, vk)], second[right(vl, ve, vk)])

    @script.inline
    def instruction(first, second, sums):
        for lane in T.thread_binding(0, 32, "threadIdx.x"):
            instruct(first, second, sums, lane)

    def of(body: Any):
        @script.prim_func(s_tir=True)
        def func(a: T.handle, b: T.handle, c: T.handle) -> None:
            sa, sb, sc = T.int32(), T.int32(), T.int32()
            A = T.match_buffer(a, (32, *held), dtype, strides=(sa, *strides), offset_factor=1, scope="local")
            B = T.match_buffer(b, (32, parts, 2), dtype, strides=(sb, 2, 1), offset_factor=1, scope="local")
            C = T.match_buffer(c, (32, 2, 2), "float32", strides=(sc, 2, 1), offset_factor=1, scope="local")
            with T.sblock("root"):
                T.reads(C[0:32, 0:2, 0:2], whole(A), B[0:32, 0:parts, 0:2])
                T.writes(C[0:32, 0:2, 0:2])
                body(A, B, C)

        return func

    def whole(buffer):
        every = tuple(slice(0, size) for size in (32, *held))
        return buffer[every]

    TensorIntrin.register(name, of(products), of(instruction), override=True)
    return name
