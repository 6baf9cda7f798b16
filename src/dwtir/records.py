"""Tuning records: for a shape on a device, the strategy and parameters that were fastest.

A record is one JSON file, ``<folder>/<device>/<shape>.json``. It is input from
outside: what it says is checked against our own strategies, in plain Python,
before anything is built from it.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

from . import files, packing, target_json, traces, versions
from .epilogue import NO_STEPS, Epilogue
from .errors import DwtirError, RecordError
from .schedules import STRATEGIES, Strategy
from .shape import Shape
from .target import Target
from .target_json import integer, text
from .traces import brief
from .versions import own as own_versions

SCHEMA = 2
MAX_BYTES = 8 * 1024
_SAME = ("manual_median_secs", "trials", "seed", "trace", "versions")
"""Fields that are in the file what they are in `Record`."""
_FIELDS = (*("schema", "shape", "epilogue", "device", "target", "strategy", "parameters", "run_secs"), *_SAME)
_USUAL: dict[str, Any] = {"schema": SCHEMA, "epilogue": "none", "target": {}, "seed": 0}
"""Fields that are in the file only where they are something else."""
_PLACE = ("shape", "epilogue", "device")
"""Fields that the file's path says; the file need not."""


@dataclass(frozen=True)
class Record:
    """What tuning found for one shape on one device.

    Raises
    ------
    RecordError
        If a field is not what a record allows.
    """

    shape: Shape
    target: Target
    strategy: Strategy
    epilogue: Epilogue
    """What was tuned, where, the result, and the steps it was measured with."""
    run_secs: tuple[float, ...]
    """Times of the strategy, in seconds."""
    manual_median_secs: float | None
    """Median of the manual schedule, where it was measured."""
    trials: int
    """Candidates that were measured."""
    seed: int | None
    """Seed of the search."""
    versions: Mapping[str, str] = field(hash=False)
    """``apache-tvm`` and ``dwtir``, and for a GPU ``gpu``, ``driver`` and ``cuda``."""
    trace: traces.TraceJson = field(hash=False, repr=False)
    """The MetaSchedule trace that `traces.decided` makes of the strategy."""

    @classmethod
    def measured(
        cls,
        strategy: Strategy,
        shape: Shape,
        target: Target,
        run_secs: Sequence[float],
        *,
        epilogue: Epilogue = NO_STEPS,
        manual_median_secs: float | None = None,
        trials: int = 1,
        seed: int | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> "Record":
        """Make the record of a measurement of this process.

        Parameters
        ----------
        run_secs : sequence of float
            All times of the strategy. Of many, three are kept: those that 20, 50 and 80 % are not above.
        versions : mapping, optional
            What to add to the versions of TVM and dwtir.
        """
        strategy.check_use(shape, target)
        times = sorted(_rounded(seconds) for seconds in run_secs)
        if len(times) > 3:
            fifth = (len(times) - 1) // 5
            times = [times[fifth], times[(len(times) - 1) // 2], times[-1 - fifth]]
        found = cls(
            *(shape, target, strategy, epilogue, tuple(times)),
            None if manual_median_secs is None else _rounded(manual_median_secs),
            trials=trials,
            seed=seed,
            versions=own_versions() | dict(versions or {}),
            trace=json.loads(traces.expected_trace(strategy, shape, epilogue)),
        )
        found._check()
        return found

    @property
    def device(self) -> str:
        """Name of the device."""
        return self.target.name

    @property
    def median_secs(self) -> float:
        """Median of the times, in seconds."""
        return median(self.run_secs)

    @property
    def p20_secs(self) -> float:
        """The time that a fifth of the times are not above, in seconds."""
        return sorted(self.run_secs)[(len(self.run_secs) - 1) // 5]

    @property
    def p80_secs(self) -> float:
        """The time that a fifth of the times are not below, in seconds."""
        return sorted(self.run_secs)[-1 - (len(self.run_secs) - 1) // 5]

    @property
    def parameters(self) -> dict[str, Any]:
        """The strategy's tile."""
        return self.strategy.parameters

    @property
    def gain(self) -> float | None:
        """How many times faster than the manual schedule."""
        manual = self.manual_median_secs
        return None if manual is None else manual / self.median_secs

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON values; the file packs some, and leaves others to its path."""
        found = {
            "schema": SCHEMA,
            "shape": self.shape.brief,
            "epilogue": str(self.epilogue),
            "device": self.device,
            "target": target_json.written(self.target),
            **strategy_to_json(self.strategy),
            "run_secs": list(self.run_secs),
            **{name: getattr(self, name) for name in _SAME},
        }
        return {name: value for name, value in found.items() if name not in _USUAL or value != _USUAL[name]}

    def path_in(self, folder: Path) -> Path:
        """Return the record's place in a database."""
        return folder / self.device / file_name(self.shape, self.epilogue)

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read a record, and check all that it says; a `RecordError` names the file."""
        try:
            values = files.read_json(path, MAX_BYTES)
            if isinstance(values, dict):
                name, *steps = path.stem.split("+")
                place = Shape.parse(name).brief, str(Epilogue(tuple(steps))), path.parent.name
                values = dict(zip(_PLACE, place, strict=True)) | values
                if "versions" not in values:
                    values["versions"] = versions.common(path.parent)
            found = cls.from_json(values)
            own = ("shape", path.name, file_name(found.shape, found.epilogue))
            for name, wanted, got in (("device", path.parent.name, found.device), own):
                if got != wanted:
                    raise RecordError(f"{name} must be {wanted!r}, got {got!r}")
        except DwtirError as error:
            raise RecordError(f"{path}: {error}") from error
        return found

    @classmethod
    def from_json(cls, record: object) -> "Record":
        """Make a record of JSON values, which may be anybody's; errors say what is allowed."""
        if not isinstance(record, dict):
            raise RecordError(f"a record is a JSON object, got {brief(record)}")
        record = _USUAL | record
        if type(record["schema"]) is not int or record["schema"] != SCHEMA:
            raise RecordError(f"schema must be {SCHEMA}, got {brief(record['schema'])}")
        if set(record) != set(_FIELDS):
            extra = brief(sorted(set(record) - set(_FIELDS)))
            missing = sorted(set(_FIELDS) - set(record))
            raise RecordError(f"a record has the fields {', '.join(_FIELDS)}; missing {missing}, unknown {extra}")
        shape = Shape.parse(text("shape", record["shape"]))
        steps = text("epilogue", record["epilogue"])
        epilogue = Epilogue.of(None if steps == "none" else steps)
        for name, canonical in (("shape", shape.brief), ("epilogue", str(epilogue))):
            if record[name] != canonical:
                raise RecordError(f"{name} must be written {canonical!r}, got {record[name]!r}")
        target = target_json.read(text("device", record["device"]), record["target"])
        strategy = strategy_from_json(record)
        strategy.check_use(shape, target)
        if not isinstance(record["run_secs"], list):
            raise RecordError(f"run_secs must be a list, got {brief(record['run_secs'])}")
        if isinstance(record["trace"], str):
            record = record | {"trace": packing.unpack(record["trace"])}
        if isinstance(record["versions"], str):
            record = record | {"versions": versions.read(record["versions"])}
        same = {name: record[name] for name in _SAME}
        found = cls(shape, target, strategy, epilogue, tuple(record["run_secs"]), **same)
        found._check()
        found._check_trace()
        return found

    def _check(self) -> None:
        if not 1 <= len(self.run_secs) <= 256:
            raise RecordError(f"run_secs must be 1 to 256 times, got {len(self.run_secs)}")
        times = [("run_secs", seconds) for seconds in self.run_secs]
        if self.manual_median_secs is not None:
            times.append(("manual_median_secs", self.manual_median_secs))
        for name, seconds in times:
            if type(seconds) not in (int, float) or not (0 < seconds < 1e6):
                raise RecordError(f"{name} must be seconds above 0 and below a million, got {brief(seconds)}")
        integer("trials", self.trials, 0, 2**31)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63)
        if not isinstance(self.versions, Mapping) or not {"apache-tvm", "dwtir"} <= set(self.versions):
            raise RecordError(f"versions must have apache-tvm and dwtir, got {brief(self.versions)}")
        for name, value in self.versions.items():
            text("versions", name)
            text(f"versions: {name}", value)

    def _check_trace(self) -> None:
        if any(self.versions[name] != present for name, present in own_versions().items()):
            return  # the parameters are what counts
        if traces.dump(self.trace) != traces.expected_trace(self.strategy, self.shape, self.epilogue):
            raise RecordError(f"the trace must be the one that {self.strategy} makes, got another")

    def write(self, folder: Path, *, force: bool = False) -> bool:
        """Put the record into a database, if none is better or by force; tell whether it was."""
        self._check()
        path = self.path_in(folder)
        short = {"trace": packing.pack(self.trace), "versions": versions.line(self.versions)}
        short["parameters"] = ",".join(map(str, self.parameters.values()))
        path.parent.mkdir(parents=True, exist_ok=True)
        values = self.as_json() | short
        left = (*_PLACE, "versions") if versions.is_common(path.parent, short["versions"]) else _PLACE
        text = _line({name: values[name] for name in values if name not in left}).encode()
        if len(text) > MAX_BYTES:
            raise RecordError(f"{path}: a record is at most {MAX_BYTES} bytes, got {len(text)}")
        with files.locked(path):
            if not force and path.exists():
                with contextlib.suppress(RecordError):
                    if Record.read(path).median_secs <= self.median_secs:
                        return False
            files.replace(path, text)
        return True


def strategy_from_json(values: Mapping[str, Any]) -> Strategy:
    """Make a strategy of JSON values, which may be anybody's."""
    kind, parameters = values.get("strategy"), values.get("parameters")
    if not isinstance(kind, str) or kind not in STRATEGIES:
        raise RecordError(f"unknown strategy {brief(kind)}; allowed are {', '.join(STRATEGIES)}")
    if isinstance(parameters, str):
        names = [field.name for field in fields(STRATEGIES[kind])]  # type: ignore[arg-type]
        given = parameters.replace(", ", ",").split(",")
        if len(given) > len(names) or max(map(len, given)) > 20:
            raise RecordError(f"parameters must be {','.join(names)} or an object, got {brief(parameters)}")
        parameters = dict(zip(names, (int(value) if value.isdecimal() else value for value in given), strict=False))
    if not isinstance(parameters, dict):
        raise RecordError(f"parameters must be an object, got {brief(parameters)}")
    return STRATEGIES[kind].from_parameters(parameters)


def strategy_to_json(strategy: Strategy) -> dict[str, Any]:
    """Write a strategy as JSON values."""
    return {"strategy": strategy.name, "parameters": strategy.parameters}


def file_name(shape: Shape, epilogue: Epilogue) -> str:
    """Name the file of a record: the shape, and the epilogue it was tuned with if any."""
    return f"{'+'.join((str(shape), *epilogue.steps))}.json"


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _line(record: dict[str, Any]) -> str:
    found = {name: traces.dump(value) for name, value in record.items()}
    short = {name: text if '"' in text else text.replace("e-0", "e-") for name, text in found.items()}
    return "{" + ",".join(f'"{name}":{text}' for name, text in short.items()) + "}\n"
