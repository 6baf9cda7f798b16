"""README's examples run as they stand there, in their order, and its commands are what CI runs."""

import json
import re
from pathlib import Path

import pytest

from dwtir import Shape, Target, database

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_the_examples(gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DWTIR_CACHE_DIR", str(tmp_path / "cache"))
    blocks = re.findall(r"^```python( gpu)?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert README.count("```python") == len(blocks) > 5
    names = {}
    for marked, code in blocks:
        if bool(marked) == gpu:
            exec(compile(code, "README.md", "exec"), names)


def test_the_two_commands():
    blocks = re.findall(r"^```sh\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert blocks == ["pip install . && python -m dwtir", "pip install .[test] && pytest"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(f"readme '{block}'\n" in script for block in blocks)


def test_what_it_links_to_is_there():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_example_of_a_record_is_one(tmp_path, monkeypatch):
    text = (ROOT / "tune_db" / "README.md").read_text(encoding="utf-8")
    ((name, example),) = re.findall(r"`(\S+/\S+)`:\n\n```json\n(.*?)^```$", text, re.M | re.DOTALL)
    record = json.loads(example)
    path = tmp_path / name
    path.parent.mkdir()
    path.write_text(example)
    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path))
    found = database.find(Shape.parse(path.stem), Target(path.parent.name, "cuda", "sm_90", 132))
    line = ",".join(map(str, found[0].parameters.values()))
    assert (found[0].name, line) == (record["strategy"], record["parameters"])
    assert found[1] == path
