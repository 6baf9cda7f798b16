"""Devices that measure candidates: how a worker is reached, watched, and replaced.

A candidate that was being measured when a worker died twice is given up; all others
go to the next worker.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError, DwtirError
from ..records import strategy_to_json
from ..schedules import Strategy
from ..target import Target
from ..traces import brief
from .channels import Answer, Channel, Message
from .outcome import Task

if TYPE_CHECKING:
    from .fleet import Fleet

_TASK_SECONDS = 300.0
_CANDIDATE_SECONDS = 120.0
_MAX_ATTEMPTS = 2
_MAX_DEATHS = 4


class DeviceLostError(DeviceError):
    """A device's workers die one after the other, or none can be started."""


class _StickyError(DeviceError):
    """A candidate left the worker unable to use its device."""


@dataclass
class Job:
    """A candidate on its way as trial `number`: `attempts` workers died over it.

    One that the search has `proposed` may be refused for the time that its build takes.
    """

    number: int
    strategy: Strategy
    proposed: bool = False
    attempts: int = 0


@dataclass(frozen=True)
class Result:
    """A candidate's times, or why it has none."""

    job: Job
    times: tuple[float, ...] = ()
    cause: str = ""
    error: str = ""
    device: str = ""


def _times(answer: Any) -> tuple[float, ...]:
    times = answer.get("times", ()) if isinstance(answer, dict) else None
    if not isinstance(times, list | tuple) or not all(isinstance(time, float) and time > 0 for time in times):
        raise DeviceError(f"the worker answered with the times {brief(times)}")
    return tuple(times)


class Device:
    """Measures candidates of one task after the other, by a worker with so many builder threads."""

    def __init__(
        self, name: str, connect: Callable[[], Channel], threads: int, note: Callable[[str], object] = lambda text: None
    ) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._connect, self._threads, self._note = connect, threads, note
        self._channel: Channel | None = None
        self._task: Task | None = None
        self._message: Message = {}
        self._deaths = 0

    def take_up(self, task: Task, target: Target) -> None:
        """Let the worker prepare for a layer; a `DwtirError` if its manual kernel fails."""
        layer = {"shape": str(task.shape), "epilogue": list(task.epilogue.steps), "target": asdict(target)}
        self._task, self._message = task, {"op": "task", **layer, "threads": self._threads}
        self._prepare()

    def _prepare(self) -> None:
        while True:
            try:
                if self._channel is None:
                    self._channel = self._connect()
                answer = self._call(self._message, _TASK_SECONDS)
                break
            except DeviceError as error:
                self._died(error)
        if answer.get("cause"):
            raise DwtirError(f"{self._task} on {self.name}: {answer['error']}")
        self.versions = dict(answer.get("versions") or {})

    def _call(self, message: Message, seconds: float) -> Answer:
        if self._channel is None:
            raise DeviceError("no worker")
        answer = self._channel.call(message, seconds)
        if not isinstance(answer, dict):
            raise DeviceError(f"the worker answered {brief(answer)}")
        if answer.get("fatal"):
            raise _StickyError(answer["error"])
        return answer

    def _died(self, error: DeviceError) -> None:
        self.close()
        self._deaths += 1
        self._note(f"{self.name}: {error}")
        if self._deaths >= _MAX_DEATHS:
            raise DeviceLostError(f"{self.name}: {self._deaths} workers failed in a row; the last: {error}") from error

    def measure(self, queue: "Fleet", limit: Callable[[], float | None], stop: Callable[[], bool]) -> Iterator[Result]:
        """Measure candidates as they are built; the limit is the best time so far, in seconds.

        If several workers die in a row, that is a `DeviceLostError`.
        """
        waiting: list[Job] = []
        while not stop():
            new: list[Job] = []
            while len(waiting) + len(new) <= self._threads and (job := queue.take()):
                new.append(job)
            waiting.extend(new)
            if not waiting:
                return
            place = 0  # the oldest one is the likeliest to have ended the builders
            try:
                if new:
                    jobs = [strategy_to_json(job.strategy) | {"proposed": job.proposed} for job in new]
                    self._call({"op": "submit", "jobs": jobs}, _CANDIDATE_SECONDS)
                place = self._first_built(len(waiting))
                answer = self._call({"op": "time", "place": place, "limit": limit()}, _CANDIDATE_SECONDS)
                times = _times(answer)
            except DeviceError as error:
                job = waiting[place]
                job.attempts = _MAX_ATTEMPTS if isinstance(error, _StickyError) else job.attempts + 1
                if job.attempts >= _MAX_ATTEMPTS:
                    del waiting[place]
                    yield Result(job, cause="device error", error=str(error), device=self.name)
                queue.give_back(waiting)
                self._died(error)
            else:
                self._deaths = 0
                job = waiting.pop(place)
                yield Result(job, times, answer.get("cause", ""), answer.get("error", ""), self.name)
                if not answer.get("stuck"):
                    continue
                queue.give_back(waiting)
                self.close()  # nothing else frees the builder
            waiting.clear()
            if not stop():
                self._prepare()
        if waiting:
            with contextlib.suppress(DeviceError):  # then the next task gets a fresh worker
                self._call({"op": "drop"}, _CANDIDATE_SECONDS)

    def _first_built(self, count: int) -> int:
        place = self._call({"op": "built"}, _CANDIDATE_SECONDS).get("place")
        if type(place) is not int or not 0 <= place < count:
            raise DeviceError(f"the worker answered with the place {place!r} of {count}")
        return place

    def final(self, strategies: Sequence[Strategy], rounds: int) -> list[tuple[float, ...]]:
        """Check strategies and measure them again, in turns; a wrong one has no times."""
        message = {"op": "final", "strategies": [*map(strategy_to_json, strategies)], "rounds": rounds}
        if self._channel is None:
            self._prepare()
        answer = self._call(message, _TASK_SECONDS)
        if answer.get("cause"):
            raise DeviceError(answer["error"])
        results = answer.get("results")
        if not isinstance(results, list) or len(results) != len(strategies):
            raise DeviceError(f"the worker answered with the results {brief(results)}")
        return [*map(_times, results)]

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
