"""The gradient with respect to the data: the convolution run backwards.

Input row ``h`` gets a share of output row ``(h + top - kh * dilation) / stride``
from every tap ``kh`` for which that is a whole number. With the taps counted from
the last, that is::

    grad_data[h] = sum over kh of padded[(h + PHASE + kh * dilation) / stride] * weight[KH-1-kh]

where ``padded`` is ``grad_out`` from row `FIRST` on. With stride 1 this is a
forward convolution. With a larger one a tap meets only every stride-th row; the
others add -0, which changes no sum, and which a compiler drops as soon as it
knows the row: a schedule whose tiles are multiples of the stride pays for no tap
that is not there.

The channels of a multiplier are summed as if they were more columns of the kernel:
``tap = kw * M + m``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..shape import Shape
from . import blocks, script
from .forward import declared
from .sizes import SLACK, aligned, image


def nchw(shape: Shape) -> tirx.PrimFunc:
    """Define the gradient on NCHW images."""
    N, C, M, H, W = image(shape)
    OC = shape.out_channels
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    (FIRST_H, PHASE_H, PH), (FIRST_W, PHASE_W, PW) = _axis(shape, 0), _axis(shape, 1)
    added, LEFT, PW = aligned(shape, -FIRST_W, PW)
    PHASE_W += added * SW
    AH, AW = H + SLACK, W + SLACK
    dtype = shape.dtype
    where = _where(shape)

    @script.prim_func(s_tir=True)
    def grad_data_nchw() -> None:
        grad_out, weight, _, out = T.meta_var(declared(shape))
        padded = T.sblock_alloc_buffer((N, OC, PH, PW), dtype)
        acc = T.sblock_alloc_buffer((N, C, AH, AW), "float32")
        blocks.pad_nchw(padded, grad_out, -FIRST_H, LEFT)
        for n, c, h, w, kh, tap in T.grid(N, C, AH, AW, KH, KW * M):
            with T.sblock("depthwise_conv2d"):
                vn, vc, vh, vw, vkh, vtap = T.axis.remap("SSSSRR", [n, c, h, w, kh, tap])
                with T.init():
                    acc[vn, vc, vh, vw] = T.float32(0)
                row = T.meta_var(vh + PHASE_H + vkh * DH)
                column = T.meta_var(vw + PHASE_W + vtap // M * DW)
                value = T.meta_var(padded[vn, vc * M + vtap % M, row // SH, column // SW])
                factor = T.meta_var(weight[vc, vtap % M, KH - 1 - vkh, KW - 1 - vtap // M])
                acc[vn, vc, vh, vw] += where(row, column, blocks.product(value, factor))
        blocks.round_sums(out, acc)

    return grad_data_nchw


def nhwc(shape: Shape) -> tirx.PrimFunc:
    """Define the gradient on NHWC images."""
    N, C, M, H, W = image(shape)
    OC = shape.out_channels
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    (FIRST_H, PHASE_H, PH), (FIRST_W, PHASE_W, PW) = _axis(shape, 0), _axis(shape, 1)
    AH, AW = H + SLACK, W + SLACK
    dtype = shape.dtype
    where = _where(shape)

    @script.prim_func(s_tir=True)
    def grad_data_nhwc() -> None:
        grad_out, weight, _, out = T.meta_var(declared(shape))
        padded = T.sblock_alloc_buffer((N, PH, PW, OC), dtype)
        acc = T.sblock_alloc_buffer((N, AH, AW, C), "float32")
        blocks.pad_nhwc(padded, grad_out, -FIRST_H, -FIRST_W)
        for n, h, w, c, kh, tap in T.grid(N, AH, AW, C, KH, KW * M):
            with T.sblock("depthwise_conv2d"):
                vn, vh, vw, vc, vkh, vtap = T.axis.remap("SSSSRR", [n, h, w, c, kh, tap])
                with T.init():
                    acc[vn, vh, vw, vc] = T.float32(0)
                row = T.meta_var(vh + PHASE_H + vkh * DH)
                column = T.meta_var(vw + PHASE_W + vtap // M * DW)
                value = T.meta_var(padded[vn, row // SH, column // SW, vc * M + vtap % M])
                factor = T.meta_var(weight[KH - 1 - vkh, KW - 1 - vtap // M, vc, vtap % M])
                acc[vn, vh, vw, vc] += where(row, column, blocks.product(value, factor))
        blocks.round_sums(out, acc)

    return grad_data_nhwc


def _axis(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Return FIRST, PHASE and the extent of `padded` along one axis."""
    size = (shape.height, shape.width)[axis]
    stride, reach = shape.stride[axis], (shape.kernel[axis] - 1) * shape.dilation[axis]
    first, phase = divmod(shape.padding[axis] - reach, stride)
    return first, phase, (size + SLACK - 1 + phase + reach) // stride + 1


def _where(shape: Shape) -> Callable[..., tirx.PrimExpr]:
    """Give the function that keeps a product where a tap meets a row and a column."""

    def where(row: tirx.PrimExpr, column: tirx.PrimExpr, product: tirx.PrimExpr) -> Any:
        strides = zip((row, column), shape.stride, strict=True)
        tests = [T.floormod(index, stride) == 0 for index, stride in strides if stride > 1]
        return T.if_then_else(tirx.all(*tests), product, T.float32(-0.0)) if tests else product

    return where
