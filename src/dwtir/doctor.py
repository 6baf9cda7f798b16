"""``python -m dwtir doctor``: what this machine has, what it lacks, and how to get it.

Each check is one function that returns a `Finding`. Whatever could take the
process down with it (TVM in the wrong version, a broken OpenCL driver, code for
a processor that this machine only claims to have) runs in a child process, so
that a crash becomes a finding too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from . import cuda, nvrtc
from .errors import DwtirError, ToolchainError

__all__ = ["Finding", "diagnose", "main"]

_TARGETS = ("cuda", "cpu", "opencl")
Status = Literal["ok", "missing", "broken"]

# TVM's two packages change their interface together in every release.
_PINS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}
_PINNED = " ".join(f"{package}=={version}" for package, version in _PINS.items())
_INSTALL_PINS = f"pip install {_PINNED}"
_INSTALL_OPENCL = "pip install 'dwtir[opencl]', or the vendor's OpenCL driver"
_PROBE_SECONDS = 120
_MESSAGE_LINES = 12  # of a compiler's log, say


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes
    ----------
    name : str
        What was checked.
    status : {"ok", "missing", "broken"}
        ``missing`` is absent, ``broken`` is there and does not work.
    detail : str
        What was found, or what is wrong.
    remedy : str
        The command or setting that helps; empty when ok.
    required : bool
        Whether the chosen device cannot work without it.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    required: bool = False


# ---------------------------------------------------------------------------
# Probes: the part of a check that runs in a child process
# ---------------------------------------------------------------------------


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


def _probe_cpu() -> str:
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


def _probe_cuda() -> str:
    """Compile a kernel with NVRTC, launch it through TVM, and compare."""
    import tvm

    from .target import resolve

    cuda.load_runtime().require()
    gpu = resolve("cuda")
    # This process ends after the probe, so replacing TVM's compiler harms nobody.
    tvm.register_global_func(
        "tvm_callback_cuda_compile",
        lambda source: nvrtc.compile_cubin(source, gpu.arch).code,
        override=True,
    )
    _run_doubling(tvm.compile(_bound_doubling(), target=gpu.tvm())["main"], tvm.cuda(0))
    return f"compiled and ran a kernel for {gpu.arch}"


def _run_doubling(function: Callable[..., object], device: Any) -> None:
    import numpy as np
    import tvm

    data = np.arange(64, dtype=np.float32)
    out = tvm.runtime.tensor(np.zeros_like(data), device=device)
    function(tvm.runtime.tensor(data, device=device), out)
    if out.numpy().tolist() != (2 * data).tolist():
        raise RuntimeError("the kernel ran but its result is wrong")


def _probe_opencl() -> str:
    """Compile a kernel to OpenCL, run it on the device that dwtir would take, and compare."""
    import numpy as np

    from .opencl import compile_opencl, find_device

    device = find_device()
    data = np.arange(64, dtype=np.float32)
    out = np.zeros_like(data)
    compile_opencl(_bound_doubling())(data, out)
    if out.tolist() != (2 * data).tolist():
        raise RuntimeError("the kernel ran but its result is wrong")
    return f"compiled and ran a kernel on {device.name.strip()} ({device.platform.name})"


def _run_probe(probe: Callable[[], str]) -> tuple[bool, str]:
    """Run a probe in a child process; return whether it worked, and its answer or last words."""
    # The child must find this very dwtir, however this process found it.
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    code = f"from dwtir import doctor; print(doctor.{probe.__name__}())"
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False, f"still running after {_PROBE_SECONDS} s"
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


def _probed(name: str, probe: Callable[[], str], remedy: str, required: bool) -> Finding:
    worked, answer = _run_probe(probe)
    if worked:
        return Finding(name, "ok", answer, required=required)
    return Finding(name, "broken", answer, remedy, required)


# ---------------------------------------------------------------------------
# Checks. Each takes the target that has to work.
# ---------------------------------------------------------------------------


def _check_python(target: str) -> Finding:
    detail = f"{platform.python_implementation()} {platform.python_version()}"
    return Finding("Python", "ok", detail, required=True)


def _check_platform(target: str) -> Finding:
    system, machine = platform.system(), platform.machine()
    detail = f"{system} {machine}"
    if system != "Linux" and target == "cuda":
        return Finding("platform", "broken", detail, "use Linux, or --target cpu", True)
    return Finding("platform", "ok", detail, required=True)


def _check_pin(package: str) -> Finding:
    # From the metadata: importing the wrong pair may crash, now or much later.
    pin = _PINS[package]
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(package, "missing", "not installed", _INSTALL_PINS, True)
    if version == pin:
        return Finding(package, "ok", version, required=True)
    detail = f"{version}, but dwtir needs exactly {pin}"
    if package == "apache-tvm-ffi":
        detail += "; with 0.1.15 TVM imports, and then crashes when it saves a trace or a record"
    return Finding(package, "broken", detail, _INSTALL_PINS, True)


def _pins_hold() -> bool:
    return all(_check_pin(package).status == "ok" for package in _PINS)


def _not_tried(name: str, required: bool) -> Finding:
    return Finding(name, "missing", "not tried with these versions of TVM", _INSTALL_PINS, required)


def _check_numpy(target: str) -> Finding:
    return _distribution("numpy", "pip install numpy", required=True)


def _check_torch(target: str) -> Finding:
    return _distribution("torch", "pip install torch (for dwtir.nn and the baselines)")


def _distribution(name: str, remedy: str, *, required: bool = False) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name), required=required)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", "not installed", remedy, required)


def _check_cpu(target: str) -> Finding:
    # Required for every target: TVM compiles the host side of a GPU kernel with LLVM.
    if not _pins_hold():
        return _not_tried("CPU", True)
    return _probed("CPU", _probe_cpu, f"pip install --force-reinstall {_PINNED}", True)


def _check_cudart(target: str) -> Finding:
    status = cuda.cudart_status()
    required = target == "cuda"
    if not status.usable:
        return Finding("CUDA runtime", "missing", status.reason, status.remedy, required)
    path = cuda.find_toolkit().cudart
    return Finding("CUDA runtime", "ok", str(path or "on the loader's path"), required=required)


def _check_nvrtc(target: str) -> Finding:
    required = target == "cuda"
    try:
        major, minor = nvrtc.nvrtc_version()
        nvrtc.compile_cubin('extern "C" __global__ void empty() {}', "sm_90")
    except DwtirError as error:
        status: Status = "missing" if isinstance(error, ToolchainError) else "broken"
        return Finding("NVRTC", status, str(error), cuda.INSTALL_CUDA, required)
    return Finding("NVRTC", "ok", f"{major}.{minor}", required=required)


def _check_headers(target: str) -> Finding:
    path = cuda.find_toolkit().include
    required = target == "cuda"
    if path is None:
        detail = "cuda_fp16.h not found"
        return Finding("CUDA headers", "missing", detail, cuda.INSTALL_CUDA, required)
    return Finding("CUDA headers", "ok", str(path), required=required)


def _check_gpu(target: str) -> Finding:
    required = target == "cuda"
    status = cuda.driver_status()
    if not status.usable:
        return Finding("GPU", "missing", status.reason, status.remedy, required)
    devices = [cuda.device_properties(index) for index in range(cuda.device_count())]
    names = ", ".join(f"{device.name} ({device.arch})" for device in devices)
    detail = f"{names}; the driver supports CUDA {devices[0].driver_version}"
    return Finding("GPU", "ok", detail, required=required)


def _check_cuda(target: str) -> Finding:
    required = target == "cuda"
    if not _pins_hold():
        return _not_tried("CUDA kernel", required)
    status = cuda.driver_status()
    if not status.usable:
        return Finding("CUDA kernel", "missing", "not tried: no GPU", status.remedy, required)
    return _probed("CUDA kernel", _probe_cuda, "see the CUDA lines above", required)


def _check_opencl(target: str) -> Finding:
    required = target == "opencl"
    if not _pins_hold():
        return _not_tried("OpenCL", required)
    if _distribution("pyopencl", _INSTALL_OPENCL).status != "ok":
        return Finding("OpenCL", "missing", "PyOpenCL is not installed", _INSTALL_OPENCL, required)
    return _probed("OpenCL", _probe_opencl, _INSTALL_OPENCL, required)


def _check_compiler(target: str) -> Finding:
    # Not required: kernels are built in memory. In the order in which TVM looks.
    remedy = "apt install g++, or set CXX (for Kernel.export and the kernel cache)"
    named = os.environ.get("CXX") or os.environ.get("CC")
    candidates = [named] if named else ["g++", "gcc", "clang++", "clang", "c++", "cc"]
    compiler = next((path for name in candidates if (path := shutil.which(name))), None)
    if compiler is None:
        detail = f"none of {', '.join(candidates)} is on PATH"
        return Finding("C++ linker", "missing", detail, remedy)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "empty.c"), Path(folder, "empty.so")
        source.write_text("int empty;\n")
        child = subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", str(library), str(source)],
            capture_output=True,
            text=True,
            errors="replace",
        )
    if child.returncode != 0:
        detail = f"{compiler} cannot link a shared library: {child.stderr.strip()}"
        return Finding("C++ linker", "broken", detail, remedy)
    return Finding("C++ linker", "ok", compiler)


def _check_cache(target: str) -> Finding:
    try:
        from .cache import cache_dir
    except ImportError as error:
        remedy = "pip install --force-reinstall dwtir"
        return Finding("cache folder", "broken", f"dwtir is incomplete: {error}", remedy)

    folder = cache_dir()
    # The folder is made on first use; what counts is where it would be made.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return Finding("cache folder", "ok", str(folder))
    remedy = "make it writable, or set XDG_CACHE_HOME"
    return Finding("cache folder", "broken", f"{existing} is not writable", remedy)


_CHECKS: tuple[Callable[[str], Finding], ...] = (
    _check_python,
    _check_platform,
    lambda target: _check_pin("apache-tvm"),
    lambda target: _check_pin("apache-tvm-ffi"),
    _check_numpy,
    _check_cpu,
    _check_cudart,
    _check_nvrtc,
    _check_headers,
    _check_gpu,
    _check_cuda,
    _check_opencl,
    _check_compiler,
    _check_cache,
    _check_torch,
)


# ---------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------


def _default_target() -> str:
    # As target.resolve(None) decides: a GPU that is present has to work.
    return "cuda" if cuda.device_count() else "cpu"


def diagnose(target: str | None = None) -> list[Finding]:
    """Run every check.

    Parameters
    ----------
    target : {"cuda", "cpu", "opencl"}, optional
        The device that has to work. The default is the one that dwtir would
        pick: CUDA when the driver shows a GPU, else the CPU.

    Returns
    -------
    list of Finding
        In a fixed order; ``required`` depends on `target`.
    """
    target = target or _default_target()
    return [check(target) for check in _CHECKS]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; return 0 when the chosen device can work."""
    parser = argparse.ArgumentParser(
        prog="python -m dwtir doctor",
        description="Check what dwtir needs on this machine, and say how to get what is missing.",
    )
    parser.add_argument(
        "--target", choices=_TARGETS, help="the device that has to work (default: CUDA, else CPU)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(argv)

    target = arguments.target or _default_target()
    findings = diagnose(target)
    works = all(finding.status == "ok" for finding in findings if finding.required)
    if arguments.json:
        report = {"target": target, "works": works, "findings": [asdict(f) for f in findings]}
        print(json.dumps(report, indent=2))
    else:
        _print_table(findings)
        print(f"\n{target} {'works' if works else 'does not work'} on this machine.")
    return 0 if works else 1


def _print_table(findings: Sequence[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    indent = " " * (width + 2 + len("missing") + 2)
    for finding in findings:
        first, *rest = finding.detail.splitlines() or [""]
        print(f"{finding.name:{width}}  {finding.status:7}  {first}")
        for line in rest:
            print(f"{indent}{line}")
        if finding.status != "ok":
            need = "needed" if finding.required else "optional"
            print(f"{indent}{need}: {finding.remedy}")


if __name__ == "__main__":
    sys.exit(main())
