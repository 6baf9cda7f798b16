"""The module `DepthwiseConv2d`, in the place of ``torch.nn.Conv2d``."""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError
from .functional import IntPair, PaddingArgument, depthwise_conv2d, pair, sides
from .tensors import Tensor, memory_format, pack


class DepthwiseConv2d(torch.nn.Conv2d):
    """A ``torch.nn.Conv2d`` with ``groups=in_channels`` that runs dwtir's kernels.

    Parameters, ``state_dict`` and initial values are those of ``torch.nn.Conv2d``; inputs,
    paddings and errors those of `dwtir.nn.functional.depthwise_conv2d`.
    ``to(memory_format=torch.channels_last)`` lays the weight out for channels-last images,
    which are then trained without a copy of it.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, dilation, bias, padding_mode, device, dtype
        As of ``torch.nn.Conv2d``; `out_channels` is a multiple of `in_channels`.
    padding : int, (int, int), (int, int, int, int) or str
        Besides torch's, four sides, and ``"SAME"``, which is TensorFlow's.
    groups : int, optional
        If given, `in_channels`.

    Examples
    --------
    >>> import torch, dwtir.nn
    >>> layer = dwtir.nn.DepthwiseConv2d(8, 16, 3, stride=2, padding="SAME")
    >>> layer(torch.zeros(1, 8, 15, 15)).shape
    torch.Size([1, 16, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntPair,
        stride: IntPair = 1,
        padding: PaddingArgument = 0,
        dilation: IntPair = 1,
        groups: int | None = None,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if groups not in (None, in_channels):
            raise ArgumentError(f"groups must be in_channels, {in_channels}, got {groups}")
        own: Any = None  # a padding that torch does not know
        if padding == "SAME" or (isinstance(padding, tuple | list) and len(padding) == 4):
            own, padding = padding if padding == "SAME" else tuple(padding), 0
        rest = in_channels, bias, padding_mode, device, dtype
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, *rest)
        if own is not None:
            self.padding = own

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DepthwiseConv2d":
        """Convert the parameters; a memory format lays out the weight for such images.

        To torch the weight, of one channel, lies either way. What is asked for shows in what
        becomes of images of both formats.
        """
        if "weight" not in self._parameters:  # it is computed, as by parametrizations
            return super()._apply(fn, recurse)  # type: ignore[no-any-return]
        forms = (torch.contiguous_format, torch.channels_last)
        images = [self.weight.new_empty(2, 2, 2, 2).contiguous(memory_format=f) for f in forms]
        super()._apply(fn, recurse)
        with torch.no_grad():
            found = {memory_format(fn(image)) for image in images}
        if len(found) == 1:
            weight = self.weight.data
            self.weight.data = pack(weight) if torch.channels_last in found else weight.contiguous()
        return self

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: A002
        return _convolved(
            input, weight, bias, self.stride, self.padding, self.dilation, self.in_channels, self.padding_mode
        )


@torch.fx.wrap  # type: ignore[untyped-decorator]
def _convolved(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntPair,
    padding: PaddingArgument,
    dilation: IntPair,
    channels: int,
    mode: str,
) -> Tensor:
    """Compute the convolution; ``torch.fx`` looks at no sizes here, as at none of ``torch.nn.Conv2d``."""
    if image.dim() > 2 and image.shape[-3] != channels:
        raise ArgumentError(f"input must have {channels} channels, got {tuple(image.shape)}")
    if mode != "zeros":
        kernel, pairs = weight.shape[-2:], (pair("stride", stride), pair("dilation", dilation))
        top, left, bottom, right = sides(padding, image.shape[-2:], kernel, *pairs)
        image, padding = torch.nn.functional.pad(image, (left, right, top, bottom), mode=mode), 0
    return depthwise_conv2d(image, weight, bias, stride, padding, dilation)
