"""The tiles of `tap_sums` worth comparing for a shape, and their order by `tap_cost`."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np

from ..bands import window_of
from ..shape import Shape
from ..target import Target
from .part_sums import MOST_PART_THREADS, taps_of_block
from .tap_cost import (
    Numbers,
    Tiles,
    allocated_bytes,
    estimate,
    is_held,
    other_blocks,
    shared_bytes,
    sums_of,
    threads_of,
    tiles_of_channel,
    warps_of,
    window,
)
from .tiles import MAX_BLOCKS, MAX_THREADS, SHARED, divisors, even_split, largest_divisor, threads_over, vectors

MAX_TAP_SUMS = 128
"""Sums of one thread, each a register."""

MAX_KERNEL_THREADS = 64
"""Threads over kernel rows, which are those of a block along z."""

# Sizes of a tile: beyond, a halo is small, and the code of a tile long to compile.
_MOST_ROWS, _MOST_COLS = 16, 16
_MOST_COLS_OF_A_ROW = 32  # of taps
_MOST_PRODUCTS, _MOST_LOADS = 2600, 420
_MOST_KERNEL_COLS = 64

_MOST_THREADS = 512  # of a block: beyond, its end takes longer than it saves

# Threads over channels and over tiles, blocks at a time, and rounds: a few of each are tried for all
# tiles, then more for the best.
_ROUGH = ((16, 64), (1, 4, 16, 64, 128), (1, 2, 4, 8, 16), (1,))
_TILES_AT_A_TIME = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
_FINE = ((4, 8, 16, 32, 64, 128), (*_TILES_AT_A_TIME, 96, 128, 192, 256), (1, 2, 3, 4, 5, 6, 8, 10, 12, 16), (1, 2))
_REFINED, _RANKED = 16, 50  # the best tiles that more is tried of, and those that are listed


def vectors_of(shape: Shape) -> tuple[int, ...]:
    """List the vectors of channels, where they are contiguous."""
    if shape.layout == "NCHW" or shape.channel_multiplier > 1:
        return (1,)
    return vectors(shape, shape.in_channels)


def lanes_of(shape: Shape, cols: int, kernel_cols: int) -> tuple[int, ...]:
    """List the vectors whose multiples all windows begin at, of outputs and of taps."""
    if shape.layout == "NHWC":
        return (1,)
    apart = cols * shape.stride[1]
    if kernel_cols < shape.kernel[1]:
        apart = gcd(apart, kernel_cols * shape.dilation[1])
    # A row of the padded input is more than one vector, or TVM loses the loop over them.
    width = window_of(shape, 1, shape.out_width) + -shape.padding[1] % shape.row_lanes
    return tuple(n for n in divisors(gcd(apart, shape.row_lanes)) if n == 1 or n < width)


def grad_lanes_of(shape: Shape, cols: int) -> tuple[int, ...]:
    """List the vectors that a tile's outputs of a row divide into."""
    return (1,) if shape.layout == "NHWC" else vectors(shape, cols, shape.out_width)


@lru_cache(maxsize=256)
def ranked(shape: Shape, target: Target) -> tuple[tuple[int, ...], ...]:
    """List the fields of the tiles with the least estimates, the least first."""
    tiles = _tiles(shape)
    tiles = _take(tiles, _fitting(tiles, shape))
    if not tiles.rows.size:
        return ()
    rough, origin = _in_blocks(tiles, shape, target, *_ROUGH)
    if not origin.size:
        return ()
    order = np.argsort(estimate(rough, shape, target), kind="stable")
    _, firsts = np.unique(origin[order], return_index=True)
    fine, _ = _in_blocks(_take(tiles, origin[order][np.sort(firsts)[:_REFINED]]), shape, target, *_FINE)
    order = np.argsort(estimate(fine, shape, target), kind="stable")[:_RANKED]
    rows = np.stack(_take(fine, order), axis=1).astype(int).tolist()
    return tuple(dict.fromkeys(map(tuple, rows)))


def _tiles(shape: Shape) -> Tiles:
    taps = _taps(shape)
    found = [
        (rows, cols, *taps_of, vector, 1, 1, 1, 1, kernel_threads, lanes, grad_lanes, 1)
        for *taps_of, kernel_threads in taps
        for cols in _sides(shape.out_width, _MOST_COLS_OF_A_ROW if taps_of[0] == 1 else _MOST_COLS)
        for lanes in lanes_of(shape, cols, taps_of[1])[-2:]
        for grad_lanes in grad_lanes_of(shape, cols)[-1:]
        for vector in vectors_of(shape)
        for rows in _sides(shape.out_height, _MOST_ROWS)
    ]
    return Tiles(*np.array(found, dtype=np.float64).T)


def _taps(shape: Shape) -> list[tuple[int, int, int]]:
    kernel_h, kernel_w = shape.kernel
    widths = [n for n in divisors(kernel_w) if n <= _MOST_KERNEL_COLS][-2:]
    return [
        (rows, cols, threads)
        for cols in widths
        for rows in divisors(kernel_h)
        if rows * cols <= MAX_TAP_SUMS
        for threads in divisors(kernel_h // rows)
        if threads <= MAX_KERNEL_THREADS
    ]


def _sides(outputs: int, most: int) -> list[int]:
    even = {even_split(outputs, size) for size in (1, 2, 4, 8, most)}
    return sorted(even.union(n for n in divisors(outputs) if n <= most))


def _fitting(tiles: Tiles, shape: Shape) -> Any:
    height, width = window(tiles, shape)
    outputs = tiles.rows * tiles.cols
    sums = sums_of(tiles)
    short = (height * width + outputs <= _MOST_LOADS) & (sums * outputs <= _MOST_PRODUCTS)
    return short & (sums <= MAX_TAP_SUMS) & is_held(tiles, shape)


def _in_blocks(
    tiles: Tiles,
    shape: Shape,
    target: Target,
    channels: Iterable[int],
    threads: Sequence[int],
    min_blocks: Sequence[int],
    rounds: Sequence[int],
) -> tuple[Tiles, Any]:
    """Deal the tiles out to blocks and parts; return them, and whose each is."""
    table = _channel_table(tiles, shape, channels)
    shapes = (len(tiles.rows), table.shape[1], len(threads), len(min_blocks), len(rounds))
    origin, which, *others = (index.ravel() for index in np.indices(shapes))
    before = np.array([0, *threads[:-1]])[others[0]]
    of_channel = tiles_of_channel(tiles, shape)[origin]
    new = (table[origin, which] > 0) & (before < of_channel)
    origin, which, of_channel = origin[new], which[new], of_channel[new]
    all_threads, all_blocks, all_rounds = (
        np.array(values, dtype=np.float64)[index[new]]
        for values, index in zip((threads, min_blocks, rounds), others, strict=True)
    )
    found = _take(tiles, origin)._replace(
        channels=table[origin, which], threads=np.minimum(all_threads, of_channel), min_blocks=all_blocks
    )
    warps, shared, allocated = warps_of(found), shared_bytes(found), allocated_bytes(found, shape)
    room = threads_of(found) <= min(_MOST_THREADS, target.max_threads_per_block)
    room &= allocated <= target.shared_bytes_per_block
    alone = found.min_blocks == 1
    room &= alone | (found.min_blocks * (shared + 1024) <= SHARED)
    room &= alone | (found.min_blocks * warps * 32 <= MAX_THREADS)
    room &= (found.min_blocks <= MAX_BLOCKS) & is_held(found, shape, exact=True)
    found, origin, all_rounds = _take(found, room), origin[room], all_rounds[room]

    # Parts: as many as there is room for in the rounds, and with them an even number of turns.
    of_channel, others_of = tiles_of_channel(found, shape), other_blocks(found, shape)
    most = np.ceil(of_channel / found.threads)
    parts = np.clip(target.units * found.min_blocks * all_rounds // others_of, 1, most)
    parts = np.ceil(of_channel / (found.threads * np.ceil(most / parts)))
    used = found.min_blocks * all_rounds < parts * others_of / target.units + 1
    found, origin, parts = _take(found, used), origin[used], parts[used]
    width = found.channels if shape.layout == "NHWC" else np.full_like(parts, taps_of_block(shape, 1))
    most = np.maximum(1, np.minimum(MOST_PART_THREADS, target.max_threads_per_block // width))
    fewer = [(parts, np.arange(len(parts)))]
    for step in (2, 4, 8):
        (uneven,) = np.nonzero((parts > step) & (parts % step > 0))
        fewer.append((parts[uneven] // step * step, uneven))
    whole, left = np.divmod(tiles_of_channel(found, shape), found.threads)
    (uneven,) = np.nonzero((left == 0) & (whole % parts > 0))
    fewer.append((_divisors(whole[uneven], parts[uneven]), uneven))
    parts, index = (np.concatenate(values) for values in zip(*fewer, strict=True))
    found = _take(found, index)._replace(parts=parts, part_threads=_divisors(parts, most[index]))
    held = is_held(found, shape)
    return _take(found, held), origin[index][held]


def _channel_table(tiles: Tiles, shape: Shape, channels: Iterable[int]) -> Numbers:
    sizes = list(channels)
    rows = {}
    for vector in vectors_of(shape):
        values = {1}
        if shape.layout == "NHWC":
            values = {_channels(shape.in_channels // vector, most) for most in sizes}
        rows[vector] = [*values, *[0] * (len(sizes) - len(values))]
    return np.array([rows[int(vector)] for vector in tiles.vector], dtype=np.float64)


def _divisors(counts: Numbers, most: Numbers) -> Numbers:
    wholes, where = np.unique(counts, return_inverse=True)
    best = np.empty_like(counts)
    parts = np.arange(1, int(most.max(initial=1)) + 1)
    for number, whole in enumerate(wholes):
        of_whole = parts[whole % parts == 0]
        here = where == number
        best[here] = of_whole[np.searchsorted(of_whole, most[here], side="right") - 1]
    return best


def _channels(count: int, most: int) -> int:
    """Choose the threads over channels; some idle ones where no divisor comes near `most`."""
    divisor = largest_divisor(count, most)
    return divisor if 4 * divisor > min(most, count) else threads_over(count, most)


def _take(tiles: Tiles, index: Any) -> Tiles:
    return Tiles(*(values[index] for values in tiles))
