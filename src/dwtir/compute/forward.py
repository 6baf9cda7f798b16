"""The forward convolution with its epilogue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..arguments import ALIGNMENT
from ..epilogue import NO_STEPS, Epilogue
from ..shape import Shape
from . import blocks, script
from .sizes import aligned, image, padded_sizes

# The factories close over plain integers and call helpers at parse time:
# TVMScript evaluates both, and the script that it prints shows the results.


def nchw(shape: Shape, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution on NCHW images."""
    N, C, M, *_ = image(shape)
    OC, OH, OW = shape.out_channels, shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    AH, AW, PH, PW = padded_sizes(shape)
    SHIFT, LEFT, PW = aligned(shape, LEFT, PW)
    dtype = shape.dtype
    declare, finish = both_ends(shape, epilogue)

    @script.prim_func(s_tir=True)
    def depthwise_conv2d_nchw() -> None:
        data, weight, operands, out = T.meta_var(declare())
        padded = T.sblock_alloc_buffer((N, C, PH, PW), dtype)
        acc = T.sblock_alloc_buffer((N, OC, AH, AW), "float32")
        blocks.pad(padded, data, "NCHW", TOP, LEFT)
        for n, c, oh, ow, kh, kw in T.grid(N, OC, AH, AW, KH, KW):
            with T.sblock("depthwise_conv2d"):
                vn, vc, voh, vow, vkh, vkw = T.axis.remap("SSSSRR", [n, c, oh, ow, kh, kw])
                with T.init():
                    acc[vn, vc, voh, vow] = T.float32(0)
                acc[vn, vc, voh, vow] += blocks.product(
                    padded[vn, vc // M, voh * SH + vkh * DH, vow * SW + vkw * DW + SHIFT],
                    weight[vc // M, vc % M, vkh, vkw],
                )
        for n, c, oh, ow in T.grid(N, OC, OH, OW):
            with T.sblock("epilogue"):
                vn, vc, voh, vow = T.axis.remap("SSSS", [n, c, oh, ow])
                out[vn, vc, voh, vow] = finish(acc[vn, vc, voh, vow], operands, vc, (vn, vc, voh, vow))

    return depthwise_conv2d_nchw


def nhwc(shape: Shape, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution on NHWC images."""
    N, C, M, *_ = image(shape)
    OC, OH, OW = shape.out_channels, shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    AH, AW, PH, PW = padded_sizes(shape)
    dtype = shape.dtype
    declare, finish = both_ends(shape, epilogue)

    @script.prim_func(s_tir=True)
    def depthwise_conv2d_nhwc() -> None:
        data, weight, operands, out = T.meta_var(declare())
        padded = T.sblock_alloc_buffer((N, PH, PW, C), dtype)
        acc = T.sblock_alloc_buffer((N, AH, AW, OC), "float32")
        blocks.pad(padded, data, "NHWC", TOP, LEFT)
        for n, oh, ow, c, kh, kw in T.grid(N, AH, AW, OC, KH, KW):
            with T.sblock("depthwise_conv2d"):
                vn, voh, vow, vc, vkh, vkw = T.axis.remap("SSSSRR", [n, oh, ow, c, kh, kw])
                with T.init():
                    acc[vn, voh, vow, vc] = T.float32(0)
                acc[vn, voh, vow, vc] += blocks.product(
                    padded[vn, voh * SH + vkh * DH, vow * SW + vkw * DW, vc // M], weight[vkh, vkw, vc // M, vc % M]
                )
        for n, oh, ow, c in T.grid(N, OH, OW, OC):
            with T.sblock("epilogue"):
                vn, voh, vow, vc = T.axis.remap("SSSS", [n, oh, ow, c])
                out[vn, voh, vow, vc] = finish(acc[vn, voh, vow, vc], operands, vc, (vn, voh, vow, vc))

    return depthwise_conv2d_nhwc


def declared(shape: Shape, epilogue: Epilogue = NO_STEPS) -> tuple[Any, ...]:
    """Declare the inputs, the operands of the epilogue, which are by name, and the output."""

    def parameters(tensors: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        return {name: T.arg(name, T.buffer(extents, shape.dtype, align=ALIGNMENT)) for name, extents in tensors.items()}

    inputs, operands = parameters(shape.input_shapes), parameters(epilogue.operands(shape))
    return *inputs.values(), operands, *parameters({"out": shape.result_shape}).values()


def both_ends(
    shape: Shape, epilogue: Epilogue, times: float = 1.0
) -> tuple[Callable[[], tuple[Any, ...]], Callable[..., tirx.PrimExpr]]:
    """Give the two ends of a function: its parameters, and the epilogue's result for one element.

    Scale and shift may be `times` what they are.
    """

    def finish(
        value: tirx.PrimExpr, operands: dict[str, Any], channel: tirx.Var, element: Sequence[tirx.Var]
    ) -> tirx.PrimExpr:
        for step in epilogue.steps:
            value = _apply(step, value, operands, channel, element)
            if step == "scale_shift" and times != 1:
                value = value * T.float32(1 / times)
        return T.cast(value, shape.dtype)

    return partial(declared, shape, epilogue), finish


def _apply(
    step: str, value: tirx.PrimExpr, operands: dict[str, Any], channel: tirx.Var, element: Sequence[tirx.Var]
) -> tirx.PrimExpr:
    """Apply one step to a float32 value; `reference` has its twin in NumPy."""

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
            return T.max(value, T.float32(0))
        case "relu6":
            return T.min(T.max(value, T.float32(0)), T.float32(6))
        case "hardswish":
            gate = T.min(T.max(value + T.float32(3), T.float32(0)), T.float32(6))
            return value * gate * T.float32(1 / 6)
        case "silu":
            return value * T.sigmoid(value)
        case "gelu":
            return value * T.float32(0.5) * (T.float32(1) + T.erf(value * T.float32(0.5**0.5)))
        case _:
            raise AssertionError(f"epilogue step {step!r} has no TensorIR")
