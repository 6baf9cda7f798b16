"""What torch's tensors are to a kernel: their memory format, the size of a result, a packed weight.

An image is (N, C, H, W) in torch, whether it lies in memory contiguous, which is our NCHW,
or channels last, our NHWC. A result lies as its image.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from ..arguments import ALIGNMENT

Tensor: TypeAlias = torch.Tensor

DEVICES = ("cpu", "cuda")
"""The types of the devices that there are kernels for."""


def memory_format(image: Tensor) -> torch.memory_format:
    """Return how an image lies in memory: channels last where they are next to each other."""
    if not image.is_contiguous() and image.stride(1) == 1:
        return torch.channels_last
    return torch.contiguous_format


def arranged(tensor: Tensor, form: torch.memory_format = torch.contiguous_format) -> Tensor:
    """Return the tensor in a memory format and aligned; itself, if it is so already."""
    tensor = tensor.contiguous(memory_format=form)
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def empty_image(like: Tensor, size: Sequence[Any], form: torch.memory_format) -> Tensor:
    """Make an image (N, C, H, W) without values; the strides of all results come from here."""
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=form)


def output_size(
    size: Sequence[Any], kernel: Sequence[Any], stride: Sequence[int], padding: Sequence[Any], dilation: Sequence[int]
) -> tuple[Any, Any]:
    """Return the height and width of the output; sizes may be symbolic."""
    height, width = (
        (size[axis] + padding[axis] + padding[axis + 2] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1
        for axis in range(2)
    )
    return height, width


# The weight: torch's (C * M, 1, kh, kw) is what NCHW kernels take. Those for NHWC want
# (kh, kw, C, M) in memory: what `pack` makes, or a copy, kept while the weight does not change.


def pack(weight: Tensor) -> Tensor:
    """Lay a weight out as (kh, kw, C * M), with the sizes that it has."""
    return weight.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)


def packed_weight(weight: Tensor) -> Tensor:
    """Return a weight that is aligned and lies as (kh, kw, C * M), with the sizes that it has.

    One that does is taken as it is. Of others there is a copy for each stream until the weight's version changes. None
    is kept of a weight without a version, nor while a CUDA graph is captured: replays have to see what it is then.
    """
    stream = 0
    if weight.is_cuda:
        if _is_capturing():
            return _packed(weight)
        stream = _current_stream(weight.get_device())
    if weight.is_inference():
        return _packed(weight)
    stamp, number = (weight.data_ptr(), weight._version), id(weight)
    alive, kept = _kept.get(number, _NOBODY)
    if alive() is not weight:
        kept = {}
        _kept[number] = weakref.ref(weight, partial(_kept.pop, number)), kept
    found = kept.get(stream)
    if found is None or found[0] != stamp:
        own = weight.detach()  # held, for no other weight to have its address
        found = kept[stream] = stamp, _packed(own), own
    return found[1]


def _packed(weight: Tensor) -> Tensor:
    spatial = weight.permute(2, 3, 0, 1)
    if spatial.is_contiguous() and not weight.data_ptr() % ALIGNMENT:
        return weight
    return spatial.clone(memory_format=torch.contiguous_format).permute(2, 3, 0, 1)


def forget_packed(weight: Tensor) -> None:
    """Drop the copies of a weight that is about to change.

    A backward pass announces that; what optimisers write through ``.data`` has no version.
    """
    _kept.pop(id(weight), None)


_is_capturing = torch.cuda.is_current_stream_capturing
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_kept: dict[int, tuple[Callable[[], Any], dict[int, Any]]] = {}
_NOBODY: tuple[Callable[[], Any], dict[int, Any]] = (lambda: None), {}
