"""Tuning records: for a shape on a device, the strategy and parameters that were fastest.

A record is one JSON file, ``<folder>/<device>/<shape>.json``. It is input from
outside: what it says is checked against our own strategies before anything is
built from it, and a file that fails the check is a miss with a warning.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DwtirError, RecordError
from .schedules import STRATEGIES, Strategy
from .shape import DepthwiseConv2dShape
from .target import Target

__all__ = ["RecordWarning", "find", "folders", "shipped_folder"]

_SCHEMA = 1
_MAX_BYTES = 64 * 1024


class RecordWarning(UserWarning):
    """A tuning record was not used; the message names the file and the reason."""


def shipped_folder() -> Path:
    """Return the records that came with dwtir: inside the wheel, or beside a checkout's src."""
    package = Path(__file__).parent
    inside = package / "tune_db"
    return inside if inside.is_dir() else package.parents[1] / "tune_db"


def folders() -> Iterator[Path]:
    """Yield where records are looked for: ``$DWTIR_TUNE_DB``, the user's, the shipped ones."""
    if chosen := os.environ.get("DWTIR_TUNE_DB"):
        yield Path(chosen).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    yield (Path(data) if data else Path.home() / ".local" / "share") / "dwtir" / "tune_db"
    yield shipped_folder()


def find(shape: DepthwiseConv2dShape, target: Target) -> tuple[Strategy, Path] | None:
    """Look up the record of exactly this shape on exactly this device.

    Returns
    -------
    (Strategy, Path) or None
        The recorded strategy and the file it comes from.
    """
    for folder in folders():
        path = folder / target.name / f"{shape}.json"
        if path.is_file():
            try:
                return _strategy(path, shape, target), path
            except RecordError as error:
                warnings.warn(str(error), RecordWarning, stacklevel=3)
    return None


def _strategy(path: Path, shape: DepthwiseConv2dShape, target: Target) -> Strategy:
    record = _read(path)
    for field, wanted in (("schema", _SCHEMA), ("shape", str(shape)), ("device", target.name)):
        if record.get(field) != wanted:
            raise RecordError(f"{path}: {field} must be {wanted!r}, got {record.get(field)!r}")
    strategy = record.get("strategy")
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise RecordError(f"{path}: unknown strategy {strategy!r}")
    parameters = record.get("parameters")
    if not isinstance(parameters, dict):
        raise RecordError(f"{path}: parameters must be an object, got {parameters!r}")
    try:
        found = STRATEGIES[strategy].from_parameters(parameters)
        found.check_use(shape, target)
    except DwtirError as error:
        raise RecordError(f"{path}: {error}") from error
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise RecordError(f"{path}: larger than {_MAX_BYTES} bytes")
        record = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(record, dict):
        raise RecordError(f"{path}: a record is a JSON object")
    return record
