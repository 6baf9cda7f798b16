"""The gradient of the weight as products of matrices; see `dwtir.diagonals`.

The blocks are these:

``pad``
    the inputs of 16 tiles, with their zeros, in the pairs in which they are loaded;
``pairs``
    the same in pairs of tiles, as the lanes of a warp multiply them;
``grads``
    the output's gradients, likewise;
``products``
    of a row of inputs and one of gradients, one instruction of a warp;
``leave``
    the sums of a warp, for the other threads of its block;
``diagonals``
    the taps, each from some diagonals of all warps of a block;
``depthwise_conv2d``
    the sum over all blocks;
``epilogue``
    the one rounding.

What a lane holds follows ``mma.sync.m16n8k16``, as in `compute.banded`, but the depth are tiles:
lane ``4 * m + x`` has inputs ``2 * m`` and ``2 * m + 1`` of tiles ``x``, ``x + 4`` and so on, and
the gradients of column ``m`` of the same tiles.
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..bands import COLUMNS, TILES
from ..diagonals import INPUTS, Diagonals
from . import blocks, script
from .forward import declared
from .mma import left, right
from .parts import by_places, fill, swapped
from .unaligned import pair_of_row


def nchw(sizes: Diagonals) -> tirx.PrimFunc:
    """Define the gradient on NCHW images."""
    shape = sizes.shape
    N, M, H, W = shape.batch, shape.channel_multiplier, shape.height, shape.width
    C, RC, OH, OW = shape.in_channels, shape.out_channels, shape.out_height, shape.out_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, shape.dilation
    TOP, LEFT, *_ = shape.padding
    R, IH, STEPS, KINDS, ALTERNATES = sizes.rows, sizes.window_rows, sizes.spans, sizes.kinds, sizes.alternates
    PARTS, WARPS, TURNS = sizes.parts, sizes.warps, sizes.turns
    GROUPS = PARTS * WARPS * TURNS
    LOADED = dict(zip("cgrslhei", (C, GROUPS, IH, STEPS, 32, 2, 2, 2 - ALTERNATES), strict=True))
    dtype = shape.dtype

    def tile(group, lane, half, one) -> tuple[Any, Any, Any]:
        return sizes.place(group * TILES + half * 8 + one * 4 + lane % 4)

    def first_of(x, step, lane) -> Any:
        return x * (COLUMNS * SW) + step * INPUTS + lane // 4 * 2

    def inputs(data: tirx.Buffer, channel, group, row, step, lane, *others) -> Any:
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

    def alternating(data: tirx.Buffer, channel, group, row, step, lane, *others) -> Any:
        n, y, x = tile(group, lane, *others)
        first = first_of(x, step, lane)
        columns = first, first - LEFT - sizes.shift(channel, row)
        return pair_of_row(data, (n, channel), (y * (R * SH), row), columns, (TOP, LEFT))

    def hold(loaded: tirx.Buffer, data: tirx.Buffer, *place) -> None:
        *others, one = place
        value, at = (alternating(data, *others), T.Ramp(one * 2, 1, 2)) if ALTERNATES else (inputs(data, *place), one)
        T.buffer_store(loaded, value, [*others, at])

    def gradients(grad: tirx.Buffer, channel, group, row, *place) -> Any:
        n, y, x = tile(group, *place)
        row, column = y * R + row, x * COLUMNS + place[0] // 4
        return T.if_then_else(tirx.all(n < N, row < OH, column < OW), grad[n, channel, row, column], T.cast(0, dtype))

    def group(turn, part, warp) -> Any:
        return (turn * PARTS + part) * WARPS + warp

    def line(row, kernel_row) -> Any:
        """Find a row of gradients, among those of the kind that a kernel row's sums are of."""
        return row * KINDS + kernel_row % KINDS

    def held(*others) -> tuple[Any, ...]:
        """Find a sum on a diagonal: its product, lane, and place there."""
        *first, kernel_row, kernel_column, kind, column = others
        shift = sizes.shift(first[1] // M, kind * SH + kernel_row * DH)
        i = shift + column * SW + kernel_column * DW
        place = (i // INPUTS, i % INPUTS // 2 * 4 + column // 2, i % 2, column % 2)
        return (*first, kernel_row * KINDS + kind, *place)

    def read(acc: tirx.Buffer, *place) -> Any:
        return acc[place]

    def rounded(partial: tirx.Buffer, *place) -> Any:
        only = (0, *place)
        return T.cast(partial[only], dtype)

    @script.prim_func(s_tir=True)
    def diagonal_nchw() -> None:
        data, grad_out, _, out = T.meta_var(declared(shape))
        loaded = T.sblock_alloc_buffer((C, GROUPS, IH, STEPS, 32, 2, 2, 2), dtype)
        window = T.sblock_alloc_buffer((C, GROUPS, IH, STEPS, 32, 2, 2, 2), dtype)
        grads = T.sblock_alloc_buffer((RC, GROUPS, R, 32, 2, 2), dtype)
        acc = T.sblock_alloc_buffer((PARTS, RC, WARPS, KH * KINDS, STEPS, 32, 2, 2), "float32")
        shared = T.sblock_alloc_buffer((PARTS, RC, WARPS, KH * KINDS, STEPS, 32, 2, 2), "float32")
        partial = T.sblock_alloc_buffer((PARTS, C, M, KH, KW), "float32")
        total = T.sblock_alloc_buffer((C, M, KH, KW), "float32")
        by_places("pad", LOADED, hold, loaded, data)
        fill("pairs", "c g ih s lane k i e", window, swapped, loaded)
        fill("grads", "c g oh lane k e", grads, gradients, grad_out)
        for p, c, w, kh, s, t, oh, lane, h, e, k in T.grid(
            PARTS, RC, WARPS, KH * KINDS, STEPS, TURNS, R // KINDS, 32, 2, 2, TILES
        ):
            with T.sblock("products"):
                vp, vc, vw, vkh, vs, vt, voh, vl, vh, ve, vk = T.axis.remap(
                    "SSSSSRRSSSR", [p, c, w, kh, s, t, oh, lane, h, e, k]
                )
                with T.init():
                    acc[vp, vc, vw, vkh, vs, vl, vh, ve] = T.float32(0)
                acc[vp, vc, vw, vkh, vs, vl, vh, ve] += blocks.product(
                    window[left(vc // M, group(vt, vp, vw), line(voh, vkh) * SH + vkh // KINDS * DH, vs, vl, vh, vk)],
                    grads[right(vc, group(vt, vp, vw), line(voh, vkh), vl, ve, vk)],
                )
        fill("leave", "p c w kh s lane h e", shared, read, acc)
        for p, c, m, kh, kw, w, kind, j in T.grid(PARTS, C, M, KH, KW, WARPS, KINDS, COLUMNS):
            with T.sblock("diagonals"):
                vp, vc, vm, vkh, vkw, vw, vi, vj = T.axis.remap("SSSSSRRR", [p, c, m, kh, kw, w, kind, j])
                T.reads(shared[vp, vc * M + vm, 0:WARPS, vkh * KINDS : vkh * KINDS + KINDS, 0:STEPS, 0:32, 0:2, 0:2])
                T.writes(partial[vp, vc, vm, vkh, vkw])
                with T.init():
                    partial[vp, vc, vm, vkh, vkw] = T.float32(0)
                partial[vp, vc, vm, vkh, vkw] += shared[held(vp, vc * M + vm, vw, vkh, vkw, vi, vj)]
        if PARTS > 1:
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
