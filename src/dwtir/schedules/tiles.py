"""Arithmetic that several strategies choose their tiles with."""

from __future__ import annotations

from collections.abc import Iterable

from ..shape import DepthwiseConv2dShape
from ..target import Target

__all__ = [
    "MAX_LOADS",
    "MAX_UNROLLED",
    "REGISTERS",
    "WINDOWS",
    "even_split",
    "even_splits",
    "largest_divisor",
    "loads_of",
    "occupy",
    "reach",
    "threads_over",
    "unrolled_of",
    "with_value",
]

MAX_UNROLLED = 4096
"""Multiply-adds of one thread in straight line: a second of compilation, and what the
instruction cache of an SM holds (128 KiB at 16 bytes each, with the rest of the code)."""

MAX_LOADS = 1024
"""Loads of a window, unrolled with their tests for padding: about a second of compilation."""

REGISTERS = 65536
"""Registers of an SM, which the threads of a block share."""

WINDOWS = ("tile", "row", "tap")
"""What a thread keeps in registers: the input window of its tile, of one kernel row of it,
or of one tap; from the most reuse to the least code."""

_BUSY_THREADS = 512
"""Threads per SM below which its schedulers run out of warps while loads are under way."""


def reach(shape: DepthwiseConv2dShape, axis: int, outputs: int) -> int:
    """Count the input rows (axis 0) or columns (axis 1) that neighbouring outputs touch."""
    return (outputs - 1) * shape.stride[axis] + (shape.kernel[axis] - 1) * shape.dilation[axis] + 1


def loads_of(shape: DepthwiseConv2dShape, rows: int, cols: int, window: str) -> int:
    """Count the inputs that are loaded at a time, for one channel of a tile."""
    if window == "tap":
        return rows * cols
    return (reach(shape, 0, rows) if window == "tile" else rows) * reach(shape, 1, cols)


def unrolled_of(shape: DepthwiseConv2dShape, sums: int, window: str) -> int:
    """Count the multiply-adds in straight line for a tile of so many sums."""
    kernel_h, kernel_w = shape.kernel
    return sums * {"tile": kernel_h * kernel_w, "row": kernel_w, "tap": 1}[window]


def even_split(count: int, most: int) -> int:
    """Split `count` into the fewest equal parts of at most `most`; return the size of a part."""
    parts = -(-count // most)
    return -(-count // parts)


def even_splits(count: int, sizes: Iterable[int]) -> list[int]:
    """Split `count` evenly into parts of at most each of `sizes`."""
    return [even_split(count, most) for most in sizes]


def largest_divisor(count: int, most: int) -> int:
    """Find the largest divisor of `count` that is at most `most`."""
    return max(part for part in range(1, most + 1) if count % part == 0)


def threads_over(tiles: int, most: int) -> int:
    """Choose how many threads share `tiles`: as many as leave less than a twentieth idle."""

    def idle(threads: int) -> int:
        return -(-tiles // threads) * threads - tiles

    counts = range(min(tiles, most), 0, -1)
    return next((n for n in counts if 20 * idle(n) <= tiles), min(counts, key=idle))


def occupy(
    shape: DepthwiseConv2dShape, target: Target, rows: int, cols: int, vector: int = 1
) -> tuple[int, int, int]:
    """Shrink a thread's tile until the whole device has work.

    Tiles are as large as reuse likes them where there is work for all; a small
    layer needs its threads more than it needs reuse. The longer side is halved
    first, which costs the least reuse, and the channels of a vector last.
    """

    def threads() -> int:
        tiles = -(-shape.out_height // rows) * -(-shape.out_width // cols)
        return tiles * shape.batch * shape.out_channels // vector

    while threads() < _BUSY_THREADS * target.units and rows * cols * vector > 1:
        if rows * cols == 1:
            vector //= 2
        elif rows >= cols:
            rows = -(-rows // 2)
        else:
            cols = -(-cols // 2)
    return rows, cols, vector


def with_value(value: int, others: Iterable[int]) -> tuple[int, ...]:
    """Return all the values once, in order."""
    return tuple(sorted({value, *others}))
