"""The convolution of NHWC halves as products over pairs of channels; see `dwtir.pairs`.

The blocks are those of a block of threads:

``band``
    the banded matrices, where the lanes of a warp hold them;
``first``, ``pad``
    the inputs with their zeros on their way to shared memory, before the first step and in a step: each
    ``copy`` one instruction, of a vector of channels;
``residual``
    what is to be added to the results of a step, on its way there too, each to the thread that adds it;
``multiply``
    the sums of a step: a row of inputs after the other, each with all products that it has a part in;
``leave``
    the fused steps and the one rounding, in shared memory;
``epilogue``
    the results.

What a lane holds follows ``mma.sync.m16n8k16``, as in `compute.banded`. Lane ``4 * m + x`` has pixels
``x`` and ``x + 4`` of the windows of strips ``m`` and ``m + 8``, and the sums of their columns ``x``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, TypeAlias

from tvm import tirx
from tvm.script import tirx as T

from .. import cuda_functions
from ..epilogue import Epilogue
from ..pairs import COLUMNS, VECTOR, Pairs
from . import script
from .async_copy import BYTES
from .forward import both_ends
from .mma import left, right
from .pair_tasks import Tasks
from .parts import untold, use

Met: TypeAlias = tuple[tuple[int, int], ...]
"""Sums that a row of inputs is part of, each with the row of the kernel."""


def _local(size: int, dtype: str) -> tirx.Buffer:
    return T.sblock_alloc_buffer((size,), dtype, scope="local")


def products(pairs: Pairs, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient."""
    shape = pairs.shape
    H, C = shape.source[0], shape.result_channels
    (KH, KW), (SH, SW), DW = shape.kernel, shape.stride, shape.dilation[1]
    R, IMAGES, STEPS = pairs.rows, pairs.images, pairs.steps
    VECTORS, WORDS, WARPS, QUADS = pairs.vectors, pairs.words, pairs.warps, pairs.quads
    STAGES, DEPTHS, DELAY, SUMS = pairs.stages, pairs.depths, pairs.delay, pairs.rows + pairs.delay
    BN, BY, BX, BC = pairs.blocks
    dtype = shape.dtype
    PAIR = f"{dtype}x2"
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
    tasks = Tasks(pairs)

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
        T.evaluate(T.ptx["cp.async.commit_group"]())

    def taps(bands: list[tirx.Buffer], weight: tirx.Buffer, operands: Any, c: Any, vw: Any, vl: Any) -> None:
        """Make the banded matrices: a lane has a column's, of one of its channels. A bias may be the weight of a 1."""
        own = _local(2 * WORDS, dtype)
        vector, first = tasks.channels(vw)
        channel = T.min((c * VECTORS + vector) * VECTOR, C - VECTOR) + first
        for row in range(KH):
            for quad in range(QUADS):
                apart = quad * COLUMNS + vl % 4 - vl // 8 * SW
                column = apart // DW if DW > 1 else apart
                seen = [0 <= apart, column < KW] + ([apart % DW == 0] if DW > 1 else [])
                tap = (KH - 1 - row, KW - 1 - column) if shape.operation == "grad_data" else (row, column)
                with T.vectorized(2 * WORDS) as e:
                    at = (*tap, channel + e, 0)
                    other = T.cast(0, dtype)
                    if fused.bias and SPARE and (row, quad) == (pairs.common_tap, QUADS - 1):
                        other = T.if_then_else(vl % 4 == 3, operands["bias"][channel + e], other)
                    value = T.if_then_else(tirx.all(*seen), weight[at], other)
                    T.buffer_store(own, value, [e])
                band, step, further = part_of(bands, quad)
                for word in range(WORDS):
                    mine = by_word(cuda_functions.HALF_OF, own, word, vl // 4 % 2)
                    T.buffer_store(band, mine, [vw, row, step, word, vl, further, tirx.Ramp(0, 1, 2)])

    def take(taken: dict[str, tirx.Buffer], operands: Any, c: Any, thread: Any) -> None:
        """Put operands of fused steps into shared memory, a bias that sums begin with as products have their sums."""
        for name, buffer in taken.items():
            number = thread // 4 * 2 + thread % 2 if name == "bias" and fused.bias else thread
            with T.If(thread < buffer.shape[0]), T.Then():
                value = T.cast(operands[name][T.min(c * pairs.channels + number, C - 1)], buffer.dtype)
                T.buffer_store(buffer, value * T.float32(TIMES) if TIMES != 1 else value, [thread])

    def by_word(name: str, own: tirx.Buffer, word: int, *others: Any) -> tirx.PrimExpr:
        """Apply a function of the CUDA source to a pair of channels."""
        both = T.reinterpret("uint32", own[tirx.Ramp(word * 2, 1, 2)])
        return T.reinterpret(PAIR, T.call_pure_extern("uint32", name, both, *others))

    def part_of(buffers: list[tirx.Buffer], quad: int) -> tuple[tirx.Buffer, int, int]:
        """Find the operands that a quad is part of: of products of both depths."""
        return (buffers[-1], 0, 0) if quad == QUADS - 1 and QUADS % 2 else (buffers[0], quad // 2, quad % 2)

    def start(name: str, met: Met, taken: dict[str, tirx.Buffer], acc: Any, vw: Any) -> None:
        """Begin the sums that a row of inputs is the first of."""
        with T.serial(32) as lane, T.sblock(name):
            vl = T.axis.spatial(32, lane)
            untold()
            for result in [result for result, tap in met if tap == 0]:
                begin(acc, result, taken, vw, vl)

    def window(name: str, row: int, staged: tirx.Buffer, held: list[tirx.Buffer], step: Any, vw: Any) -> None:
        """Take a row of inputs."""
        with T.serial(32) as lane, T.sblock(name):
            vl = T.axis.spatial(32, lane)
            untold()
            own = _local(2 * WORDS, dtype)
            vector, first = tasks.channels(vw)
            for half in range(2):
                _, n, x = tasks.strip(vw, half, vl)
                for quad in range(QUADS):
                    column = x * (COLUMNS * SW) + vl % 4 + quad * COLUMNS
                    at = pairs.input_at(step % STAGES, n, row, column, vector) + first
                    with T.vectorized(2 * WORDS) as e:
                        T.buffer_store(own, staged[at + e], [e])
                    part, place, further = part_of(held, quad)
                    for word in range(WORDS):
                        held_word = by_word(cuda_functions.WORD, own, word)
                        if fused.bias and SPARE and quad == QUADS - 1:
                            held_word = T.Select(vl % 4 == 3, tirx.Broadcast(tirx.const(1, dtype), 2), held_word)
                        T.buffer_store(part, held_word, [place, word, vl, further, half, tirx.Ramp(0, 1, 2)])

    def sums(shared: tuple[Any, ...], bands: Any, acc: tirx.Buffer, y: Any, step: Any, vw: Any) -> None:
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

    def add_rows(
        shared: tuple[Any, ...], bands: Any, held: Any, acc: tirx.Buffer, step: Any, vw: Any, line: Any = None
    ) -> None:
        """Add a stage's rows to sums, those that are in the image if the first one's place is given."""
        name = "" if line is None else "_there"
        for row in range(pairs.stage_rows):
            met = pairs.met(row)
            if met:
                start(f"start{row}{name}", met, shared[2], acc, vw)
                with ExitStack() as tested:
                    if line is not None:
                        tested.enter_context(T.If(there(line + row, 1)))
                        tested.enter_context(T.Then())
                    window(f"window{row}{name}", row, shared[0], held, step, vw)
                    for (depth, count), part, band in zip(DEPTHS, held, bands, strict=True):
                        multiply(f"products{depth}_{row}{name}", met, depth, count, part, band, acc, vw)
                leave_rows(name, [result for result, tap in met if tap == KH - 1 and result < R], shared, acc, vw)

    def leave_rows(name: str, results: Iterable[int], shared: tuple[Any, ...], acc: tirx.Buffer, vw: Any) -> None:
        for result in results:
            with T.serial(32) as lane, T.sblock(f"leave{result}{name}"):
                vl = T.axis.spatial(32, lane)
                untold()
                leave(shared, acc, result, vw, vl)

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

    def leave(shared: tuple[Any, ...], acc: tirx.Buffer, result: int, vw: Any, vl: Any) -> None:
        """Leave a row of sums in shared memory, rounded if nothing else is to be done with them."""
        _, results, taken = shared
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
                    T.buffer_store(results, own[e], [place + e])

    def store(out: tirx.Buffer, shared: tuple[Any, ...], at: tuple[Any, ...], thread: Any) -> None:
        *block, step = at
        results, added, taken = shared
        sums = _local(VECTOR, results.dtype)
        own = _local(VECTOR, dtype)
        loaded = load_taken(taken, thread % VECTORS * VECTOR, VECTOR) if fused.shared.steps else {}
        for turn in range(tasks.stores):
            inside, place, task = tasks.result(block, step, turn, thread)
            line, column, vector = task
            with T.If(inside), T.Then():
                for part in range(VECTOR // SIZE):
                    first = pairs.result_at(line, column, vector * (VECTOR // SIZE) + part, SIZE)
                    with T.vectorized(SIZE) as e:
                        T.buffer_store(sums, results[first + e], [part * SIZE + e])
                if RESIDUAL:
                    first = pairs.result_at(*task, VECTOR)
                    loaded["residual"] = _local(VECTOR, dtype)
                    with T.vectorized(VECTOR) as e:
                        T.buffer_store(loaded["residual"], added[first + e], [e])
                for e in range(VECTOR):
                    T.buffer_store(own, finish_shared(sums[e], loaded, e, (e,)), [e])
                with T.vectorized(VECTOR) as e:
                    T.buffer_store(out, own[e], [*place[:-1], place[-1] + e])

    @script.inline
    def go_down(step, has_stage, image, operands, out, shared, added, bands, acc, block):
        """Take a step, or leave what is left if there is no stage for it."""
        T.evaluate(T.ptx["cp.async.wait_group"](max(0, STAGES - 2)))
        T.evaluate(T.tvm_storage_sync("shared.dyn"))
        if RESIDUAL:
            for w, lane in T.grid(WARPS, 32):
                with T.sblock("residual"):
                    vs, vw, vl = T.axis.remap("SSS", [step, w, lane])
                    untold()
                    load(added, tasks.stores, tasks.residuals(operands["residual"], block, vs, vw * 32 + vl))
        if has_stage and STEPS > 1:
            for w, lane in T.grid(WARPS, 32):
                with T.sblock("pad"):
                    vs, vw, vl = T.axis.remap("SSS", [step, w, lane])
                    untold()
                    load(shared[0], tasks.loads, tasks.inputs(image, block, vs + (STAGES - 1), vw * 32 + vl))
        for w in range(WARPS):
            with T.sblock("multiply"):
                vs, vw = T.axis.remap("SS", [step, w])
                T.reads()
                T.writes(shared[1][:])
                # TVM takes all that is shared for one, and would part inputs and results by barriers.
                with T.attr(0, "hand_threaded", 0):
                    if has_stage:
                        sums(shared, bands, acc, block[1], vs, vw)
                    else:
                        leave_rows("_rest", range(R), shared, acc, vw)
        if STEPS > 1:
            for w, lane in T.grid(WARPS, 32):
                with T.sblock("shift"):
                    vs, vw, vl = T.axis.remap("SSS", [step, w, lane])
                    untold()
                    shift(acc, vw, vl)
        if RESIDUAL:
            T.evaluate(T.ptx["cp.async.wait_group"](1 if has_stage and STEPS > 1 else 0))
        T.evaluate(T.tvm_storage_sync("shared.dyn"))
        for w, lane in T.grid(WARPS, 32):
            with T.sblock("epilogue"):
                vs, vw, vl = T.axis.remap("SSS", [step, w, lane])
                T.reads(shared[1][:])
                if has_stage:
                    T.writes(out[block[0] * IMAGES : block[0] * IMAGES + IMAGES, :, :, :])
                else:
                    T.writes()
                store(out, (shared[1], added, shared[2]), (*block, vs), vw * 32 + vl)

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
                results = T.sblock_alloc_buffer((pairs.results,), SUMS_DTYPE, scope="shared.dyn")
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
                added = T.sblock_alloc_buffer((pairs.results if RESIDUAL else 1,), dtype, scope="shared.dyn")
                apart = T.meta_var((staged, *taken.values(), *((added,) if RESIDUAL else ())))
                use("w", apart)
                for first in T.serial(max(1, STAGES - 1)):
                    for w, lane in T.grid(WARPS, 32):
                        with T.sblock("first"):
                            vf, vw, vl = T.axis.remap("SSS", [first, w, lane])
                            untold()
                            load(staged, tasks.loads, tasks.inputs(image, block, vf, vw * 32 + vl))
                for w, lane in T.grid(WARPS, 32):
                    with T.sblock("band"):
                        vw, vl = T.axis.remap("SS", [w, lane])
                        untold()
                        taps(bands, weight, operands, vc, vw, vl)
                        take(taken, operands, vc, vw * 32 + vl)
                if STEPS > 1:
                    if BIASED:
                        T.evaluate(T.tvm_storage_sync("shared.dyn"))
                    for w, lane in T.grid(WARPS, 32):
                        with T.sblock("begin"):
                            vw, vl = T.axis.remap("SS", [w, lane])
                            untold()
                            begun(acc, taken, vw, vl)
                for step in T.serial(STEPS):
                    go_down(step, True, image, operands, out, (staged, results, taken), added, bands, acc, block)
                if pairs.rests > 0:
                    for step in T.serial(STEPS, STEPS + pairs.rests):
                        go_down(step, False, image, operands, out, (staged, results, taken), added, bands, acc, block)
                use("r", apart)

    return paired_nhwc
