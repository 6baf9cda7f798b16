"""The process that owns a device: it builds candidates in threads, checks them and times them.

It answers messages, JSON objects with an ``op``, on standard input or from
`dwtir.tune.server`:

``device``
    Describe the device of ``kind``, by default the one that is here: a ``target``.
``task``
    Take up a layer: ``shape``, ``epilogue``, ``target``, builder ``threads``.
``submit``
    Begin to build the strategies in ``jobs``; a ``proposed`` one is refused if it takes long.
``built``
    Wait until one of them is built, or should have been long ago: its ``place`` among them.
``time``
    Time the one at ``place``; with ``limit``, the best time so far, check only what beats it.
``drop``
    Forget what was submitted.
``final``
    Check ``strategies`` and time them again, in turns.

An answer has what was asked for or ``cause`` and ``error``, ``fatal`` when the
process cannot use its device any more, and ``stuck`` when a builder does not end.
"""

import ctypes
import functools
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from typing import Any

from ..build import compile_kernel
from ..epilogue import Epilogue
from ..errors import CompileError, DeviceError, InvalidScheduleError
from ..kernel import Kernel
from ..records import strategy_from_json
from ..schedules import Strategy
from ..search_limits import Limit, SlowCompileError, SpillError, for_search
from ..shape import Shape
from ..target import Target, resolve
from . import testbed
from .channels import Answer, Message, answer_lines
from .outcome import Task
from .testbed import Testbed, WrongResultError, device_errors


class _StuckError(SlowCompileError):
    """A candidate is still being built when it should have been long ago."""


_CAUSES: tuple[tuple[type[Exception], str], ...] = (
    (SpillError, "spills"),
    (SlowCompileError, "too long to build"),
    (WrongResultError, "wrong result"),
    (InvalidScheduleError, "refused by the strategy"),
    (CompileError, "does not compile"),
    (DeviceError, "device error"),
)


_KEPT_RATIO = 1.2
"""Kernels nearly as fast as the best are kept for the final."""

_COMPILE_SECONDS = 10.0
"""After which NVRTC is stopped; what is worth a trial takes it a few seconds."""

_BUILD_SECONDS = 60.0
"""After which a build that nothing stops is given up, and its thread with it."""


class _Build:
    """A candidate that `threads` build in turn; one that is proposed may be given up."""

    def __init__(self, build: Callable[[], Kernel], threads: ThreadPoolExecutor, is_proposed: bool) -> None:
        self._build, self.is_proposed = build, is_proposed
        self._begun: float | None = None
        self._limit = Limit(_COMPILE_SECONDS)
        self.future: Future[Kernel] = threads.submit(self._run)

    def _run(self) -> Kernel:
        self._begun = time.monotonic()
        if not self.is_proposed:
            return self._build()
        with for_search(self._limit):
            return self._build()

    def give_up(self) -> None:
        """Do not begin with the kernel, or stop where that is possible."""
        self.future.cancel()
        self._limit.stop()

    def seconds_left(self) -> float | None:
        if not self.is_proposed:
            return None
        return max(0.0, (self._begun or time.monotonic()) + _BUILD_SECONDS - time.monotonic())


class Worker:
    """Owns the first device that the process sees; another testbed may have its elsewhere."""

    def __init__(self, open_testbed: Callable[[Task, Target], Testbed] = testbed.open_testbed) -> None:
        self._open_testbed = open_testbed
        self._is_here = open_testbed is testbed.open_testbed
        self._testbed: Testbed | None = None
        self._threads = ThreadPoolExecutor(1)
        self._building: list[_Build] = []
        self._kept: dict[Strategy, Kernel] = {}

    def handle(self, message: Message) -> Answer:
        operations = {
            "device": self._device,
            "task": self._task,
            "submit": self._submit,
            "built": self._built,
            "time": self._time,
            "drop": self._drop,
            "final": self._final,
        }
        try:
            return operations[message["op"]](message)
        except Exception as error:  # the process at the other end must hear of all
            return _failure(error)

    def _device(self, message: Message) -> Answer:
        return {"target": asdict(resolve(message.get("kind")))}

    def _task(self, message: Message) -> Answer:
        self._drop({})
        self._testbed = None  # frees the last layer's tensors first
        self._kept.clear()
        target = Target.from_json(message["target"])
        shape = Shape.parse(message["shape"])
        self._threads.shutdown()
        self._threads = ThreadPoolExecutor(message["threads"])
        if self._is_here and (present := resolve(target.kind)).name != target.name:
            raise DeviceError(f"this worker's device is {present.name}, not {target.name}")
        self._testbed = self._open_testbed(Task(shape, Epilogue.of(message["epilogue"])), target)
        return {"versions": _versions(target) if self._is_here else {}}

    def _bed(self) -> Testbed:
        if self._testbed is None:
            raise DeviceError("no layer was taken up")
        return self._testbed

    def _submit(self, message: Message) -> Answer:
        self._bed()
        for job in message["jobs"]:
            build = functools.partial(self._build, job)
            self._building.append(_Build(build, self._threads, job.get("proposed") is True))
        return {}

    def _build(self, job: Mapping[str, Any]) -> Kernel:
        bed = self._bed()
        return compile_kernel(bed.task.shape, bed.task.epilogue, bed.target, strategy_from_json(job))

    def _rebuild(self, job: Mapping[str, Any]) -> Kernel:
        kept = self._kept.get(strategy_from_json(job))
        return self._build(job) if kept is None else kept

    def _built(self, message: Message) -> Answer:
        """Wait for any kernel: a slow build does not keep the others.

        What was not proposed, as the strategy chosen by hand, comes before all others.
        """
        bed = self._bed()
        if not self._building:
            raise DeviceError("nothing was submitted")
        while True:
            first = self._building[0]
            waited = self._building if first.is_proposed else [first]
            running = [build for build in waited if not build.future.done()]
            ready = [build for build in running if build.seconds_left() == 0]
            if bed.target.kind != "cpu" or not running:  # builders would take it from what is timed
                ready += [build for build in waited if build not in running]
            if ready:
                return {"place": self._building.index(ready[0])}
            left = [seconds for build in running if (seconds := build.seconds_left()) is not None]
            wait([build.future for build in running], min(left, default=None), FIRST_COMPLETED)

    def _time(self, message: Message) -> Answer:
        bed, build = self._bed(), self._building.pop(message["place"])
        if not build.future.done():
            raise _StuckError(f"the candidate was not built in {_BUILD_SECONDS:g} s")
        kernel = build.future.result()
        limit = message.get("limit")
        with device_errors():
            times = bed.times(kernel, limit)
            middle = sorted(times)[len(times) // 2]
            if limit is None or middle < limit:
                bed.check(kernel)
        if limit is None or middle < _KEPT_RATIO * limit:
            self._kept[kernel.strategy] = kernel
        return {"times": times}

    def _drop(self, message: Message) -> Answer:
        for build in self._building:
            build.give_up()
        self._building.clear()
        return {}

    def _final(self, message: Message) -> Answer:
        bed = self._bed()
        kernels = list(self._threads.map(self._rebuild, message["strategies"]))
        results: list[Answer] = [{"times": []} for _ in kernels]
        for kernel, result in zip(kernels, results, strict=True):
            try:
                with device_errors():
                    bed.check(kernel)
            except WrongResultError as error:
                result.update(_failure(error))
        for _ in range(message["rounds"]):
            for kernel, result in zip(kernels, results, strict=True):
                if "cause" not in result:
                    with device_errors():
                        result["times"].extend(bed.times(kernel))
        return {"results": results}


def _failure(error: Exception) -> Answer:
    cause = next((name for kind, name in _CAUSES if isinstance(error, kind)), type(error).__name__)
    fatal, stuck = isinstance(error, DeviceError), isinstance(error, _StuckError)
    return {"cause": cause, "error": f"{type(error).__name__}: {error}", "fatal": fatal, "stuck": stuck}


def _versions(target: Target) -> dict[str, str]:
    if target.kind != "cuda":
        return {}
    from .. import cuda, nvrtc

    properties = cuda.device_properties()
    major, minor = nvrtc.nvrtc_version()
    driver = _driver_release() or f"for CUDA {properties.driver_version}"
    return {"gpu": properties.name, "driver": driver, "cuda": f"{major}.{minor}"}


def _driver_release() -> str | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(80)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
        return None
    library.nvmlShutdown()
    return text.value.decode()


def main() -> int:
    """Answer a message a line until standard input ends."""
    sys.setswitchinterval(5e-4)  # the thread that measures must not wait for those that build
    answer_lines(Worker().handle)
    return 0


if __name__ == "__main__":
    sys.exit(main())
