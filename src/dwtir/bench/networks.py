"""Whole networks to measure: timm's and torchvision's by name, or any module."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.optim.swa_utils import update_bn

from .. import suite
from ..errors import ArgumentError, InvalidShapeError, ToolchainError
from ..nn.chain import is_depthwise, require_module
from ..tune.tasks import LIBRARIES, build_model, has_model
from .rounds import in_short

_IMAGES = 4


@dataclass(frozen=True)
class Network:
    """A network that turns images into one tensor."""

    name: str
    model: Any
    """With float32 weights on the CPU, in evaluation mode; never changed."""
    image: tuple[int, int, int]
    """Channels, height and width."""

    @classmethod
    def of(cls, name: str, model: Any, image: tuple[int, int, int]) -> "Network":
        """Take a module as it was initialised, and make it fit to be compared.

        It is put in evaluation mode, with batch normalisations' statistics of some random images: with initial ones,
        values grow or vanish by layers.
        """
        require_module(model)
        if not any(map(is_depthwise, model.modules())):
            raise ArgumentError(f"{name} has no depthwise convolution")
        with seeded():
            update_bn([torch.randn(_IMAGES, *image)], model)
        return cls(name, model.eval(), image)


@contextmanager
def seeded() -> Iterator[None]:
    """Let torch draw the same random numbers each time, and then go on as before."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(0)
        yield


def find(name: str) -> Network:
    """Build a network without trained weights.

    Its name is ``timm/NAME``, ``torchvision/NAME`` or ``NAME``.
    """
    known = {full.rpartition("/")[2]: full for full in suite.networks()}
    library, _, short = known.get(name, name).rpartition("/")
    if library not in ("", *LIBRARIES):
        raise InvalidShapeError(f"a network is timm/NAME, torchvision/NAME or NAME of one of them, got {name!r}")
    missing = {}
    candidates = (library,) if library else LIBRARIES
    for candidate in candidates:
        try:
            module = import_module(candidate)
        except Exception as error:  # a library that does not fit torch has errors of its own
            missing[candidate] = in_short(error)
            continue
        if has_model(module, short):
            with seeded():
                model, (channels, height, width) = build_model(module, short)
            return Network.of(f"{candidate}/{short}", model, (channels, height, width))
    if missing:
        raise ToolchainError(
            f"the network {name} needs {' or '.join(missing)}: pip install {next(iter(missing))} "
            f"({'; '.join(missing.values())})"
        )
    raise InvalidShapeError(f"{' and '.join(candidates)} has no network {name!r}")
