"""The convolution of tensors that are just that, past the Python part of torch's dispatcher.

The operators of `ops` serve whoever looks at what is computed: compilers, transformations,
modes. Where only autograd does, they cost several times the launch of a kernel, and so does
finding the kernel; so what a call comes to is kept for those that are alike.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..arguments import ALIGNMENT
from . import kernels, ops
from .tensors import Tensor, arranged, forget_packed

_KINDS = (torch.Tensor, torch.nn.Parameter)
_CONTIGUOUS, _CHANNELS_LAST = torch.contiguous_format, torch.channels_last
_is_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_function_mode = torch._C._is_torch_function_mode_enabled
_has_transforms = torch._C._are_functorch_transforms_active
_is_tracing = torch._C._is_tracing
_is_recording = torch.is_grad_enabled
_is_batched = torch._C._functorch.is_legacy_batchedtensor

Key: TypeAlias = tuple[Any, ...]


class Call:
    """The convolution of tensors that are alike, with gradients of any order.

    Parameters
    ----------
    compute : callable
        The convolution without its gradients.
    geometry : tuple
        Its stride, padding and dilation.
    form : torch.memory_format, optional
        How the image lies in memory, if the weight is fit for its kernels.
    """

    def __init__(
        self, compute: Callable[..., Tensor], geometry: tuple[Any, ...], form: torch.memory_format | None
    ) -> None:
        self.compute, self.geometry, self.form = compute, geometry, form
        self._recorded = _recorded(self)
        self._gradients: dict[str, Callable[..., Tensor]] = {}

    def run(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute it, of tensors with the `key` of this call."""
        compute = self.compute
        if _is_recording() and (
            weight.requires_grad or image.requires_grad or (bias is not None and bias.requires_grad)
        ):
            compute = self._recorded
        return compute(image, weight) if bias is None else compute(image, weight, bias)

    def gradients(
        self, image: Tensor, weight: Tensor, grad_out: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Compute wanted gradients that nobody differentiates again."""
        # Hooks of saved tensors may lay them out anew.
        image, given = arranged(image, self.form), arranged(grad_out, self.form)
        of_image = of_weight = None
        if wanted[0]:
            of_image = self._gradient("grad_data", image, weight)(given, weight)
        if wanted[1]:
            of_weight = self._gradient("grad_weight", image, weight)(image, given)
            if of_weight.stride() != weight.stride():
                of_weight = of_weight.contiguous()
        forget_packed(weight)
        return of_image, of_weight, grad_out.sum((0, 2, 3)) if any(wanted[2:]) else None

    def _gradient(self, operation: str, image: Tensor, weight: Tensor) -> Callable[..., Tensor]:
        found = self._gradients.get(operation)
        if found is None:
            like = image, self.form, image.shape, weight.shape, self.geometry
            found = self._gradients[operation] = kernels.prepared(*like, operation=operation)
        return found


calls: dict[Key, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {}
"""What runs calls that are known, by what `key` says of them."""


def key(image: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Key | None:
    """Return what a call comes to depends on, but the wish for gradients.

    None if it is for the operators: somebody but autograd looks at what is done, or the
    tensors are not of a CPU or a GPU, with memory of their own.
    """
    if _is_watched(image) or type(weight) not in _KINDS or weight.is_neg():
        return None
    if bias is not None and (type(bias) not in _KINDS or bias.is_neg()):
        return None
    try:
        address = image.data_ptr() | weight.data_ptr()
        if bias is not None:
            address |= bias.data_ptr()
    except RuntimeError:  # sparse, or of a batch
        return None
    form = None
    if not address % ALIGNMENT and (bias is None or bias.is_contiguous()):
        if image.is_contiguous():
            if weight.is_contiguous():
                form = _CONTIGUOUS
        elif image.is_contiguous(memory_format=_CHANNELS_LAST):
            form = _CHANNELS_LAST
    return image.shape, weight.shape, bias is None, form, image.dtype, image.device, geometry


def _is_watched(tensor: Tensor) -> bool:
    """Tell whether somebody looks at what is done with a tensor, or it is more than its memory."""
    return (
        _is_compiling()
        or type(tensor) not in _KINDS
        or _dispatch_modes() > 0
        or (_has_function_mode() and not _places_only())
        or _has_transforms()
        or forward_ad._current_level >= 0
        or _is_tracing()
        or tensor.is_neg()
    )


def is_transformed(tensor: Tensor) -> bool:
    """Tell whether vmap, or what differentiates forwards, is at work."""
    return bool(_has_transforms() or forward_ad._current_level >= 0 or _is_batched(tensor))


def _places_only() -> bool:
    return all(type(mode) is DeviceContext for mode in _get_current_function_mode_stack())


def prepared(found: Key, image: Tensor, weight: Tensor, epilogue: str, *geometry: Any) -> Callable[..., Tensor]:
    """Return what computes the convolution of tensors with a `key`, without its gradients."""

    def arrange_and_compute(image: Tensor, weight: Tensor, *operands: Tensor) -> Tensor:
        return kernels.forward(image, weight, operands, epilogue, *geometry)

    form = found[3]
    if form is None or not image.shape[0]:
        return arrange_and_compute
    return kernels.prepared(image, form, image.shape, weight.shape, geometry, epilogue)


def fused(image: Tensor, weight: Tensor, operands: Sequence[Tensor], epilogue: str, *geometry: Any) -> Tensor:
    """Compute ``ops.fused``, without a gradient."""
    keys = (key(image, weight, operand) for operand in operands or (None,))
    if torch.is_grad_enabled() or None in keys:
        return ops.fused(image, weight, operands, epilogue, *geometry)
    return kernels.forward(image, weight, operands, epilogue, *geometry)


def _recorded(call: Call) -> Callable[..., Tensor]:
    """Return a call as a function of autograd, of tensors alone, for speed.

    A gradient that is differentiated again is an operator.
    """
    compute = call.compute

    class Convolution(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, image: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            ctx.save_for_backward(image, weight)
            return compute(image, weight) if bias is None else compute(image, weight, bias)

        @staticmethod
        def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
            # Once: hooks, as of checkpoints, may refuse a second time.
            image, weight = ctx.saved_tensors
            if torch.is_grad_enabled() or _is_watched(grad_out) or _is_batched(grad_out):
                functions = ops.grad_data, ops.grad_weight
            elif call.form is None:
                functions = ops.data_gradient, kernels.grad_weight
            else:
                return call.gradients(image, weight, grad_out, ctx.needs_input_grad)
            ctx.geometry = call.geometry
            return ops.gradients(ctx, image, weight, grad_out, *functions)

    # Past its Python part, which looks for what has no `key`.
    apply: Callable[..., Tensor] = super(torch.autograd.Function, Convolution).apply
    return apply
