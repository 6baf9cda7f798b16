"""Training of whole networks: steps with `dwtir.nn.DepthwiseConv2d` in them, and the losses."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from ..errors import ArgumentError, CompileError
from ..nn import replace
from ..nn.chain import is_depthwise
from ..nn.measure import captured
from ..reference import Array
from ..target import Target
from .contenders import Contender, convolutions
from .inference import FORMATS, timed
from .network_row import NUDGED, NetworkRow
from .networks import Network, seeded
from .rounds import in_short

PRECISIONS = {"float32": 5e-3, "bfloat16 autocast": 5e-2}
"""What is trained in, and what the first two losses may differ, as a part of them. The first sees the forward, the
second the gradients; later ones drift apart.
"""

_ROUNDING = 2.0**-23
_RATE, _MOMENTUM = 0.01, 0.9
_COMPILE = {"fallback_random": True}
"""Random numbers are eager PyTorch's, so that losses can be compared."""


def train(
    network: Network,
    target: Target,
    *,
    batch: int = 1,
    precision: str = "float32",
    layout: str = "NCHW",
    steps: int = 50,
    compiled: bool = True,
    rounds: int = 7,
    patience: float = 0.0,
) -> NetworkRow:
    """Train a network by PyTorch, and with our layers in it, on the same images.

    A step is forward, cross entropy, backward and SGD. All are trained from the same weights, and PyTorch also from
    weights nudged by a rounding; then steps are timed in turns.

    Parameters
    ----------
    network : Network
        Returns a value for each class.
    precision : str
        One of `PRECISIONS`.
    steps : int
        How many there are for the losses, at least 2.
    target, batch, layout, compiled, rounds, patience
        As for `infer`.

    Raises
    ------
    ArgumentError
        If there are too few steps, or the network cannot be trained so.
    CompileError
        If the first two losses are not near PyTorch's.
    """
    if steps < 2:
        raise ArgumentError(f"steps must be >= 2, got {steps}")
    form, device = FORMATS[layout], "cuda" if target.kind == "cuda" else "cpu"
    with seeded():
        images = torch.randn(batch, *network.image)
    images = images.to(device, memory_format=form)
    model = deepcopy(network.model).train().to(device, memory_format=form)
    own = deepcopy(model)
    replaced = replace(own)
    own.to(memory_format=form)
    nudged = deepcopy(model)
    with torch.no_grad():
        for parameter in nudged.parameters():
            parameter.mul_(1 + _ROUNDING)
    models = {"torch": model, "dwtir": own}
    if device == "cuda":
        models |= {"torch graph": deepcopy(model), "dwtir graph": deepcopy(own)}
    if compiled:
        torch.compiler.reset()
        for way, each in (("torch.compile", model), ("dwtir compile", own)):
            models[way] = torch.compile(deepcopy(each), options=_COMPILE)
    what = f"{network.name} in {precision}"
    trainers = {way: _Trainer(each, images, precision) for way, each in models.items()}
    try:
        losses = {"torch": trainers["torch"].curve(steps), NUDGED: _Trainer(nudged, images, precision).curve(steps)}
    except Exception as error:  # whatever the model's own code raises
        raise ArgumentError(f"cannot train {what} on {target.name}: {in_short(error)}") from error
    notes = _compare(what, trainers, losses, PRECISIONS[precision], graphs=device == "cuda")
    contenders = [Contender(way, each.call, each.result) for way, each in trainers.items() if way in losses]
    timings, load = timed(target, contenders, rounds, patience)
    return NetworkRow(
        *(network.name, "training", batch, precision, layout, timings, replaced),
        sum(map(is_depthwise, model.modules())),
        losses=losses,
        notes=tuple(notes),
        load=load,
    )


def _compare(
    what: str, trainers: "Mapping[str, _Trainer]", losses: dict[str, list[float]], allowed: float, *, graphs: bool
) -> list[str]:
    """Add the losses of the other ways, by graphs if wanted; return why others have none.

    Early losses of ours that are not near PyTorch's are an error.
    """
    expected = losses["torch"]
    notes, pool = [], None
    for way, trainer in trainers.items():
        if way == "torch":
            continue
        if graphs and way != "dwtir":
            try:
                pool = trainer.capture(pool)
            except Exception as error:  # what CUDA says to what no graph takes
                notes.append(f"{way} is not in a CUDA graph: {in_short(error)}")
                if way.endswith("graph"):
                    continue
        try:
            found = trainer.curve(len(expected))
            for number in range(2):
                if not abs(found[number] - expected[number]) <= allowed * abs(expected[number]):
                    raise CompileError(
                        f"the loss of step {number + 1} of {what} is {found[number]:.6g} "
                        f"by {way}, that of PyTorch {expected[number]:.6g}"
                    )
        except Exception as error:  # what torch.compile says to a model that it does not take
            if way == "dwtir" or (way.startswith("dwtir") and isinstance(error, CompileError)):
                raise
            notes.append(f"{way}: {in_short(error)}")
        else:
            losses[way] = found
    return notes


class _Trainer:
    def __init__(self, model: Any, images: Any, precision: str) -> None:
        self._model, self._images = model, images
        self._autocast, self._cached = precision != "float32", True
        self._optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=_MOMENTUM)
        self._labels = torch.arange(len(images), device=images.device)
        self._graph: Any = None
        self._loss: Any = None

    def call(self, _: int) -> None:
        (self._step if self._graph is None else self._graph.replay)()

    def _step(self) -> None:
        self._optimizer.zero_grad()  # to None, so that graphs do not add to them
        device = self._images.device.type
        with convolutions(torch, cudnn=True):
            with torch.autocast(device, torch.bfloat16, self._autocast, cache_enabled=self._cached):
                output = self._model(self._images)
            loss = torch.nn.functional.cross_entropy(output.float(), self._labels % output.shape[1])
            loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()

    def capture(self, pool: Any) -> Any:
        """Let a CUDA graph take the steps, from the same weights; return its pool."""
        before = deepcopy(self._model.state_dict())
        self._cached = False  # a graph has to cast weights anew
        try:
            self._graph = captured(self._step, pool)
        finally:
            self._model.load_state_dict(before)
            for state in self._optimizer.state.values():
                for momentum in state.values():
                    momentum.zero_()
        return self._graph.pool()

    def result(self) -> Array:
        return np.asarray(self._loss.cpu().numpy())

    def curve(self, steps: int) -> list[float]:
        losses = []
        with seeded():
            for _ in range(steps):
                self.call(0)
                losses.append(self._loss.clone())  # a graph writes to the same one again
        return [float(loss) for loss in losses]
