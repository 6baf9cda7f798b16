"""Running a GPU schedule on the CPU, to check its loops, padding and staging without a GPU."""

from collections.abc import Callable
from typing import Any

from . import cuda_functions
from .typed import IRModule, PrimFunc, Schedule

_GPU_ONLY = {"Annotate", "Bind", "Tensorize", "Unroll"}
_EXTERN = "tirx.call_pure_extern"
_LEFT_OUT = {
    *("tirx.tvm_storage_sync", "tirx.ptx.cp_async_commit_group", "tirx.ptx.cp_async_wait_group"),
    *("tirx.ptx.mbarrier_init", "tirx.ptx.mbarrier_arrive_nocount"),
    "tirx.tvm_access_ptr",  # a use that TVM does not see; of bfloat16 LLVM has another type
}


def _half_of(pair: Any, second: Any) -> Any:
    from tvm import tirx

    zeros = tirx.Broadcast(tirx.const(0, str(pair.ty).removesuffix("x2")), 2)
    first, other = (tirx.Shuffle([pair, zeros], lanes) for lanes in ([0, 2], [2, 1]))
    return tirx.Select(tirx.Broadcast(second == 0, 2), first, other)


_PLAIN: dict[str, Callable[..., Any]] = {cuda_functions.WORD: lambda pair: pair, cuda_functions.HALF_OF: _half_of}
"""What functions of the CUDA source compute."""


def replay_on_cpu(sch: Schedule, func: PrimFunc) -> IRModule:
    """Apply the trace of a GPU schedule without its thread bindings, and without unrolling, which takes LLVM long.

    Thread axes become loops, stages plain buffers. Missing barriers it cannot show; OpenCL on PoCL does.
    """
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    trace = sch.trace
    kept = [inst for inst in trace.insts if inst.kind.name not in _GPU_ONLY]
    decisions = {inst: trace.decisions[inst] for inst in kept if inst in trace.decisions}
    replayed = Schedule(_without_barriers(func))
    Trace(kept, decisions).apply_to_schedule(replayed, remove_postproc=False)
    return replayed.mod


def _without_barriers(func: PrimFunc) -> PrimFunc:
    """Leave out what a function has itself of barriers, and waits for its copies, and words on uses."""
    import tvm_ffi
    from tvm import ir, tirx

    def skip(call: ir.Call) -> tirx.Expr:
        if not isinstance(call.op, ir.Op):
            return call
        if call.op.name == "tirx.call_extern" and str(call.args[0].value) == cuda_functions.AWAIT:
            return tirx.const(0, "int32")
        if call.op.name == "tirx.reinterpret" and getattr(getattr(call.args[0], "op", None), "name", "") == _EXTERN:
            name, word, *others = call.args[0].args
            return _PLAIN[str(name.value)](word.args[0], *others)
        return tirx.const(0, "int32") if call.op.name in _LEFT_OUT else call

    return tvm_ffi.structural_map(func, [(ir.Call, skip)])
