"""CUDA on this machine: which libraries there are, which devices, and why not.

Nothing here needs a CUDA toolkit; ``pip install 'dwtir[cuda]'`` brings the CUDA
runtime, NVRTC and the headers, and the NVIDIA driver brings the rest. Importing
this module loads none of them, nor TVM.

TVM swallows the error when the library with its CUDA runtime does not load.
`load_runtime` loads it in the right order and keeps the reason.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import ToolchainError

INSTALL_CUDA = "pip install 'dwtir[cuda]'"
INSTALL_DRIVER = "install the NVIDIA driver, release 580 or newer, and expose the GPU to this process"

# The names that TVM's CUDA runtime was linked against.
_CUDART = "libcudart.so.13"
_DRIVER = "libcuda.so.1"
_MIN_DRIVER_CUDA = 13000  # as cuDriverGetVersion counts: 1000 * major + 10 * minor


@dataclass(frozen=True)
class Toolkit:
    """The pieces of a CUDA toolkit that were found, each ``None`` when missing."""

    cudart: Path | None
    """The CUDA runtime library in the version that TVM needs."""
    include: Path | None
    """The folder of ``cuda_fp16.h`` and the other headers."""


def find_toolkit() -> Toolkit:
    """Look for CUDA in pip packages first, then in an installed toolkit.

    Each piece is from the first root that has it. Roots are ``nvidia/cu13`` and the pip packages' older layout of a
    folder a library, then ``CUDA_PATH`` and ``CUDA_HOME``, or if neither is set the toolkit of the ``nvcc`` on ``PATH``
    and ``/usr/local/cuda``.
    """
    roots = tuple(_roots())
    header = _first(roots, ("include",), "cuda_fp16.h")
    return Toolkit(_first(roots, ("lib64", "lib"), _CUDART), header.parent if header else None)


def _roots() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")  # a namespace package: one entry a site folder
    for site in (spec.submodule_search_locations or ()) if spec else ():
        for package in ("cu13", "cuda_runtime"):
            if (root := Path(site, package)).is_dir():
                yield root
    if named := [os.environ[key] for key in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(key)]:
        yield from map(Path, named)
        return
    if nvcc := shutil.which("nvcc"):
        yield Path(nvcc).resolve().parents[1]
    yield Path("/usr/local/cuda")


def _first(roots: tuple[Path, ...], folders: tuple[str, ...], name: str) -> Path | None:
    machine = "sbsa" if platform.machine() == "aarch64" else platform.machine()
    for root in roots:
        # Distribution and conda packages keep the real folders under targets/.
        for base in (root, root / "targets" / f"{machine}-linux"):
            for folder in folders:
                if (found := base / folder / name).exists():
                    return found
    return None


@dataclass(frozen=True)
class Status:
    """Whether something can be used here, and if not, why not and what helps."""

    usable: bool
    reason: str = ""
    """What is missing or broken; empty when usable."""
    remedy: str = ""
    """What to install or set; empty when usable."""

    def require(self) -> None:
        """Raise `ToolchainError` with the reason and the remedy unless usable."""
        if not self.usable:
            raise ToolchainError(f"CUDA cannot be used: {self.reason}. To fix it: {self.remedy}")


class _UnavailableError(Exception):
    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.status = Status(False, reason, remedy)


def _status_of(step: Callable[[], object]) -> Status:
    try:
        step()
    except _UnavailableError as error:
        return error.status
    return Status(True)


@functools.cache
def _driver() -> ctypes.CDLL:
    """Load and initialise the driver library; raises `_UnavailableError` when there is none."""
    # Plain ctypes, for compiled kernels run where only the driver and the CUDA runtime are installed.
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise _UnavailableError(f"no NVIDIA driver library: {error}", INSTALL_DRIVER) from error
    _check(library, library.cuInit(0), "cuInit")
    return library


def _check(library: ctypes.CDLL, result: int, call: str) -> None:
    if result == 0:
        return
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    library.cuGetErrorName(result, ctypes.byref(name))
    library.cuGetErrorString(result, ctypes.byref(text))
    words = [value.value.decode() for value in (name, text) if value.value]
    raise _UnavailableError(f"{call} failed: {': '.join(words) or result}", INSTALL_DRIVER)


def _query(library: ctypes.CDLL, call: str, *arguments: int) -> int:
    """Call a driver function whose first parameter is an ``int *`` for its result."""
    value = ctypes.c_int()
    _check(library, getattr(library, call)(ctypes.byref(value), *arguments), call)
    return value.value


def _check_driver() -> None:
    driver = _driver()
    version = _query(driver, "cuDriverGetVersion")
    if version < _MIN_DRIVER_CUDA:
        raise _UnavailableError(f"the NVIDIA driver supports only CUDA {_version(version)}", INSTALL_DRIVER)
    if _query(driver, "cuDeviceGetCount") == 0:
        raise _UnavailableError("the NVIDIA driver shows no device", INSTALL_DRIVER)


def driver_status() -> Status:
    """Say whether there is a device, and a driver that is new enough for TVM."""
    return _status_of(_check_driver)


def device_count() -> int:
    """Count the CUDA devices that the driver shows; 0 without a driver.

    Whether TVM can use them is `load_runtime`'s answer. This initialises the driver, after which forked children must
    not use CUDA: ``spawn`` workers.
    """
    try:
        return _query(_driver(), "cuDeviceGetCount")
    except _UnavailableError:
        return 0


_runtime: Status | None = None
_runtime_lock = threading.Lock()


def load_runtime() -> Status:
    """Make TVM's CUDA runtime usable, before or after TVM or torch was imported.

    The first call loads libraries and its answer is kept for the life of the
    process, so a later call costs nothing. Never raises for lack of CUDA.
    ``load_runtime().require()`` raises a `ToolchainError` then.
    """
    global _runtime
    with _runtime_lock:
        if _runtime is None:
            _runtime = _status_of(_load_runtime)
        return _runtime


def _load_runtime() -> None:
    _check_driver()
    _load_cudart()

    # TVM loads its CUDA runtime when it is imported. If that was before cudart could be found,
    # loading it again registers it, or gives us the loader's error; else it is a no-op.
    import tvm.libinfo

    for folder in tvm.libinfo.package_lib_paths():
        if (path := Path(folder, "libtvm_runtime_cuda.so")).is_file():
            break
    else:
        raise _UnavailableError("this build of TVM has no CUDA runtime", "pip install apache-tvm==0.27.0.post1")
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        raise _UnavailableError(f"TVM's CUDA runtime does not load: {error}", INSTALL_CUDA) from error
    if not tvm.cuda(0).exist:
        raise _UnavailableError("the CUDA runtime finds no usable device", INSTALL_DRIVER)


def cudart_status() -> Status:
    """Load the CUDA runtime library that TVM needs, and say whether that worked."""
    return _status_of(_load_cudart)


def _load_cudart() -> None:
    try:
        # By its plain name: the copy in this process (torch brings one), or on the loader's path.
        ctypes.CDLL(_CUDART)
    except OSError as error:
        path = find_toolkit().cudart
        if path is None:
            raise _UnavailableError(f"no CUDA runtime library: {error}", INSTALL_CUDA) from error
        try:
            ctypes.CDLL(str(path))
        except OSError as broken:
            raise _UnavailableError(f"the CUDA runtime library does not load: {broken}", INSTALL_CUDA) from broken


# CUdevice_attribute; the numbers are part of the driver's stable interface.
_ATTRIBUTES = {
    "max_threads_per_block": 1,
    "shared_bytes_per_block": 8,
    "warp_size": 10,
    "multiprocessors": 16,
    "l2_bytes": 38,
}
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76


@dataclass(frozen=True)
class DeviceProperties:
    """What the driver says about one device; sizes are in bytes."""

    name: str
    """As the driver spells it, "NVIDIA H200"."""
    arch: str
    """As NVRTC and TVM spell it, "sm_90"."""
    driver_version: str
    """The newest CUDA that the driver supports, "13.0"."""
    warp_size: int
    multiprocessors: int
    l2_bytes: int
    max_threads_per_block: int
    shared_bytes_per_block: int
    """The limit of static shared memory."""


def device_properties(index: int = 0) -> DeviceProperties:
    """Describe one CUDA device, as ``CUDA_VISIBLE_DEVICES`` leaves them numbered."""
    try:
        driver = _driver()
        count = _query(driver, "cuDeviceGetCount")
        if not 0 <= index < count:
            remedy = "pass another index, or look at CUDA_VISIBLE_DEVICES"
            raise _UnavailableError(f"device index must be in [0, {count}), got {index}", remedy)
        device = _query(driver, "cuDeviceGet", index)
        name = ctypes.create_string_buffer(256)
        _check(driver, driver.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")

        def attribute(number: int) -> int:
            return _query(driver, "cuDeviceGetAttribute", number, device)

        return DeviceProperties(
            name=name.value.decode(),
            arch=f"sm_{attribute(_COMPUTE_CAPABILITY_MAJOR)}{attribute(_COMPUTE_CAPABILITY_MINOR)}",
            driver_version=_version(_query(driver, "cuDriverGetVersion")),
            **{field: attribute(number) for field, number in _ATTRIBUTES.items()},
        )
    except _UnavailableError as error:
        raise ToolchainError(f"{error.status.reason}. To fix it: {error.status.remedy}") from error


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def folder_name(name: str) -> str:
    """Turn a device's name into that of folders of records and results: ``"NVIDIA H200"`` -> ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"
