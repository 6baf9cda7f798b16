"""Code in processes of its own, and commands in this one."""

import os
import subprocess
import sys
from typing import Any


def run(*arguments, status=0, cwd=None, **environment):
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


def python(code, **environment):
    """Run code in a new process and return what it prints."""
    return run("-c", code, **environment).stdout.strip()


def command(main, capsys):
    """Make a function that runs a command's `main` here, and returns its output and errors."""

    def call(*arguments, status=0):
        try:
            found: Any = main([str(argument) for argument in arguments])
        except SystemExit as end:
            found = end.code
        out, errors = capsys.readouterr()
        assert found == status, errors
        return out, errors

    return call
