"""What `doctor` looks at: one function a check, each of which returns a `Finding`."""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from . import cache, cuda, nvrtc, probes
from .errors import DwtirError, ToolchainError
from .versions import installed

Status = Literal["ok", "missing", "broken"]

# TVM's two packages change their interface together in every release.
_PINS = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.14.post1"}
_PINNED = " ".join(f"{package}=={version}" for package, version in _PINS.items())
_INSTALL_PINS = f"pip install {_PINNED}"
_INSTALL_OPENCL = "pip install 'dwtir[opencl]', or the vendor's OpenCL driver"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    """What was checked."""
    status: Status
    """``missing`` is absent, ``broken`` is there and does not work."""
    detail: str
    """What was found, or what is wrong."""
    remedy: str = ""
    """The command or setting that helps; empty when ok."""
    required: bool = False
    """Whether the chosen device cannot work without it."""


_Answer: TypeAlias = tuple[Status, str, str]
"""Status, detail and remedy, as a `Finding` has them."""

_Check: TypeAlias = Callable[[str], Finding]

CHECKS: list[_Check] = []
"""All checks, in the order of the report. Each takes the target that has to work."""

TARGETS = ("cuda", "cpu", "opencl")


def _check(name: str, *needing: str) -> Callable[[Callable[[str], _Answer]], _Check]:
    """Make a check of what answers for a target, and the targets that need it."""

    def make(answer: Callable[[str], _Answer]) -> _Check:
        def check(target: str) -> Finding:
            return Finding(name, *answer(target), target in needing)

        CHECKS.append(check)
        return check

    return make


@_check("Python", *TARGETS)
def _check_python(target: str) -> _Answer:
    return "ok", f"{platform.python_implementation()} {platform.python_version()}", ""


@_check("platform", *TARGETS)
def _check_platform(target: str) -> _Answer:
    detail = f"{platform.system()} {platform.machine()}"
    if platform.system() != "Linux" and target == "cuda":
        return "broken", detail, "use Linux, or --target cpu"
    return "ok", detail, ""


def _pin(package: str) -> _Answer:
    # From the metadata: importing the wrong pair may crash, now or much later.
    status, version, remedy = _distribution(package, _INSTALL_PINS)
    if status != "ok" or version == _PINS[package]:
        return status, version, remedy
    detail = f"{version}, but dwtir needs exactly {_PINS[package]}"
    if package == "apache-tvm-ffi":
        detail += "; with 0.1.15 TVM imports, and then crashes when it saves a trace or a record"
    return "broken", detail, _INSTALL_PINS


def _distribution(name: str, remedy: str) -> _Answer:
    version = installed(name)
    return ("missing", "not installed", remedy) if version == "none" else ("ok", version, "")


_check("apache-tvm", *TARGETS)(lambda target: _pin("apache-tvm"))
_check("apache-tvm-ffi", *TARGETS)(lambda target: _pin("apache-tvm-ffi"))
_check("numpy", *TARGETS)(lambda target: _distribution("numpy", "pip install numpy"))


def _probed(probe: Callable[[], str], remedy: str) -> _Answer:
    if any(_pin(package)[0] != "ok" for package in _PINS):
        return "missing", "not tried with these versions of TVM", _INSTALL_PINS
    worked, answer = probes.run(probe)
    return ("ok", answer, "") if worked else ("broken", answer, remedy)


# Required for every target: TVM compiles the host side of a GPU kernel with LLVM.
@_check("CPU", *TARGETS)
def _check_cpu(target: str) -> _Answer:
    return _probed(probes.probe_cpu, f"pip install --force-reinstall {_PINNED}")


@_check("CUDA runtime", "cuda")
def _check_cudart(target: str) -> _Answer:
    status = cuda.cudart_status()
    if not status.usable:
        return "missing", status.reason, status.remedy
    return "ok", str(cuda.find_toolkit().cudart or "on the loader's path"), ""


@_check("NVRTC", "cuda")
def _check_nvrtc(target: str) -> _Answer:
    try:
        major, minor = nvrtc.nvrtc_version()
        nvrtc.compile_cubin('extern "C" __global__ void empty() {}', "sm_90")
    except DwtirError as error:
        return "missing" if isinstance(error, ToolchainError) else "broken", str(error), cuda.INSTALL_CUDA
    return "ok", f"{major}.{minor}", ""


@_check("CUDA headers", "cuda")
def _check_headers(target: str) -> _Answer:
    path = cuda.find_toolkit().include
    return ("ok", str(path), "") if path else ("missing", "cuda_fp16.h not found", cuda.INSTALL_CUDA)


@_check("GPU", "cuda")
def _check_gpu(target: str) -> _Answer:
    status = cuda.driver_status()
    if not status.usable:
        return "missing", status.reason, status.remedy
    devices = [cuda.device_properties(index) for index in range(cuda.device_count())]
    names = ", ".join(f"{device.name} ({device.arch})" for device in devices)
    return "ok", f"{names}; the driver supports CUDA {devices[0].driver_version}", ""


@_check("CUDA kernel", "cuda")
def _check_cuda(target: str) -> _Answer:
    status = cuda.driver_status()
    if not status.usable:
        return "missing", "not tried: no GPU", status.remedy
    return _probed(probes.probe_cuda, "see the CUDA lines above")


@_check("OpenCL", "opencl")
def _check_opencl(target: str) -> _Answer:
    if _distribution("pyopencl", "")[0] != "ok":
        return "missing", "PyOpenCL is not installed", _INSTALL_OPENCL
    return _probed(probes.probe_opencl, _INSTALL_OPENCL)


@_check("C++ linker")
def _check_compiler(target: str) -> _Answer:
    # Kernels are built in memory without it. In the order in which TVM looks.
    remedy = "apt install g++, or set CXX (for Kernel.export and the kernel cache)"
    named = os.environ.get("CXX") or os.environ.get("CC")
    candidates = [named] if named else ["g++", "gcc", "clang++", "clang", "c++", "cc"]
    compiler = next((path for name in candidates if (path := shutil.which(name))), None)
    if compiler is None:
        return "missing", f"none of {', '.join(candidates)} is on PATH", remedy
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "empty.c"), Path(folder, "empty.so")
        source.write_text("int empty;\n")
        command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
        child = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if child.returncode != 0:
        return "broken", f"{compiler} cannot link a shared library: {child.stderr.strip()}", remedy
    return "ok", compiler, ""


@_check("cache folder")
def _check_cache(target: str) -> _Answer:
    folder = cache.cache_dir()
    # The folder is made on first use.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        problem = f"{existing} is not a folder that can be written to"
    elif existing == folder and not cache.is_private(folder):
        problem = f"{folder} is not used: it must be yours and writable by nobody else"
    else:
        return "ok", str(folder), ""
    return "broken", problem, "mend that, or set DWTIR_CACHE_DIR"


_check("torch")(lambda target: _distribution("torch", "pip install torch (for dwtir.nn and the baselines)"))
