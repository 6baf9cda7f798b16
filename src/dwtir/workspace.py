"""Intermediate buffers in device memory, turned into parameters.

TVM would allocate them inside the host function, from a pool of its own. Two calls
on two streams would then share memory, and the first call inside a CUDA graph
would allocate. As parameters they come from the caller's library, whose allocator
knows streams and graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm

__all__ = ["hoist"]


def hoist(mod: tvm.IRModule) -> tuple[tvm.IRModule, tuple[tuple[int, ...], ...]]:
    """Move the global buffers of a scheduled ``main`` to its parameters, before the output.

    Returns
    -------
    (tvm.IRModule, tuple of tuple of int)
        The module, and the shapes of the new parameters, which are float32.
    """
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
    func = tirx.PrimFunc(
        [*inputs, *moved, out], SBlockRealize([], True, block), main.ret_type, main.attrs
    )
    return tvm.IRModule({"main": func}), tuple(tuple(map(int, b.ty.shape)) for b in moved)
