"""Rows of halves that begin anywhere, most in shared memory, moved in aligned pairs.

A bank gives a word at a time: a half alone takes as long as a pair. What is here writes statements while a script is
parsed.
"""

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ..pieces import Pieces
from .parts import Part, unrolled


def take_pairs(pieces: Pieces, planes: Part, size: int, window: tirx.Buffer, pairs: Part, start: Any) -> None:
    """Load a row of a thread's window as float32, by way of pairs; beside all planes other ones."""
    count, first, odd = pieces.window, tirx.floordiv(start, 2) * 2, tirx.floormod(start, 2)

    def load(to: Any, place: Any):
        _store_pair(pairs, to, _pair(planes, place))

    inside = []
    for to in range(0, count + 1, 2):
        is_before, is_beyond = 0 < pieces.lead >= to, pieces.is_beyond(to)
        if not (is_before or is_beyond or to == count):
            inside.append(to)
            continue
        place = first + to - (2 * (1 - odd) if to == count else 0)  # of which the first half is needed, or none
        place = tirx.max(0, place) if is_before else place
        load(to, tirx.min(place, size - 2) if is_beyond else place)
    if inside:
        with unrolled(len(inside)) as n:
            load(inside[0] + n * 2, first + (inside[0] + n * 2))
    with unrolled(count // 2) as n:
        T.buffer_store(window, T.cast(_from(pairs, 2 * n, odd), "float32x2"), [tirx.Ramp(2 * n, 1, 2)])
    if count % 2:
        last = T.Select(odd == 1, pairs[count], pairs[count - 1])
        T.buffer_store(window, T.cast(last, "float32"), [count - 1])


def put_pairs(source: Part, target: Part, count: int, *, pairs: Part) -> None:
    """Store so many elements of float32: the aligned pairs of the target, and alone what is beside them."""
    (*_, start), inside, dtype = target.at(0), (count - 1) // 2 * 2, target.buffer.dtype
    odd = tirx.floormod(start, 2)
    for first, last in [(0, count - 1)] if count % 2 else [(0, count - 2), (count - 1, count - 1)]:
        value = T.Select(odd == 1, source[first], source[last])
        target.store((1 - odd) * (last - first) + first, T.cast(value, dtype))
    with unrolled(inside // 2) as n:
        _store_pair(pairs, 2 * n, T.cast(_pair(source, 2 * n), f"{dtype}x2"))
    _store_pair(pairs, inside, T.cast(tirx.Broadcast(source[inside], 2), f"{dtype}x2"))
    with unrolled(inside // 2) as n:
        _store_pair(target, odd + 2 * n, _from(pairs, 2 * n, odd))


def _from(pairs: Part, first: Any, odd: Any) -> tirx.Expr:
    """Take a pair from an odd place on or an even one, for which CUDA has an instruction."""
    return T.Select(odd == 1, _pair(pairs, first + 1), _pair(pairs, first))


def _pair(elements: Part, place: Any) -> tirx.Expr:
    *others, first = elements.at(place)
    index = *others, tirx.Ramp(first, 1, 2)
    return elements.buffer[index]


def _store_pair(elements: Part, place: Any, value: tirx.Expr) -> None:
    *others, first = elements.at(place)
    T.buffer_store(elements.buffer, value, [*others, tirx.Ramp(first, 1, 2)])


def pair_of_row(
    image: tirx.Buffer,
    plane: tuple[Any, Any],
    rows: tuple[Any, Any],
    columns: tuple[Any, Any],
    padding: tuple[int, int],
) -> Any:
    """Load an aligned pair of a row of a tile's window, of which one half may lie beside the image, and is zero.

    `rows` are the first of the window and, of those, the pair's, `columns` those of the pair, both of padding too if
    all rows began with a pair, and in the image.
    """
    (N, C, H, W), (top, left) = image.shape, padding
    (n, channel), (down, row), (first, column) = plane, rows, columns
    # It is at the same place in all rows of a kind.
    begin = ((n * C + channel) * H + down + row % 2 - top) * W - left
    begin = begin // 2 * 2 + first + row // 2 * (2 * W)
    row += down
    inside = T.if_then_else(
        tirx.all(n < N, top <= row, row < top + H, -1 <= column, column < W),
        T.reinterpret("uint32", image[0, 0, 0, T.Ramp(begin, 1, 2)]),
        T.uint32(0),
    )
    kept = T.Select(column == -1, T.uint32(0xFFFF0000), T.uint32(0xFFFFFFFF))
    kept = T.Select(column == W - 1, T.uint32(0xFFFF), kept)
    return T.reinterpret(f"{image.dtype}x2", inside & kept)
