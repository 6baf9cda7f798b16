"""The package as others get it: the wheel, how it is found, its imports, its README."""

import ast
import email
import json
import re
import zipfile
from functools import cache
from pathlib import Path

import pytest

import dwtir
from dwtir import Shape, Target, checks, database
from marks import needs_gpu, parametrize
from processes import run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PACKAGE, RECORDS = Path(dwtir.__file__).parent, ROOT / "tune_db"
SOURCES = sorted(PACKAGE.rglob("*.py"))
EXTRAS = {"cuda", "opencl", "tune", "torch", "bench", "test", "lint", "dev"}


def build(folder, function):
    run("-c", f"from hatchling.build import {function} as build; build({str(folder)!r})", cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"), "build_wheel")


def import_dwtir(site, cwd, code):
    # Without the checkout, which an editable install adds; `site` and its .pth files come first.
    paths = f"""
import site, sys
others = [path for path in sys.path if path != {str(ROOT / "src")!r}]
sys.path = []
site.addsitedir({str(site)!r})
sys.path += others
"""
    return run("-c", paths + code, cwd=cwd, PYTHONPATH="").stdout.strip()


def installed(wheel, folder):
    run("-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel, cwd=folder)
    return folder


def test_wheel_in_another_folder(wheel, tmp_path):
    site = installed(wheel, tmp_path)
    code = (
        "import dwtir; from dwtir import database; from importlib.metadata import version;"
        "print(dwtir.__file__, dwtir.__version__, version('dwtir'), database.shipped_folder())"
    )
    file, own, recorded, shipped = import_dwtir(site, tmp_path, code).split()
    assert Path(file) == site / "dwtir/__init__.py"
    assert own == recorded == dwtir.__version__
    assert Path(shipped) == site / "dwtir/tune_db"
    assert (site / "dwtir/py.typed").exists()
    ours, theirs = ({path.relative_to(top) for path in top.rglob("*")} for top in (RECORDS, Path(shipped)))
    assert theirs == ours


def test_editable_installs_find_records(tmp_path):
    (tmp_path / "wheel").mkdir()
    editable = installed(build(tmp_path / "wheel", "build_editable"), tmp_path)
    code = "from dwtir.database import shipped_folder; print(shipped_folder())"
    for site in (editable, ROOT / "src"):
        assert Path(import_dwtir(site, tmp_path, code)) == RECORDS
    assert (RECORDS / "README.md").exists()


def test_wheel_holds_package_and_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names, about = set(archive.namelist()), f"dwtir-{dwtir.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{about}/METADATA"))
    assert {name.split("/")[0] for name in names} == {"dwtir", about}
    assert {"dwtir/py.typed", "dwtir/__main__.py", "dwtir/schedules/base.py"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert metadata["Version"] == dwtir.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS
    needs = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    pins = {f"{package}=={version}" for package, version in checks._PINS.items()}
    assert pins | {"numpy>=1.26"} == set(needs)


def test_readme_lists_the_extras():
    section = README.partition("## Extras")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == EXTRAS


def test_importing_loads_nothing_heavy(tmp_path):
    heavy = {"tvm", "tvm_ffi", "torch", "cuda.bindings", "pyopencl", "ml_dtypes"}
    code = f"import sys, dwtir.cuda, dwtir.doctor, dwtir.nvrtc, dwtir.opencl; print({heavy} & {{*sys.modules}})"
    assert import_dwtir(PACKAGE.parent, tmp_path, code) == "set()"


def test_files_are_short():
    assert not [path for path in SOURCES if path.read_text("utf-8").count("\n") >= 400]


@cache
def imports(path):
    package = ["dwtir", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


# Who may import what: files and folders of the package, or nobody but these.
ALLOWED = {
    "torch": {"nn", "bench"},
    "pyopencl": {"opencl.py", "pocl.py"},
    "cuda": {"nvrtc.py", "timing.py"},
    "dwtir.tune": {"tune", "bench", "__main__.py"},
    "dwtir.bench": {"bench", "__main__.py"},
    "dwtir.nn": {"nn", "bench", "__main__.py"},
    "dwtir.build": {"__init__.py", "first_look.py", "verify.py", "tune", "bench", "nn"},
}


@parametrize("module", ALLOWED)
def test_dependencies_point_one_way(module):
    users = {
        path.relative_to(PACKAGE).parts[0]
        for path in SOURCES
        if any(name == module or name.startswith(f"{module}.") for name in imports(path))
    }
    assert users <= ALLOWED[module]


def test_strategies_generate_no_code():
    for path in (PACKAGE / "schedules").glob("*.py"):
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("dwtir.")}
        known = {"bands", "compute", "diagonals", "epilogue", "errors", "images", "pairs", "panels", "pieces", "planes"}
        known |= {"schedules", "shape", "sheets", "space_to_batch", "strips", "target", "typed", "units"}
        assert ours <= known, path


def test_nothing_names_a_package_registry():
    hosts = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|conda\.anaconda|index-url", re.I)
    files = [*SOURCES, ROOT / "README.md", ROOT / "pyproject.toml", ROOT / ".ci/run"]
    for folder in ("ci", "docs", ".github", "tune_db"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert not [path for path in files if hosts.search(path.read_text("utf-8"))]


# README: its examples run as they stand there, and its commands are CI's


@parametrize("gpu", [False, needs_gpu(True)])
def test_examples(gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DWTIR_CACHE_DIR", str(tmp_path / "cache"))
    blocks = re.findall(r"^```python( gpu)?\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert README.count("```python") == len(blocks) > 5
    names = {}
    for marked, code in blocks:
        if bool(marked) == gpu:
            exec(compile(code, "README.md", "exec"), names)


def test_two_commands():
    blocks = re.findall(r"^```sh\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert blocks == ["pip install . && python -m dwtir", "pip install .[test] && pytest"]
    script = (ROOT / ".ci/run").read_text("utf-8")
    assert all(f"readme '{block}'\n" in script for block in blocks)


def test_what_it_links_to_is_there():
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_example_of_a_record_is_one(tmp_path, monkeypatch):
    text = (RECORDS / "README.md").read_text("utf-8")
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
