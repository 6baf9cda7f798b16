"""What a launch of a kernel takes of a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

_Size: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Resources:
    """What one launch takes; None where nothing says it.

    Of several kernels the first is meant; `registers`, `spill_bytes` and `stack_bytes` are the most of all.
    """

    grid: _Size | None = None
    block: _Size | None = None
    """Thread blocks, and threads of one, in x, y and z. None on the CPU."""
    shared_bytes: int | None = None
    """Shared (local) memory of a block."""
    registers: int | None = None
    """32-bit registers of a thread."""
    spill_bytes: int | None = None
    """Bytes that a thread stores because they found no register."""
    stack_bytes: int | None = None
    """Local memory of a thread: for spills, and for arrays whose places are not numbers."""

    @property
    def threads(self) -> int | None:
        """Threads of a block."""
        return None if self.block is None else prod(self.block)


def launch(extents: Mapping[str, int]) -> tuple[_Size, _Size]:
    """Return grid and block of threads' extents by TVM's tags."""
    x, y, z, *block = (extents.get(f"{tag}Idx.{axis}", 1) for tag in ("block", "thread") for axis in "xyz")
    return (x, y, z), (block[0], block[1], block[2])


def with_cubin_resources(known: Resources, cubin: Any) -> Resources:
    """Add what the CUDA compiler reported for the kernels of a cubin."""
    kernels = sorted(cubin.kernels, key=lambda kernel: (len(kernel.name), kernel.name))
    return replace(
        known,
        shared_bytes=kernels[0].shared_bytes + (known.shared_bytes or 0),
        registers=max(kernel.registers for kernel in kernels),
        spill_bytes=max(kernel.spill_store_bytes for kernel in kernels),
        stack_bytes=max(kernel.stack_frame_bytes for kernel in kernels),
    )
