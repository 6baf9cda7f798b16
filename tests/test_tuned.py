"""Kernels by tuning records: which record is used, and what is said of one that is not."""

import json
import re
import warnings
from dataclasses import asdict, replace

import pytest

import dwtir
from dwtir import Epilogue, NotTunedError, NotTunedWarning, database
from dwtir.records import Record
from dwtir.schedules import Cpu
from kernels import CPU, EPILOGUE, SHAPE, TILE, check

OWN = {name: value for name, value in asdict(CPU).items() if name != "name"} | {"features": list(CPU.features)}
MANUAL = Cpu.choose(SHAPE, CPU)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder for this CPU's records, of a database that is otherwise empty."""
    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path / "records"))
    found = tmp_path / "records" / CPU.name
    found.mkdir(parents=True)
    return found


def record(tile=TILE, **about):
    return Record.measured(tile, SHAPE, CPU, [1e-6], **about)


def tuned(shape=SHAPE, **about):
    return dwtir.build(shape, "tuned", target="cpu", **about)


def test_without_a_record_there_is_one_warning(folder):
    with pytest.warns(NotTunedWarning) as caught:
        kernel = tuned()
    (warning,) = caught
    assert all(text in str(warning.message) for text in (f"python -m dwtir.tune {SHAPE}", CPU.name))
    assert warning.filename == __file__
    assert kernel.strategy == MANUAL
    assert (kernel.provenance["chosen"], kernel.provenance["schedule"]) == ("manual", "tuned")
    with pytest.raises(NotTunedError, match=f"python -m dwtir.tune {SHAPE}") as error:
        tuned(on_miss="error")
    assert isinstance(error.value, LookupError)


def test_a_record_is_used(folder):
    record().write(folder.parent)
    kernel = tuned(epilogue=EPILOGUE, on_miss="error")
    assert kernel.strategy == TILE != MANUAL
    assert kernel.provenance["chosen"] == "tuned"
    assert kernel.provenance["record"] == str(folder / f"{SHAPE}.json")
    check(kernel)
    record(Cpu(1, 1, 1), epilogue=EPILOGUE).write(folder.parent)
    assert tuned(epilogue=EPILOGUE).strategy == Cpu(1, 1, 1)
    assert tuned(epilogue="bias").strategy == TILE
    with pytest.raises(NotTunedError, match=rf"{SHAPE} --epilogue bias\+residual$"):
        tuned(epilogue="bias+residual", on_miss="error")
    record(Cpu(1, 1, 1), epilogue=Epilogue.of("bias+residual")).write(folder.parent)
    assert tuned(epilogue="bias+residual").strategy == Cpu(1, 1, 1)
    with pytest.raises(NotTunedError):
        tuned(replace(SHAPE, width=12), on_miss="error")


def test_a_gradient_takes_the_record_of_the_convolution_that_it_is(folder):
    for form, is_same in (("p1", True), ("p0", False), ("p0x0x2x2", False), ("s2_p1", False)):
        shape = dwtir.DepthwiseConv2dShape.parse(f"1x8x12x12_k3_{form}")
        Record.measured(TILE, shape, CPU, [1e-6]).write(folder.parent)
        gradient = replace(shape, operation="grad_data")
        if is_same:
            kernel = tuned(gradient, on_miss="error")
            assert kernel.strategy == TILE
            check(kernel)
        else:
            with pytest.raises(NotTunedError):
                tuned(gradient, on_miss="error")


def test_records_are_looked_for_in_order(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    record(Cpu(1, 1, 1)).write(tmp_path / "data" / "dwtir" / "tune_db")
    assert tuned().strategy == Cpu(1, 1, 1)
    record().write(folder.parent)
    assert tuned().strategy == TILE
    *_, shipped = database.folders()
    assert shipped == database.shipped_folder()


# `test_records` has many more that `Record.read` refuses.
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"device": "cpu-of-others", "target": OWN}, "device must be 'cpu-.*', got 'cpu-of-others'"),
        ("{'schema': 1}", "not readable as JSON"),
    ],
)
def test_a_hostile_record_is_not_used(content, message, folder):
    path = folder / f"{SHAPE}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(record().as_json() | content))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = tuned()
        tuned()
    kinds = [database.RecordWarning, NotTunedWarning, NotTunedWarning]
    assert [warning.category for warning in caught] == kinds, "once a file"
    assert str(path) in str(caught[0].message)
    assert re.search(message, str(caught[0].message))
    assert kernel.strategy == MANUAL
    assert kernel.provenance["chosen"] == "manual"
