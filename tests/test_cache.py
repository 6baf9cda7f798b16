"""The cache of compiled kernels: what is found in it again, and what is not trusted."""

import stat

import pytest

import dwtir
from dwtir.schedules import Cpu
from kernels import SHAPE, check
from processes import python


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


def test_a_kernel_of_an_earlier_process_is_there_at_once(cache_dir):
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


def test_a_cached_kernel_is_told_how_it_was_asked_for(cache_dir):
    manual, named = build(), build("cpu")
    assert len(list(cache_dir.iterdir())) == 1
    assert [kernel.provenance["chosen"] for kernel in (manual, named)] == ["manual", "step"]
    assert named.script() == manual.script()
    check(named)


DAMAGES = [
    lambda content: bytes([content[0] ^ 1]) + content[1:],
    lambda content: content[:-1],
    lambda content: content[: content.index(b"PK\x03\x04")],
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_built_again(damage, cache_dir, caplog):
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


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_can_write_is_not_used(mode, cache_dir, caplog):
    cache_dir.mkdir(parents=True)
    cache_dir.chmod(mode)
    check(build())
    assert list(cache_dir.iterdir()) == []
    assert f"{cache_dir} is not used" in caplog.text
    assert "writable by nobody else" in caplog.text


def test_a_file_that_others_can_write_is_not_loaded(cache_dir, caplog):
    build()
    (file,) = cache_dir.iterdir()
    file.chmod(0o622)
    before = file.stat().st_ino
    check(build())
    assert f"{file} is not used" in caplog.text
    assert file.stat().st_ino != before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_costs_only_the_cache(cache_dir, caplog):
    cache_dir.parent.write_text("a file where the folder should be")
    check(build())
    assert "kernels are not cached" in caplog.text
