"""The convolution and its gradients as TensorIR: what is computed, and nothing about how.

All operations, in both layouts, have the same three blocks:

``pad``
    the input with its zeros, in the input's dtype;
``depthwise_conv2d``
    the sum over the kernel's taps (or, for the gradient of the weight, over the outputs), in float32 for every dtype;
``epilogue``
    the fused pointwise steps and the one rounding to the result's dtype.

Padding adds zeros. Whether a zero times a weight that is not finite adds NaN is
left open: where a tap is known to lie in the padding, compilers drop it.

The buffers between the blocks are `SLACK` rows and columns larger than the result needs: a last tile that hangs over
the edge lies inside of them; only loads, which test for padding anyway, and the last stores need a bounds test.
"""

from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import Any

from tvm import tirx

from ..bands import Bands
from ..diagonals import Diagonals
from ..epilogue import Epilogue
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

__all__ = ["EPILOGUE_ATTR", "SHAPE_ATTR", "SLACK", "define", "depthwise_conv2d"]

SHAPE_ATTR, EPILOGUE_ATTR = "dwtir.shape", "dwtir.epilogue"
"""Attributes of the function: what it computes, as text. A tuning database finds it by them."""

_parsing = Lock()
"""TVMScript is Python's syntax trees, and CPython up to 3.11 counts how deep it is in one of
them for all threads together: two at a time may end in a SystemError."""


_FACTORIES: dict[type, Callable[..., tirx.PrimFunc]] = {
    Bands: banded.products,
    Diagonals: lambda sizes, _: diagonal.nchw(sizes),
    Images: lambda sizes, epilogue: (whole.nchw if sizes.shape.layout == "NCHW" else whole.nhwc)(sizes, epilogue),
    Pairs: paired.products,
    Panels: channel_bands.products,
    Pieces: split.bands_of,
    SpaceToBatch: dilated.small_images,
    Strip: streamed.rows_of,
    Units: lambda sizes, _: units.nhwc(sizes),
}

_ANEW = Pairs, Panels, Units
"""Those defined anew each time: TVM binds loops of blocks within blocks of blocks in the function itself."""


def define(sizes: Any, epilogue: Epilogue, *others: int) -> tirx.PrimFunc:
    """Define the operation as a strategy transforms it that has such sizes: those of blocks, or a shape alone."""
    if isinstance(sizes, Shape):
        return depthwise_conv2d(sizes, epilogue)
    make = _define if isinstance(sizes, _ANEW) else _kept
    return make(sizes.shape, epilogue, _FACTORIES[type(sizes)], sizes, epilogue, *others)


@lru_cache(maxsize=64)  # to parse TVMScript takes 10 ms, and functions do not change
def depthwise_conv2d(shape: Shape, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the shape's operation with its epilogue.

    Returns
    -------
    tvm.tirx.PrimFunc
        ``main(*shape.input_shapes, *epilogue.operands, out)`` on buffers of the shape's layout and dtype. Its
        attributes `SHAPE_ATTR` and `EPILOGUE_ATTR` say what it is; no compiler looks at them.

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


_kept = lru_cache(maxsize=256)(_define)
