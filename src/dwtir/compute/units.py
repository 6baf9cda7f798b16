"""The gradient of the weight of NHWC images as products of matrices; see `dwtir.units`.

Blocks beside those of `compute`: ``pad``, inputs and gradients of a step on their way to shared memory, by ``copy``,
each a vector's; ``multiply``, what a warp does with them: ``left`` and ``right`` are operands of ``products``, whose
pairs are of two images; ``leave``, its sums for a row of the kernel; ``taps``, each a diagonal.

What a lane holds follows ``mma.sync.m16n8k16``, as in `compute.banded`, but the depth are units.
"""

from tvm import tirx
from tvm.script import tirx as T

from ..units import LANES, Units
from . import blocks, script
from .async_copy import BYTES
from .forward import declared
from .mma import left, right
from .parts import (
    arrive,
    begin_barrier,
    by_lanes,
    commit_copies,
    dynamic,
    local,
    made,
    synchronise,
    untold,
    use,
    wait,
    wait_for_copies,
)


def nhwc(sizes: Units) -> tirx.PrimFunc:
    """Define the gradient on NHWC images."""
    shape = sizes.shape
    N, C, H, W = shape.batch, shape.in_channels, shape.height, shape.width
    OH, OW, TOP, LEFT = shape.out_height, shape.out_width, *shape.padding[:2]
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    CHANNELS, TOGETHER, COLUMNS, SPANS = sizes.channels, sizes.together, sizes.columns, sizes.spans
    WARPS, OWN, GROUPS = sizes.warps, sizes.own, sizes.groups
    RING, AHEAD, TURNS, READ = sizes.ring, sizes.ahead, sizes.turns, sizes.together_read
    PARTS, CHUNKS = sizes.parts, C // CHANNELS
    INPUTS, GRADS = sizes.loads
    THREADS, VECTORS = 32 * WARPS, sizes.vectors
    INPUT_LOADS, GRAD_LOADS = sizes.thread_loads
    SLOTS, SLOT, STEPS = sizes.slots, sizes.slot_halves, sizes.block_steps
    GRADS_AT, UNITS = 2 * sizes.input_vectors, sizes.units
    ROWS = sizes.rows_left
    ROW_TAPS = CHANNELS * KW
    SUMS = sizes.unit_sums
    TAPS = KH * KW * CHANNELS
    dtype = shape.dtype

    def split(task, width: int):
        above = task // VECTORS // width
        column = task // VECTORS % width
        return above // sizes.images, above % sizes.images, column, task % VECTORS

    def image_and_row(part, step):
        """Find a step among all, and its images and row."""
        at = part * sizes.part_steps + step - (RING - 1)
        later = at + sizes.steps
        return at, later // sizes.steps - 1, later % sizes.steps

    def input_of(data, part, chunk, step, task, lane):
        _, images, down = image_and_row(part, step)
        row, image, column, vector = split(task, W)
        n, y = images * sizes.images + image, down * SH + row
        here = tirx.all(*(RING - 1 <= step, step < STEPS), *(n < N, TOP <= y, y < TOP + H))
        return here, data[n, y - TOP, column, chunk * CHANNELS + vector * LANES + lane]

    def grad_of(grad, part, chunk, step, task, lane):
        at, images, row = image_and_row(part, step)
        _, image, column, vector = split(task, OW)
        n = images * sizes.images + image
        here = tirx.all(*(0 <= at, step < STEPS), *(n < N, row < OH))
        return here, grad[n, row, column, chunk * CHANNELS + vector * LANES + lane]

    def input_to(task):
        row, image, column, vector = split(task, W)
        above = row * sizes.pairs + image // 2
        at = image % 2 * sizes.input_vectors + above * sizes.pitch
        vector = sizes.swapped(vector, (column + LEFT) % sizes.step)
        return (at + sizes.input_column(column + LEFT) + vector) * LANES

    def grad_to(task):
        _, image, column, vector = split(task, OW)
        at = GRADS_AT + image % 2 * sizes.grad_vectors + image // 2 * sizes.across * sizes.apart[1]
        return (at + sizes.grad_column(column) + sizes.swapped(vector, column % COLUMNS)) * LANES

    def unit(group, half, lane):
        return group * LANES + half * 4 + lane % 4

    def channel(warp, own, lane, column):
        """Find where a lane's first channel lies in a pixel, by the column in its unit."""
        first = (warp * OWN + own * READ) * TOGETHER + lane // 4 % TOGETHER * READ
        return sizes.swapped(first // LANES, column) * LANES + first % LANES

    def input_at(warp, own, group, row, span, *of):
        lane, half, more = of
        i = span * 2 + more
        at = row * sizes.pairs * sizes.pitch + i // SW * sizes.apart[0]
        at += sizes.place(tirx.min(unit(group, half, lane), UNITS - 1))
        column = i % SW * COLUMNS + lane // 4 // TOGETHER
        return (at + column * VECTORS) * LANES + channel(warp, own, lane, column)

    def grad_at(warp, own, group, lane, half):
        at = GRADS_AT + tirx.min(unit(group, half, lane), UNITS) * sizes.apart[1]
        column = lane // 4 // TOGETHER
        return (at + column * VECTORS) * LANES + channel(warp, own, lane, column)

    def diagonal(shared, tap):
        """Sum up a tap in one expression: all terms are loaded first."""
        r, kw, channel = tap // ROW_TAPS, tap % ROW_TAPS // CHANNELS, tap % CHANNELS
        own, c = channel // (TOGETHER * READ) * READ + channel % READ, channel // READ % TOGETHER
        first = own * SUMS + (kw * DW * TOGETHER + c) * LANES + c
        return sum(shared[r, first + column * TOGETHER * (SW * LANES + 1)] for column in range(COLUMNS))

    def task_of(k, warp, lane):
        return k * THREADS + warp * 32 + lane

    @script.inline
    def copy(staged, source, count, most, value_of, place, *at):
        part, chunk, step, warp, lane = T.meta_var(at)
        size = local("int32", 1)
        for k in T.unroll(count):
            if task_of(k, warp, lane) < most:
                here, _ = T.meta_var(value_of(source, part, chunk, step, task_of(k, warp, lane), 0))
                size[0] = T.if_then_else(here, BYTES, 0)
                for v in range(LANES):
                    with T.sblock("copy"):
                        vk, vv = T.axis.remap("SS", [k, v])
                        task = T.meta_var(task_of(vk, warp, lane))
                        _, value = T.meta_var(value_of(source, part, chunk, step, task, vv))
                        staged[step % SLOTS * SLOT + place(task) + vv] = T.if_then_else(
                            size[0] == BYTES, value, T.cast(0, dtype)
                        )

    @script.inline
    def load(staged, data, grad_out, *at):
        untold()
        copy(staged, data, INPUT_LOADS, INPUTS, input_of, input_to, *at)
        copy(staged, grad_out, GRAD_LOADS, GRADS, grad_of, grad_to, *at)
        commit_copies()

    def load_later(staged, data, grad_out, part, chunk, turn, d, warp, lane):
        load(staged, data, grad_out, part, chunk, turn * RING + d + (AHEAD + 1), warp, lane)

    @script.inline
    def zero(acc, grads, barrier, w, lane):
        untold()
        begin_barrier(barrier, THREADS, w * 32 + lane)
        for o in T.unroll(OWN):
            for r, s, h, e in T.grid(KH, SPANS, 2, 2):
                acc[w, o, r, s, lane, h, e] = T.float32(0)
            for g, r, h, e in T.grid(GROUPS, RING, 2, 2):
                grads[w, o, g, r, lane, h, e] = T.cast(0, dtype)

    @script.inline
    def clear(staged, first, w, lane):
        untold()
        for k in T.serial(-(-SLOT // (LANES * THREADS))):
            if task_of(k, w, lane) * LANES < SLOT:
                for e in T.vectorized(LANES):
                    staged[first * SLOT + task_of(k, w, lane) * LANES + e] = T.cast(0, dtype)

    @script.inline
    def read(raw, staged, step, at, apart):
        for e in T.unroll(2):
            for c in T.vectorized(READ):
                raw[e, c] = staged[step % SLOTS * SLOT + at + e * apart * LANES + c]

    @script.inline
    def take(staged, grads, step, d, w, o, g):
        for lane, h in T.grid(32, 2):
            with T.sblock("right"):
                vo, vg, vl, vh = T.axis.remap("SSSS", [o, g, lane, h])
                untold()
                raw = local(dtype, 2, READ)
                read(raw, staged, step, grad_at(w, vo, vg, vl, vh), sizes.grad_vectors)
                for c, e in T.grid(READ, 2):
                    grads[w, vo * READ + c, vg, d % RING, vl, vh, e] = raw[e, c]

    @script.inline
    def multiply(staged, inputs, grads, acc, step, d, w, o, g):
        for lane, r, s, h, m in T.grid(32, SH, SPANS, 2, 2):
            with T.sblock("left"):
                vo, vg, vl, vr, vs, vh, vm = T.axis.remap("SSSSSSS", [o, g, lane, r, s, h, m])
                untold()
                raw = local(dtype, 2, READ)
                read(raw, staged, step, input_at(w, vo, vg, vr, vs, vl, vh, vm), sizes.input_vectors)
                for c, e in T.grid(READ, 2):
                    inputs[w, c, vr, vs, vl, vh, vm, e] = raw[e, c]
        for c, r, s, lane, h, e, k in T.grid(READ, KH, SPANS, 32, 2, 2, 16):
            with T.sblock("products"):
                vo = T.axis.spatial(OWN, o * READ + c)
                vg, vr, vs, vl, vh, ve, vk = T.axis.remap("SSSSSSR", [g, r, s, lane, h, e, k])
                acc[w, vo, vr, vs, vl, vh, ve] += blocks.product(
                    inputs[left(w, vo % READ, vr * DH % SH, vs, vl, vh, vk)],
                    grads[right(w, vo, vg, (d - vr * DH // SH) % RING, vl, ve, vk)],
                )

    @script.inline
    def leave(shared, acc, rows, w, lane):
        untold()
        for r in T.unroll(ROWS):
            for o in T.unroll(OWN):
                for s in T.unroll(SPANS):
                    for h in T.unroll(2):
                        for e in T.vectorized(2):
                            at = T.meta_var((w * OWN + o) * SUMS + s * 128 + h * 64 + lane * 2 + e)
                            shared[r, at] = acc[w, o, rows * ROWS + r, s, lane, h, e]

    @script.inline
    def add_diagonals(partial, shared, part, chunk, rows, w, lane):
        untold()
        for k in T.unroll(-(-ROWS * ROW_TAPS // THREADS)):
            task = T.meta_var(task_of(k, w, lane))
            if task < ROWS * ROW_TAPS:
                partial[part, chunk, rows * (ROWS * ROW_TAPS) + task] = diagonal(shared, task)

    @script.prim_func(s_tir=True)
    def units_nhwc() -> None:
        data, grad_out, _, out = T.meta_var(declared(shape))
        partial = made("float32", PARTS, CHUNKS, TAPS)
        total = made("float32", KH, KW, C, 1)
        for p, b in T.grid(PARTS, CHUNKS):
            with T.sblock("block"):
                vp, vb = T.axis.remap("SS", [p, b])
                T.reads()
                T.writes(partial[vp, vb, 0:TAPS])
                staged = dynamic(dtype, SLOTS * SLOT)
                inputs = local(dtype, WARPS, READ, SH, SPANS, 32, 2, 2, 2)
                grads = local(dtype, WARPS, OWN, GROUPS, RING, 32, 2, 2)
                acc = local("float32", WARPS, OWN, KH, SPANS, 32, 2, 2)
                shared = dynamic("float32", ROWS, sizes.row_sums)
                barrier = dynamic("uint64", 1)
                use("w", (barrier,))
                by_lanes("zero", WARPS, zero, acc, grads, barrier)
                for first in T.serial(SLOTS):
                    by_lanes("clear", WARPS, clear, staged, outer=(first,))
                    synchronise()
                    if first <= AHEAD:
                        by_lanes("first", WARPS, load, staged, data, grad_out, vp, vb, outer=(first,))
                wait_for_copies(AHEAD)
                synchronise()
                for turn in T.serial(TURNS):
                    for d in T.unroll(RING):
                        if turn * RING + d < STEPS:
                            wait(barrier, turn * RING + d + 1)
                            by_lanes("pad", WARPS, load_later, staged, data, grad_out, vp, vb, outer=(turn, d))
                            wait_for_copies(AHEAD)
                            arrive(barrier)
                            for w in range(WARPS):
                                with T.sblock("multiply"):
                                    vt, vd, vw = T.axis.remap("SSS", [turn, d, w])
                                    untold()
                                    for o in T.unroll(OWN // READ):
                                        for g in T.unroll(GROUPS):
                                            take(staged, grads, vt * RING + vd, vd, vw, o, g)
                                    if vt * RING + vd >= RING - 1:  # inputs begin
                                        for o in T.unroll(OWN // READ):
                                            for g in T.unroll(GROUPS):
                                                multiply(staged, inputs, grads, acc, vt * RING + vd, vd, vw, o, g)
                wait_for_copies(0)
                synchronise()
                for r in T.unroll(KH // ROWS):
                    by_lanes("leave", WARPS, leave, shared, acc, outer=(r,))
                    by_lanes("taps", WARPS, add_diagonals, partial, shared, vp, vb, outer=(r,))
                use("r", (barrier,))
        for p, kh, kw, c, m in T.grid(PARTS, KH, KW, C, 1):
            with T.sblock("depthwise_conv2d"):
                vp, vkh, vkw, vc, vm = T.axis.remap("RSSSS", [p, kh, kw, c, m])
                with T.init():
                    total[vkh, vkw, vc, vm] = T.float32(0)
                total[vkh, vkw, vc, vm] += partial[vp, vc // CHANNELS, (vkh * KW + vkw) * CHANNELS + vc % CHANNELS]
        blocks.round_sums(out, total)

    return units_nhwc
