"""The convolution with its epilogue, or the data's gradient, of images of rows and columns a dilation apart."""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..epilogue import Epilogue
from ..space_to_batch import SpaceToBatch
from . import blocks, script
from .forward import both_ends
from .order import order_of, weight_at
from .parts import by_places, fill, made, when
from .sizes import SLACK, aligned


def small_images(split: SpaceToBatch, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution. In NCHW small images that lie beside each other are neighbouring channels."""
    shape, small, DOWN, ACROSS = split
    (KH, KW), DW, M, COUNT = small.kernel, small.dilation[1], small.channel_multiplier, split.images
    IS_PLANAR = shape.layout == "NCHW"
    HEIGHT, WIDTH, ROWS, COLS = shape.result_height, shape.result_width, small.result_height, small.result_width
    TOP, LEFT = shape.before
    KH0, KW0, NEXT = (0, 0, 1) if shape.operation == "forward" else (KH - 1, KW - 1, -1)  # turned round
    AH, AW, PH, PW = ROWS + SLACK, COLS + SLACK, ROWS + SLACK + KH - 1, COLS + SLACK + (KW - 1) * DW
    SHIFT, LEFT, PW = aligned(shape, LEFT, PW) if ACROSS == 1 else (0, LEFT, PW)
    dtype = shape.dtype
    laid, named = order_of(shape.layout)
    declare, finish = both_ends(shape, epilogue)

    def whole(indices: tuple[Any, ...], multiplier: int):
        """Find the image, channel, row and column that an element of a small image is."""
        n, c, row, column = named(*indices)
        place = (c // multiplier if IS_PLANAR else n) % COUNT
        if IS_PLANAR:
            c = c // (multiplier * COUNT) * multiplier + c % multiplier
        else:
            n = n // COUNT
        return n, c, row * DOWN + place // ACROSS, column * ACROSS + place % ACROSS

    def read(data, *place):
        return blocks.inside(data, shape.layout, laid(*whole(place, 1)), TOP, LEFT)

    def product(padded, weight, place, kh, kw):
        n, c, row, column = named(*place)
        value = padded[laid(n, c // M, row + kh, column + kw * DW + SHIFT)]
        _, c, *_ = whole(place, M)
        channel, tap = (c // M, c % M), (KH0 + kh * NEXT, KW0 + kw * NEXT)
        return blocks.product(value, weight[weight_at(shape.layout, channel, tap)])

    def rounded(acc, operands, *place):
        n, c, row, column = whole(place, M)
        return finish(acc[place], operands, c, laid(n, c, T.min(row, HEIGHT - 1), T.min(column, WIDTH - 1)))

    def store(staged, out, *place):
        n, c, row, column = whole(place, M)
        with when(row < HEIGHT, column < WIDTH):
            T.buffer_store(out, staged[place], laid(n, c, row, column))

    N, *_ = small.result_shape
    C, OC = small.in_channels, small.in_channels * M

    @script.prim_func(s_tir=True)
    def depthwise_conv2d_dilated() -> None:
        data, weight, operands, out = T.meta_var(declare())
        padded = made(dtype, *laid(N, C, PH, PW))
        acc = made("float32", *laid(N, OC, AH, AW))
        staged = made(dtype, *laid(N, OC, ROWS, COLS))
        fill("pad", "a b c d", padded, read, data)
        blocks.add_up(acc, "a b c d", {"kh": KH, "kw": KW}, product, padded, weight)
        fill("epilogue", "a b c d", staged, rounded, acc, operands)
        by_places("store", dict(zip("abcd", staged.shape, strict=True)), store, staged, out)

    return depthwise_conv2d_dilated
