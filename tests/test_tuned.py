"""Kernels by tuning records: which record is used, and what is said of one that is not."""

import json
import re
import warnings
from dataclasses import replace

import pytest

import dwtir
from dwtir import Epilogue, NotTunedError, NotTunedWarning, Shape, database
from dwtir.records import Record
from dwtir.schedules import Cpu
from kernels import CPU, EPILOGUE, SHAPE, TILE, check

MANUAL, OTHER = Cpu.choose(SHAPE, CPU), Cpu(1, 1, 1)
OTHERS = replace(CPU, name="cpu-of-others")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The first of the databases, which is empty."""
    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path))
    return tmp_path


def record(tile=TILE, shape=SHAPE, target=CPU, **about):
    return Record.measured(tile, shape, target, [1e-6], **about)


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
    record().write(folder)
    kernel = tuned(epilogue=EPILOGUE, on_miss="error")
    assert kernel.strategy == TILE != MANUAL
    assert kernel.provenance["chosen"] == "tuned"
    assert kernel.provenance["record"] == str(record().path_in(folder))
    check(kernel)
    record(OTHER, epilogue=EPILOGUE).write(folder)
    assert tuned(epilogue=EPILOGUE).strategy == OTHER
    assert tuned(epilogue="bias").strategy == TILE
    with pytest.raises(NotTunedError, match=rf"{SHAPE} --epilogue bias\+residual$"):
        tuned(epilogue="bias+residual", on_miss="error")
    record(OTHER, epilogue=Epilogue.of("bias+residual")).write(folder)
    assert tuned(epilogue="bias+residual").strategy == OTHER
    with pytest.raises(NotTunedError):
        tuned(replace(SHAPE, width=12), on_miss="error")


def test_a_gradient_takes_the_record_of_the_convolution_that_it_is(folder):
    def gradient(form):
        shape = Shape.parse(f"1x8x12x12_k3_{form}")
        record(shape=shape).write(folder)
        return tuned(replace(shape, operation="grad_data"), on_miss="error")

    kernel = gradient("p1")
    assert kernel.strategy == TILE
    check(kernel)
    for form in ("p0", "p0x0x2x2", "s2_p1"):
        with pytest.raises(NotTunedError):
            gradient(form)


def test_records_are_looked_for_in_order(folder, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    record(OTHER).write(folder / "data" / "dwtir" / "tune_db")
    assert tuned().strategy == OTHER
    record().write(folder)
    assert tuned().strategy == TILE
    *_, shipped = database.folders()
    assert shipped == database.shipped_folder()


# `test_records` has many more that `Record.read` refuses.
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps(record(target=OTHERS).as_json()), "device must be 'cpu-.*', got 'cpu-of-others'"),
        ("{'schema': 1}", "not readable as JSON"),
    ],
)
def test_a_hostile_record_is_not_used(content, message, folder):
    path = record().path_in(folder)
    path.parent.mkdir()
    path.write_text(content)
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
