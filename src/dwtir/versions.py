"""The versions that a record was measured with, as a line, and as one of a whole folder."""

import contextlib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from . import files
from ._version import __version__
from .errors import RecordError

_NAMES = ("apache-tvm", "dwtir", "gpu", "driver", "cuda")
"""What the versions are of, in the order of the line: all of it, or the first two."""

_COMMON = "versions.txt"
"""The file with the line of a folder's first record, which those of the same versions leave out."""

_MAX_BYTES = 1024


def own() -> dict[str, str]:
    """Return those of dwtir, also of a checkout that is not installed, and of TVM."""
    return {"dwtir": __version__, "apache-tvm": version("apache-tvm")}


def installed(package: str) -> str:
    """Return the version of a package, or ``none``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def read(text: str) -> dict[str, str]:
    """Return the versions that a line says."""
    return dict(zip(_NAMES, text.split(", "), strict=False))


def line(versions: Mapping[str, str]) -> Any:
    """Write versions as a line, if it can be read again."""
    text = ", ".join(versions[name] for name in _NAMES if name in versions)
    return text if read(text) == versions else versions


def common(folder: Path) -> str:
    """Return the line of a folder, which must have one."""
    try:
        with (folder / _COMMON).open("rb") as file:
            return file.read(_MAX_BYTES).decode().strip()
    except (OSError, ValueError) as error:
        raise RecordError(f"without versions there must be {_COMMON}, got {error}") from error


def is_common(folder: Path, text: object) -> bool:
    """Tell whether a line is that of a folder, of which the first becomes it."""
    path = folder / _COMMON
    with files.locked(path):
        if not path.exists() and isinstance(text, str):
            files.replace(path, f"{text}\n".encode())
        with contextlib.suppress(RecordError):
            return common(folder) == text
        return False
