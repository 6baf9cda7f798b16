"""Devices behind TVM's own RPC servers."""

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

from .. import cuda
from ..errors import DeviceError, InvalidTargetError, ToolchainError
from ..kernel import Kernel
from ..target import Target, TargetLike, resolve
from .channels import Lane, Message, RpcChannel
from .outcome import Task
from .testbed import Testbed, device_errors
from .worker import Worker

_FLUSHED_BYTES = 192 * 2**20
_OWN_SERVER = "run `python -m dwtir.tune.server` on the device's machine instead"


class StockChannel(RpcChannel):
    """A session with TVM's own RPC server: candidates are built here and sent there."""

    def __init__(self, lane: Lane, held: list[Any], longest: float, target: TargetLike) -> None:
        self.target = _target_built_here(target)
        super().__init__(lane, held, longest)
        held[1] = Worker(functools.partial(RemoteTestbed, session=held[0]))

    def _answer(self, message: Message, seconds: float) -> Any:
        answer = self._held[1].handle(message)
        if answer.get("fatal"):
            raise DeviceError(answer["error"])
        return answer


def _target_built_here(target: TargetLike) -> Target:
    if target is None:
        raise InvalidTargetError(
            f"the server is TVM's own, which cannot say what device it has; give --target, or {_OWN_SERVER}"
        )
    try:
        device = resolve(target)
        if device.kind == "cuda":
            cuda.load_runtime().require()
            if (here := resolve("cuda").arch) != device.arch:
                raise ToolchainError(f"the GPU that is here is {here}, not {device.arch}")
    except ToolchainError as error:
        raise ToolchainError(
            f"the server is TVM's own, for which machine code is made here: {error}; {_OWN_SERVER}"
        ) from error
    return device


_numbers = itertools.count()  # of all layers: a server keeps what has a name


class RemoteTestbed(Testbed):
    """Checks and times kernels on the device of a session with TVM's own RPC server.

    Before each measurement the caches of a GPU are flushed, and those of a CPU are not.
    """

    def __init__(self, task: Task, target: Target, session: Any) -> None:
        self._session = session
        self._device = session.cuda(0) if target.kind == "cuda" else session.cpu(0)
        self._loaded: tuple[Kernel, Any] | None = None
        with device_errors():
            super().__init__(task, target)

    def _prepare(self) -> None:
        import tvm

        self._nans = self._not_numbers()
        self._tensors = [tvm.runtime.tensor(array, self._device) for array in (*self._inputs, self._nans)]

    def _output(self, kernel: Kernel) -> Any:
        with device_errors():
            self._tensors[-1].copyfrom(self._nans)  # so that an output left out is seen
            self._load(kernel)["main"](*self._arguments(kernel))
            return self._tensors[-1].numpy()

    def _load(self, kernel: Kernel) -> Any:
        if self._loaded is None or self._loaded[0] is not kernel:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "kernel.so")
                kernel.export(path)
                code = bytearray(path.read_bytes())
            name = f"kernel-{next(_numbers)}.so"
            self._session.upload(code, name)
            self._loaded = kernel, self._session.load_module(name)
            self._session.remove(name)
        return self._loaded[1]

    def times(self, kernel: Kernel, limit: float | None = None) -> tuple[float, ...]:
        how = {"repeat": 5, "min_repeat_ms": 4}
        if self.target.kind == "cuda":
            how = {"repeat": 10, "cache_flush_bytes": _FLUSHED_BYTES}
        with device_errors():
            evaluator = self._load(kernel).time_evaluator("main", self._device, number=1, **how)
            return tuple(map(float, evaluator(*self._arguments(kernel)).results))

    def _arguments(self, kernel: Kernel) -> list[Any]:
        import tvm

        *inputs, out = self._tensors
        workspace = [tvm.runtime.empty(extents, dtype, self._device) for dtype, extents in kernel.info.workspace]
        return [*inputs, *workspace, out]
