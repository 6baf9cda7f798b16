"""Puts `DepthwiseConv2d` in the place of a network's depthwise convolutions, for training."""

from typing import Any

import torch

from .chain import is_depthwise, is_patched, require_module
from .module import DepthwiseConv2d


def replace(model: torch.nn.Module) -> int:
    """Let the depthwise convolutions of a network be `DepthwiseConv2d`, with their gradients.

    Parameters stay the same objects, which an optimizer may have already. Subclasses of
    ``torch.nn.Conv2d``, and those with hooks or a ``forward`` of their own, are left. For
    channels-last images, ``model.to(memory_format=torch.channels_last)`` then lays out the weights.

    Parameters
    ----------
    model : torch.nn.Module
        Is changed: the modules inside of it, not itself.

    Returns
    -------
    int
        How many were replaced.

    Raises
    ------
    ArgumentError
        If the model is no module.

    Examples
    --------
    >>> import torch, dwtir.nn
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.ReLU())
    >>> dwtir.nn.replace(model)
    1
    """
    require_module(model)
    replaced: dict[Any, DepthwiseConv2d] = {}
    for parent in list(model.modules()):
        for name, conv in parent.named_children():
            if type(conv) is torch.nn.Conv2d and is_depthwise(conv) and not is_patched(conv):
                if conv not in replaced:
                    replaced[conv] = _like(conv)
                setattr(parent, name, replaced[conv])
    return len(replaced)


def _like(conv: Any) -> DepthwiseConv2d:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
    same = {name: getattr(conv, name) for name in names}
    made = DepthwiseConv2d(**same, bias=conv.bias is not None, device="meta")
    made.weight, made.bias = conv.weight, conv.bias
    made.train(conv.training)
    return made
