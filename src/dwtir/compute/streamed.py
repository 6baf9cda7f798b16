"""The forward convolution, row after row of the input.

A thread goes down the input rows of a strip of `cols` columns and adds each to the sums of all outputs that it is part
of: ``acc[kh]`` is the output row of which the kernel's rows up to ``kh`` have been added. The next row's sums take
their place, one row of the kernel further, so that no index depends on the row.

The blocks are ``stream``, one thread's whole work, and what it holds.
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..epilogue import Epilogue
from ..strips import Strip, apart, part_sizes
from . import script
from .forward import both_ends
from .parts import Row, local, unrolled


def rows_of(strips: Strip, epilogue: Epilogue, rows: int, depth: int) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient, of stride 1.

    Parameters
    ----------
    strips : Strip
        Columns and channels of one thread.
    rows : int
        Rows of one thread.
    depth : int
        Rows of inputs that a thread has in registers as they were loaded. Halves are converted
        as soon as a row is begun, so that all of these are under way; of float32, one is in use.
    """
    shape, cols = strips.shape, strips.cols
    planes = shape.layout == "NCHW"
    images, _ = shape.input_shapes.values()
    N, C, H, W = images if planes else (images[0], images[3], *images[1:3])
    RH, RW = shape.result_height, shape.result_width
    (KH, KW), M = shape.kernel, shape.channel_multiplier
    TURNED = shape.operation == "grad_data"
    DOWN, RIGHT = apart(shape)
    TOP, LEFT, LEAD = shape.before[0] // DOWN, strips.left, strips.shift
    BELOW = max(0, (RH - H) // DOWN + KH - 1 - TOP)  # rows of padding below the image
    V, D, LOADS = strips.channels, depth, strips.loads
    LOADED, STORE = strips.step, strips.store_step  # columns of a load and of a store
    HEIGHT, WIDTH = part_sizes(shape)
    SEGMENTS, STRIPS = -(-HEIGHT // rows) * DOWN, -(-WIDTH // cols) * RIGHT
    REACH, SPREAD, (LOW, HIGH) = strips.reach, strips.spread, strips.inside
    dtype = shape.dtype
    is_float = dtype == "float32"
    AHEAD = D - 1 if is_float else D
    declare, finish = both_ends(shape, epilogue)
    names = [name for name in epilogue.operands(shape) if name != "residual"]
    has_residual = "residual" in epilogue.operands(shape)
    # Its rows are loaded ahead as well.
    ADDED = strips.residual_rows(D)
    # What comes before a segment's first result is stored in its place, where all segments have
    # one: a test parts what ptxas may do at a time, which is slower for float32. Of halves in NHWC
    # a row leaves before others are added to, and has its registers for itself.
    UNTESTED = bool(epilogue.steps) and RH % DOWN == 0 and is_float
    FIRST = 1 if epilogue.steps and not is_float and not planes else KH

    def hold(channels, added, row):
        """Find the operands of the epilogue where a thread has them."""
        held: dict[str, Any] = {name: Row(channels, place) for place, name in enumerate(names)}
        return held | {"residual": Row(added, row)}

    def tap(row, column, channel):
        if TURNED:
            row, column = KH - 1 - row, KW - 1 - column
        own, result = T.floordiv(channel, M), T.floormod(channel, M)
        return (own, result, row, column) if planes else (row, column, own, result)

    def first_row(segment):
        return T.floordiv(segment, DOWN) * rows

    def line(segment, row):
        """Find a row in the image, by its place in a segment."""
        return (first_row(segment) + row) * DOWN + T.floormod(segment, DOWN)

    def last_row(segment, height: int):
        return T.floordiv(height - 1 - T.floormod(segment, DOWN), DOWN) + 1 - first_row(segment)

    def spot(n, row, strip, place, vector, lane, results: int = 1):
        """Find an element of a vector in an image, by its place in a strip."""
        column = (T.floordiv(strip, RIGHT) * cols + place) * RIGHT + T.floormod(strip, RIGHT)
        if planes:
            return n, T.floordiv(vector, results), row, column + lane
        return n, row, column, T.floordiv(vector * V + lane, results)

    def place(column, lane, *of):
        """Find it among a thread's columns and channels."""
        return (*of, column + lane, 0) if planes else (*of, column, lane)

    def area(n, segment, strip, vector):
        """Find all results of a thread, and those of other parts between them."""
        sizes = ((T.floordiv(segment, DOWN), rows * DOWN), (T.floordiv(strip, RIGHT), cols * RIGHT), (vector, V))
        down, right, channels = (slice(at * size, at * size + size) for at, size in sizes)
        return (n, channels, down, right) if planes else (n, down, right, channels)

    def is_before(strip, column, width: int):
        if width % RIGHT == 0:  # by the strip's number
            return T.floordiv(strip, RIGHT) < T.floordiv(width // RIGHT - column + cols - 1, cols)
        return (T.floordiv(strip, RIGHT) * cols + column) * RIGHT + T.floormod(strip, RIGHT) < width

    def is_input(strip, column):
        first = T.floordiv(LEFT - column + cols - 1, cols)
        return tirx.all(first <= T.floordiv(strip, RIGHT), is_before(strip, column - LEFT, W))

    def is_output(strip, column):
        return is_before(strip, column, RW)

    @script.inline
    def load_row(data, raw, d, n, row, strip, vector):
        for j in T.unroll(LOADS):
            if is_input(strip, j * LOADED - LEAD):
                for e in T.vectorized(strips.vector):
                    raw[place(j * LOADED, e, d)] = data[
                        spot(n, T.min(row, H - 1), strip, j * LOADED - (LEFT + LEAD), vector, e, M)
                    ]

    def load_channels(operands: dict[str, Any], channels, vector):
        for place, name in enumerate(names):
            with T.vectorized(V) as v:
                T.buffer_store(channels, operands[name][vector * V + v], [place, v])

    @script.inline
    def load_residual(operand, added, d, n, row, strip, vector):
        """Load what the epilogue adds to a row of a strip, or to the image's first or last."""
        for j in T.unroll(cols // STORE):
            for e in T.vectorized(STORE * V):
                added[place(j * STORE, e, d)] = T.if_then_else(
                    is_output(strip, j * STORE),
                    operand[spot(n, T.max(0, T.min(row, RH - 1)), strip, j * STORE, vector, e)],
                    T.cast(0, dtype),
                )

    @script.inline
    def add_row(acc, raw, row, wide, d, back):
        """Move a row of sums one row of the kernel on, and add a row of the image to it."""
        for j, v in T.grid(cols, V):
            if back == KH - 1:
                acc[KH - 1 - back, j, v] = T.float32(0)
            else:
                acc[KH - 1 - back, j, v] = acc[KH - 2 - back, j, v]
        for kw, j, v in T.grid(KW, cols, V):
            at = T.meta_var(j + kw * SPREAD)
            if LOW <= at and at < HIGH:
                value = T.meta_var(raw[d, at + LEAD, v] if is_float else row[at, v])
                acc[KH - 1 - back, j, v] += value * wide[KH - 1 - back, kw, v]

    @script.inline
    def store_row(acc, kh, held, result, out, n, row, strip, vector):
        for j in T.unroll(cols):
            for v in T.unroll(V):
                result[j, v] = finish(acc[kh, j, v], held, v, (j, v))
        for j in T.unroll(cols // STORE):
            if is_output(strip, j * STORE):
                for e in T.vectorized(STORE * V):
                    out[spot(n, row, strip, j * STORE, vector, e)] = result[place(j * STORE, e)]

    @script.prim_func(s_tir=True)
    def streamed() -> None:
        data, weight, operands, out = T.meta_var(declare())
        for n, segment, strip, vector in T.grid(N, SEGMENTS, STRIPS, C * M // V):
            with T.sblock("stream"):
                vn, vs, vx, vc = T.axis.remap("SSSS", [n, segment, strip, vector])
                T.reads()
                T.writes(out[area(vn, vs, vx, vc)])
                raw = local(dtype, D, LOADS * LOADED, V)
                taps = local(dtype, KH, KW, V)
                wide = local("float32", KH, KW, V)
                row = local("float32", REACH, V)
                acc = local("float32", KH, cols, V)
                channels = local(dtype, max(1, len(names)), V)
                added = local(dtype, ADDED, cols, V)
                last = local(dtype, max(1, BELOW), cols, V)
                result = local(dtype, cols, V)
                # Rows of the strip that read the image, by their place in its window.
                low = T.max(0, TOP - first_row(vs))
                high = T.min(rows + KH - 1, TOP + last_row(vs, H))
                for d in unrolled(D):
                    for j, v in T.grid(LOADS * LOADED, V):
                        raw[d, j, v] = T.cast(0, dtype)
                for d in T.unroll(AHEAD):
                    load_row(data, raw, d, vn, line(vs, low + d - TOP), vx, vc)
                if has_residual:
                    for d in T.unroll(ADDED):
                        at = T.meta_var(line(vs, low + d - (KH - 1)))
                        load_residual(operands["residual"], added, d, vn, at, vx, vc)
                for kh in T.unroll(KH):
                    for kw in T.unroll(KW):
                        for v in T.vectorized(V):
                            taps[kh, kw, v] = weight[tap(kh, kw, vc * V + v)]
                load_channels(operands, channels, vc)
                for kh in unrolled(KH):
                    for kw, v in T.grid(KW, V):
                        wide[kh, kw, v] = T.cast(taps[kh, kw, v], "float32")
                for kh in unrolled(KH):
                    for j, v in T.grid(cols, V):
                        acc[kh, j, v] = T.float32(0)
                for turn in T.serial(T.floordiv(high - low + (D - 1), D)):
                    for d in T.unroll(D):
                        at_row = T.meta_var(low + turn * D + d)
                        if d == 0 or at_row < high:
                            if not is_float:
                                for j in unrolled(LOW, HIGH):
                                    for v in T.serial(V):
                                        row[j, v] = T.cast(raw[d, j + LEAD, v], "float32")
                            coming = T.meta_var(line(vs, at_row + AHEAD - TOP))
                            load_row(data, raw, T.floormod(d + AHEAD, D), vn, coming, vx, vc)
                            for back in unrolled(FIRST):
                                add_row(acc, raw, row, wide, d, back)
                            done = T.meta_var(at_row - (KH - 1))
                            at = T.meta_var(line(vs, T.max(0, done) if UNTESTED else done))
                            held = T.meta_var(hold(channels, added, T.floormod(d, ADDED)))
                            if UNTESTED or KH - 1 <= at_row:
                                store_row(acc, KH - 1, held, result, out, vn, at, vx, vc)
                            # Tested as well, for else it would be loaded where it is added.
                            if has_residual and (UNTESTED or KH - 1 - ADDED <= at_row):
                                later = T.meta_var(line(vs, done) + ADDED * DOWN)
                                load_residual(operands["residual"], added, T.floormod(d, ADDED), vn, later, vx, vc)
                            if FIRST < KH:
                                for back in unrolled(FIRST, KH):
                                    add_row(acc, raw, row, wide, d, back)
                if has_residual:
                    for below in T.unroll(BELOW):
                        at = T.meta_var(line(vs, high + below - (KH - 1)))
                        load_residual(operands["residual"], last, below, vn, at, vx, vc)
                for below in T.unroll(BELOW):
                    if KH - 1 <= high + below and high + below < tirx.min(rows, last_row(vs, RH)) + KH - 1:
                        at = T.meta_var(line(vs, high + below - (KH - 1)))
                        held = T.meta_var(hold(channels, last, below))
                        store_row(acc, KH - 2 - below, held, result, out, vn, at, vx, vc)

    return streamed
