"""How contenders are timed: on the CPU by the clock, on a GPU by CUDA graphs."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from math import ceil

from ..target import Target
from ..timing import GraphTimer
from .contenders import Contender
from .machine import LOUD, OtherLoad
from .problem import import_torch

_CPU_SECONDS = 5e-3
_SETTLE_SECONDS = 0.15
_WAIT_SECONDS = 0.3


class Timer(ABC):
    """Times a contender's calls on all sets in turn."""

    @abstractmethod
    def seconds(self, contender: Contender) -> float:
        """Return the seconds of one call."""

    @property
    def load(self) -> float:
        """CPUs that others kept busy meanwhile, if on the CPU."""
        return 0.0


def open_timer(target: Target, contenders: Sequence[Contender], sets: int, patience: float) -> Timer:
    """Make the timer of a device for contenders that have run."""
    return _CudaTimer(sets) if target.kind == "cuda" else _CpuTimer(contenders, sets, patience)


class _CpuTimer(Timer):
    def __init__(self, contenders: Sequence[Contender], sets: int, patience: float) -> None:
        self._sets, self._patience = sets, patience
        self._others = self._total = 0.0
        self._calls = {}
        for contender in contenders:
            for number in range(sets):
                contender.call(number)
            once = self._elapsed(contender, sets) / sets
            self._calls[contender.name] = sets * ceil(_CPU_SECONDS / once / sets)

    def seconds(self, contender: Contender) -> float:
        while True:
            others = OtherLoad()
            measured = self._settled(contender)
            used, elapsed = others.seconds()
            if used <= LOUD * elapsed or self._patience <= 0:
                break
            self._wait()
        self._others += used
        self._total += elapsed
        return measured

    def _wait(self) -> None:
        while self._patience > 0:
            others = OtherLoad()
            time.sleep(_WAIT_SECONDS)
            used, elapsed = others.seconds()
            self._patience -= elapsed
            if used <= LOUD * elapsed:
                break

    @property
    def load(self) -> float:
        return self._others / self._total if self._total else 0.0

    def _settled(self, contender: Contender) -> float:
        # Threads of the contender before still spin for a while, TVM's for 100 ms.
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


class _CudaTimer(Timer):
    def __init__(self, sets: int) -> None:
        self._sets = sets
        torch = import_torch()
        # What earlier layers left in PyTorch's cache could not be freed during a capture.
        torch.cuda.empty_cache()
        torch.cuda.synchronize()

    def seconds(self, contender: Contender) -> float:
        (seconds,) = _graph_timer().seconds(_follow(contender.call), self._sets, repeats=1)
        return seconds


_graph_timer = cache(GraphTimer)
"""Returns this process's: PyTorch caches memory for each stream apart."""


def _follow(call: Callable[[int], object]) -> Callable[[int], None]:
    import tvm
    import tvm_ffi

    torch = import_torch()
    gpu = tvm.cuda(0)

    def run(number: int) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(tvm_ffi.get_raw_stream(gpu))):
            call(number)

    return run
