"""The convolution as TensorIR: what is computed, and nothing about how.

Both layouts have the same three blocks:

``pad``
    the input with its zeros, in the input's dtype;
``depthwise_conv2d``
    the sum over the kernel's taps, in float32 for every dtype;
``epilogue``
    the fused pointwise steps and the one rounding to the output's dtype.

Padding adds zeros. Whether a zero times a weight that is not finite adds NaN is
left open: where a tap is known to lie in the padding, compilers drop it.

The buffers between the blocks are `SLACK` rows and columns larger than the
output needs. A schedule computes the first two blocks under the loops of the
third, tile by tile, so the slack is never computed as such; but a last tile
that hangs over the edge of the output then lies inside the buffers, and the
inner loops need no bounds test. Only loads (which test for padding anyway) and
the final stores have one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .arguments import ALIGNMENT
from .epilogue import Epilogue
from .shape import DepthwiseConv2dShape

__all__ = ["EPILOGUE_ATTR", "SHAPE_ATTR", "SLACK", "depthwise_conv2d"]

SHAPE_ATTR, EPILOGUE_ATTR = "dwtir.shape", "dwtir.epilogue"
"""Attributes of the function: what it computes, as text. A tuning database finds it by them."""

SLACK = 63
"""Rows and columns that a tile may hang over the edge without costing predicates."""


@lru_cache(maxsize=64)  # to parse TVMScript takes 20 ms, and functions do not change
def depthwise_conv2d(shape: DepthwiseConv2dShape, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution with its epilogue.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``main(data, weight, *epilogue.operands, out)`` on buffers of the
        shape's layout and dtype. Its attributes `SHAPE_ATTR` and
        `EPILOGUE_ATTR` say what it is; no compiler looks at them.
    """
    factory = _nchw if shape.layout == "NCHW" else _nhwc
    func = factory(shape, epilogue)
    return func.with_attr(SHAPE_ATTR, str(shape)).with_attr(EPILOGUE_ATTR, str(epilogue))


# The factories close over plain integers and call helpers at parse time:
# TVMScript evaluates both, and the script that it prints shows the results.


def _nchw(shape: DepthwiseConv2dShape, epilogue: Epilogue) -> tirx.PrimFunc:
    N, C, M, H, W = _image(shape)
    OC, OH, OW = shape.out_channels, shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    AH, AW, PH, PW = _slack_sizes(shape)
    dtype = shape.dtype
    declare, finish = _epilogue_parts(shape, epilogue)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]  # TVM ships no types
    def depthwise_conv2d_nchw(
        data: T.Buffer((N, C, H, W), dtype, align=ALIGNMENT),  # type: ignore[valid-type]
        weight: T.Buffer((C, M, KH, KW), dtype, align=ALIGNMENT),  # type: ignore[valid-type]
    ) -> None:
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        operands = T.meta_var(declare())
        out = T.arg("out", T.buffer((N, OC, OH, OW), dtype, align=ALIGNMENT))
        padded = T.sblock_alloc_buffer((N, C, PH, PW), dtype)
        acc = T.sblock_alloc_buffer((N, OC, AH, AW), "float32")
        for n, c, ih, iw in T.grid(N, C, PH, PW):
            with T.sblock("pad"):
                vn, vc, vih, viw = T.axis.remap("SSSS", [n, c, ih, iw])
                padded[vn, vc, vih, viw] = T.if_then_else(
                    TOP <= vih and vih < TOP + H and LEFT <= viw and viw < LEFT + W,
                    data[vn, vc, vih - TOP, viw - LEFT],
                    T.cast(0, dtype),
                )
        for n, c, oh, ow, kh, kw in T.grid(N, OC, AH, AW, KH, KW):
            with T.sblock("depthwise_conv2d"):
                vn, vc, voh, vow, vkh, vkw = T.axis.remap("SSSSRR", [n, c, oh, ow, kh, kw])
                with T.init():
                    acc[vn, vc, voh, vow] = T.float32(0)
                acc[vn, vc, voh, vow] = acc[vn, vc, voh, vow] + T.cast(
                    padded[vn, vc // M, voh * SH + vkh * DH, vow * SW + vkw * DW], "float32"
                ) * T.cast(weight[vc // M, vc % M, vkh, vkw], "float32")
        for n, c, oh, ow in T.grid(N, OC, OH, OW):
            with T.sblock("epilogue"):
                vn, vc, voh, vow = T.axis.remap("SSSS", [n, c, oh, ow])
                out[vn, vc, voh, vow] = finish(
                    acc[vn, vc, voh, vow], operands, vc, (vn, vc, voh, vow)
                )

    return depthwise_conv2d_nchw


def _nhwc(shape: DepthwiseConv2dShape, epilogue: Epilogue) -> tirx.PrimFunc:
    N, C, M, H, W = _image(shape)
    OC, OH, OW = shape.out_channels, shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    AH, AW, PH, PW = _slack_sizes(shape)
    dtype = shape.dtype
    declare, finish = _epilogue_parts(shape, epilogue)

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]  # TVM ships no types
    def depthwise_conv2d_nhwc(
        data: T.Buffer((N, H, W, C), dtype, align=ALIGNMENT),  # type: ignore[valid-type]
        weight: T.Buffer((KH, KW, C, M), dtype, align=ALIGNMENT),  # type: ignore[valid-type]
    ) -> None:
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        operands = T.meta_var(declare())
        out = T.arg("out", T.buffer((N, OH, OW, OC), dtype, align=ALIGNMENT))
        padded = T.sblock_alloc_buffer((N, PH, PW, C), dtype)
        acc = T.sblock_alloc_buffer((N, AH, AW, OC), "float32")
        for n, ih, iw, c in T.grid(N, PH, PW, C):
            with T.sblock("pad"):
                vn, vih, viw, vc = T.axis.remap("SSSS", [n, ih, iw, c])
                padded[vn, vih, viw, vc] = T.if_then_else(
                    TOP <= vih and vih < TOP + H and LEFT <= viw and viw < LEFT + W,
                    data[vn, vih - TOP, viw - LEFT, vc],
                    T.cast(0, dtype),
                )
        for n, oh, ow, c, kh, kw in T.grid(N, AH, AW, OC, KH, KW):
            with T.sblock("depthwise_conv2d"):
                vn, voh, vow, vc, vkh, vkw = T.axis.remap("SSSSRR", [n, oh, ow, c, kh, kw])
                with T.init():
                    acc[vn, voh, vow, vc] = T.float32(0)
                acc[vn, voh, vow, vc] = acc[vn, voh, vow, vc] + T.cast(
                    padded[vn, voh * SH + vkh * DH, vow * SW + vkw * DW, vc // M], "float32"
                ) * T.cast(weight[vkh, vkw, vc // M, vc % M], "float32")
        for n, oh, ow, c in T.grid(N, OH, OW, OC):
            with T.sblock("epilogue"):
                vn, voh, vow, vc = T.axis.remap("SSSS", [n, oh, ow, c])
                out[vn, voh, vow, vc] = finish(
                    acc[vn, voh, vow, vc], operands, vc, (vn, voh, vow, vc)
                )

    return depthwise_conv2d_nhwc


def _image(shape: DepthwiseConv2dShape) -> tuple[int, int, int, int, int]:
    return (shape.batch, shape.in_channels, shape.channel_multiplier, shape.height, shape.width)


def _slack_sizes(shape: DepthwiseConv2dShape) -> tuple[int, int, int, int]:
    """Rows and columns of the accumulators, and of the padded input that they read."""
    rows, columns = shape.out_height + SLACK, shape.out_width + SLACK
    return (
        rows,
        columns,
        (rows - 1) * shape.stride[0] + (shape.kernel[0] - 1) * shape.dilation[0] + 1,
        (columns - 1) * shape.stride[1] + (shape.kernel[1] - 1) * shape.dilation[1] + 1,
    )


def _epilogue_parts(
    shape: DepthwiseConv2dShape, epilogue: Epilogue
) -> tuple[Callable[[], dict[str, Any]], Callable[..., tirx.PrimExpr]]:
    """Give the two ends of an epilogue: its parameters, and its result for one element."""

    def declare() -> dict[str, Any]:
        return {
            name: T.arg(name, T.buffer(extents, shape.dtype, align=ALIGNMENT))
            for name, extents in epilogue.operands(shape).items()
        }

    def finish(
        value: tirx.PrimExpr,
        operands: dict[str, Any],
        channel: tirx.Var,
        element: Sequence[tirx.Var],
    ) -> tirx.PrimExpr:
        for step in epilogue.steps:
            value = _apply(step, value, operands, channel, element)
        return T.cast(value, shape.dtype)

    return declare, finish


def _apply(
    step: str,
    value: tirx.PrimExpr,
    operands: dict[str, Any],
    channel: tirx.Var,
    element: Sequence[tirx.Var],
) -> tirx.PrimExpr:
    """Apply one step to a float32 value; `reference` has its twin in NumPy."""

    def number(constant: float) -> tirx.PrimExpr:
        return T.float32(constant)

    def wide(operand: str, *indices: tirx.Var) -> tirx.PrimExpr:
        return T.cast(operands[operand][indices], "float32")

    match step:
        case "bias":
            return value + wide("bias", channel)
        case "scale_shift":
            return value * wide("scale", channel) + wide("shift", channel)
        case "residual":
            return value + wide("residual", *element)
        case "relu":
            return T.max(value, number(0))
        case "relu6":
            return T.min(T.max(value, number(0)), number(6))
        case "hardswish":
            gate = T.min(T.max(value + number(3), number(0)), number(6))
            return value * gate * number(1 / 6)
        case "silu":
            return value / (number(1) + T.exp(-value))
        case "gelu":
            return value * number(0.5) * (number(1) + T.erf(value * number(0.5**0.5)))
        case _:
            raise AssertionError(f"epilogue step {step!r} has no TensorIR")
