"""Arithmetic that several strategies choose their tiles with."""

from collections.abc import Iterable
from math import gcd, isqrt

from ..shape import Shape

CLOCK = 1.755e9
"""Hz, by which models count cycles."""

MAX_UNROLLED = 4096
"""Multiply-adds of one thread in straight line: a second of compilation, and what an SM's instruction cache holds (128
KiB, with the rest of the code, at 16 bytes each)."""

MAX_LOADS = 1024
"""Loads of a window, unrolled with their tests for padding: about a second of compilation."""

MAX_SUMS = 128
"""Results of one thread, each a register."""

MAX_SIDE = 64
"""Rows or columns of a thread's tile; `compute.SLACK` has room for one less over the edge."""

REGISTERS = 65536
"""Registers of an SM, which the threads of a block share."""

SHARED = 227 * 1024
"""Bytes of shared memory of an SM, of which every block takes 1024 more than it asks for."""

LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that any GPU from sm_80 on lends to a block."""

MAX_THREADS = 2048
"""Threads of an SM."""

BLOCK_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Blocks of an SM at a time that a search tries."""

MAX_BLOCKS = 32
"""Blocks of an SM."""

WINDOWS = ("tile", "row", "tap")
"""What a thread keeps in registers: the input window of its tile, of one kernel row of it,
or of one tap; from the most reuse to the least code."""


def most_blocks(threads: int) -> int:
    """Count the blocks of so many threads that an SM runs at a time, if it has the registers."""
    return min(MAX_BLOCKS, MAX_THREADS // (-(-threads // 32) * 32))


def step(shape: Shape, axis: int) -> int:
    """Count the inputs from one result to the next, along rows (axis 0) or columns (axis 1)."""
    return shape.stride[axis] if shape.operation == "forward" else 1


def phases(shape: Shape, axis: int) -> int:
    """Count the results that start at the same input, each with taps of its own."""
    return 1 if shape.operation == "forward" else shape.stride[axis]


def windows_of(shape: Shape) -> tuple[str, ...]:
    """List the windows that the shape can have, in their order: with phases, a kernel row has none of one size."""
    return ("tile", "tap") if max(phases(shape, 0), phases(shape, 1)) > 1 else WINDOWS


def whole_phases(shape: Shape, axis: int, results: int, window: str = "tile") -> int:
    """Fit the rows (axis 0) or columns (axis 1) of a tile to the phases, for all tiles to have the same taps.

    Where each tap has its own window, it is one.
    """
    count = phases(shape, axis)
    if window == "tap" and count > 1:
        return 1
    return -(-results // count) * count


def taps(shape: Shape) -> tuple[int, int]:
    """Count the taps of a result, the channels of a multiplier among the columns' of a gradient."""
    kernel_h, kernel_w = (-(-shape.kernel[axis] // phases(shape, axis)) for axis in (0, 1))
    gradient = shape.operation != "forward"
    return kernel_h, kernel_w * (shape.channel_multiplier if gradient else 1)


def rows_in_use(shape: Shape, rows: int) -> int:
    """Count the rows of a window, of so many results below each other, that a thread has use for at once."""
    return min((taps(shape)[0] - 1) * shape.dilation[0] + 1, reach(shape, 0, rows))


def reach(shape: Shape, axis: int, results: int) -> int:
    """Count the input rows (axis 0) or columns (axis 1) that neighbouring results touch."""
    span = (results - 1) * step(shape, axis) + (shape.kernel[axis] - 1) * shape.dilation[axis]
    return -(-span // phases(shape, axis)) + 1


def inputs_of(shape: Shape) -> int:
    """Count the input channels that one channel of the result reads."""
    return 1 if shape.operation == "forward" else shape.channel_multiplier


def loads_of(shape: Shape, rows: int, cols: int, window: str) -> int:
    """Count the inputs that are loaded at a time, for one channel of a tile."""
    if window == "tap":
        return rows * cols
    height = reach(shape, 0, rows) if window == "tile" else rows
    return height * reach(shape, 1, cols) * inputs_of(shape)


def unrolled_of(shape: Shape, sums: int, window: str) -> int:
    """Count the multiply-adds in straight line for so many sums."""
    height, width = taps(shape)
    return sums * {"tile": height * width, "row": width, "tap": 1}[window]


def even_split(count: int, most: int) -> int:
    """Split `count` into the fewest equal parts of at most `most`; return their size."""
    parts = -(-count // most)
    return -(-count // parts)


def even_tile(shape: Shape, axis: int, most: int, window: str = "tile") -> int:
    """Split the rows (axis 0) or columns (axis 1) of the result evenly, in whole phases."""
    extent = (shape.result_height, shape.result_width)[axis]
    return whole_phases(shape, axis, even_split(extent, most), window)


def even_tiles(shape: Shape, axis: int, sizes: Iterable[int], window: str) -> list[int]:
    """List the tiles of at most each of `sizes`, in order."""
    return sorted({even_tile(shape, axis, most, window) for most in sizes})


def longer(one: float, other: float, power: float) -> float:
    """Add two times that overlap: 1 adds them up, a large power takes the longer one."""
    return float((one**power + other**power) ** (1 / power))


def divisors(count: int) -> tuple[int, ...]:
    """List what divides `count`, in order."""
    small = [part for part in range(1, isqrt(count) + 1) if count % part == 0]
    return tuple(sorted({*small, *(count // part for part in small)}))


def vectors(shape: Shape, *counts: int) -> tuple[int, ...]:
    """List the vectors, up to 16 bytes, that divide all counts."""
    return divisors(gcd(shape.lanes, *counts))


def largest_divisor(count: int, most: int) -> int:
    """Find the largest divisor of `count` that is at most `most`."""
    return max(part for part in range(1, most + 1) if count % part == 0)


def threads_over(tiles: int, most: int) -> int:
    """Choose how many threads share `tiles`: as many as leave less than a twentieth idle."""

    def idle(threads: int) -> int:
        return -(-tiles // threads) * threads - tiles

    counts = range(min(tiles, most), 0, -1)
    return next((n for n in counts if 20 * idle(n) <= tiles), min(counts, key=idle))
