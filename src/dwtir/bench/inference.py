"""Inference of whole networks: eager and compiled, as they are and with dwtir's kernels."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from math import ceil
from typing import Any

import numpy as np
import torch
import torch._inductor.config as inductor

from ..errors import ArgumentError, CompileError
from ..kernel import Timing
from ..nn import convert
from ..nn.chain import is_depthwise
from ..nn.measure import captured, seconds
from ..reference import Array
from ..target import Target
from .contenders import Contender, convolutions
from .network_row import NetworkRow
from .networks import Network, seeded
from .rounds import in_short, in_turns
from .timers import Timer, open_timer

FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
"""The layouts of images, as torch names them."""

_ERROR = {"float32": 1e-4, "float16": 2.0**-6, "bfloat16": 2.0**-4}
"""Of the largest output; twice the error of eager PyTorch in the type is allowed in any case."""
_COMPILE = {"freezing": True}
"""Weights are constants to the compiler, which folds and packs them. An option of torch.compile would do nothing."""
_DEPTHWISE, _ALL = "depthwise convolutions", "all layers"
_PROFILED_CALLS = 5
_GPU_SECONDS = 20e-3


def infer(
    network: Network,
    target: Target,
    *,
    batch: int = 1,
    dtype: str = "float32",
    layout: str = "NCHW",
    when: str = "faster",
    compiled: bool = True,
    rounds: int = 7,
    patience: float = 0.0,
) -> NetworkRow:
    """Measure a network by PyTorch, and by PyTorch after `dwtir.nn.convert`.

    On a GPU, runs are replays of CUDA graphs where they can be captured.

    Parameters
    ----------
    target : Target
        The CPU, or the GPU that is torch's current device.
    batch, dtype, layout
        Of the images; weights have the same type and layout.
    when : {"faster", "always"}
        Which layers are converted, as for `dwtir.nn.convert`.
    compiled : bool
        Whether both are run by torch.compile too.
    rounds, patience
        As for `bench_layer`.

    Raises
    ------
    ArgumentError
        If the network cannot be run so, or does not return one tensor.
    CompileError
        If the converted network's output is wrong.
    """
    form, device = FORMATS[layout], "cuda" if target.kind == "cuda" else "cpu"
    with seeded():
        images = torch.randn(batch, *network.image)
    model = deepcopy(network.model).to(device)
    try:
        expected = _Run("float32", model, images.to(device)).result()
        model = model.to(getattr(torch, dtype), memory_format=form)
        images = images.to(device, getattr(torch, dtype), memory_format=form)
        eager = _Run("torch", model, images)
        eager_error = _error(eager.result(), expected)
    except Exception as error:  # whatever the model's own code raises
        raise ArgumentError(f"cannot run {network.name} in {dtype} on {target.name}: {in_short(error)}") from error
    converted = deepcopy(model)
    report = convert(converted, images, when=when, graphs=True)
    runs = [eager, _Run("dwtir", converted, images)]
    if compiled:
        torch.compiler.reset()
        for way, each in (("torch.compile", model), ("dwtir compile", converted)):
            runs.append(_Run(way, torch.compile(each), images))
    allowed = max(_ERROR[dtype], 2 * eager_error)
    with inductor.patch(_COMPILE):
        right, notes = _checked(network.name, runs, expected, allowed, graphs=target.kind == "cuda")
        contenders = [Contender(run.way, run.call, run.result) for run in right]
        timings, load = timed(target, contenders, rounds, patience)
    return NetworkRow(
        *(network.name, "inference", batch, dtype, layout, timings, len(report.replaced)),
        sum(map(is_depthwise, model.modules())),
        share=_depthwise_share(model, eager.once),
        notes=tuple(notes),
        load=load,
    )


class _Run:
    def __init__(self, way: str, model: Callable[[Any], Any], images: Any) -> None:
        self.way, self._model, self._images = way, model, images
        self.graph: Any = None
        self._out: Any = None

    def once(self) -> None:
        with convolutions(torch, cudnn=True), torch.inference_mode():
            self._out = self._model(self._images)

    def call(self, _: int) -> None:
        (self.once if self.graph is None else self.graph.replay)()

    def result(self) -> Array:
        self.call(0)
        if not isinstance(self._out, torch.Tensor):
            raise ArgumentError(f"the output must be a tensor, got {type(self._out).__name__}")
        return np.asarray(self._out.float().cpu().numpy())


def _checked(
    name: str, runs: Sequence[_Run], expected: Array, allowed: float, *, graphs: bool
) -> tuple[list[_Run], list[str]]:
    """Run each way, by a graph if wanted; return those that are right, and notes on the others.

    Wrong results of ours, and of eager PyTorch, are errors.
    """
    right, notes = [], []
    for run in runs:
        try:
            run.once()
        except Exception as error:  # what torch.compile says to a model that it does not take
            if "compile" not in run.way:
                raise
            notes.append(f"{run.way}: {in_short(error)}")
            continue
        if graphs:
            try:
                run.graph = captured(run.once)
            except Exception as error:  # what CUDA says to what no graph takes
                notes.append(f"{run.way} is not in a CUDA graph: {in_short(error)}")
        found = _error(run.result(), expected)
        reason = f"{run.way}: its error is {found:.1e}, {allowed:.1e} is allowed"
        if found <= allowed:
            right.append(run)
        elif run.way == "torch.compile":
            notes.append(reason)
        elif run.way == "torch":
            raise ArgumentError(f"{name} must be finite and the same in each run, got {reason}")
        else:
            raise CompileError(f"{name} by {reason}")
    return right, notes


def _error(output: Array, expected: Array) -> float:
    return float(np.abs(output - expected).max() / np.abs(expected).max())


def timed(
    target: Target, contenders: Sequence[Contender], rounds: int, patience: float
) -> tuple[dict[str, Timing], float]:
    """Time contenders that have run, in turns; return also what others used of CPUs."""
    if target.kind == "cuda":
        timer: Timer = _LaunchTimer(contenders)
    else:
        timer = open_timer(target, contenders, 1, patience)
    return in_turns(timer, contenders, rounds), timer.load


def _depthwise_share(model: Any, call: Callable[[], object]) -> float:
    """Profile calls of a model that has run before: the part of the time in depthwise convolutions.

    It is from 0 to 1, of the CPU's time, or of that in kernels on a GPU.
    """
    cuda = next(model.parameters()).is_cuda
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if cuda else [kinds.CPU]
    ranges: list[Any] = []

    def enter(*_: Any) -> None:
        ranges.append(torch.profiler.record_function(_DEPTHWISE))
        ranges[-1].__enter__()

    def leave(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for conv in filter(is_depthwise, model.modules()):
            hooks.enter_context(conv.register_forward_pre_hook(enter))
            hooks.enter_context(conv.register_forward_hook(leave))
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(_PROFILED_CALLS):
                with torch.profiler.record_function(_ALL):
                    call()
            if cuda:
                torch.cuda.synchronize()
    host = torch.autograd.DeviceType.CPU  # a GPU's events repeat the names
    spent = {
        name: sum(
            event.device_time_total if cuda else event.cpu_time_total
            for event in profile.events()
            if event.name == name and event.device_type == host
        )
        for name in (_DEPTHWISE, _ALL)
    }
    return float(spent[_DEPTHWISE] / spent[_ALL])


class _LaunchTimer(Timer):
    """Times calls on a GPU as Python launches them, without waiting.

    The contenders have run, and have one set each.
    """

    def __init__(self, contenders: Sequence[Contender]) -> None:
        self._counts = {}
        for contender in contenders:
            self._timed(contender, 1)
            self._counts[contender.name] = ceil(_GPU_SECONDS / self._timed(contender, 1))

    def seconds(self, contender: Contender) -> float:
        return self._timed(contender, self._counts[contender.name])

    def _timed(self, contender: Contender, count: int) -> float:
        return seconds(partial(contender.call, 0), count, torch.device("cuda"))
