"""All trials of a task, one JSON line each, for later sessions to go on from.

The file lies beside the records, ``<folder>/.trials/<device>/<task>.jsonl``, and is input
from outside as they are: a line that is torn, foreign or of another version of dwtir or
TVM is passed over.
"""

import contextlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import files
from .._version import __version__
from ..errors import DwtirError
from ..records import strategy_from_json, strategy_to_json
from ..target import Target
from .outcome import Task, Trial

_MAX_BYTES = 64 * 2**20
_MAX_ERROR = 2000


class Journal:
    """The trials of one task on one device."""

    def __init__(self, folder: Path, task: Task, target: Target) -> None:
        self.path = folder / ".trials" / target.name / f"{task}.jsonl"
        self._task, self._target = task, target
        self._made_by = f"dwtir {__version__}, TVM {version('apache-tvm')}"

    def append(self, trial: Trial) -> None:
        line = {
            "made_by": self._made_by,
            **vars(trial),
            **strategy_to_json(trial.strategy),
            "error": trial.error[:_MAX_ERROR],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # One write at the end of the file: two sessions of one task do not tear each other's.
        with self.path.open("ab", buffering=0) as file:
            file.write(b"\n" + json.dumps(line).encode() + b"\n")

    def read(self) -> list[Trial]:
        """Return the trials of earlier sessions, in order, each strategy once."""
        return list({trial.strategy: trial for trial in self._lines()}.values())

    def _lines(self) -> Iterator[Trial]:
        if not self.path.is_file() or self.path.stat().st_size > _MAX_BYTES:
            return
        for line in self.path.read_bytes().split(b"\n"):
            with contextlib.suppress(DwtirError):
                trial = self._parse(files.parse_json(line)) if line else None
                if trial is not None:
                    yield trial

    def _parse(self, values: object) -> Trial | None:
        if not isinstance(values, dict) or values.get("made_by") != self._made_by:
            return None
        strategy = strategy_from_json(values)
        strategy.check_use(self._task.shape, self._target)
        number, times = values.get("number"), values.get("times")
        texts: list[Any] = [values.get(name) for name in ("cause", "error", "device")]
        if (
            type(number) is not int
            or not isinstance(times, list)
            or not all(type(seconds) is float and 0 < seconds < 1e6 for seconds in times)
            or not all(isinstance(text, str) for text in texts)
            or bool(times) == bool(texts[0])
        ):
            return None
        return Trial(number, strategy, tuple(times), *texts)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
