"""The convolution of NHWC halves as products over pairs of channels; see `dwtir.pairs`.

Blocks of TensorIR of a block of threads: ``band``, the banded matrices as lanes hold them; ``first`` and ``pad``,
inputs on their way to shared memory before the first step and in a step, each ``copy`` an instruction, of a vector of
channels, and what is added to a step's results, to the thread that adds it; ``epilogue``, the results of a step
before, and of the last two behind all; ``multiply``, the sums of a step: a row of inputs after the other, each with
all products that it is part of; ``leave``, the fused steps and the one rounding, in shared memory.

What a lane holds follows ``mma.sync.m16n8k16``, as in `compute.banded`. Lane ``4 * m + x`` has pixels
``x`` and ``x + 4`` of the windows of strips ``m`` and ``m + 8``, and the sums of their columns ``x``.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from math import prod
from typing import NamedTuple, TypeAlias

from tvm import tirx
from tvm.script import tirx as T

from .. import cuda_functions
from ..epilogue import Epilogue
from ..pairs import COLUMNS, LAG, VECTOR, Pairs
from . import script
from .forward import both_ends
from .mma import multiply
from .pair_operands import Operands
from .pair_tasks import Tasks
from .parts import (
    all_hold,
    arrive,
    begin_barrier,
    by_lane,
    by_lanes,
    commit_copies,
    copy_vector,
    dynamic,
    local,
    synchronise,
    untold,
    use,
    wait,
    wait_for_copies,
    when,
)

Met: TypeAlias = tuple[tuple[int, int], ...]
"""Sums that a row of inputs is part of, each with the row of the kernel."""


class Shared(NamedTuple):
    """What a block has in shared memory: inputs, results, operands of fused steps, and a residual."""

    staged: tirx.Buffer
    results: tirx.Buffer
    taken: dict[str, tirx.Buffer]
    added: tirx.Buffer


def products(pairs: Pairs, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient."""
    shape = pairs.shape
    H, C = shape.source[0], shape.result_channels
    KH, SH = shape.kernel[0], shape.stride[0]
    R, STEPS, TURNS = pairs.rows, pairs.steps, pairs.turns
    VECTORS, WORDS, WARPS = pairs.vectors, pairs.words, pairs.warps
    AHEAD, DEPTHS, DELAY, SUMS = pairs.ahead, pairs.depths, pairs.delay, pairs.rows + pairs.delay
    FIRST, LAST = min(AHEAD + 1, STEPS * TURNS), pairs.leaving
    BN, BY, BX, BC = pairs.blocks
    dtype = shape.dtype
    fused, SPARE = pairs.fused(epilogue), pairs.has_spare
    BIASED = fused.bias and not SPARE
    SKIPS = pairs.skips and not (fused.bias and SPARE)
    TAKEN = dict.fromkeys(fused.taken, (pairs.channels, dtype if fused.shared.steps else "float32"))
    if BIASED:
        TAKEN["bias"] = (2 * pairs.channels, "float32")
    declare, _ = both_ends(shape, epilogue)
    # By what SiLU wants, once instead of for each result.
    TIMES = cuda_functions.SILU_FACTOR if fused.own.steps[:2] == ("scale_shift", "silu") else 1.0
    (_, finish_own), (_, finish_shared) = both_ends(shape, fused.own, TIMES), both_ends(shape, fused.shared)
    SUMS_DTYPE = "float32" if fused.shared.steps else dtype  # of what is in shared memory
    RESIDUAL = "residual" in epilogue.steps
    ENDS = pairs.is_shifted and shape.batch * prod(shape.source) % VECTOR > 0
    SIZE = 16 // (4 if fused.shared.steps else 2)
    tasks, multiplied = Tasks(pairs), Operands(pairs, fused.bias and SPARE)
    SPAN = pairs.result_span

    @script.inline
    def copy_span(shared, k, find, span, size):
        for v in range(span):
            with T.sblock("copy"):
                vk, vv = T.axis.remap("SS", [k, v])
                found = T.meta_var(find(vk, vv))
                T.reads(size[0], found[2])
                T.writes(shared[found[3] + vv])
                shared[found[3] + vv] = T.if_then_else(size[0] == 2 * span, found[2], T.cast(0, dtype))

    @script.inline
    def load(shared, turns, find, span, ends=False):
        """Begin to copy spans to shared memory, or zeros where there are none; an image's last ones may be parts."""
        size = local("int32", 1)
        for k in T.unroll(turns):
            first = T.meta_var(find(k, 0))
            if first[0]:
                size[0] = first[1]
                if ends:
                    if tirx.all(0 < size[0], size[0] < 2 * span):
                        for v in range(span):
                            part = T.meta_var(find(k, v))
                            shared[part[3] + v] = T.if_then_else(2 * v < size[0], part[2], T.cast(0, dtype))
                    else:
                        copy_span(shared, k, find, span, size)
                else:
                    copy_span(shared, k, find, span, size)

    def take(bands, taken: dict[str, tirx.Buffer], weight, operands, c, vw, vl):
        """Take what stays: the bands, and operands of fused steps, into shared memory.

        A bias that sums begin with comes there as products have their sums.
        """
        untold()
        multiplied.bands(bands, weight, operands, c, vw, vl)
        thread = vw * 32 + vl
        for name, buffer in taken.items():
            number = thread // 4 * 2 + thread % 2 if name == "bias" and fused.bias else thread
            with when(thread < buffer.shape[0]):
                value = T.cast(operands[name][T.min(c * pairs.channels + number, C - 1)], buffer.dtype)
                T.buffer_store(buffer, value * T.float32(TIMES) if TIMES != 1 and name != "bias" else value, [thread])

    def ready(barrier, vw, vl):
        untold()
        begin_barrier(barrier, 32 * WARPS, vw * 32 + vl)

    def start(name: str, met: Met, taken: dict[str, tirx.Buffer], acc, vw):
        with by_lane(name) as vl:
            untold()
            for result in [result for result, tap in met if tap == 0]:
                begin(acc, result, taken, vw, vl)

    def sums(shared: Shared, bands, acc, block, turn, step, vw):
        """Go down the rows of a stage, and leave each result behind its last one. Rows of padding add nothing."""
        held = [local(dtype, count, WORDS, 32, depth // 8, 2, 2) for depth, count in DEPTHS]
        line = block[1] * (pairs.height * SH) + step * pairs.stage_rows + pairs.first_row
        at = turn, step
        if not SKIPS:
            add_rows(shared, bands, held, acc, block, at, vw)
        elif STEPS == 1:
            add_rows(shared, bands, held, acc, block, at, vw, line)
        else:  # without tests sums move to the next step's places as products add to them
            with T.If(there(line, pairs.stage_rows)):
                with T.Then():
                    add_rows(shared, bands, held, acc, block, at, vw)
                with T.Else():
                    add_rows(shared, bands, held, acc, block, at, vw, line)

    def there(first, rows: int):
        return all_hold(0 <= first, first + rows <= H)

    def add_rows(shared: Shared, bands, held, acc, block, at, vw, line=None):
        name = "" if line is None else "_there"
        for row in range(pairs.stage_rows):
            met = pairs.met(row)
            if met:
                apart = (met[1][0] - met[0][0], met[0][1] - met[1][1]) if len(met) > 1 else (1, 0)
                start(f"start{row}{name}", met, shared.taken, acc, vw)
                with ExitStack() as tested:
                    if line is not None:
                        tested.enter_context(T.If(there(line + row, 1)))
                        tested.enter_context(T.Then())
                    multiplied.window(f"window{row}{name}", row, shared.staged, held, block, pairs.stage(*at), vw)
                    for (depth, count), part, band in zip(DEPTHS, held, bands, strict=True):
                        sizes = (len(met), count, WORDS, depth)
                        multiply(f"products{depth}_{row}{name}", sizes, (part, band), acc, vw, met[0], apart)
                left = [result for result, tap in met if tap == KH - 1 and result < R]
                leave_rows(name, left, shared, acc, at, vw)

    def leave_rows(name: str, results: Iterable[int], shared: Shared, acc, at, vw):
        for result in results:
            with by_lane(f"leave{result}{name}") as vl:
                untold()
                leave(shared, acc, result, at, vw, vl)

    def begin(acc, result: int, taken: dict[str, tirx.Buffer], vw, vl):
        own = local("float32", 4)
        for word in range(WORDS):
            if BIASED:
                copy_vector(taken["bias"], (vw % pairs.parts * WORDS + word) * 4, own, 0, 4)
            for e in range(4):
                value = own[e] if BIASED else T.float32(0)
                T.buffer_store(acc, value, [vw, result, word, vl, e // 2, e % 2])

    def begun(acc, taken: dict[str, tirx.Buffer], _turn, vw, vl):
        untold()
        for result in range(DELAY):
            begin(acc, result, taken, vw, vl)

    def shift(acc, _turn, _step, vw, vl):
        """Keep the sums that no step has left, for the next."""
        untold()
        with T.unroll(DELAY) as r, T.unroll(WORDS) as word, T.unroll(2) as half, T.unroll(2) as one:
            T.buffer_store(acc, acc[vw, r + R, word, vl, half, one], [vw, r, word, vl, half, one])

    def load_taken(taken: dict[str, tirx.Buffer], first, count: int):
        loaded = {name: local(taken[name].dtype, count) for name in fused.taken}
        for name, buffer in loaded.items():
            lanes = count if buffer.dtype == dtype else min(4, count)
            for part in range(0, count, lanes):
                copy_vector(taken[name], first + part, buffer, part, lanes)
        return loaded

    def leave(shared: Shared, acc, result: int, at, vw, vl):
        """Leave a row of sums in shared memory, rounded if nothing else is to be done with them."""
        _, results, taken, _ = shared
        buffer = pairs.number(*at) % pairs.buffers * pairs.results
        together = min(SIZE, 2 * WORDS)
        own = local(results.dtype, together)
        vector, first = tasks.channels(vw)
        loaded = load_taken(taken, vector * VECTOR + first, 2 * WORDS) if fused.own.steps else {}
        for half in range(2):
            inside, image, across = tasks.strip(vw, half, vl)
            for part in range(0, 2 * WORDS, together):
                for e in range(together):
                    channel = part + e
                    value = acc[vw, result, channel // 2, vl, half, channel % 2]
                    T.buffer_store(own, value if fused.shared.steps else finish_own(value, loaded, channel, ()), [e])
                column, channel = across * COLUMNS + vl % 4, vector * VECTOR + first + part
                place = pairs.result_at(image, result, column, channel // SIZE, SIZE) + channel % SIZE
                with when(inside):
                    copy_vector(own, 0, results, buffer + place, together)

    def store(is_told: bool, out, shared: Shared, block, of, step, vw, vl):
        """Store what the step of two before has left."""
        (_, results, taken, added), thread, left = shared, vw * 32 + vl, tasks.left(of, step)
        T.reads(results[:])
        T.writes(*([out[:, :, :, :]] if is_told else []))
        buffer = (pairs.number(of, step) + (pairs.buffers - LAG)) % pairs.buffers * pairs.results
        sums = local(results.dtype, SPAN)
        own = local(dtype, SPAN)
        loaded = load_taken(taken, thread % (VECTORS * VECTOR // SPAN) * SPAN, SPAN) if fused.shared.steps else {}
        for turn in range(tasks.stores):
            inside, place, task = tasks.result(block, left, turn, thread)
            line, column, vector, first = task
            with when(inside):
                for part in range(0, SPAN, SIZE):
                    number = vector * (VECTOR // SIZE) + (first + part) // SIZE
                    at = buffer + pairs.result_at(line // R, line % R, column, number, SIZE) + (first + part) % SIZE
                    copy_vector(results, at, sums, part, min(SIZE, SPAN))
                if RESIDUAL:
                    loaded["residual"] = local(dtype, SPAN)
                    copy_vector(added, tasks.residual_at(left, task), loaded["residual"], 0, SPAN)
                for e in range(SPAN):
                    T.buffer_store(own, finish_shared(sums[e], loaded, e, (e,)), [e])
                with T.vectorized(SPAN) as e:
                    T.buffer_store(out, own[e], [*place[:-1], place[-1] + e])

    def load_first(shared: Shared, image, block, stage, vw, vl):
        untold()
        load(shared.staged, tasks.loads, tasks.inputs(image, block, stage, vw * 32 + vl), pairs.source_span, ENDS)
        commit_copies()

    def load_later(has_stage: bool, image, operands, shared: Shared, block, turn, step, vw, vl):
        untold()
        if has_stage:
            find = tasks.inputs(image, block, pairs.stage(turn, step) + (AHEAD + 1), vw * 32 + vl)
            load(shared.staged, tasks.loads, find, pairs.source_span, ENDS)
        if RESIDUAL:
            find = tasks.residuals(operands["residual"], block, (turn, step), vw * 32 + vl)
            load(shared.added, tasks.stores, find, SPAN)
        commit_copies()

    @script.inline
    def copy_later(has_stage, at, image, operands, shared, block):
        by_lanes("pad", WARPS, load_later, has_stage, image, operands, shared, block, outer=at)

    @script.inline
    def multiply_step(has_stage, at, shared, bands, acc, block):
        """Add a stage's inputs to sums, and leave those that see no more of the image."""
        for w in range(WARPS):
            with T.sblock("multiply"):
                vt, vs, vw = T.axis.remap("SSS", [at[0], at[1], w])
                T.reads()
                T.writes(shared.results[:])
                if has_stage:
                    sums(shared, bands, acc, block, vt, vs, vw)
                else:
                    leave_rows("_rest", range(R), shared, acc, (vt, vs), vw)
        if STEPS > 1:
            by_lanes("shift", WARPS, shift, acc, outer=at)

    @script.inline
    def store_step(is_told, at, out, shared, block):
        by_lanes("epilogue", WARPS, store, is_told, out, shared, block, outer=at)

    @script.inline
    def go_down(has_stage, at, image, operands, out, shared, bands, acc, block, barrier):
        """Take a step, or leave what is left if there is no stage for it, and store what a step before has left.

        Warps wait for others to be where they were before their own last products, never to be done.
        """
        wait(barrier, pairs.number(*at) + 1)
        if has_stage or RESIDUAL:
            copy_later(has_stage, at, image, operands, shared, block)
            wait_for_copies(min(FIRST - 1, LAG) if RESIDUAL else FIRST - 1)
        store_step(has_stage, at, out, shared, block)
        arrive(barrier)
        multiply_step(has_stage, at, shared, bands, acc, block)

    @script.prim_func(s_tir=True)
    def paired_nhwc() -> None:
        image, weight, operands, out = T.meta_var(declare())
        for bn, by, bx, bc in T.grid(BN, BY, BX, BC):
            with T.sblock("block"):
                vn, vy, vx, vc = T.axis.remap("SSSS", [bn, by, bx, bc])
                T.reads()
                T.writes(out[:, :, :, :])
                block = T.meta_var((vn, vy, vx, vc))
                staged = dynamic(dtype, pairs.stages * pairs.stage_halves)
                results = dynamic(SUMS_DTYPE, pairs.buffers * pairs.results)
                bands = T.meta_var(
                    [local(dtype, WARPS, KH, count, WORDS, 32, depth // 8, 2) for depth, count in DEPTHS]
                )
                acc = local("float32", WARPS, SUMS, WORDS, 32, 2, 2)
                taken = T.meta_var({name: dynamic(kind, n) for name, (n, kind) in TAKEN.items()})
                added = dynamic(dtype, pairs.buffers * pairs.results if RESIDUAL else 1)
                barrier = dynamic("uint64", 1)
                apart = T.meta_var(
                    (staged, *taken.values(), *((added,) if RESIDUAL else ()), *((barrier,) if STEPS > 1 else ()))
                )
                shared = T.meta_var(Shared(staged, results, taken, added))
                use("w", apart)
                for first in T.serial(FIRST):
                    by_lanes("first", WARPS, load_first, shared, image, block, outer=(first,))
                if RESIDUAL and STEPS == 1:
                    for turn, step in T.grid(1, 1):
                        copy_later(False, (turn, step), image, operands, shared, block)
                by_lanes("band", WARPS, take, bands, taken, weight, operands, vc)
                wait_for_copies(int(RESIDUAL) if STEPS == 1 else FIRST - 1)
                if STEPS > 1:
                    by_lanes("ready", WARPS, ready, barrier)
                    synchronise()
                    # TVM takes all that is shared for one, and would part inputs and results by barriers.
                    with T.attr(0, "hand_threaded", 0):
                        for turn in T.serial(TURNS):
                            by_lanes("begin", WARPS, begun, acc, taken, outer=(turn,))
                            about = T.meta_var((image, operands, out, shared, bands, acc, block, barrier))
                            for step in T.serial(STEPS):
                                go_down(True, (turn, step), *about)
                            if pairs.rests > 0:
                                for step in T.serial(STEPS, LAST):
                                    go_down(False, (turn, step), *about)
                        wait_for_copies(0)
                        synchronise()
                        for turn, step in T.grid((TURNS - 1, 1), (LAST, LAG)):
                            store_step(False, (turn, step), out, shared, block)
                else:
                    synchronise()
                    with T.attr(0, "hand_threaded", 0):
                        for turn, step in T.grid(1, 1):
                            multiply_step(True, (turn, step), shared, bands, acc, block)
                        wait_for_copies(0)
                        synchronise()
                        for turn, step in T.grid(1, (LAG, 1)):
                            store_step(True, (turn, step), out, shared, block)
                use("r", apart)

    return paired_nhwc
