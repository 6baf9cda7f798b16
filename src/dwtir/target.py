"""The device that a kernel is made for: its limits and its peaks.

The only module that names an architecture. Everything that a schedule or a
check wants to know of a device is a field of `Target`.
"""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from . import cuda
from .errors import InvalidTargetError, ToolchainError

if TYPE_CHECKING:
    import tvm


_LIMITS = {
    "max_threads_per_block": "max_threads_per_block",
    "max_shared_memory_per_block": "shared_bytes_per_block",
    "thread_warp_size": "warp_size",
}
"""Fields of a `Target`, by TVM's names of them."""

_MOST_SHARED = {"sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227}  # KiB


@dataclass(frozen=True)
class Target:
    """A device, as schedules see it."""

    name: str
    """Name of the device, as in ``tune_db/<name>/``."""
    kind: str
    """One of "cuda", "cpu" and "opencl": which code is generated."""
    arch: str
    """``sm_90`` and the like, or LLVM's name of the CPU."""
    units: int
    """Streaming multiprocessors of a GPU, cores of a CPU."""
    max_threads_per_block: int = 1024
    shared_bytes_per_block: int = 48 * 1024
    warp_size: int = 32
    """Limits of a thread block, without opting in to more."""
    vector_bytes: int = 0
    """Width of a CPU's vector registers."""
    features: tuple[str, ...] = ()
    """LLVM's CPU features, such as ``+avx512f``."""
    bandwidth: float | None = None
    fp32_rate: float | None = None
    """Measured copy bandwidth in bytes/s, counting reads and writes, and peak float32 FLOP/s. None
    where nobody measured."""

    def __post_init__(self) -> None:
        if self.kind == "cuda" and not re.fullmatch(r"sm_[0-9]{2,3}[af]?", str(self.arch)):
            raise InvalidTargetError(f"a CUDA target needs its architecture, such as 'sm_90', got arch={self.arch!r}")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Target":
        """Make it of its fields as JSON has them."""
        return cls(**{**fields, "features": tuple(fields["features"])})

    @property
    def is_gpu(self) -> bool:
        """Whether kernels are grids of thread blocks."""
        return self.kind != "cpu"

    @property
    def has_mma(self) -> bool:
        """Whether warps multiply matrices of halves by ``mma.sync.m16n8k16``: from sm_80 on."""
        return self._generation >= 80

    @property
    def launches_early(self) -> bool:
        """Whether a kernel can be launched while the one before runs, and wait for its end: from sm_90 on."""
        return self._generation >= 90

    def widening(self, dtype: str) -> int:
        """Return the bytes of shared memory for each byte of this type: below sm_80 TVM keeps bfloat16 as float32."""
        return 2 if dtype == "bfloat16" and 0 < self._generation < 80 else 1

    @property
    def _generation(self) -> int:
        return int(self.arch.removeprefix("sm_").rstrip("af")) if self.kind == "cuda" else 0

    @property
    def most_shared_bytes(self) -> int:
        """Shared memory of a block that opts in to all that there is, by ``shared.dyn``."""
        return 1024 * _MOST_SHARED.get(self.arch.rstrip("af"), 0) or self.shared_bytes_per_block

    def tvm(self) -> "tvm.target.Target":
        """Return this target as TVM's."""
        import tvm

        if self.kind == "cpu":
            config: dict[str, Any] = {"kind": "llvm", "mcpu": self.arch, "num-cores": self.units}
            if self.features:
                config["mattr"] = list(self.features)
            return tvm.target.Target(config, host=config)
        config = {"kind": self.kind} | {key: getattr(self, field) for key, field in _LIMITS.items()}
        if self.kind == "cuda":
            config["arch"] = self.arch
        return tvm.target.Target(config, host={"kind": "llvm"})


TargetLike: TypeAlias = "Target | str | Mapping[str, Any] | tvm.target.Target | None"
"""What functions of dwtir take as a target."""

KNOWN_GPUS = {
    gpu.name: gpu
    for gpu in (
        Target("nvidia-h200", "cuda", "sm_90", 132, bandwidth=4.25e12, fp32_rate=67e12),
        Target("nvidia-h100-80gb-hbm3", "cuda", "sm_90", 132, bandwidth=2.96e12, fp32_rate=67e12),
        Target("nvidia-a100-sxm4-80gb", "cuda", "sm_80", 108, fp32_rate=19.5e12),
        Target("nvidia-l4", "cuda", "sm_89", 58, fp32_rate=30.3e12),
        Target("tesla-t4", "cuda", "sm_75", 40, fp32_rate=8.1e12),
    )
}
"""GPUs that can be compiled for by name, on a machine without them."""

_OPENCL = Target("opencl", "opencl", "opencl", 1)


def resolve(target: TargetLike = None) -> Target:
    """Find the device that is meant.

    Parameters
    ----------
    target : Target, str, mapping, tvm.target.Target or None
        None takes the GPU that is present, else the CPU. Names are ``"cuda"`` and ``"cuda:1"`` (a GPU that must be
        present), ``"cpu"``, ``"opencl"``, one of `KNOWN_GPUS`, or an architecture such as ``"sm_80"``. A mapping or a
        TVM target gives at least ``kind`` and, for CUDA, ``arch``.

    Raises
    ------
    InvalidTargetError
        If the target is none of these.
    ToolchainError
        If the GPU that is asked for is not usable; the message says why.
    """
    if isinstance(target, Target):
        return target
    if target is None:
        return _present_gpu(0) if cuda.device_count() else _host()
    if isinstance(target, str):
        return _by_name(target)
    if not isinstance(target, Mapping):
        target = _tvm_attributes(target)
    return _by_attributes(target)


def _by_name(name: str) -> Target:
    if name in ("cpu", "llvm"):
        return _host()
    if name == "opencl":
        return _OPENCL
    if name in KNOWN_GPUS:
        return KNOWN_GPUS[name]
    device, _, index = name.partition(":")
    if device == "cuda" and (index.isdecimal() or name == "cuda"):
        return _present_gpu(int(index or 0))
    if name.startswith("sm_"):
        return _by_attributes({"kind": "cuda", "arch": name})
    raise InvalidTargetError(
        f"unknown target {name!r}; allowed are 'cuda', 'cuda:<index>', 'cpu', 'opencl', "
        f"'sm_<nn>', {', '.join(map(repr, KNOWN_GPUS))}"
    )


def _by_attributes(attributes: Mapping[str, Any]) -> Target:
    kind = attributes.get("kind")
    if kind in ("llvm", "cpu"):
        return replace(_host(), arch=str(attributes.get("mcpu", _host().arch)))
    if kind == "opencl":
        found = _OPENCL
    elif kind == "cuda":
        arch: Any = attributes.get("arch")
        found = next((gpu for gpu in KNOWN_GPUS.values() if gpu.arch == arch), KNOWN_GPUS["nvidia-h200"])
        found = replace(found, name=arch, arch=arch, bandwidth=None, fp32_rate=None)
    else:
        raise InvalidTargetError(f"the target's kind must be cuda, llvm or opencl, got {kind!r}")
    given = {field: attributes[key] for key, field in _LIMITS.items() if key in attributes}
    for field, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidTargetError(f"{field} must be a positive integer, got {value!r}")
    return replace(found, **given)


def _tvm_attributes(target: object) -> dict[str, Any]:
    import tvm

    if not isinstance(target, tvm.target.Target):
        raise InvalidTargetError(
            f"a target is None, a name, a mapping, a tvm.target.Target or a dwtir Target, got {type(target).__name__}"
        )
    return {"kind": target.kind.name} | {
        name: int(value) if isinstance(value, int) else str(value) for name, value in target.attrs.items()
    }


@cache
def _present_gpu(index: int) -> Target:
    gpu = cuda.device_properties(index)
    name = cuda.folder_name(gpu.name)
    found = KNOWN_GPUS.get(name, Target(name, "cuda", gpu.arch, gpu.multiprocessors))
    limits = {name: getattr(gpu, name) for name in _LIMITS.values()}
    return replace(found, arch=gpu.arch, units=gpu.multiprocessors, **limits)


@cache
def _host() -> Target:
    """Describe this machine's CPU, with the widest vectors that LLVM knows it to have."""
    from tvm import get_global_func

    if platform.machine().lower() not in ("x86_64", "amd64", "aarch64", "arm64"):
        raise ToolchainError(f"no CPU schedule for {platform.machine()}; x86-64 and arm64 have one")
    arch = str(get_global_func("target.llvm_get_system_cpu")())
    has = {str(name) for name, present in get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")().items() if present}
    vectors = 64 if "avx512f" in has else 32 if "avx2" in has else 16
    units, features = len(os.sched_getaffinity(0)), cpu_features(arch, has)
    return Target(f"cpu-{arch}", "cpu", arch, units, warp_size=1, vector_bytes=vectors, features=features)


def cpu_features(arch: str, has: set[str]) -> tuple[str, ...]:
    """List what LLVM shall use of a CPU, and what not: virtual machines hide what CPUs of that name have."""
    from tvm.target import Target as TvmTarget
    from tvm.target import codegen

    known = {str(name) for name in codegen.llvm_get_cpu_features(TvmTarget({"kind": "llvm", "mcpu": arch}))}
    hidden = known & (_USEFUL_FEATURES | {"gfni"}) - has
    return (*sorted(f"+{name}" for name in has & _USEFUL_FEATURES), *sorted(f"-{name}" for name in hidden))


_USEFUL_FEATURES = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
