"""The forward convolution of images, each by several threads.

Each has a band of the result's rows and goes down the rows of the image that they see, or up:
a band at the bottom is one at the top upside down, and both have the same code. As in `whole`
taps in the padding are not there. Bands of other rows have code of their own.

The blocks are those of `whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from ..arguments import ALIGNMENT
from ..epilogue import Epilogue
from ..images import Course, Images, courses
from . import script
from .forward import epilogue_parts
from .whole import UNROLLED, Part, copy

__all__ = ["nchw", "nhwc"]


class _Band(NamedTuple):
    """Where a thread is: the first rows of the image, its result and the kernel; 1 or -1."""

    source: Any
    result: Any
    tap: Any
    step: Any


def nchw(images: Images, epilogue: Epilogue, bands: int, turns: int) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient, of planes."""
    shape = images.shape
    (image_name, source), (_, weights) = shape.input_shapes.items()
    N, C = source[:2]
    X, Y, Z, (RH, RW), SW = images.channels, images.images, bands, images.result, images.source[1]
    READ, WRITTEN, TAPS = prod(images.source), prod(images.result), prod(shape.kernel)
    FROM, TO, APART = images.stride(READ), images.stride(WRITTEN), images.taps
    TOGETHER = gcd(4, X * TAPS, C * TAPS) if APART == TAPS else 1
    dtype = shape.dtype
    declare, finish = epilogue_parts(shape, epilogue)
    ways = courses(images, bands)
    ROWS = max(way.results for way in ways)
    D, sizes_in = turns, (READ, FROM, images.lanes(READ))
    AHEAD = -(-X * READ // (sizes_in[2] * X * Z)) * sizes_in[2]
    lanes_in, lanes_out = (gcd(images.lanes_of_row, width) for width in (SW, RW))

    def loading(planes: tirx.Buffer, window: tirx.Buffer, y: Any, x: Any) -> Callable[..., None]:
        def load(row: int, place: Any) -> None:
            with T.serial(SW // lanes_in, annotations=UNROLLED) as w, T.vectorized(lanes_in) as l:
                value = planes[y, x * FROM + place * SW + w * lanes_in + l]
                index = [row * SW + w * lanes_in + l]
                T.buffer_store(window, T.cast(value, "float32"), index)

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
                            _fetch(some, whole, held, sizes_in, (X * Z, vz * X + vx))
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
                                _put(some, held, Part(planes, vy, 0), sizes_in, threads)
                        for z, y, x in T.grid(Z, Y, X):
                            with T.sblock("ahead"):
                                vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                                n = T.meta_var((vb * D + vd + 1) * Y + vy)
                                if vd + 1 < D and n < N:
                                    whole = T.meta_var(Part(data, n, 0, 0, vc * X * READ))
                                    held = T.meta_var(Part(ahead, vz, vy, vx, 0))
                                    _fetch(some, whole, held, sizes_in, (X * Z, vz * X + vx))
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
                                _branches(images, ways, vz, own, window, taps, weigh, load)
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
                                        _move(own, to, RW, lanes_out)
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


def nhwc(
    images: Images, epilogue: Epilogue, bands: int, turns: int, ahead: int
) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient, where channels lie side by side."""
    shape = images.shape
    (image_name, source), (_, weights) = shape.input_shapes.items()
    N, H, W, C = source
    (RH, RW), KW, TAPS = images.result, shape.kernel[1], prod(shape.kernel)
    dtype = shape.dtype
    declare, finish = epilogue_parts(shape, epilogue)
    ways = courses(images, bands)
    ROWS = max(way.results for way in ways)

    def loading(data: tirx.Buffer, window: tirx.Buffer, n: Any, c: Any) -> Callable[..., None]:
        def load(row: int, place: Any, turn: Any = 0) -> None:
            image = tirx.min(n * turns + turn, N - 1)
            with T.serial(W, annotations=UNROLLED) as w:
                T.buffer_store(window, T.cast(data[image, place, w, c], "float32"), [row * W + w])

        return load

    def weighing(weight: tirx.Buffer, c: Any) -> Callable[..., Any]:
        # A tap beyond the first row of the kernel, as its last rows are, is still one of its own.
        return lambda tap: T.cast(weight[tap // KW, tap % KW, c, 0], "float32")

    def storing(
        acc: tirx.Buffer, operands: Any, out: tirx.Buffer, n: Any, c: Any
    ) -> Callable[..., None]:
        def store(row: int, place: Any, turn: Any = 0) -> None:
            with T.If(n * turns + turn < N), T.Then():
                with T.serial(RW, annotations=UNROLLED) as w:
                    element = (n * turns + turn, place, w, c)
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
                parts = T.meta_var((Part(acc, 0), window, taps, weigh, load, store))
                _branches(images, ways, vz, *parts, turns=turns, ahead=ahead)

    return split_nhwc


def _fetch(
    channels: tuple[int, Any],
    whole: Part,
    held: Part,
    sizes: tuple[int, int, int],
    threads: tuple[int, Any],
) -> None:
    """Load a thread's share of what lies side by side into registers."""
    (most, count), (size, _, lanes), (all_threads, thread) = channels, sizes, threads
    for turn in range(-(-most * size // (lanes * all_threads))):
        place = (thread + turn * all_threads) * lanes
        with T.If(place < count * size), T.Then(), T.vectorized(lanes) as lane:
            T.buffer_store(held.buffer, whole[place + lane], held.at(turn * lanes + lane))


def _put(
    channels: tuple[int, Any],
    held: Part,
    shared: Part,
    sizes: tuple[int, int, int],
    threads: tuple[int, Any],
) -> None:
    """Put it to shared memory."""
    (most, count), (size, stride, lanes), (all_threads, thread) = channels, sizes, threads
    for turn in range(-(-most * size // (lanes * all_threads))):
        place = (thread + turn * all_threads) * lanes
        apart = place if stride == size else place // size * stride + place % size
        with T.If(place < count * size), T.Then(), T.vectorized(lanes) as lane:
            T.buffer_store(shared.buffer, held[turn * lanes + lane], shared.at(apart + lane))


def _move(source: Part, target: Part, count: int, lanes: int) -> None:
    """Move neighbouring elements in vectors."""
    with T.serial(count // lanes, annotations=UNROLLED) as place, T.vectorized(lanes) as lane:
        index = place * lanes + lane
        T.buffer_store(target.buffer, source[index], target.at(index))


def _branches(
    images: Images, ways: Sequence[Course], number: Any, *parts: Any, **turns: int
) -> None:
    """Write the code of all courses, of which a thread takes that of its band."""
    way, *rest = ways
    if not rest:
        _go(images, way, _place(way, number), *parts, **turns)
        return
    with T.If(_is_one_of([stretch.band for stretch in way.stretches], number)):
        with T.Then():
            _go(images, way, _place(way, number), *parts, **turns)
        with T.Else():
            _branches(images, rest, number, *parts, **turns)


def _go(
    images: Images,
    way: Course,
    band: _Band,
    acc: Part,
    window: tirx.Buffer,
    taps: tirx.Buffer,
    weight: Callable[[Any], Any],
    load: Callable[..., None],
    store: Callable[..., None] | None = None,
    turns: int = 1,
    ahead: int = 1,
) -> None:
    """Sum the products of a band, in one image after the other.

    Of several images all weights are loaded first, and rows `ahead` of those in use.
    """
    shape = images.shape
    used = sorted(
        kh * shape.kernel[1] + kw
        for kh in {kh for _, _, kh in way.products}
        for kw in range(shape.kernel[1])
        if images.meets(1, kw, 0, images.result[1])
    )

    def weigh(tap: int) -> None:
        kh, kw = divmod(tap, shape.kernel[1])
        index = (band.tap + kh * band.step) * shape.kernel[1] + kw
        if shape.operation != "forward":
            index = prod(shape.kernel) - 1 - index
        T.buffer_store(taps, weight(index), [tap])

    if turns == 1:
        _sum(images, way, band, acc, window, taps, load, store, set(used), weigh)
        return
    ahead = min(ahead, way.sources)
    for row in range(ahead):
        load(row, band.source + row * band.step, 0)
    for tap in used:
        weigh(tap)
    with T.serial(turns) as turn:

        def load_ahead(row: int, _place: Any) -> None:
            further, row = divmod(row + ahead, way.sources)
            last = turns - 1
            load(row, band.source + row * band.step, tirx.min(turn + further, last))

        def store_now(row: int, place: Any) -> None:
            store(row, place, turn)

        _sum(images, way, band, acc, window, taps, load_ahead, store_now)


def _sum(
    images: Images,
    way: Course,
    band: _Band,
    acc: Part,
    window: tirx.Buffer,
    taps: tirx.Buffer,
    load: Callable[[int, Any], None],
    store: Callable[[int, Any], None] | None = None,
    awaited: set[int] = frozenset(),
    weigh: Callable[[int], None] | None = None,
) -> None:
    """Sum the products of a band, row after row of the image that is read.

    Weights that are awaited are loaded when they are first used, and then held. Rows of the
    result that are ready go to `store`.
    """
    shape, columns, width = images.shape, images.source[1], images.result[1]
    kernel_w = shape.kernel[1]
    awaited = set(awaited)
    is_ahead = weigh is None
    with T.serial(way.results * width, annotations=UNROLLED) as place:
        T.buffer_store(acc.buffer, T.float32(0), acc.at(place))
    left = {h: sum(other == h for _, other, _ in way.products) for h in range(way.results)}
    for h in range(way.results):
        if store and not left[h]:
            store(h, band.result + h * band.step)
    for row in range(way.sources):
        if not is_ahead:
            load(row, band.source + row * band.step)
        for _, h, kh in sorted(product for product in way.products if product[0] == row):
            for kw in range(kernel_w):
                cols, tap = images.meets(1, kw, 0, width), kh * kernel_w + kw
                if not cols:
                    continue
                if tap in awaited:
                    awaited.remove(tap)
                    weigh(tap)
                at = row * columns + kw * shape.dilation[1] - images.before(1)
                with T.serial(cols.start, cols.stop, annotations=UNROLLED) as w:
                    place = acc.at(h * width + w)
                    value = window[w * shape.stride[1] + at]
                    T.buffer_store(acc.buffer, acc.buffer[place] + value * taps[tap], place)
            left[h] -= 1
            if store and not left[h]:
                store(h, band.result + h * band.step)
        if is_ahead:
            load(row, band.source + row * band.step)


def _find(ways: Sequence[Course], number: Any) -> _Band:
    """Find where a band is, whatever its course."""
    return _chosen([stretch for way in ways for stretch in way.stretches], number)


def _place(way: Course, number: Any) -> _Band:
    return _chosen(way.stretches, number)


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
