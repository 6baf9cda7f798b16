"""A picture of a tuning session: how the best time of each task fell, trial by trial."""

import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ToolchainError
from .outcome import Outcome, floor_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 4
_PANELS = 24
_LOG_ABOVE = 4.0


def require_matplotlib() -> None:
    """Check that plots can be drawn, before the work whose plot is wanted."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolchainError("plots need matplotlib; pip install 'dwtir[bench]'")


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw a panel for each task: the best time so far, the manual schedule's, and the floor.

    Of more than 24 tasks there are those with the largest gain. The file is a PNG, whatever its
    name; its folder is made.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    shown, title = list(outcomes), "best time so far"
    if len(shown) > _PANELS:
        shown = sorted(shown, key=lambda outcome: -(outcome.record.gain or 0.0))[:_PANELS]
        title += f", the {_PANELS} of {len(outcomes)} tasks with the largest gain"
    columns = max(1, min(_COLUMNS, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows + 0.5), dpi=100, layout="constrained")
    figure.suptitle(title, wrap=True)
    for number, outcome in enumerate(shown, 1):
        _draw(figure.add_subplot(rows, columns, number), outcome)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw(axes: "Axes", outcome: Outcome) -> None:
    record = outcome.record
    timed = [(trial.number, trial.seconds) for trial in outcome.trials if trial.seconds is not None]
    numbers = [number for number, _ in timed]
    best = [seconds * 1e6 for seconds in accumulate((seconds for _, seconds in timed), min)]
    if timed:
        # The best time holds to the end, whatever failed since.
        numbers.append(outcome.trials[-1].number)
        best.append(best[-1])
    axes.step(numbers, best, where="post", marker=".", label="best")
    floor, drawn = floor_seconds(record.shape, record.target), list(best)
    for name, style, seconds in (("manual", "--", record.manual_median_secs), ("floor", ":", floor)):
        if seconds is not None:
            axes.axhline(seconds * 1e6, linestyle=style, color="black", linewidth=1, label=name)
            drawn.append(seconds * 1e6)
    if drawn and max(drawn) > _LOG_ABOVE * min(drawn):
        axes.set_yscale("log")
    axes.set_title(str(outcome.task).replace("+", "\n+", 1), fontsize=7)
    axes.set_xlabel("trial", fontsize=8)
    axes.set_ylabel("us", fontsize=8)
    axes.tick_params(which="both", labelsize=7)
    axes.legend(fontsize=6)
