"""Where tuning records are looked for, and which of them is used.

Records are input from outside: `records` checks what they say, and a file that
fails the check is a miss with a warning.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .epilogue import NO_STEPS, Epilogue
from .errors import DwtirError, InvalidScheduleError, RecordError
from .records import Record, file_name
from .schedules import Strategy
from .shape import Shape
from .target import Target

if TYPE_CHECKING:
    from .tvm_database import TuneDB as TuneDB

_warned: set[str] = set()


class RecordWarning(UserWarning):
    """A tuning record was not used; the message names the file and the reason."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # TuneDB derives from a class of TVM, which takes its time to import.
        if name == "TuneDB":
            from .tvm_database import TuneDB

            return TuneDB
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def shipped_folder() -> Path:
    """Return the records that came with dwtir: inside the wheel, or beside a checkout's src."""
    package = Path(__file__).parent
    inside = package / "tune_db"
    return inside if inside.is_dir() else package.parents[1] / "tune_db"


def user_folder() -> Path:
    """Return the user's own records, in the user's data folder."""
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "dwtir" / "tune_db"


def folders() -> Iterator[Path]:
    """Yield where records are looked for: ``$DWTIR_TUNE_DB``, the user's, the shipped ones."""
    if chosen := os.environ.get("DWTIR_TUNE_DB"):
        yield Path(chosen).expanduser()
    yield user_folder()
    yield shipped_folder()


def find(shape: Shape, target: Target, epilogue: Epilogue | None = None) -> tuple[Strategy, Path] | None:
    """Look up what a record says is fastest for a shape on exactly this device, with room for the steps.

    It is the shape's record, see `find_record`, or else, of a gradient that is a convolution of the
    same sizes, that of the convolution.
    """
    steps = epilogue or NO_STEPS
    found = find_record(shape, target, steps) or _of_convolution(shape, target)
    if found is None:
        return None
    record, path = found
    strategy = record.strategy
    return strategy if record.epilogue == steps else strategy.with_room_for(shape, steps, target), path


def _of_convolution(shape: Shape, target: Target) -> tuple[Record, Path] | None:
    """Look up the record of the convolution that a gradient of the data is, of other values and mirrored weights."""
    top, left, bottom, right = shape.padding
    is_one = (
        shape.operation == "grad_data"
        and (shape.stride, top, left, shape.channel_multiplier) == ((1, 1), bottom, right, 1)
        and (shape.out_height, shape.out_width) == (shape.height, shape.width)
    )
    found = find_record(replace(shape, operation="forward"), target) if is_one else None
    if found is not None:
        try:
            found[0].strategy.check_use(shape, target)
        except InvalidScheduleError:
            return None
    return found


def find_record(
    shape: Shape, target: Target, epilogue: Epilogue | None = None, *, within: Iterable[Path] | None = None
) -> tuple[Record, Path] | None:
    """Look up the record of a shape on a device.

    A record that was tuned with these steps comes before one without any, which is not asked about a residual: its
    loads change what is fastest (of 57 layers, up to 1.6x slower). It is looked for within `folders`, if no others
    are given.
    """
    steps = epilogue or NO_STEPS
    names = [file_name(shape, steps)]
    if steps.steps and "residual" not in steps.steps:
        names.append(file_name(shape, NO_STEPS))
    for folder in folders() if within is None else within:
        for name in names:
            path = folder / target.name / name
            if os.path.isfile(path):  # False, not an error, in a folder that is somebody else's
                record = _usable(path, target)
                if record is not None:
                    return record, path
    return None


def record_paths(folder: Path) -> list[Path]:
    """List the files of a database that claim to be records."""
    return sorted(path for path in folder.glob("*/*.json") if not path.name.startswith("."))


def records_of(target: Target, within: Iterable[Path] | None = None) -> Iterator[Record]:
    """Yield the good records of a device, for each shape and epilogue the first one."""
    seen: set[str] = set()
    for folder in folders() if within is None else within:
        for path in record_paths(folder):
            if path.parent.name == target.name and path.name not in seen:
                record = _usable(path, target)
                if record is not None:
                    seen.add(path.name)
                    yield record


def _usable(path: Path, target: Target) -> Record | None:
    try:
        record = Record.read(path)
        for name in ("kind", "arch"):
            wanted, got = getattr(target, name), getattr(record.target, name)
            if got != wanted:
                raise RecordError(f"{path}: target: {name} must be {wanted!r}, got {got!r}")
        try:
            record.strategy.check_use(record.shape, target)
        except DwtirError as error:
            raise RecordError(f"{path}: {error}") from error
    except RecordError as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            warnings.warn(str(error), RecordWarning, stacklevel=4)
        return None
    return record
