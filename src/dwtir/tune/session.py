"""Tuning one layer: propose, build, check, time, and write down what is best.

Trial 0 is the manual schedule, so that what is recorded is never slower. Kernels
are built in threads, for NVRTC works without the GIL, and timed one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import cuda, database, schedules
from ..build import compile_kernel
from ..epilogue import Epilogue, EpilogueLike
from ..errors import DwtirError, InvalidScheduleError, InvalidTargetError
from ..kernel import Kernel
from ..records import Record
from ..reference import numpy_dtype
from ..schedules import Strategy
from ..shape import DepthwiseConv2dShape, ShapeLike
from ..target import Target, TargetLike, resolve
from .search import SEARCHES

__all__ = ["Outcome", "Trial", "tune"]

_BATCH = 16
_FINALISTS = 5


@dataclass(frozen=True)
class Trial:
    """One strategy that was tried: its median time in seconds, or why it has none."""

    number: int
    strategy: Strategy
    seconds: float | None
    error: str = ""


@dataclass(frozen=True)
class Outcome:
    """What a session found.

    Parameters
    ----------
    record : Record
        The best strategy, with the manual one's time beside its own.
    path : Path
        Where the record lies.
    written : bool
        False if a record that was there already is at least as good.
    trials : tuple of Trial
        Everything that was tried, in order.
    seconds : float
        How long it took.
    """

    record: Record
    path: Path
    written: bool
    trials: tuple[Trial, ...]
    seconds: float


def tune(
    shape: ShapeLike,
    *,
    epilogue: EpilogueLike = None,
    target: TargetLike = None,
    search: str = "random",
    trials: int = 64,
    budget: float | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    report: Callable[[Trial, Trial], object] = lambda trial, best: None,
) -> Outcome:
    """Search for the fastest strategy of one layer on the device that is here.

    Parameters
    ----------
    shape, epilogue, target
        As for `dwtir.build`; the target is CUDA or the CPU, and present.
    search : {"random", "grid"}
        See `dwtir.tune.search`.
    trials : int
        How many strategies to try, the manual one included.
    budget : float, optional
        Seconds after which no further batch is begun.
    seed : int
        Makes the proposals repeatable.
    folder : path, optional
        Where to write the record; the user's own folder by default.
    report : callable
        Called after each trial with it and the best so far.

    Returns
    -------
    Outcome
        Its times are of data that stays in the caches, as `Kernel.time` measures.

    Raises
    ------
    DwtirError
        If an argument is not valid, the device is not usable, or the manual
        schedule itself fails.
    """
    start = time.monotonic()
    layer, steps, device = DepthwiseConv2dShape.of(shape), Epilogue.of(epilogue), resolve(target)
    if device.kind == "opencl":
        raise InvalidTargetError("tuning needs a device with a clock: CUDA or the CPU, got OpenCL")
    if device.kind == "cuda":
        cuda.load_runtime().require()
    if search not in SEARCHES:
        raise InvalidScheduleError(f"search must be one of {', '.join(SEARCHES)}, got {search!r}")
    if trials < 1:
        raise InvalidScheduleError(f"trials must be at least 1, got {trials}")

    proposals = SEARCHES[search](layer, device, seed)
    session = _Session(layer, steps, device, report)
    manual = schedules.choose(layer, device)
    proposals.is_new(manual)
    session.run([manual])
    while len(session.trials) < trials:
        if budget is not None and time.monotonic() - start > budget:
            break
        batch = proposals.propose(min(_BATCH, trials - len(session.trials)))
        if not batch:
            break
        session.run(batch)

    strategy, times, manual_times = session.final()
    record = Record.measured(
        strategy,
        layer,
        device,
        times,
        epilogue=steps,
        manual_median_secs=float(np.median(manual_times)),
        trials=len(session.trials),
        seed=seed,
    )
    home = Path(folder) if folder is not None else database.user_folder()
    written = record.write(home)
    return Outcome(
        record, record.path_in(home), written, tuple(session.trials), time.monotonic() - start
    )


class _Session:
    """Builds and measures; keeps the data, the manual kernel's output, and the best."""

    def __init__(
        self,
        shape: DepthwiseConv2dShape,
        epilogue: Epilogue,
        target: Target,
        report: Callable[[Trial, Trial], object],
    ) -> None:
        self.trials: list[Trial] = []
        self._what = (shape, epilogue, target)
        self._report = report
        self._arguments = _integers(shape, epilogue, target)
        self._expected: np.ndarray[Any, Any] | None = None
        self._kernels: dict[Strategy, Kernel] = {}

    def run(self, batch: Sequence[Strategy]) -> None:
        """Build a batch in threads, then check and time its kernels one by one."""
        with ThreadPoolExecutor() as threads:
            for strategy, built in zip(batch, threads.map(self._build, batch), strict=True):
                trial = self._try(strategy, built)
                self.trials.append(trial)
                self._report(trial, self._best()[0])
        kept = {trial.strategy for trial in (self.trials[0], *self._best()[:_FINALISTS])}
        self._kernels = {strategy: self._kernels[strategy] for strategy in kept}

    def _build(self, strategy: Strategy) -> Kernel | DwtirError:
        try:
            return compile_kernel(*self._what, strategy)
        except DwtirError as error:
            return error

    def _try(self, strategy: Strategy, built: Kernel | DwtirError) -> Trial:
        number = len(self.trials)
        if isinstance(built, DwtirError):
            if number == 0:
                raise built
            return Trial(number, strategy, None, f"{type(built).__name__}: {built}")
        seconds = built.time(*self._arguments, repeats=5).median
        best = self._best()
        if (not best or seconds < (best[0].seconds or 0.0)) and not self._is_right(built):
            return Trial(number, strategy, None, "wrong result")
        self._kernels[strategy] = built
        return Trial(number, strategy, seconds)

    def _is_right(self, kernel: Kernel) -> bool:
        """Compare with the manual kernel: on small integers every sum is exact, in any order."""
        out = _host(kernel(*self._arguments))
        if self._expected is None:
            self._expected = out
        return np.array_equal(out, self._expected)

    def _best(self) -> list[Trial]:
        timed = [trial for trial in self.trials if trial.seconds is not None]
        return sorted(timed, key=lambda trial: trial.seconds or 0.0)

    def final(self) -> tuple[Strategy, list[float], list[float]]:
        """Time the best five and the manual kernel again, in turns; return the winner."""
        manual = self.trials[0].strategy
        finalists = [trial.strategy for trial in self._best()[:_FINALISTS]]
        times: dict[Strategy, list[float]] = {
            strategy: []
            for strategy in (*finalists, manual)
            if self._is_right(self._kernels[strategy])
        }
        for _ in range(5):
            for strategy, measured in times.items():
                measured.append(self._kernels[strategy].time(*self._arguments, repeats=5).median)
        winner = min(times, key=lambda strategy: float(np.median(times[strategy])))
        return winner, times[winner], times[manual]


def _integers(shape: DepthwiseConv2dShape, epilogue: Epilogue, target: Target) -> list[Any]:
    """Make small-integer tensors on the device, in the order of the kernel's parameters."""
    import tvm

    dtype = numpy_dtype(shape.dtype)
    values = np.random.default_rng(0).integers(-2, 3, 1_000_003).astype(dtype)
    extents = (shape.data_shape, shape.weight_shape, *epilogue.operands(shape).values())
    arrays = [np.resize(values, extent) for extent in extents]
    if target.kind == "cpu":
        return arrays
    return [_on_gpu(array, tvm.cuda(0)) for array in arrays]


def _on_gpu(array: np.ndarray[Any, Any], device: Any) -> Any:
    import tvm

    if array.dtype.name != "bfloat16":
        return tvm.runtime.tensor(array, device)
    tensor = tvm.runtime.empty(array.shape, "bfloat16", device)
    tensor._create_view(array.shape, "uint16").copyfrom(array.view(np.uint16))
    return tensor


def _host(out: Any) -> np.ndarray[Any, Any]:
    """Bring an output to the host, bfloat16 as its bits."""
    if isinstance(out, np.ndarray):
        return out
    if str(out.dtype) == "bfloat16":
        out = out._create_view(out.shape, "uint16")
    array: np.ndarray[Any, Any] = out.numpy()
    return array
