"""How a tuning session shows its progress: live, as plain lines, or as JSON lines."""

import importlib.util
import json
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..tables import aligned, number
from ..target import Target
from . import figures
from .figures import Running
from .outcome import Outcome, Task, Trial

if TYPE_CHECKING:
    from rich.console import RenderableType

_HEAD = ["task", "manual us", "best us", "gain", "% of floor", "trials", "failed", "seconds", "record"]


class Display(ABC):
    """Shows a session on a stream, by default standard output."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._running: Running | None = None

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.flush()

    def begin(self, task: Task, index: int, count: int, target: Target, trials: int | None, done: int) -> None:
        """Begin task `index`, from 1, of `count`.

        Of all `trials` that are wanted, None being no limit, earlier sessions did `done`.
        """
        self._running = Running(task, index, count, target, trials, done)
        self._begun(self._running)

    def trial(self, trial: Trial, best: Trial | None, manual: Trial | None) -> None:
        """Show a new trial of the task that was begun, with the best and the manual one so far."""
        assert self._running is not None, "a trial is of a task that was begun"
        self._tried(self._running, trial, improved=self._running.add(trial, best, manual))

    @abstractmethod
    def end(self, outcome: Outcome) -> None:
        """End a task."""

    @abstractmethod
    def fail(self, task: Task, error: Exception) -> None:
        """End a task that could not be tuned at all."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Say something about the session."""

    @abstractmethod
    def close(self, outcomes: Sequence[Outcome], extra: Mapping[str, str]) -> None:
        """Show the closing table, and more, such as ``{"log": path}``."""

    @abstractmethod
    def _begun(self, running: Running) -> None: ...

    @abstractmethod
    def _tried(self, running: Running, trial: Trial, *, improved: bool) -> None: ...


class JsonDisplay(Display):
    """Writes a JSON object a line; its ``event`` is the method of `Display` that was called."""

    def end(self, outcome: Outcome) -> None:
        self._write("end", figures.end_facts(outcome))

    def fail(self, task: Task, error: Exception) -> None:
        self._write("fail", figures.names(task), cause=type(error).__name__, error=str(error))

    def note(self, text: str) -> None:
        self._write("note", {"text": text})

    def close(self, outcomes: Sequence[Outcome], extra: Mapping[str, str]) -> None:
        self._write("close", extra, tasks=len(outcomes), gain=figures.mean_gain(outcomes))

    def _begun(self, running: Running) -> None:
        facts = figures.names(running.task, running.target) | {"index": running.index, "count": running.count}
        self._write("begin", facts, trials=running.wanted, done=running.done)

    def _tried(self, running: Running, trial: Trial, *, improved: bool) -> None:
        self._write(
            "trial",
            figures.names(running.task, running.target) | running.speed,
            number=trial.number,
            strategy=trial.strategy.name,
            parameters=trial.strategy.parameters,
            median_us=figures.microseconds(trial.seconds),
            cause=trial.cause,
            error=trial.error,
            worker=trial.device,
        )

    def _write(self, event: str, facts: Mapping[str, Any], **more: Any) -> None:
        print(json.dumps({"event": event, **facts, **more}), file=self._stream, flush=True)


class PlainDisplay(Display):
    """Writes a line when a task begins, at each new best, every few seconds, and at the end."""

    def __init__(self, stream: TextIO | None = None, *, every: float = 5.0) -> None:
        super().__init__(stream)
        self._every = every
        self._left = threading.Event()
        self._not_tuned: list[str] = []

    def __enter__(self) -> "PlainDisplay":
        threading.Thread(target=self._keep_talking, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        super().__exit__(*error)

    def end(self, outcome: Outcome) -> None:
        self._running = None
        task, manual, best, gain, share, trials, failed, seconds, path = figures.row(outcome)
        causes = f": {figures.causes(outcome.failures)}" if outcome.failures else ""
        self.note(
            f"{task}: best {best} us, manual {manual} us, gain {gain}, {share} % of floor, "
            f"{trials} trials ({failed} failed{causes}) in {seconds} s"
            f"{', interrupted' if outcome.interrupted else ''}, "
            f"{path} {'written' if outcome.written else 'kept: it is at least as good'}"
        )
        for line in figures.grid(outcome) if outcome.search == "grid" else []:
            self.note(line)

    def fail(self, task: Task, error: Exception) -> None:
        self._running = None
        self._not_tuned.append(str(task))
        self.note(f"{task}: {type(error).__name__}: {error}")

    def close(self, outcomes: Sequence[Outcome], extra: Mapping[str, str]) -> None:
        self._running = None
        if outcomes:
            self._table([figures.row(outcome) for outcome in outcomes])
        gain = figures.mean_gain(outcomes)
        facts = {
            "gain, geometric mean": "" if gain is None else number(gain, "x"),
            "failed trials": figures.causes(sum((found.failures for found in outcomes), Counter[str]())),
            "not tuned": ", ".join(self._not_tuned),
        }
        for name, text in (facts | dict(extra)).items():
            if text:
                self.note(f"{name}: {text}")

    def _begun(self, running: Running) -> None:
        self.note(f"{running.heading}: {running.task}, {running.texts[0]}")

    def _tried(self, running: Running, trial: Trial, *, improved: bool) -> None:
        if improved:
            self._talk(running)

    def _keep_talking(self) -> None:
        while not self._left.wait(self._every):
            if running := self._running:
                self._talk(running)

    def _talk(self, running: Running) -> None:
        self.note("  " + ", ".join(running.texts))

    def _table(self, rows: Sequence[Sequence[str]]) -> None:
        for line in aligned([_HEAD, *rows]):
            self.note(line)

    def note(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveDisplay(PlainDisplay):
    """Keeps a panel of the running task at the foot of a terminal; what ended scrolls above."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=self._stream, markup=False, emoji=False, highlight=False)
        self._live = Live(
            console=self._console, get_renderable=self._panel, transient=True, redirect_stderr=sys.stderr.isatty()
        )

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        super().__exit__(*error)

    def _begun(self, running: Running) -> None:
        """Leave it to the panel, which draws itself anew several times a second."""

    def _tried(self, running: Running, trial: Trial, *, improved: bool) -> None:
        """Leave it to the panel."""

    def _panel(self) -> "RenderableType":
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        running = self._running
        if running is None:
            return Text(end="")
        done, *texts = running.texts
        bar = ProgressBar(running.wanted, running.done, width=40, pulse=running.wanted is None)
        top, grid = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
        top.add_row(bar, done)
        for cells in (texts[:5], texts[5:]):
            grid.add_row(*cells)
        causes = Text(figures.causes(running.failures), "red")
        return Panel(Group(str(running.task), top, grid, causes), title=running.heading)

    def _table(self, rows: Sequence[Sequence[str]]) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        # Without the records, whose paths are as long as the lines of most terminals.
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("task", overflow="fold")
        for name in _HEAD[1:-1]:
            table.add_column("\n".join(name.rsplit(" ", 1)), justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row[:-1])
        self._live.refresh()
        self._console.print(table)
        for folder in sorted({str(Path(row[-1]).parent) for row in rows}):
            self.note(f"records: {folder}")

    def note(self, text: str) -> None:
        self._live.refresh()
        self._console.print(text, soft_wrap=True)


def open_display(*, json: bool, stream: TextIO | None = None) -> Display:
    """Choose a display: JSON if asked for, live on a terminal if rich is there, else plain."""
    stream = sys.stdout if stream is None else stream
    if json:
        return JsonDisplay(stream)
    live = stream.isatty() and importlib.util.find_spec("rich") is not None
    return LiveDisplay(stream) if live else PlainDisplay(stream)
