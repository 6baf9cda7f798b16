"""Arithmetic that several strategies choose their tiles with."""

from __future__ import annotations

from collections.abc import Iterable

from ..shape import DepthwiseConv2dShape

__all__ = ["even_split", "largest_divisor", "reach", "with_value"]


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


def with_value(value: int, others: Iterable[int]) -> tuple[int, ...]:
    """Return all the values once, in order."""
    return tuple(sorted({value, *others}))
