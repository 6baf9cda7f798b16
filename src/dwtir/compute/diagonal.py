"""The gradient of the weight as products of matrices; see `dwtir.diagonals`.

Blocks beside those of `compute`: ``pad``, the inputs of 16 tiles in pairs as they are loaded, and ``pairs``, in pairs
of tiles as lanes multiply them; ``grad_pairs`` and ``grads``, gradients likewise; ``products``, each an instruction of
a warp; ``leave``, a warp's sums for its block; ``diagonals``, the taps of a block's warps.

What a lane holds follows ``mma.sync.m16n8k16``, as in `compute.banded`, but the depth are tiles:
lane ``4 * m + x`` has inputs ``2 * m`` and ``2 * m + 1`` of tiles ``x``, ``x + 4`` and so on, and
the gradients of column ``m`` of these, or of 16 columns ``2 * m`` and ``2 * m + 1``.
"""

from itertools import product

from tvm import tirx
from tvm.script import tirx as T

from ..bands import COLUMNS, TILES
from ..diagonals import INPUTS, Diagonals
from . import blocks, script
from .forward import declared
from .mma import left, right
from .parts import by_places, fill, made, swapped
from .unaligned import pair_of_row


def nchw(sizes: Diagonals) -> tirx.PrimFunc:
    """Define the gradient on NCHW images."""
    shape = sizes.shape
    N, M, H, W = shape.batch, shape.channel_multiplier, shape.height, shape.width
    C, RC, OH, OW = shape.in_channels, shape.out_channels, shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT, *_ = shape.padding
    R, IH, STEPS, KINDS, ALTERNATES = sizes.rows, sizes.window_rows, sizes.spans, sizes.kinds, sizes.alternates
    BESIDE, ACROSS, APART, (FIRST, LAST) = sizes.beside, sizes.across, sizes.apart, sizes.own
    LINES = BESIDE * STEPS
    PARTS, WARPS, TURNS = sizes.parts, sizes.warps, sizes.turns
    GROUPS = PARTS * WARPS * TURNS
    LOADED = dict(zip("cgrslhei", (C, GROUPS, IH, STEPS, 32, 2, 2, 2 - ALTERNATES), strict=True))
    dtype = shape.dtype

    def tile(group, lane, half, one):
        return sizes.place(group * TILES + half * 8 + one * 4 + lane % 4)

    def first_of(x, step, lane):
        return x * (APART * SW) + step * INPUTS + lane // 4 * 2

    def inputs(data, channel, group, row, step, lane, *others):
        half, one, odd = others
        n, y, x = tile(group, lane, half, one)
        row = y * (R * SH) + row
        first, left = first_of(x, step, lane), LEFT + sizes.shift(0, 0)
        tested = first if W % 2 == 0 else first + odd
        return T.if_then_else(
            tirx.all(
                *(n < N, TOP <= row, row < TOP + H),
                *(T.Not(tested < left), tested < left + W),  # as in forward
            ),
            data[n, channel, row - TOP, first + odd - left],
            T.cast(0, dtype),
        )

    def alternating(data, channel, group, row, step, lane, *others):
        n, y, x = tile(group, lane, *others)
        first = first_of(x, step, lane)
        columns = first, first - LEFT - sizes.shift(channel, row)
        return pair_of_row(data, (n, channel), (y * (R * SH), row), columns, (TOP, LEFT))

    def hold(loaded, data, *place):
        *others, one = place
        value, at = (alternating(data, *others), T.Ramp(one * 2, 1, 2)) if ALTERNATES else (inputs(data, *place), one)
        T.buffer_store(loaded, value, [*others, at])

    def gradients(grad, channel, group, row, *place):
        *at, odd = place
        n, y, x = tile(group, *at)
        row, first = y * R + row, at[0] // 4 * BESIDE
        column = x * APART + first
        own = [tirx.any(x == 0, FIRST <= first), tirx.any(x == ACROSS - 1, first < LAST)] * (BESIDE > 1 < ACROSS)
        is_there = tirx.all(n < N, row < OH, column < OW, *own)
        return T.if_then_else(is_there, grad[n, channel, row, column + odd], T.cast(0, dtype))

    def parted(loaded, *others):
        *outer, odd, lane, half, one = others
        at = (*outer, lane, half, one, odd)
        return loaded[at]

    def group(turn, part, warp):
        return (turn * PARTS + part) * WARPS + warp

    def line(row, kernel_row):
        """Find a row of gradients, among those of the kind that a kernel row's sums are of."""
        return row * KINDS + kernel_row % KINDS

    def row_of(row, kernel_row):
        """Find the row of inputs that such a one meets."""
        return line(row, kernel_row) * SH + kernel_row // KINDS * DH

    def term(shared, part, channel, one, kernel_row, kernel_column, *others) -> tirx.Expr:
        """Find a warp's sum, or zero, where inputs are a neighbour's."""
        warp, kind, column = others
        i = sizes.shift(channel, kind * SH + kernel_row * DH) + column * SW + kernel_column * DW
        is_own = tirx.all(0 <= i, i < INPUTS * STEPS)
        i = T.Select(is_own, i, 0)
        row = (part, channel * M + one, warp, kernel_row * KINDS + kind)
        at = (*row, column % BESIDE, i // INPUTS, i % INPUTS, column // BESIDE)
        return T.Select(is_own, shared[at], T.float32(0))

    def diagonal(shared, *place):
        """Sum up one of all warps in one expression: all terms are loaded first."""
        of_warp = list(product(range(KINDS), range(sizes.columns)))
        return sum(sum(term(shared, *place, warp, *at) for at in of_warp) for warp in range(WARPS))

    def held(acc, *place):
        *first, beside, step, i, column = place
        at = (*first, beside * STEPS + step, i // 2 * 4 + column // 2, i % 2, column % 2)
        return acc[at]

    def rounded(partial, *place):
        only = (0, *place)
        return T.cast(partial[only], dtype)

    @script.prim_func(s_tir=True)
    def diagonal_nchw() -> None:
        data, grad_out, _, out = T.meta_var(declared(shape))
        loaded = made(dtype, C, GROUPS, IH, STEPS, 32, 2, 2, 2)
        window = made(dtype, C, GROUPS, IH, STEPS, 32, 2, 2, 2)
        grad_pairs = made(dtype, RC, GROUPS, R, 32, 2, 2, BESIDE)
        grads = made(dtype, RC, GROUPS, R, BESIDE, 32, 2, 2)
        acc = made("float32", PARTS, RC, WARPS, KH * KINDS, LINES, 32, 2, 2)
        shared = made("float32", PARTS, RC, WARPS, KH * KINDS, BESIDE, STEPS, INPUTS, COLUMNS)
        partial = made("float32", PARTS, C, M, KH, KW)
        by_places("pad", LOADED, hold, loaded, data)
        fill("pairs", "c g ih s lane k i e", window, swapped, loaded)
        fill("grad_pairs", "c g oh lane k e i", grad_pairs, gradients, grad_out)
        fill("grads", "c g oh o lane k e", grads, parted, grad_pairs)
        for p, c, w, kh, s, t, oh, lane, h, e, k in T.grid(
            PARTS, RC, WARPS, KH * KINDS, LINES, TURNS, R // KINDS, 32, 2, 2, TILES
        ):
            with T.sblock("products"):
                vp, vc, vw, vkh, vs, vt, voh, vl, vh, ve, vk = T.axis.remap(
                    "SSSSSRRSSSR", [p, c, w, kh, s, t, oh, lane, h, e, k]
                )
                with T.init():
                    acc[vp, vc, vw, vkh, vs, vl, vh, ve] = T.float32(0)
                acc[vp, vc, vw, vkh, vs, vl, vh, ve] += blocks.product(
                    window[left(vc // M, group(vt, vp, vw), row_of(voh, vkh), vs % STEPS, vl, vh, vk)],
                    grads[right(vc, group(vt, vp, vw), line(voh, vkh), vs // STEPS, vl, ve, vk)],
                )
        fill("leave", "p c w kh o s i j", shared, held, acc)
        for p, c, m, kh, kw in T.grid(PARTS, C, M, KH, KW):
            with T.sblock("diagonals"):
                vp, vc, vm, vkh, vkw = T.axis.remap("SSSSS", [p, c, m, kh, kw])
                kinds = T.meta_var(slice(vkh * KINDS, vkh * KINDS + KINDS))
                # All, for lanes to leave what they hold.
                T.reads(shared[vp, vc * M + vm, 0:WARPS, kinds, 0:BESIDE, 0:STEPS, 0:INPUTS, 0:COLUMNS])
                T.writes(partial[vp, vc, vm, vkh, vkw])
                partial[vp, vc, vm, vkh, vkw] = diagonal(shared, vp, vc, vm, vkh, vkw)
        if PARTS > 1:
            total = made("float32", C, M, KH, KW)
            for p, c, m, kh, kw in T.grid(PARTS, C, M, KH, KW):
                with T.sblock("depthwise_conv2d"):
                    vp, vc, vm, vkh, vkw = T.axis.remap("RSSSS", [p, c, m, kh, kw])
                    with T.init():
                        total[vc, vm, vkh, vkw] = T.float32(0)
                    total[vc, vm, vkh, vkw] += partial[vp, vc, vm, vkh, vkw]
            blocks.round_sums(out, total)
        else:
            fill("epilogue", "c m kh kw", out, rounded, partial)

    return diagonal_nchw
