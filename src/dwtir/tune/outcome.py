"""What a tuning session reports: its tasks, each trial, and what came of it."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..epilogue import NO_STEPS, Epilogue
from ..records import Record
from ..schedules import Strategy
from ..shape import Shape
from ..target import Target


@dataclass(frozen=True)
class Task:
    """A layer to tune, and how often its network runs it."""

    shape: Shape
    epilogue: Epilogue = NO_STEPS
    count: int = 1

    def __str__(self) -> str:
        return "+".join((str(self.shape), *self.epilogue.steps))


@dataclass(frozen=True)
class Trial:
    """One strategy that was tried."""

    number: int
    """From 0, the manual schedule, over all sessions of the task."""
    strategy: Strategy
    times: tuple[float, ...] = ()
    """Seconds of each measurement; empty if it failed."""
    cause: str = ""
    """Why it failed, in words that failures of a kind have in common; else empty."""
    error: str = ""
    """The full text of the failure."""
    device: str = ""
    """Which worker measured it, such as ``gpu 0``."""

    @property
    def seconds(self) -> float | None:
        """Median time; None if the trial failed."""
        return median(self.times) if self.times else None


@dataclass(frozen=True)
class Outcome:
    """What a session found for one task."""

    task: Task
    search: str
    record: Record
    """The best strategy, with the manual one's time beside its own."""
    path: Path
    written: bool
    """False if a record that was there already is at least as good."""
    trials: tuple[Trial, ...]
    """All in order, those of earlier sessions first."""
    new_trials: int
    """How many of them are of this session."""
    seconds: float
    """How long this session took."""
    interrupted: bool = False
    """Whether it was told to stop before it was done."""

    @property
    def failures(self) -> Counter[str]:
        """How many trials failed, by cause."""
        return Counter(trial.cause for trial in self.trials if trial.cause)


def floor_seconds(shape: Shape, target: Target, epilogue: Epilogue = NO_STEPS) -> float | None:
    """Return the least time the device could take, or None where its rates are not known.

    It is what the least bytes take at the bandwidth, or the operations at the float32 rate.
    """
    if target.bandwidth is None or target.fp32_rate is None:
        return None
    return max((shape.least_bytes + epilogue.least_bytes(shape)) / target.bandwidth, shape.flop / target.fp32_rate)
