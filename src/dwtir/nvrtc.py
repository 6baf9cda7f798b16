"""CUDA source to device code with NVRTC, and what ptxas said about each kernel.

TVM has its own way to NVRTC, which forces ``--use_fast_math``, needs ``CUDA_PATH`` and takes a second a kernel,
nearly all for two libcu++ headers, used for nothing but the integer types. Here a few lines replace them, which
leaves 0.03 to 0.05 s for a small kernel and needs no libcu++.
"""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from .cuda import INSTALL_CUDA, find_toolkit
from .cuda_functions import with_functions
from .errors import CompileError, InvalidTargetError, ToolchainError
from .line_loads import LOAD, PLAIN
from .search_limits import SlowCompileError, SpillError, current, stopped

_REGISTERS_OF_SM = 65536
_SPILL = {False: 4, True: 20}
"""Bytes that a thread spills at the price of half of what the blocks of an SM are worth, which grows as their square,
without and with products on tensor cores: by the kernels of 35 layers on an H200."""
_MUCH = 64
"""Bytes from which on blocks do not count."""
_LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\((\d+)\) (\w+)")


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes, as ptxas reports it."""

    name: str
    registers: int
    """Of one thread."""
    spill_store_bytes: int
    """What a thread stores of registers that did not fit."""
    stack_frame_bytes: int
    """Local memory of one thread. More than the spills need means an array that is indexed at run
    time and so could not live in registers."""
    shared_bytes: int
    """Static shared memory of one block."""


@dataclass(frozen=True)
class Cubin:
    """Device code for one architecture."""

    code: bytes
    """The ELF image that the driver loads."""
    kernels: tuple[KernelResources, ...]
    """One for every kernel of the source."""


# Stand-ins for the two headers that TVM includes in every kernel. They declare
# each name that its preamble imports; what is only declared is never used.
_HEADERS = {
    "cuda/std/cstdint": """
namespace cuda { namespace std {
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
} }
""",
    "cuda/std/type_traits": """
namespace cuda { namespace std {
template <class T, class U> struct is_same { static constexpr bool value = false; };
template <class T> struct is_same<T, T> { static constexpr bool value = true; };
template <class T, class U> inline constexpr bool is_same_v = is_same<T, U>::value;
template <class T> struct is_integral;
template <class T> struct is_signed;
template <class T> struct is_unsigned;
template <class T> struct is_floating_point;
template <bool, class> struct enable_if;
template <bool, class, class> struct conditional;
} }
""",
}


def compile_cubin(source: str, arch: str, min_blocks: int | None = None) -> Cubin:
    """Compile the CUDA source of TVM's code generator for an architecture such as ``sm_90`` or ``sm_90a``.

    Floating point is strict but for SiLU; multiply-adds are contracted. Threads run in parallel, for NVRTC works
    without the GIL.

    A kernel that spills is compiled with plain loads, then for fewer and fewer blocks of an SM, until nothing is
    spilled. That with the most blocks is taken, less what spills cost.

    Parameters
    ----------
    source : str
        CUDA C++ that includes no header of the C++ standard library.
    min_blocks : int, optional
        Blocks that an SM shall have room for, of the kernel with tensor cores' products, or else of the first.

    Raises
    ------
    InvalidTargetError, ToolchainError
        If NVRTC does not know the architecture, or it or the CUDA headers are missing.
    CompileError
        If the source is rejected, with the log, or has no kernel; in a search also if it is not worth the time.
    """
    search = current.get()
    _check_arch(arch)
    include = find_toolkit().include
    options = [
        f"--gpu-architecture={arch}",
        # Generated code declares index variables and helpers that it may not use.
        "--diag-suppress=177",
        "--ptxas-options=-v",
    ]
    if include is not None:
        options.append(f"--include-path={include}")
    if nvrtc_version() >= _FIRST_WITH_CACHE:
        options.append("--no-cache")
    source = with_functions(source)
    cubin = _compile(_with_min_blocks(source, min_blocks), arch, options)
    if _spills(cubin) and LOAD in source:
        options.append(f"--define-macro={PLAIN}")
        cubin = _compile(_with_min_blocks(source, min_blocks), arch, options)
    if search and min_blocks is not None and _spills(cubin) > _SPILL[True]:
        raise search.refuse(SpillError(f"min_blocks={min_blocks} lets a thread spill {_spills(cubin)} bytes"))

    def worth(cubin: Cubin) -> float:
        blocks = _blocks(cubin, source, min_blocks or 1) if _spills(cubin) < _MUCH else 1
        return blocks**2 / (1 + _spills(cubin) / _SPILL["mma.sync" in source])

    last = cubin
    for fewer in _fewer(min_blocks):
        if not _spills(last):
            break
        last = _compile(_with_min_blocks(source, fewer), arch, options)
        cubin = max(cubin, last, key=worth)
    return cubin


def _fewer(min_blocks: int | None) -> Iterator[int | None]:
    """List fewer and fewer blocks to compile for, and at last no bound if there was one."""
    blocks = min_blocks or 2
    while (blocks := blocks * 3 // 4) > 0:
        yield blocks
    if min_blocks is not None:
        yield None


def _with_min_blocks(source: str, min_blocks: int | None) -> str:
    found = _bounds(source)
    if min_blocks is None or found is None:
        return source
    return re.sub(rf"{re.escape(found[0])}\b", f"__launch_bounds__({found[1]}, {min_blocks}) {found[2]}", source)


def _bounds(source: str) -> re.Match[str] | None:
    """Find the launch bounds of the kernel that multiplies on tensor cores, or of the first."""
    before, *products = source.partition("mma.sync")
    if not products[0]:
        return _LAUNCH_BOUNDS.search(source)
    *_, last = [None, *_LAUNCH_BOUNDS.finditer(before)]
    return last


def _blocks(cubin: Cubin, source: str, most: int) -> int:
    """Count the blocks, up to so many, that an SM's registers have room for, of that kernel."""
    found = _bounds(source)
    registers = max(kernel.registers for kernel in cubin.kernels if found is None or kernel.name == found[2])
    warps = -(-int(found[1]) // 32) if found else 1
    return min(most, _REGISTERS_OF_SM // (-(-registers // 8) * 256 * warps))


def _spills(cubin: Cubin) -> int:
    return sum(kernel.spill_store_bytes for kernel in cubin.kernels)


def _compile(source: str, arch: str, options: list[str]) -> Cubin:
    nvrtc = _bindings()
    headers = [[text.encode() for text in part] for part in (_HEADERS.values(), _HEADERS)]
    program = _call("nvrtcCreateProgram", source.encode(), b"dwtir.cu", len(_HEADERS), *headers)
    try:
        search = current.get()
        with stopped(nvrtc, program, search):
            result = _compile_program(program, [option.encode() for option in options])
        if search and result.name == "NVRTC_ERROR_CANCELLED":
            raise search.refuse(SlowCompileError(f"NVRTC was stopped, after {search.seconds:g} s at the latest"))
        log = _buffer("nvrtcGetProgramLog", program).rstrip(b"\0 \n").decode()
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            if find_toolkit().include is None and "could not open source file" in log:
                raise ToolchainError(f"the CUDA headers are missing. To get them: {INSTALL_CUDA}\n{log}")
            if result != nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
                # Not the source's fault: a missing libnvrtc-builtins, for one.
                raise ToolchainError(f"NVRTC failed with {result.name}. To repair it: {INSTALL_CUDA}\n{log}")
            raise CompileError(f"NVRTC rejected the generated code for {arch}:\n{log}")
        code = _buffer("nvrtcGetCUBIN", program)
    finally:
        _call("nvrtcDestroyProgram", program)
    kernels = _resources(log)
    if not kernels:
        raise CompileError(f"NVRTC reported no kernel for {arch}; its log is {log!r}")
    return Cubin(code, kernels)


def _compile_program(program: Any, arguments: list[bytes]) -> Any:
    """Call ``nvrtcCompileProgram`` by ctypes: bindings of 2025 keep the GIL all the while."""
    major, _ = nvrtc_version()
    function = ctypes.CDLL(f"libnvrtc.so.{major}").nvrtcCompileProgram  # loaded by the bindings
    options = (ctypes.c_char_p * len(arguments))(*arguments)
    return _bindings().nvrtcResult(function(ctypes.c_void_p(int(program)), len(arguments), options))


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the installed NVRTC; raises `ToolchainError` when it is missing."""
    major, minor = _call("nvrtcVersion")
    return major, minor


@cache
def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc

        # The bindings look for the library at the first call, not at import.
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        what = "cuda-bindings" if isinstance(error, ImportError) else "the NVRTC library"
        raise ToolchainError(f"{what} is not usable ({error}). To get it: {INSTALL_CUDA}") from error
    return nvrtc


def _check_arch(arch: str) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise InvalidTargetError(f"arch must look like sm_90, got {arch!r}")
    known = _call("nvrtcGetSupportedArchs")
    if int(match[1]) not in known:
        major, minor = nvrtc_version()
        names = ", ".join(f"sm_{number}" for number in known)
        raise InvalidTargetError(f"NVRTC {major}.{minor} does not know the architecture {arch}; it knows {names}")


def _call(function: str, *arguments: object) -> Any:
    """Call an NVRTC function that fails only for lack of memory or a bug of ours."""
    nvrtc = _bindings()
    result, *values = getattr(nvrtc, function)(*arguments)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(f"{function} failed: {result.name}")
    return values[0] if len(values) == 1 else values


def _buffer(function: str, program: object) -> bytes:
    content = bytearray(_call(f"{function}Size", program))
    _call(function, program, content)
    return bytes(content)


# From this version on NVRTC takes code from the driver's cache, without the log that tells its
# resources. Earlier ones refuse the option.
_FIRST_WITH_CACHE = (12, 9)

_FUNCTION = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_NUMBERS = {
    "stack_frame_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_store_bytes": re.compile(r"(\d+) bytes spill stores"),
    "registers": re.compile(r"Used (\d+) registers"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),  # left out by ptxas when 0
}


def _resources(log: str) -> tuple[KernelResources, ...]:
    # Split at the headings: [before, name, text, name, text, ...].
    _, *parts = _FUNCTION.split(log)
    kernels = []
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        found = {field: pattern.search(text) for field, pattern in _NUMBERS.items()}
        numbers = {field: int(match[1]) if match else 0 for field, match in found.items()}
        kernels.append(KernelResources(name=name, **numbers))
    return tuple(kernels)
