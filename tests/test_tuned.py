"""Kernels by tuning records: which record is used, and what is said of one that is not."""

import json
import re
import warnings
from dataclasses import replace

import pytest

import dwtir
from dwtir import NotTunedError, NotTunedWarning, database
from dwtir.records import Record
from dwtir.schedules import Cpu, SharedTile
from dwtir.target import KNOWN_GPUS, resolve
from kernels import EPILOGUE, SHAPE, check


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder for this CPU's records, of a database that is otherwise empty."""
    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path / "records"))
    found = tmp_path / "records" / resolve("cpu").name
    found.mkdir(parents=True)
    return found


TILE = Cpu(rows=3, cols=1, lanes=2)


def record(target="cpu", tile=TILE, **changes):
    return Record.measured(tile, SHAPE, resolve(target), [1e-6]).as_json() | changes


def test_without_a_record_the_manual_schedule_is_built_with_one_warning(folder):
    with pytest.warns(NotTunedWarning) as caught:
        kernel = dwtir.build(SHAPE, "tuned", target="cpu")
    (warning,) = caught
    assert f"python -m dwtir.tune {SHAPE}" in str(warning.message)
    assert resolve("cpu").name in str(warning.message)
    assert warning.filename == __file__
    assert kernel.strategy == Cpu.choose(SHAPE, resolve("cpu"))
    assert kernel.provenance["chosen"] == "manual"
    assert kernel.provenance["schedule"] == "tuned"
    with pytest.raises(NotTunedError, match=f"python -m dwtir.tune {SHAPE}") as error:
        dwtir.build(SHAPE, "tuned", target="cpu", on_miss="error")
    assert isinstance(error.value, LookupError)


def test_a_record_is_used(folder):
    path = folder / f"{SHAPE}.json"
    path.write_text(json.dumps(record()))
    kernel = dwtir.build(SHAPE, "tuned", epilogue=EPILOGUE, target="cpu", on_miss="error")
    assert kernel.strategy == TILE
    assert kernel.strategy != Cpu.choose(SHAPE, resolve("cpu"))
    assert kernel.provenance["chosen"] == "tuned"
    assert kernel.provenance["record"] == str(path)
    check(kernel)
    other = replace(SHAPE, width=12)
    with pytest.raises(NotTunedError):
        dwtir.build(other, "tuned", target="cpu", on_miss="error")


def test_records_are_looked_for_in_order(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    users = tmp_path / "data" / "dwtir" / "tune_db" / folder.name
    users.mkdir(parents=True)
    (users / f"{SHAPE}.json").write_text(json.dumps(record(tile=Cpu(1, 1, 1))))
    assert dwtir.build(SHAPE, "tuned", target="cpu").strategy == Cpu(1, 1, 1)
    (folder / f"{SHAPE}.json").write_text(json.dumps(record()))
    assert dwtir.build(SHAPE, "tuned", target="cpu").strategy == TILE
    *_, shipped = database.folders()
    assert shipped == database.shipped_folder()


# `test_records` has many more that `Record.read` refuses.
HOSTILE_RECORDS = {
    "device": ({"device": "nvidia-h200"}, "device must be 'cpu-.*', got 'nvidia-h200'"),
    "shape": ({"shape": "1x1x9x9_k3"}, "shape must be written"),
    "another device's": (
        {"strategy": "shared_tile", "parameters": SharedTile().parameters},
        "in NCHW on a GPU",
    ),
    "tile": ({"parameters": TILE.parameters | {"rows": 4096}}, "at most 64, got 4096"),
    "no JSON": (b"{'schema': 1}", "not readable as JSON"),
}


@pytest.mark.parametrize("case", HOSTILE_RECORDS)
def test_a_hostile_record_is_named_and_not_used(case, folder):
    content, message = HOSTILE_RECORDS[case]
    path = folder / f"{SHAPE}.json"
    path.write_bytes(
        content if isinstance(content, bytes) else json.dumps(record(**content)).encode()
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = dwtir.build(SHAPE, "tuned", target="cpu")
    assert [warning.category for warning in caught] == [database.RecordWarning, NotTunedWarning]
    assert str(path) in str(caught[0].message)
    assert re.search(message, str(caught[0].message))
    assert kernel.strategy == Cpu.choose(SHAPE, resolve("cpu"))
    assert kernel.provenance["chosen"] == "manual"


def test_a_tile_too_large_for_the_device_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path))
    path = tmp_path / "nvidia-h200" / f"{SHAPE}.json"
    path.parent.mkdir()
    for tile, message in (
        (SharedTile(thread_y=64, thread_x=64), "threads per block must be at most 1024"),
        (SharedTile(vthread_y=16), "virtual threads must be at most 8"),
    ):
        content = record("nvidia-h200", SharedTile()) | {"parameters": tile.parameters}
        path.write_text(json.dumps(content))
        with pytest.warns(database.RecordWarning, match=message):
            assert database.find(SHAPE, KNOWN_GPUS["nvidia-h200"]) is None
