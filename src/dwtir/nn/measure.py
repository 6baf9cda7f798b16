"""Times two ways to compute a layer in turns, as a network that calls them would see it."""

import time
from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from typing import TypeAlias

import torch

_Call: TypeAlias = Callable[[], object]

_ROUNDS = 5
_SECONDS = 5e-3
_SETTLE_SECONDS = 0.25
_MOST_CALLS = 1000
_GRAPH_CALLS = 10


def medians(calls: Sequence[_Call], device: torch.device, *, graphs: bool = False) -> list[float]:
    """Return the median seconds of a call for each of several functions.

    On a GPU calls follow each other without waiting, so a call takes what the slower of the
    device and Python takes; with `graphs` they are in a CUDA graph, without Python. On the
    CPU a function is called for a while before it is measured, until the threads of the
    other sleep: TVM's spin for 100 ms.
    """
    calls_at_once = 1
    with torch.no_grad():
        if graphs and device.type == "cuda":
            calls, calls_at_once = [_captured(call, device) for call in calls], _GRAPH_CALLS
        counts = [_count(call, device) for call in calls]
        times: list[list[float]] = [[] for _ in calls]
        for _ in range(_ROUNDS):
            for call, count, measured in zip(calls, counts, times, strict=True):
                if device.type == "cpu":
                    settled = time.perf_counter() + _SETTLE_SECONDS
                    while time.perf_counter() < settled:
                        call()
                measured.append(seconds(call, count, device) / calls_at_once)
    return [median(measured) for measured in times]


def _captured(call: _Call, device: torch.device) -> _Call:
    """Capture calls in a CUDA graph, and return what replays it."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what is built, loaded or chosen at a first call
                call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_GRAPH_CALLS):
                call()
    replay: _Call = graph.replay
    return replay


def _count(call: _Call, device: torch.device) -> int:
    """Return how many calls fill a measurement, after some that build kernels."""
    for _ in range(3):
        call()
    return min(ceil(_SECONDS / seconds(call, 3, device)), _MOST_CALLS)


def seconds(call: _Call, count: int, device: torch.device) -> float:
    """Return the seconds of each of so many calls, from an idle device to an idle one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / count
