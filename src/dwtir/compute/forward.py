"""The forward convolution with its epilogue."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..arguments import ALIGNMENT
from ..epilogue import NO_STEPS, Epilogue
from ..shape import Shape
from . import blocks, script
from .order import order_of, weight_at
from .parts import fill, made
from .sizes import aligned, padded_sizes

# The factories close over plain integers and call helpers at parse time:
# TVMScript evaluates both, and the script that it prints shows the results.


def convolution(shape: Shape, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution."""
    N, C, M = shape.batch, shape.in_channels, shape.channel_multiplier
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    AH, AW, PH, PW = padded_sizes(shape)
    SHIFT, LEFT, PW = aligned(shape, LEFT, PW)
    laid, named = order_of(shape.layout)
    LOOPS = " ".join(laid("n", "c", "oh", "ow"))
    declare, finish = both_ends(shape, epilogue)

    def product(padded, weight, place, kh, kw):
        n, c, oh, ow = named(*place)
        value = padded[laid(n, c // M, oh * SH + kh * DH, ow * SW + kw * DW + SHIFT)]
        return blocks.product(value, weight[weight_at(shape.layout, (c // M, c % M), (kh, kw))])

    def rounded(acc, operands, *place):
        _, c, *_ = named(*place)
        return finish(acc[place], operands, c, place)

    @script.prim_func(s_tir=True)
    def depthwise_conv2d() -> None:
        data, weight, operands, out = T.meta_var(declare())
        padded = made(shape.dtype, *laid(N, C, PH, PW))
        acc = made("float32", *laid(N, C * M, AH, AW))
        blocks.pad(padded, data, shape.layout, TOP, LEFT)
        blocks.add_up(acc, LOOPS, {"kh": KH, "kw": KW}, product, padded, weight)
        fill("epilogue", LOOPS, out, rounded, acc, operands)

    return depthwise_conv2d


def declared(shape: Shape, epilogue: Epilogue = NO_STEPS) -> tuple[Any, ...]:
    """Declare the inputs, the operands of the epilogue, which are by name, and the output."""

    def parameters(tensors: Mapping[str, tuple[int, ...]]):
        return {name: T.arg(name, T.buffer(extents, shape.dtype, align=ALIGNMENT)) for name, extents in tensors.items()}

    inputs, operands = parameters(shape.input_shapes), parameters(epilogue.operands(shape))
    return *inputs.values(), operands, *parameters({"out": shape.result_shape}).values()


def both_ends(
    shape: Shape, epilogue: Epilogue, times: float = 1.0, dtype: str = ""
) -> tuple[Callable[[], tuple[Any, ...]], Callable[..., tirx.Expr]]:
    """Give the two ends of a function: its parameters, and the epilogue's result for one element.

    Scale and shift may be `times` what they are, and results of a `dtype` that is not the tensors'.
    """

    def finish(value, operands, channel, element):
        for step in epilogue.steps:
            value = _apply(step, value, operands, channel, element)
            if step == "scale_shift" and times != 1:
                value = value * T.float32(1 / times)
        return T.cast(value, dtype or shape.dtype)

    return partial(declared, shape, epilogue), finish


def _apply(
    step: str, value: tirx.Expr, operands: dict[str, Any], channel: tirx.Var, element: Sequence[tirx.Var]
) -> tirx.Expr:
    """Apply one step to a float32 value; `reference` has its twin in NumPy."""

    def wide(operand, *indices):
        return T.cast(operands[operand][indices], "float32")

    match step:
        case "bias":
            return value + wide("bias", channel)
        case "scale_shift":
            return value * wide("scale", channel) + wide("shift", channel)
        case "residual":
            return value + wide("residual", *element)
        case "relu":
            return T.max(T.float32(0), value)  # in this order NaN stays
        case "relu6":
            return T.min(T.float32(6), T.max(T.float32(0), value))
        case "hardswish":
            gate = T.min(T.max(value + T.float32(3), T.float32(0)), T.float32(6))
            return value * gate * T.float32(1 / 6)
        case "silu":
            return value * T.sigmoid(value)
        case "gelu":
            return value * T.float32(0.5) * (T.float32(1) + T.erf(value * T.float32(0.5**0.5)))
        case _:
            raise AssertionError(f"epilogue step {step!r} has no TensorIR")
