"""Code in processes of its own, and commands in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def run(
    *arguments: object, status: int = 0, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with arguments in a new process, which must end with a status."""
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


def python(code: str, **environment: str) -> str:
    """Run code in a new process and return what it prints."""
    return run("-c", code, **environment).stdout.strip()


def command(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Make a function that runs a command's `main` here, and returns its output and errors."""

    def call(*arguments: Any, status: int = 0) -> tuple[str, str]:
        try:
            found: Any = main([str(argument) for argument in arguments])
        except SystemExit as end:
            found = end.code
        out, errors = capsys.readouterr()
        assert found == status, errors
        return out, errors

    return call
