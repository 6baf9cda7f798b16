"""The forward convolution of images, each by several threads.

Each has a band of the result's rows and goes down the rows of the image that they see, or up:
a band at the bottom is one at the top upside down, and both have the same code. As in `whole`
taps in the padding are not there. Bands of other rows have code of their own.

The blocks are those of `whole`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import gcd, prod
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from ..arguments import ALIGNMENT
from ..epilogue import Epilogue
from ..images import Course, Images, courses
from . import script
from .forward import epilogue_parts
from .whole import UNROLLED, Part, copy, move, share

__all__ = ["nchw", "nhwc"]


class _Band(NamedTuple):
    """Where a thread is: the first rows of the image, its result and the kernel; 1 or -1."""

    source: Any
    result: Any
    tap: Any
    step: Any


def nchw(images: Images, epilogue: Epilogue, bands: int, turns: int, form: str) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient, of planes."""
    shape = images.shape
    (image_name, source), (_, weights) = shape.input_shapes.items()
    N, C = source[:2]
    X, Y, Z, RW, SW = images.channels, images.images, bands, images.result[1], images.source[1]
    READ, WRITTEN, TAPS = prod(images.source), prod(images.result), prod(shape.kernel)
    FROM, TO, APART = images.stride(READ), images.stride(WRITTEN), images.taps
    TOGETHER = gcd(4, X * TAPS, C * TAPS) if APART == TAPS else 1
    dtype = shape.dtype
    declare, finish = epilogue_parts(shape, epilogue)
    ways = courses(images, bands, form == "written")
    ROWS = max(way.results for way in ways)
    D, sizes_in = turns, (READ, FROM, images.lanes(READ))
    AHEAD = -(-X * READ // (sizes_in[2] * X * Z)) * sizes_in[2]
    lanes_in, lanes_out = (gcd(images.lanes_of_row, width) for width in (SW, RW))

    write = _straight if form == "written" else _looped

    def fetch(some: Any, whole: Part, held: Part, threads: Any) -> None:
        for place, _, own in share(some, sizes_in, threads):
            T.buffer_store(held.buffer, whole[place], held.at(own))

    def put(some: Any, held: Part, shared: Part, threads: Any) -> None:
        for _, apart, own in share(some, sizes_in, threads):
            T.buffer_store(shared.buffer, held[own], shared.at(apart))

    def loading(planes: tirx.Buffer, window: tirx.Buffer, y: Any, x: Any) -> Callable[..., None]:
        def load(row: int, place: Any) -> None:
            with T.serial(SW // lanes_in, annotations=UNROLLED) as w, T.vectorized(lanes_in) as v:
                index = w * lanes_in + v
                value = T.cast(planes[y, x * FROM + place * SW + index], "float32")
                T.buffer_store(window, value, [row * SW + index])

        return load

    def weighing(filters: tirx.Buffer, x: Any) -> Callable[..., Any]:
        return lambda tap: filters[x * APART + tap]

    @script.prim_func(s_tir=True)
    def split_nchw() -> None:
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        data = T.arg(image_name, T.buffer(source, dtype, align=ALIGNMENT))
        weight = T.arg("weight", T.buffer(weights, dtype, align=ALIGNMENT))
        operands = T.meta_var(declare())
        out = T.arg("out", T.buffer(shape.result_shape, dtype, align=ALIGNMENT))
        for b, c in T.grid(-(-N // (Y * D)), -(-C // X)):
            with T.sblock("images"):
                vb, vc = T.axis.remap("SS", [b, c])
                T.reads()
                T.writes(out[vb * Y * D : vb * Y * D + Y * D, vc * X : vc * X + X, :, :])
                filters = T.sblock_alloc_buffer((X * APART,), "float32", scope="shared")
                ahead = T.sblock_alloc_buffer((Z, Y, X, AHEAD), dtype, scope="local")
                some = T.meta_var((X, X if C % X == 0 else T.min(X, C - vc * X)))
                for z, y, x in T.grid(Z, Y, X):
                    with T.sblock("filters"):
                        vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                        whole = T.meta_var(Part(weight, 0, 0, 0, vc * X * TAPS))
                        sizes = T.meta_var((TAPS, APART, TOGETHER))
                        thread = T.meta_var((vz * Y + vy) * X + vx)
                        copy(some, whole, Part(filters, 0), sizes, (X * Y * Z, thread))
                for z, y, x in T.grid(Z, Y, X):
                    with T.sblock("first"):
                        vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                        if vb * Y * D + vy < N:
                            whole = T.meta_var(Part(data, vb * Y * D + vy, 0, 0, vc * X * READ))
                            held = T.meta_var(Part(ahead, vz, vy, vx, 0))
                            fetch(some, whole, held, (X * Z, vz * X + vx))
                for d in T.serial(D):
                    with T.sblock("image"):
                        vd = T.axis.spatial(D, d)
                        T.reads()
                        T.writes(out[vb * Y * D : vb * Y * D + Y * D, vc * X : vc * X + X, :, :])
                        planes = T.sblock_alloc_buffer((Y, X * FROM), dtype, scope="shared")
                        results = T.sblock_alloc_buffer((Y, X * TO), dtype, scope="shared")
                        acc = T.sblock_alloc_buffer((Z, Y, X, ROWS * RW), "float32", scope="local")
                        for z, y, x in T.grid(Z, Y, X):
                            with T.sblock("gather"):
                                vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                                T.reads(ahead[vz, vy, vx, :])
                                T.writes(planes[vy, :])
                                held = T.meta_var(Part(ahead, vz, vy, vx, 0))
                                threads = T.meta_var((X * Z, vz * X + vx))
                                put(some, held, Part(planes, vy, 0), threads)
                        for z, y, x in T.grid(Z, Y, X):
                            with T.sblock("ahead"):
                                vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                                n = T.meta_var((vb * D + vd + 1) * Y + vy)
                                if vd + 1 < D and n < N:
                                    whole = T.meta_var(Part(data, n, 0, 0, vc * X * READ))
                                    held = T.meta_var(Part(ahead, vz, vy, vx, 0))
                                    fetch(some, whole, held, (X * Z, vz * X + vx))
                        for z, y, x in T.grid(Z, Y, X):
                            with T.sblock("depthwise_conv2d"):
                                vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                                T.reads(planes[vy, :], filters[:])
                                T.writes(acc[vz, vy, vx, :])
                                window = T.sblock_alloc_buffer((READ,), "float32", scope="local")
                                taps = T.sblock_alloc_buffer((TAPS,), "float32", scope="local")
                                load = T.meta_var(loading(planes, window, vy, vx))
                                weigh = T.meta_var(weighing(filters, vx))
                                own = T.meta_var(Part(acc, vz, vy, vx, 0))
                                write(vz, images, ways, own, window, taps, weigh, load)
                        for z, y, x in T.grid(Z, Y, X):
                            with T.sblock("epilogue"):
                                vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                                T.reads(acc[vz, vy, vx, :])
                                T.writes(results[vy, vx * TO : vx * TO + WRITTEN])
                                band = T.meta_var(_find(ways, vz))
                                n = T.meta_var(T.min((vb * D + vd) * Y + vy, N - 1))
                                channel = T.meta_var(T.min(vc * X + vx, C - 1))
                                result = T.sblock_alloc_buffer((ROWS * RW,), dtype, scope="local")
                                for row in T.unroll(ROWS):
                                    if row < _rows(ways, vz):
                                        h = T.meta_var(band.result + row * band.step)
                                        for w in T.serial(RW, annotations=UNROLLED):
                                            result[row * RW + w] = finish(
                                                acc[vz, vy, vx, row * RW + w],
                                                operands,
                                                channel,
                                                (n, channel, h, w),
                                            )
                                        own = T.meta_var(Part(result, row * RW))
                                        to = T.meta_var(Part(results, vy, vx * TO + h * RW))
                                        move(own, to, RW, lanes_out)
                        for z, y, x in T.grid(Z, Y, X):
                            with T.sblock("store"):
                                vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                                n = T.meta_var((vb * D + vd) * Y + vy)
                                if n < N:
                                    whole = T.meta_var(Part(out, n, 0, 0, vc * X * WRITTEN))
                                    sizes = T.meta_var((WRITTEN, TO, images.lanes(WRITTEN)))
                                    own = T.meta_var(Part(results, vy, 0))
                                    threads = T.meta_var((X * Z, vz * X + vx))
                                    copy(some, whole, own, sizes, threads, is_load=False)

    return split_nchw


def nhwc(images: Images, epilogue: Epilogue, bands: int, turns: int, ahead: int) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient, where channels lie side by side."""
    shape = images.shape
    (image_name, source), (_, weights) = shape.input_shapes.items()
    N, H, W, C = source
    RW, KW, TAPS = images.result[1], shape.kernel[1], prod(shape.kernel)
    dtype = shape.dtype
    declare, finish = epilogue_parts(shape, epilogue)
    ways = courses(images, bands)
    ROWS = max(way.results for way in ways)
    go = _one if turns == 1 else partial(_several, turns=turns, ahead=ahead)

    def loading(data: tirx.Buffer, window: tirx.Buffer, n: Any, c: Any) -> Callable[..., None]:
        def load(row: int, place: Any, turn: Any = 0) -> None:
            image = tirx.min(n * turns + turn, N - 1)
            with T.serial(W, annotations=UNROLLED) as w:
                T.buffer_store(window, T.cast(data[image, place, w, c], "float32"), [row * W + w])

        return load

    def weighing(weight: tirx.Buffer, c: Any) -> Callable[..., Any]:
        return lambda tap: T.cast(weight[tap // KW, tap % KW, c, 0], "float32")

    def storing(
        acc: tirx.Buffer, operands: Any, out: tirx.Buffer, n: Any, c: Any
    ) -> Callable[..., None]:
        def store(row: int, place: Any, turn: Any = 0) -> None:
            image = n * turns + turn
            with T.If(image < N), T.Then(), T.serial(RW, annotations=UNROLLED) as w:
                element = (image, place, w, c)
                T.buffer_store(out, finish(acc[row * RW + w], operands, c, element), element)

        return store

    @script.prim_func(s_tir=True)
    def split_nhwc() -> None:
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        data = T.arg(image_name, T.buffer(source, dtype, align=ALIGNMENT))
        weight = T.arg("weight", T.buffer(weights, dtype, align=ALIGNMENT))
        operands = T.meta_var(declare())
        out = T.arg("out", T.buffer(shape.result_shape, dtype, align=ALIGNMENT))
        for n, c, band in T.grid(-(-N // turns), C, bands):
            with T.sblock("depthwise_conv2d"):
                vn, vc, vz = T.axis.remap("SSS", [n, c, band])
                T.reads()
                T.writes(out[vn * turns : vn * turns + turns, :, :, vc])
                window = T.sblock_alloc_buffer((H * W,), "float32", scope="local")
                taps = T.sblock_alloc_buffer((TAPS,), "float32", scope="local")
                acc = T.sblock_alloc_buffer((ROWS * RW,), "float32", scope="local")
                load = T.meta_var(loading(data, window, vn, vc))
                store = T.meta_var(storing(acc, operands, out, vn, vc))
                weigh = T.meta_var(weighing(weight, vc))
                write = T.meta_var(go(images, Part(acc, 0), window, taps, weigh, load, store))
                _branches(ways, vz, write)

    return split_nhwc


def _nothing(*_: Any) -> None:
    """Do nothing at a place where others do something."""


def _branches(ways: Sequence[Course], number: Any, write: Callable[[Course, _Band], None]) -> None:
    """Write the code of all courses, of which a thread takes that of its band."""
    way, *rest = ways
    if not rest:
        write(way, _chosen(way.stretches, number))
        return
    with T.If(_is_one_of([stretch.band for stretch in way.stretches], number)):
        with T.Then():
            write(way, _chosen(way.stretches, number))
        with T.Else():
            _branches(rest, number, write)


def _one(
    images: Images,
    acc: Part,
    window: tirx.Buffer,
    taps: tirx.Buffer,
    weight: Callable[[Any], Any],
    load: Callable[[int, Any], None],
    store: Callable[[int, Any], None] = _nothing,
) -> Callable[[Course, _Band], None]:
    """Sum a band of one image, with rows and weights loaded when they are first used."""

    def write(way: Course, band: _Band) -> None:
        held = set[int]()

        def weigh(tap: int) -> None:
            if tap not in held:
                held.add(tap)
                T.buffer_store(taps, weight(_turned(images, band, tap)), [tap])

        _sum(images, way, band, acc, window, taps, store, begin=load, weigh=weigh)

    return write


def _straight(number: Any, images: Images, ways: Sequence[Course], *parts: Any) -> None:
    _branches(ways, number, _one(images, *parts))


def _looped(
    number: Any,
    images: Images,
    ways: Sequence[Course],
    acc: Part,
    window: tirx.Buffer,
    taps: tirx.Buffer,
    weight: Callable[[Any], Any],
    load: Callable[[int, Any], None],
) -> None:
    """Sum a band with a loop over the rows of the image that it sees: one code for all bands."""
    shape, width = images.shape, images.result[1]
    kernel_h, kernel_w = shape.kernel
    stride, dilation = shape.stride[0], shape.dilation[0]
    band, count = _find(ways, number), _rows(ways, number)
    most = max(way.results for way in ways)
    top = band.result * stride - images.before(0)
    with T.serial(most * width, annotations=UNROLLED) as place:
        T.buffer_store(acc.buffer, T.float32(0), acc.at(place))
    with T.serial((most - 1) * stride + (kernel_h - 1) * dilation + 1) as row:
        source = top + row
        with T.If(tirx.all(0 <= source, source < images.source[0])), T.Then():
            load(0, source)
            for h in range(most):
                above = row - h * stride
                tests = [0 <= above] * (h > 0) + [above < kernel_h * dilation] * (h < most - 1)
                if dilation > 1:
                    tests.append(tirx.floormod(above, dilation) == 0)
                if min(way.results for way in ways) <= h:
                    tests.append(h < count)
                with T.If(tirx.all(*tests) if tests else tirx.const(True, "bool")), T.Then():
                    for kw in range(kernel_w):
                        cols = images.meets(1, kw, 0, width)
                        if not cols:
                            continue
                        index = tirx.floordiv(above, dilation) * kernel_w + kw
                        if shape.operation != "forward":
                            index = kernel_h * kernel_w - 1 - index
                        T.buffer_store(taps, weight(index), [kw])
                        at = kw * shape.dilation[1] - images.before(1)
                        with T.serial(cols.start, cols.stop, annotations=UNROLLED) as w:
                            place = acc.at(h * width + w)
                            value = window[w * shape.stride[1] + at]
                            T.buffer_store(acc.buffer, acc.buffer[place] + value * taps[kw], place)


def _several(
    images: Images,
    acc: Part,
    window: tirx.Buffer,
    taps: tirx.Buffer,
    weight: Callable[[Any], Any],
    load: Callable[[int, Any, Any], None],
    store: Callable[[int, Any, Any], None],
    turns: int,
    ahead: int,
) -> Callable[[Course, _Band], None]:
    """Sum a band of one image after the other, with all weights held and rows loaded ahead."""

    def write(way: Course, band: _Band) -> None:
        first = min(ahead, way.sources)
        for row in range(first):
            load(row, band.source + row * band.step, 0)
        kernel_h, kernel_w = images.shape.kernel
        for kh, kw in product(range(kernel_h), range(kernel_w)):
            used = any(kh == other for _, _, other in way.products)
            if used and images.meets(1, kw, 0, images.result[1]):
                tap = kh * kernel_w + kw
                T.buffer_store(taps, weight(_turned(images, band, tap)), [tap])
        with T.serial(turns) as turn:

            def load_ahead(row: int, _: Any) -> None:
                further, row = divmod(row + first, way.sources)
                image = tirx.min(turn + further, turns - 1)
                load(row, band.source + row * band.step, image)

            def store_now(row: int, place: Any) -> None:
                store(row, place, turn)

            _sum(images, way, band, acc, window, taps, store_now, end=load_ahead)

    return write


def _turned(images: Images, band: _Band, tap: int) -> Any:
    """Find the weight of a tap, where a band is upside down or the kernel turned round."""
    kernel_h, kernel_w = images.shape.kernel
    kh, kw = divmod(tap, kernel_w)
    index = (band.tap + kh * band.step) * kernel_w + kw
    return index if images.shape.operation == "forward" else kernel_h * kernel_w - 1 - index


def _sum(
    images: Images,
    way: Course,
    band: _Band,
    acc: Part,
    window: tirx.Buffer,
    taps: tirx.Buffer,
    store: Callable[[int, Any], None],
    begin: Callable[[int, Any], None] = _nothing,
    end: Callable[[int, Any], None] = _nothing,
    weigh: Callable[[int], None] = _nothing,
) -> None:
    """Sum the products of a band, row after row of the image that is read.

    What there is to do before and after a row, and before a weight is used, is called with
    its number. Rows of the result that are ready go to `store`.
    """
    shape, columns, width = images.shape, images.source[1], images.result[1]
    with T.serial(way.results * width, annotations=UNROLLED) as place:
        T.buffer_store(acc.buffer, T.float32(0), acc.at(place))
    left = Counter(h for _, h, _ in way.products)
    for h in range(way.results):
        if not left[h]:
            store(h, band.result + h * band.step)
    for row in range(way.sources):
        begin(row, band.source + row * band.step)
        for _, h, kh in sorted(met for met in way.products if met[0] == row):
            for kw in range(shape.kernel[1]):
                cols, tap = images.meets(1, kw, 0, width), kh * shape.kernel[1] + kw
                if not cols:
                    continue
                weigh(tap)
                at = row * columns + kw * shape.dilation[1] - images.before(1)
                with T.serial(cols.start, cols.stop, annotations=UNROLLED) as w:
                    place = acc.at(h * width + w)
                    value = window[w * shape.stride[1] + at]
                    T.buffer_store(acc.buffer, acc.buffer[place] + value * taps[tap], place)
            left[h] -= 1
            if not left[h]:
                store(h, band.result + h * band.step)
        end(row, band.source + row * band.step)


def _find(ways: Sequence[Course], number: Any) -> _Band:
    """Find where a band is, whatever its course."""
    return _chosen([stretch for way in ways for stretch in way.stretches], number)


def _rows(ways: Sequence[Course], number: Any) -> Any:
    """Count the rows of a band."""
    return _pick([(s.band, way.results) for way in ways for s in way.stretches], number)


def _chosen(stretches: Sequence[Any], number: Any) -> _Band:
    fields = ("source", "result", "tap", "step")
    return _Band(*(_pick([(s.band, getattr(s, f)) for s in stretches], number) for f in fields))


def _pick(values: Sequence[tuple[int, int]], number: Any) -> Any:
    """Look a band's value up."""
    (band, value), *rest = sorted(values)
    if all(other == value for _, other in rest):
        return value
    (second, other), *_ = rest
    slope, remainder = divmod(other - value, second - band)
    if len(values) > 2 and remainder == 0 and all(value + slope * (b - band) == v for b, v in rest):
        return value + slope * (number - band)
    of_value = [b for b, v in values if v == value]
    others = [(b, v) for b, v in values if v != value]
    return T.Select(_is_one_of(of_value, number), value, _pick(others, number))


def _is_one_of(bands: Sequence[int], number: Any) -> Any:
    first, *rest = bands
    condition = number == first
    for band in rest:
        condition = tirx.Or(condition, number == band)
    return condition
