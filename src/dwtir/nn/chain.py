"""A convolution with the modules that follow it, which one kernel with an epilogue computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..errors import ArgumentError
from .functional import pair, sides
from .module import DepthwiseConv2d
from .tensors import Tensor

_ACTIVATIONS = {getattr(torch.nn, name): name.lower() for name in ("ReLU", "ReLU6", "Hardswish", "SiLU", "GELU")}


def require_module(model: Any) -> None:
    """Refuse what is no module."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def is_depthwise(module: Any) -> bool:
    """Tell whether a module is a convolution with a group for each of several channels."""
    return isinstance(module, torch.nn.Conv2d) and module.groups == module.in_channels > 1


def is_patched(module: Any) -> bool:
    """Tell whether a module has a forward of its own, or hooks."""
    hooks = (getattr(module, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre"))
    return "forward" in module.__dict__ or any(hooks)


def why_not(conv: Any) -> str | None:
    """Say why a depthwise convolution computes what no kernel does; None if one does."""
    plain = (torch.nn.Conv2d._conv_forward, DepthwiseConv2d._conv_forward)
    if "forward" in conv.__dict__:
        return "it has a forward of its own"
    if not _pads_as_tensorflow(conv) and (
        type(conv).forward is not torch.nn.Conv2d.forward or type(conv)._conv_forward not in plain
    ):
        return f"its class {type(conv).__name__} computes something of its own"
    return None if conv.padding_mode == "zeros" else f"its padding is {conv.padding_mode}"


def _pads_as_tensorflow(conv: Any) -> bool:
    return type(conv).__name__ in ("Conv2dSame", "Conv2dSameExport")


def steps_of(module: Any) -> tuple[str, ...] | None:
    """Return the epilogue steps that a module is; None if it is none, or not always.

    These are batch normalisations that keep statistics, activations, and timm's
    ``BatchNormAct2d``, which is both.
    """
    kind = type(module)
    if kind in _ACTIVATIONS:
        return (_ACTIVATIONS[kind],) if getattr(module, "approximate", "none") == "none" else None
    if not isinstance(module, torch.nn.BatchNorm2d) or module.running_mean is None:
        return None
    if module.num_batches_tracked is None:  # nobody sees when the statistics are written
        return None
    if kind is torch.nn.BatchNorm2d:
        return ("scale_shift",)
    if kind.__name__ == "BatchNormAct2d" and isinstance(module.drop, torch.nn.Identity):
        inner = () if isinstance(module.act, torch.nn.Identity) else steps_of(module.act)
        return None if inner is None else ("scale_shift", *inner)
    return None


@dataclass(frozen=True)
class Chain:
    """The modules that one kernel computes, in their order."""

    conv: Any
    followers: tuple[Any, ...] = ()
    """A normalisation, an activation, or one after the other."""

    @cached_property
    def norm(self) -> Any:
        """The batch normalisation, or None."""
        first = self.followers[0] if self.followers else None
        return first if isinstance(first, torch.nn.BatchNorm2d) else None

    @cached_property
    def epilogue(self) -> str:
        """The steps behind the convolution, as `dwtir.Epilogue` reads them."""
        bias = ["bias"] if self.norm is None and self.conv.bias is not None else []
        return "+".join(bias + [step for f in self.followers for step in steps_of(f) or ()])

    @property
    def training(self) -> bool:
        return any(module.training for module in (self.conv, *self.followers))

    @property
    def sources(self) -> list[Tensor]:
        """The tensors that the result depends on, besides the image."""
        tensors = [self.conv.weight, self.conv.bias]
        if (norm := self.norm) is not None:
            # torch counts batches; that it writes the statistics, it does not note.
            tensors += [norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked]
        return [tensor for tensor in tensors if tensor is not None]

    def original(self, image: Tensor) -> Tensor:
        """Compute it by the modules' own classes."""
        for module in (self.conv, *self.followers):
            image = type(module).forward(module, image)
        return image

    def geometry(self, size: Sequence[int]) -> tuple[Any, Any, Any]:
        """Return stride, padding and dilation for an image of this size."""
        conv = self.conv
        padding = "SAME" if _pads_as_tensorflow(conv) else conv.padding
        stride, dilation = pair("stride", conv.stride), pair("dilation", conv.dilation)
        return stride, sides(padding, size, conv.kernel_size, stride, dilation), dilation

    def operands(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the tensors of the epilogue, in the order of its steps."""
        norm, bias = self.norm, self.conv.bias
        if norm is None:
            return [] if bias is None else [bias.to(dtype)]
        scale = torch.rsqrt(norm.running_var.float() + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight.float()
        mean = norm.running_mean.float()
        shift = -mean * scale if bias is None else (bias.float() - mean) * scale
        if norm.bias is not None:
            shift = shift + norm.bias.float()
        return [scale.to(dtype), shift.to(dtype)]
