"""What `doctor` looks at: one function a check, each of which returns a `Finding`."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from . import cache, cuda, nvrtc, probes
from .errors import DwtirError, ToolchainError

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


def _check_python(target: str) -> Finding:
    return Finding("Python", "ok", f"{platform.python_implementation()} {platform.python_version()}", required=True)


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
    return _probed("CPU", probes.probe_cpu, f"pip install --force-reinstall {_PINNED}", True)


def _check_cudart(target: str) -> Finding:
    status = cuda.cudart_status()
    required = target == "cuda"
    if not status.usable:
        return Finding("CUDA runtime", "missing", status.reason, status.remedy, required)
    return Finding("CUDA runtime", "ok", str(cuda.find_toolkit().cudart or "on the loader's path"), required=required)


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
        return Finding("CUDA headers", "missing", "cuda_fp16.h not found", cuda.INSTALL_CUDA, required)
    return Finding("CUDA headers", "ok", str(path), required=required)


def _check_gpu(target: str) -> Finding:
    required = target == "cuda"
    status = cuda.driver_status()
    if not status.usable:
        return Finding("GPU", "missing", status.reason, status.remedy, required)
    devices = [cuda.device_properties(index) for index in range(cuda.device_count())]
    names = ", ".join(f"{device.name} ({device.arch})" for device in devices)
    return Finding("GPU", "ok", f"{names}; the driver supports CUDA {devices[0].driver_version}", required=required)


def _check_cuda(target: str) -> Finding:
    required = target == "cuda"
    if not _pins_hold():
        return _not_tried("CUDA kernel", required)
    status = cuda.driver_status()
    if not status.usable:
        return Finding("CUDA kernel", "missing", "not tried: no GPU", status.remedy, required)
    return _probed("CUDA kernel", probes.probe_cuda, "see the CUDA lines above", required)


def _check_opencl(target: str) -> Finding:
    required = target == "opencl"
    if not _pins_hold():
        return _not_tried("OpenCL", required)
    if _distribution("pyopencl", _INSTALL_OPENCL).status != "ok":
        return Finding("OpenCL", "missing", "PyOpenCL is not installed", _INSTALL_OPENCL, required)
    return _probed("OpenCL", probes.probe_opencl, _INSTALL_OPENCL, required)


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
    folder = cache.cache_dir()
    # The folder is made on first use; what counts is where it would be made.
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        problem = f"{existing} is not a folder that can be written to"
    elif existing == folder and not cache.is_private(folder):
        problem = f"{folder} is not used: it must be yours and writable by nobody else"
    else:
        return Finding("cache folder", "ok", str(folder))
    return Finding("cache folder", "broken", problem, "mend that, or set DWTIR_CACHE_DIR")


def _probed(name: str, probe: Callable[[], str], remedy: str, required: bool) -> Finding:
    worked, answer = probes.run(probe)
    if worked:
        return Finding(name, "ok", answer, required=required)
    return Finding(name, "broken", answer, remedy, required)


CHECKS: tuple[Callable[[str], Finding], ...] = (
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
"""All checks, in the order of the report. Each takes the target that has to work."""
