"""Kernels in files: saved, which run without the compiler, and cached; what is damaged or foreign is not trusted."""

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
from dwtir.schedules import Cpu
from kernels import EPILOGUE, SHAPE, check, tensors_of
from marks import halves, parametrize, raises
from processes import python, run

ZIP = b"PK\x03\x04"
LOAD = """
import sys, numpy as np, dwtir
kernel = dwtir.load(sys.argv[1])
arrays = np.load(sys.argv[2])
np.save(sys.argv[3], kernel(*[arrays[name] for name in sorted(arrays)]))
print(kernel)
print(open("/proc/self/maps").read())
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "kernel.so"


def test_file_may_be_replaced(kernel, path):
    """The system knows a library by its path."""
    plain = dwtir.build(SHAPE, target="cpu")
    tensors = tensors_of(kernel)
    for written in (kernel, plain):
        written.export(path)
        given = tensors[: 2 + len(written.epilogue.operands(SHAPE))]
        assert np.array_equal(dwtir.load(path)(*given), written(*given))


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


@halves
def test_loaded_kernel_is_the_saved_one(dtype, path):
    kernel = dwtir.build(replace(SHAPE, dtype=dtype), epilogue=EPILOGUE, target="cpu")
    kernel.export(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path], "left-overs"
    loaded = dwtir.load(path)
    assert loaded.info == kernel.info
    check(loaded)


@pytest.fixture(scope="module")
def saved_bytes(kernel, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "kernel.so"
    kernel.export(path)
    return path.read_bytes()


def refused(content, path):
    """Load a damaged file: it is refused by name, or the damage touched nothing that counts."""
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


def test_flipped_bits_in_the_code_are_found(saved_bytes, path):
    code = saved_bytes.index(ZIP)
    rng = np.random.default_rng(0)
    for place in [0, 1, 7, 40, code - 1, *rng.integers(0, code, 100)]:
        assert refused(flipped(saved_bytes, place, 1 << rng.integers(8)), path)


def test_flipped_bits_elsewhere_are_found_or_harmless(saved_bytes, path):
    start, end = saved_bytes.index(ZIP), len(saved_bytes)
    rng = np.random.default_rng(0)
    places = [*range(start, start + 40), *range(end - 77, end), *rng.integers(start, end, 200)]
    assert sum(refused(flipped(saved_bytes, place, rng.integers(1, 256)), path) for place in places) > 200


def test_truncated_files_are_refused(saved_bytes, path):
    size = len(saved_bytes)
    for length in [0, 1, 3, 4, 64, size // 2, *range(size - 120, size, 7), size - 1]:
        assert refused(saved_bytes[:length], path)


def test_foreign_files_are_refused(path, tmp_path):
    with raises(RecordError, match=r"kernel\.so: no such file"):
        dwtir.load(path)
    (tmp_path / "text").write_text("hello")
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("other.json", "{}")
    for other in (tmp_path, tmp_path / "text", tmp_path / "archive", Path(sys.executable)):
        with raises(RecordError, match=NOT_OURS):
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


@parametrize(("place", "value", "message"), FOREIGN_DESCRIPTIONS)
def test_foreign_descriptions_are_refused(place, value, message, saved_bytes, path):
    """The value, or nothing for `...`, is there; the code and its digest stay right."""
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
    with raises(RecordError, match=message) as error:
        dwtir.load(path)
    assert str(path) in str(error.value)


# The cache


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    folder = tmp_path / "parent" / "cache"
    monkeypatch.setenv("DWTIR_CACHE_DIR", str(folder))
    return folder


def build(schedule="manual"):
    return dwtir.build(SHAPE, schedule, target="cpu")


BUILD = """
import sys, numpy as np, dwtir
kernel = dwtir.build("1x8x16x16_k3_psame", target="cpu")
print("compiled" if "dwtir.compiler" in sys.modules else "found")
assert kernel(np.ones((1, 8, 16, 16), "float32"), np.ones((8, 1, 3, 3), "float32")).sum() == 16928
"""


def test_kernel_of_an_earlier_process_is_found(cache_dir):
    assert python(BUILD, PYTHONWARNINGS="error") == "compiled"
    (file,) = cache_dir.iterdir()
    assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.stat()
    assert python(BUILD, PYTHONWARNINGS="error") == "found"
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_what_is_built_decides_the_file(cache_dir):
    texts = ["1x4x8x8_k3", "1x4x8x9_k3", "1x4x8x8_k3_float16"]
    for text in texts * 2:
        dwtir.build(text, target="cpu")
    assert len(list(cache_dir.iterdir())) == 3
    dwtir.build(texts[0], epilogue="relu", target="cpu")
    dwtir.build(texts[0], Cpu(rows=2, cols=1, lanes=4), target="cpu")
    dwtir.build(texts[0], target={"kind": "llvm", "mcpu": "x86-64-v2"})
    assert len(list(cache_dir.iterdir())) == 6


def test_cached_kernel_knows_its_schedule(cache_dir):
    manual, named = build(), build("cpu")
    assert len(list(cache_dir.iterdir())) == 1
    assert [kernel.provenance["chosen"] for kernel in (manual, named)] == ["manual", "step"]
    assert named.script() == manual.script()
    check(named)


FILE_DAMAGES = [
    lambda content: bytes([content[0] ^ 1]) + content[1:],
    lambda content: content[:-1],
    lambda content: content[: content.index(ZIP)],
]


@parametrize("damage", FILE_DAMAGES)
def test_damaged_file_is_built_again(damage, cache_dir, caplog):
    build()
    (file,) = cache_dir.iterdir()
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(damage(content))
    file.chmod(0o600)
    check(build())
    assert [str(file) in message for message in caplog.messages] == [True]
    caplog.clear()
    check(build())
    assert caplog.messages == []


@parametrize("mode", [0o770, 0o777, 0o702])
def test_folder_of_others_is_not_used(mode, cache_dir, caplog):
    cache_dir.mkdir(parents=True)
    cache_dir.chmod(mode)
    check(build())
    assert list(cache_dir.iterdir()) == []
    assert f"{cache_dir} is not used" in caplog.text
    assert "writable by nobody else" in caplog.text


def test_file_of_others_is_not_loaded(cache_dir, caplog):
    build()
    (file,) = cache_dir.iterdir()
    file.chmod(0o622)
    before = file.stat().st_ino
    check(build())
    assert f"{file} is not used" in caplog.text
    assert file.stat().st_ino != before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_missing_folder_costs_only_the_cache(cache_dir, caplog):
    cache_dir.parent.write_text("a file where the folder should be")
    check(build())
    assert "kernels are not cached" in caplog.text
