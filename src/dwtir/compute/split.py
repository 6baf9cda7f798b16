"""The convolution of planes, or the data's gradient, each image by several threads.

Each thread has a band of the result's rows, or a part of these across, and goes down the rows of the image that
they see, by one code for all bands: a loop that asks which rows of the kernel a row meets, or, of few products, a
straight line. Rows in the padding are passed over. Taps in the padding beside a whole row are not there; parts see
zeros.

The blocks are those of `whole`.
"""

from collections.abc import Callable
from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from ..epilogue import Epilogue
from ..pieces import Pieces
from . import script
from .forward import both_ends
from .parts import Part, Row, all_hold, by_places, clear, copy, copy_pixels, local, move, static, unrolled, when
from .stretch import Stretch
from .unaligned import put_pairs, take_pairs


class _Side(NamedTuple):
    size: tuple[int, int]
    elements: int
    """Of a plane, that a block has at most."""
    stride: int
    """Elements from a plane to the next in shared memory."""
    lanes: int


class _Place(NamedTuple):
    """What a thread works at: image, piece, channels of its block, and its own of these."""

    image: Any
    piece: Any
    chunk: Any
    x: Any


def bands_of(pieces: Pieces, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the operation by threads of bands and parts, in blocks that have a piece of an image or whole ones."""
    images, shape = pieces.images, pieces.shape
    N, C, is_planar = shape.batch, shape.in_channels, shape.layout == "NCHW"
    X, Y, Z, P, RW, SW = images.channels, images.images, pieces.bands, pieces.pieces, images.result[1], images.source[1]
    Q, READ, WRITTEN, TAPS = pieces.parts, pieces.read, pieces.written, prod(shape.kernel)
    FROM, TO, APART, ROWS, COLS = pieces.stride(READ), pieces.stride(WRITTEN), images.taps, pieces.rows, pieces.cols
    TOGETHER = gcd(4, X * TAPS, C * TAPS) if APART == TAPS else 1
    SOURCE = _Side(images.source, READ, FROM, images.lanes(READ))
    RESULT = _Side(images.result, WRITTEN, TO, images.lanes(WRITTEN))
    LANES_IN, LANES_OUT = pieces.lanes_in, pieces.lanes_out
    THREADS = {"z": Z, "y": Y * Q, "x": X}
    dtype = shape.dtype
    # Pairs are rounded when stored.
    FINISHED = "float32" if pieces.puts_pairs else dtype
    declare, finish = both_ends(shape, epilogue, dtype=FINISHED)
    adds = "residual" in epilogue.steps  # which comes by way of what the results then lie in

    def loading(planes, window, pairs, y, place, part):
        def load(row):
            at, by_pairs = place + row * SW + part * pieces.step - pieces.lead, pieces.takes_pairs
            if by_pairs:
                take_pairs(pieces, Part(planes, y, 0), X * FROM, window, Part(pairs, 0), at)
            for first, count in pieces.runs:
                tests = beyond(part, first)
                if by_pairs and not tests:
                    continue
                with unrolled(count) as w, T.vectorized(LANES_IN) as v:
                    to = first + w * LANES_IN + v
                    value = window[to] if by_pairs else T.cast(planes[y, at + to], "float32")
                    value = T.if_then_else(tirx.all(*tests), value, 0.0) if tests else value
                    T.buffer_store(window, value, [to])

        return load

    def beyond(part, first: int):
        """Tell whether a column of a window, which may be beside an image, is not."""
        col = part * pieces.step + first - pieces.lead
        return [0 <= col] * (first < pieces.lead) + [col < SW] * pieces.is_beyond(first)

    def carry(tensor, place, shared, sizes, share, *, is_load=True):
        """Copy an image, or weights, of the block's channels to shared memory, or back: a thread of `x` its share."""
        (image, _, chunk, x), (each, thread), (size, stride, _) = place, share, sizes
        if is_planar:
            whole = Part(tensor, image, 0, 0, chunk * (X * size))
            copy((X, there(chunk)), whole, shared, sizes, (X * each, thread * X + x), is_load=is_load)
        else:
            whole = Part(tensor, image, 0, 0, chunk * X)
            copy_pixels((x, there(chunk), C), whole, shared, (size, stride), share)

    def there(chunk):
        """Count the channels of a block that there are."""
        return X if C % X == 0 else tirx.min(X, C - chunk * X)

    def first_row(side, piece):
        if P == 1:
            return 0
        return tirx.max(0, pieces.top(piece)) if side is SOURCE else images.first(piece * Z, pieces.all_bands)

    def bottom(piece):
        height = images.source[0]
        return height if P == 1 else tirx.min(height, pieces.top(piece) + images.seen(pieces.most))

    def stretch(tensor, side, place, share):
        (image, piece, chunk, x), (height, width) = place, side.size
        start = ((image * C + tirx.min(chunk * X + x, C - 1)) * height + first_row(side, piece)) * width
        return Stretch(Part(tensor, 0, 0, 0, 0), N * C * height * width, start, shape.lanes, share)

    def begin(tensor, side, place):
        """Find where in shared memory the piece of a thread begins."""
        apart = place.x * side.stride
        return apart if P == 1 else apart + stretch(tensor, side, place, (1, 0)).beside

    def between(rows, most):
        """Show rows of a piece to be from 0 to the most, or TVM makes room for more than there are."""
        return rows if P == 1 else tirx.max(0, tirx.min(rows, most))

    def beside(place, share):
        """Let threads side by side copy what lies side by side: find a thread's channel, and its number there."""
        each, thread = share
        number = thread * X + place.x
        return place._replace(x=tirx.floordiv(number, each)), (each, tirx.floormod(number, each))

    def bring(tensor, side, place, shared, y, share):
        if P == 1:
            carry(tensor, place, Part(shared, y, 0), side[1:], share)
        else:
            place, share = beside(place, share)
            rows = stretch(tensor, side, place, share)
            rows.load(Part(shared, y, place.x * side.stride), pieces.vectors(side.elements))

    def bring_back(tensor, side, place, shared, y, share):
        if P == 1:
            carry(tensor, place, Part(shared, y, 0), side[1:], share, is_load=False)
            return
        place, share = beside(place, share)
        count = between(first_row(side, place.piece + 1) - first_row(side, place.piece), pieces.most)
        if pieces.is_ragged:
            count = tirx.min(count, images.result[0] - first_row(side, place.piece))
        with when(place.chunk * X + place.x < C):
            own = Part(shared, y, place.x * side.stride)
            stretch(tensor, side, place, share).store(own, count * RW, pieces.least * RW, side.elements)

    def across(y):
        """Tell a thread's image, of the block's, and its part."""
        return (y, 0) if Q == 1 else (0, y)

    def put(result, pairs, shared, part):
        put_row = partial(put_pairs, pairs=Part(pairs, 0)) if pieces.puts_pairs else partial(move, lanes=LANES_OUT)
        put_row(result, shared, pieces.fewest)
        if pieces.fewest < COLS:
            source, target = (Part(own.buffer, *own.at(pieces.fewest)) for own in (result, shared))
            with when(part < Q - 1):
                put_row(source, target, COLS - pieces.fewest)

    def share_out(bring, tensor, side, shared, b, c, p, z, y, x):
        """Let a thread copy its share of an image, if there is one."""
        image, part = across(y)
        with when(b * Y + image < N):
            bring(tensor, side, _Place(b * Y + image, p, c, x), shared, image, (Z * Q, z * Q + part))

    def weigh(weight, filters, c, p, z, y, x):
        carry(weight, _Place(0, p, c, x), Part(filters, 0), (TAPS, APART, TOGETHER), (Y * Z * Q, z * (Y * Q) + y))

    @script.inline
    def multiply(data, planes, filters, acc, operands, results, b, c, p, z, y, x):
        image, part = T.meta_var(across(y))
        T.reads(planes[image, :], filters[:])
        T.writes(acc[z, y, x, :])
        window = local("float32", pieces.window + pieces.takes_pairs)
        pairs = local(dtype, pieces.window + 2)
        taps = local("float32", TAPS if pieces.is_unrolled else shape.kernel[1])
        first = T.meta_var(begin(data, SOURCE, _Place(b * Y + image, p, c, x)) - first_row(SOURCE, p) * SW)
        load = T.meta_var(loading(planes, window, pairs, image, first, part))
        band = T.meta_var(_band(pieces, p * Z + z))
        _sum(pieces, band, bottom(p), Part(acc, z, y, x, 0), window, taps, Part(filters, x * APART), load)
        if adds and is_planar:
            share_out(bring, operands["residual"], RESULT, results, b, c, p, z, y, x)

    def inside(place) -> Any:  # of columns that the last part has not
        return tirx.min(place, X * TO - 1) if pieces.fewest < COLS else place

    @script.inline
    def end(acc, out, operands, results, b, c, p, z, y, x):
        image, part = T.meta_var(across(y))
        T.reads(acc[z, y, x, :])
        T.writes(results[image, x * TO : x * TO + TO])
        first, _, most, rows = T.meta_var(_band(pieces, p * Z + z))
        held = T.meta_var(operands | {"residual": Row(results, image)})
        channel = T.meta_var(T.min(c * X + x, C - 1))
        start = T.meta_var(begin(out, RESULT, _Place(b * Y + image, p, c, x)) + part * COLS)
        down = T.meta_var(between(first - first_row(RESULT, p), pieces.most - 1))
        result = local(FINISHED, ROWS * COLS)
        pairs = local(dtype, COLS + 2)
        for row in T.unroll(most):
            if row < rows:
                for w in unrolled(COLS):
                    element = T.meta_var((inside(start + (down + row) * RW + w),))
                    result[row * COLS + w] = finish(acc[z, y, x, row * COLS + w], held, channel, element)
                if not adds:
                    put(Part(result, row * COLS), pairs, Part(results, image, start + (down + row) * RW), part)
        if adds:  # threads wait in between, which they may not do under a test
            for row in T.unroll(most):
                if row < rows:
                    put(Part(result, row * COLS), pairs, Part(results, image, start + (down + row) * RW), part)

    @script.inline
    def end_pixels(acc, out, operands, b, c, p, z, y, x):
        T.reads(acc[z, y, x, :])
        T.writes(out[b * Y : b * Y + Y, :, :, c * X : c * X + X])
        n, channel = T.meta_var((b * Y + y, c * X + x))
        first, _, most, rows = T.meta_var(_band(pieces, z))
        if all_hold(n < N, channel < C):
            for row in T.unroll(most):
                if row < rows:
                    for w in unrolled(COLS):
                        place = T.meta_var((n, first + row, w, channel))
                        out[n, first + row, w, channel] = finish(acc[z, y, x, row * COLS + w], operands, channel, place)

    @script.prim_func(s_tir=True)
    def split_images() -> None:
        data, weight, operands, out = T.meta_var(declare())
        for b, c, p in T.grid(-(-N // Y), -(-C // X), P):
            with T.sblock("images"):
                vb, vc, vp = T.axis.remap("SSS", [b, c, p])
                T.reads()
                if is_planar:
                    T.writes(out[vb * Y : vb * Y + Y, vc * X : vc * X + X, :, :])
                else:
                    T.writes(out[vb * Y : vb * Y + Y, :, :, vc * X : vc * X + X])
                planes = static(dtype, Y, X * FROM)
                filters = static("float32", X * APART)
                results = static(dtype, Y, X * TO)
                acc = local("float32", Z, Y * Q, X, ROWS * COLS)
                block = T.meta_var((vb, vc, vp))
                by_places("gather", THREADS, share_out, bring, data, SOURCE, planes, *block)
                by_places("filters", THREADS, weigh, weight, filters, vc, vp)
                by_places("depthwise_conv2d", THREADS, multiply, data, planes, filters, acc, operands, results, *block)
                if not is_planar:
                    by_places("epilogue", THREADS, end_pixels, acc, out, operands, *block)
                else:
                    by_places("epilogue", THREADS, end, acc, out, operands, results, *block)
                    by_places("store", THREADS, share_out, bring_back, out, RESULT, results, *block)

    return split_images


def _band(pieces: Pieces, band: Any) -> tuple[Any, int, int, Any]:
    """Find a band's first row, and its rows: the fewest and the most of any, and its own."""
    images, bands = pieces.images, pieces.all_bands
    height, together = images.result[0], images.phases
    groups = -(-height // together)
    (least, more), over = divmod(groups, bands), groups * together - height
    first, end = band * (least * together), (band + 1) * (least * together)
    if more:
        first, end = (images.first(n, bands) for n in (band, band + 1))
    most, rows = images.band(bands), (tirx.min(end, height) if over else end) - first
    return first, least * together - over, most, rows if more or over else most


def _sum(
    pieces: Pieces,
    band: tuple[Any, int, int, Any],
    bottom: Any,
    acc: Part,
    window,
    taps,
    weight: Part,
    load: Callable[[Any], None],
) -> None:
    """Sum the products of a band, row after row of the image that it sees, of those before the bottom."""
    images, shape, width = pieces.images, pieces.shape, pieces.cols
    (kernel_h, kernel_w), below, (first, least, most, rows) = shape.kernel, shape.dilation[0], band
    right = shape.stride[1] if shape.operation == "forward" else 1
    top = images.top(first)
    clear(acc, 0, most * width)

    def add(h: int, tap: Any, held: int):
        """Add products of a row of the window and one of the kernel, whose weights are held from a place on."""
        for kw in range(kernel_w):
            cols, at = pieces.columns(kw)
            if not cols:
                continue
            if tap is not None:
                T.buffer_store(taps, weight[images.turned(tap + kw)], [held + kw])
            with unrolled(len(cols)) as col:
                value = window[at + col * right] * taps[held + kw]
                acc.add(h * width + cols.start + col * cols.step, value)

    def go_down():
        with T.serial(images.seen(most)) as seen:
            row = top + seen
            with when(0 <= row, row < bottom):
                load(row)
                for h in range(most):
                    above = images.above(seen, h)
                    tests = [0 <= above] * (h > 0)
                    tests += [above < kernel_h * below] * (h < most - 1 or images.phases > 1)
                    tests += [tirx.floormod(above, below) == 0] * (below > 1)
                    tests += [h < rows] * (h >= least)
                    with when(*tests):
                        add(h, tirx.floordiv(above, below) * kernel_w, 0)

    def go_down_apart():
        """Load the rows under the taps of each row anew, where no two meet the same ones."""
        with T.serial(kernel_h) as kh:
            for h in range(most):
                row = top + kh * below + h * shape.stride[0]
                tests = [0 <= row, row < bottom] + [h < rows] * (h >= least)
                with when(*tests):
                    load(row)
                    add(h, kh * kernel_w, 0)

    def go_down_in_line():
        loaded: set[int] = set()
        for seen in range(images.seen(most)):
            above = [divmod(images.above(seen, h), below) for h in range(most)]
            meets = {h: tap * kernel_w for h, (tap, over) in enumerate(above) if 0 <= tap < kernel_h and not over}
            for first in {*meets.values()} - loaded:  # outside of tests, to stay
                for tap in range(first, first + kernel_w):
                    T.buffer_store(taps, weight[images.turned(tap)], [tap])
            loaded.update(meets.values())
            row = top + seen
            with when(bool(meets), 0 <= row, row < bottom):
                load(row)
                for h, first in meets.items():
                    add(h, None, first)

    if pieces.is_unrolled:
        go_down_in_line()
    elif images.are_apart(most):
        go_down_apart()
    else:
        go_down()
