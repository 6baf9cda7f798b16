"""The benchmark: its command on the CPU, its arithmetic, and PyTorch beside it where that is."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dwtir
from dwtir import DepthwiseConv2dShape, Epilogue
from dwtir.bench import Row, bench_layer
from dwtir.bench.report import summary, table
from dwtir.kernel import Timing
from dwtir.target import KNOWN_GPUS, resolve

LAYER = "1x8x15x17_k3_psame"
H200 = KNOWN_GPUS["nvidia-h200"]


def timing(microseconds: float, spread: float = 0.0) -> Timing:
    median = microseconds * 1e-6
    return Timing(median, median * (1 - spread / 2), median * (1 + spread / 2), 7)


def row(text: str, own: float, spread: float = 0.0, **peers: float) -> Row:
    names = {"nchw": "torch NCHW native", "nhwc": "torch NHWC cudnn"}
    layouts = {"nchw": "NCHW", "nhwc": "NHWC"}
    timings = {"dwtir": timing(own, spread)}
    shape = DepthwiseConv2dShape.parse(text)
    used = {"dwtir": shape.layout}
    for key, microseconds in peers.items():
        timings[names[key]] = timing(microseconds)
        used[names[key]] = layouts[key]
    return Row(shape, Epilogue(), H200, True, timings, used, ("torch NCHW cudnn: wrong",))


def test_ratios_are_of_the_fastest_peer() -> None:
    found = row("64x256x56x56_k3_p1", 100, nchw=400, nhwc=150)
    assert found.ratio("NCHW") == pytest.approx(4.0)
    assert found.ratio() == pytest.approx(1.5)
    assert found.best() == ("torch NHWC cudnn", pytest.approx(150e-6))
    assert found.floor == pytest.approx(found.shape.least_bytes / 4.25e12)
    assert row("64x256x56x56_k3_p1", 100).ratio() is None


def test_the_floor_of_a_large_kernel_is_its_arithmetic() -> None:
    found = row("32x128x56x56_k31_p15", 700)
    assert found.floor == pytest.approx(found.shape.flop / 67e12)


def test_the_summary_names_the_worst() -> None:
    rows = [
        row("1x8x9x9_k3_p1", 10, nchw=20, nhwc=5),
        row("1x8x7x7_k3_p1", 10, spread=0.3, nchw=80, nhwc=20),
    ]
    same, best, floor, wide, left = summary(rows)
    assert "same layout: 4.00x by geometric mean over 2 rows, 0 below 1; worst 2.00x" in same
    assert "any layout: 1.00x by geometric mean over 2 rows, 1 below 1; worst 0.50x" in best
    assert best.endswith(str(rows[0].shape))
    assert floor.startswith("share of the floor")
    assert wide.startswith("1 rows")
    assert left == "left out: torch NCHW cudnn: wrong"
    head, first, second = table(rows)
    assert head.split()[0] == "layer"
    assert first.split()[1:] == [
        "10.00",
        "0",
        "20.00",
        "2.00x",
        "5.00",
        "0.50x",
        "torch",
        "NHWC",
        "cudnn",
    ]
    assert second.split()[1] == "10.00~"


def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dwtir.bench", "--target", "cpu", "--baselines", "none"]
    files = ["--csv", str(tmp_path / "rows.csv"), "--json", str(tmp_path / "rows.json")]
    child = subprocess.run(
        [*command, "--rounds", "2", *files, LAYER, "2x4x8x8_k3_s2_psame_bfloat16_nhwc"],
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    with (tmp_path / "rows.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert lines[0]["shape"] == str(DepthwiseConv2dShape.parse(LAYER))
    assert all(float(line["dwtir median_us"]) > 0 for line in lines)
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["about"]["dwtir"] == dwtir.__version__
    assert len(found["rows"]) == 2
    bad = subprocess.run([*command, "network"], capture_output=True, text=True)
    assert bad.returncode == 1
    assert "network is followed by a name" in bad.stderr


@pytest.mark.gpu  # not for the GPU itself in the case of the CPU: torch is where the GPU is
@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "text",
    [
        "2x16x20x18_k3_psame",
        "2x16x20x18_k5_s2_psame_m2_nhwc",
        "2x16x20x18_k3_d2_p2_float16_nhwc",
        "2x16x20x18_k7_p3_bfloat16",
    ],
)
@pytest.mark.parametrize("steps", [None, "bias+relu", "scale_shift+residual+silu"])
def test_pytorch_beside_us(target: str, text: str, steps: str | None) -> None:
    found = bench_layer(
        DepthwiseConv2dShape.parse(text), resolve(target), epilogue=Epilogue.of(steps), rounds=2
    )
    assert found.wrong == ()
    assert {layout for name, layout in found.layouts.items() if name != "dwtir"} == {"NCHW", "NHWC"}
    assert found.ratio() is not None
