"""The benchmark: its command on the CPU, its arithmetic, and PyTorch."""

import csv
import re
from dataclasses import replace
from functools import partial

import pytest

import dwtir
from backends import H200
from dwtir import Epilogue, InvalidShapeError, Shape
from dwtir.bench import Row, bench_layer, layers
from dwtir.bench.__main__ import main
from dwtir.bench.report import row_cells, summary, text
from dwtir.bench.results import Results
from dwtir.kernel import Timing
from dwtir.target import resolve
from dwtir.tune.tasks import ONE_FORM
from kernels import LAYER, layer
from marks import devices, parametrize, raises
from processes import command, run

CPU = ["--target", "cpu", "--baselines", "none"]


def timing(microseconds, spread=0.0):
    median = microseconds * 1e-6
    return Timing(median, median * (1 - spread / 2), median * (1 + spread / 2), 7)


def row(text, own, spread=0.0, **peers):
    names = {"nchw": "torch NCHW native", "nhwc": "torch NHWC cudnn"}
    timings = {"dwtir": timing(own, spread)} | {names[key]: timing(peer) for key, peer in peers.items()}
    return Row(Shape.parse(text), Epilogue(), H200, True, timings, ("torch NCHW cudnn: wrong",))


def test_ratios_are_of_the_fastest_and_the_floor():
    found = row("64x256x56x56_k3_p1", 100, nchw=400, nhwc=150)
    assert (found.ratio("NCHW"), found.ratio()) == pytest.approx((4.0, 1.5))
    assert found.best() == ("torch NHWC cudnn", pytest.approx(150e-6))
    assert found.floor == pytest.approx(found.shape.least_bytes / 4.25e12)
    warm = replace(found, cold=False)
    assert (warm.floor, row_cells([warm])[1][2]) == (None, "-")
    assert row("64x256x56x56_k3_p1", 100).ratio() is None
    large = row("32x128x56x56_k31_p15", 700)
    assert large.floor == pytest.approx(large.shape.flop / 67e12), "its arithmetic"


def test_summary_names_the_worst():
    rows = [row("1x8x9x9_k3_p1", 10, nchw=20, nhwc=5), row("1x8x7x7_k3_p1", 10, spread=0.3, nchw=80, nhwc=20)]
    same, best, floor, wide, left = summary(rows)
    mean = "by geometric mean over 2 rows"
    assert f"same layout: 4.00x {mean}, 0 below 1; worst 2.00x" in same
    assert f"any layout: 1.00x {mean}, 1 below 1; worst 0.50x" in best
    assert best.endswith(rows[0].shape.brief)
    assert floor.startswith("share of the floor")
    assert wide.startswith("1 rows")
    assert left == "left out: torch NCHW cudnn: wrong"
    head, first, second = row_cells(rows)
    assert (head[0], second[1]) == ("layer", "10.00~")
    assert first[1:] == ("10.00", "0", "20.00", "2.00x", "5.00", "0.50x", "torch NHWC cudnn")


def test_doubtful_rows_are_marked():
    quiet, spread = (row("1x8x9x9_k3_p1", 10, spread, nchw=20) for spread in (0.0, 0.3))
    loud = replace(quiet, load=0.5)
    assert [found.doubt[0] for found in (quiet, loud, spread)] == [False, True, False]
    assert min([loud, spread, quiet], key=lambda found: found.doubt) is quiet
    assert row_cells([loud])[1][1:4:2] == ("10.00!", "20.00!")
    assert "1 rows were measured while others used the CPU; they are marked !" in summary([loud])


named = partial(layers.named, forms=ONE_FORM)


def test_words_name_layers():
    def shapes(*words, **others):
        return {layer.task.shape for layer in named(words, **others)}

    found = named(["network", "mobilenet_v2", "mnasnet1_0"], epilogue="relu")
    assert {str(layer.task.epilogue) for layer in found} == {"relu"}
    assert len({str(layer.task) for layer in found}) == len(found)
    assert ("mobilenet_v2", "mnasnet1_0") in {layer.networks for layer in found}
    assert {layer.task.shape for layer in found} < shapes("suite")
    assert len(named(["seeds"])) == 8
    forward, operations = shapes("network", "mobilenet_v2"), ("grad_data", "grad_weight")
    gradients = {replace(shape, operation=operation) for shape in forward for operation in operations}
    assert shapes("network", "mobilenet_v2", operations=operations) == gradients
    (one,) = named([LAYER])
    assert (one.task.shape, one.networks) == (Shape.parse(LAYER), ())


@parametrize("words", [["network"], ["suite", LAYER], ["seeds", "2017"], ["sweets"]])
def test_other_words_are_refused(words):
    with raises(InvalidShapeError):
        named(words)


REFUSED = [
    ([*CPU, f"{LAYER}_dgrad", "--epilogue", "relu"], "InvalidEpilogueError: only the forward"),
    ([*CPU, "seeds", "--operation", "grad_data"], "InvalidShapeError: operations are chosen for"),
    ([*CPU, LAYER, "--plot", "all.txt"], "ArgumentError: a plot is a folder or a file"),
    ([*CPU, LAYER, "--target", "opencl"], "the target of a benchmark is cuda or cpu, got 'opencl'"),
    (["suite", "--end-to-end"], "ArgumentError: --end-to-end is of network NAME ..., got suite"),
    (["network", "small", "--end-to-end", "--rounds", "0"], "ArgumentError: --rounds must be >= 1, got 0"),
    (["network", "small", "--end-to-end", "--target", "opencl"], "InvalidTargetError"),
]


@parametrize(("arguments", "message"), REFUSED)
def test_what_the_command_refuses(arguments, message, capsys):
    out, errors = command(main, capsys)(*arguments, status=1)
    assert message in errors
    assert out == ""


def test_command(tmp_path):
    table, rows, picture = (tmp_path / name for name in ("rows.csv", "rows.json", "all.png"))
    options = [*CPU, "--rounds", "2", "--csv", table, "--json", rows, "--plot", picture]
    child = run("-m", "dwtir.bench", *options, LAYER, "2x4x8x8_k3_s2_psame_bfloat16_nhwc_wgrad")
    lines = list(csv.DictReader(table.read_text().splitlines()))
    assert lines[0]["shape"] == str(Shape.parse(LAYER))
    assert all(float(line["dwtir median_us"]) > 0 for line in lines)
    found = Results.read(rows)
    assert found.about["dwtir"] == dwtir.__version__
    assert found.about["command"].endswith("--schedule manual --baselines none --rounds 2")
    printed, expected = child.stdout.splitlines(), text(found)
    assert (printed[0], len(printed)) == (expected[0], len(expected))
    assert [str(row.shape) for row in found.rows] == [line["shape"] for line in lines]
    assert "no plot of speed-ups: no row has a time of PyTorch" in child.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_run_goes_on_where_it_was(tmp_path, capsys):
    path, run = tmp_path / "rows.json", command(main, capsys)
    words = [*CPU, "--json", path, "--resume", LAYER, "1x8x9x9_k3", "1x8x7x7_k3", "--rounds"]
    run(*words, 2)
    done = Results.read(path)
    steady, spread, missing = done.rows
    steady = replace(steady, timings={"dwtir": timing(123)}, load=0.0)
    spread = replace(spread, timings={"dwtir": timing(123, spread=0.5)})
    replace(done, rows=[steady, spread]).write(path)
    _, errors = run(*words, 2)
    assert steady.shape.brief not in errors
    again = Results.read(path)
    assert [row.shape for row in again.rows] == [steady.shape, spread.shape, missing.shape]
    assert (again.target.bandwidth or 0) >= (done.target.bandwidth or 0) > 0
    assert (done.about["sessions"], again.about["sessions"]) == ("1", "2")
    assert again.rows[0].own == pytest.approx(steady.own)
    assert again.rows[1].own != pytest.approx(spread.own)
    _, errors = run(*words, 3, status=1)
    assert re.search("RecordError.*command must be", errors)


def test_gradient_is_bounded_as_its_convolution():
    forward, gradient = row("1x8x9x9_k3_p1", 10), row("1x8x9x9_k3_p1_wgrad", 10)
    assert gradient.floor == forward.floor
    assert (gradient.short, forward.short) == ("8x9x9 k3x3 wgrad", "8x9x9 k3x3")
    assert gradient.facts()["shape"].endswith("_wgrad")


@devices
@parametrize("about", ["k3_psame", "k5_s2_psame_m2_nhwc", "k3_d2_p2_float16_nhwc", "k7_p3_bfloat16"])
@parametrize("ending", ["", "+bias+relu", "+scale_shift+residual+silu", "_dgrad", "_wgrad"])
def test_pytorch_beside_us(device, about, ending):
    shape, epilogue = layer(f"2x16x20x18_{about}{ending}")
    found = bench_layer(shape, resolve(device), epilogue=epilogue, cold=device == "cuda", rounds=1)
    assert found.wrong == ()
    assert None not in (found.best("NCHW"), found.best("NHWC"), found.ratio())
