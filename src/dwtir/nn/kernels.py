"""From torch's tensors to a kernel: find it by what they are, build it once, and call it.

Images and weights are torch's. ``geometry`` is the stride, the padding (top, left, bottom,
right) and the dilation of the forward convolution.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .. import database, entry
from ..arguments import ALIGNMENT
from ..build import build
from ..epilogue import Epilogue
from ..errors import ArgumentError
from ..kernel import Kernel
from ..shape import DTYPES as NAMES
from ..shape import Shape
from ..target import Target, resolve
from .tensors import Tensor, arranged, empty_image, memory_format, packed_weight

_empty_like = torch.empty_like

DTYPES = {getattr(torch, name): name for name in NAMES}
"""The types that there are kernels for, and dwtir's names of them."""


def check(image_size: Sequence[int], weight_size: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse what no kernel is built for."""
    if len(image_size) != 4:
        raise ArgumentError(f"input must be (N, C, H, W), got {tuple(image_size)}")
    if not (channels := image_size[1]):
        raise ArgumentError(f"input must have channels, got {tuple(image_size)}")
    if len(weight_size) != 4 or weight_size[1] != 1 or weight_size[0] % channels:
        raise ArgumentError(
            f"weight must be (k * {channels}, 1, kh, kw) for an input of {channels} channels, got {tuple(weight_size)}"
        )
    if dtype not in DTYPES:
        raise ArgumentError(f"input must be {', '.join(DTYPES.values())}, got {dtype}")


def forward(
    image: Tensor, weight: Tensor, operands: Sequence[Tensor], epilogue: str, *geometry: Sequence[int]
) -> Tensor:
    """Compute the convolution with its epilogue, in the memory format of the image."""
    form = memory_format(image)
    if not image.shape[0]:
        one = shape_of((1, *image.shape[1:]), weight.shape, image.dtype, form, *geometry)
        return empty_image(image, (0, weight.shape[0], one.result_height, one.result_width), form)
    compute = prepared(image, form, image.shape, weight.shape, geometry, epilogue)
    return compute(arranged(image, form), _dense(weight, form), *map(arranged, operands))


def grad_data(
    grad_out: Tensor, weight: Tensor, image_size: Sequence[int], form: torch.memory_format, *geometry: Sequence[int]
) -> Tensor:
    """Compute the gradient of the image, in the image's memory format."""
    image_size = torch.Size(image_size)
    if not grad_out.shape[0]:
        return empty_image(grad_out, image_size, form)
    compute = prepared(grad_out, form, image_size, weight.shape, geometry, operation="grad_data")
    return compute(arranged(grad_out, form), _dense(weight, form))


def grad_weight(image: Tensor, grad_out: Tensor, weight_size: Sequence[int], *geometry: Sequence[int]) -> Tensor:
    """Compute the gradient of the weight, contiguous as torch's weights are."""
    if not image.shape[0]:
        return image.new_zeros(weight_size)
    form = memory_format(image)
    compute = prepared(image, form, image.shape, torch.Size(weight_size), geometry, operation="grad_weight")
    return compute(arranged(image, form), arranged(grad_out, form)).contiguous()


def _dense(weight: Tensor, form: torch.memory_format) -> Tensor:
    return arranged(weight) if form is torch.contiguous_format else weight


def shape_of(
    image_size: Sequence[int],
    weight_size: Sequence[int],
    dtype: torch.dtype,
    form: torch.memory_format,
    *geometry: Any,
    operation: str = "forward",
) -> Shape:
    """Describe a convolution by the sizes of its image and weight, or raise what is wrong."""
    check(image_size, weight_size, dtype)
    batch, channels, height, width = image_size
    stride, padding, dilation = geometry
    return Shape(
        batch=batch,
        in_channels=channels,
        height=height,
        width=width,
        kernel=(weight_size[2], weight_size[3]),
        stride=stride,
        padding=padding,
        dilation=dilation,
        channel_multiplier=weight_size[0] // channels,
        dtype=DTYPES[dtype],
        layout="NCHW" if form is torch.contiguous_format else "NHWC",
        operation=operation,
    )


def prepared(
    like: Tensor,
    form: torch.memory_format,
    image_size: torch.Size,
    weight_size: torch.Size,
    geometry: Sequence[Sequence[int]],
    epilogue: str = "",
    operation: str = "forward",
) -> Callable[..., Tensor]:
    """Return what computes an operation of tensors of `like`'s type and device.

    It takes an image, or the output's gradient, in the memory format, a weight and operands, all `arranged`, but any
    weight if channels are last. ``"grad_weight"`` takes an image and the gradient of the output, and gives the weight's
    as it lies in the format.
    """
    found = (image_size, weight_size, like.dtype, form, *map(tuple, geometry))
    return _prepared(like.device, epilogue, operation, *found)


@cache
def _prepared(device: torch.device, epilogue: str, operation: str, *found: Any) -> Callable[..., Tensor]:
    target = resolve("cpu" if device.type == "cpu" else f"cuda:{device.index}")
    kernel = _built(shape_of(*found, operation=operation), Epilogue.of(epilogue), target)
    launch, sizes = kernel.launcher(), entry.in_torch(kernel.shape)
    # Results are made of what has no memory, faster than of sizes and strides.
    like = torch.empty_strided(*sizes["out"], dtype=getattr(torch, kernel.shape.dtype), device=device)
    like.untyped_storage().resize_(0)
    packed = sizes["weight"][1] if kernel.shape.layout == "NHWC" and operation != "grad_weight" else None

    def compute(image: Tensor, other: Tensor, *operands: Tensor) -> Tensor:
        if packed and (other.stride() != packed or other.data_ptr() % ALIGNMENT):
            other = packed_weight(other)
        out = _empty_like(like)
        try:
            if operands:
                launch(image, other, *operands, out)
            else:
                launch(image, other, out)
        except Exception:
            _explain(kernel, image, other, *operands)
            raise
        return out

    return compute


def _explain(kernel: Kernel, image: Tensor, other: Tensor, *operands: Tensor) -> None:
    if kernel.shape.layout == "NHWC":
        image = image.permute(0, 2, 3, 1)
        if kernel.shape.operation == "grad_weight":
            other = other.permute(0, 2, 3, 1)
        else:
            other = other.permute(2, 3, 0, 1).reshape(kernel.shape.weight_shape)
    kernel.explain(image, other, *operands)


@cache
def _built(shape: Shape, epilogue: Epilogue, target: Target) -> Kernel:
    """Build by a tuning record, else by hand; GPUs of a kind share it."""
    tuned = database.find(shape, target, epilogue) is not None
    return build(shape, "tuned" if tuned else "manual", epilogue=epilogue, target=target)
