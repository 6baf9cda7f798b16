"""The tuner on the CPU, as its users run it: real kernels, real records, real processes."""

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

import dwtir
from backends import H200
from dwtir import Shape
from dwtir.build import compile_kernel
from dwtir.records import Record, strategy_to_json
from dwtir.schedules import Cpu, SharedTile
from dwtir.tune import Settings, Task, Trial, testbed, tune, worker
from dwtir.tune.__main__ import main
from dwtir.tune.devices import Channel, Device, Job, Result
from dwtir.tune.fleet import Fleet
from dwtir.tune.journal import Journal
from dwtir.tune.search import SEARCHES, GridSearch, open_search
from dwtir.tune.session import tune_task
from dwtir.tune.worker import Worker
from kernels import CPU, LAYER
from marks import gpu, layouts, parametrize, raises
from processes import run
from watcher import Watcher


def task(text):
    return Task(Shape.parse(text))


TASK = task(LAYER)
MANUAL = Cpu.choose(TASK.shape, CPU)
both_searches = parametrize("search", ["random", "evolutionary"])


@parametrize("text", [LAYER, f"{LAYER}_nhwc", "2x6x9x9_k5_s2_p2_m2_float16_nhwc"])
@parametrize("device", [CPU, H200], ids=("cpu", "gpu"))
@both_searches
def test_proposals_are_valid_and_new(text, device, search):
    def propose(seed):
        found = open_search(search, task(text), device, seed)
        return found.propose(16) + found.propose(16)

    first = propose(3)
    for strategy in first:
        strategy.check_use(task(text).shape, device)
    assert len(first) == len(set(first)) >= 8
    assert propose(3) == first
    assert propose(4) != first


@both_searches
def test_small_space_ends(search):
    found, proposed = open_search(search, task("1x1x1x1_k1"), CPU, seed=0), []
    while batch := found.propose(16):
        proposed += batch
    assert len(set(proposed)) == len(proposed) > 0


@both_searches
def test_what_was_told_is_not_proposed(search):
    first = open_search(search, TASK, H200, seed=0).propose(8)
    again = open_search(search, TASK, H200, seed=0)
    for strategy in first:
        again.tell(strategy, 1e-6)
    assert not set(again.propose(48)) & set(first)


def test_evolution_finds_more_than_chance():
    """In 64 trials, where the best tile is known and none of the first ones."""
    work = task("128x384x14x14_k7_psame")
    goal = {"rows": 2, "cols": 7, "thread_x": 2, "thread_y": 2, "thread_z": 32}

    def best(name, seed):
        search, costs = open_search(name, work, H200, seed), []
        while len(costs) < 64:
            for strategy in search.propose(16):
                own = strategy.parameters
                costs.append(1e-6 * (1 + sum(abs(np.log2(own.get(k, 1e3) / v)) for k, v in goal.items())))
                search.tell(strategy, costs[-1])
        return min(costs)

    chance, evolved = ([best(name, seed) for seed in range(5)] for name in ("random", "evolutionary"))
    assert np.median(evolved) < np.median(chance)
    assert max(evolved) <= np.median(chance)


def built_as_recorded(monkeypatch, outcome, shape, **about):
    monkeypatch.setenv("DWTIR_TUNE_DB", str(outcome.path.parents[1]))
    kernel = dwtir.build(shape, "tuned", **about, on_miss="error")
    assert kernel.strategy == outcome.record.strategy
    return kernel


def test_grid_is_the_articles():
    found = GridSearch(task("1x256x96x96_k3_p1"), H200, seed=0).propose(100)
    threads = {(tile.thread_y, tile.thread_x) for tile in found if isinstance(tile, SharedTile)}
    assert threads == set(product((1, 2, 4, 8, 16, 32), repeat=2))
    with raises(dwtir.InvalidScheduleError, match="grid search is the article's, for NCHW"):
        GridSearch(task(f"{LAYER}_nhwc"), H200, seed=0)


@parametrize(("dtype", "search", "epilogue"), [("float32", "evolutionary", None), ("bfloat16", "random", "bias+silu")])
def test_build_uses_what_is_recorded(tmp_path, monkeypatch, dtype, search, epilogue):
    about = {"target": "cpu", "epilogue": epilogue}
    outcome = tune(f"{LAYER}_{dtype}", **about, settings=Settings(search=search, trials=8), folder=tmp_path)
    assert outcome.written
    assert [trial.number for trial in outcome.trials] == list(range(8))
    assert outcome.trials[0].strategy == Cpu.choose(outcome.record.shape, CPU)
    assert not any(trial.error for trial in outcome.trials)
    assert outcome.record.gain >= 1
    kernel = built_as_recorded(monkeypatch, outcome, f"{LAYER}_{dtype}", **about)
    assert kernel.provenance["record"] == str(outcome.path)


class _WorkerHere(Worker, Channel):
    def call(self, message, seconds):
        return self.handle(message)

    def close(self):
        pass


def fleet_of(connect, kind=Device):
    return closing(Fleet([kind("cpu", connect, threads=1)], window=8))


@pytest.fixture(scope="module")
def fleet():
    with fleet_of(_WorkerHere) as found:
        yield found


def run_session(fleet, folder, **settings):
    about = {"folder": folder, "display": Watcher(), "stop": threading.Event()}
    return tune_task(TASK, CPU, fleet, Settings(search="random", **settings), **about)


def test_session_goes_on(fleet, tmp_path):
    first = run_session(fleet, tmp_path, trials=6)
    assert run_session(fleet, tmp_path, trials=6).new_trials == 0
    second = run_session(fleet, tmp_path, trials=10)
    assert (second.new_trials, len(second.trials)) == (4, 10)
    measured = {trial.strategy for trial in second.trials}
    assert len(measured) == 10
    assert measured >= {trial.strategy for trial in first.trials}
    assert run_session(fleet, tmp_path, trials=4, resume=False).record.trials == 4
    assert Record.read(first.path).trials == 4


def test_session_ends_by_its_budget(fleet, tmp_path):
    outcome = run_session(fleet, tmp_path, trials=None, budget=0.0)
    assert len(outcome.trials) == 1
    assert outcome.record.strategy == outcome.trials[0].strategy


def test_session_ends_by_its_patience(fleet, tmp_path):
    outcome = run_session(fleet, tmp_path, trials=None, patience=5)
    best = min(range(len(outcome.trials)), key=lambda i: outcome.trials[i].seconds or 1.0)
    # What was on its way when patience ended is still counted.
    assert len(outcome.trials) >= best + 5


def kill_worker():
    for child in psutil.Process().children():
        if "dwtir.tune.worker" in child.cmdline():
            child.kill()


def test_dead_workers_cost_no_session(tmp_path):
    settings, display = Settings(search="random", trials=8), Watcher({3: kill_worker})
    outcome = tune(LAYER, target="cpu", settings=settings, folder=tmp_path, display=display)
    (note,) = display.notes
    assert "signal 9" in note or "gone" in note
    assert [trial.number for trial in outcome.trials] == list(range(8))
    assert not outcome.failures  # nobody was being measured twice when a worker died
    assert outcome.written


@contextmanager
def held_back(monkeypatch, slow, manual=MANUAL):
    """Let the slow ones compile only afterwards, and the manual one not at once."""
    released = threading.Event()

    def compile_slowly(*given):
        if given[-1] in slow:
            released.wait()
        if given[-1] == manual:
            time.sleep(0.5)  # which is no proposal
        return compile_kernel(*given)

    monkeypatch.setattr(worker, "compile_kernel", compile_slowly)
    try:
        yield
    finally:
        released.set()


def test_slow_builds_cost_no_session(tmp_path, monkeypatch):
    slow = open_search("random", TASK, CPU, 0).propose(7)[1:]
    monkeypatch.setattr(worker, "_BUILD_SECONDS", 0.2)
    connect = Mock(side_effect=_WorkerHere)
    with fleet_of(connect) as fleet, held_back(monkeypatch, slow):
        outcome = run_session(fleet, tmp_path, trials=12)
    late = [trial for trial in outcome.trials if trial.cause == "too long to build"]
    assert {trial.strategy for trial in late} >= set(slow)
    assert connect.call_count == 1 + len(late)
    assert len(outcome.trials) == 12
    assert outcome.trials[0].strategy == MANUAL
    assert outcome.trials[0].times


def test_testbeds_sums_fit_a_half():
    assert testbed.open_testbed(task("1x1x256x256_k3_psame_float16_wgrad"), CPU)


class _Untimed(testbed.Testbed):
    """A device elsewhere, for which candidates are built and no more."""

    def __init__(self, task, target):
        self.task, self.target = task, target


def test_slow_build_delays_no_other(monkeypatch):
    manual, slow, quick = SharedTile(), SharedTile(thread_y=16), SharedTile(thread_y=4)
    hands = Worker(_Untimed)
    about = {"shape": str(TASK.shape), "epilogue": [], "target": asdict(H200), "threads": 3}
    assert "cause" not in hands.handle({"op": "task", **about})
    proposed = [strategy_to_json(tile) | {"proposed": True} for tile in (slow, quick)]
    with held_back(monkeypatch, [slow], manual):
        assert hands.handle({"op": "submit", "jobs": [strategy_to_json(manual), *proposed]}) == {}
        assert hands.handle({"op": "built"}) == {"place": 0}, "the choice by hand comes first"
        del hands._building[0]
        assert hands.handle({"op": "built"}) == {"place": 1}
    hands._building[0].future.result()
    assert hands.handle({"op": "built"}) == {"place": 0}, "the oldest of those that are built"
    hands.handle({"op": "drop"})


def test_what_is_given_back_is_gone():
    class Failing(Device):
        def take_up(self, task, target):
            pass

        def measure(self, queue, limit, stop):
            job = queue.take()
            if job is not None:
                yield Result(job)
                while not stop():
                    time.sleep(0.01)
                queue.give_back([job])

    with fleet_of(_WorkerHere, Failing) as fleet:
        with fleet.working_on(TASK, CPU):
            fleet.submit([Job(0, MANUAL)])
            assert fleet.result(20.0) is not None
        assert fleet.take() is None


def test_journal_passes_over_damage(tmp_path):
    journal = Journal(tmp_path, TASK, CPU)
    assert journal.read() == []
    good = Trial(0, MANUAL, (1e-6, 2e-6), device="cpu")
    journal.append(good)
    line = journal.path.read_text()
    damage = (
        ('"number": 0', '"number": "0"'),
        ("1e-06", "-1.0"),
        ("1e-06", "NaN"),
        ('"made_by": "dwtir', '"made_by": "other'),
        (f'"strategy": "{MANUAL.name}"', '"strategy": "os.system"'),
        ('"cause": ""', '"cause": 3'),
    )
    damaged = [line.replace(*change) for change in damage]
    assert line not in damaged
    with journal.path.open("a") as file:
        file.writelines(['{"torn": \n', "[]\n", *damaged, '{"torn'])
    other = replace(good, number=1, strategy=replace(MANUAL, rows=1 + MANUAL.rows))
    journal.append(other)
    assert journal.read() == [good, other]
    journal.clear()
    assert journal.read() == []


@parametrize(
    ("settings", "target", "message"),
    [
        ({"search": "luck"}, "cpu", f"search must be one of {', '.join(SEARCHES)}, got 'luck'"),
        ({"trials": 0}, "cpu", "trials must be at least 1, got 0"),
        ({"seed": 2**63}, "cpu", "seed must be of 64 bits"),
        ({"patience": -1}, "cpu", "patience must be at least 1, got -1"),
        ({"budget": float("nan")}, "cpu", "budget must be at least 0 seconds, got nan"),
        ({}, "opencl", "tuning needs a device with a clock"),
        ({}, "sm_75", "sm_75|NVIDIA driver"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, settings, target, message):
    with raises(dwtir.DwtirError, match=message):
        tune(LAYER, target=target, settings=Settings(**settings), folder=tmp_path)


# The command


COMMAND = ("-m", "dwtir.tune", "--target", "cpu")


def test_command(tmp_path, capsys):
    layers = tmp_path / "layers.json"
    other = {"batch": 1, "in_channels": 4, "height": 8, "width": 8, "kernel": 3}
    layers.write_text(json.dumps([LAYER, other]))
    options = ["--db", tmp_path, "--trials", 4, "--epilogue", "bias", "--file", layers]
    events = [json.loads(line) for line in run(*COMMAND, *options, "--json").stdout.splitlines()]
    ends = [event for event in events if event["event"] == "end"]
    assert [end["trials"] for end in ends] == [4, 4]
    for end in ends:
        assert Record.read(Path(end["path"])).trials == 4
        assert 0 < end["median_us"] <= end["manual_us"]
    assert sum(event["event"] == "trial" for event in events) == 8

    assert main([*COMMAND[2:], *map(str, options)]) == 0
    assert capsys.readouterr().out.count("manual") > 2, "the records, and nothing measured again"


@parametrize(
    ("arguments", "message"),
    [
        (["1x2x3"], "InvalidShapeError"),
        ([], "nothing to tune"),
        (["--network", "no-such-network"], "no-such-network"),
        ([LAYER, "--search", "grid"], "the grid search is the article's"),
        ([LAYER, "--gpus", "0"], "--gpus are no CPU"),
    ],
)
def test_command_names_what_is_wrong(tmp_path, arguments, message, capsys):
    assert main([*COMMAND[2:], "--db", str(tmp_path), *arguments]) == 1
    assert message in "".join(capsys.readouterr())


@parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_keep_the_measured(tmp_path, number):
    options = ("--db", tmp_path, "--trials", "100000", "--search", "random", "--json")
    command, pipe = [sys.executable, *COMMAND, *options, LAYER], subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    seen = 0
    for line in child.stdout:
        seen += json.loads(line)["event"] == "trial"
        if seen == 3:
            workers = psutil.Process(child.pid).children()
            child.send_signal(number)
            break
    rest, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "Traceback" not in errors
    (end,) = [event for line in rest.splitlines() if (event := json.loads(line))["event"] == "end"]
    assert end["interrupted"] is True
    assert end["trials"] >= 3
    assert Record.read(Path(end["path"])).trials == end["trials"]
    assert psutil.wait_procs(workers, 10)[1] == [], "a worker outlived the session"


@gpu
@layouts
@both_searches
def test_session_on_the_gpu(tmp_path, monkeypatch, layout, search):
    import torch

    text = f"2x32x28x28_k3_psame_float16_{layout}"
    settings, display = Settings(search=search, trials=24), Watcher({6: kill_worker})
    outcome = tune(text, target="cuda", settings=settings, folder=tmp_path, epilogue="relu", display=display)
    assert len(display.notes) == 1
    assert sum(bool(trial.times) for trial in outcome.trials) >= 20
    assert "wrong result" not in outcome.failures
    assert {"gpu", "driver", "cuda"} <= set(outcome.record.versions)
    kernel = built_as_recorded(monkeypatch, outcome, text, epilogue="relu")
    extents = kernel.shape.data_shape, kernel.shape.weight_shape
    ones = (torch.ones(extent, dtype=torch.float16, device="cuda") for extent in extents)
    assert np.isclose(kernel(*ones).float().max().item(), 9.0)


@gpu
def test_times_are_cold(tmp_path):
    """On a layer that the L2 cache just holds, no more bytes a second than memory gives."""
    found = tune("20x64x56x56_k3_p1", target="cuda", settings=Settings(trials=2), folder=tmp_path).record
    assert found.shape.least_bytes / found.median_secs < 1.1 * found.target.bandwidth
