"""Compiled kernels of earlier processes, in a folder that only their owner can touch."""

import hashlib
import json
import logging
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any

from . import saved
from .errors import RecordError
from .typed import Module
from .versions import installed

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return the folder: ``$DWTIR_CACHE_DIR``, else ``dwtir`` in the user's cache folder."""
    if chosen := os.environ.get("DWTIR_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dwtir"


def key(**parts: Any) -> str:
    """Name a kernel by all that its code depends on: `parts`, our source and the compilers."""
    parts |= {"source": _source_digest(), "versions": [installed(name) for name in ("apache-tvm", "nvidia-cuda-nvrtc")]}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def load(name: str) -> tuple[Module, bytes, dict[str, Any]] | None:
    """Load a kernel; a file that is damaged is removed, and counts as a miss."""
    try:
        path = cache_dir() / f"{name}.so"
        if path.exists() and is_private(path.parent) and is_private(path):
            return saved.read(path)
    except RecordError as error:
        discard(name, error)
    except (OSError, RuntimeError) as error:
        _log.warning("no kernels are taken from the cache: %s", error)
    return None


def discard(name: str, reason: RecordError) -> None:
    """Remove a kernel that is damaged, and log why."""
    path = cache_dir() / f"{name}.so"
    _log.warning("removed %s from the kernel cache: %s", path, reason)
    path.unlink(missing_ok=True)


def store(name: str, library: Module, description: dict[str, Any]) -> None:
    """Keep a kernel for later processes.

    Without a C compiler, or where the folder cannot be written or is somebody else's, it is not kept; the log says why.
    """
    if saved.linker() is None:
        _log.warning("kernels are not cached: no C compiler to link them; see `dwtir doctor`")
        return
    try:
        folder = cache_dir()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if is_private(folder):
            saved.write(folder / f"{name}.so", library, description)
    except (OSError, RuntimeError) as error:
        _log.warning("kernels are not cached: %s", error)


def is_private(path: Path) -> bool:
    """Tell whether `path` is ours and nobody else can write there."""
    status = path.stat()
    private = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not private:
        _log.warning("%s is not used: it must be yours and writable by nobody else", path)
    return private


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
