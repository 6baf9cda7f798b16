"""The convolution and its gradients as TensorIR: what is computed, and nothing about how.

All operations, in both layouts, have the same three blocks:

``pad``
    the input with its zeros, in the input's dtype;
``depthwise_conv2d``
    the sum over the kernel's taps (or, for the gradient of the weight, over the
    outputs), in float32 for every dtype;
``epilogue``
    the fused pointwise steps and the one rounding to the result's dtype.

Padding adds zeros. Whether a zero times a weight that is not finite adds NaN is
left open: where a tap is known to lie in the padding, compilers drop it.

The buffers between the blocks are `SLACK` rows and columns larger than the
result needs. A schedule computes the first two blocks under the loops of the
third, tile by tile, so the slack is never computed as such; but a last tile
that hangs over the edge of the result then lies inside the buffers, and the
inner loops need no bounds test. Only loads (which test for padding anyway) and
the final stores have one.
"""

from collections.abc import Callable
from functools import lru_cache
from threading import Lock

from tvm import tirx

from ..bands import Bands
from ..diagonals import Diagonals
from ..epilogue import NO_STEPS, Epilogue
from ..images import Images
from ..pairs import Pairs
from ..panels import Panels
from ..pieces import Pieces
from ..shape import Shape
from ..space_to_batch import SpaceToBatch
from ..strips import Strip
from ..units import Units
from . import (
    banded,
    channel_bands,
    diagonal,
    dilated,
    forward,
    grad_data,
    grad_weight,
    paired,
    split,
    streamed,
    units,
    whole,
)
from .sizes import SLACK

__all__ = [
    "EPILOGUE_ATTR",
    "SHAPE_ATTR",
    "SLACK",
    "banded_channels",
    "banded_matrix",
    "channel_pairs",
    "depthwise_conv2d",
    "diagonal_sums",
    "small_images",
    "split_images",
    "streamed_rows",
    "unit_sums",
    "whole_images",
]

SHAPE_ATTR, EPILOGUE_ATTR = "dwtir.shape", "dwtir.epilogue"
"""Attributes of the function: what it computes, as text. A tuning database finds it by them."""

_parsing = Lock()
"""TVMScript is Python's syntax trees, and CPython up to 3.11 counts how deep it is in one of
them for all threads together: two at a time may end in a SystemError."""


def banded_channels(panels: Panels, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define a shape's operation as products of matrices, by panels of some channels.

    Each time anew: TVM binds loops of blocks within blocks of blocks in the function itself.
    """
    return _define(panels.shape, epilogue, channel_bands.products, panels, epilogue)


def channel_pairs(pairs: Pairs, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define a shape's operation as products of matrices over pairs of channels."""
    return _define(pairs.shape, epilogue, paired.products, pairs, epilogue)


@lru_cache(maxsize=64)
def banded_matrix(bands: Bands, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define a shape's operation as products of matrices, tile by tile."""
    return _define(bands.shape, epilogue, banded.products, bands, epilogue)


@lru_cache(maxsize=64)
def diagonal_sums(sizes: Diagonals) -> tirx.PrimFunc:
    """Define the gradient of the weight as products of matrices."""
    return _define(sizes.shape, NO_STEPS, diagonal.nchw, sizes)


def unit_sums(sizes: Units) -> tirx.PrimFunc:
    """Define the gradient of the weight as products of matrices, row after row; anew, as `banded_channels`."""
    return _define(sizes.shape, NO_STEPS, units.nhwc, sizes)


@lru_cache(maxsize=64)
def small_images(split: SpaceToBatch, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the operation by images of rows and columns that are a dilation apart, with a block "store" more."""
    return _define(split.shape, epilogue, dilated.small_images, split, epilogue)


@lru_cache(maxsize=64)
def streamed_rows(strips: Strip, epilogue: Epilogue, rows: int, depth: int) -> tirx.PrimFunc:
    """Define the operation row after row of the input."""
    return _define(strips.shape, epilogue, streamed.rows_of, strips, epilogue, rows, depth)


@lru_cache(maxsize=64)
def whole_images(images: Images, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the operation image by image, without the taps that lie in the padding."""
    factory = whole.nchw if images.shape.layout == "NCHW" else whole.nhwc
    return _define(images.shape, epilogue, factory, images, epilogue)


@lru_cache(maxsize=64)
def split_images(pieces: Pieces, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the operation by bands of rows of the result, or parts of these, each of a thread."""
    return _define(pieces.shape, epilogue, split.bands_of, pieces, epilogue)


@lru_cache(maxsize=64)  # to parse TVMScript takes 10 ms, and functions do not change
def depthwise_conv2d(shape: Shape, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the shape's operation with its epilogue.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``main(*shape.input_shapes, *epilogue.operands, out)`` on buffers of the
        shape's layout and dtype. Its attributes `SHAPE_ATTR` and
        `EPILOGUE_ATTR` say what it is; no compiler looks at them.

    Raises
    ------
    InvalidEpilogueError
        If a gradient is to have an epilogue.
    """
    if shape.operation == "forward":
        return _define(shape, epilogue, forward.convolution, shape, epilogue)
    gradient = grad_data.grad_data if shape.operation == "grad_data" else grad_weight.grad_weight
    return _define(shape, epilogue, gradient, shape)


def _define(
    shape: Shape, epilogue: Epilogue, factory: Callable[..., tirx.PrimFunc], *arguments: object
) -> tirx.PrimFunc:
    """Make ``main`` by a factory, with the attributes that say what it computes."""
    epilogue.check_for(shape)
    with _parsing:
        func = factory(*arguments)
    about = {SHAPE_ATTR: str(shape), EPILOGUE_ATTR: str(epilogue)}
    return func.with_attrs({"global_symbol": "main", "tirx.noalias": True} | about)
