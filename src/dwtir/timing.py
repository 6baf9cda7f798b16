"""Times of kernels on a GPU, cold: CUDA graphs of many calls, each on tensors of its own.

A graph leaves the host out of the measurement, and tensors that together are three
times the L2 cache make each call read and write memory, as between other layers of
a network.
"""

import gc
from collections.abc import Callable
from math import ceil
from typing import Any

from . import cuda
from .errors import DeviceError, ToolchainError

L2_SIZES = 3
_MAX_SETS = 768
_MAX_CALLS = 1024
_GRAPH_SECONDS = 1e-3


def rotation(set_bytes: int) -> int:
    """Return how many sets of tensors are three times the L2 cache; at least 2.

    Small tensors stop at 768 sets, which is then as many bytes as a network puts between two runs of such a layer.
    """
    return min(max(2, ceil(L2_SIZES * cuda.device_properties().l2_bytes / set_bytes)), _MAX_SETS)


class GraphTimer:
    """Measures calls on the first GPU.

    TVM's kernels and everything else that follows TVM's current stream are captured into the graph.
    """

    def __init__(self) -> None:
        cuda.load_runtime().require()
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise ToolchainError(f"{error}. To fix it: {cuda.INSTALL_CUDA}") from error
        import tvm

        self._api = runtime
        self._device = tvm.cuda(0)
        self._do("cudaSetDevice", 0)
        self._stream = self._do("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self._start, self._stop = self._do("cudaEventCreate"), self._do("cudaEventCreate")

    def _do(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._api, name)(*arguments)
        if status != self._api.cudaError_t.cudaSuccess:
            raise DeviceError(f"{name}: {status.name}")
        return results[0] if results else None

    def seconds(
        self, call: Callable[[int], object], sets: int, *, repeats: int = 6, limit: float | None = None
    ) -> tuple[float, ...]:
        """Measure the seconds of one call, on so many sets of tensors in turn.

        The call launches the kernel on the tensors of the set that it is given, on TVM's current stream. Each of the
        repeats is of a graph of about a millisecond. A call that at first takes more than three times the limit is not
        measured again. After a `DeviceError` the process cannot use the GPU any more.
        """
        import tvm_ffi

        with tvm_ffi.use_raw_stream(self._device, int(self._stream)):
            call(0)  # loads the code
            first = self._measure(lambda number: call(1 % sets), calls=1, repeats=1)[0]
            if limit is not None and first > 3 * limit:
                return (first,)
            rounds = ceil(_GRAPH_SECONDS / max(first, 1e-6) / sets)
            calls = max(min(rounds * sets, _MAX_CALLS), sets)
            return self._measure(lambda number: call(number % sets), calls, repeats)

    def _measure(self, call: Callable[[int], object], calls: int, repeats: int) -> tuple[float, ...]:
        """Capture calls between two events, and launch the graph once more than is measured."""
        graph = self._capture(call, calls)
        try:
            return tuple([self._launch(graph) / calls for _ in range(1 + repeats)][1:])
        finally:
            self._do("cudaGraphExecDestroy", graph)

    def _capture(self, call: Callable[[int], object], calls: int) -> Any:
        # The events are part of the graph: a host that is busy cannot come between.
        mode = self._api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        # A kernel that is collected meanwhile would unload its code, which ends a capture.
        collects = gc.isenabled()
        self._do("cudaStreamBeginCapture", self._stream, mode)
        gc.disable()
        try:
            self._record(self._start)
            for number in range(calls):
                call(number)
            self._record(self._stop)
        finally:
            graph = self._do("cudaStreamEndCapture", self._stream)
            if collects:
                gc.enable()
        try:
            return self._do("cudaGraphInstantiate", graph, 0)
        finally:
            self._do("cudaGraphDestroy", graph)

    def _record(self, event: Any) -> None:
        self._do("cudaEventRecordWithFlags", event, self._stream, self._api.cudaEventRecordExternal)

    def _launch(self, graph: Any) -> float:
        self._do("cudaGraphLaunch", graph, self._stream)
        self._do("cudaStreamSynchronize", self._stream)
        return float(self._do("cudaEventElapsedTime", self._start, self._stop)) * 1e-3
