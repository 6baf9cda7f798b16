"""The tiles of `banded_matrix` that are worth comparing."""

from math import prod

from ..bands import Bands
from ..shape import Shape
from .tiles import even_split

FEW_TAPS, _MANY_TAPS = 9, 64
"""Of a kernel with which more warps are ahead, and for which threads want all registers."""

HIGH, LOW = 14, 8
"""Rows of tiles, and of low ones, that load by fours."""

ROOMY = 1, 8
"""Warps of a block, and blocks at a time, whose threads have most registers."""

_LEAST_ROWS, _MOST_ROWS, _MOST_STRIDED = 8, 16, 24
"""Rows of inputs that are a tile's own, and of results; and with a stride such inputs over each result."""


def is_known(bands: Bands) -> bool:
    """Tell whether inputs come in pairs, and the model of an odd width knows tiles of such rows."""
    if not bands.alternates:
        return bands.has_pairs
    stride, own = bands.shape.stride, bands.rows * bands.shape.stride[0]
    if max(stride) > 1 and (bands.kernel_steps > 1 or own * stride[1] > _MOST_STRIDED):
        return False
    return bands.down == 1 or (own >= _LEAST_ROWS and bands.rows <= _MOST_ROWS)


def blocks(bands: Bands) -> list[tuple[int, int]]:
    """List warps of a block, and blocks at a time; in rows of an odd width those of which all blocks are full.

    Else all loads are under the last block's test: they wait for each other, and take up to 58 % longer.
    """
    taps, is_strided = prod(bands.shape.kernel), bands.shape.stride[1] > 1
    if bands.is_copied or not bands.is_odd:
        return [(min(4, bands.groups), 1)]
    if taps > _MANY_TAPS:
        return [ROOMY]
    if is_strided and taps > FEW_TAPS:
        return [(1, 12)]
    if is_strided or bands.groups % 2 > 0:
        return [(1, 16)]
    return [(2, 9)] if taps <= FEW_TAPS else [(2, 8), (1, 16)]


def height(shape: Shape) -> int:
    """Return the rows of results in a part of an image."""
    return -(-shape.result_height // Bands(shape, 1, 1).parts[0])


def heights(shape: Shape) -> list[int]:
    """List the rows of a tile; in rows of an odd width, even numbers too."""
    found = {even_split(height(shape), most) for most in (1, 2, 4, 7, LOW, HIGH)}
    if Bands(shape, 1, 1).is_odd:
        pairs = -(-shape.result_height // 2)
        found |= {2 * even_split(pairs, most) for most in (1, 2, 4, 5, 6, 8, 10, 15)}
    return sorted(found)


def kernel_rows(shape: Shape) -> list[int]:
    """List the kernel's rows of a step: equal parts."""
    rows = {shape.kernel[0], min(shape.kernel[0], shape.source[0])}
    return sorted({even_split(n, most) for n in rows for most in (1, 2, 4, 8, 16, 32)})
