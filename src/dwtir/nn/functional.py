"""The depthwise convolution as a function, beside those of ``torch.nn.functional``."""

import operator
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.autograd import forward_ad

from ..errors import ArgumentError
from . import eager, ops
from .tensors import DEVICES, Tensor

__all__ = ["autocast", "depthwise_conv2d", "pair", "sides"]

IntPair: TypeAlias = int | Sequence[int]
PaddingArgument: TypeAlias = str | int | Sequence[int]
_Pair: TypeAlias = tuple[int, int]

_is_compiling = torch.compiler.is_dynamo_compiling
_is_autocast = torch._C._is_any_autocast_enabled


def depthwise_conv2d(
    input: Tensor,  # noqa: A002  # torch's name
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntPair = 1,
    padding: PaddingArgument = 0,
    dilation: IntPair = 1,
) -> Tensor:
    """Convolve each channel of an image with its own filters.

    It is ``torch.nn.functional.conv2d`` with ``groups=input.shape[-3]``. A kernel is built at the first call with such
    sizes, by the tuning record if there is one, and kept. Gradients of any order, autocast, ``torch.compile``,
    ``torch.export``, CUDA graphs and ``torch.vmap`` work; ``torch.func.grad`` and derivatives forwards do not.

    Parameters
    ----------
    input : torch.Tensor
        An image (N, C, H, W) or (C, H, W) on the CPU or a GPU: float32, float16 or bfloat16.
        Contiguous and channels-last images are read as they are, with an output that lies
        alike; other strides, and data not aligned to 16 bytes, cost a copy.
    weight : torch.Tensor
        Filters (k * C, 1, kh, kw) of the same type and device. For channels-last images a
        permuted copy is kept until a backward pass or a write to the weight, except through
        ``.data``, which the tensor's version does not show. None is made of a weight that
        lies as (kh, kw, k * C), as `DepthwiseConv2d` has it if asked for.
    bias : torch.Tensor, optional
        (k * C,) values.
    stride, dilation : int or (int, int)
    padding : int, (int, int), (int, int, int, int) or str
        Zeros around the image: everywhere; above-and-below and left-and-right; or top,
        left, bottom, right. ``"valid"`` is none, ``"same"`` is torch's, for a stride of 1,
        and ``"SAME"`` is TensorFlow's, which depends on the image's size.

    Returns
    -------
    torch.Tensor
        (N, k * C, OH, OW), or (k * C, OH, OW).

    Raises
    ------
    ArgumentError
        If a tensor or a parameter is none of the above.
    InvalidShapeError
        If the output would be empty, or is too large to index.
    """
    if (_is_autocast() or _is_compiling()) and (dtype := autocast(input)) is not None:
        input, weight = input.to(dtype), weight.to(dtype)  # noqa: A001
        bias = None if bias is None else bias.to(dtype)
    key = eager.key(input, weight, bias, stride, padding, dilation)
    if key is not None:
        try:
            call = eager.calls.get(key)
        except TypeError:  # lists, say, are no part of a key
            geometry = _geometry(input, weight, stride, padding, dilation)
            return depthwise_conv2d(input, weight, bias, *geometry)
        if call is not None:
            return call(input, weight, bias)
    if input.dim() == 3:
        return depthwise_conv2d(input.unsqueeze(0), weight, bias, stride, padding, dilation).squeeze(0)
    if input.dim() != 4:
        raise ArgumentError(f"input must be (N, C, H, W) or (C, H, W), got {tuple(input.shape)}")
    geometry = _geometry(input, weight, stride, padding, dilation)
    if forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in (input, weight, bias)
    ):
        raise ArgumentError("there are no forward-mode derivatives; torch.nn.functional.conv2d has them")
    if key is None or input.device.type not in DEVICES:
        return ops.depthwise_conv2d(input, weight, bias, *geometry)
    compute = eager.prepared(key, input, weight, "" if bias is None else "bias", *geometry)
    call = eager.calls[key] = eager.Call(compute, geometry, key[3] if len(input) else None).run
    return call(input, weight, bias)


def _geometry(
    image: Tensor, weight: Tensor, stride: IntPair, padding: PaddingArgument, dilation: IntPair
) -> tuple[IntPair, PaddingArgument, IntPair]:
    stride, dilation = pair("stride", stride), pair("dilation", dilation)
    return stride, sides(padding, image.shape[-2:], weight.shape[-2:], stride, dilation), dilation


def autocast(image: Tensor) -> torch.dtype | None:
    """Return the type that autocast, if it is on, wants a convolution to be computed in."""
    if not (_is_compiling() or _is_autocast()):
        return None
    device = image.device.type
    if device in DEVICES and torch.is_autocast_enabled(device) and image.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return None


def pair(name: str, value: IntPair) -> _Pair:
    """Return a stride or a dilation as two numbers."""
    if _is_pair(value) and min(value) > 0:
        return value
    values = _integers(name, value, 1)
    if len(values) in (1, 2):
        return values[0], values[-1]
    raise ArgumentError(f"{name} must be one integer or two, got {value!r}")


def sides(
    padding: PaddingArgument, size: Sequence[int], kernel: Sequence[int], stride: _Pair, dilation: _Pair
) -> tuple[int, int, int, int]:
    """Return the padding at the top, left, bottom and right of an image of this size."""
    if _is_pair(padding) and min(padding) >= 0:
        return padding * 2
    if not isinstance(padding, str):
        values = _integers("padding", padding, 0)
        if len(values) in (1, 2):
            return (values[0], values[-1]) * 2
        if len(values) == 4:
            return values[0], values[1], values[2], values[3]
        raise ArgumentError(f"padding must be one, two or four integers, got {padding!r}")
    if padding.lower() == "valid":
        return 0, 0, 0, 0
    if padding not in ("same", "SAME"):
        raise ArgumentError(f"padding must be integers, 'valid', 'same' or 'SAME', got {padding!r}")
    if padding == "same" and stride != (1, 1):
        raise ArgumentError(f"padding='same' is for a stride of 1, got {stride}; 'SAME' is TensorFlow's, for any")
    totals = [
        torch.sym_max(
            ((size[axis] - 1) // stride[axis]) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1 - size[axis], 0
        )
        for axis in range(2)
    ]
    top, left = totals[0] // 2, totals[1] // 2
    return top, left, totals[0] - top, totals[1] - left


def _is_pair(value: Any) -> TypeGuard[_Pair]:
    return type(value) is tuple and len(value) == 2 and type(value[0]) is type(value[1]) is int


def _integers(name: str, value: Any, least: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    try:
        numbers = tuple(operator.index(entry) for entry in values)
    except TypeError:
        raise ArgumentError(f"{name} must be integers, got {value!r}") from None
    if any(number < least for number in numbers):
        raise ArgumentError(f"{name} must be >= {least}, got {value!r}")
    return numbers
