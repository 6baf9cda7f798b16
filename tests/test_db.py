"""The tuning database as MetaSchedule sees it, and ``python -m dwtir.db`` as a process."""

import json

import numpy as np
import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

import dwtir
import processes
from backends import H200
from dwtir import Epilogue, Shape, compute, database, traces
from dwtir.build import schedule_for
from dwtir.database import TuneDB
from dwtir.db import main
from dwtir.records import Record
from dwtir.schedules import Cpu, Ladder
from dwtir.verify import verify_record
from kernels import CPU, SHAPE, TILE
from marks import raises
from processes import command

NHWC = Shape.parse("1x32x14x14_k5_psame_float16_nhwc")
NAME = f"{SHAPE}.json"
LLVM, CUDA = CPU.tvm(), H200.tvm()


def module(shape=SHAPE, *steps):
    return tvm.IRModule({"main": compute.depthwise_conv2d(shape, Epilogue(steps))})


def query(db, target=LLVM, *about):
    return db.query_schedule(module(*about), target, "main")


def script(*steps):
    return schedule_for(SHAPE, Epilogue(steps), TILE).mod.script()


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "db"
    Record.measured(TILE, SHAPE, CPU, [2e-6], manual_median_secs=3e-6).write(found)
    Record.measured(Cpu.choose(NHWC, CPU), NHWC, CPU, [5e-6, 4e-6]).write(found)
    Record.measured(Ladder(), SHAPE, H200, [1e-6], manual_median_secs=1e-6).write(found)
    return found


# As a MetaSchedule database


def test_metaschedule_compiles_with_our_records(folder):
    with TuneDB(folder, "cpu"):
        current = ms.database.Database.current()
        found = ms.tir_integration.compile_tir(current, module()["main"], LLVM)
    assert found.mod.script() == script()
    arrays = [np.ones(extents, "float32") for extents in (SHAPE.data_shape, SHAPE.weight_shape, SHAPE.out_shape)]
    tensors = list(map(tvm.runtime.tensor, arrays))
    tvm.compile(found.mod, target=LLVM)["main"](*tensors)
    np.testing.assert_array_equal(tensors[-1].numpy(), dwtir.reference.depthwise_conv2d(SHAPE, *arrays[:2]))


def test_it_answers_as_a_database(folder):
    db = TuneDB(folder, "cpu")
    assert len(db) == 2
    assert len(TuneDB([folder], "nvidia-h200")) == 1
    assert len(TuneDB(folder / "none", "cpu")) == 0
    assert db.has_workload(module())
    assert not db.has_workload(module(Shape.parse("1x8x9x9_k3")))
    work = db.commit_workload(module())
    assert [list(map(float, r.run_secs)) for r in db.get_top_k(work, 5)] == [[2e-6]]
    assert list(db.get_top_k(work, 0)) == []
    assert len(db.get_all_tuning_records()) == 2
    record = db.query_tuning_record(module(), LLVM, "main")
    replayed = Schedule(module())
    record.trace.apply_to_schedule(replayed, remove_postproc=False)
    assert replayed.mod.script() == script()
    assert db.query_ir_module(module(), LLVM, "main").script() == script()
    assert db.query(module(), LLVM, kind="schedule").mod.script() == script()


def test_other_epilogues_take_the_plain_record(folder):
    assert query(TuneDB(folder, "cpu"), LLVM, SHAPE, "bias", "relu").mod.script() == script("bias", "relu")


def test_another_device_is_a_miss(folder):
    db = TuneDB(folder, "cpu")
    assert query(db, CUDA) is None
    assert db.query_tuning_record(module(), tvm.target.Target({"kind": "llvm", "mcpu": "nocona"}), "main") is None
    gpu = TuneDB(folder, H200)
    assert query(gpu, CUDA) is not None
    assert query(gpu) is None
    small = tvm.target.Target({"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 128}, host={"kind": "llvm"})
    assert query(gpu, small) is None, "256 threads"


def test_what_only_claims_to_be_ours_is_unknown(folder):
    db = TuneDB(folder, "cpu")
    ours = module()["main"]
    liar = module(NHWC)["main"].with_attr("dwtir.shape", str(SHAPE))
    garbled = ours.with_attr("dwtir.shape", "../../etc/passwd")
    wrong = [{"main": func} for func in (liar, garbled, ours.without_attr("dwtir.shape"))]
    for other in (*map(tvm.IRModule, (*wrong, {"f": ours}, {})), schedule_for(SHAPE, Epilogue(), TILE).mod):
        assert not db.has_workload(other)
        assert db.query_schedule(other, LLVM, "main") is None
        workload = db.commit_workload(other)
        assert list(db.get_top_k(workload, 1)) == []
        db.commit_tuning_record(ms.database.TuningRecord(Schedule(module()).trace, workload, [1.0], LLVM))
    assert len(db) == 2


def test_better_trial_is_committed_as_a_record(tmp_path):
    db = TuneDB(tmp_path, "cpu")
    work = db.commit_workload(module())

    def commit(sch, *times):
        db.commit_tuning_record(ms.database.TuningRecord(sch.trace, work, list(times), LLVM))

    def committed():
        return Record.read(tmp_path / CPU.name / NAME)

    tile = Cpu(2, 1, 2)
    (drawn, _), (better, _) = (traces.space_trace(one, SHAPE, CPU) for one in (TILE, tile))
    commit(drawn, 2e-6, 3e-6)
    assert committed().strategy == TILE
    better.enter_postproc()
    commit(better, 1e-6)
    assert committed().strategy == tile
    commit(drawn, 4e-6)
    commit(drawn, 1e10)
    assert (committed().strategy, committed().trials) == (tile, 2)
    foreign = Schedule(module())
    foreign.parallel(foreign.get_loops("epilogue")[0])
    with pytest.warns(database.RecordWarning, match="one of dwtir's strategies"):
        commit(foreign, 1e-9)
    assert committed().strategy == tile


# As a command


@pytest.fixture
def run(capsys):
    return command(main, capsys)


def test_list_and_show(folder, run):
    db = "--db", folder
    out, _ = run("list", *db)
    assert out == processes.run("-m", "dwtir.db", "list", *db).stdout
    head, *rows = out.splitlines()
    assert head.split()[:4] == ["device", "shape", "epilogue", "strategy"]
    assert len(rows) == 3
    path = folder / CPU.name / NAME
    assert rows[1].split() == [CPU.name, str(SHAPE), "none", "cpu", "2.00", "3.00", "1.50x", str(path)]
    path.with_name("bad.json").write_text("{")
    out, errors = run("list", *db, "--json")
    assert {row["device"] for row in json.loads(out)} == {CPU.name, "nvidia-h200"}
    assert "bad.json: not readable as JSON" in errors
    out, _ = run("show", path)
    assert "rows=3, cols=1, lanes=2" in out
    step = '["SampleCategorical", []'
    assert step not in out
    assert step in run("show", path, "--trace")[0]
    assert run("show", *db, "2x6x9x11_k3_s2x1_psame_m2")[0].count(NAME) == 2
    assert "no record of 1x1x1x1" in run("show", *db, "1x1x1x1_k1", status=1)[1]
    assert "--db must be a folder" in run("list", "--db", folder / "none", status=1)[1]
    run("list", "--what", status=2)


def test_verify_and_prune(folder, run):
    db = "--db", folder
    out, _ = run("verify", *db)
    assert "3 good, 0 bad" in out
    assert out.count("built and right on") == 2
    path = folder / "nvidia-h200" / NAME
    path.write_text(path.read_text().replace("v4,16,16", "v4,16,128"))
    out, _ = run("verify", *db, status=1)
    assert "2 good, 1 bad" in out
    assert f"BAD:  {path}: ladder" in out
    assert "would be removed" in run("prune", *db, status=1)[0]
    assert path.exists()
    assert str(path) in run("prune", *db, "--yes")[0]
    assert not path.exists()
    assert len(database.record_paths(folder)) == 2
    assert run("prune", *db)[0] == "nothing to remove\n"


def test_verify_notices_wrong_results(monkeypatch):
    record = Record.measured(TILE, SHAPE, CPU, [1e-6], epilogue=Epilogue(("bias",)))
    assert "built and right" in verify_record(record)
    exact = dwtir.reference.depthwise_conv2d
    monkeypatch.setattr(dwtir.reference, "depthwise_conv2d", lambda *a, **k: exact(*a, **k) + 1e-2)
    with raises(dwtir.RecordError, match="is wrong on"):
        verify_record(record)


def importing(path):
    return "import", "--db", path / "new", "--target", "cpu", path / "ms"


def test_metaschedule_exchange(folder, tmp_path, run):
    assert run("export", "--db", folder, "--device", CPU.name, tmp_path / "ms")[0].startswith("2 records")
    assert query(ms.database.JSONDatabase(work_dir=str(tmp_path / "ms"))).mod.script() == script()
    assert "is there already" in run("export", "--db", folder, tmp_path / "ms", status=1)[1]
    assert run(*importing(tmp_path))[0].startswith("2 records written")
    assert Record.read(tmp_path / "new" / CPU.name / NAME).strategy == TILE
    out, _ = run(*importing(tmp_path))
    assert out.startswith("0 records written")
    assert "2 not better" in out


def test_index_map_survives_the_exchange(tmp_path, run):
    """MetaSchedule writes that of a strided layer's trace in another form than TVM."""
    shape = Shape.parse("1x8x15x17_k3_s2_psame")
    record = Record.measured(Cpu.choose(shape, CPU), shape, CPU, [2e-6])
    assert any(instruction[0] == "TransformLayout" for instruction in record.trace[0])
    record.write(tmp_path / "db")
    run("export", "--db", tmp_path / "db", tmp_path / "ms")
    assert run(*importing(tmp_path))[0].startswith("1 records written")
    assert Record.read(record.path_in(tmp_path / "new")).strategy == record.strategy


def test_damaged_lines_are_refused(folder, tmp_path, run):
    run("export", "--db", folder, "--device", CPU.name, tmp_path / "ms")
    path = tmp_path / "ms" / "database_tuning_record.json"
    first, second = path.read_text().splitlines()
    lines = ["", "{", "[]", "null", '[0,[[],[1.0],{"kind":"llvm"},[]]]', second[:-40], "[" * 5000]
    lines += [first.replace("SampleCategorical", "Tensorize"), first.replace("[[0,", "[[-1,")]
    lines += [first.replace("[0,[", "[9,[", 1), first.replace('"mcpu"', '"cpu"'), second]
    path.write_text("\n".join(lines))
    works = path.with_name("database_workload.json")
    works.write_text(works.read_text() + '["1", "AAAA"]\n["1"]\n\n["1", "AAAAAAAAAAB7fQ=="]\n')
    out, errors = run(*importing(tmp_path), status=1)
    assert out.startswith("1 records written")
    assert errors.count("not imported: ") == len(lines) - 1 + 4
    assert "No such file" in run("import", "--db", tmp_path / "new", tmp_path / "nowhere", status=1)[1]
