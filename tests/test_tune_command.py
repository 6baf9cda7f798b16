"""The command ``python -m dwtir.tune``, as its users run it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dwtir.records import Record
from dwtir.tune.__main__ import main
from kernels import LAYER
from processes import run

parametrize = pytest.mark.parametrize

COMMAND = ("-m", "dwtir.tune", "--target", "cpu")


def test_the_command(tmp_path, capsys):
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
    ],
)
def test_the_command_names_what_is_wrong(tmp_path, arguments, message, capsys):
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
