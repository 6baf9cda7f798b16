"""The convolution of NHWC halves as products over pairs of channels; see `dwtir.pairs`.

The blocks are those of a block of threads:

``band``
    the banded matrices, where the lanes of a warp hold them;
``first``, ``pad``
    the inputs with their zeros on their way to shared memory, before the first step and in a step: each
    ``copy`` one instruction, of a vector of channels; and what is to be added to the results of a step, each
    to the thread that adds it;
``epilogue``
    the results of a step before, and of the last two behind all;
``multiply``
    the sums of a step: a row of inputs after the other, each with all products that it has a part in;
``leave``
    the fused steps and the one rounding, in shared memory.

What a lane holds follows ``mma.sync.m16n8k16``, as in `compute.banded`. Lane ``4 * m + x`` has pixels
``x`` and ``x + 4`` of the windows of strips ``m`` and ``m + 8``, and the sums of their columns ``x``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

from tvm import tirx
from tvm.script import tirx as T

from .. import cuda_functions
from ..epilogue import Epilogue
from ..pairs import COLUMNS, LAG, VECTOR, Pairs
from . import script
from .async_copy import BYTES
from .forward import both_ends
from .mma import left, right
from .pair_operands import Operands
from .pair_tasks import Tasks
from .parts import arrive, begin_barrier, untold, use, wait

Met: TypeAlias = tuple[tuple[int, int], ...]
"""Sums that a row of inputs is part of, each with the row of the kernel."""


class Shared(NamedTuple):
    """What a block has in shared memory: inputs, results, operands of fused steps, and a residual."""

    staged: tirx.Buffer
    results: tirx.Buffer
    taken: dict[str, tirx.Buffer]
    added: tirx.Buffer


def _local(size: int, dtype: str) -> tirx.Buffer:
    return T.sblock_alloc_buffer((size,), dtype, scope="local")


def products(pairs: Pairs, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient."""
    shape = pairs.shape
    H, C = shape.source[0], shape.result_channels
    KH, SH = shape.kernel[0], shape.stride[0]
    R, IMAGES, STEPS = pairs.rows, pairs.images, pairs.steps
    VECTORS, WORDS, WARPS = pairs.vectors, pairs.words, pairs.warps
    AHEAD, STAGES, DEPTHS, DELAY, SUMS = pairs.ahead, pairs.stages, pairs.depths, pairs.delay, pairs.rows + pairs.delay
    FIRST, LAST = min(AHEAD + 1, STEPS), STEPS + pairs.rests
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
    SIZE = 16 // (4 if fused.shared.steps else 2)
    tasks, multiplied = Tasks(pairs), Operands(pairs, fused.bias and SPARE)

    @script.inline
    def load(shared, turns, find):
        """Begin to copy vectors to shared memory, or zeros where there are none."""
        size = _local(1, "int32")
        for k in T.unroll(turns):
            first = T.meta_var(find(k, 0))
            if first[0]:
                size[0] = T.if_then_else(first[1], BYTES, 0)
                for v in range(VECTOR):
                    with T.sblock("copy"):
                        vk, vv = T.axis.remap("SS", [k, v])
                        found = T.meta_var(find(vk, vv))
                        T.reads(size[0], found[2])
                        T.writes(shared[found[3] + vv])
                        shared[found[3] + vv] = T.if_then_else(size[0] == BYTES, found[2], T.cast(0, dtype))

    def take(taken: dict[str, tirx.Buffer], operands: Any, c: Any, thread: Any) -> None:
        """Put operands of fused steps into shared memory, a bias that sums begin with as products have their sums."""
        for name, buffer in taken.items():
            number = thread // 4 * 2 + thread % 2 if name == "bias" and fused.bias else thread
            with T.If(thread < buffer.shape[0]), T.Then():
                value = T.cast(operands[name][T.min(c * pairs.channels + number, C - 1)], buffer.dtype)
                T.buffer_store(buffer, value * T.float32(TIMES) if TIMES != 1 else value, [thread])

    def start(name: str, met: Met, taken: dict[str, tirx.Buffer], acc: Any, vw: Any) -> None:
        """Begin the sums that a row of inputs is the first of."""
        with T.serial(32) as lane, T.sblock(name):
            vl = T.axis.spatial(32, lane)
            untold()
            for result in [result for result, tap in met if tap == 0]:
                begin(acc, result, taken, vw, vl)

    def sums(shared: Shared, bands: Any, acc: tirx.Buffer, y: Any, step: Any, vw: Any) -> None:
        """Go down the rows of a stage, and leave each result behind its last one. Rows of padding add nothing."""
        held = [
            T.sblock_alloc_buffer((count, WORDS, 32, depth // 8, 2, 2), dtype, scope="local") for depth, count in DEPTHS
        ]
        line = y * (pairs.height * SH) + step * pairs.stage_rows + pairs.first_row
        if not SKIPS:
            add_rows(shared, bands, held, acc, step, vw)
        elif STEPS == 1:
            add_rows(shared, bands, held, acc, step, vw, line)
        else:  # without tests sums move to the next step's places as products add to them
            with T.If(there(line, pairs.stage_rows)):
                with T.Then():
                    add_rows(shared, bands, held, acc, step, vw)
                with T.Else():
                    add_rows(shared, bands, held, acc, step, vw, line)

    def there(first: Any, rows: int) -> Any:
        """Tell whether rows are in the image, as a number, of which TVM infers no bounds."""
        return T.cast(tirx.all(0 <= first, first + rows <= H), "int32") != 0

    def add_rows(shared: Shared, bands: Any, held: Any, acc: tirx.Buffer, step: Any, vw: Any, line: Any = None) -> None:
        """Add a stage's rows to sums, those that are in the image if the first one's place is given."""
        name = "" if line is None else "_there"
        for row in range(pairs.stage_rows):
            met = pairs.met(row)
            if met:
                start(f"start{row}{name}", met, shared.taken, acc, vw)
                with ExitStack() as tested:
                    if line is not None:
                        tested.enter_context(T.If(there(line + row, 1)))
                        tested.enter_context(T.Then())
                    multiplied.window(f"window{row}{name}", row, shared.staged, held, step, vw)
                    for (depth, count), part, band in zip(DEPTHS, held, bands, strict=True):
                        multiply(f"products{depth}_{row}{name}", met, depth, count, part, band, acc, vw)
                left = [result for result, tap in met if tap == KH - 1 and result < R]
                leave_rows(name, left, shared, acc, step, vw)

    def leave_rows(name: str, results: Iterable[int], shared: Shared, acc: Any, step: Any, vw: Any) -> None:
        for result in results:
            with T.serial(32) as lane, T.sblock(f"leave{result}{name}"):
                vl = T.axis.spatial(32, lane)
                untold()
                leave(shared, acc, result, step, vw, vl)

    def begin(acc: tirx.Buffer, result: int, taken: dict[str, tirx.Buffer], vw: Any, vl: Any) -> None:
        """Begin sums, with the bias if shared memory has it."""
        own = _local(4, "float32")
        for word in range(WORDS):
            if BIASED:
                with T.vectorized(4) as e:
                    T.buffer_store(own, taken["bias"][(vw % pairs.parts * WORDS + word) * 4 + e], [e])
            for e in range(4):
                value = own[e] if BIASED else T.float32(0)
                T.buffer_store(acc, value, [vw, result, word, vl, e // 2, e % 2])

    def begun(acc: tirx.Buffer, taken: dict[str, tirx.Buffer], vw: Any, vl: Any) -> None:
        """Begin the sums that no step begins."""
        for result in range(DELAY):
            begin(acc, result, taken, vw, vl)

    def shift(acc: tirx.Buffer, vw: Any, vl: Any) -> None:
        """Keep the sums that no step has left, for the next."""
        with T.unroll(DELAY) as r, T.unroll(WORDS) as word, T.unroll(2) as half, T.unroll(2) as one:
            T.buffer_store(acc, acc[vw, r + R, word, vl, half, one], [vw, r, word, vl, half, one])

    def multiply(name: str, met: Met, depth: int, count: int, held: Any, band: Any, acc: Any, vw: Any) -> None:
        (first, tap), apart = met[0], (met[1][0] - met[0][0], met[0][1] - met[1][1]) if len(met) > 1 else (1, 0)
        with (
            T.unroll(len(met)) as m,
            T.unroll(count) as s,
            T.unroll(WORDS) as word,
            T.grid(32, 2, 2, depth) as (lane, half, one, k),
            T.sblock(name),
        ):
            vm, vs = T.axis.spatial(len(met), m), T.axis.reduce(count, s)
            vd, vl, vh = T.axis.spatial(WORDS, word), T.axis.spatial(32, lane), T.axis.spatial(2, half)
            vo, vk = T.axis.spatial(2, one), T.axis.reduce(depth, k)
            a = T.cast(held[left(vs, vd, vl, vh, vk)], "float32")
            b = T.cast(band[right(vw, tap - vm * apart[1], vs, vd, vl, vo, vk)], "float32")
            place = [vw, first + vm * apart[0], vd, vl, vh, vo]
            T.buffer_store(acc, acc[tuple(place)] + a * b, place)

    def load_taken(taken: dict[str, tirx.Buffer], first: Any, count: int) -> dict[str, tirx.Buffer]:
        """Load what fused steps take for some channels, at most a vector."""
        loaded = {name: _local(count, taken[name].dtype) for name in fused.taken}
        for name, buffer in loaded.items():
            lanes = count if buffer.dtype == dtype else min(4, count)
            for part in range(0, count, lanes):
                with T.vectorized(lanes) as e:
                    T.buffer_store(buffer, taken[name][first + part + e], [part + e])
        return loaded

    def leave(shared: Shared, acc: tirx.Buffer, result: int, step: Any, vw: Any, vl: Any) -> None:
        """Leave a row of sums in shared memory, rounded if nothing else is to be done with them."""
        _, results, taken, _ = shared
        buffer = step % pairs.buffers * pairs.results
        together = min(SIZE, 2 * WORDS)
        own = _local(together, results.dtype)
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
                place = pairs.result_at(image * R + result, column, channel // SIZE, SIZE) + channel % SIZE
                with T.If(inside), T.Then(), T.vectorized(together) as e:
                    T.buffer_store(results, own[e], [buffer + place + e])

    def store(out: tirx.Buffer, shared: Shared, at: tuple[Any, ...], thread: Any) -> None:
        """Store what the step of two before has left."""
        (*block, step), (_, results, taken, added) = at, shared
        buffer = (step + (pairs.buffers - LAG)) % pairs.buffers * pairs.results
        sums = _local(VECTOR, results.dtype)
        own = _local(VECTOR, dtype)
        loaded = load_taken(taken, thread % VECTORS * VECTOR, VECTOR) if fused.shared.steps else {}
        for turn in range(tasks.stores):
            inside, place, task = tasks.result(block, step - LAG, turn, thread)
            line, column, vector = task
            with T.If(inside), T.Then():
                for part in range(VECTOR // SIZE):
                    first = buffer + pairs.result_at(line, column, vector * (VECTOR // SIZE) + part, SIZE)
                    with T.vectorized(SIZE) as e:
                        T.buffer_store(sums, results[first + e], [part * SIZE + e])
                if RESIDUAL:
                    first = tasks.residual_at(step - LAG, task)
                    loaded["residual"] = _local(VECTOR, dtype)
                    with T.vectorized(VECTOR) as e:
                        T.buffer_store(loaded["residual"], added[first + e], [e])
                for e in range(VECTOR):
                    T.buffer_store(own, finish_shared(sums[e], loaded, e, (e,)), [e])
                with T.vectorized(VECTOR) as e:
                    T.buffer_store(out, own[e], [*place[:-1], place[-1] + e])

    @script.inline
    def copy_later(has_stage, step, image, operands, shared, block):
        """Begin to copy a later stage and a later step's share of the residual."""
        for w, lane in T.grid(WARPS, 32):
            with T.sblock("pad"):
                vs, vw, vl = T.axis.remap("SSS", [step, w, lane])
                untold()
                if has_stage:
                    load(shared.staged, tasks.loads, tasks.inputs(image, block, vs + (AHEAD + 1), vw * 32 + vl))
                if RESIDUAL:
                    find = T.meta_var(tasks.residuals(operands["residual"], block, vs, vw * 32 + vl))
                    load(shared.added, tasks.stores, find)
                T.evaluate(T.ptx["cp.async.commit_group"]())

    @script.inline
    def multiply_step(has_stage, step, shared, bands, acc, block):
        """Add a stage's inputs to sums, and leave those that see no more of the image."""
        for w in range(WARPS):
            with T.sblock("multiply"):
                vs, vw = T.axis.remap("SS", [step, w])
                T.reads()
                T.writes(shared.results[:])
                if has_stage:
                    sums(shared, bands, acc, block[1], vs, vw)
                else:
                    leave_rows("_rest", range(R), shared, acc, vs, vw)
        if STEPS > 1:
            for w, lane in T.grid(WARPS, 32):
                with T.sblock("shift"):
                    vs, vw, vl = T.axis.remap("SSS", [step, w, lane])
                    untold()
                    shift(acc, vw, vl)

    @script.inline
    def store_step(is_told, step, out, shared, block):
        for w, lane in T.grid(WARPS, 32):
            with T.sblock("epilogue"):
                vs, vw, vl = T.axis.remap("SSS", [step, w, lane])
                T.reads(shared.results[:])
                if is_told:
                    T.writes(out[block[0] * IMAGES : block[0] * IMAGES + IMAGES, :, :, :])
                else:
                    T.writes()
                store(out, shared, (*block, vs), vw * 32 + vl)

    @script.inline
    def go_down(has_stage, step, image, operands, out, shared, bands, acc, block, barrier):
        """Take a step, or leave what is left if there is no stage for it, and store what a step before has left.

        Warps wait for others to be where they were themselves before their last products, and never to be done.
        """
        wait(barrier, step + 1)
        if has_stage or RESIDUAL:
            copy_later(has_stage, step, image, operands, shared, block)
            T.evaluate(T.ptx["cp.async.wait_group"](min(FIRST - 1, LAG) if RESIDUAL else FIRST - 1))
        store_step(has_stage, step, out, shared, block)
        arrive(barrier)
        multiply_step(has_stage, step, shared, bands, acc, block)

    @script.prim_func(s_tir=True)
    def paired_nhwc() -> None:
        image, weight, operands, out = T.meta_var(declare())
        for bn, by, bx, bc in T.grid(BN, BY, BX, BC):
            with T.sblock("block"):
                vn, vy, vx, vc = T.axis.remap("SSSS", [bn, by, bx, bc])
                T.reads()
                T.writes(out[vn * IMAGES : vn * IMAGES + IMAGES, :, :, :])
                block = T.meta_var((vn, vy, vx, vc))
                staged = T.sblock_alloc_buffer((STAGES * pairs.stage_halves,), dtype, scope="shared.dyn")
                results = T.sblock_alloc_buffer((pairs.buffers * pairs.results,), SUMS_DTYPE, scope="shared.dyn")
                bands = T.meta_var(
                    [
                        T.sblock_alloc_buffer((WARPS, KH, count, WORDS, 32, depth // 8, 2), dtype, scope="local")
                        for depth, count in DEPTHS
                    ]
                )
                acc = T.sblock_alloc_buffer((WARPS, SUMS, WORDS, 32, 2, 2), "float32", scope="local")
                taken = T.meta_var(
                    {name: T.sblock_alloc_buffer((n,), kind, scope="shared.dyn") for name, (n, kind) in TAKEN.items()}
                )
                added = T.sblock_alloc_buffer(
                    (pairs.buffers * pairs.results if RESIDUAL else 1,), dtype, scope="shared.dyn"
                )
                barrier = T.sblock_alloc_buffer((1,), "uint64", scope="shared.dyn")
                apart = T.meta_var(
                    (staged, *taken.values(), *((added,) if RESIDUAL else ()), *((barrier,) if STEPS > 1 else ()))
                )
                shared = T.meta_var(Shared(staged, results, taken, added))
                use("w", apart)
                for first in T.serial(FIRST):
                    for w, lane in T.grid(WARPS, 32):
                        with T.sblock("first"):
                            vf, vw, vl = T.axis.remap("SSS", [first, w, lane])
                            untold()
                            load(staged, tasks.loads, tasks.inputs(image, block, vf, vw * 32 + vl))
                            T.evaluate(T.ptx["cp.async.commit_group"]())
                if RESIDUAL and STEPS == 1:
                    for step in T.serial(1):
                        copy_later(False, step, image, operands, shared, block)
                for w, lane in T.grid(WARPS, 32):
                    with T.sblock("band"):
                        vw, vl = T.axis.remap("SS", [w, lane])
                        untold()
                        multiplied.bands(bands, weight, operands, vc, vw, vl)
                        take(taken, operands, vc, vw * 32 + vl)
                T.evaluate(T.ptx["cp.async.wait_group"](int(RESIDUAL) if STEPS == 1 else FIRST - 1))
                if STEPS > 1:
                    for w, lane in T.grid(WARPS, 32):
                        with T.sblock("ready"):
                            vw, vl = T.axis.remap("SS", [w, lane])
                            untold()
                            if vw * 32 + vl == 0:
                                begin_barrier(barrier, 32 * WARPS)
                    T.evaluate(T.tvm_storage_sync("shared.dyn"))
                    for w, lane in T.grid(WARPS, 32):
                        with T.sblock("begin"):
                            vw, vl = T.axis.remap("SS", [w, lane])
                            untold()
                            begun(acc, taken, vw, vl)
                    # TVM takes all that is shared for one, and would part inputs and results by barriers.
                    with T.attr(0, "hand_threaded", 0):
                        for step in T.serial(STEPS):
                            go_down(True, step, image, operands, out, shared, bands, acc, block, barrier)
                        if pairs.rests > 0:
                            for step in T.serial(STEPS, LAST):
                                go_down(False, step, image, operands, out, shared, bands, acc, block, barrier)
                        T.evaluate(T.ptx["cp.async.wait_group"](0))
                        T.evaluate(T.tvm_storage_sync("shared.dyn"))
                        for step in T.serial(LAST, LAST + LAG):
                            store_step(False, step, out, shared, block)
                else:
                    T.evaluate(T.tvm_storage_sync("shared.dyn"))
                    with T.attr(0, "hand_threaded", 0):
                        for step in T.serial(1):
                            multiply_step(True, step, shared, bands, acc, block)
                        T.evaluate(T.ptx["cp.async.wait_group"](0))
                        T.evaluate(T.tvm_storage_sync("shared.dyn"))
                        for step in T.serial(LAG, LAG + 1):
                            store_step(True, step, out, shared, block)
                use("r", apart)

    return paired_nhwc
