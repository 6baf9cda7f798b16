"""The gradient with respect to the weight: every tap sums over all outputs."""

from tvm import tirx
from tvm.script import tirx as T

from ..shape import Shape
from . import blocks, script
from .forward import declared
from .sizes import aligned, image, padded_sizes


def nchw(shape: Shape) -> tirx.PrimFunc:
    """Define the gradient on NCHW images."""
    N, C, M, *_ = image(shape)
    OH, OW = shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    _, _, PH, PW = padded_sizes(shape, slack=0)
    SHIFT, LEFT, PW = aligned(shape, LEFT, PW)
    dtype = shape.dtype

    @script.prim_func(s_tir=True)
    def grad_weight_nchw() -> None:
        data, grad_out, _, out = T.meta_var(declared(shape))
        padded = T.sblock_alloc_buffer((N, C, PH, PW), dtype)
        acc = T.sblock_alloc_buffer((C, M, KH, KW), "float32")
        blocks.pad_nchw(padded, data, TOP, LEFT)
        for c, m, kh, kw, n, oh, ow in T.grid(C, M, KH, KW, N, OH, OW):
            with T.sblock("depthwise_conv2d"):
                vc, vm, vkh, vkw, vn, voh, vow = T.axis.remap("SSSSRRR", [c, m, kh, kw, n, oh, ow])
                with T.init():
                    acc[vc, vm, vkh, vkw] = T.float32(0)
                acc[vc, vm, vkh, vkw] += blocks.product(
                    padded[vn, vc, voh * SH + vkh * DH, vow * SW + vkw * DW + SHIFT],
                    grad_out[vn, vc * M + vm, voh, vow],
                )
        blocks.round_sums(out, acc)

    return grad_weight_nchw


def nhwc(shape: Shape) -> tirx.PrimFunc:
    """Define the gradient on NHWC images."""
    N, C, M, *_ = image(shape)
    OH, OW = shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT = shape.padding[:2]
    _, _, PH, PW = padded_sizes(shape, slack=0)
    dtype = shape.dtype

    @script.prim_func(s_tir=True)
    def grad_weight_nhwc() -> None:
        data, grad_out, _, out = T.meta_var(declared(shape))
        padded = T.sblock_alloc_buffer((N, PH, PW, C), dtype)
        acc = T.sblock_alloc_buffer((KH, KW, C, M), "float32")
        blocks.pad_nhwc(padded, data, TOP, LEFT)
        for kh, kw, c, m, n, oh, ow in T.grid(KH, KW, C, M, N, OH, OW):
            with T.sblock("depthwise_conv2d"):
                vkh, vkw, vc, vm, vn, voh, vow = T.axis.remap("SSSSRRR", [kh, kw, c, m, n, oh, ow])
                with T.init():
                    acc[vkh, vkw, vc, vm] = T.float32(0)
                acc[vkh, vkw, vc, vm] += blocks.product(
                    padded[vn, voh * SH + vkh * DH, vow * SW + vkw * DW, vc], grad_out[vn, voh, vow, vc * M + vm]
                )
        blocks.round_sums(out, acc)

    return grad_weight_nhwc
