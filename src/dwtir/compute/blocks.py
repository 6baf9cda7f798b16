"""Blocks that several operations have."""

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .order import order_of
from .parts import by_places, fill


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


def pad(padded: tirx.Buffer, image: tirx.Buffer, layout: str, top: int, left: int) -> None:
    """Lay images in zeros, from row `top` and column `left` on."""
    fill("pad", "a b c d", padded, lambda *place: inside(image, layout, place, top, left))


def product(first: Any, second: Any) -> Any:
    """Multiply as all sums are taken, in float32."""
    return T.cast(first, "float32") * T.cast(second, "float32")


def add_up(
    sums: tirx.Buffer, loops: str, others: dict[str, int], product: Callable[..., Any], *factors: tirx.Buffer
) -> None:
    """Sum products up, in loops of such names over the sums, and others. A product is of a sum's place and theirs."""

    def add(*axes: tirx.Var):
        place = axes[: len(sums.shape)]
        with T.init():
            T.buffer_store(sums, T.float32(0), place)
        T.buffer_store(sums, sums[place] + product(*factors, place, *axes[len(place) :]), place)

    extents = dict(zip(loops.split(), sums.shape, strict=True)) | others
    by_places("depthwise_conv2d", extents, add, reduced=len(others))


def round_sums(out: tirx.Buffer, sums: tirx.Buffer) -> None:
    """Round the sums of a gradient to its type."""
    fill("epilogue", "a b c d", out, lambda *place: T.cast(sums[place], out.dtype))
