"""What a tuning session shows: JSON lines, plain lines, a live panel, and its plot."""

import json
import threading
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from dwtir import Epilogue, Shape
from dwtir.records import Record
from dwtir.schedules import RegisterWindow, SharedTile
from dwtir.target import resolve
from dwtir.tune.display import JsonDisplay, LiveDisplay, PlainDisplay, open_display
from dwtir.tune.outcome import Outcome, Task, Trial, floor_seconds
from dwtir.tune.plot import plot
from marks import parametrize
from processes import python

H200, UNKNOWN = resolve("nvidia-h200"), resolve("tesla-t4")
FIRST = Task(Shape.parse("1x256x96x96_k3_psame"))
TASKS = (FIRST, Task(Shape.parse("8x64x56x56_k7_s2_psame"), Epilogue(("bias", "relu"))))
EXTRA = {"log": "logs/tune.jsonl", "plot": "out/[best].png"}
TASK = {"shape": str(FIRST.shape), "epilogue": "none"}
NAMES = TASK | {"device": "nvidia-h200"}
GB_PER_S = FIRST.shape.least_bytes / 16e-6 / 1e9
RATE = f"{GB_PER_S:.0f} GB/s"
BROKEN = ValueError("no kernel\nfor [this]")
DIED = "a worker died; a new one was started"


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    return Terminal()


def outcome_of(task, target=H200, manual=2.4e-05):
    """Make an outcome of six trials, of which three failed; the best takes 16 us."""
    tile = RegisterWindow.choose(task.shape, target)
    trials = (
        Trial(0, tile, (24e-6, 25e-6, 23e-6), device="gpu 0"),
        Trial(1, tile, cause="too many registers", error="ptxas: line 1\nline 2"),
        Trial(2, tile, (20e-6,), device="gpu 1"),
        Trial(3, tile, cause="timed out", error="after 10 s"),
        Trial(4, tile, (16e-6, 16e-6), device="gpu 0"),
        Trial(5, tile, cause="timed out", error="after 11 s"),
    )
    about = {"epilogue": task.epilogue, "manual_median_secs": manual, "trials": 6}
    record = Record.measured(tile, task.shape, target, [15e-6, 16e-6, 18e-6], **about)
    return Outcome(task, "random", record, record.path_in(Path("db")), True, trials, 5, 12.34)


def share_of_floor(task):
    return f"{100 * floor_seconds(task.shape, H200) / 16e-6:.0f}"


def play(kind, target=H200, stream=None):
    """Show a session: a task with a trial from before, one without a limit, one refused."""
    outcomes = [outcome_of(task, target) for task in TASKS]
    outcomes[1] = replace(outcomes[1], interrupted=True, written=False)
    stream = stream or StringIO()
    with kind(stream) as display:
        for index, outcome in enumerate(outcomes, 1):
            display.begin(outcome.task, index, 3, target, 64 if index == 1 else None, 1)
            best = manual = outcome.trials[0]
            for trial in outcome.trials[1:]:
                best = trial if trial.times else best
                display.trial(trial, best, manual)
            display.note(DIED)
            display.end(outcome)
        display.fail(FIRST, BROKEN)
        display.close(outcomes, EXTRA)
    return outcomes, stream.getvalue()


@pytest.fixture
def played():
    outcomes, text = play(JsonDisplay)
    return outcomes, list(map(json.loads, text.splitlines()))


def test_json_has_all_calls(played):
    outcomes, events = played
    task = ["begin", *["trial"] * 5, "note", "end"]
    assert [event["event"] for event in events] == [*task, *task, "fail", "close"]
    assert events[0] == {"event": "begin", **NAMES, "index": 1, "count": 3, "trials": 64, "done": 1}
    assert events[6] == {"event": "note", "text": DIED}
    assert (events[8]["trials"], events[8]["epilogue"]) == (None, "bias+relu")
    assert events[-2] == {"event": "fail", **TASK, "cause": "ValueError", "error": str(BROKEN)}
    assert events[-1] == {"event": "close", **EXTRA, "tasks": 2, "gain": pytest.approx(1.5)}
    assert outcomes[0].record.gain == pytest.approx(1.5)


def test_json_tells_all_of_a_trial(played):
    outcomes, (_, failed, timed, *_) = played
    tile = outcomes[0].trials[0].strategy
    same = {"shape": TASK["shape"], "strategy": "register_window", "parameters": tile.parameters}
    for event in (failed, timed):
        assert event | same == event
        assert event["manual_us"] == pytest.approx(24)
    assert (failed["number"], failed["median_us"], failed["best_us"]) == (1, None, 24)
    assert (failed["cause"], failed["error"]) == ("too many registers", "ptxas: line 1\nline 2")
    assert timed["median_us"] == timed["best_us"] == pytest.approx(20)
    assert (timed["number"], timed["worker"], timed["cause"]) == (2, "gpu 1", "")


def test_json_tells_all_of_an_outcome(played):
    outcomes, events = played
    first, second = (event for event in events if event["event"] == "end")
    times = {"median_us": 16, "p20_us": 15, "p80_us": 18, "manual_us": 24, "gain": 1.5}
    times |= {"gb_per_s": GB_PER_S, "floor_share": floor_seconds(FIRST.shape, H200) / 16e-6}
    about = NAMES | {"event": "end", "strategy": "register_window", "parameters": outcomes[0].record.parameters}
    about |= {"trials": 6, "new_trials": 5, "failed": 3, "failures": {"too many registers": 1, "timed out": 2}}
    about |= {"seconds": 12.34, "path": str(outcomes[0].path), "written": True, "interrupted": False}
    assert first == about | {name: pytest.approx(value) for name, value in times.items()}
    assert (second["written"], second["interrupted"]) == (False, True)


def test_unknowns_are_null_or_a_dash():
    outcome = outcome_of(FIRST, UNKNOWN, manual=None)
    with JsonDisplay(events := StringIO()) as json_lines, PlainDisplay(lines := StringIO()) as plain:
        for display in (json_lines, plain):
            display.begin(FIRST, 1, 1, UNKNOWN, None, 0)
            display.trial(outcome.trials[1], None, None)
            display.trial(outcome.trials[2], outcome.trials[2], None)
            display.end(outcome)
            display.close([outcome], {})
    text = lines.getvalue()
    assert "- % of floor, - manual" in text
    assert "manual - us, gain -, - % of floor" in text
    assert "gain, geometric mean" not in text
    _, trial, _, end, close = map(json.loads, events.getvalue().splitlines())
    unknown = ("best_us", "manual_us", "gain", "gb_per_s", "floor_share")
    assert [trial[name] for name in unknown] == [None] * 5
    assert end["manual_us"] is end["gain"] is end["floor_share"] is None
    assert close["gain"] is None


def test_plain_lines_have_the_numbers():
    outcomes, text = play(PlainDisplay)
    lines, share = text.splitlines(), share_of_floor(FIRST)
    assert lines[0] == f"task 1 of 3 on nvidia-h200: {FIRST}, 1/64 trials"
    bests = [line for line in lines if line.startswith("  ")]
    assert ["best 24.00 us" in line for line in bests] == [True, False, False] * 2
    assert bests[0].startswith("  2/64 trials, now failed, best 24.00 us, ")
    assert "1.00x manual, 1 failed" in bests[0]
    expected = f"  5/64 trials, now 16.00 us, best 16.00 us, {RATE}, {share} % of floor, 1.50x manual"
    assert bests[2].startswith(f"{expected}, 2 failed, ")
    assert bests[5].startswith("  5 trials, ")
    first, second = (line for line in lines if ": best " in line)
    assert first == (
        f"{FIRST}: best 16.00 us, manual 24.00 us, gain 1.50x, {share} % of floor, 6 trials "
        f"(3 failed: 2 timed out, 1 too many registers) in 12.3 s, {outcomes[0].path} written"
    )
    assert "ptxas" not in text
    assert second.startswith(f"{TASKS[1]}: best ")
    assert ", interrupted, " in second
    assert second.endswith("kept: it is at least as good")


def test_plain_closes_with_a_table():
    outcomes, text = play(PlainDisplay)
    head, *rows = text.splitlines()[-8:-5]
    assert " ".join(head.split()) == "task manual us best us gain % of floor trials failed seconds record"
    for row, outcome in zip(rows, outcomes, strict=True):
        numbers = ["24.00", "16.00", "1.50x", share_of_floor(outcome.task), "6", "3", "12.3"]
        assert row.split() == [str(outcome.task), *numbers, str(outcome.path)]
    assert len({row.index("db/") for row in rows}) == 1
    assert text.splitlines()[-5:] == [
        "gain, geometric mean: 1.50x",
        "failed trials: 4 timed out, 2 too many registers",
        f"not tuned: {FIRST}",
        "log: logs/tune.jsonl",
        "plot: out/[best].png",
    ]


def test_plain_gives_a_sign_of_life():
    heard = threading.Event()

    class Listener(StringIO):
        def write(self, text):
            if text.startswith("  "):
                heard.set()
            return super().write(text)

    with PlainDisplay(stream := Listener(), every=0.01) as display:
        display.begin(FIRST, 1, 1, H200, 8, 3)
        assert heard.wait(60)
    assert "  3/8 trials, now - us, best - us, - GB/s" in stream.getvalue()


def test_empty_session_closes():
    with PlainDisplay(stream := StringIO()) as display:
        display.fail(FIRST, BROKEN)
        display.close([], {})
    assert stream.getvalue() == f"{FIRST}: ValueError: {BROKEN}\nnot tuned: {FIRST}\n"


def test_live_shows_the_numbers(terminal):
    outcome = outcome_of(FIRST)
    with LiveDisplay(terminal) as display:
        display.begin(FIRST, 2, 3, H200, 64, 1)
        for trial in outcome.trials[1:5]:
            display.trial(trial, outcome.trials[4], outcome.trials[0])
        display.note("the panel is drawn beneath this")
        panel = terminal.getvalue()
        display.end(outcome)
    wanted = ("task 2 of 3 on nvidia-h200", str(FIRST), "5/64 trials", "now 16.00 us", "best 16.00 us", RATE)
    assert all(text in panel for text in (*wanted, "1.50x manual", "2 failed", "1 timed out")), panel
    assert f"{FIRST}: best 16.00 us, manual 24.00 us, gain 1.50x" in terminal.getvalue()


@parametrize("target", [H200, UNKNOWN])
@parametrize("columns", ["80", "160"])
def test_live_closes_with_a_table(terminal, monkeypatch, columns, target):
    monkeypatch.setenv("COLUMNS", columns)
    _, text = play(LiveDisplay, target, terminal)
    assert f"{FIRST}: ValueError: no kernel\nfor [this]\n" in text
    assert "plot: out/[best].png\n" in text
    assert "records: db/" in text
    (row,) = (line for line in text[text.index("task  ") :].splitlines() if line.startswith(" 1x256x96x96"))
    share = share_of_floor(FIRST) if target is H200 else "-"
    assert row.split()[1:] == ["24.00", "16.00", "1.50x", share, "6", "3", "12.3"]


def test_display_suits_the_stream(terminal):
    assert type(open_display(json=True, stream=terminal)) is JsonDisplay
    assert type(open_display(json=False, stream=terminal)) is LiveDisplay
    assert type(open_display(json=False, stream=StringIO())) is PlainDisplay


def assert_plotted(outcomes, path):
    plot(outcomes, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@parametrize("count", [0, 1, 6, 26])
def test_plot_is_a_png(tmp_path, count):
    assert_plotted([outcome_of(TASKS[number % 2]) for number in range(count)], tmp_path / "new" / "best.png")


def test_plot_takes_unknowns(tmp_path):
    outcome = outcome_of(TASKS[1], UNKNOWN, manual=None)
    slow = replace(outcome.trials[0], times=(1.0,))
    failed = tuple(trial for trial in outcome.trials if trial.cause)
    cases = (), failed, (slow, *outcome.trials[1:])
    assert_plotted([replace(outcome, trials=trials) for trials in cases], tmp_path / "best")


WITHOUT_RICH = """
import io, sys
sys.modules["rich"] = None
from dwtir.tune.display import open_display
stream = io.StringIO()
stream.isatty = lambda: True
print(type(open_display(json=False, stream=stream)).__name__)
"""


def test_without_rich_lines_are_plain():
    assert python(WITHOUT_RICH) == "PlainDisplay"


def test_grid_is_a_table():
    """As in the article: threads in y down, in x across."""
    tiles = [SharedTile(thread_y=y, thread_x=x) for y in (4, 8) for x in (16, 32)]
    trials = [Trial(i, tile, ((i + 1) * 1e-6,)) for i, tile in enumerate(tiles[:3])]
    trials.append(Trial(3, tiles[3], cause="does not compile"))
    PlainDisplay(stream := StringIO()).end(replace(outcome_of(FIRST), search="grid", trials=tuple(trials)))
    head, *rows = [line.split() for line in stream.getvalue().splitlines()[1:]]
    assert head == ["num_thread_y", "\\", "x", "16", "32"]
    assert rows == [["4", "1.00", "2.00"], ["8", "3.00", "-"]]
