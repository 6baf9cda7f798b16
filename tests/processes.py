"""Code in processes of its own, and commands in this one."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from dwtir import cuda

SITE = Path(sysconfig.get_path("purelib"))


def run(*arguments, status=0, cwd=None, **environment):
    child = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == status, child.stdout + child.stderr
    return child


def python(code, **environment):
    return run("-c", code, **environment).stdout.strip()


def run_python(code, *, path=None, **environment):
    """Run code, which has `cuda`, in a child process.

    With a path, NumPy and dwtir there replace the site-packages folder, and no toolkit
    is known of but by the environment.
    """
    if path:
        site_with(path, "numpy*")
        (path / "dwtir").symlink_to(Path(cuda.__file__).parent)
        environment = {"CUDA_PATH": "", "CUDA_HOME": ""} | environment | {"PYTHONPATH": str(path)}
    return run(*(["-S"] if path else []), "-c", f"from dwtir import cuda\n{code}", **environment).stdout


def site_with(folder, packages):
    """Make a site-packages folder that has only these packages of ours."""
    folder.mkdir(exist_ok=True)
    for entry in SITE.glob(packages):
        (folder / entry.name).symlink_to(entry)
    return folder


def command(main, capsys):
    """Make a function that runs `main` here and returns its output and errors."""

    def call(*arguments, status=0):
        try:
            found = main(list(map(str, arguments)))
        except SystemExit as end:
            found = end.code
        out, errors = capsys.readouterr()
        assert found == status, errors
        return out, errors

    return call
