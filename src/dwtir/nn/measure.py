"""Times two ways to compute a layer in turns, as a network that calls them would see it."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil
from statistics import median
from typing import Any, TypeAlias

import torch

_Call: TypeAlias = Callable[[], object]

_ROUNDS = 5
_SECONDS = 5e-3
_SETTLE_SECONDS = 0.25
_MOST_CALLS = 1000
_GRAPH_CALLS = 10


def medians(calls: Sequence[_Call], device: torch.device, *, graphs: bool = False) -> list[float]:
    """Return the median seconds of a call for each of several functions.

    On a GPU calls follow each other without waiting, so a call takes what the slower of the device and Python takes;
    with `graphs` they are in a CUDA graph, without Python. On the CPU a function is called until the threads of the
    other sleep, which spin for 100 ms, and then measured.
    """
    calls_at_once = 1
    with torch.no_grad():
        if graphs and device.type == "cuda":
            with torch.cuda.device(device):
                calls = [captured(call, count=_GRAPH_CALLS).replay for call in calls]
            calls_at_once = _GRAPH_CALLS
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


def captured(run: _Call, pool: Any = None, *, count: int = 1) -> Any:
    """Return a CUDA graph of so many runs; those with the `pool` of another may not run at once."""
    stream, graph = _stream(torch.cuda.current_device()), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # what is built, loaded or chosen at first
            run()
        gc.collect()  # a kernel that is unloaded during a capture ends it
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            for _ in range(count):
                run()
    return graph


_stream = cache(torch.cuda.Stream)
"""Returns the stream of all captures on a device: only on one do they share memory."""


def _count(call: _Call, device: torch.device) -> int:
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
