"""Training of whole networks: steps with `dwtir.nn.DepthwiseConv2d` in them, and the losses."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError, CompileError
from ..nn import replace
from ..nn.chain import is_depthwise
from ..target import Target
from .contenders import Contender, convolutions
from .inference import FORMATS, timed
from .network_row import NUDGED, NetworkRow
from .networks import Network, seeded
from .rounds import in_short

__all__ = ["PRECISIONS", "train"]

PRECISIONS = {"float32": 5e-3, "bfloat16 autocast": 5e-2}
"""What is trained in, and what the first two losses may differ, as a part of them.

The first sees the forward, the second the gradients. Later ones drift apart by themselves.
"""

_ROUNDING = 2.0**-23

_RATE, _MOMENTUM = 0.01, 0.9


def train(
    network: Network,
    target: Target,
    *,
    batch: int = 1,
    precision: str = "float32",
    layout: str = "NCHW",
    steps: int = 50,
    rounds: int = 7,
    patience: float = 0.0,
) -> NetworkRow:
    """Train a network by PyTorch, and with our layers in it, on the same images.

    A step is forward, cross entropy, backward and SGD, by eager PyTorch. First both are
    trained from the same weights, for the losses, and then steps are timed in turns. How
    fast roundings grow in the network is seen by PyTorch's losses from weights nudged by one.

    Parameters
    ----------
    network : Network
        Returns a value for each class.
    target : Target
        The CPU, or the GPU that is torch's current device.
    batch, layout
        Of the images.
    precision : str
        One of `PRECISIONS`.
    steps : int
        How many there are for the losses, at least 2.
    rounds : int
        How often each way is measured, in turns.
    patience : float
        Seconds to wait for others to leave the CPU.

    Raises
    ------
    ArgumentError
        If there are too few steps, or the network cannot be trained so.
    CompileError
        If the first two losses are not near PyTorch's.
    """
    if steps < 2:
        raise ArgumentError(f"steps must be >= 2, got {steps}")
    device = "cuda" if target.kind == "cuda" else "cpu"
    with seeded():
        images = torch.randn(batch, *network.image)
    images = images.to(device, memory_format=FORMATS[layout])
    model = deepcopy(network.model).train().to(device, memory_format=FORMATS[layout])
    own = deepcopy(model)
    replaced = replace(own)
    own.to(memory_format=FORMATS[layout])
    nudged = deepcopy(model)
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter.mul_(1 + _ROUNDING)
    trainers = {
        "torch": _Trainer(model, images, precision),
        "dwtir": _Trainer(own, images, precision),
    }
    try:
        losses = {
            "torch": trainers["torch"].curve(steps),
            NUDGED: _Trainer(nudged, images, precision).curve(steps),
        }
    except Exception as error:  # whatever the model's own code raises
        raise ArgumentError(
            f"cannot train {network.name} in {precision} on {target.name}: {in_short(error)}"
        ) from error
    losses["dwtir"] = trainers["dwtir"].curve(steps)
    for number in range(2):
        expected, loss = losses["torch"][number], losses["dwtir"][number]
        if not abs(loss - expected) <= PRECISIONS[precision] * abs(expected):
            raise CompileError(
                f"the loss of step {number + 1} of {network.name} in {precision} is {loss:.6g}, "
                f"that of PyTorch {expected:.6g}"
            )
    contenders = [
        Contender(way, layout, trainer.call, trainer.result) for way, trainer in trainers.items()
    ]
    timings, load = timed(target, contenders, rounds, patience)
    return NetworkRow(
        network=network.name,
        run="training",
        batch=batch,
        dtype=precision,
        layout=layout,
        timings=timings,
        replaced=replaced,
        layers=sum(map(is_depthwise, model.modules())),
        losses=losses,
        load=load,
    )


class _Trainer:
    """A network, its optimizer, and the images that it learns by heart."""

    def __init__(self, model: Any, images: Any, precision: str) -> None:
        self._model, self._images = model, images
        self._autocast = precision != "float32"
        self._optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
        self._labels = torch.arange(len(images), device=images.device)
        self._loss: Any = None

    def call(self, _: int) -> None:
        """Take a step on the only set of images."""
        self._optimizer.zero_grad()
        device = self._images.device.type
        with convolutions(torch, cudnn=True):
            with torch.autocast(device, torch.bfloat16, enabled=self._autocast):
                output = self._model(self._images)
            labels = self._labels % output.shape[1]
            loss = torch.nn.functional.cross_entropy(output.float(), labels)
            loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()

    def result(self) -> np.ndarray[Any, Any]:
        """Return the last loss."""
        return np.asarray(self._loss.cpu().numpy())

    def curve(self, steps: int) -> list[float]:
        """Return the loss of each of some steps, with the same random numbers each time."""
        losses = []
        with seeded():
            for _ in range(steps):
                self.call(0)
                losses.append(self._loss)
        return [float(loss) for loss in losses]
