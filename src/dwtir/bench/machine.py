"""What was measured on: device, versions, clocks, the rates that bound all times, and a shared CPU."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import time
import timeit
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from ..target import KNOWN_GPUS, Target
from ..threads import SETTINGS, physical_cores
from ..versions import installed, own
from .problem import import_torch

LOUD = 0.2
"""CPUs kept busy by others, above which times are disturbed. Linux counts in ticks of 10 ms."""

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait, among the fields of a line of /proc/stat
_SUMMED = 8  # user to steal; those of guests, after them, are counted as user already
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_INT_MAX = 2**31 - 1
_CLOCKS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem")
_SMI_SECONDS = 30
_COPY_BYTES, _GPU_COPY_BYTES = 2**26, 2**30
_MATRIX = 2048
_REPEATS = 5


def about(target: Target) -> dict[str, str]:
    """Name the device and its machine, and the versions of what computes."""
    found = {"device": target.name}
    if target.kind == "cuda":
        torch = import_torch()
        found |= {"GPU": str(torch.cuda.get_device_name(0)), "CUDA of torch": str(torch.version.cuda)}
        found["cuDNN"] = str(torch.backends.cudnn.version())
    else:
        found["CPU"] = _cpu_model()
        found["cores"] = f"{physical_cores()} of {os.cpu_count()} logical CPUs"
        found["malloc"] = keep_memory()
        found |= {name: os.environ[name] for name in SETTINGS if name in os.environ}
    found["python"] = platform.python_version()
    return found | own() | {"torch": installed("torch")}


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError as error:
        return f"of unknown model: {error}"
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model[1].strip() if model else f"{platform.machine()}; /proc/cpuinfo names no model"


class Clocks:
    """The clocks of a GPU over a benchmark, sampled after each layer.

    A GPU that has just computed still has its clocks. Those of a CPU cannot be read everywhere.
    """

    def __init__(self, target: Target) -> None:
        self._gpu = target.kind == "cuda"
        self._samples: list[dict[str, str]] = []
        self._reason = ""

    def sample(self) -> None:
        if self._gpu and not self._reason:
            found, self._reason = gpu_clocks(f"GPU-{import_torch().cuda.get_device_properties(0).uuid}")
            self._samples += [found] if found else []

    def about(self) -> dict[str, str]:
        """Return the driver and each clock's lowest and highest, or why they were not read."""
        found = {}
        if self._samples:
            last = self._samples[-1]
            found["driver"] = last["driver_version"]
            for what, name in (("SM clock", "sm"), ("memory clock", "mem")):
                seen = _range(sample[f"clocks.{name}"] for sample in self._samples)
                found[what] = f"{seen} MHz of {last[f'clocks.max.{name}']}, after each layer"
        if self._reason:
            found["clocks"] = f"not read: {self._reason}"
        return found


def gpu_clocks(gpu: str) -> tuple[dict[str, str], str]:
    """Ask nvidia-smi for the driver and the clocks of a GPU, by its UUID or index.

    They are by nvidia-smi's names, in MHz, with an empty text; or none, and why.
    """
    command = shutil.which("nvidia-smi")
    if command is None:
        return {}, "nvidia-smi is not on the PATH"
    query = [command, f"--id={gpu}", f"--query-gpu={','.join(_CLOCKS)}", "--format=csv,noheader,nounits"]
    try:
        child = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"nvidia-smi: {error}"
    values = [value.strip() for value in child.stdout.strip().split(",")]
    if child.returncode or len(values) != len(_CLOCKS):
        return {}, f"nvidia-smi ended with {child.returncode}: {' '.join((child.stderr or child.stdout).split())}"
    return dict(zip(_CLOCKS, values, strict=True)), ""


def _range(values: Iterable[str]) -> str:
    distinct = set(values)
    if all(value.isdecimal() for value in distinct):
        low, high = min(map(int, distinct)), max(map(int, distinct))
        return str(low) if low == high else f"{low} to {high}"
    return ", ".join(sorted(distinct))


def with_rates(target: Target) -> Target:
    """Return the target with its bandwidth and its float32 rate.

    Those of a CPU are measured: copies of 64 MiB on all cores, and NumPy's product of matrices. A GPU of unknown
    bandwidth, the first here, copies 1 GiB.
    """
    if target.kind == "cuda" and target.bandwidth is None:
        return replace(target, bandwidth=_gpu_copy_rate())
    if target.kind != "cpu":
        return target
    matrix = np.ones((_MATRIX, _MATRIX), np.float32)
    product_rate = 2 * _MATRIX**3 / _fastest(lambda: matrix @ matrix)
    return replace(target, bandwidth=_copy_rate(physical_cores()), fp32_rate=product_rate)


def limits(target: Target) -> str:
    """Write the rates of a target, and where they are from."""
    known = [
        f"{rate / 1e9:.0f} {unit}"
        for rate, unit in ((target.bandwidth, "GB/s"), (target.fp32_rate, "GFLOP/s"))
        if rate is not None
    ]
    if not known:
        return f"not known for {target.name}"
    known_gpu = KNOWN_GPUS.get(target.name)
    how = "known" if known_gpu and known_gpu.bandwidth == target.bandwidth else "measured by copies"
    if target.kind == "cpu":
        how += " and by NumPy's product of matrices"
    return f"{' and '.join(known)}, {how}"


def _gpu_copy_rate() -> float:
    torch = import_torch()
    source, copied = (torch.zeros(_GPU_COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))

    def copy() -> None:
        for _ in range(_REPEATS):
            copied.copy_(source)
        torch.cuda.synchronize()

    return 2 * _REPEATS * _GPU_COPY_BYTES / _fastest(copy)


def _copy_rate(threads: int) -> float:
    pairs = [(np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def copy_all() -> None:
            # NumPy copies without the interpreter's lock.
            list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))

        return 2 * threads * _COPY_BYTES / _fastest(copy_all)


def _fastest(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=1, repeat=_REPEATS))


class OtherLoad:
    """What others use of the CPUs from now on: other processes, and a host of the machine."""

    def __init__(self) -> None:
        self._busy, self._own, self._start = _busy(), time.process_time(), time.monotonic()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of CPU that others have used since, and the seconds since."""
        others = (_busy() - self._busy) - (time.process_time() - self._own)
        return max(0.0, others), time.monotonic() - self._start


def _busy() -> float:
    ticks = list(map(int, _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1 : 1 + _SUMMED]))
    idle = sum(ticks[index] for index in _IDLE)
    return (sum(ticks) - idle) / float(os.sysconf("SC_CLK_TCK"))


@cache
def keep_memory() -> str:
    """Let malloc keep what is freed, and say whether it does.

    PyTorch allocates its output on every call; glibc takes memory of that size anew from the system, which under a
    hypervisor takes ten times the convolution.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return "gives back what is freed, for it has no mallopt"
    if not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _INT_MAX)):
        return "gives back what is freed, for mallopt refused"
    return "keeps what is freed"
