"""The torch operators ``dwtir::depthwise_conv2d`` and relatives: schemas, kernels, gradients.

The convolution is linear in the image and in the weight, so the three operators without an
epilogue are each other's gradients, to any order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import ArgumentError
from . import kernels
from .tensors import Tensor, empty_image, forget_packed, memory_format, output_size

_FORMS = (torch.contiguous_format, torch.channels_last)
_GEOMETRY = "int[2] stride, SymInt[4] padding, int[2] dilation"


# Kernels for tensors that are there, and for those that only have a size


def _forward(image: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    operands, epilogue = ((), "") if bias is None else ((bias,), "bias")
    return kernels.forward(image, weight, operands, epilogue, *geometry)


def _forward_fake(image: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    kernels.check(image.shape, weight.shape, image.dtype)
    size = output_size(image.shape[2:], weight.shape[2:], *geometry)
    return empty_image(image, (image.shape[0], weight.shape[0], *size), memory_format(image))


def _fused(image: Tensor, weight: Tensor, operands: Sequence[Tensor], epilogue: str, *geometry: Any) -> Tensor:
    _refuse_gradients(image, weight, *operands)
    return kernels.forward(image, weight, operands, epilogue, *geometry)


def _fused_fake(image: Tensor, weight: Tensor, operands: Sequence[Tensor], epilogue: str, *geometry: Any) -> Tensor:
    _refuse_gradients(image, weight, *operands)
    return _forward_fake(image, weight, None, *geometry)


def _refuse_gradients(*tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise ArgumentError(
            "a convolution with a fused epilogue has no gradient; call it under torch.no_grad(), "
            "or dwtir.nn.functional.depthwise_conv2d and the steps behind it"
        )


def data_gradient(grad_out: Tensor, weight: Tensor, image_size: Any, last: bool, *geometry: Any) -> Tensor:
    """Compute `grad_data` of tensors that are there."""
    out = kernels.grad_data(grad_out, weight, image_size, _FORMS[last], *geometry)
    forget_packed(weight)
    return out


def _grad_data_fake(grad_out: Tensor, weight: Tensor, image_size: Any, last: bool, *geometry: Any) -> Tensor:
    return empty_image(grad_out, image_size, _FORMS[last])


def _grad_weight_fake(image: Tensor, grad_out: Tensor, weight_size: Any, *geometry: Any) -> Tensor:
    return image.new_empty(weight_size)


# Gradients


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    first, second, _, *others = inputs
    ctx.save_for_backward(first, second)
    ctx.geometry = others[-3:]


def _forward_backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
    image, weight = ctx.saved_tensors
    return (*gradients(ctx, image, weight, grad_out, grad_data, grad_weight), None, None, None)


def gradients(
    ctx: Any,
    image: Tensor,
    weight: Tensor,
    grad_out: Tensor,
    grad_data: Callable[..., Any],
    grad_weight: Callable[..., Any],
) -> tuple[Any, ...]:
    """Return the gradients of `depthwise_conv2d`'s tensors that are wanted, by these functions."""
    last = memory_format(image) is torch.channels_last
    wanted = ctx.needs_input_grad
    found = (
        grad_data(grad_out, weight, image.shape, last, *ctx.geometry) if wanted[0] else None,
        grad_weight(image, grad_out, weight.shape, *ctx.geometry) if wanted[1] else None,
        grad_out.sum((0, 2, 3)) if any(wanted[2:]) else None,
    )
    forget_packed(weight)
    return found


def _grad_data_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grad_out, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    return (
        depthwise_conv2d(grad, weight, None, *ctx.geometry) if wanted[0] else None,
        grad_weight(grad, grad_out, weight.shape, *ctx.geometry) if wanted[1] else None,
        *(None,) * 5,
    )


def _grad_weight_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    image, grad_out = ctx.saved_tensors
    last = memory_format(image) is torch.channels_last
    wanted = ctx.needs_input_grad
    return (
        grad_data(grad_out, grad, image.shape, last, *ctx.geometry) if wanted[0] else None,
        depthwise_conv2d(image, grad, None, *ctx.geometry) if wanted[1] else None,
        *(None,) * 4,
    )


# Batching: of the image alone, into the batch; else into the channels, which are independent


def _batched(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _in_channels(image: Tensor, dim: int | None, size: int) -> Tensor:
    """Turn a batched image (N, C, H, W) into one of `size` times the channels."""
    return _batched(image, dim, size).transpose(0, 1).flatten(1, 2)


def _out_of_channels(image: Tensor, size: int) -> tuple[Tensor, int]:
    return image.unflatten(1, (size, -1)), 1


def _in_rows(weight: Tensor, dim: int | None, size: int) -> Tensor:
    return _batched(weight, dim, size).flatten(0, 1)


def _forward_vmap(
    info: Any, dims: Any, image: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
) -> tuple[Tensor, int]:
    if dims[1] is None and dims[2] is None:
        batch = image.movedim(dims[0], 0)
        out = depthwise_conv2d(batch.flatten(0, 1), weight, bias, *geometry)
        return out.unflatten(0, batch.shape[:2]), 0
    size = info.batch_size
    bias = None if bias is None else _in_rows(bias, dims[2], size)
    image = _in_channels(image, dims[0], size)
    out = depthwise_conv2d(image, _in_rows(weight, dims[1], size), bias, *geometry)
    return _out_of_channels(out, size)


def _grad_data_vmap(
    info: Any, dims: Any, grad_out: Tensor, weight: Tensor, image_size: Any, last: bool, *geometry: Any
) -> tuple[Tensor, int]:
    size = info.batch_size
    number, channels, *rest = image_size
    if dims[1] is None:
        batch = grad_out.movedim(dims[0], 0).flatten(0, 1)
        out = grad_data(batch, weight, (size * number, channels, *rest), last, *geometry)
        return out.unflatten(0, (size, number)), 0
    grad_out, weight = _in_channels(grad_out, dims[0], size), _in_rows(weight, dims[1], size)
    out = grad_data(grad_out, weight, (number, size * channels, *rest), last, *geometry)
    return _out_of_channels(out, size)


def _grad_weight_vmap(
    info: Any, dims: Any, image: Tensor, grad_out: Tensor, weight_size: Any, *geometry: Any
) -> tuple[Tensor, int]:
    size = info.batch_size
    image = _in_channels(image, dims[0], size)
    grad_out = _in_channels(grad_out, dims[1], size)
    out = grad_weight(image, grad_out, (size * weight_size[0], *weight_size[1:]), *geometry)
    return out.unflatten(0, (size, -1)), 0


# Registration

_library = torch.library.Library("dwtir", "DEF")


def _define(
    ending: str,
    schema: str,
    kernel: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    backward: Callable[..., tuple[Any, ...]] | None = None,
    vmap: Callable[..., tuple[Tensor, int]] | None = None,
) -> Any:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    name = f"depthwise_conv2d{ending}"
    _library.define(f"{name}({schema}, {_GEOMETRY}) -> Tensor", tags=tags)
    full = f"dwtir::{name}"
    torch.library.impl(full, ("cpu", "cuda"), kernel, lib=_library)
    torch.library.register_fake(full, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(full, backward, setup_context=_save, lib=_library)
    if vmap is not None:
        torch.library.register_vmap(full, vmap, lib=_library)
    return getattr(torch.ops.dwtir, name).default


depthwise_conv2d = _define(
    "", "Tensor input, Tensor weight, Tensor? bias", _forward, _forward_fake, _forward_backward, _forward_vmap
)
grad_data = _define(
    "_grad_data",
    "Tensor grad_out, Tensor weight, SymInt[] input_size, bool channels_last",
    *(data_gradient, _grad_data_fake, _grad_data_backward, _grad_data_vmap),
)
grad_weight = _define(
    "_grad_weight",
    "Tensor input, Tensor grad_out, SymInt[] weight_size",
    *(kernels.grad_weight, _grad_weight_fake, _grad_weight_backward, _grad_weight_vmap),
)
fused = _define("_fused", "Tensor input, Tensor weight, Tensor[] operands, str epilogue", _fused, _fused_fake)
