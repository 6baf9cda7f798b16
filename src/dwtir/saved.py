"""Compiled kernels in files: a shared library with its description at the end.

The file is what TVM exports, the host function with the device code inside,
and a zip archive appended to it. The loader of shared libraries ignores what
follows the library, and zip readers start from the end, so one file is both.

The checks here find damaged and foreign files, not malicious ones: whoever loads
a library runs its code.
"""

import hashlib
import json
import lzma
import os
import struct
import tempfile
import zipfile
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .errors import RecordError, ToolchainError
from .typed import Module

_MEMBER = "dwtir.json"
_SCHEMA = 1
_MAX_FILE = 256 * 2**20
_MAX_DESCRIPTION = 64 * 2**20
# What zipfile and json raise on damaged bytes; RuntimeError is an encrypted member, an
# unknown compression, or JSON nested too deeply.
_UNREADABLE = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, KeyError, OSError, RuntimeError, ValueError),
)


def linker() -> str | None:
    """Find the C compiler that links kernels: ``$CXX``, ``$CC``, g++, gcc, clang or cc."""
    from tvm.support import cc

    found: str | None = cc.get_cc()
    return found


def write(path: Path, library: Module | bytes, description: dict[str, Any]) -> None:
    """Write a kernel, completely or not at all.

    Parameters
    ----------
    path : Path
        The file; one that is there is replaced.
    library : tvm.runtime.Module or bytes
        The host function and its imports, or the code that `read` gave: TVM cannot export again what it has loaded.
    description : dict
        JSON values that `read` gives back.
    """
    if not isinstance(library, bytes) and linker() is None:
        raise ToolchainError(
            "saving a kernel needs a C compiler to link with and none was found; install one "
            "(for example: apt-get install g++) or name it in $CXX"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".dwtir-") as folder:
        draft = Path(folder, "kernel.so")
        if isinstance(library, bytes):
            draft.write_bytes(library)
        else:
            library.export_library(str(draft))
        code = draft.read_bytes()
        record = {
            "schema": _SCHEMA,
            "tvm": version("apache-tvm"),
            "code_bytes": len(code),
            "code_sha256": hashlib.sha256(code).hexdigest(),
            "kernel": description,
        }
        with zipfile.ZipFile(draft, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MEMBER, json.dumps(record))
        draft.chmod(0o600)
        os.replace(draft, path)


def read(path: Path) -> tuple[Module, bytes, dict[str, Any]]:
    """Check a kernel's file and load it; a `RecordError` names one that is damaged or foreign.

    The library comes with its code, for `write`, and the description.
    """
    try:
        size = path.stat().st_size
        if size > _MAX_FILE:
            raise RecordError(f"{path}: {size} bytes, a kernel has at most {_MAX_FILE}")
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(_MEMBER).file_size > _MAX_DESCRIPTION:
                raise RecordError(f"{path}: the description is too large")
            record = json.loads(archive.read(_MEMBER))
    except FileNotFoundError:
        raise RecordError(f"{path}: no such file") from None
    except _UNREADABLE as error:
        raise RecordError(f"{path}: not a kernel saved by dwtir, or damaged: {error}") from error
    if not isinstance(record, dict) or record.get("schema") != _SCHEMA:
        raise RecordError(f"{path}: not a kernel of schema {_SCHEMA}")
    if record.get("tvm") != version("apache-tvm"):
        raise RecordError(
            f"{path}: made by TVM {record.get('tvm')}, this is {version('apache-tvm')}; build and export it again"
        )
    code_bytes, kernel = record.get("code_bytes"), record.get("kernel")
    if type(code_bytes) is not int or not 0 < code_bytes <= size or not isinstance(kernel, dict):
        raise RecordError(f"{path}: the description is damaged")
    with path.open("rb") as file:
        code = file.read(code_bytes)
    if hashlib.sha256(code).hexdigest() != record.get("code_sha256"):
        raise RecordError(f"{path}: the code is damaged; its SHA-256 is not the recorded one")

    import tvm  # the runtime that the library needs  # noqa: F401
    import tvm_ffi

    with tempfile.TemporaryDirectory() as folder:  # glibc gives a name that it knows the library it has
        link = Path(folder, "kernel.so")
        link.symlink_to(path.resolve())
        try:
            return tvm_ffi.load_module(str(link)), code, kernel
        except RuntimeError as error:
            raise RecordError(f"{path}: does not load: {error}") from error
