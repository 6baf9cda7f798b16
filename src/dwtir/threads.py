"""How many threads TVM's pool has on the CPU."""

import os
from functools import cache
from pathlib import Path

SETTINGS = ("TVM_NUM_THREADS", "OMP_NUM_THREADS")


@cache
def use_all_cores() -> None:
    """Let TVM use each physical core that this process may run on.

    By itself TVM takes half of the logical CPUs, which may be cores, and looks at no affinity. What the user has set
    stays. It takes effect if nothing has run on TVM's pool yet. A fork has no threads of the pool, and goes on alone.
    """
    os.register_at_fork(after_in_child=_use_one)
    if not any(name in os.environ for name in SETTINGS):
        os.environ["TVM_NUM_THREADS"] = str(physical_cores())


def _use_one() -> None:
    import tvm

    tvm.get_global_func("runtime.config_threadpool")(1, 1)


def physical_cores() -> int:
    """Count the physical cores that this process may run on; CPUs, where Linux does not say."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "core_id")))
        except OSError:
            cores.add((str(cpu), ""))
    return len(cores)
