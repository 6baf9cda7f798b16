"""JSON files that several processes write and that anybody may have damaged."""

import contextlib
import fcntl
import json
import lzma
import os
import re
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from .errors import RecordError

_MAX_DEPTH = 12


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file. The lock's own file is there only meanwhile."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The one who had it has removed it: then this is the lock of no name.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), lock.stat()):
                break
        os.close(handle)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(handle)


def replace(path: Path, data: bytes) -> None:
    """Write a file whose lock is held: afterwards it is on the disk, the old one or the new."""
    # One writer at a time, so one name: what a killed writer left is overwritten.
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path, most: int) -> object:
    """Read a JSON file of at most `most` bytes, as `parse_json` does; unpack it if it is .xz.

    A `RecordError` has the reason, without the path.
    """
    try:
        if not path.is_file():
            raise RecordError("not a file")
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise RecordError(f"larger than {most} bytes")
        return parse_json(data)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise RecordError(f"not readable: {error}") from error


def parse_json(data: bytes, *, depth: int = _MAX_DEPTH) -> object:
    """Parse JSON strictly: UTF-8, no repeated names, no NaN or infinity, not deep.

    A `RecordError` has the reason.
    """
    level, deepest, in_string = 0, 0, False
    for found in re.findall(rb'\\.|[]["{}]', data, re.DOTALL):
        if found == b'"':
            in_string = not in_string
        elif not in_string and len(found) == 1:
            level += 1 if found in b"[{" else -1
            deepest = max(deepest, level)
    if deepest > depth:
        raise RecordError(f"not readable as JSON: nested {deepest} deep, allowed are {depth}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name is given twice")
        return dict(pairs)

    def number(text: str) -> float:
        if not isfinite(float(text)):
            raise ValueError(f"{text[:40]} is not a finite number")
        return float(text)

    try:
        return json.loads(data.decode(), object_pairs_hook=unique, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not readable as JSON: {error}") from error
