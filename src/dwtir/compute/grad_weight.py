"""The gradient with respect to the weight: every tap sums over all outputs."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ..arguments import ALIGNMENT
from ..shape import Shape
from . import blocks, script
from .sizes import aligned, image, padded_sizes


def nchw(shape: Shape) -> tirx.PrimFunc:
    """Define the gradient on NCHW images."""
    N, C, M, H, W = image(shape)
    OC, OH, OW = shape.out_channels, shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    _, _, PH, PW = padded_sizes(shape, slack=0)
    SHIFT, LEFT, PW = aligned(shape, LEFT, PW)
    dtype = shape.dtype

    @script.prim_func(s_tir=True)
    def grad_weight_nchw(
        data: T.Buffer((N, C, H, W), dtype, align=ALIGNMENT),
        grad_out: T.Buffer((N, OC, OH, OW), dtype, align=ALIGNMENT),
        out: T.Buffer((C, M, KH, KW), dtype, align=ALIGNMENT),
    ) -> None:
        padded = T.sblock_alloc_buffer((N, C, PH, PW), dtype)
        acc = T.sblock_alloc_buffer((C, M, KH, KW), "float32")
        blocks.pad_nchw(padded, data, TOP, LEFT)
        for c, m, kh, kw, n, oh, ow in T.grid(C, M, KH, KW, N, OH, OW):
            with T.sblock("depthwise_conv2d"):
                vc, vm, vkh, vkw, vn, voh, vow = T.axis.remap("SSSSRRR", [c, m, kh, kw, n, oh, ow])
                with T.init():
                    acc[vc, vm, vkh, vkw] = T.float32(0)
                acc[vc, vm, vkh, vkw] = acc[vc, vm, vkh, vkw] + T.cast(
                    padded[vn, vc, voh * SH + vkh * DH, vow * SW + vkw * DW + SHIFT], "float32"
                ) * T.cast(grad_out[vn, vc * M + vm, voh, vow], "float32")
        blocks.round_sums(out, acc)

    return grad_weight_nchw


def nhwc(shape: Shape) -> tirx.PrimFunc:
    """Define the gradient on NHWC images."""
    N, C, M, H, W = image(shape)
    OC, OH, OW = shape.out_channels, shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    _, _, PH, PW = padded_sizes(shape, slack=0)
    dtype = shape.dtype

    @script.prim_func(s_tir=True)
    def grad_weight_nhwc(
        data: T.Buffer((N, H, W, C), dtype, align=ALIGNMENT),
        grad_out: T.Buffer((N, OH, OW, OC), dtype, align=ALIGNMENT),
        out: T.Buffer((KH, KW, C, M), dtype, align=ALIGNMENT),
    ) -> None:
        padded = T.sblock_alloc_buffer((N, PH, PW, C), dtype)
        acc = T.sblock_alloc_buffer((KH, KW, C, M), "float32")
        blocks.pad_nhwc(padded, data, TOP, LEFT)
        for kh, kw, c, m, n, oh, ow in T.grid(KH, KW, C, M, N, OH, OW):
            with T.sblock("depthwise_conv2d"):
                vkh, vkw, vc, vm, vn, voh, vow = T.axis.remap("SSSSRRR", [kh, kw, c, m, n, oh, ow])
                with T.init():
                    acc[vkh, vkw, vc, vm] = T.float32(0)
                acc[vkh, vkw, vc, vm] = acc[vkh, vkw, vc, vm] + T.cast(
                    padded[vn, voh * SH + vkh * DH, vow * SW + vkw * DW, vc], "float32"
                ) * T.cast(grad_out[vn, voh, vow, vc * M + vm], "float32")
        blocks.round_sums(out, acc)

    return grad_weight_nhwc
