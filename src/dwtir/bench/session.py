"""One run of the benchmark: its layers one after the other, kept in a file as they come."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import cuda
from ..errors import RecordError
from ..tables import aligned
from ..target import Target
from .articles import Case, Found, measure
from .layers import Layer
from .machine import Clocks, about, limits, with_rates
from .report import row_cells
from .results import Results
from .rounds import bench_layer
from .row import Row

_SAME = ("device", "CPU", "GPU", "cores", "dwtir", "apache-tvm", "torch", "command")
"""What must be alike for rows to stand in one table."""


@dataclass(frozen=True)
class Settings:
    """How layers are measured; see `bench_layer`."""

    schedule: str = "manual"
    cold: bool = True
    baselines: bool = True
    rounds: int = 7
    again: int = 0
    """How often layers whose times are doubtful are measured again."""
    patience: float = 0.0


@dataclass
class Session:
    """Measures layers on a device, and prints each to standard error."""

    target: Target
    settings: Settings
    command: str
    """What was asked for, for the results to say."""
    path: Path | None = None
    """Where results are written after every layer."""
    rows: dict[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.target.kind == "cuda":
            cuda.load_runtime().require()
        self._clocks = Clocks(self.target)
        self._rated = with_rates(self.target)
        self._sessions = 1

    def resume(self) -> None:
        """Take the rows of the file, if it is there, but for doubtful ones.

        It must have been measured on the same, in the same way.
        """
        if self.path is None or not self.path.exists():
            return
        before, now = Results.read(self.path), self.results()
        for name in _SAME:
            wanted, got = now.about.get(name), before.about.get(name)
            if got != wanted:
                raise RecordError(f"{self.path}: {name} must be {wanted!r} as it is now, got {got!r}")
        self._sessions += int(before.about.get("sessions", "1"))
        if self.target.kind == "cpu":  # what was measured then is a limit as well
            rates: dict[str, Any] = {
                name: max(getattr(self._rated, name) or 0.0, getattr(before.target, name) or 0.0)
                for name in ("bandwidth", "fp32_rate")
            }
            self._rated = replace(self._rated, **rates)
        self.rows = {str(row): row for row in before.rows if not row.doubtful}

    def measure(self, layers: Sequence[Layer]) -> None:
        """Measure the layers that have no row yet, and then the doubtful ones again."""
        for layer in layers:
            if str(layer.task) not in self.rows:
                self._measure(layer)
        for _ in range(self.settings.again):
            for layer in layers:
                if self.rows[str(layer.task)].doubtful:
                    self._measure(layer)
        self.rows = {str(layer.task): self.rows[str(layer.task)] for layer in layers}

    def _measure(self, layer: Layer) -> None:
        how = {name: value for name, value in vars(self.settings).items() if name != "again"}
        row = bench_layer(layer.task.shape, self.target, epilogue=layer.task.epilogue, **how)
        self._clocks.sample()
        row = replace(row, target=self._rated, networks=layer.networks)
        print(aligned(row_cells([row]))[-1], file=sys.stderr, flush=True)
        name = str(layer.task)
        self.rows[name] = min(self.rows.get(name, row), row, key=lambda row: row.doubt)
        if self.path is not None:
            self.results().write(self.path)

    def measure_articles(self) -> dict[Case, Found]:
        """Measure what the articles did; see `measure`."""
        found = measure(self.target, baselines=self.settings.baselines, rounds=self.settings.rounds)
        self._clocks.sample()
        return found

    def results(self) -> Results:
        facts = {**about(self.target), **self._clocks.about()}
        facts |= {"limits": limits(self._rated), "command": self.command, "sessions": str(self._sessions)}
        return Results(self._rated, facts, [replace(row, target=self._rated) for row in self.rows.values()])
