"""Checks contenders, and times them in turns, so that a drifting clock hits all alike."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from .. import spotcheck
from ..epilogue import Epilogue
from ..errors import CompileError
from ..kernel import Timing
from ..shape import DepthwiseConv2dShape
from ..target import Target
from .contenders import Contender, ours, peers
from .problem import Problem, import_torch
from .report import Row

__all__ = ["bench_layer"]

_GRAPH_SECONDS = 1e-3
_CPU_SECONDS = 5e-3
_SETTLE_SECONDS = 0.25
_MAX_CALLS = 1024
_PEER_ERROR = {"float32": 1e-5, "float16": 2.0**-7, "bfloat16": 2.0**-4}
"""Of the largest output: peers round after each step, and some sum in half precision."""


def bench_layer(
    shape: DepthwiseConv2dShape,
    target: Target,
    *,
    epilogue: Epilogue | None = None,
    schedule: str = "manual",
    cold: bool = True,
    baselines: bool = True,
    rounds: int = 7,
) -> Row:
    """Measure one layer by our kernel and by PyTorch's.

    Parameters
    ----------
    schedule : str
        Ours, as for `dwtir.build`.
    cold : bool
        Whether the inputs rotate through three times the last cache.
    baselines : bool
        Whether PyTorch is measured too.
    rounds : int
        How often each contender is measured, in turns.

    Returns
    -------
    Row

    Raises
    ------
    CompileError
        If our result is wrong.
    ToolchainError
        If torch is needed and not installed.
    """
    problem = Problem(shape, epilogue or Epilogue(), target, cold)
    contenders = [ours(problem, schedule), *(peers(problem) if baselines else ())]
    right, wrong = _checked(problem, contenders)
    timer = (_CudaTimer if target.kind == "cuda" else _CpuTimer)(right, problem.sets)
    times: dict[str, list[float]] = {contender.name: [] for contender in right}
    for _ in range(rounds):
        for contender in right:
            times[contender.name].append(timer.seconds(contender))
    timings = {}
    for name, measured in times.items():
        p20, median, p80 = np.quantile(measured, (0.2, 0.5, 0.8))
        timings[name] = Timing(float(median), float(p20), float(p80), rounds)
    layouts = {contender.name: contender.layout for contender in right}
    return Row(shape, problem.epilogue, target, cold, timings, layouts, tuple(wrong))


def _checked(
    problem: Problem, contenders: Sequence[Contender]
) -> tuple[list[Contender], list[str]]:
    """Run each once, ours first; leave out a peer that is wrong or cannot do it, and say so."""
    own, *others = contenders
    own.call(0)
    expected = own.result()
    ratio = spotcheck.error_ratio(problem.shape, problem.epilogue, problem.arrays, expected)
    if not ratio <= 1:
        raise CompileError(f"{problem.shape}: the error is {ratio:.1f} times what it may be")
    expected = expected.astype(np.float32)
    allowed = _PEER_ERROR[problem.shape.dtype] * float(np.abs(expected).max())
    right, wrong = [own], []
    for contender in others:
        try:
            contender.call(0)
            error = float(np.abs(contender.result() - expected).max())
        except Exception as failure:  # what a library says to a layer that it does not take
            wrong.append(f"{contender.name}: {type(failure).__name__}: {failure}")
            continue
        if error <= allowed:
            right.append(contender)
        else:
            wrong.append(f"{contender.name}: its error is {error:.1e}, {allowed:.1e} is allowed")
    return right, wrong


class _Timer(ABC):
    """Times a contender's calls on all sets in turn."""

    def __init__(self, contenders: Sequence[Contender], sets: int) -> None:
        self._sets = sets

    @abstractmethod
    def seconds(self, contender: Contender) -> float:
        """Return the seconds of one call."""


class _CpuTimer(_Timer):
    def __init__(self, contenders: Sequence[Contender], sets: int) -> None:
        super().__init__(contenders, sets)
        self._calls = {}
        for contender in contenders:
            for number in range(sets):
                contender.call(number)
            once = self._elapsed(contender, sets) / sets
            self._calls[contender.name] = sets * ceil(_CPU_SECONDS / once / sets)

    def seconds(self, contender: Contender) -> float:
        # The threads of the contender before spin for a while when it has ended, TVM's for 100 ms.
        settled = time.perf_counter() + _SETTLE_SECONDS
        while time.perf_counter() < settled:
            self._elapsed(contender, self._sets)
        calls = self._calls[contender.name]
        return self._elapsed(contender, calls) / calls

    def _elapsed(self, contender: Contender, calls: int) -> float:
        start = time.perf_counter()
        for number in range(calls):
            contender.call(number % self._sets)
        return time.perf_counter() - start


class _CudaTimer(_Timer):
    """By CUDA graphs of about a millisecond each."""

    def __init__(self, contenders: Sequence[Contender], sets: int) -> None:
        super().__init__(contenders, sets)
        self._torch = import_torch("a benchmark on a GPU")
        self._start, self._stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._graphs = {c.name: self._capture(c) for c in contenders}

    def _capture(self, contender: Contender) -> tuple[Any, int]:
        cuda = self._torch.cuda
        stream = cuda.Stream()
        with cuda.stream(stream):
            for number in range(min(self._sets, 3)):  # cuDNN's benchmark, and loading of code
                contender.call(number)
            self._start.record()
            contender.call(0)
            self._stop.record()
        stream.synchronize()
        once = self._start.elapsed_time(self._stop) * 1e-3
        rounds = ceil(_GRAPH_SECONDS / max(once, 1e-6) / self._sets)
        calls = max(min(rounds * self._sets, _MAX_CALLS), self._sets)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, stream=stream):
            for number in range(calls):
                contender.call(number % self._sets)
        graph.replay()
        return graph, calls

    def seconds(self, contender: Contender) -> float:
        graph, calls = self._graphs[contender.name]
        self._torch.cuda.synchronize()
        self._start.record()
        graph.replay()
        self._stop.record()
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) * 1e-3 / calls
