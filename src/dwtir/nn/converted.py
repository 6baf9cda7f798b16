"""The forward of a layer that `convert` replaced: when it may run the kernel, and with what."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ..errors import ArgumentError, InvalidShapeError
from ..shape import Shape
from . import eager
from .chain import Chain
from .functional import autocast
from .kernels import shape_of
from .tensors import DEVICES, Tensor, memory_format, pack


class OriginalPathWarning(UserWarning):
    """A converted layer met what it was not converted for, and ran its original modules."""


def form_of(image: Tensor) -> tuple[Any, ...]:
    """Return what a layer is converted for: all of an image but its batch size and values."""
    last = memory_format(image) is torch.channels_last
    return (*image.shape[1:], str(image.dtype), str(autocast(image)), last, image.device.type)


class FoldedForward:
    """The forward of a module whose work the kernel before it does: nothing, but for training."""

    def __init__(self, chain: Chain, module: Any) -> None:
        self.chain, self.module = chain, module

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        (image,) = (*args, *kwargs.values())
        if self.chain.training:
            return type(self.module).forward(self.module, image)
        return image


class ConvertedForward:
    """What a converted convolution does instead of its class's forward."""

    def __init__(self, name: str, chain: Chain) -> None:
        self.name, self.chain = name, chain
        self.forms: set[tuple[Any, ...]] = set()
        """What it is converted for; see `form_of`."""
        self._warned = False
        self._derived = _Derived()
        self._known: dict[eager.Key, Callable[..., Tensor]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known": {}}

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the convolution and its followers; in training, the convolution alone."""
        (image,) = (*args, *kwargs.values())
        chain, conv, key = self.chain, self.chain.conv, None
        if chain.training:
            return type(conv).forward(conv, image)
        if not (torch.is_grad_enabled() or autocast(image)):
            weight, bias = conv.weight, conv.bias
            key = eager.key(image, weight, bias, conv.stride, conv.padding, conv.dilation)
            try:
                known = None if key is None else self._known.get(key)
            except TypeError:  # lists, say, are no part of a key
                key = known = None
            if known is not None:
                return known(image, self._weight(image), *self._operands(image.dtype))
        if not image.numel():
            return chain.original(image)
        reason = self._refusal(image)
        if reason is None and key is not None:
            like = image, conv.weight, chain.epilogue, *chain.geometry(image.shape[2:])
            try:
                self._known[key] = eager.prepared(key, *like)
            except InvalidShapeError as error:  # a batch too large to index
                reason = str(error)
        if reason is None:
            return self.run(image)
        if not torch.compiler.is_compiling() and not self._warned:
            self._warned = True
            warnings.warn(f"{self.name} runs its original modules: {reason}", OriginalPathWarning, stacklevel=4)
        return chain.original(image)

    def _refusal(self, image: Tensor) -> str | None:
        if not torch.compiler.is_compiling() and eager.is_transformed(image):
            return "vmap, or what differentiates forwards, is at work"
        tensors = (image, *self.chain.sources) if torch.is_grad_enabled() else ()
        if any(tensor.requires_grad for tensor in tensors):
            return "a gradient is wanted; torch.no_grad() says that it is not"
        if image.dim() != 4 or form_of(image) not in self.forms:
            form = memory_format(image) if image.dim() == 4 else "unbatched"
            return f"it is not converted for {tuple(image.shape)}, {image.dtype}, {form}, {image.device}"
        return None

    def shape(self, image: Tensor) -> Shape:
        """Describe the convolution of an image, if a kernel takes it."""
        conv, dtype = self.chain.conv, autocast(image) or image.dtype
        if image.device.type not in DEVICES:
            raise ArgumentError(f"input must be on cpu or cuda, got {image.device}")
        geometry = self.chain.geometry(image.shape[-2:])
        return shape_of(image.shape, conv.weight.shape, dtype, memory_format(image), *geometry)

    def run(self, image: Tensor) -> Tensor:
        chain, dtype = self.chain, autocast(image) or image.dtype
        image = image.to(dtype)
        geometry = chain.geometry(image.shape[2:])
        weight, operands = self._weight(image), self._operands(dtype)
        return eager.fused(image, weight, operands, chain.epilogue, *geometry)

    def _weight(self, image: Tensor) -> Tensor:
        weight = self.chain.conv.weight
        if weight.dtype == image.dtype and image.is_contiguous():
            return weight
        last = memory_format(image) is torch.channels_last

        def make() -> list[Tensor]:
            made = weight.to(image.dtype)
            return [pack(made) if last else made]

        return self._derived.get(("weight", image.dtype, last, weight.device), [weight], make)[0]

    def _operands(self, dtype: torch.dtype) -> list[Tensor]:
        chain = self.chain
        bias = chain.conv.bias
        if chain.norm is None and (bias is None or bias.dtype == dtype):
            return chain.operands(dtype)
        key = ("operands", dtype, chain.conv.weight.device, getattr(chain.norm, "eps", 0))
        return self._derived.get(key, chain.sources, lambda: chain.operands(dtype))


class _Derived:
    """Keeps what is computed from tensors, and computes it anew when one of them changed.

    Changes are seen by a tensor's version, which counts writes, and its address. New values are written over the old
    ones, so that a CUDA graph captured with them never reads freed memory. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Any, list[Tensor], list[Tensor]]] = {}

    def __reduce__(self) -> "tuple[type[_Derived], tuple[()]]":
        return _Derived, ()

    def get(self, key: Hashable, sources: Sequence[Tensor], make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what `make` computes from the sources: new tensors, the same sizes for a key.

        Nothing is kept where versions do not exist or tell nothing: of tensors of inference
        mode, and while a program is traced or a CUDA graph is captured.
        """
        if torch.compiler.is_compiling() or any(source.is_inference() for source in sources):
            return make()
        stamp = [(source.data_ptr(), source._version) for source in sources]
        found = self._found.get(key)
        if found is not None and found[0] == stamp:
            return found[1]
        if sources[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return make()
        with torch.inference_mode(False), torch.no_grad():
            held = [source.detach() for source in sources]  # for no others to have their addresses
            made = make()
            if found is not None:
                made = [old.copy_(new) for old, new in zip(found[1], made, strict=True)]
        if made[0].is_cuda:
            torch.cuda.current_stream(made[0].device).synchronize()  # others may use them at once
        self._found[key] = stamp, made, held
        return made
