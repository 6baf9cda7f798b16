"""Results as files: JSON, pages, pictures, the articles' tables, and what the committed ones generate."""

import csv
import shutil
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backends import H200
from dwtir import ARTICLE_STEPS, ArgumentError, Epilogue, RecordError, Shape, suite
from dwtir.bench import Row, articles, machine, readme
from dwtir.bench.__main__ import main
from dwtir.bench.articles import LIBRARY, PUBLISHED_US, TABLES, TUNED
from dwtir.bench.plots import panels, plot
from dwtir.bench.report import markdown, text
from dwtir.bench.results import Results
from dwtir.kernel import Timing
from dwtir.target import resolve
from marks import gpu, parametrize, raises
from processes import command, python

PICTURE_BYTES = 80_000


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def timing(microseconds):
    return Timing(*(microseconds * part / 1e6 for part in (1, 0.99, 1.02)), 7)


def results(*, articles=True, networks=True):
    layers = (
        ("1x32x112x112_k3_p1", "", ("mobilenet_v2", "mnasnet1_0")),
        ("1x96x56x56_k7_p3", "bias+relu", ("mobilenet_v2",)),
        ("1x96x56x56_k5_p2_s2_m2_float16", "", ("mnasnet1_0",)),
    )
    target = replace(H200, features=())
    timings = {"dwtir": timing(3.5), "torch NCHW native": timing(9), "torch NHWC cudnn": timing(3)}
    left = ("torch NCHW cudnn: its error is 1.0e-01, 1.0e-05 is allowed",)
    rows = [
        Row(Shape.parse(f"{layer}_{layout}"), Epilogue.of(steps), target, True, timings, left, names * networks)
        for layout in ("nchw", "nhwc")
        for layer, steps, names in layers
    ]
    cases = {case: timing(us / 4) for case, us in PUBLISHED_US.items()}
    cases |= {case: "no tuning record" for case in cases if case.way == TUNED}
    about = {"device": H200.name, "GPU": "NVIDIA H200", "dwtir": "0.1.0", "torch": "2.11"}
    return Results(target, about, rows, cases if articles else {})


@parametrize("name", ["rows.json", "rows.json.xz"])
def test_results_come_back_as_they_were(name):
    written, path, again = results(), Path(name), Path(f"again-{name}")
    written.write(path)
    read = Results.read(path)
    assert (text(read), markdown(read)) == (text(written), markdown(written))
    assert [row.networks for row in read.rows] == [row.networks for row in written.rows]
    read.write(again)
    assert again.read_bytes() == path.read_bytes()
    path.write_bytes(path.read_bytes()[:-20])
    with raises(RecordError, match="not readable"):
        Results.read(path)


DAMAGES = [
    ('"format": 2', '"format": 3', "its format must be 2, got 3"),
    ('"us":[[3.5,3.465,3.57,7]', '"us":[null', "no time of dwtir for 1x32x112x112"),
    ('"us":[[3.5,', '"us":[[-3.5,', "times must be positive, p20 <= median <= p80"),
    ("_k3_", "_k0_", "kernel must be an integer >= 1"),
    ('"networks":[0', '"networks":[7', "not a benchmark's results"),
    ('"way":"v1"', '"way":"v9"', "no article has Case"),
    ('"rows"', '"lines"', "not a benchmark's results: KeyError"),
]


@parametrize(("old", "new", "message"), DAMAGES)
def test_damaged_results_are_refused(old, new, message):
    path = Path("rows.json").absolute()
    results().write(path)
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new, 1))
    with raises(RecordError, match=message) as caught:
        Results.read(path)
    assert str(path) in str(caught.value)


def png_size(path):
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:])


def test_pictures_in_folder_and_file():
    found = results()
    paths = [Path(f"plots/h200-{name}.png") for name in ("speedup", "roofline", "ladder")]
    assert plot(found, Path("plots"), prefix="h200-", source="made from this") == [f"wrote {path}" for path in paths]
    for path in paths:
        assert min(png_size(path)) > 300
        assert b"made from this" in path.read_bytes()
    assert plot(found, Path("all.png")) == ["wrote all.png"]
    assert png_size(Path("all.png"))[0] > png_size(paths[0])[0]
    plot(results(networks=False), Path("all.svg"))
    assert "<svg" in Path("all.svg").read_text()


def test_pictures_that_cannot_be_drawn_say_why():
    found = results(articles=False)
    found = replace(found, rows=[replace(row, timings={"dwtir": timing(3)}) for row in found.rows])
    assert panels(found) == ["roofline"]
    assert plot(found, Path("all.png")) == [
        *("wrote all.png", "no plot of speed-ups: no row has a time of PyTorch"),
        "no ladder: its steps have no times (not asked for)",
    ]
    needs_gpu = replace(found, rows=[], cases=dict.fromkeys(PUBLISHED_US, "needs a GPU"))
    assert "no ladder: its steps have no times (needs a GPU)" in plot(needs_gpu, Path("none.png"))
    assert not Path("none.png").exists()
    with raises(ArgumentError, match=r"a folder or a file that ends in .png, .svg, .pdf"):
        plot(found, Path("all.txt"))


def test_plots_need_matplotlib_before_any_work(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out, errors = command(main, capsys)("1x8x9x9_k3", "--target", "cpu", "--plot", "all.png", status=1)
    assert errors.startswith("ToolchainError: plots need matplotlib; pip install")
    assert out == ""


def test_report(capsys):
    found, run = results(), command(main, capsys)
    found.write(Path("rows.json"))
    out, _ = run("report", "rows.json", "--markdown", "page.md", "--csv", "rows.csv", "--plot", "plots")
    assert out.splitlines() == text(found)
    assert Path("page.md").read_text().splitlines() == markdown(found)
    lines = csv.DictReader(Path("rows.csv").read_text().splitlines())
    assert [line["shape"] for line in lines] == [str(row.shape) for row in found.rows]
    names = ["rows-ladder.png", "rows-roofline.png", "rows-speedup.png"]
    assert sorted(path.name for path in Path("plots").iterdir()) == names
    shutil.copy("rows.json", "other.json")
    _, errors = run("report", "rows.json", "other.json", "--plot", "all.png", status=1)
    assert "plots of 2 results go to a folder, got all.png" in errors
    assert "RecordError: missing.json: not a file" in run("report", "missing.json", status=1)[1]


def test_readme_command(capsys):
    file, page, run = Path("bench/results/bench-h200.json.xz"), Path("README.md"), command(main, capsys)
    file.parent.mkdir(parents=True)
    page.write_text(f"before\n\n{readme.BEGIN}\nformer text\n{readme.END}\n\nafter\n")
    assert "no results" in run("readme", status=1)[1]
    results().write(file)
    run("readme")
    content = page.read_text()
    assert content == readme.current(page)
    assert (content.partition("\n")[0], content[-7:]) == ("before", "\nafter\n")
    assert "former text" not in content
    assert "|nvidia-h200|NCHW, cold|3|2.57x|0|2.57x: 32x112x112 k3x3 float32|" in content
    assert_current(page)
    results(articles=False).write(file)
    with raises(AssertionError):
        assert_current(page)
    page.write_text("no marks\n")
    with raises(RecordError, match="lacks the lines"):
        readme.current(page)


def assert_current(page):
    assert page.read_text(encoding="utf-8") == readme.current(page)
    for picture, source in readme.pictures(page).items():
        assert readme.digest(source).encode() in picture.read_bytes(), picture
        assert picture.stat().st_size < PICTURE_BYTES, picture
    made = {*(page.parent / "bench/results").glob("bench-*")} - {*readme.sources(page)}
    assert made <= {*readme.pictures(page)}


def test_what_the_results_generate_is_current():
    assert_current(Path(__file__).parents[1] / "README.md")


def test_load_of_others_is_seen():
    others = machine.OtherLoad()
    python("import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass")
    assert min(others.seconds()) > 0.3


def test_machine_is_described():
    target = resolve("cpu")
    found = machine.about(target)
    assert found["device"] == target.name
    assert found["CPU"]
    assert found["cores"].split()[0].isdecimal()
    assert {"python", "dwtir", "apache-tvm", "torch"} <= found.keys()
    rated = machine.with_rates(target)
    limits = machine.limits(rated)
    assert limits.startswith(f"{rated.bandwidth / 1e9:.0f} GB/s and ")
    assert limits.endswith("measured by copies and by NumPy's product of matrices")
    assert machine.with_rates(H200) == H200
    assert machine.limits(H200) == "4250 GB/s and 67000 GFLOP/s, known"
    assert machine.limits(replace(H200, name="sm_90", bandwidth=None, fp32_rate=None)) == "not known for sm_90"
    assert machine.limits(replace(H200, bandwidth=4e12)) == "4000 GB/s and 67000 GFLOP/s, measured by copies"


def test_clocks_that_cannot_be_read_say_why(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert machine.gpu_clocks("0") == ({}, "nvidia-smi is not on the PATH")
    clocks = machine.Clocks(resolve("cpu"))
    clocks.sample()
    assert clocks.about() == {}


@gpu
def test_gpu_copies_and_has_clocks():
    here = replace(resolve("cuda"), bandwidth=None)
    rated = machine.with_rates(here)
    assert rated == replace(here, bandwidth=rated.bandwidth)
    assert rated.bandwidth > 0
    clocks = machine.Clocks(here)
    clocks.sample()
    assert clocks.about().keys() in ({"driver", "SM clock", "memory clock"}, {"clocks"})


# The articles' tables


def test_tables_hold_every_number():
    shown = {case for table in TABLES for line, bases in table.lines.items() for case in (line, *bases)} - {None}
    assert shown == set(PUBLISHED_US)
    assert ARTICLE_STEPS.keys() == {table.article.name for table in TABLES}
    assert {case.way for case in shown} <= {LIBRARY, TUNED}.union(*ARTICLE_STEPS.values())
    assert all(len(bases) == len(table.against) for table in TABLES for bases in table.lines.values())


def test_numbers_are_those_of_the_suite():
    published = {(shape, us) for shape, times in suite.seed_rows() for us in times.values()}
    assert {(Shape.parse(case.shape), us) for case, us in PUBLISHED_US.items()} == published


PRINTED = [
    ("Blocks of 32 x 32 outputs", 1, [1.6, 2.9]),
    ("Kernel size and channel multiplier", 0, [2.8, 4.6, 4.6, 7.1]),
    # The article has 2.3 for v1, which its own times contradict.
    ("From naive to tuned", 0, [1.0, 4.3, 43.2, 325.8, 411.3, 940.1, 47.3]),
    ("From naive to tuned", 1, [4.3, 10.1, 7.5, 1.3, 2.3]),
]


@parametrize(("title", "column", "printed"), PRINTED)
def test_ratios_are_the_articles(title, column, printed):
    (table,) = (table for table in TABLES if table.title == title)
    pairs = [(bases[column], case) for case, bases in table.lines.items() if bases[column]]
    assert [round(PUBLISHED_US[base] / PUBLISHED_US[case], 1) for base, case in pairs] == printed


def test_table_has_both_ratios():
    times = {case: Timing(us * 2e-6, us * 2e-6, us * 2e-6, 7) for case, us in PUBLISHED_US.items()}
    ladder = TABLES[-1]
    missing = {case: "no tuning record" for case in ladder.lines if case.way == TUNED}
    head, naive, first, *_, tuned, library = articles.table_cells(ladder, times | missing)
    assert head == ("layer", "schedule", "T4", "here", "over naive", "here", "over the step before", "here")
    assert naive[4:] == ("1.00x", "1.00x", "", "")
    assert first[2:6] == ("768.7", "1537.40", "4.28x", "4.28x")
    assert tuned[2:] == ("3.5", "no tuning record", "940.11x", "-", "2.29x", "-")
    assert library[1] == "PyTorch, here PyTorch"


def test_command_shows_every_table(capsys):
    out, _ = command(main, capsys)("--target", "cpu", "--baselines", "none", "--warm", "--rounds", "1", "seeds")
    for table in TABLES:
        _, begin, rest = out.partition(f"\n{table.article.name}: {table.title}\n")
        assert begin
        lines = rest.split("\n\n")[0].splitlines()[1:]
        assert len(lines) == len(table.lines)
        assert all(articles.NEEDS_GPU in line for line in lines)


@gpu
def test_all_cases_are_measured_on_a_gpu():
    found = articles.measure(resolve("cuda"), baselines=True, rounds=2)
    missing = {(case.way, why) for case, why in found.items() if isinstance(why, str)}
    assert missing <= {(TUNED, "no tuning record")}
