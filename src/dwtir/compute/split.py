"""The convolution of planes, or the data's gradient, each image by several threads.

Each thread has a band of the result's rows, and goes down the rows of the image that they see.
This is one loop with one code for all bands: which rows of the kernel a row meets, it asks as
it goes. Taps in the padding beside a row are not there, and rows in the padding are passed over.

The blocks are those of `whole`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..epilogue import Epilogue
from ..images import Images
from . import script
from .forward import both_ends
from .parts import UNROLLED, Part, Row, clear, copy, copy_pixels, move


def bands_of(images: Images, epilogue: Epilogue, bands: int) -> tirx.PrimFunc:
    """Define the operation by threads of so many bands."""
    shape = images.shape
    N, C, is_planar = shape.batch, shape.in_channels, shape.layout == "NCHW"
    X, Y, Z, RW, SW = images.channels, images.images, bands, images.result[1], images.source[1]
    READ, WRITTEN, TAPS = prod(images.source), prod(images.result), prod(shape.kernel)
    FROM, TO, APART, ROWS = images.stride(READ), images.stride(WRITTEN), images.taps, images.band(Z)
    TOGETHER = gcd(4, X * TAPS, C * TAPS) if APART == TAPS else 1
    IN, OUT = (READ, FROM, images.lanes(READ)), (WRITTEN, TO, images.lanes(WRITTEN))
    LANES_IN, LANES_OUT = (gcd(16 // shape.itemsize, width) for width in (SW, RW))
    dtype = shape.dtype
    declare, finish = both_ends(shape, epilogue)
    adds = "residual" in epilogue.steps  # which comes by way of what the results then lie in

    def loading(planes: tirx.Buffer, window: tirx.Buffer, y, x) -> Callable[[Any], None]:
        def load(row) -> None:
            with T.serial(SW // LANES_IN, annotations=UNROLLED) as w, T.vectorized(LANES_IN) as v:
                place = w * LANES_IN + v
                value = T.cast(planes[y, x * FROM + row * SW + place], "float32")
                T.buffer_store(window, value, [place])

        return load

    def carry(tensor, image, chunk, shared, sizes, share, x, *, is_load=True) -> None:
        """Copy an image, or weights, of the block's channels to shared memory, or back: a thread of `x` its share."""
        (each, thread), (size, stride, _) = share, sizes
        if is_planar:
            whole = Part(tensor, image, 0, 0, chunk * (X * size))
            copy((X, there(chunk)), whole, shared, sizes, (X * each, thread * X + x), is_load=is_load)
        else:
            whole = Part(tensor, image, 0, 0, chunk * X)
            copy_pixels((x, there(chunk), C), whole, shared, (size, stride), share, is_load=is_load)

    def there(chunk) -> Any:
        """Count the channels of a block that there are."""
        return X if C % X == 0 else tirx.min(X, C - chunk * X)

    @script.prim_func(s_tir=True)
    def split_images() -> None:
        data, weight, operands, out = T.meta_var(declare())
        for b, c in T.grid(-(-N // Y), -(-C // X)):
            with T.sblock("images"):
                vb, vc = T.axis.remap("SS", [b, c])
                T.reads()
                if is_planar:
                    T.writes(out[vb * Y : vb * Y + Y, vc * X : vc * X + X, :, :])
                else:
                    T.writes(out[vb * Y : vb * Y + Y, :, :, vc * X : vc * X + X])
                planes = T.sblock_alloc_buffer((Y, X * FROM), dtype, scope="shared")
                filters = T.sblock_alloc_buffer((X * APART,), "float32", scope="shared")
                results = T.sblock_alloc_buffer((Y, X * TO), dtype, scope="shared")
                acc = T.sblock_alloc_buffer((Z, Y, X, ROWS * RW), "float32", scope="local")
                for z, y, x in T.grid(Z, Y, X):
                    with T.sblock("gather"):
                        vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                        if vb * Y + vy < N:
                            carry(data, vb * Y + vy, vc, Part(planes, vy, 0), IN, (Z, vz), vx)
                for z, y, x in T.grid(Z, Y, X):
                    with T.sblock("filters"):
                        vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                        sizes = T.meta_var((TAPS, APART, TOGETHER))
                        carry(weight, 0, vc, Part(filters, 0), sizes, (Y * Z, vz * Y + vy), vx)
                for z, y, x in T.grid(Z, Y, X):
                    with T.sblock("depthwise_conv2d"):
                        vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                        T.reads(planes[vy, :], filters[:])
                        T.writes(acc[vz, vy, vx, :])
                        window = T.sblock_alloc_buffer((SW,), "float32", scope="local")
                        taps = T.sblock_alloc_buffer((shape.kernel[1],), "float32", scope="local")
                        load = T.meta_var(loading(planes, window, vy, vx))
                        own = T.meta_var(Part(acc, vz, vy, vx, 0))
                        band = T.meta_var(_band(images, Z, vz))
                        _sum(images, band, own, window, taps, Part(filters, vx * APART), load)
                        if adds and vb * Y + vy < N:
                            added = T.meta_var(operands["residual"])
                            carry(added, vb * Y + vy, vc, Part(results, vy, 0), OUT, (Z, vz), vx)
                for z, y, x in T.grid(Z, Y, X):
                    with T.sblock("epilogue"):
                        vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                        T.reads(acc[vz, vy, vx, :])
                        T.writes(results[vy, vx * TO : vx * TO + WRITTEN])
                        first, _, most, rows = T.meta_var(_band(images, Z, vz))
                        held = T.meta_var(operands | {"residual": Row(results, vy)})
                        channel = T.meta_var(T.min(vc * X + vx, C - 1))
                        result = T.sblock_alloc_buffer((ROWS * RW,), dtype, scope="local")
                        for row in T.unroll(most):
                            if row < rows:
                                for w in T.serial(RW, annotations=UNROLLED):
                                    element = T.meta_var((vx * TO + (first + row) * RW + w,))
                                    value = T.meta_var(acc[vz, vy, vx, row * RW + w])
                                    result[row * RW + w] = finish(value, held, channel, element)
                                if not adds:
                                    to = T.meta_var(Part(results, vy, vx * TO + (first + row) * RW))
                                    move(Part(result, row * RW), to, RW, LANES_OUT)
                        if adds:  # threads wait in between, which they may not do under a test
                            for row in T.unroll(most):
                                if row < rows:
                                    to = T.meta_var(Part(results, vy, vx * TO + (first + row) * RW))
                                    move(Part(result, row * RW), to, RW, LANES_OUT)
                for z, y, x in T.grid(Z, Y, X):
                    with T.sblock("store"):
                        vz, vy, vx = T.axis.remap("SSS", [z, y, x])
                        if vb * Y + vy < N:
                            carry(out, vb * Y + vy, vc, Part(results, vy, 0), OUT, (Z, vz), vx, is_load=False)

    return split_images


def _band(images: Images, bands: int, band: Any) -> tuple[Any, int, int, Any]:
    """Find a band's first row, and its rows: the fewest and the most of any, and its own."""
    height, together = images.result[0], images.phases
    groups = -(-height // together)
    (least, more), over = divmod(groups, bands), groups * together - height
    first, end = band * (least * together), (band + 1) * (least * together)
    if more:
        first, end = (images.first(n, bands) for n in (band, band + 1))
    most, rows = images.band(bands), (tirx.min(end, height) if over else end) - first
    return first, least * together - over, most, rows if more or over else most


def _sum(
    images: Images,
    band: tuple[Any, int, int, Any],
    acc: Part,
    window: tirx.Buffer,
    taps: tirx.Buffer,
    weight: Part,
    load: Callable[[Any], None],
) -> None:
    """Sum the products of a band, row after row of the image that it sees."""
    shape, width = images.shape, images.result[1]
    (kernel_h, kernel_w), below, (first, least, most, rows) = shape.kernel, shape.dilation[0], band
    right = shape.stride[1] if shape.operation == "forward" else 1
    top = images.top(first)
    clear(acc, 0, most * width)
    with T.serial(images.seen(most)) as seen:
        row = top + seen
        with T.If(tirx.all(0 <= row, row < images.source[0])), T.Then():
            load(row)
            for h in range(most):
                above = images.above(seen, h)
                tests = [0 <= above] * (h > 0)
                tests += [above < kernel_h * below] * (h < most - 1 or images.phases > 1)
                tests += [tirx.floormod(above, below) == 0] * (below > 1)
                tests += [h < rows] * (h >= least)
                with T.If(tirx.all(*tests, tirx.const(True, "bool"))), T.Then():
                    for kw in range(kernel_w):
                        cols = images.meets(1, kw, 0, width)
                        if not cols:
                            continue
                        tap = tirx.floordiv(above, below) * kernel_w + kw
                        T.buffer_store(taps, weight[images.turned(tap)], [kw])
                        at = images.under(1, kw, cols.start)
                        with T.serial(len(cols), annotations=UNROLLED) as col:
                            place = acc.at(h * width + cols.start + col * cols.step)
                            value = window[at + col * right] * taps[kw]
                            T.buffer_store(acc.buffer, acc.buffer[place] + value, place)
