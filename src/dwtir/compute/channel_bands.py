"""The convolution of NHWC halves as products with banded matrices, by way of shared memory.

Blocks of TensorIR of a block of threads (see `dwtir.panels`) beside those of `compute`: ``gather``, its inputs in
shared memory; ``band``, the banded matrices as lanes hold them; ``residual``, where the results will be; ``zero``,
``window`` and ``products``, the sums: a row of inputs after the other, each with all products that it is part of.

What a lane holds is what `banded` says, but for the inputs: lane ``4 * m + x`` has ``x``, ``x + 4``
and so on. To which place in a product an input comes is all the same.
"""

from math import gcd

from tvm import tirx
from tvm.script import tirx as T

from ..bands import COLUMNS, DEPTH, TILES
from ..epilogue import Epilogue
from ..panels import QUAD, VECTOR, Panels
from . import script
from .forward import both_ends
from .mma import multiply
from .parts import by_lane, by_lanes, copy_vector, dynamic, local, unrolled, untold, when

_LOADS = 16
"""Vectors that a thread loads before it stores the first of them."""

_AHEAD = 3
"""Rows of inputs that may be loaded ahead. A barrier keeps ptxas from loading all there are, for
which it takes a third more registers."""


def products(panels: Panels, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient."""
    shape = panels.shape
    (H, W), (TOP, LEFT) = shape.source, shape.before
    N, C, OH, OW = shape.batch, shape.result_channels, shape.result_height, shape.result_width
    KH, KW = shape.kernel
    R, DOWN, ACROSS, IMAGES = panels.rows, panels.down, panels.across, panels.images
    V, E = panels.warps, panels.channels
    STEPS, PIECES, TAP = panels.depth_steps, panels.pieces, panels.tap_stride
    TOGETHER = V * 32 // PIECES  # threads with the same channels
    BN, BY, BX, BC = panels.blocks
    dtype = shape.dtype
    declare, finish = both_ends(shape, epilogue)
    has_residual = "residual" in epilogue.operands(shape)
    STAGED, FINISHED = panels.planes(has_residual)

    def carry(count: int, load, store):
        """Move vectors, many at a time: where a store follows each load, ptxas waits for each."""
        own = local(dtype, min(count, _LOADS), VECTOR)
        for first in range(0, count, _LOADS):
            some = min(_LOADS, count - first)
            for move in (load, store):
                with unrolled(some) as one:
                    move(first + one, own, one)

    def keep(own, one, inside, value):
        with T.vectorized(VECTOR) as e:
            T.buffer_store(own, T.if_then_else(inside, value(e), T.cast(0, dtype)), [one, e])

    def parts(one, piece, apart: int, slot):
        """Go through a vector's elements and where they are in the slots of some warps."""
        for part in range(VECTOR // E):
            with T.vectorized(E) as e:
                yield (one, part * E + e), ((piece * (VECTOR // E) + part) * apart + slot * E + e,)

    def spread(buffer, apart: int, piece, slot, own, one):
        for at, there in parts(one, piece, apart, slot):
            T.buffer_store(buffer, own[at], there)

    def gather(staged, image, block, warp, lane):
        T.reads()
        T.writes(staged[:])
        (n, y, x, c), thread = block, warp * 32 + lane
        wide = gcd(panels.used_slots, TOGETHER)  # slots of a row that threads load at a time
        piece, place = thread % PIECES, thread // PIECES
        channel = (c * PIECES + piece) * VECTOR
        lines, tall = IMAGES * panels.staged_rows, TOGETHER // wide
        along, lines_of_one = panels.used_slots // wide, panels.staged_rows

        def find(number):
            """Find the image and the row of an input among the staged, and its slot there."""
            line = number // along * tall + place // wide
            if lines % tall:  # some do the last again: under a test no load would be ahead
                line = T.min(line, lines - 1)
            at, down = (0, line) if IMAGES == 1 else (line // lines_of_one, line % lines_of_one)
            return at, down, number % along * wide + place % wide

        def load(number, own, one):
            at, down, slot = find(number)
            row = down + (y * (DOWN * R) - TOP)
            column = slot // QUAD % panels.quads * COLUMNS + slot // QUAD // panels.quads * QUAD + slot % QUAD
            column += x * (ACROSS * COLUMNS) - LEFT
            inside = tirx.all(*(n * IMAGES + at < N, 0 <= row, row < H, 0 <= column, column < W, channel < C))
            keep(own, one, inside, lambda e: image[n * IMAGES + at, row, column, channel + e])

        def store(number, own, one):
            at, down, slot = find(number)
            first = at * panels.image_slots + down * panels.row_slots
            spread(staged, STAGED, piece, first + slot, own, one)

        carry(-(-lines // tall) * along, load, store)

    def fetch(filters, weight, c, warp, lane):
        T.reads()
        T.writes(filters[:])
        thread = warp * 32 + lane
        channel = thread % PIECES * VECTOR
        first = T.min(c * (V * E) + channel, C - VECTOR)

        def find(number):
            return T.min(number * TOGETHER + thread // PIECES, KH * KW - 1)

        def load(number, own, one):
            tap = find(number)
            keep(own, one, True, lambda e: weight[tap // KW, tap % KW, first + e, 0])

        def store(number, own, one):
            spread(filters, E, channel // VECTOR, find(number) * (TAP // E), own, one)

        carry(-(-KH * KW // TOGETHER), load, store)

    def taps(band, filters, vw, vl):
        T.reads()
        T.writes(band[vw, :, :, :, vl, :, :])
        own = local(dtype, 2, E)
        with T.unroll(KH) as row, T.unroll(STEPS) as step, T.unroll(2) as further:
            for one in range(2):
                column = step * DEPTH + further * 8 + one * QUAD + vl % 4 - vl // 4
                tap = (KH - 1 - row) * KW + KW - 1 - column if shape.operation == "grad_data" else row * KW + column
                seen = tirx.all(0 <= column, column < KW)
                with T.vectorized(E) as e:
                    value = filters[tap * TAP + vw * E + e]
                    T.buffer_store(own, T.if_then_else(seen, value, T.cast(0, dtype)), [one, e])
            with T.unroll(E) as e, T.unroll(2) as one:
                T.buffer_store(band, own[one, e], [vw, row, step, e, vl, further, one])

    def window(row: int, staged, held, group):
        with by_lane(f"window{row}") as vl:
            own = local(dtype, 2, E)
            with T.unroll(STEPS) as step, T.unroll(2) as further, T.unroll(2) as half:
                n, y, x = panels.place(half * 8 + vl // 4)
                n = n if IMAGES * DOWN * panels.pitch == TILES else T.min(n, IMAGES - 1)
                first = n * panels.image_slots + (y * R + row) * panels.row_slots
                first = first + T.min(x, ACROSS - 1) * QUAD + vl % 4
                for one in range(2):
                    with T.vectorized(E) as e:
                        at = first + panels.quad(step * 4 + further * 2 + one)
                        T.buffer_store(own, staged[group * STAGED + at * E + e], [one, e])
                with T.unroll(E) as e, T.unroll(2) as one:
                    T.buffer_store(held, own[one, e], [step, e, vl, further, half, one])

    def sums(staged, band, acc, vw):
        held = local(dtype, STEPS, E, 32, 2, 2, 2)
        with by_lane("zero") as vl, T.unroll(R) as r, T.unroll(E) as e, T.unroll(2) as half, T.unroll(2) as one:
            T.buffer_store(acc, T.float32(0), [vw, r, e, vl, half, one])
        for row in range(panels.input_rows):
            if row % _AHEAD == _AHEAD - 1:
                T.evaluate(T.tvm_storage_sync("shared"))
            window(row, staged, held, vw)
            first, end = max(0, row - KH + 1), min(R, row + 1)  # of the rows of a tile that a row of inputs meets
            sizes = (end - first, STEPS, E, DEPTH)
            multiply(f"products{row}", sizes, (held, band), acc, vw, (first, row - first))

    def end(results, acc, operands, c, vw, vl):
        T.reads(acc[vw, :, :, vl, :, :])
        T.writes(results[:])
        own = local(dtype, E)
        there = local(dtype, R * 4 * E)
        channel = T.min((c * V + vw) * E, C - E)
        if has_residual:  # all of it before the first result, else there are barriers between them
            with T.unroll(R * 4) as one:
                copy_vector(results, vw * FINISHED + (one * 32 + vl) * E, there, one * E, E)
            operands = operands | {"residual": there}
        with T.unroll(R) as r, T.unroll(2) as half, T.unroll(2) as one:
            number = (r * 2 + half) * 2 + one
            slot = number * 32 + vl
            with T.unroll(E) as e:
                value = finish(acc[vw, r, e, vl, half, one], operands, channel + e, (number * E + e,))
                T.buffer_store(own, value, [e])
            copy_vector(own, 0, results, vw * FINISHED + slot * E, E)

    def bring(results, image, block, load: bool, warp, lane):
        (n, y, x, c), thread = block, warp * 32 + lane
        T.reads(*([] if load else [results[:]]))
        T.writes(results[:] if load else image[n * IMAGES : n * IMAGES + IMAGES, :, :, :])
        piece = thread % PIECES
        channel = (c * PIECES + piece) * VECTOR

        def find(number):
            """Find a vector's slot, whether it is a result, and which."""
            slot = number * TOGETHER + thread // PIECES
            lane, one, half, r = slot % 32, slot // 32 % 2, slot // 64 % 2, slot // 128
            at, ty, tx = panels.place(half * 8 + lane // 4)
            row, column = (y * DOWN + ty) * R + r, (x * ACROSS + tx) * COLUMNS + lane % 4 * 2 + one
            inside = tirx.all(*(at < IMAGES, tx < ACROSS, n * IMAGES + at < N, row < OH, column < OW, channel < C))
            return slot, inside, (n * IMAGES + at, row, column)

        def load_global(number, own, one):
            _, inside, (at, row, column) = find(number)
            keep(own, one, inside, lambda e: image[at, row, column, channel + e])

        def store_shared(number, own, one):
            spread(results, FINISHED, piece, find(number)[0], own, one)

        def load_shared(number, own, one):
            for at, there in parts(one, piece, FINISHED, find(number)[0]):
                T.buffer_store(own, results[there], at)

        def store_global(number, own, one):
            _, inside, place = find(number)
            with when(inside), T.vectorized(VECTOR) as e:
                T.buffer_store(image, own[one, e], (*place, channel + e))

        load_store = (load_global, store_shared) if load else (load_shared, store_global)
        carry(panels.result_slots // TOGETHER, *load_store)

    @script.prim_func(s_tir=True)
    def banded_nhwc() -> None:
        image, weight, operands, out = T.meta_var(declare())
        for bn, by, bx, bc in T.grid(BN, BY, BX, BC):
            with T.sblock("panels"):
                vn, vy, vx, vc = T.axis.remap("SSSS", [bn, by, bx, bc])
                T.reads()
                T.writes(out[vn * IMAGES : vn * IMAGES + IMAGES, :, :, vc * V * E : vc * V * E + V * E])
                block = T.meta_var((vn, vy, vx, vc))
                staged = dynamic(dtype, V * STAGED + panels.beyond)
                filters = dynamic(dtype, KH * KW * TAP)
                results = dynamic(dtype, V * FINISHED) if has_residual else T.meta_var(staged)
                band = local(dtype, V, KH, STEPS, E, 32, 2, 2)
                acc = local("float32", V, R, E, 32, 2, 2)
                by_lanes("filters", V, fetch, filters, weight, vc)
                by_lanes("gather", V, gather, staged, image, block)
                if has_residual:
                    by_lanes("residual", V, bring, results, operands["residual"], block, True)
                by_lanes("band", V, taps, band, filters)
                for w in T.serial(V):
                    with T.sblock("products"):
                        vw = T.axis.spatial(V, w)
                        untold()
                        sums(staged, band, acc, vw)
                by_lanes("epilogue", V, end, results, acc, operands, vc)
                by_lanes("store", V, bring, results, out, block, False)

    return banded_nhwc
