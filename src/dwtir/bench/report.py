"""What a benchmark found: rows, ratios, means, and the worst row by name."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any, TextIO

from ..epilogue import Epilogue
from ..kernel import Timing
from ..shape import DepthwiseConv2dShape
from ..target import Target
from ..tune.outcome import floor_seconds

__all__ = ["Row", "summary", "table", "write_csv", "write_json"]

_WIDE = 0.1
"""Spread, p20 to p80 over the median, above which a time is flagged."""

_HEAD = ("layer", "dwtir us", "% floor", "same layout us", "ratio", "any us", "ratio", "by")


@dataclass(frozen=True)
class Row:
    """One layer, measured.

    Parameters
    ----------
    shape, epilogue, target
        What was computed, and where.
    cold : bool
        Whether the inputs came from memory.
    timings : dict of str to Timing
        Seconds by contender; ``dwtir`` is ours.
    layouts : dict of str to str
        The contenders' layouts.
    wrong : tuple of str
        Peers that were left out, and why.
    """

    shape: DepthwiseConv2dShape
    epilogue: Epilogue
    target: Target
    cold: bool
    timings: dict[str, Timing]
    layouts: dict[str, str]
    wrong: tuple[str, ...] = ()

    @property
    def own(self) -> float:
        """Our median, in seconds."""
        return self.timings["dwtir"].median

    @property
    def floor(self) -> float | None:
        """The least time that memory and arithmetic allow; None where rates are not known."""
        return floor_seconds(self.shape, self.target, self.epilogue)

    def best(self, layout: str | None = None) -> tuple[str, float] | None:
        """Return the fastest peer, of one layout or of any, and its median in seconds."""
        found = [
            (timing.median, name)
            for name, timing in self.timings.items()
            if name != "dwtir" and layout in (None, self.layouts[name])
        ]
        return (min(found)[1], min(found)[0]) if found else None

    def ratio(self, layout: str | None = None) -> float | None:
        """Return how many times faster we are than the fastest peer."""
        best = self.best(layout)
        return None if best is None else best[1] / self.own

    @property
    def wide(self) -> list[str]:
        """Contenders whose spread is too wide for their median to say much."""
        return [
            name
            for name, timing in self.timings.items()
            if timing.p80 - timing.p20 > _WIDE * timing.median
        ]

    def facts(self) -> dict[str, Any]:
        """Return all of it as flat JSON values, times in microseconds."""
        found: dict[str, Any] = {
            "shape": str(self.shape),
            "epilogue": str(self.epilogue),
            "device": self.target.name,
            "cold": self.cold,
            "floor_us": None if self.floor is None else self.floor * 1e6,
            "ratio_same_layout": self.ratio(self.shape.layout),
            "ratio_any_layout": self.ratio(),
            "wide": ", ".join(self.wide),
            "left_out": "; ".join(self.wrong),
        }
        for name, timing in self.timings.items():
            for part in ("median", "p20", "p80"):
                found[f"{name} {part}_us"] = getattr(timing, part) * 1e6
        return found


def table(rows: Iterable[Row]) -> list[str]:
    """Write rows as lines of text."""
    cells = [_HEAD]
    for row in rows:
        same, best = row.best(row.shape.layout), row.best()
        cells.append(
            (
                f"{row.shape}{'' if not row.epilogue.steps else f'+{row.epilogue}'}",
                _microseconds(row.own) + ("~" if "dwtir" in row.wide else ""),
                "-" if row.floor is None else f"{100 * row.floor / row.own:.0f}",
                _microseconds(same and same[1]),
                _times(row.ratio(row.shape.layout)),
                _microseconds(best and best[1]),
                _times(row.ratio()),
                best[0] if best else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index in (0, 7) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def summary(rows: Sequence[Row]) -> list[str]:
    """Write geometric means, and the worst row by name."""
    lines = []
    for what, layout in (("in the same layout", True), ("in any layout", False)):
        ratios = [
            (ratio, row)
            for row in rows
            if (ratio := row.ratio(row.shape.layout if layout else None)) is not None
        ]
        if ratios:
            worst, row = min(ratios, key=lambda pair: pair[0])
            mean = geometric_mean(ratio for ratio, _ in ratios)
            lines.append(
                f"against the best PyTorch {what}: {mean:.2f}x by geometric mean over "
                f"{len(ratios)} rows, {sum(ratio < 1 for ratio, _ in ratios)} below 1; "
                f"worst {worst:.2f}x: {row.shape}"
            )
    floors = [row.floor / row.own for row in rows if row.floor is not None]
    if floors:
        lines.append(f"share of the floor: {100 * geometric_mean(floors):.0f} % by geometric mean")
    wide = sum(bool(row.wide) for row in rows)
    if wide:
        lines.append(f"{wide} rows have a spread above {100 * _WIDE:.0f} %; ours are marked ~")
    left = sorted({reason for row in rows for reason in row.wrong})
    lines += [f"left out: {reason}" for reason in left[:10]]
    return lines


def write_csv(rows: Sequence[Row], stream: TextIO) -> None:
    """Write a line a row."""
    facts = [row.facts() for row in rows]
    names = dict.fromkeys(name for row in facts for name in row)
    writer = csv.DictWriter(stream, list(names))
    writer.writeheader()
    writer.writerows(facts)


def write_json(rows: Sequence[Row], about: dict[str, str], stream: TextIO) -> None:
    """Write all rows, with what they were measured on."""
    json.dump({"about": about, "rows": [row.facts() for row in rows]}, stream, indent=1)
    stream.write("\n")


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.2f}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
