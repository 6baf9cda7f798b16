"""Results of a benchmark as files: JSON that holds all of it, and CSV for other programs."""

import csv
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..epilogue import Epilogue
from ..errors import DwtirError, RecordError
from ..files import read_json
from ..kernel import Timing
from ..shape import Shape
from ..target import Target
from .articles import PUBLISHED_US, Case, Found
from .row import Row

_FORMAT = 2
_USUAL: dict[str, Any] = {"epilogue": [], "cold": True, "networks": [], "load": 0.0, "left_out": []}
"""What a row does not say."""
_MAX_BYTES = 16 * 2**20
_TARGET = ("name", "kind", "arch", "units", "bandwidth", "fp32_rate")


@dataclass(frozen=True)
class Results:
    """What one run of the benchmark found."""

    target: Target
    """With its rates where they are known."""
    about: dict[str, str]
    """The device, versions, clocks and the command."""
    rows: Sequence[Row] = ()
    cases: dict[Case, Found] = field(default_factory=dict)
    """The articles' cases, if asked for; where there is no time, why."""

    def write(self, path: Path) -> None:
        """Write it as JSON, a row a line; packed where the name ends in .xz."""
        networks = list(dict.fromkeys(name for row in self.rows for name in row.networks))
        contenders = list(dict.fromkeys(name for row in self.rows for name in row.timings))
        target = {name: getattr(self.target, name) for name in _TARGET}
        head = {"format": _FORMAT, "about": self.about, "target": target}
        head |= {"networks": networks, "contenders": contenders}
        rows = [_row(row, networks, contenders) for row in self.rows]
        cases = [_case(*item) for item in self.cases.items()]
        data = (
            f"{json.dumps(head, indent=1).removesuffix('}').rstrip()},\n"
            f'"rows": [\n{_lines(rows)}\n],\n"articles": [\n{_lines(cases)}\n]}}\n'
        ).encode()
        path.write_bytes(lzma.compress(data) if path.suffix == ".xz" else data)

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Read what `write` wrote, or raise a `RecordError`."""
        try:
            found: Any = read_json(path, _MAX_BYTES)
            if found["format"] != _FORMAT:
                raise RecordError(f"its format must be {_FORMAT}, got {found['format']!r}")
            target = Target(**{name: found["target"][name] for name in _TARGET})
            return cls(
                target,
                {str(name): str(value) for name, value in found["about"].items()},
                [_read_row(_named(row, found), target) for row in found["rows"]],
                dict(_read_case(case) for case in found["articles"]),
            )
        except RecordError as error:
            raise RecordError(f"{path}: {error}") from error
        except (DwtirError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"{path}: not a benchmark's results: {error!r}") from error


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write a line a row."""
    facts = [row.facts() for row in rows]
    names = dict.fromkeys(name for row in facts for name in row)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(names))
        writer.writeheader()
        writer.writerows(facts)


def _lines(entries: Sequence[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)


def _row(row: Row, networks: Sequence[str], contenders: Sequence[str]) -> dict[str, Any]:
    values = {
        "shape": row.shape.brief,
        "epilogue": list(row.epilogue.steps),
        "cold": row.cold,
        "networks": [networks.index(name) for name in row.networks],
        "load": round(row.load, 2),
        "us": [microseconds(row.timings[name]) if name in row.timings else None for name in contenders],
        "left_out": list(row.wrong),
    }
    return {name: value for name, value in values.items() if value != _USUAL.get(name)}


def _named(row: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    values = _USUAL | row
    values["networks"] = [found["networks"][place] for place in values["networks"]]
    us = zip(found["contenders"], values["us"], strict=True)
    values["us"] = {name: numbers for name, numbers in us if numbers is not None}
    return values


def _read_row(values: dict[str, Any], target: Target) -> Row:
    timings = {str(name): _timing(numbers) for name, numbers in values["us"].items()}
    if "dwtir" not in timings:
        raise RecordError(f"no time of dwtir for {values['shape']}")
    return Row(
        Shape.parse(values["shape"]),
        Epilogue.of(values["epilogue"]),
        target,
        bool(values["cold"]),
        timings,
        tuple(map(str, values["left_out"])),
        tuple(map(str, values["networks"])),
        float(values["load"]),
    )


def _case(case: Case, found: Found) -> dict[str, Any]:
    entry: dict[str, Any] = {"shape": case.shape, "way": case.way, "epilogue": case.epilogue}
    return entry | ({"missing": found} if isinstance(found, str) else {"us": microseconds(found)})


def _read_case(values: dict[str, Any]) -> tuple[Case, Found]:
    case = Case(values["shape"], values["way"], values["epilogue"])
    if case not in PUBLISHED_US:
        raise RecordError(f"no article has {case}")
    return case, _timing(values["us"]) if "us" in values else str(values["missing"])


def microseconds(timing: Timing) -> list[float]:
    """Return median, p20 and p80 in microseconds, to the nanosecond, and the number of rounds."""
    times = (timing.median, timing.p20, timing.p80)
    return [*(round(seconds * 1e6, 3) for seconds in times), timing.repeats]


def _timing(numbers: list[float]) -> Timing:
    median, p20, p80, rounds = numbers
    if not 0 < p20 <= median <= p80:
        raise RecordError(f"times must be positive, p20 <= median <= p80, got {numbers}")
    return Timing(median / 1e6, p20 / 1e6, p80 / 1e6, int(rounds))
