"""One example run of a model: which convolutions it runs on what, and who uses their outputs.

Hooks tell which module is at work, and a dispatch mode sees every operator with its tensors,
whether a module or a function called it. So a normalisation or an activation is known to be
the only user of an output, if that does not outlive the run.
"""

import gc
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from .functional import autocast
from .tensors import DEVICES, Tensor


@dataclass(frozen=True)
class Image:
    """What a convolution was called with, without its values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    autocast: torch.dtype | None
    """What autocast computes a convolution in, where it is on."""

    @classmethod
    def of(cls, image: Tensor) -> "Image":
        return cls(tuple(image.shape), image.stride(), image.dtype, image.device, autocast(image))

    def random(self) -> Tensor:
        """Make a tensor that fits the description, of normal values."""
        extent = 1 + sum((number - 1) * step for number, step in zip(self.size, self.stride, strict=True))
        return torch.randn(max(extent, 0), dtype=self.dtype, device=self.device).as_strided(self.size, self.stride)

    def context(self) -> Any:
        """Return autocast as it was."""
        if self.device.type not in DEVICES:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)


@dataclass
class Run:
    """A run of a module: its image, and who used its output; None is no watched module."""

    image: Image
    users: list[torch.nn.Module | None] = field(default_factory=list)


def observe(
    model: torch.nn.Module, example_input: Any, modules: list[torch.nn.Module]
) -> dict[torch.nn.Module, list[Run]]:
    """Run a model once, in evaluation mode and without gradients.

    An input that is a tuple is its positional arguments. No module to watch is inside another.
    Those that are run are returned in the order of their first runs.
    """
    observer = _Observer()
    arguments = example_input if isinstance(example_input, tuple) else (example_input,)
    with torch.no_grad(), observer, ExitStack() as restored:
        for module in model.modules():
            if module.training:
                restored.callback(setattr, module, "training", True)
        model.eval()
        for module in modules:
            restored.enter_context(module.register_forward_pre_hook(observer.enter, with_kwargs=True))
            restored.enter_context(module.register_forward_hook(observer.leave))
        output = model(*arguments)
    observer.note_survivors(output)
    return observer.runs


class _Observer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[torch.nn.Module, list[Run]] = {}
        self._running: torch.nn.Module | None = None
        self._watched: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and (users := self._watched.get(leaf)) is not None:
                users.append(self._running)
        return operator(*args, **kwargs)

    def note_survivors(self, output: Any) -> None:
        """Note that outputs which outlive the run are used, by the model's output or later."""
        gc.collect()
        for users in self._watched.values():
            users.append(None)

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self.runs.setdefault(module, []).append(Run(Image.of(next(iter((*args, *kwargs.values()))))))
        self._running = module

    def leave(self, module: torch.nn.Module, args: Any, output: Tensor) -> None:
        self._running = None
        # What works in place gives back the tensor it took: from here on it is its output.
        if isinstance(output, torch.Tensor):  # and no hook has changed it
            self._watched[output] = self.runs[module][-1].users
