"""The gradient with respect to the weight: every tap sums over all outputs."""

from tvm import tirx
from tvm.script import tirx as T

from ..shape import Shape
from . import blocks, script
from .forward import declared
from .order import order_of
from .parts import made
from .sizes import aligned, padded_sizes


def grad_weight(shape: Shape) -> tirx.PrimFunc:
    """Define the gradient."""
    N, C, M = shape.batch, shape.in_channels, shape.channel_multiplier
    OH, OW = shape.out_height, shape.out_width
    (SH, SW), (DH, DW), (TOP, LEFT) = shape.stride, shape.dilation, shape.padding[:2]
    _, _, PH, PW = padded_sizes(shape, slack=0)
    SHIFT, LEFT, PW = aligned(shape, LEFT, PW)
    laid, _ = order_of(shape.layout)

    def product(padded, grad_out, weight, n, oh, ow):
        c, m, kh, kw = weight if shape.layout == "NCHW" else weight[2:] + weight[:2]
        value = padded[laid(n, c, oh * SH + kh * DH, ow * SW + kw * DW + SHIFT)]
        return blocks.product(value, grad_out[laid(n, c * M + m, oh, ow)])

    @script.prim_func(s_tir=True)
    def depthwise_grad_weight() -> None:
        data, grad_out, _, out = T.meta_var(declared(shape))
        padded = made(shape.dtype, *laid(N, C, PH, PW))
        acc = made("float32", *shape.weight_shape)
        blocks.pad(padded, data, shape.layout, TOP, LEFT)
        blocks.add_up(acc, "a b c d", {"n": N, "oh": OH, "ow": OW}, product, padded, grad_out)
        blocks.round_sums(out, acc)

    return depthwise_grad_weight
