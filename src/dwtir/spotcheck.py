"""The float64 reference on a part of a large result: some images and channels, all of each."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from . import reference
from .epilogue import Epilogue
from .reference import Array
from .shape import Shape

_MAX_PRODUCTS = 30_000_000


def error_ratio(shape: Shape, epilogue: Epilogue, inputs: Sequence[Array], out: Array) -> float:
    """Compare a result with the reference, on as much of it as takes about a second.

    Images and channels do not depend on each other, but for the weight's gradient, which sums over images: a part, with
    the first and the last, is computed exactly as in the whole.

    The inputs are the tensors of ``shape.input_shapes`` and the epilogue's operands. The largest error is returned, in
    units of what a kernel that sums in float32 may have there; infinite where an output is not finite.
    """
    images, channels = _sample(shape)
    part = replace(shape, batch=len(images), in_channels=len(channels))
    nhwc = shape.layout == "NHWC"
    multiplier = shape.channel_multiplier
    outs = (channels[:, None] * multiplier + np.arange(multiplier)).reshape(-1)

    def cut(name: str, array: Array) -> Array:
        if name == "weight":
            return array.take(channels, axis=2 if nhwc else 0)
        if name in ("data", "grad_out", "out", "residual"):
            return array[images].take(channels if name == "data" else outs, axis=-1 if nhwc else 1)
        return array.reshape(-1)[outs]

    names = (*shape.input_shapes, *epilogue.operands(shape))
    parts = {name: cut(name, array) for name, array in zip(names, inputs, strict=True)}
    first, second = (parts.pop(name) for name in shape.input_shapes)
    about = (part, first, second, parts)
    result = {"forward": "out", "grad_data": "data", "grad_weight": "weight"}[shape.operation]
    right = reference.depthwise_conv2d(*about, epilogue=epilogue)
    bound = reference.error_bound(*about, epilogue=epilogue)
    error = np.nan_to_num(np.abs(cut(result, out).astype(np.float64) - right), nan=np.inf)
    return float((error / np.maximum(bound, np.finfo(np.float64).tiny)).max())


def complaint(strategy: object, shape: Shape, epilogue: Epilogue, inputs: Sequence[Array], out: Array) -> str:
    """Say how wrong a strategy's result is, by `error_ratio`; nothing if it is right."""
    ratio = error_ratio(shape, epilogue, inputs, out)
    if ratio <= 1:
        return ""
    return f"{strategy} is wrong on {shape}: its error is {ratio:.1f} times what sums in float32 may have"


def _sample(shape: Shape) -> tuple[Array, Array]:
    per_channel = prod(shape.out_shape[1:]) // shape.in_channels * prod(shape.kernel)
    pairs = max(1, _MAX_PRODUCTS // max(per_channel, 1))
    if shape.operation == "grad_weight":  # sums over all images
        images, count = shape.batch, min(shape.in_channels, max(1, pairs // shape.batch))
    else:
        count = min(shape.in_channels, pairs)
        images = min(shape.batch, max(1, pairs // count), 4)
    return _spread(shape.batch, images), _spread(shape.in_channels, count)


def _spread(extent: int, count: int) -> Array:
    return np.unique(np.linspace(0, extent - 1, count).round().astype(np.int64))
