"""Arithmetic that several strategies choose their tiles with."""

from __future__ import annotations

from collections.abc import Iterable

from ..shape import DepthwiseConv2dShape
from ..target import Target

__all__ = [
    "MAX_UNROLLED",
    "even_split",
    "largest_divisor",
    "occupy",
    "reach",
    "threads_over",
    "with_value",
]

MAX_UNROLLED = 4096
"""Multiply-adds of one thread in straight line: a second of compilation, and what the
instruction cache of an SM holds (128 KiB at 16 bytes each, with the rest of the code)."""

_BUSY_THREADS = 512
"""Threads per SM below which its schedulers run out of warps while loads are under way."""


def reach(shape: DepthwiseConv2dShape, axis: int, outputs: int) -> int:
    """Count the input rows (axis 0) or columns (axis 1) that neighbouring outputs touch."""
    return (outputs - 1) * shape.stride[axis] + (shape.kernel[axis] - 1) * shape.dilation[axis] + 1


def even_split(count: int, most: int) -> int:
    """Split `count` into the fewest equal parts of at most `most`; return the size of a part."""
    parts = -(-count // most)
    return -(-count // parts)


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
