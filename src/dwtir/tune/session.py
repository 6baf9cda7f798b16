"""Tuning one layer: propose, measure, and record what is best, which is never slower than the manual schedule."""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from .. import database, schedules
from ..errors import DeviceError, DwtirError, InvalidScheduleError
from ..records import Record
from ..schedules import Strategy
from ..target import Target
from .devices import Job, Result
from .display import Display
from .fleet import Fleet
from .journal import Journal
from .outcome import Outcome, Task, Trial
from .search import open_search

_log = logging.getLogger(__name__)

_FINALISTS = 5
_FINAL_ROUNDS = 3
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Settings:
    """How to search; an `InvalidScheduleError` if a number is out of its range."""

    search: str = "evolutionary"
    """One of `dwtir.tune.search.SEARCHES`."""
    trials: int | None = 128
    """Strategies to measure, those of earlier sessions included."""
    budget: float | None = None
    """Seconds for each layer, from its first result on, after which nothing new is begun."""
    patience: int | None = None
    """Trials without a better one, after which nothing new is begun."""
    seed: int = 0
    """Makes the proposals repeatable."""
    resume: bool = True
    """Whether to go on from what earlier sessions measured."""

    def __post_init__(self) -> None:
        for name in ("trials", "patience"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidScheduleError(f"{name} must be at least 1, got {value}")
        if not -(2**63) <= self.seed < 2**63:
            raise InvalidScheduleError(f"seed must be of 64 bits, got {self.seed}")
        if self.budget is not None and not self.budget >= 0:
            raise InvalidScheduleError(f"budget must be at least 0 seconds, got {self.budget}")


def tune_task(
    task: Task,
    target: Target,
    fleet: Fleet,
    settings: Settings,
    *,
    folder: Path | None = None,
    display: Display,
    stop: threading.Event,
    place: tuple[int, int] = (1, 1),
) -> Outcome:
    """Search for the fastest strategy of one layer.

    The record goes to the folder, by default the first of `database.folders`. Once `stop` is set,
    the session ends and keeps what it has. `place` is which task this is, of how many.
    """
    start = time.monotonic()
    session = _Session(task, target, settings, folder or next(database.folders()), display)
    display.begin(task, *place, target, settings.trials, session.done)
    if session.record is not None and session.is_done():
        return session.outcome(session.record, False, time.monotonic() - start)
    with fleet.working_on(task, target):
        session.run(fleet, stop)
        record = session.conclude(fleet, stop)
    written = record.write(session.folder, force=not settings.resume)
    kept = record if written else session.record or record
    return replace(session.outcome(kept, written, time.monotonic() - start), interrupted=stop.is_set())


class _Session:
    def __init__(self, task: Task, target: Target, settings: Settings, folder: Path, display: Display) -> None:
        self.folder = folder
        self.record: Record | None = None
        self._task, self._target, self._settings = task, target, settings
        self._display = display
        self._manual = schedules.choose(task.shape, target, task.epilogue)
        self._search = open_search(settings.search, task, target, settings.seed)
        self._journal = Journal(folder, task, target)
        self._trials: list[Trial] = []
        self._begun: float | None = None
        if settings.resume:
            self._trials = self._journal.read()
            found = database.find_record(task.shape, target, task.epilogue, within=[folder])
            if found is not None and found[0].epilogue == task.epilogue:
                self.record = found[0]
        else:
            self._journal.clear()
        for trial in self._trials:
            self._search.tell(trial.strategy, trial.seconds)
        self.done = self._first = max(len(self._trials), self.record.trials if self.record else 0)
        self._last_gain = self.done

    def is_done(self) -> bool:
        settings = self._settings
        elapsed = 0.0 if self._begun is None else time.monotonic() - self._begun
        spent = (
            (settings.trials, self.done),
            (settings.budget, elapsed),
            (settings.patience, self.done - self._last_gain),
        )
        return any(limit is not None and used >= limit for limit, used in spent)

    def run(self, fleet: Fleet, stop: threading.Event) -> None:
        self._submit(fleet, self._first_candidates())
        exhausted = False
        while not stop.is_set():
            if self.is_done() and self._ranked():
                return  # what is still on its way is dropped
            if exhausted and not fleet.outstanding:
                return
            if not exhausted and fleet.outstanding < fleet.window:
                wanted, trials = fleet.window, self._settings.trials
                if trials is not None:
                    wanted = max(0, min(wanted, trials - self.done - fleet.outstanding))
                proposals = self._search.propose(wanted)
                exhausted = wanted > 0 and not proposals
                self._submit(fleet, proposals, proposed=True)
            # What is ready is taken before anything new is proposed.
            seconds = _POLL_SECONDS
            while (result := fleet.result(seconds)) is not None:
                self._take(result, fleet)
                seconds = 0.0

    def _first_candidates(self) -> list[Strategy]:
        first = [self._manual]
        if self.record is not None and self.record.strategy not in self._measured():
            first.append(self.record.strategy)
        for strategy in first:
            self._search.is_new(strategy)  # not any more
        return list(dict.fromkeys(first))

    def _measured(self) -> dict[Strategy, Trial]:
        return {trial.strategy: trial for trial in self._trials if trial.times}

    def _submit(self, fleet: Fleet, strategies: Iterable[Strategy], *, proposed: bool = False) -> None:
        number = self.done + fleet.outstanding
        fleet.submit([Job(number + i, strategy, proposed) for i, strategy in enumerate(strategies)])

    def _take(self, result: Result, fleet: Fleet) -> None:
        self._begun = self._begun or time.monotonic()
        strategy = result.job.strategy
        known = {trial.strategy: trial.number for trial in self._trials}
        # The manual strategy is measured in each session, and is a trial in the first.
        number = known.get(strategy, self.done)
        trial = Trial(number, strategy, result.times, result.cause, result.error, result.device)
        if trial.cause:
            _log.info("%s: %s: %s", self._task, strategy, trial.error)
        if trial.cause and strategy == self._manual:
            raise DwtirError(f"{self._task}: the manual schedule failed: {trial.error}")
        before = self._best()
        self._journal.append(trial)
        self._trials = [t for t in self._trials if t.strategy != strategy] + [trial]
        self._search.tell(strategy, trial.seconds)
        self.done += strategy not in known
        best = self._best()
        if best is not before:
            self._last_gain = self.done
        fleet.limit = best.seconds if best else None
        self._display.trial(trial, best, self._measured().get(self._manual))

    def _best(self) -> Trial | None:
        return next(iter(self._ranked()), None)

    def _ranked(self) -> list[Trial]:
        return sorted(self._measured().values(), key=lambda trial: trial.seconds or 0.0)

    def conclude(self, fleet: Fleet, stop: threading.Event) -> Record:
        """Measure the best and the manual strategy again, in turns; take the best."""
        ranked = self._ranked()
        if not ranked:
            raise DwtirError(f"{self._task}: stopped before anything was measured")
        times = {trial.strategy: trial.times for trial in ranked}
        if not stop.is_set():
            finalists = list(dict.fromkeys([*(trial.strategy for trial in ranked[:_FINALISTS]), self._manual]))
            try:
                again = zip(finalists, fleet.final(finalists, _FINAL_ROUNDS), strict=True)
                times = {strategy: measured for strategy, measured in again if measured}
                if not times:
                    raise DwtirError(f"{self._task}: none of the best passed its check again")
            except DeviceError as error:
                self._display.note(f"the best were not measured again: {error}")
        winner = min(times, key=lambda strategy: median(times[strategy]))
        manual = times.get(self._manual)
        return Record.measured(
            winner,
            self._task.shape,
            self._target,
            times[winner],
            epilogue=self._task.epilogue,
            manual_median_secs=median(manual) if manual else None,
            trials=self.done,
            seed=self._settings.seed,
            versions=fleet.devices[0].versions,
        )

    def outcome(self, record: Record, written: bool, seconds: float) -> Outcome:
        return Outcome(
            self._task,
            self._settings.search,
            record,
            record.path_in(self.folder),
            written,
            tuple(sorted(self._trials, key=lambda trial: trial.number)),
            self.done - self._first,
            seconds,
        )
