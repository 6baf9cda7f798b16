"""Saved kernels: they run without the compiler, and damaged or foreign files are refused."""

import json
import stat
import sys
import zipfile
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

import numpy as np
import pytest

import dwtir
from dwtir import RecordError
from kernels import EPILOGUE, SHAPE, check, tensors_of
from processes import run

ZIP = b"PK\x03\x04"
LOAD = """
import sys, numpy as np, dwtir
kernel = dwtir.load(sys.argv[1])
arrays = np.load(sys.argv[2])
np.save(sys.argv[3], kernel(*[arrays[name] for name in sorted(arrays)]))
print(kernel)
print(open("/proc/self/maps").read())
"""


def test_it_runs_without_the_compiler(kernel, tmp_path):
    kernel.export(str(tmp_path / "new folder" / "kernel.so"))
    tensors = tensors_of(kernel)
    np.savez(tmp_path / "in.npz", **{f"{i}": array for i, array in enumerate(tensors)})
    files = (tmp_path / name for name in ("new folder/kernel.so", "in.npz", "out.npy"))
    child = run("-W", "error", "-c", LOAD, *files, TVM_USE_RUNTIME_LIB="1")
    assert child.stdout.startswith(repr(kernel))
    assert "libtvm_runtime.so" in child.stdout
    assert "libtvm_compiler" not in child.stdout
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), kernel(*tensors))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loaded_kernel_is_the_saved_one(dtype, tmp_path):
    kernel = dwtir.build(replace(SHAPE, dtype=dtype), epilogue=EPILOGUE, target="cpu")
    path = tmp_path / "kernel.so"
    kernel.export(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["kernel.so"], "left-overs"
    loaded = dwtir.load(path)
    assert loaded.info == kernel.info
    check(loaded)


@pytest.fixture(scope="module")
def saved_bytes(kernel, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "kernel.so"
    kernel.export(path)
    return path.read_bytes()


def refused(content, folder):
    """Load a damaged file: it is refused by name, or the damage touched nothing that counts."""
    path = folder / "kernel.so"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        loaded = dwtir.load(path)
    except RecordError as error:
        return str(path) in str(error)
    check(loaded)
    return False


def flipped(content, place, bits):
    damaged = bytearray(content)
    damaged[place] ^= int(bits)
    return bytes(damaged)


def test_flipped_bits_in_the_code_are_found(saved_bytes, tmp_path):
    code = saved_bytes.index(ZIP)
    rng = np.random.default_rng(0)
    for place in [0, 1, 7, 40, code - 1, *rng.integers(0, code, 100)]:
        assert refused(flipped(saved_bytes, place, 1 << rng.integers(8)), tmp_path)


def test_flipped_bits_elsewhere_are_found_or_harmless(saved_bytes, tmp_path):
    start, end = saved_bytes.index(ZIP), len(saved_bytes)
    rng = np.random.default_rng(0)
    places = [*range(start, start + 40), *range(end - 77, end), *rng.integers(start, end, 200)]
    assert sum(refused(flipped(saved_bytes, place, rng.integers(1, 256)), tmp_path) for place in places) > 200


def test_truncated_files_are_refused(saved_bytes, tmp_path):
    size = len(saved_bytes)
    for length in [0, 1, 3, 4, 64, size // 2, *range(size - 120, size, 7), size - 1]:
        assert refused(saved_bytes[:length], tmp_path)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "kernel.so"
    with pytest.raises(RecordError, match=r"kernel\.so: no such file"):
        dwtir.load(path)
    (tmp_path / "text").write_text("hello")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("other.json", "{}")
    for other in (tmp_path, tmp_path / "text", tmp_path / "archive", Path(sys.executable)):
        with pytest.raises(RecordError, match=NOT_OURS):
            dwtir.load(other)


NOT_OURS = "not a kernel saved by dwtir"
FOREIGN_DESCRIPTIONS = [
    ("schema", 2, "not a kernel of schema 1"),
    ("tvm", "0.18.0", "made by TVM 0.18.0, this is 0.27.0"),
    ("code_sha256", "0" * 64, "code is damaged; its SHA-256"),
    ("", b"[]", "not a kernel of schema 1"),
    *(("", content, NOT_OURS) for content in (b"{", b"\xff\xfe\x00", b"[" * 200_000)),
    ("kernel.workspace", [["int8", [4]]], "a workspace must be one of"),
]
DAMAGES = {
    "code_bytes": [-1, 2**40, True],
    "kernel": [None],
    "kernel.shape": ["1x2x3x4", 3],
    "kernel.epilogue": [["tanh"]],
    "kernel.strategy": ["magic", []],
    "kernel.parameters.rows": [True],
    "kernel.target.colour": ["red"],
    "kernel.target.features": [3],
    "kernel.provenance": [[]],
    "kernel.resources": [{"gold": 1}],
    "kernel.script": [...],
}
FOREIGN_DESCRIPTIONS += [(place, value, "description is damaged") for place in DAMAGES for value in DAMAGES[place]]


@pytest.mark.parametrize(("place", "value", "message"), FOREIGN_DESCRIPTIONS)
def test_foreign_descriptions_are_refused(place, value, message, saved_bytes, tmp_path):
    """The value, or nothing for `...`, is in that place; the code and its digest stay right."""
    path = tmp_path / "kernel.so"
    path.write_bytes(saved_bytes)
    with zipfile.ZipFile(path) as archive:
        record = json.loads(archive.read("dwtir.json"))
    *outer, last = place.split(".")
    inner = reduce(getitem, outer, record)
    inner[last] = value if place else None
    if value is ...:
        del inner[last]
    path.write_bytes(saved_bytes[: saved_bytes.index(ZIP)])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("dwtir.json", json.dumps(record) if place else value)
    with pytest.raises(RecordError, match=message) as error:
        dwtir.load(path)
    assert str(path) in str(error.value)
