"""Small kernels that show whether a device works, each run in a child process.

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
from typing import Any

from . import cuda, nvrtc

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


def _doubling() -> Any:
    """Return a schedule of ``out = 2 * data`` over 64 numbers, and its one loop."""
    import tvm
    from tvm.script import tirx as T

    @T.prim_func(s_tir=True)  # type: ignore[untyped-decorator]  # TVMScript
    def double(data: T.Buffer((64,), "float32"), out: T.Buffer((64,), "float32")):  # type: ignore[no-untyped-def, valid-type]  # TVMScript
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        for i in range(64):
            with T.sblock("double"):
                vi = T.axis.remap("S", [i])
                out[vi] = data[vi] * T.float32(2)

    schedule = tvm.s_tir.Schedule(tvm.IRModule({"main": double}))
    (loop,) = schedule.get_loops(schedule.get_sblock("double"))
    return schedule, loop


def _bound_doubling() -> Any:
    schedule, loop = _doubling()
    block, thread = schedule.split(loop, [2, 32])
    schedule.bind(block, "blockIdx.x")
    schedule.bind(thread, "threadIdx.x")
    return schedule.mod


def probe_cpu() -> str:
    """Compile a function with LLVM for this processor, run it, and compare."""
    import tvm
    from tvm.target import codegen

    from .target import resolve

    schedule, loop = _doubling()
    schedule.vectorize(loop)
    host = resolve("cpu")
    _run_doubling(tvm.compile(schedule.mod, target=host.tvm())["main"], tvm.cpu())
    return (
        f"LLVM {codegen.llvm_version_major()}, {host.arch} with vectors of "
        f"{host.vector_bytes} bytes {' '.join(host.features)}"
    )


def probe_cuda() -> str:
    """Compile a kernel with NVRTC, launch it through TVM, and compare."""
    import tvm

    from .target import resolve

    cuda.load_runtime().require()
    gpu = resolve("cuda")
    # This process ends after the probe, so replacing TVM's compiler harms nobody.
    tvm.register_global_func(
        "tvm_callback_cuda_compile", lambda source: nvrtc.compile_cubin(source, gpu.arch).code, override=True
    )
    _run_doubling(tvm.compile(_bound_doubling(), target=gpu.tvm())["main"], tvm.cuda(0))
    return f"compiled and ran a kernel for {gpu.arch}"


def probe_opencl() -> str:
    """Compile a kernel to OpenCL, run it on the device that dwtir would take, and compare."""
    from .opencl import compile_opencl, find_device

    device = find_device()
    _run_doubling(compile_opencl(_bound_doubling()))
    return f"compiled and ran a kernel on {device.name.strip()} ({device.platform.name})"


def _run_doubling(function: Callable[..., object], device: Any = None) -> None:
    """Run it on tensors of a device, or on arrays, and compare."""
    import numpy as np
    import tvm

    data = np.arange(64, dtype=np.float32)
    arrays: list[Any] = [data, np.zeros_like(data)]
    if device is not None:
        arrays = [tvm.runtime.tensor(array, device=device) for array in arrays]
    function(*arrays)
    out = arrays[1] if device is None else arrays[1].numpy()
    if out.tolist() != (2 * data).tolist():
        raise RuntimeError("the kernel ran but its result is wrong")
