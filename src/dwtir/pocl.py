"""A way around one fault of PoCL 3.0, the OpenCL for processors that PyPI has."""

import ctypes
import itertools
import os
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyopencl

_cpu_names: list[Any] = []  # What name_cpu pointed PoCL to; it must outlive the device.


def name_cpu(device: "pyopencl.Device") -> None:
    """Give PoCL 3.0 a CPU name that its own compiler accepts.

    On a processor newer than its LLVM 14 (AMD Zen 5) it passes ``-target-cpu generic``, which clang refuses, behind all
    options: nothing builds. So the name is replaced in the device's struct, behind the target triple.
    """
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        # As PoCL chooses its built-in library: the two must agree on how vectors are passed.
        name = b"skylake-avx512" if "avx512f" in info.read() else b"haswell"
    _cpu_names.append(ctypes.create_string_buffer(name))
    pointer = struct.pack("Q", ctypes.addressof(_cpu_names[-1]))

    def starts_with(address: int, text: bytes) -> bool:
        try:  # Most words are no pointers: reading there is an error here, not a crash.
            return os.pread(memory.fileno(), len(text), address) == text
        except (OSError, OverflowError):
            return False

    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        words = struct.unpack("256Q", os.pread(memory.fileno(), 2048, device.int_ptr))
        for i, (triple, cpu) in enumerate(itertools.pairwise(words)):
            if not starts_with(triple, b"x86_64-unknown-linux-gnu\0"):
                continue
            if starts_with(cpu, b"generic\0"):
                os.pwrite(memory.fileno(), pointer, device.int_ptr + 8 * (i + 1))
            elif not starts_with(cpu, name + b"\0"):  # Else an earlier call has replaced it.
                continue
            return
    raise OSError("its device struct is not as expected")
