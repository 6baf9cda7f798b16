"""Tuning records: read and written, damaged and hostile, by many processes at once; and which are built."""

import json
import multiprocessing
import os
import random
import re
import time
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm.s_tir import Schedule

import dwtir
from backends import H200
from dwtir import STRATEGIES, Epilogue, NotTunedError, NotTunedWarning, RecordError, Shape, database, files, traces
from dwtir.build import schedule_for
from dwtir.records import MAX_BYTES, Record, strategy_from_json
from dwtir.schedules import Cpu, Ladder, SplitImage
from kernels import CPU, EPILOGUE, SHAPE, TILE, check
from marks import parametrize, raises
from processes import run
from record_corpus import corpus


def record(tile=TILE, shape=SHAPE, target=CPU, seconds=1e-6, **about):
    return Record.measured(tile, shape, target, [seconds, seconds * 2], **about)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path))
    return tmp_path


@pytest.fixture
def path(tmp_path):
    """Where `record` goes, in a folder that is there."""
    found = record().path_in(tmp_path)
    found.parent.mkdir()
    return found


@pytest.fixture(scope="module")
def all_records():
    texts = """
        2x6x9x11_k3_s2x1_psame_m2 1x32x14x14_k7_psame_float16_nhwc 1x32x14x14_k7_psame_bfloat16
        1x32x14x14_k13_psame_float16_nhwc 1x32x14x14_k7_psame_float16_wgrad 9x32x7x7_k7_p3_float16_wgrad
        1x32x14x14_k7_psame_float16_nhwc_wgrad
        2x6x9x11_k3_s2_psame_dgrad 2x6x9x11_k3_s2_psame_wgrad 2x6x7x7_k3_psame
    """
    return [
        Record.measured(strategy.choose(shape, target), shape, target, [1e-5] * 64, seed=1)
        for shape, target, strategy in product(map(Shape.parse, texts.split()), (CPU, H200), STRATEGIES.values())
        if strategy.claims(shape, target)
    ]


def test_what_is_written_is_read(tmp_path, all_records):
    assert {record.strategy.name for record in all_records} == set(STRATEGIES)
    for number, record in enumerate(all_records):
        assert record.write(tmp_path / str(number))
        path = record.path_in(tmp_path / str(number))
        assert Record.read(path) == record
        assert path.stat().st_size < 0.8 * MAX_BYTES
        assert {file.name for file in path.parent.iterdir()} == {path.name, "versions.txt"}
        assert traces.recognise(record.trace, record.shape, record.target, Epilogue()) == record.strategy


def test_trace_is_of_drawn_values():
    sch, trace = traces.space_trace(TILE, SHAPE, CPU)
    drawn = Schedule(dwtir.compute.depthwise_conv2d(SHAPE, Epilogue()))
    variables, values = Cpu.draw(drawn, SHAPE, CPU, TILE.parameters)
    variables.apply(drawn, SHAPE)
    assert values == TILE
    assert traces.plain(drawn.trace.as_json()) == trace
    assert sch.mod.script() == schedule_for(SHAPE, Epilogue(), TILE).mod.script()


def test_trace_is_packed_or_plain(tmp_path, path):
    found = record()
    found.write(tmp_path)
    values = json.loads(path.read_text())
    assert len(values["trace"]) < len(traces.dump(found.trace)) / 2
    assert Record.read(path).trace == found.trace
    path.write_text(json.dumps(values | {"trace": found.trace}))
    assert Record.read(path) == found
    assert Record.read(path).as_json() == found.as_json()
    sizes = list(map(str, TILE.parameters.values()))
    path.write_text(path.read_text().replace(",".join(sizes), ", ".join(sizes)))
    assert Record.read(path).as_json() == found.as_json(), "spaces do not matter"


def test_brackets_in_strings_are_no_depth():
    values = {"trace": '{[\\"' * 20, "versions": "}]"}
    assert files.parse_json(json.dumps(values).encode()) == values
    with raises(RecordError, match="nested 13 deep"):
        files.parse_json(b'"{"' + b"[" * 13)


def test_tiles_outside_the_space_are_recorded(tmp_path):
    for tile in (Ladder("v3", 16, 16), Ladder("v4", 5, 7)):
        found = record(tile, target=H200)
        found.write(tmp_path, force=True)
        assert Record.read(found.path_in(tmp_path)).strategy == tile


def test_better_record_is_kept(tmp_path, path):
    for seconds, force, kept in ((2e-6, 0, 2e-6), (3e-6, 0, 2e-6), (1e-6, 0, 1e-6), (3e-6, 1, 3e-6)):
        assert record(seconds=seconds).write(tmp_path, force=bool(force)) == (seconds == kept)
        assert Record.read(path).run_secs[0] == kept
        assert not record(seconds=kept).write(tmp_path)
    path.write_text("{")
    assert record(seconds=9e-6).write(tmp_path), "an unreadable one is no better"
    with_steps = record(epilogue=Epilogue(("bias", "relu")))
    assert with_steps.write(tmp_path)
    assert with_steps.path_in(tmp_path) != path


@parametrize("package", ["apache-tvm", "dwtir"])
def test_record_survives_other_versions(package, path):
    values = record(versions={package: "99.0"}).as_json() | {"trace": ["whatever a later version writes"]}
    path.write_text(json.dumps(values))
    assert Record.read(path).strategy == TILE
    values["versions"] = record().as_json()["versions"]
    path.write_text(json.dumps(values))
    with raises(RecordError, match="the trace must be"):
        Record.read(path)


def test_wrong_measurements_are_refused():
    for times in ([], [0.0], [-1.0], [float("nan")], [float("inf")]):
        with raises(RecordError, match="run_secs"):
            Record.measured(TILE, SHAPE, CPU, times)
    with raises(dwtir.InvalidScheduleError, match="at most 64"):
        record(Cpu(64, 64, 1))
    with raises(RecordError, match="trials must be an int"):
        record(trials=-1)


def test_no_mutation_is_accepted(tmp_path):
    good = record(target=replace(CPU, name="cpu-unknown"))
    cases = dict(corpus(good.as_json()))
    assert len(cases) >= 200
    names = {}
    for number, (name, content) in enumerate(cases.items()):
        path = good.path_in(tmp_path / str(number))
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
        names[str(path)] = name
    child = run("-X", "faulthandler", Path(__file__).with_name("record_corpus.py"), tmp_path)
    results = dict(map(json.loads, child.stdout.splitlines()))
    assert results.keys() == names.keys()
    for path, error in results.items():
        if error is None:
            assert names[path].startswith("flip "), "only a digit may have changed"
        else:
            assert path in error
            assert len(error) < 2500, "a short reason"


@parametrize(
    "make",
    [Path.mkdir, lambda path: path.symlink_to(path), os.mkfifo, lambda path: None],
    ids=["folder", "link", "pipe", "nothing"],
)
def test_what_is_no_file(make, path):
    make(path)
    with raises(RecordError, match=r"\.json: not (a file|readable)"):
        Record.read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=20,
)


@given(st.data())
def test_any_json_is_refused_plainly(data):
    values = record().as_json()
    name = data.draw(st.sampled_from([*values, "all"]))
    changed = data.draw(JSON)
    part = values.get(name)
    if isinstance(part, dict) and data.draw(st.booleans()):
        changed = part | {data.draw(st.sampled_from(sorted(part))): changed}
    if name == "trace" and data.draw(st.booleans()):
        changed = json.loads(json.dumps(part))
        changed[0][data.draw(st.integers(0, len(changed[0]) - 1))] = data.draw(JSON)
    try:
        found = Record.from_json(changed if name == "all" else values | {name: changed})
    except dwtir.DwtirError:
        return
    found.strategy.check_use(found.shape, found.target)


def _write_for_ever(folder, seed, records):
    generator = random.Random(seed)
    log = os.open(folder / f"done-{seed}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        seconds = generator.uniform(1e-6, 1e-3)
        record = replace(generator.choice(records), run_secs=(seconds,))
        record.write(folder)
        os.write(log, f"{record.path_in(folder)} {seconds!r}\n".encode())


def test_killed_writers_lose_nothing(tmp_path):
    # Forked, the writers find the traces in memory and leave TVM alone.
    records = [Record.measured(TILE, replace(SHAPE, batch=n), CPU, [1.0]) for n in (2, 3, 4)]
    context = multiprocessing.get_context("fork")
    generator = random.Random(1)

    def start(seed):
        child = context.Process(target=_write_for_ever, args=(tmp_path, seed, records), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
            child.start()
        return child

    writers = list(map(start, range(8)))
    end = time.monotonic() + 6
    while time.monotonic() < end:
        time.sleep(generator.uniform(0.02, 0.3))
        victim = generator.randrange(8)
        writers[victim].kill()
        writers[victim].join()
        writers[victim] = start(len(list(tmp_path.glob("done-*"))) + 100)
    for writer in writers:
        writer.kill()
        writer.join()

    finished = {}
    for log in tmp_path.glob("done-*"):
        for line in log.read_text().split("\n")[:-1]:
            path, seconds = line.split()
            finished[path] = min(finished.get(path, 1.0), float(seconds))
    paths = database.record_paths(tmp_path)
    assert finished.keys() == set(map(str, paths))
    assert len(paths) == 3
    for record, path in zip(map(Record.read, paths), paths, strict=True):
        assert record.median_secs <= finished[str(path)], "no finished record is lost"
        assert record.write(tmp_path, force=True), "no lock is left held"
    assert {path.suffix for path in tmp_path.glob("cpu-*/*")} == {".json", ".txt"}, "the next writer clears up"


def test_versions_are_said_once(tmp_path, path):
    first, second = record(), record(versions={"dwtir": "99.0"})
    common = path.with_name("versions.txt")
    for found, left_out in ((first, True), (second, False), (first, True)):
        assert found.write(tmp_path, force=True)
        assert ("versions" not in json.loads(path.read_text())) == left_out
        assert Record.read(path) == found
    for damage in (lambda: common.write_bytes(b"\xff"), common.unlink):
        damage()
        with raises(RecordError, match="versions"):
            Record.read(path)


def test_another_architectures_record_is_not_used(folder):
    record(Ladder(), target=H200).write(folder)
    other = replace(H200, arch="sm_80")
    assert database.find(SHAPE, H200) is not None
    with pytest.warns(database.RecordWarning, match="arch must be 'sm_80', got 'sm_90'"):
        assert database.find(SHAPE, other) is None
    assert database.find(SHAPE, other) is None, "and warns once"
    small = replace(H200, max_threads_per_block=64)
    with pytest.warns(database.RecordWarning, match="at most 64 on nvidia-h200"):
        assert database.find(SHAPE, small) is None
    assert database.find(SHAPE, dwtir.Target("nvidia-l4", "cuda", "sm_89", 58)) is None
    assert database.find(replace(SHAPE, batch=3), H200) is None


def test_defaults_may_be_left_out():
    def read(parameters):
        return strategy_from_json({"strategy": "split_image", "parameters": parameters})

    assert read("2,1,14") == SplitImage(2, 1, 14)
    for few in ("2,1", {"thread_x": 2, "bands": 14, "parts": 1}):
        with raises(dwtir.InvalidScheduleError, match="has the parameters"):
            read(few)


def test_shipped_records_are_good():
    """What the strategies make now, few bytes, and not slower than the manual schedule."""
    paths = database.record_paths(database.shipped_folder())
    assert len(paths) >= 16
    assert sum(path.stat().st_size for path in paths) < 2**20
    for path in paths:
        record = Record.read(path)
        assert record.trials >= 32
        assert record.gain >= 1


# Kernels by records

MANUAL, OTHER = Cpu.choose(SHAPE, CPU), Cpu(1, 1, 1)
OTHERS = replace(CPU, name="cpu-of-others")


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
    with raises(NotTunedError, match=f"python -m dwtir.tune {SHAPE}") as error:
        tuned(on_miss="error")
    assert isinstance(error.value, LookupError)


def test_record_is_used(folder):
    record().write(folder)
    kernel = tuned(epilogue=EPILOGUE, on_miss="error")
    assert kernel.strategy == TILE != MANUAL
    assert kernel.provenance["chosen"] == "tuned"
    assert kernel.provenance["record"] == str(record().path_in(folder))
    check(kernel)
    record(OTHER, epilogue=EPILOGUE).write(folder)
    assert tuned(epilogue=EPILOGUE).strategy == OTHER
    assert tuned(epilogue="bias").strategy == TILE
    with raises(NotTunedError, match=rf"{SHAPE} --epilogue bias\+residual$"):
        tuned(epilogue="bias+residual", on_miss="error")
    record(OTHER, epilogue=Epilogue.of("bias+residual")).write(folder)
    assert tuned(epilogue="bias+residual").strategy == OTHER
    with raises(NotTunedError):
        tuned(replace(SHAPE, width=12), on_miss="error")


def test_gradient_takes_its_convolutions_record(folder):
    def gradient(form):
        shape = Shape.parse(f"1x8x12x12_k3_{form}")
        record(shape=shape).write(folder)
        return tuned(replace(shape, operation="grad_data"), on_miss="error")

    kernel = gradient("p1")
    assert kernel.strategy == TILE
    check(kernel)
    for form in ("p0", "p0x0x2x2", "s2_p1"):
        with raises(NotTunedError):
            gradient(form)


def test_records_are_looked_for_in_order(folder, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    record(OTHER).write(folder / "data" / "dwtir" / "tune_db")
    assert tuned().strategy == OTHER
    record().write(folder)
    assert tuned().strategy == TILE
    *_, shipped = database.folders()
    assert shipped == database.shipped_folder()


# Above are many more that `Record.read` refuses.
@parametrize(
    ("content", "message"),
    [
        (json.dumps(record(target=OTHERS).as_json()), "device must be 'cpu-.*', got 'cpu-of-others'"),
        ("{'schema': 1}", "not readable as JSON"),
    ],
)
def test_hostile_record_is_not_used(content, message, folder):
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
