"""Copies into shared memory that hold no registers, as TensorIR sees them."""

from functools import cache
from typing import Any

from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from ..units import LANES
from . import script

BYTES = 2 * LANES


@cache
def intrinsic(dtype: str, lanes: int = LANES) -> str:
    """Register ``cp.async`` of 8, 4 or 2 halves, or of none and zeros instead; return its name for `tensorize`.

    How many bytes there are stands in a register: all or 0, and then none are read. By `cuda_functions` L2 fetches the
    128 bytes around.
    """
    size = 2 * lanes
    name = f"dwtir.cp_async_{dtype}" + (f"x{lanes}" if lanes < LANES else "")
    through = "ca" if lanes < LANES else "cg"  # by L1, or by L2 alone, as only 16 bytes can be

    @script.inline
    def copies(there, source, to):
        for v in range(lanes):
            with T.sblock("copy"):
                vv = T.axis.spatial(lanes, v)
                to[vv] = T.if_then_else(there[0] == size, source[vv], T.cast(0, dtype))

    @script.inline
    def instruction(there, source, to):
        # Of `access_ptr` TVM knows that it writes, and puts one more barrier into each step. So
        # a buffer has to be used before and after all copies, or others come to lie there: `parts.use`.
        T.evaluate(
            T.ptx[f"cp.async.{through}.shared.global"](
                T.address_of(to[0]), T.address_of(source[0]), size, T.cast(there[0], "uint32")
            )
        )

    def of(body: Any):
        @script.prim_func(s_tir=True)
        def func(s: T.handle, a: T.handle, b: T.handle) -> None:
            S = T.match_buffer(s, (1,), "int32", offset_factor=1, scope="local")
            A = T.match_buffer(a, (lanes,), dtype, align=size, offset_factor=1)
            B = T.match_buffer(b, (lanes,), dtype, offset_factor=1, scope="shared.dyn")
            with T.sblock("root"):
                T.reads(S[0], A[0:lanes])
                T.writes(B[0:lanes])
                body(S, A, B)

        return func

    TensorIntrin.register(name, of(copies), of(instruction), override=True)
    return name
