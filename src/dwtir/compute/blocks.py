"""Blocks that several operations begin and end with."""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from . import script
from .order import order_of


def inside(image: Any, layout: str, place: tuple[Any, ...], top: int, left: int) -> Any:
    """Read an image so many rows above and columns before a place, or zeros beside it."""
    laid, named = order_of(layout)
    _, _, height, width = named(*image.shape)
    n, c, row, column = named(*place)
    is_inside = tirx.all(
        top <= row,
        row < top + height,
        # Not(column < left), for TVM proves that of a vector and not left <= column.
        tirx.Not(column < left) if layout == "NCHW" else left <= column,
        column < left + width,
    )
    return T.if_then_else(is_inside, image[laid(n, c, row - top, column - left)], T.cast(0, image.dtype))


@script.inline
def pad(padded, image, layout, top, left):
    """Lay images in zeros, from row `top` and column `left` on."""
    for a, b, c, d in T.grid(*padded.shape):
        with T.sblock("pad"):
            va, vb, vc, vd = T.axis.remap("SSSS", [a, b, c, d])
            padded[va, vb, vc, vd] = inside(image, layout, (va, vb, vc, vd), top, left)


def product(first: Any, second: Any) -> Any:
    """Multiply as all sums are taken, in float32."""
    return T.cast(first, "float32") * T.cast(second, "float32")


@script.inline
def round_sums(out, sums):
    """Round the sums of a gradient to its type."""
    for a, b, c, d in T.grid(*out.shape):
        with T.sblock("epilogue"):
            va, vb, vc, vd = T.axis.remap("SSSS", [a, b, c, d])
            out[va, vb, vc, vd] = T.cast(sums[va, vb, vc, vd], out.dtype)
