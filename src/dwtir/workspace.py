"""Intermediate buffers in device memory, turned into parameters.

TVM would allocate them inside the host function, from a pool of its own. Two calls
on two streams would then share memory, and the first call inside a CUDA graph
would allocate. As parameters they come from the caller's library, whose allocator
knows streams and graphs.
"""

from typing import TypeAlias

from .shape import DTYPES
from .typed import IRModule

Workspace: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"
"""Dtype and shape of each of a kernel's intermediate buffers."""


def hoist(mod: IRModule) -> tuple[IRModule, Workspace]:
    """Move the global buffers of a scheduled ``main`` to its parameters, before the output."""
    import tvm
    from tvm import tirx
    from tvm.s_tir.stmt import SBlock, SBlockRealize

    main = mod["main"]
    root = main.body.block
    moved = [buffer for buffer in root.alloc_buffers if buffer.scope() == "global"]
    if not moved:
        return mod, ()
    kept = [buffer for buffer in root.alloc_buffers if buffer.scope() != "global"]
    block = SBlock([], [], [], root.name_hint, root.body, alloc_buffers=kept)
    *inputs, out = main.params
    func = tirx.PrimFunc([*inputs, *moved, out], SBlockRealize([], True, block), main.ret_type, main.attrs)
    return tvm.IRModule({"main": func}), tuple(
        (str(buffer.ty.dtype), tuple(map(int, buffer.ty.shape))) for buffer in moved
    )


def checked_dtype(dtype: str) -> str:
    """Return a buffer's dtype as a file has it; ValueError if no kernel of ours has it."""
    if dtype not in DTYPES:
        raise ValueError(f"the dtype of a workspace must be one of {list(DTYPES)}, got {dtype!r}")
    return dtype
