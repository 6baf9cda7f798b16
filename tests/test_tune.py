"""The tuner on the CPU, as its users run it: real kernels, real records, real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dwtir
from dwtir import DepthwiseConv2dShape
from dwtir.schedules import Cpu, SharedTile
from dwtir.target import resolve
from dwtir.tune import Trial, tune
from dwtir.tune.search import SEARCHES, GridSearch, RandomSearch

LAYER = "1x8x15x17_k3_psame"
GPU = resolve("nvidia-h200")


@pytest.mark.parametrize("text", [LAYER, f"{LAYER}_nhwc", "2x6x9x9_k5_s2_p2_m2_float16_nhwc"])
@pytest.mark.parametrize("target", ["cpu", "nvidia-h200"])
def test_random_proposals_are_valid_new_and_repeatable(text: str, target: str) -> None:
    shape, device = DepthwiseConv2dShape.parse(text), resolve(target)
    first = RandomSearch(shape, device, seed=3).propose(40)
    for strategy in first:
        strategy.check_use(shape, device)
    assert len(first) == len(set(first)) == 40 if target != "cpu" else len(set(first)) == len(first)
    assert RandomSearch(shape, device, seed=3).propose(40) == first
    assert RandomSearch(shape, device, seed=4).propose(40) != first


def test_a_small_space_ends() -> None:
    shape, device = DepthwiseConv2dShape.parse("1x1x1x1_k1"), resolve("cpu")
    search = RandomSearch(shape, device, seed=0)
    found = [strategy for _ in range(30) for strategy in search.propose(16)]
    assert search.propose(16) == []
    assert len(set(found)) == len(found)


def test_the_grid_is_the_articles() -> None:
    """Every number of threads in y and x, as far as one block may have so many."""
    shape = DepthwiseConv2dShape.parse("1x256x96x96_k3_p1")
    found = GridSearch(shape, GPU, seed=0).propose(100)
    threads = {(tile.thread_y, tile.thread_x) for tile in found if isinstance(tile, SharedTile)}
    assert threads == {(y, x) for y in (1, 2, 4, 8, 16, 32) for x in (1, 2, 4, 8, 16, 32)}
    with pytest.raises(dwtir.InvalidScheduleError, match="grid search is the article's, for NCHW"):
        GridSearch(DepthwiseConv2dShape.parse(f"{LAYER}_nhwc"), GPU, seed=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_session_records_what_build_then_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    seen: list[tuple[Trial, Trial]] = []
    outcome = tune(
        f"{LAYER}_{dtype}",
        target="cpu",
        trials=8,
        folder=tmp_path,
        report=lambda trial, best: seen.append((trial, best)),
    )
    assert outcome.written
    assert [trial.number for trial in outcome.trials] == list(range(8))
    assert outcome.trials[0].strategy == Cpu.choose(outcome.record.shape, resolve("cpu"))
    assert not any(trial.error for trial in outcome.trials)
    bests = [best.seconds for _, best in seen]
    assert bests == sorted(bests, key=lambda seconds: -(seconds or 0.0))
    manual = outcome.record.manual_median_secs
    assert manual is not None
    assert outcome.record.median_secs <= manual

    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path))
    kernel = dwtir.build(f"{LAYER}_{dtype}", "tuned", target="cpu", on_miss="error")
    assert kernel.strategy == outcome.record.strategy
    assert kernel.provenance["record"] == str(outcome.path)


def test_a_session_ends_by_its_budget(tmp_path: Path) -> None:
    outcome = tune(LAYER, target="cpu", trials=10_000, budget=0.0, folder=tmp_path)
    assert len(outcome.trials) == 1
    assert outcome.record.strategy == outcome.trials[0].strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": "luck"}, f"search must be one of {', '.join(SEARCHES)}, got 'luck'"),
        ({"trials": 0}, "trials must be at least 1, got 0"),
        ({"target": "opencl"}, "tuning needs a device with a clock"),
        ({"epilogue": "tan"}, "unknown epilogue step 'tan'"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(dwtir.DwtirError, match=message):
        tune(LAYER, **{"target": "cpu"} | options)  # type: ignore[arg-type]


def test_a_gpu_that_is_not_here_is_refused() -> None:
    with pytest.raises(dwtir.ToolchainError):
        tune(LAYER, target="sm_75", trials=1)


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dwtir.tune", "--target", "cpu", "--db", str(tmp_path)]
    child = subprocess.run(
        [*command, "--trials", "4", "--json", "--epilogue", "bias+relu", LAYER, "1x4x8x8_k3"],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert [line["trials"] for line in lines] == [4, 4]
    for line in lines:
        assert Path(line["path"]).is_file()
        assert 0 < line["median_us"] <= line["manual_us"]
    plain = subprocess.run([*command, "--trials", "2", LAYER], capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    assert "manual" in plain.stdout
    bad = subprocess.run([*command, "1x2x3"], capture_output=True, text=True)
    assert bad.returncode == 1
    assert "InvalidShapeError" in bad.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_session_on_the_gpu(tmp_path: Path, layout: str) -> None:
    import torch

    text = f"2x32x28x28_k3_psame_float16_{layout}"
    outcome = tune(text, target="cuda", trials=12, folder=tmp_path, epilogue="relu")
    assert sum(trial.seconds is not None for trial in outcome.trials) >= 6
    assert not any("wrong result" in trial.error for trial in outcome.trials)
    os.environ["DWTIR_TUNE_DB"] = str(tmp_path)
    try:
        kernel = dwtir.build(text, "tuned", epilogue="relu", on_miss="error")
    finally:
        del os.environ["DWTIR_TUNE_DB"]
    assert kernel.strategy == outcome.record.strategy
    ones = torch.ones(kernel.shape.data_shape, dtype=torch.float16, device="cuda")
    weight = torch.ones(kernel.shape.weight_shape, dtype=torch.float16, device="cuda")
    assert np.isclose(kernel(ones, weight).float().max().item(), 9.0)
