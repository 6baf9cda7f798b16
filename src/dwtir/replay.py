"""Running a GPU schedule on the CPU, to check its loops, padding and staging without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm
    from tvm.s_tir import Schedule

_GPU_ONLY = {"Bind", "Tensorize", "Unroll"}
_BARRIERS = {"tirx.tvm_storage_sync", "tirx.ptx.cp_async_commit_group", "tirx.ptx.cp_async_wait_group"}


def replay_on_cpu(sch: Schedule, func: tvm.tirx.PrimFunc) -> tvm.IRModule:
    """Apply the trace of a GPU schedule without its thread bindings, and without unrolling, which takes LLVM long.

    Thread axes become loops, shared and local stages plain buffers. What this
    cannot show are missing barriers; OpenCL on PoCL does.
    """
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    trace = sch.trace
    kept = [inst for inst in trace.insts if inst.kind.name not in _GPU_ONLY]
    decisions = {inst: trace.decisions[inst] for inst in kept if inst in trace.decisions}
    replayed = Schedule(_without_barriers(func))
    Trace(kept, decisions).apply_to_schedule(replayed, remove_postproc=False)
    return replayed.mod


def _without_barriers(func: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc:
    """Leave out what a function has itself of barriers, and waits for its copies."""
    import tvm_ffi
    from tvm import ir, tirx

    def skip(call: ir.Call) -> tirx.PrimExpr:
        is_barrier = isinstance(call.op, ir.Op) and call.op.name in _BARRIERS
        return tirx.const(0, "int32") if is_barrier else call

    return tvm_ffi.structural_map(func, [(ir.Call, skip)])
