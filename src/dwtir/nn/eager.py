"""The convolution of tensors that are just that, past the Python part of torch's dispatcher.

The operators of `ops` serve whoever looks at what is computed: compilers, transformations,
modes. Where nobody but autograd does, they cost several times what it takes to launch a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import kernels, ops
from .tensors import Tensor

__all__ = ["depthwise_conv2d", "fused"]

_KINDS = (torch.Tensor, torch.nn.Parameter)


def depthwise_conv2d(image: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Compute ``ops.depthwise_conv2d``, with gradients of any order."""
    tensors = (image, weight) if bias is None else (image, weight, bias)
    if not _are_plain(*tensors):
        return ops.depthwise_conv2d(image, weight, bias, *geometry)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return _Convolution.apply(image, weight, bias, *geometry)
    return ops.forward(image, weight, bias, *geometry)


def fused(
    image: Tensor, weight: Tensor, operands: Sequence[Tensor], epilogue: str, *geometry: Any
) -> Tensor:
    """Compute ``ops.fused``, which has no gradient."""
    wants_gradient = torch.is_grad_enabled()
    if wants_gradient or not _are_plain(image, weight, *operands):
        return ops.fused(image, weight, operands, epilogue, *geometry)
    return kernels.forward(image, weight, operands, epilogue, *geometry)


def _are_plain(*tensors: Tensor) -> bool:
    """Tell whether nobody looks at what is done with tensors of a CPU or a GPU but autograd."""
    for tensor in tensors:
        if type(tensor) not in _KINDS or not (tensor.is_cuda or tensor.is_cpu):
            return False
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
        or torch._C._is_tracing()
        or any(tensor.is_sparse for tensor in tensors)
    )


class _Convolution(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """The convolution to autograd. A gradient that is differentiated again is an operator."""

    @staticmethod
    def forward(
        ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any
    ) -> Tensor:
        ctx.save_for_backward(image, weight)
        ctx.geometry = geometry
        return ops.forward(image, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled() or not _are_plain(grad_out, *ctx.saved_tensors):
            return ops.gradients(ctx, grad_out, ops.grad_data, ops.grad_weight)
        return ops.gradients(ctx, grad_out, ops.data_gradient, ops.weight_gradient)
