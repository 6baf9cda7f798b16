"""A small kernel that shows whether a device works, run in a child process.

A probe may take its process down: TVM in the wrong version, a broken OpenCL
driver, code for a processor that this machine only claims to have. In a child
that is a result like any other.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from . import cuda
from .target import Target, resolve

_SECONDS = 120
_MESSAGE_LINES = 12  # of a compiler's log, say


def run(probe: Callable[[], str]) -> tuple[bool, str]:
    """Run a probe in a child process; return whether it worked, and its answer or last words."""
    # The child must find the very packages that this process finds.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"from dwtir import probes; print(probes.{probe.__name__}())"
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False, f"still running after {_SECONDS} s"
    if child.returncode < 0:
        return False, f"crashed with {signal.Signals(-child.returncode).name}"
    if child.returncode > 0:
        return False, _last_words(child.stderr) or f"exit status {child.returncode}"
    return True, child.stdout.strip()


def _last_words(stderr: str) -> str:
    """Cut the exception's message, which may have several lines, out of a traceback."""
    _, _, tail = stderr.rpartition("Traceback (most recent call last):\n")
    lines = itertools.dropwhile(lambda line: line.startswith(" "), tail.strip("\n").splitlines())
    return "\n".join(itertools.islice(lines, _MESSAGE_LINES))


def _checked(name: str) -> Target:
    from .verify import verify_device

    target = resolve(name)
    verify_device(target)
    return target


def probe_cpu() -> str:
    """Compile a kernel with LLVM for this processor, run it, and compare."""
    from tvm.target import codegen

    host = _checked("cpu")
    return (
        f"LLVM {codegen.llvm_version_major()}, {host.arch} with vectors of "
        f"{host.vector_bytes} bytes {' '.join(host.features)}"
    )


def probe_cuda() -> str:
    """Compile a kernel with NVRTC, launch it through TVM, and compare."""
    cuda.load_runtime().require()
    return f"compiled and ran a kernel for {_checked('cuda').arch}"


def probe_opencl() -> str:
    """Compile a kernel to OpenCL, run it on the device that dwtir would take, and compare."""
    from .opencl import find_device

    _checked("opencl")
    device = find_device()
    return f"compiled and ran a kernel on {device.name.strip()} ({device.platform.name})"
