"""The CPU that a benchmark shares: with other processes, and with the C library's allocator."""

import ctypes
import os
import time
from functools import cache
from pathlib import Path

LOUD = 0.2
"""CPUs kept busy by others, above which times are disturbed. Linux counts in ticks of 10 ms."""

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait, among the fields of a line of /proc/stat
_SUMMED = 8  # user to steal; those of guests, after them, are counted as user already
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_INT_MAX = 2**31 - 1


class OtherLoad:
    """What others use of the CPUs from now on: other processes, and a host of the machine."""

    def __init__(self) -> None:
        self._busy, self._own, self._start = _busy(), time.process_time(), time.monotonic()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of CPU that others have used since, and the seconds since."""
        others = (_busy() - self._busy) - (time.process_time() - self._own)
        return max(0.0, others), time.monotonic() - self._start


def _busy() -> float:
    """Return the seconds that all CPUs have been busy, as Linux counts them."""
    fields = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields[:_SUMMED]]
    idle = sum(ticks[index] for index in _IDLE)
    return (sum(ticks) - idle) / float(os.sysconf("SC_CLK_TCK"))


@cache
def keep_memory() -> str:
    """Let malloc keep what is freed, and say whether it does.

    PyTorch allocates its output on every call. glibc gives memory of that size back to the
    system and takes it anew, which under a hypervisor takes ten times the convolution.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return "gives back what is freed, for it has no mallopt"
    if not (mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _INT_MAX)):
        return "gives back what is freed, for mallopt refused"
    return "keeps what is freed"
