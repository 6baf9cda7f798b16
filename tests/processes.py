"""Code in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def python(code: str, **environment: str) -> str:
    """Run code in a new process and return what it prints."""
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()
