"""The float64 oracle in NumPy, and how far a right kernel may be from it."""

from collections.abc import Callable, Iterator, Mapping
from math import erf, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .epilogue import Epilogue, EpilogueLike
from .shape import Shape

Array: TypeAlias = NDArray[Any]
Float64: TypeAlias = NDArray[np.float64]

_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_SMALLEST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a dwtir dtype; bfloat16 is the one of ml_dtypes."""
    if dtype == "bfloat16":
        import ml_dtypes  # a dependency of apache-tvm

        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(dtype)


def random_inputs(shape: Shape, epilogue: Epilogue) -> list[Array]:
    """Make the tensors that a kernel takes, of normal values, repeated where a tensor has more than a million."""
    rng, dtype = np.random.default_rng(0), numpy_dtype(shape.dtype)
    return [
        np.resize(rng.standard_normal(min(prod(extents), 2**20), np.float32), extents).astype(dtype)
        for extents in (shape.input_shapes | epilogue.operands(shape)).values()
    ]


def depthwise_conv2d(
    shape: Shape,
    first: Array,
    second: Array,
    operands: Mapping[str, Array] | None = None,
    *,
    epilogue: EpilogueLike = None,
) -> Float64:
    """Depthwise convolution with epilogue, or a gradient of it, in float64.

    Parameters
    ----------
    first, second : ndarray
        The tensors of ``shape.input_shapes``; data and weight for the convolution itself.
    operands : mapping of str to ndarray
        The epilogue's tensors, by name.

    Returns
    -------
    ndarray of float64
        The result, of ``shape.result_shape``, not rounded to the shape's dtype.
    """
    out = _sum_products(shape, _wide(first), _wide(second))
    tensors = _broadcastable(shape, operands)
    for step in Epilogue.of(epilogue).steps:
        out = _STEPS[step](out, tensors)
    return out


def error_bound(
    shape: Shape,
    first: Array,
    second: Array,
    operands: Mapping[str, Array] | None = None,
    *,
    epilogue: EpilogueLike = None,
) -> Float64:
    """Largest error, for each output, of a kernel that sums in float32.

    A sum of n products in any order is within ``gamma_n * sum |x||w|`` of the
    true one, gamma_n = n u / (1 - n u) (Higham, Accuracy and Stability of
    Numerical Algorithms, 3.1). Every pointwise step scales that error by at
    most its Lipschitz constant and adds roundings of its own; at the end comes
    one rounding to the result's dtype.
    """
    unit = _UNIT_ROUNDOFF["float32"]
    count = _products(shape)
    gamma = (count + 1) * unit / (1 - (count + 1) * unit)
    wide = _wide(first), _wide(second)
    out = _sum_products(shape, *wide)
    bound = gamma * _sum_products(shape, *map(np.abs, wide)) + count * _SMALLEST["float32"]
    tensors = _broadcastable(shape, operands)
    for step in Epilogue.of(epilogue).steps:
        before = out
        out = _STEPS[step](before, tensors)
        bound = bound * np.abs(tensors["scale"]) if step == "scale_shift" else bound * _SLOPE[step]
        # Each step is a few float32 operations on values no larger than these; the
        # transcendental ones are library functions of a few units in the last place.
        magnitude = np.abs(before) + np.abs(out)
        if step == "scale_shift":
            magnitude = magnitude + np.abs(before * tensors["scale"])
        bound = bound + _ROUNDINGS[step] * unit * (magnitude + bound)
    return bound + _UNIT_ROUNDOFF[shape.dtype] * (np.abs(out) + bound) + _SMALLEST[shape.dtype]


def _wide(array: Array) -> Float64:
    return np.asarray(array).astype(np.float64)


def _products(shape: Shape) -> int:
    return {
        "forward": prod(shape.kernel),
        "grad_data": prod(shape.kernel) * shape.channel_multiplier,
        "grad_weight": shape.batch * shape.out_height * shape.out_width,
    }[shape.operation]


def _sum_products(shape: Shape, first: Float64, second: Float64) -> Float64:
    return _OPERATIONS[shape.operation](shape, **dict(zip(shape.input_shapes, (first, second), strict=True)))


def _forward(shape: Shape, *, data: Float64, weight: Float64) -> Float64:
    data, weight = _as_nchw(shape, data), _filters_first(shape, weight)
    padded, out = _pad(shape, data), np.zeros(_outputs(shape), np.float64)
    for tap, window in _windows(shape, padded):
        out += window[:, :, None] * weight[..., tap[0], tap[1], None, None]
    return _from_nchw(shape, out.reshape(shape.batch, -1, *_outputs(shape)[3:]))


def _grad_data(shape: Shape, *, grad_out: Float64, weight: Float64) -> Float64:
    grad_out = _as_nchw(shape, grad_out).reshape(_outputs(shape))
    weight = _filters_first(shape, weight)
    image = (shape.batch, shape.in_channels, shape.height, shape.width)
    padded = _pad(shape, np.zeros(image, np.float64))
    for tap, window in _windows(shape, padded):
        window += (grad_out * weight[..., tap[0], tap[1], None, None]).sum(axis=2)
    top, left = shape.padding[:2]
    return _from_nchw(shape, padded[:, :, top : top + shape.height, left : left + shape.width])


def _grad_weight(shape: Shape, *, data: Float64, grad_out: Float64) -> Float64:
    padded = _pad(shape, _as_nchw(shape, data))
    grad_out = _as_nchw(shape, grad_out).reshape(_outputs(shape))
    filters = np.zeros((shape.in_channels, shape.channel_multiplier, *shape.kernel), np.float64)
    for tap, window in _windows(shape, padded):
        filters[..., tap[0], tap[1]] = (window[:, :, None] * grad_out).sum(axis=(0, 3, 4))
    return np.ascontiguousarray(_filters_first(shape, filters))  # and back, by the same exchange


_OPERATIONS: dict[str, Callable[..., Float64]] = {
    "forward": _forward,
    "grad_data": _grad_data,
    "grad_weight": _grad_weight,
}


def _windows(shape: Shape, padded: Float64) -> Iterator[tuple[tuple[int, int], Float64]]:
    """Yield each tap and the view of the padded input that it meets, one value an output."""
    extents = (shape.out_height, shape.out_width)
    for tap in np.ndindex(*shape.kernel):
        places = [
            slice(kernel * dilation, kernel * dilation + (extent - 1) * stride + 1, stride)
            for kernel, extent, stride, dilation in zip(tap, extents, shape.stride, shape.dilation, strict=True)
        ]
        yield (tap[0], tap[1]), padded[:, :, places[0], places[1]]


def _outputs(shape: Shape) -> tuple[int, ...]:
    return (shape.batch, shape.in_channels, shape.channel_multiplier, shape.out_height, shape.out_width)


def _pad(shape: Shape, image: Float64) -> Float64:
    top, left, bottom, right = shape.padding
    return np.pad(image, ((0, 0), (0, 0), (top, bottom), (left, right)))


def _filters_first(shape: Shape, weight: Float64) -> Float64:
    return weight if shape.layout == "NCHW" else weight.transpose(2, 3, 0, 1)


def _as_nchw(shape: Shape, image: Float64) -> Float64:
    return image if shape.layout == "NCHW" else image.transpose(0, 3, 1, 2)


def _from_nchw(shape: Shape, image: Float64) -> Float64:
    return np.ascontiguousarray(image if shape.layout == "NCHW" else image.transpose(0, 2, 3, 1))


def _broadcastable(shape: Shape, operands: Mapping[str, Array] | None) -> dict[str, Float64]:
    per_channel = (1, -1, 1, 1) if shape.layout == "NCHW" else (1, 1, 1, -1)
    return {
        name: _wide(array) if name == "residual" else _wide(array).reshape(per_channel)
        for name, array in (operands or {}).items()
    }


_erf = np.vectorize(erf, otypes=[np.float64])

_STEPS: dict[str, Callable[[Float64, Mapping[str, Float64]], Float64]] = {
    "bias": lambda x, t: x + t["bias"],
    "scale_shift": lambda x, t: x * t["scale"] + t["shift"],
    "residual": lambda x, t: x + t["residual"],
    "relu": lambda x, t: np.maximum(x, 0.0),
    "relu6": lambda x, t: np.clip(x, 0.0, 6.0),
    "hardswish": lambda x, t: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "silu": lambda x, t: x * 0.5 * (1.0 + np.tanh(0.5 * x)),
    "gelu": lambda x, t: 0.5 * x * (1.0 + _erf(x / np.sqrt(2.0))),
}
_SLOPE = {"bias": 1.0, "residual": 1.0, "relu": 1.0, "relu6": 1.0, "hardswish": 1.5, "silu": 1.1, "gelu": 1.13}
_ROUNDINGS = {"bias": 1, "scale_shift": 2, "residual": 1, "relu": 0, "relu6": 0, "hardswish": 4, "silu": 8, "gelu": 8}
