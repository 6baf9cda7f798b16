"""From torch's tensors to a kernel: find it by what they are, build it once, and call it.

Images and weights are torch's. ``geometry`` is the stride, the padding (top, left, bottom,
right) and the dilation of the forward convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from .. import database
from .. import shape as shapes
from ..build import build
from ..epilogue import Epilogue
from ..errors import ArgumentError
from ..kernel import Kernel
from ..shape import DepthwiseConv2dShape
from ..target import Target, resolve
from .tensors import (
    Tensor,
    arranged,
    as_layout,
    empty_image,
    memory_format,
    output_size,
    packed_weight,
    spatial_weight,
)

__all__ = ["DTYPES", "check", "forward", "grad_data", "grad_weight", "shape_of"]

DTYPES = {getattr(torch, name): name for name in shapes.DTYPES}
"""The types of tensors that there are kernels for, and dwtir's names of them."""


def check(image_size: Sequence[int], weight_size: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse what no kernel is built for.

    Raises
    ------
    ArgumentError
        Saying what was given and what is allowed.
    """
    if len(image_size) != 4:
        raise ArgumentError(f"input must be (N, C, H, W), got {tuple(image_size)}")
    channels = image_size[1]
    if not channels:
        raise ArgumentError(f"input must have channels, got {tuple(image_size)}")
    if len(weight_size) != 4 or weight_size[1] != 1 or weight_size[0] % channels:
        raise ArgumentError(
            f"weight must be (k * {channels}, 1, kh, kw) for an input of {channels} channels, "
            f"got {tuple(weight_size)}"
        )
    if dtype not in DTYPES:
        raise ArgumentError(f"input must be {', '.join(DTYPES.values())}, got {dtype}")


def forward(
    image: Tensor,
    weight: Tensor,
    operands: Sequence[Tensor],
    epilogue: str,
    *geometry: Sequence[int],
) -> Tensor:
    """Compute the convolution with its epilogue, in the memory format of the image."""
    form = memory_format(image)
    if not image.shape[0]:
        rows, columns = output_size(image.shape[2:], weight.shape[2:], *geometry)
        return empty_image(image, (0, weight.shape[0], rows, columns), form)
    kernel, size = _kernel(image, form, image.shape, weight.shape, geometry, epilogue)
    out = empty_image(image, size, form)
    kernel(
        as_layout(arranged(image, form), form),
        _arranged_weight(weight, kernel.shape),
        *map(arranged, operands),
        out=as_layout(out, form),
    )
    return out


def grad_data(
    grad_out: Tensor,
    weight: Tensor,
    image_size: Sequence[int],
    form: torch.memory_format,
    *geometry: Sequence[int],
) -> Tensor:
    """Compute the gradient of the image, in a memory format, which is the image's."""
    out = empty_image(grad_out, image_size, form)
    if grad_out.shape[0]:
        kernel, _ = _kernel(
            grad_out, form, out.shape, weight.shape, geometry, operation="grad_data"
        )
        kernel(
            as_layout(arranged(grad_out, form), form),
            _arranged_weight(weight, kernel.shape),
            out=as_layout(out, form),
        )
    return out


def grad_weight(
    image: Tensor, grad_out: Tensor, weight_size: Sequence[int], *geometry: Sequence[int]
) -> Tensor:
    """Compute the gradient of the weight, contiguous as torch's weights are."""
    form = memory_format(image)
    out = image.new_empty(weight_size)
    if not image.shape[0]:
        return out.zero_()
    kernel, _ = _kernel(image, form, image.shape, out.shape, geometry, operation="grad_weight")
    tensors = [as_layout(arranged(tensor, form), form) for tensor in (image, grad_out)]
    if form is torch.contiguous_format:
        kernel(*tensors, out=out.view(kernel.shape.weight_shape))
    else:
        spatial_weight(out).copy_(kernel(*tensors).flatten(2))
    return out


def _arranged_weight(weight: Tensor, shape: DepthwiseConv2dShape) -> Tensor:
    """Return a weight as the kernel for a shape has it."""
    if shape.layout == "NHWC":
        return packed_weight(weight, shape.weight_shape)
    weight = arranged(weight)
    return weight if weight.shape == shape.weight_shape else weight.view(shape.weight_shape)


def shape_of(
    image_size: Sequence[int],
    weight_size: Sequence[int],
    dtype: torch.dtype,
    form: torch.memory_format,
    *geometry: Sequence[int],
    operation: str = "forward",
) -> DepthwiseConv2dShape:
    """Describe a convolution by the sizes of its image and its weight.

    Raises
    ------
    ArgumentError, InvalidShapeError
        If there is no such convolution.
    """
    check(image_size, weight_size, dtype)
    batch, channels, height, width = image_size
    stride, padding, dilation = geometry
    return DepthwiseConv2dShape(
        batch=batch,
        in_channels=channels,
        height=height,
        width=width,
        kernel=(weight_size[2], weight_size[3]),
        stride=(stride[0], stride[1]),
        padding=(padding[0], padding[1], padding[2], padding[3]),
        dilation=(dilation[0], dilation[1]),
        channel_multiplier=weight_size[0] // channels,
        dtype=DTYPES[dtype],
        layout="NCHW" if form is torch.contiguous_format else "NHWC",
        operation=operation,
    )


def _kernel(
    like: Tensor,
    form: torch.memory_format,
    image_size: torch.Size,
    weight_size: torch.Size,
    geometry: Sequence[Sequence[int]],
    epilogue: str = "",
    operation: str = "forward",
) -> tuple[Kernel, tuple[int, ...]]:
    """Find the kernel for images and weights of these sizes, of `like`'s type and device."""
    found = (image_size, weight_size, like.dtype, like.device, form, *map(tuple, geometry))
    return _found(epilogue, operation, *found)


@cache
def _found(
    epilogue: str,
    operation: str,
    image_size: torch.Size,
    weight_size: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    form: torch.memory_format,
    *geometry: tuple[int, ...],
) -> tuple[Kernel, tuple[int, ...]]:
    """Return the kernel, and the size of the forward convolution's output."""
    shape = shape_of(image_size, weight_size, dtype, form, *geometry, operation=operation)
    kernel = _built(shape, Epilogue.of(epilogue), _target(device))
    return kernel, (shape.batch, shape.out_channels, shape.out_height, shape.out_width)


@cache
def _built(shape: DepthwiseConv2dShape, epilogue: Epilogue, target: Target) -> Kernel:
    """Build by a tuning record where there is one, else by hand; GPUs of a kind share it."""
    tuned = database.find(shape, target, epilogue) is not None
    return build(shape, "tuned" if tuned else "manual", epilogue=epilogue, target=target)


@cache
def _target(device: torch.device) -> Target:
    return resolve("cpu" if device.type == "cpu" else f"cuda:{device.index}")
