"""What the loops of several schedules go through: bound, unrolled, staged, drawn at random."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..typed import LoopRV, SBlockRV, Schedule

_WEIGHT = 0.5
"""Weight of each value of a random variable. Weights need not add up to 1; this one is short
in a trace, and TVM does not write it as an integer."""


def sample(sch: Schedule, values: Sequence[int], decision: int | None = None) -> Any:
    """Draw one of some values as a random variable of the schedule: the one at a place, or any."""
    return sch.sample_categorical(list(values), [_WEIGHT] * len(values), decision)


def block_names(sch: Schedule) -> list[str]:
    """List the names of all blocks."""
    import tvm_ffi
    from tvm.s_tir import SBlock

    names: list[str] = []
    tvm_ffi.structural_walk(sch.mod["main"].body, [(SBlock, lambda block: names.append(block.name_hint))])
    return names


def number(sch: Schedule, drawn: Any) -> int:
    """Return the value of a parameter that may be a random variable of the schedule."""
    return drawn if isinstance(drawn, int) else int(sch.get(drawn))


def loops_of(sch: Schedule, name: str) -> Any:
    """Find the loops of a block."""
    return sch.get_loops(sch.get_sblock(name))


def get_blocks(sch: Schedule) -> tuple[SBlockRV, SBlockRV, SBlockRV]:
    """Find the blocks of `compute` in a schedule: the padding, the convolution and the epilogue."""
    return sch.get_sblock("pad"), sch.get_sblock("depthwise_conv2d"), sch.get_sblock("epilogue")


def stage_operands(sch: Schedule, epilogue: SBlockRV, at: LoopRV, row: LoopRV, lanes: Any = None) -> None:
    """Load the tensors of the epilogue into registers, a vector of the innermost axis each.

    `at` is the thread's loop, and `row` that, or one in it where the epilogue is already: images are loaded there, what
    a channel has before. `lanes` are an image's vector: by default the whole axis.
    """
    for index in range(1, len(sch.get(epilogue).reads)):
        load = sch.cache_read(epilogue, index, "local")
        is_image = len(sch.get(load).iter_vars) == 4
        compute_at(sch, load, row if is_image else at)
        *outer, innermost = sch.get_loops(load)[-len(sch.get(load).iter_vars) :]
        if lanes is not None and len(outer) == 3:
            vectors, innermost = sch.split(innermost, [None, lanes])
            outer.append(vectors)
        unroll_all(sch, outer)
        sch.vectorize(innermost)


def compute_at(sch: Schedule, block: SBlockRV, loop: LoopRV, scope: str = "") -> None:
    """Compute a block under a loop, where it keeps all of its loops, into a scope of memory if given."""
    if scope:
        sch.set_scope(block, 0, scope)
    sch.compute_at(block, loop, preserve_unit_loops=True)


def bind(sch: Schedule, grid: Iterable[LoopRV], *threads: LoopRV) -> None:
    """Make loops, fused, the blocks of a grid, and others the threads of a block."""
    sch.bind(sch.fuse(*grid), "blockIdx.x")
    bind_threads(sch, *threads)


def bind_threads(sch: Schedule, *loops: LoopRV) -> None:
    """Make loops the threads of a block, the last one along x."""
    for axis, loop in zip("zyx"[-len(loops) :], loops, strict=True):
        sch.bind(loop, f"threadIdx.{axis}")


def unroll_all(sch: Schedule, loops: Iterable[LoopRV]) -> None:
    """Unroll loops in TVM, which proves tests for padding away once an index is a number."""
    for loop in loops:
        sch.unroll(loop)


def unroll_in_source(sch: Schedule, loop: LoopRV) -> None:
    """Unroll a loop and all below it by ``#pragma unroll``, for the compiler of the source.

    The source stays short, and TVM's passes fast.
    """
    sch.annotate(loop, "pragma_auto_unroll_max_step", 1 << 20)
    sch.annotate(loop, "pragma_unroll_explicit", 0)
