"""Copies into shared memory that hold no registers, as TensorIR sees them."""

from functools import cache
from typing import Any

from tvm import tirx
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as T

from ..units import LANES
from . import script

BYTES = 16


@cache
def intrinsic(dtype: str) -> str:
    """Register ``cp.async`` of 8 halves, or of none and zeros instead; return its name for `Schedule.tensorize`.

    How many bytes there are stands in a register: all or 0, and then none are read, wherever they
    would be. L2 fetches the 128 bytes around from memory, which other blocks want soon.
    """
    name = f"dwtir.cp_async_{dtype}"

    @script.inline
    def copies(size, source, to):
        for v in range(LANES):
            with T.sblock("copy"):
                vv = T.axis.spatial(LANES, v)
                to[vv] = T.if_then_else(size[0] == BYTES, source[vv], T.cast(0, dtype))

    @script.inline
    def instruction(size, source, to):
        # Of `access_ptr` TVM knows that it writes, and puts one more barrier into each step. So
        # a buffer has to be used before and after all copies, or others come to lie there: `parts.use`.
        T.evaluate(
            T.ptx["cp.async.cg.shared.global.L2::128B"](
                T.address_of(to[0]), T.address_of(source[0]), BYTES, T.cast(size[0], "uint32")
            )
        )

    def of(body: Any) -> tirx.PrimFunc:
        @script.prim_func(s_tir=True)
        def func(s: T.handle, a: T.handle, b: T.handle) -> None:
            S = T.match_buffer(s, (1,), "int32", offset_factor=1, scope="local")
            A = T.match_buffer(a, (LANES,), dtype, align=BYTES, offset_factor=1)
            B = T.match_buffer(b, (LANES,), dtype, offset_factor=1, scope="shared.dyn")
            with T.sblock("root"):
                T.reads(S[0], A[0:LANES])
                T.writes(B[0:LANES])
                body(S, A, B)

        return func

    TensorIntrin.register(name, of(copies), of(instruction), override=True)
    return name
