"""The figures that displays show: of a task that runs, and of one that ended."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

from ..schedules import SharedTile
from ..shape import Shape
from ..tables import number
from ..target import Target
from .outcome import Outcome, Task, Trial, floor_seconds


@dataclass
class Running:
    """What is known of the task that runs."""

    task: Task
    index: int
    count: int
    target: Target
    wanted: int | None
    done: int
    new: int = 0
    last: Trial | None = None
    best: Trial | None = None
    manual: Trial | None = None
    failures: Counter[str] = field(default_factory=Counter)
    started: float = field(default_factory=time.monotonic)

    def add(self, trial: Trial, best: Trial | None, manual: Trial | None) -> bool:
        """Take in a trial; tell whether there is a new best."""
        improved = best is not None and (self.best is None or best.number != self.best.number)
        self.last, self.best, self.manual = trial, best, manual
        self.done, self.new = self.done + 1, self.new + 1
        self.failures.update([trial.cause] if trial.cause else [])
        return improved

    @property
    def heading(self) -> str:
        return f"task {self.index} of {self.count} on {self.target.name}"

    @property
    def speed(self) -> dict[str, float | None]:
        """The best so far, beside the manual schedule, the traffic and the floor."""
        return _speed(self.task.shape, self.target, _seconds(self.best), _seconds(self.manual))

    @property
    def texts(self) -> list[str]:
        """Trials; the last time, the best, and what it is worth; failures, time and rate."""
        speed, elapsed = self.speed, time.monotonic() - self.started
        return [
            f"{self.done}{'' if self.wanted is None else f'/{self.wanted}'} trials",
            "now failed" if self.last and self.last.cause else f"now {number(_seconds(self.last), scale=1e6)} us",
            f"best {number(speed['best_us'])} us",
            f"{number(speed['gb_per_s'], digits=0)} GB/s",
            f"{number(speed['floor_share'], digits=0, scale=100)} % of floor",
            f"{number(speed['gain'], 'x')} manual",
            f"{self.failures.total()} failed",
            f"{elapsed:.1f} s",
            f"{self.new / max(elapsed, 1e-3):.1f} trials/s",
        ]


def _speed(shape: Shape, target: Target, best: float | None, manual: float | None) -> dict[str, float | None]:
    """Set the best time, in seconds, beside the manual one, the traffic and the floor."""
    floor = floor_seconds(shape, target)
    return {
        "best_us": microseconds(best),
        "manual_us": microseconds(manual),
        "gain": None if best is None or manual is None else manual / best,
        "gb_per_s": None if best is None else shape.least_bytes / best / 1e9,
        "floor_share": None if best is None or floor is None else floor / best,
    }


def names(task: Task, target: Target | None = None) -> dict[str, Any]:
    """Name a task, and its device."""
    names = {"shape": str(task.shape), "epilogue": str(task.epilogue)}
    return names if target is None else names | {"device": target.name}


def end_facts(outcome: Outcome) -> dict[str, Any]:
    """Return all about a task that ended."""
    record = outcome.record
    speed = _speed(record.shape, record.target, record.median_secs, record.manual_median_secs)
    return {
        **names(outcome.task, record.target),
        "strategy": record.strategy.name,
        "parameters": record.parameters,
        "median_us": speed.pop("best_us"),
        "p20_us": record.p20_secs * 1e6,
        "p80_us": record.p80_secs * 1e6,
        **speed,
        "trials": len(outcome.trials),
        "new_trials": outcome.new_trials,
        "failed": outcome.failures.total(),
        "failures": dict(outcome.failures),
        "seconds": outcome.seconds,
        "path": str(outcome.path),
        "written": outcome.written,
        "interrupted": outcome.interrupted,
    }


def row(outcome: Outcome) -> tuple[str, ...]:
    """Return the cells of the closing table."""
    facts = end_facts(outcome)
    return (
        str(outcome.task),
        *(number(facts[name]) for name in ("manual_us", "median_us")),
        number(facts["gain"], "x"),
        number(facts["floor_share"], digits=0, scale=100),
        *(str(facts[name]) for name in ("trials", "failed")),
        f"{outcome.seconds:.1f}",
        facts["path"],
    )


def grid(outcome: Outcome) -> list[str]:
    """Write the article's table: microseconds by threads in y (down) and x (across)."""
    times = {
        (trial.strategy.thread_y, trial.strategy.thread_x): trial.seconds
        for trial in outcome.trials
        if isinstance(trial.strategy, SharedTile)
    }
    across = sorted({x for _, x in times})
    lines = ["num_thread_y \\ x" + "".join(f"{x:10}" for x in across)]
    for y in sorted({y for y, _ in times}):
        cells = (number(times.get((y, x)), scale=1e6) for x in across)
        lines.append(f"{y:16}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def mean_gain(outcomes: Sequence[Outcome]) -> float | None:
    """Return the geometric mean of gains over manual schedules."""
    gains = [gain for outcome in outcomes if (gain := outcome.record.gain) is not None]
    return geometric_mean(gains) if gains else None


def causes(failures: Mapping[str, int]) -> str:
    """Count failures by cause, the most frequent first."""
    return ", ".join(f"{count} {cause}" for cause, count in Counter(failures).most_common())


def _seconds(trial: Trial | None) -> float | None:
    return None if trial is None else trial.seconds


def microseconds(seconds: float | None) -> float | None:
    """Turn seconds into microseconds."""
    return None if seconds is None else seconds * 1e6
