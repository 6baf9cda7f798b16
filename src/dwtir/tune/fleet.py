"""Candidates spread over devices; what a lost device had goes to the others."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..errors import DwtirError
from ..schedules import Strategy
from ..target import Target
from .devices import Device, DeviceLostError, Job, Result
from .outcome import Task


class Fleet:
    """Some devices of one kind, which are closed with it, and a thread for each.

    There should be at least `window` candidates on their way.
    """

    def __init__(self, devices: Sequence[Device], window: int) -> None:
        self.devices, self.window = list(devices), window
        self.limit: float | None = None
        self.outstanding = 0
        self._jobs: deque[Job] = deque()
        self._results: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    @contextlib.contextmanager
    def working_on(self, task: Task, target: Target) -> Iterator[None]:
        """Let all devices prepare for a layer, and work on it inside the context.

        If none is left, that is a `DeviceLostError`, as for `result`.
        """
        self._take_up(task, target)
        self._stop.clear()
        self._results = queue.SimpleQueue()
        self.limit, self.outstanding = None, 0
        self._threads = [
            threading.Thread(target=self._work, args=(device,), name=device.name, daemon=True)
            for device in self.devices
        ]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._leave()

    def _take_up(self, task: Task, target: Target) -> None:
        with ThreadPoolExecutor(len(self.devices)) as threads:
            prepared = [(device, threads.submit(device.take_up, task, target)) for device in self.devices]
        for device, future in prepared:
            try:
                future.result()
            except DeviceLostError:
                self.devices.remove(device)
                if not self.devices:
                    raise

    def _leave(self) -> None:
        """End the threads, after what they are measuring right now."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []
        self._jobs.clear()  # with what a device that failed at the end gave back

    def _work(self, device: Device) -> None:
        while not self._stop.is_set():
            try:
                for result in device.measure(self, lambda: self.limit, self._stop.is_set):
                    self._results.put(result)
            except DeviceLostError as error:
                with self._changed:
                    self.devices.remove(device)
                    if not self.devices:
                        self._results.put(error)
                return
            except Exception as error:  # a thread's error is the session's
                self._results.put(error)
                return
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stop.is_set())

    def take(self) -> Job | None:
        """Return the next candidate, or None while there is none."""
        with self._changed:
            return self._jobs.popleft() if self._jobs else None

    def give_back(self, jobs: Sequence[Job]) -> None:
        """Put candidates that were taken first in the queue again."""
        with self._changed:
            self._jobs.extendleft(reversed(jobs))
            self._changed.notify_all()

    def submit(self, jobs: Sequence[Job]) -> None:
        with self._changed:
            self._jobs.extend(jobs)
            self.outstanding += len(jobs)
            self._changed.notify_all()

    def result(self, seconds: float) -> Result | None:
        """Wait for the next result; None if there is none in time."""
        try:
            found = self._results.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        self.outstanding -= 1
        return found

    def final(self, strategies: Sequence[Strategy], rounds: int) -> list[tuple[float, ...]]:
        """End the search and measure some strategies again, in turns, on one device."""
        self._leave()
        if not self.devices:
            raise DwtirError("no device is left")
        return self.devices[0].final(strategies, rounds)

    def close(self) -> None:
        self._leave()
        for device in self.devices:
            device.close()
