"""The gradient with respect to the data: the convolution run backwards.

Input row ``h`` gets a share of output row ``(h + top - kh * dilation) / stride``
from every tap ``kh`` for which that is a whole number. With the taps counted from
the last, that is::

    grad_data[h] = sum over kh of padded[(h + PHASE + kh * dilation) / stride] * weight[KH-1-kh]

where ``padded`` is ``grad_out`` from row `FIRST` on. With stride 1 this is a forward convolution. With a larger one a
tap meets every stride-th row; others add -0, which a compiler drops where it knows the row.

The channels of a multiplier are summed as if they were more columns of the kernel:
``tap = kw * M + m``.
"""

from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T

from ..shape import Shape
from . import blocks, script
from .forward import declared
from .order import order_of, weight_at
from .parts import made
from .sizes import SLACK, aligned


def grad_data(shape: Shape) -> tirx.PrimFunc:
    """Define the gradient."""
    N, C, M, H, W = shape.batch, shape.in_channels, shape.channel_multiplier, shape.height, shape.width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    (FIRST_H, PHASE_H, PH), (FIRST_W, PHASE_W, PW) = _axis(shape, 0), _axis(shape, 1)
    added, LEFT, PW = aligned(shape, -FIRST_W, PW)
    PHASE_W += added * SW
    AH, AW = H + SLACK, W + SLACK
    laid, named = order_of(shape.layout)
    where = _where(shape)

    def product(padded, weight, place, kh, tap):
        n, c, h, w = named(*place)
        row, column = h + PHASE_H + kh * DH, w + PHASE_W + tap // M * DW
        value = padded[laid(n, c * M + tap % M, row // SH, column // SW)]
        factor = weight[weight_at(shape.layout, (c, tap % M), (KH - 1 - kh, KW - 1 - tap // M))]
        return where(row, column, blocks.product(value, factor))

    @script.prim_func(s_tir=True)
    def depthwise_grad_data() -> None:
        grad_out, weight, _, out = T.meta_var(declared(shape))
        padded = made(shape.dtype, *laid(N, C * M, PH, PW))
        acc = made("float32", *laid(N, C, AH, AW))
        blocks.pad(padded, grad_out, shape.layout, -FIRST_H, LEFT)
        blocks.add_up(acc, "a b c d", {"kh": KH, "tap": KW * M}, product, padded, weight)
        blocks.round_sums(out, acc)

    return depthwise_grad_data


def _axis(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Return FIRST, PHASE and the extent of `padded` along one axis."""
    size = (shape.height, shape.width)[axis]
    stride, reach = shape.stride[axis], (shape.kernel[axis] - 1) * shape.dilation[axis]
    first, phase = divmod(-shape.before[axis], stride)
    return first, phase, (size + SLACK - 1 + phase + reach) // stride + 1


def _where(shape: Shape) -> Callable[..., tirx.Expr]:
    """Give the function that keeps a product where a tap meets a row and a column."""

    def where(row, column, product):
        strides = zip((row, column), shape.stride, strict=True)
        tests = [T.floormod(index, stride) == 0 for index, stride in strides if stride > 1]
        return T.if_then_else(tirx.all(*tests), product, T.float32(-0.0)) if tests else product

    return where
