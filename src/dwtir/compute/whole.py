"""The forward convolution of small images, each by one thread.

A thread has all of an image in registers. What lies under a tap is known when this is written down, so that taps in the
padding are not there: of 7x7 on 7x7 inputs 28 of 49 are left.

The blocks are those of `dwtir.compute`. In NCHW, where images lie apart, a block's come and go through shared memory,
by ``gather`` and ``store``; so do weights, by ``filters``. Where a thread has several images, one after the other,
``gather`` loads the first one into registers, and ``planes`` writes that to shared memory and loads the next.
"""

from collections.abc import Callable
from itertools import product
from math import gcd, prod
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..epilogue import Epilogue
from ..images import Images
from . import script
from .forward import both_ends
from .parts import Part, Row, by_places, clear, copy, local, move, share, static, unrolled, when


def nchw(images: Images, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient, of planes."""
    shape = images.shape
    (N, C, *_), _ = shape.input_shapes.values()
    X, Y, D = images.channels, images.images, images.turns
    READ, WRITTEN, TAPS = prod(images.source), prod(images.result), prod(shape.kernel)
    FROM, TO, APART = images.stride(READ), images.stride(WRITTEN), images.taps
    TOGETHER = gcd(4, X * TAPS, C * TAPS) if APART == TAPS else 1
    IN, OUT = (READ, FROM, images.lanes(READ)), (WRITTEN, TO, images.lanes(WRITTEN))
    AHEAD = -(-READ // images.lanes(READ)) * images.lanes(READ)
    dtype = shape.dtype
    declare, finish = both_ends(shape, epilogue)
    adds = "residual" in epilogue.steps  # which comes by way of what the results then lie in
    IMAGES = {"y": Y, "x": X}

    def plane(tensor, n, c, pixels: int):
        return Part(tensor, n, 0, 0, c * X * pixels)

    @script.inline
    def gather(data, ahead, planes, some, b, c, y, x):
        n = T.meta_var(b * (Y * D) + y)
        if n < N:
            if D == 1:
                copy(some, plane(data, n, c, READ), Part(planes, y, 0), IN, (X, x))
            else:
                _fetch(some, plane(data, n, c, READ), Part(ahead, y, x, 0), IN, (X, x))

    def take(weight, filters, some, c, y, x):
        copy(some, plane(weight, 0, c, TAPS), Part(filters, 0), (TAPS, APART, TOGETHER), (X * Y, y * X + x))

    @script.inline
    def put(data, ahead, planes, some, b, c, d, y, x):
        T.reads()
        T.writes(planes[y, :])
        if D == 1:
            T.evaluate(0)
        else:
            own = T.meta_var(Part(ahead, y, x, 0))
            _put(some, own, Part(planes, y, 0), IN, (X, x))
            n = T.meta_var((b * D + d + 1) * Y + y)
            if d + 1 < D and n < N:
                _fetch(some, plane(data, n, c, READ), own, IN, (X, x))

    @script.inline
    def multiply(planes, filters, acc, operands, results, some, b, c, d, y, x):
        T.reads(planes[y, :], filters[:])
        T.writes(acc[y, x, :])
        raw = local(dtype, READ)
        window = local("float32", READ)
        taps = local("float32", TAPS)
        move(Part(planes, y, x * FROM), Part(raw, 0), READ, images.vector(READ))
        for place in unrolled(READ):
            window[place] = T.cast(raw[place], "float32")
        own = T.meta_var(Part(filters, x * APART))
        _sum(images, Part(acc, y, x, 0), window, taps, own.__getitem__)
        n = T.meta_var((b * D + d) * Y + y)
        if adds and n < N:
            copy(some, plane(operands["residual"], n, c, WRITTEN), Part(results, y, 0), OUT, (X, x))

    @script.inline
    def end(acc, operands, results, c, y, x):
        T.reads(acc[y, x, :])
        T.writes(results[y, x * TO : x * TO + WRITTEN])
        result = local(dtype, WRITTEN)
        held = T.meta_var(operands | {"residual": Row(results, y)})
        channel = T.meta_var(T.min(c * X + x, C - 1))
        for place in unrolled(WRITTEN):
            element = T.meta_var((x * TO + place,))
            result[place] = finish(acc[y, x, place], held, channel, element)
        move(Part(result, 0), Part(results, y, x * TO), WRITTEN, images.vector(WRITTEN))

    @script.inline
    def store(results, out, some, b, c, d, y, x):
        n = T.meta_var((b * D + d) * Y + y)
        if n < N:
            copy(some, plane(out, n, c, WRITTEN), Part(results, y, 0), OUT, (X, x), is_load=False)

    @script.prim_func(s_tir=True)
    def whole_nchw() -> None:
        data, weight, operands, out = T.meta_var(declare())
        for b, c in T.grid(-(-N // (Y * D)), -(-C // X)):
            with T.sblock("images"):
                vb, vc = T.axis.remap("SS", [b, c])
                T.reads()
                written = T.meta_var(out[vb * (Y * D) : vb * (Y * D) + Y * D, vc * X : vc * X + X, :, :])
                T.writes(written)
                ahead = local(dtype, Y, X, AHEAD)
                planes = static(dtype, Y, X * FROM)
                filters = static("float32", X * APART)
                results = static(dtype, Y, X * TO)
                acc = local("float32", Y, X, WRITTEN)
                some = T.meta_var((X, X if C % X == 0 else T.min(X, C - vc * X)))
                by_places("gather", IMAGES, gather, data, ahead, planes, some, vb, vc)
                by_places("filters", IMAGES, take, weight, filters, some, vc)
                for d in T.serial(D):
                    with T.sblock("turn"):
                        vd = T.axis.spatial(D, d)
                        T.reads()
                        T.writes(written)
                        by_places("planes", IMAGES, put, data, ahead, planes, some, vb, vc, vd)
                        sums = T.meta_var((planes, filters, acc))
                        by_places("depthwise_conv2d", IMAGES, multiply, *sums, operands, results, some, vb, vc, vd)
                        by_places("epilogue", IMAGES, end, acc, operands, results, vc)
                        by_places("store", IMAGES, store, results, out, some, vb, vc, vd)

    return whole_nchw


def nhwc(images: Images, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the operation where channels lie side by side, by one thread an image."""
    shape, turns = images.shape, images.turns
    (N, H, W, C), _ = shape.input_shapes.values()
    (RH, RW), KW = images.result, shape.kernel[1]
    declare, finish = both_ends(shape, epilogue)

    def loading(data, window, n, c):
        def load(row: int, turn=0):
            image = tirx.min(n * turns + turn, N - 1)
            with unrolled(W) as w:
                T.buffer_store(window, T.cast(data[image, row, w, c], "float32"), [row * W + w])

        return load

    def weighing(weight, c):
        return lambda tap: T.cast(weight[tap // KW, tap % KW, c, 0], "float32")

    def storing(acc, operands, out, n, c):
        def store(row: int, turn=0):
            image = n * turns + turn
            with when(image < N), unrolled(RW) as w:
                place = (image, row, w, c)
                T.buffer_store(out, finish(acc[row * RW + w], operands, c, place), place)

        return store

    @script.prim_func(s_tir=True)
    def whole_nhwc() -> None:
        data, weight, operands, out = T.meta_var(declare())
        for n, c in T.grid(-(-N // turns), C):
            with T.sblock("depthwise_conv2d"):
                vn, vc = T.axis.remap("SS", [n, c])
                T.reads()
                T.writes(out[vn * turns : vn * turns + turns, :, :, vc])
                window = local("float32", H * W)
                taps = local("float32", prod(shape.kernel))
                acc = local("float32", RH * RW)
                load = T.meta_var(loading(data, window, vn, vc))
                store = T.meta_var(storing(acc, operands, out, vn, vc))
                go = T.meta_var(_sum if turns == 1 else _sum_in_turn)
                go(images, Part(acc, 0), window, taps, weighing(weight, vc), load=load, store=store)

    return whole_nhwc


# These write statements while a script is parsed, with numbers in place of loops over taps.


def _sum(
    images: Images,
    acc: Part,
    window,
    taps,
    weight: Callable[[int], Any],
    load: Callable[[int], None] | None = None,
    store: Callable[[int], None] | None = None,
) -> None:
    """Sum the products of all taps, for a few rows at a time.

    Weights, and rows of the image where ``load`` is given, are loaded when they are first
    used, and then held. Rows that are ready go to ``store``.
    """
    shape, (height, width), columns = images.shape, images.result, images.source[1]
    (down, right), (below, beside) = shape.stride, shape.dilation
    rows_held, taps_held = set[int](), set[int]()
    for first in range(0, height, images.rows):
        until = min(first + images.rows, height)
        clear(acc, first * width, until * width)
        for tap in range(prod(shape.kernel)):
            kh, kw = divmod(tap, shape.kernel[1])
            rows, cols = images.meets(0, kh, first, until), images.meets(1, kw, 0, width)
            if not (rows and cols):
                continue
            above = kh * below - images.shape.before[0]
            for row in (h * down + above for h in rows):
                if load and row not in rows_held:
                    rows_held.add(row)
                    load(row)
            if tap not in taps_held:
                taps_held.add(tap)
                T.buffer_store(taps, weight(images.turned(tap)), [tap])
            at = above * columns + kw * beside - images.shape.before[1]
            with unrolled(rows.start, rows.stop) as h, T.serial(cols.start, cols.stop) as w:
                value = window[h * (down * columns) + w * right + at]
                acc.add(h * width + w, value * taps[tap])
        if store:
            for row in range(first, until):
                store(row)


def _sum_in_turn(
    images: Images,
    acc: Part,
    window,
    taps,
    weight: Callable[[int], Any],
    load: Callable[[int, Any], None],
    store: Callable[[int, Any], None],
) -> None:
    """Sum the products of one image after the other, row after row of the image that is read.

    All weights are held. A row is loaded `Images.ahead` rows before it is used, those of the
    next image too. Rows of the result go to ``store`` as soon as they are ready.
    """
    shape, (height, width), rows = images.shape, images.result, images.source[0]
    stride, below = shape.stride[0], shape.dilation[0]
    met = [
        (h * stride + kh * below - images.shape.before[0], h, kh)
        for kh in range(shape.kernel[0])
        for h in images.meets(0, kh, 0, height)
    ]
    used = [kw for kw in range(shape.kernel[1]) if images.meets(1, kw, 0, width)]
    last = {h: max((row for row, other, _ in met if other == h), default=0) for h in range(height)}
    for row in range(images.ahead):
        load(row, 0)
    for kh, kw in product(sorted({kh for _, _, kh in met}), used):
        tap = kh * shape.kernel[1] + kw
        T.buffer_store(taps, weight(images.turned(tap)), [tap])
    with T.serial(images.turns) as turn:
        clear(acc, 0, height * width)
        for row in range(rows):
            for (_, h, kh), kw in product(sorted(m for m in met if m[0] == row), used):
                _multiply(images, acc, window, (row, h, kw), taps[kh * shape.kernel[1] + kw])
            for h in range(height):
                if last[h] == row:
                    store(h, turn)
            further, coming = divmod(row + images.ahead, rows)
            load(coming, tirx.min(turn + further, images.turns - 1))


def _multiply(images: Images, acc: Part, window, place: tuple[int, int, int], tap: Any) -> None:
    row, h, kw = place
    shape, width = images.shape, images.result[1]
    cols = images.meets(1, kw, 0, width)
    at = row * images.source[1] + kw * shape.dilation[1] - images.shape.before[1]
    with unrolled(cols.start, cols.stop) as w:
        acc.add(h * width + w, window[w * shape.stride[1] + at] * tap)


def _fetch(channels: Any, whole: Part, held: Part, sizes: Any, threads: Any) -> None:
    for place, _, own in share(channels, sizes, threads):
        held.store(own, whole[place])


def _put(channels: Any, held: Part, shared: Part, sizes: Any, threads: Any) -> None:
    for _, apart, own in share(channels, sizes, threads):
        shared.store(apart, held[own])
