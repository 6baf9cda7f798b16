"""Tuning layers on the devices that are there: local workers, sessions, one after the other."""

import contextlib
import io
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import cuda
from ..epilogue import Epilogue, EpilogueLike
from ..errors import DwtirError, InvalidTargetError
from ..shape import Shape, ShapeLike
from ..target import Target, TargetLike, resolve
from .channels import PipeChannel
from .devices import Device
from .display import Display, PlainDisplay
from .fleet import Fleet
from .outcome import Outcome, Task
from .session import Settings, tune_task

WINDOW = 16
"""Candidates under way for each device: what is proposed later is proposed knowing more."""


def tune(
    shape: ShapeLike,
    *,
    epilogue: EpilogueLike = None,
    target: TargetLike = None,
    settings: Settings | None = None,
    folder: str | Path | None = None,
    display: Display | None = None,
) -> Outcome:
    """Search for the fastest strategy of one layer on the device that is here.

    Parameters
    ----------
    shape, epilogue, target
        As for `dwtir.build`; the target is CUDA or the CPU, and present.
    settings : Settings, optional
        How to search, and for how long.
    folder : path, optional
        Where to write the record; by default the first of `database.folders`.
    display : Display, optional
        What is told of each trial; nothing by default.

    Returns
    -------
    Outcome
        Times on a GPU are cold, as `dwtir.timing` says, or of what a third of the L2 cache
        holds the mean of cold and warm; on the CPU they are warm.

    Raises
    ------
    DwtirError
        If an argument is not valid, the device is not usable, or the manual schedule fails.
    """
    task = Task(Shape.of(shape), Epilogue.of(epilogue))
    device = present_target(target)
    shown = display or PlainDisplay(io.StringIO())
    home = None if folder is None else Path(folder)
    stop = threading.Event()
    with contextlib.closing(local_fleet(device, shown.note)) as fleet:
        return tune_task(task, device, fleet, settings or Settings(), folder=home, display=shown, stop=stop)


def tune_all(
    tasks: Sequence[Task],
    target: Target,
    fleet: Fleet,
    settings: Settings,
    *,
    folder: Path | None,
    display: Display,
    stop: threading.Event,
) -> tuple[list[Outcome], int]:
    """Tune layers one after the other; return what was found, and the number of failures."""
    outcomes: list[Outcome] = []
    failed = 0
    for index, task in enumerate(tasks, 1):
        if stop.is_set():
            break
        try:
            place = index, len(tasks)
            outcome = tune_task(task, target, fleet, settings, folder=folder, display=display, stop=stop, place=place)
        except DwtirError as error:
            failed += 1
            display.fail(task, error)
            if not fleet.devices:
                break
            continue
        outcomes.append(outcome)
        display.end(outcome)
    return outcomes, failed


def present_target(target: TargetLike) -> Target:
    """Resolve a target, which must be in this machine and have a clock."""
    device = resolve(target)
    require_clock(device)
    if device.kind == "cuda":
        cuda.load_runtime().require()
    present = resolve(device.kind)
    if present.name != device.name:
        raise InvalidTargetError(f"tuning needs {device.name}, and {present.name} is here")
    return device


def require_clock(device: Target) -> None:
    """Refuse what cannot be timed."""
    if device.kind == "opencl":
        raise InvalidTargetError("tuning needs a device with a clock: CUDA or the CPU, got OpenCL")


def local_fleet(target: Target, note: Callable[[str], object]) -> Fleet:
    """Make a fleet of one: a worker process on this machine's device."""
    name = "gpu 0" if target.kind == "cuda" else "cpu"
    return Fleet([Device(name, PipeChannel, builder_threads(1), note)], window=WINDOW)


def builder_threads(devices: int) -> int:
    """Share this machine's CPUs among the workers of some devices."""
    return max(1, len(os.sched_getaffinity(0)) // devices)
