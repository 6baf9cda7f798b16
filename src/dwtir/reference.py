"""The float64 oracle in NumPy, and how far a right kernel may be from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .epilogue import Epilogue, EpilogueLike
from .shape import DepthwiseConv2dShape

__all__ = ["depthwise_conv2d", "error_bound", "numpy_dtype"]

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


def depthwise_conv2d(
    shape: DepthwiseConv2dShape,
    data: Array,
    weight: Array,
    operands: Mapping[str, Array] | None = None,
    *,
    epilogue: EpilogueLike = None,
) -> Float64:
    """Depthwise convolution with epilogue, in float64.

    Parameters
    ----------
    shape : DepthwiseConv2dShape
        What is computed.
    data, weight : ndarray
        Input and filters, of ``shape.data_shape`` and ``shape.weight_shape``.
    operands : mapping of str to ndarray
        The epilogue's tensors, by name.
    epilogue : Epilogue, str, sequence of str or None
        The fused steps.

    Returns
    -------
    ndarray of float64
        The output, of ``shape.out_shape``, not rounded to the shape's dtype.
    """
    out = _convolve(shape, _wide(data), _wide(weight))
    tensors = _broadcastable(shape, operands)
    for step in Epilogue.of(epilogue).steps:
        out = _STEPS[step](out, tensors)
    return out


def error_bound(
    shape: DepthwiseConv2dShape,
    data: Array,
    weight: Array,
    operands: Mapping[str, Array] | None = None,
    *,
    epilogue: EpilogueLike = None,
) -> Float64:
    """Largest error, for each output, of a kernel that sums in float32.

    A sum of n products in any order is within ``gamma_n * sum |x||w|`` of the
    true one, gamma_n = n u / (1 - n u) (Higham, Accuracy and Stability of
    Numerical Algorithms, 3.1). Every pointwise step scales that error by at
    most its Lipschitz constant and adds roundings of its own; at the end comes
    one rounding to the output's dtype.

    Returns
    -------
    ndarray of float64
        The bound, of ``shape.out_shape``.
    """
    unit = _UNIT_ROUNDOFF["float32"]
    taps = prod(shape.kernel)
    gamma = (taps + 1) * unit / (1 - (taps + 1) * unit)
    out = _convolve(shape, _wide(data), _wide(weight))
    bound = gamma * _convolve(shape, np.abs(_wide(data)), np.abs(_wide(weight)))
    bound = bound + taps * _SMALLEST["float32"]
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


def _convolve(shape: DepthwiseConv2dShape, data: Float64, weight: Float64) -> Float64:
    """Sum over the kernel's taps, each a strided slice of the padded input."""
    nchw = shape.layout == "NCHW"
    if not nchw:
        data = data.transpose(0, 3, 1, 2)
        weight = weight.transpose(2, 3, 0, 1)
    top, left, bottom, right = shape.padding
    padded = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    height, width = shape.out_height, shape.out_width
    sums = np.zeros(
        (shape.batch, shape.in_channels, shape.channel_multiplier, height, width), np.float64
    )
    for kh in range(shape.kernel[0]):
        for kw in range(shape.kernel[1]):
            first_row, first_column = kh * shape.dilation[0], kw * shape.dilation[1]
            window = padded[
                :,
                :,
                first_row : first_row + (height - 1) * shape.stride[0] + 1 : shape.stride[0],
                first_column : first_column + (width - 1) * shape.stride[1] + 1 : shape.stride[1],
            ]
            sums += window[:, :, None] * weight[None, :, :, kh, kw, None, None]
    out = sums.reshape(shape.batch, shape.out_channels, height, width)
    return out if nchw else np.ascontiguousarray(out.transpose(0, 2, 3, 1))


def _broadcastable(
    shape: DepthwiseConv2dShape, operands: Mapping[str, Array] | None
) -> dict[str, Float64]:
    """Give per-channel tensors the rank of the output."""
    per_channel = (1, -1, 1, 1) if shape.layout == "NCHW" else (1, 1, 1, -1)
    return {
        name: _wide(array) if name == "residual" else _wide(array).reshape(per_channel)
        for name, array in (operands or {}).items()
    }


def _sigmoid(x: Float64) -> Float64:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def _erf(x: Float64) -> Float64:
    from math import erf

    return np.asarray(np.vectorize(erf, otypes=[np.float64])(x))


_STEPS: dict[str, Callable[[Float64, Mapping[str, Float64]], Float64]] = {
    "bias": lambda x, t: x + t["bias"],
    "scale_shift": lambda x, t: x * t["scale"] + t["shift"],
    "residual": lambda x, t: x + t["residual"],
    "relu": lambda x, t: np.maximum(x, 0.0),
    "relu6": lambda x, t: np.clip(x, 0.0, 6.0),
    "hardswish": lambda x, t: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
    "silu": lambda x, t: x * _sigmoid(x),
    "gelu": lambda x, t: 0.5 * x * (1.0 + _erf(x / np.sqrt(2.0))),
}
_SLOPE = {
    "bias": 1.0,
    "residual": 1.0,
    "relu": 1.0,
    "relu6": 1.0,
    "hardswish": 1.5,
    "silu": 1.1,
    "gelu": 1.13,
}
_ROUNDINGS = {
    "bias": 1,
    "scale_shift": 2,
    "residual": 1,
    "relu": 0,
    "relu6": 0,
    "hardswish": 4,
    "silu": 8,
    "gelu": 8,
}
