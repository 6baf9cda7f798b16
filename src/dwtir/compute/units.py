"""The gradient of the weight of NHWC images as products of matrices; see `dwtir.units`.

The blocks are these:

``pad``
    the inputs and gradients of a step, with their zeros, as vectors of channels in registers;
``stage``
    the same in pairs of images, in shared memory;
``multiply``
    what a warp does with them: ``left`` and ``right`` are the operands of its ``products``, each
    one instruction;
``leave``
    the sums of a warp for a row of the kernel, for the other threads of its block;
``taps``
    the taps, each from a diagonal of the sums;
``depthwise_conv2d``
    the sum over all parts;
``epilogue``
    the one rounding.

What a lane holds follows ``mma.sync.m16n8k16``, as in `compute.banded`, but the depth are units.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..arguments import ALIGNMENT
from ..units import LANES, Units
from . import script
from .mma import left, right


def nhwc(sizes: Units) -> tirx.PrimFunc:
    """Define the gradient on NHWC images."""
    shape = sizes.shape
    data_shape, grad_shape = shape.input_shapes.values()
    N, C, H, W = shape.batch, shape.in_channels, shape.height, shape.width
    OH, OW, TOP, LEFT = shape.out_height, shape.out_width, *shape.padding[:2]
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    CHANNELS, TOGETHER, COLUMNS, SPANS = sizes.channels, sizes.together, sizes.columns, sizes.spans
    WARPS, OWN, GROUPS = sizes.warps, sizes.own, sizes.groups
    RING, AHEAD, TURNS, STEPS = sizes.ring, sizes.ahead, sizes.turns, sizes.unrolled
    PARTS, CHUNKS = sizes.parts, C // CHANNELS
    INPUTS, GRADS = sizes.loads
    THREADS, VECTORS = 32 * WARPS, CHANNELS // LANES
    INPUT_LOADS, GRAD_LOADS = sizes.thread_loads
    GRADS_AT = SH * sizes.input_columns
    HALVES, ROW = sizes.shared_halves, 2 * sizes.stride
    SUMS = -(-CHANNELS * KW // THREADS)
    TAPS = KH * KW * CHANNELS
    dtype = shape.dtype

    def split(task, width: int) -> tuple[Any, Any, Any]:
        """Find the row (of inputs, and of a pair of images), column and vector of a load."""
        return task // VECTORS // width, task // VECTORS % width, task % VECTORS

    def image_and_row(part, step) -> tuple[Any, Any, Any]:
        """Find a step among all, and its images and row."""
        at = part * sizes.part_steps + step - (RING - 1)
        later = at + sizes.steps
        return at, later // sizes.steps - 1, later % sizes.steps

    def input_of(data: tirx.Buffer, part, chunk, step, task, one, lane) -> Any:
        _, image, row = image_and_row(part, step)
        above, column, vector = split(task, W)
        n = (image * sizes.pairs + above % sizes.pairs) * 2 + one
        y = row * SH + above // sizes.pairs
        return T.if_then_else(
            tirx.all(
                *(task < INPUTS, RING - 1 <= step, step < sizes.part_steps + RING - 1), *(n < N, TOP <= y, y < TOP + H)
            ),
            data[n, y - TOP, column, chunk * CHANNELS + vector * LANES + lane],
            T.cast(0, dtype),
        )

    def grad_of(grad: tirx.Buffer, part, chunk, step, task, one, lane) -> Any:
        at, image, row = image_and_row(part, step)
        pair, column, vector = split(task, OW)
        n = (image * sizes.pairs + pair) * 2 + one
        return T.if_then_else(
            tirx.all(task < GRADS, 0 <= at, n < N, row < OH),
            grad[n, row, column, chunk * CHANNELS + vector * LANES + lane],
            T.cast(0, dtype),
        )

    def input_to(task) -> Any:
        """Find in shared memory what a load brings."""
        above, column, vector = split(task, W)
        row, pair = above // sizes.pairs, above % sizes.pairs
        column += row * sizes.input_columns + pair * sizes.pitch + LEFT
        return column * ROW + vector * (2 * LANES)

    def grad_to(task) -> Any:
        pair, column, vector = split(task, OW)
        column += GRADS_AT + pair * sizes.across * COLUMNS
        return column * ROW + vector * (2 * LANES)

    def unit(group, half, lane) -> Any:
        return group * LANES + half * 4 + lane % 4

    def channel(warp, own, lane) -> Any:
        return (warp * OWN + own) * TOGETHER + lane // 4 % TOGETHER

    def input_at(warp, own, group, row, span, *of) -> Any:
        lane, half, more = of
        i = (span * 2 + more) * COLUMNS + lane // 4 // TOGETHER
        column = row * sizes.input_columns + sizes.place(unit(group, half, lane)) + i
        return column * ROW + channel(warp, own, lane) * 2

    def grad_at(warp, own, group, lane, half) -> Any:
        column = GRADS_AT + unit(group, half, lane) * COLUMNS + lane // 4 // TOGETHER
        return column * ROW + channel(warp, own, lane) * 2

    def held(tap, column) -> tuple[Any, ...]:
        """Find a sum on a diagonal: its unit's channels, product, lane, and place there."""
        kw, channel = tap // CHANNELS, tap % CHANNELS
        i, c = column * SW + kw * DW, channel % TOGETHER
        down, right = i % COLUMNS * TOGETHER + c, column * TOGETHER + c
        half = i // COLUMNS % 2
        return channel // TOGETHER, i // (2 * COLUMNS), down * 4 + right // 2, half, right % 2

    def task_of(k, warp, lane) -> Any:
        return k * THREADS + warp * 32 + lane

    @script.inline
    def load(source, raw, count, value_of, part, chunk, step, d, warp, lane):
        """Load what a thread has of a step, of inputs or gradients."""
        for k in T.unroll(count):
            for e in T.unroll(2):
                for v in T.vectorized(LANES):
                    raw[d, warp, lane, k, e, v] = value_of(source, part, chunk, step, task_of(k, warp, lane), e, v)

    @script.inline
    def store(staged, pairs, raw, count, most, place, d, warp, lane):
        """Leave in shared memory what a thread has loaded, the images of a pair side by side."""
        for k in T.unroll(count):
            for v in T.unroll(LANES):
                for e in T.unroll(2):
                    pairs[v * 2 + e] = raw[d, warp, lane, k, e, v]
            if task_of(k, warp, lane) < most:
                for v in T.unroll(COLUMNS):
                    for e in T.vectorized(2 * TOGETHER):
                        staged[place(task_of(k, warp, lane)) + v * (2 * TOGETHER) + e] = pairs[v * (2 * TOGETHER) + e]

    @script.inline
    def multiply(staged, inputs, grads, acc, d, w, o, g):
        """Multiply what a warp has of a step, for a unit of channels and a group."""
        for lane, h, e in T.grid(32, 2, 2):
            with T.sblock("right"):
                vo, vg, vl, vh, ve = T.axis.remap("SSSSS", [o, g, lane, h, e])
                grads[w, vo, vg, d % RING, vl, vh, ve] = staged[grad_at(w, vo, vg, vl, vh) + ve]
        for lane, r, s, h, m, e in T.grid(32, SH, SPANS, 2, 2, 2):
            with T.sblock("left"):
                vo, vg, vl, vr, vs, vh, vm, ve = T.axis.remap("SSSSSSSS", [o, g, lane, r, s, h, m, e])
                inputs[w, vr, vs, vl, vh, vm, ve] = staged[input_at(w, vo, vg, vr, vs, vl, vh, vm) + ve]
        for r, s, lane, h, e, k in T.grid(KH, SPANS, 32, 2, 2, 16):
            with T.sblock("products"):
                vo, vg, vr, vs, vl, vh, ve, vk = T.axis.remap("SSSSSSSR", [o, g, r, s, lane, h, e, k])
                acc[w, vo, vr, vs, vl, vh, ve] = acc[w, vo, vr, vs, vl, vh, ve] + T.cast(
                    inputs[left(w, vr * DH % SH, vs, vl, vh, vk)], "float32"
                ) * T.cast(grads[right(w, vo, vg, (d - vr * DH // SH) % RING, vl, ve, vk)], "float32")

    @script.inline
    def leave(shared, acc, r, w, lane):
        for o in T.unroll(OWN):
            for s in T.unroll(SPANS):
                for h in T.unroll(2):
                    for e in T.vectorized(2):
                        shared[w * OWN + o, s, lane, h, e] = acc[w, o, r, s, lane, h, e]

    @script.prim_func(s_tir=True)
    def units_nhwc(
        data: T.Buffer(data_shape, dtype, align=ALIGNMENT),  # type: ignore[valid-type]
        grad_out: T.Buffer(grad_shape, dtype, align=ALIGNMENT),  # type: ignore[valid-type]
        out: T.Buffer((KH, KW, C, 1), dtype, align=ALIGNMENT),  # type: ignore[valid-type]
    ) -> None:
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        partial = T.sblock_alloc_buffer((PARTS, CHUNKS, TAPS), "float32")
        total = T.sblock_alloc_buffer((KH, KW, C, 1), "float32")
        for p, b in T.grid(PARTS, CHUNKS):
            with T.sblock("block"):
                vp, vb = T.axis.remap("SS", [p, b])
                T.reads()
                T.writes(partial[vp, vb, 0:TAPS])
                raw_inputs = T.sblock_alloc_buffer((AHEAD, WARPS, 32, INPUT_LOADS, 2, LANES), dtype, scope="local")
                raw_grads = T.sblock_alloc_buffer((AHEAD, WARPS, 32, GRAD_LOADS, 2, LANES), dtype, scope="local")
                staged = T.sblock_alloc_buffer((HALVES,), dtype, scope="shared")
                inputs = T.sblock_alloc_buffer((WARPS, SH, SPANS, 32, 2, 2, 2), dtype, scope="local")
                grads = T.sblock_alloc_buffer((WARPS, OWN, GROUPS, RING, 32, 2, 2), dtype, scope="local")
                acc = T.sblock_alloc_buffer((WARPS, OWN, KH, SPANS, 32, 2, 2), "float32", scope="local")
                shared = T.sblock_alloc_buffer((WARPS * OWN, SPANS, 32, 2, 2), "float32", scope="shared")
                for w, lane in T.grid(WARPS, 32):
                    with T.sblock("zero"):
                        vw, vl = T.axis.remap("SS", [w, lane])
                        T.reads()
                        T.writes()
                        for k in T.serial(-(-HALVES // (2 * THREADS))):
                            if task_of(k, vw, vl) * 2 < HALVES:
                                for e in T.vectorized(2):
                                    staged[task_of(k, vw, vl) * 2 + e] = T.cast(0, dtype)
                        for o in T.unroll(OWN):
                            for r, s, h, e in T.grid(KH, SPANS, 2, 2):
                                acc[vw, o, r, s, vl, h, e] = T.float32(0)
                            for g, r, h, e in T.grid(GROUPS, RING, 2, 2):
                                grads[vw, o, g, r, vl, h, e] = T.cast(0, dtype)
                if TURNS == 1:  # in a loop TVM puts one at its begin, but none between two writes
                    T.evaluate(T.tvm_storage_sync("shared"))
                for first in T.unroll(AHEAD):
                    for w, lane in T.grid(WARPS, 32):
                        with T.sblock("first"):
                            vd, vw, vl = T.axis.remap("SSS", [first, w, lane])
                            T.reads()
                            T.writes()
                            load(*(data, raw_inputs, INPUT_LOADS, input_of), *(vp, vb, vd, vd, vw, vl))
                            load(*(grad_out, raw_grads, GRAD_LOADS, grad_of), *(vp, vb, vd, vd, vw, vl))
                for turn in T.serial(TURNS):
                    for d in T.unroll(STEPS):
                        for w, lane in T.grid(WARPS, 32):
                            with T.sblock("stage"):
                                vd, vw, vl = T.axis.remap("SSS", [d, w, lane])
                                T.reads()
                                T.writes()
                                pairs = T.sblock_alloc_buffer((2 * LANES,), dtype, scope="local")
                                store(
                                    *(staged, pairs, raw_inputs, INPUT_LOADS, INPUTS, input_to), *(vd % AHEAD, vw, vl)
                                )
                                store(*(staged, pairs, raw_grads, GRAD_LOADS, GRADS, grad_to), *(vd % AHEAD, vw, vl))
                        for w, lane in T.grid(WARPS, 32):
                            with T.sblock("pad"):
                                vt, vd, vw, vl = T.axis.remap("SSSS", [turn, d, w, lane])
                                T.reads()
                                T.writes()
                                load(
                                    *(data, raw_inputs, INPUT_LOADS, input_of, vp, vb),
                                    *(vt * STEPS + vd + AHEAD, vd % AHEAD, vw, vl),
                                )
                                load(
                                    *(grad_out, raw_grads, GRAD_LOADS, grad_of, vp, vb),
                                    *(vt * STEPS + vd + AHEAD, vd % AHEAD, vw, vl),
                                )
                        for w in range(WARPS):
                            with T.sblock("multiply"):
                                vd, vw = T.axis.remap("SS", [d, w])
                                T.reads()
                                T.writes()
                                for o in T.unroll(OWN):
                                    for g in T.unroll(GROUPS):
                                        multiply(staged, inputs, grads, acc, vd, vw, o, g)
                for r in T.unroll(KH):
                    for w, lane in T.grid(WARPS, 32):
                        with T.sblock("leave"):
                            vr, vw, vl = T.axis.remap("SSS", [r, w, lane])
                            T.reads()
                            T.writes()
                            leave(shared, acc, vr, vw, vl)
                    for w, lane in T.grid(WARPS, 32):
                        with T.sblock("taps"):
                            vr, vw, vl = T.axis.remap("SSS", [r, w, lane])
                            T.reads()
                            T.writes()
                            tap = T.sblock_alloc_buffer((1,), "float32", scope="local")
                            for k in T.unroll(SUMS):
                                task = T.meta_var(task_of(k, vw, vl))
                                if task < CHANNELS * KW:
                                    tap[0] = T.float32(0)
                                    for j in T.unroll(COLUMNS):
                                        tap[0] = tap[0] + shared[held(task, j)]
                                    partial[vp, vb, vr * (KW * CHANNELS) + task] = tap[0]
        for p, kh, kw, c, m in T.grid(PARTS, KH, KW, C, 1):
            with T.sblock("depthwise_conv2d"):
                vp, vkh, vkw, vc, vm = T.axis.remap("RSSSS", [p, kh, kw, c, m])
                with T.init():
                    total[vkh, vkw, vc, vm] = T.float32(0)
                total[vkh, vkw, vc, vm] = (
                    total[vkh, vkw, vc, vm] + partial[vp, vc // CHANNELS, (vkh * KW + vkw) * CHANNELS + vc % CHANNELS]
                )
        for kh, kw, c, m in T.grid(KH, KW, C, 1):
            with T.sblock("epilogue"):
                vkh, vkw, vc, vm = T.axis.remap("SSSS", [kh, kw, c, m])
                out[vkh, vkw, vc, vm] = T.cast(total[vkh, vkw, vc, vm], dtype)

    return units_nhwc
