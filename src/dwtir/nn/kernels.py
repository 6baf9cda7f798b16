"""From torch's tensors to a kernel: find it by what they are, build it once, and call it.

Images and weights are torch's. ``geometry`` is the stride, the padding (top, left, bottom,
right) and the dilation of the forward convolution.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .. import database
from .. import shape as shapes
from ..build import build
from ..epilogue import Epilogue
from ..errors import ArgumentError
from ..kernel import Kernel
from ..shape import DepthwiseConv2dShape
from ..target import Target, resolve
from .tensors import Tensor, arranged, as_layout, empty_image, memory_format, output_size, packed_weight

DTYPES = {getattr(torch, name): name for name in shapes.DTYPES}
"""The types of tensors that there are kernels for, and dwtir's names of them."""


def check(image_size: Sequence[int], weight_size: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse what no kernel is built for."""
    if len(image_size) != 4:
        raise ArgumentError(f"input must be (N, C, H, W), got {tuple(image_size)}")
    channels = image_size[1]
    if not channels:
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
        rows, columns = output_size(image.shape[2:], weight.shape[2:], *geometry)
        return empty_image(image, (0, weight.shape[0], rows, columns), form)
    compute = prepared(image, form, image.shape, weight.shape, geometry, epilogue)
    return compute(arranged(image, form), _dense(weight, form), *map(arranged, operands))


def grad_data(
    grad_out: Tensor, weight: Tensor, image_size: Sequence[int], form: torch.memory_format, *geometry: Sequence[int]
) -> Tensor:
    """Compute the gradient of the image, in a memory format, which is the image's."""
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
    size = torch.Size(weight_size)
    compute = prepared(image, form, image.shape, size, geometry, operation="grad_weight")
    return compute(arranged(image, form), arranged(grad_out, form)).contiguous()


def _dense(weight: Tensor, form: torch.memory_format) -> Tensor:
    """Return a weight as `prepared` functions take it."""
    return arranged(weight) if form is torch.contiguous_format else weight


def shape_of(
    image_size: Sequence[int],
    weight_size: Sequence[int],
    dtype: torch.dtype,
    form: torch.memory_format,
    *geometry: Sequence[int],
    operation: str = "forward",
) -> DepthwiseConv2dShape:
    """Describe a convolution by the sizes of its image and its weight, or raise what is wrong."""
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

    It takes an image, or its gradient, and operands that are `arranged`, the image in the
    memory format, and a weight that is `arranged`, or any weight if channels are last.
    ``"grad_weight"`` takes an image and the gradient of the output, both in the format, and
    gives the weight's gradient as it lies for channels that are last, if they are.
    """
    found = (image_size, weight_size, like.dtype, like.device, form, *map(tuple, geometry))
    return _prepared(form, epilogue, operation, *found)


@cache
def _prepared(form: torch.memory_format, epilogue: str, operation: str, *found: Any) -> Callable[..., Tensor]:
    kernel = _kernel(epilogue, operation, *found)
    return (_weight_gradient if operation == "grad_weight" else _image)(kernel, form)


def _image(kernel: Kernel, form: torch.memory_format) -> Callable[..., Tensor]:
    """Return what computes an image, or its gradient."""
    launch, shape = kernel.launcher(), kernel.shape
    weight_shape = shape.weight_shape
    size = (shape.batch, shape.result_channels, shape.result_height, shape.result_width)
    strides = torch.empty(size, device="meta", memory_format=form).stride()

    def of_channels_last(image: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        out = image.new_empty_strided(size, strides)
        weight = packed_weight(weight, weight_shape)
        launch(as_layout(image, form), weight, *operands, as_layout(out, form))
        return out

    def of_several(image: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        return compute(image, weight.view(weight_shape), *operands)

    def compute(image: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        out = image.new_empty_strided(size, strides)
        launch(image, weight, *operands, out)
        return out

    if form is torch.channels_last:
        return of_channels_last
    return of_several if shape.channel_multiplier > 1 else compute


def _weight_gradient(kernel: Kernel, form: torch.memory_format) -> Callable[..., Tensor]:
    """Return what computes the gradient of the weight."""
    launch, shape = kernel.launcher(), kernel.shape
    spatial = (*shape.kernel, shape.out_channels, 1)

    def compute(image: Tensor, grad_out: Tensor) -> Tensor:
        out = image.new_empty(shape.weight_shape)
        launch(as_layout(image, form), as_layout(grad_out, form), out)
        if form is torch.channels_last:
            return out.view(spatial).permute(2, 3, 0, 1)
        return out.view(shape.out_channels, 1, *shape.kernel)

    return compute


@cache
def _kernel(
    epilogue: str,
    operation: str,
    image_size: torch.Size,
    weight_size: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    form: torch.memory_format,
    *geometry: tuple[int, ...],
) -> Kernel:
    shape = shape_of(image_size, weight_size, dtype, form, *geometry, operation=operation)
    return _built(shape, Epilogue.of(epilogue), _target(device))


@cache
def _built(shape: DepthwiseConv2dShape, epilogue: Epilogue, target: Target) -> Kernel:
    """Build by a tuning record where there is one, else by hand; GPUs of a kind share it."""
    tuned = database.find(shape, target, epilogue) is not None
    return build(shape, "tuned" if tuned else "manual", epilogue=epilogue, target=target)


@cache
def _target(device: torch.device) -> Target:
    return resolve("cpu" if device.type == "cpu" else f"cuda:{device.index}")
