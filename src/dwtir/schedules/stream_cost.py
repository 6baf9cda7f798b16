"""What a kernel of `row_stream` is expected to take: the model by which its tile is chosen.

A thread takes as long over a row as its instructions are issued, in turns with the other
warps of its scheduler, and beside them waits for what a row loads, the less the further
ahead that is. Blocks follow each other in rounds, of which the last may have fewer. Memory
works meanwhile: of the two times the longer one counts most.

The constants are fitted to 1200 kernels of 87 layers of NHWC on an H200, of which what is preferred
is 3.4 % slower than the best, and to 644 of 23 of NCHW in float32: 5 %. There what lies beside the
lines that a warp fills counts for more than the instructions do.
"""

from math import gcd
from typing import NamedTuple

from .cost import SECTOR

_CLOCK = 1.755e9
_LAUNCH = 2.64e-6

_PER_TORN, _PER_SHARED = 3.5, 2.0
"""What a byte in a sector that warps share costs, in bytes that are moved once: they go down the
rows each at its own pace, and write their parts at different times. And more if blocks share it."""

STORE_BANDWIDTH = 5.3e12
"""Of the second cache, for stores: whole sectors, however little of one is written at a time."""


class _Constants(NamedTuple):
    """What the time of a kernel is made of."""

    access: float
    piece: float
    conversion: float
    row: float
    """Instructions of a row beside its multiply-adds: by load or store, and by piece of memory
    above one that a warp takes for it; by conversion, and others."""
    weight: float
    start: float
    """Instructions of a thread: by weight, and others."""
    alone: float
    row_wait: float
    start_wait: float
    """Cycles that a thread has to wait in besides: by instruction, and for the loads of a row and
    of its beginning."""
    bandwidth: float
    """Of memory, bytes per second."""
    longer: float
    """The exponent by which the longer of two times counts more."""


_CONSTANTS = {
    "NHWC": _Constants(*(0.553, 0.533, 0.242, 2.54, 0.59, 9.7, 0.275, 305.0, 116.0), bandwidth=3.90e12, longer=2.04),
    "NCHW": _Constants(*(0.0, 1.57, 0.242, 0.0, 0.0, 0.0, 0.43, 568.0, 0.0), bandwidth=4.35e12, longer=2.11),
}


class Stream(NamedTuple):
    """What a thread does, and how many do so."""

    rows: float
    """Rows of inputs that a thread goes through."""
    multiply_adds: int
    accesses: int
    conversions: float
    """Instructions of a row; accesses are loads and stores."""
    pieces: float
    """Pieces of memory that the threads of a warp access together."""
    weights: int
    """Weights that a thread loads and converts."""
    ahead: int
    """Rows that are loaded ahead."""
    warps: int
    """Of a block."""
    blocks: float
    """Of a multiprocessor, all together."""
    min_blocks: int
    """Of a multiprocessor, at a time."""


def seconds(work: Stream, layout: str, moved: float) -> float:
    """Estimate the time of a kernel that moves so many bytes."""
    by = _CONSTANTS[layout]
    access = by.access + by.piece * (work.pieces - 1)
    row = work.multiply_adds + access * work.accesses + by.conversion * work.conversions + by.row
    instructions = row * work.rows + by.weight * work.weights + by.start
    wait = work.rows * (by.alone * row + by.row_wait / work.ahead) + by.start_wait
    full, rest = divmod(work.blocks, work.min_blocks)
    cycles = full * (instructions * work.min_blocks * work.warps / 4 + wait)
    if rest > 0:
        cycles += instructions * max(1.0, rest) * work.warps / 4 + wait
    busy, memory = cycles / _CLOCK, moved / by.bandwidth
    return _LAUNCH + float((busy**by.longer + memory**by.longer) ** (1 / by.longer))


def torn(threads: int, size: int, pixel: int) -> float:
    """Tell what the sectors cost that warps and blocks share, by the bytes of all results.

    Threads are those of a block along a pixel; the bytes are of a thread's store, and of the pixel.
    """
    pieces = (min(32, threads) * size, _PER_TORN), (threads * size, _PER_SHARED)
    return sum(cost * (SECTOR - gcd(SECTOR, piece, pixel)) / piece for piece, cost in pieces if piece < pixel)
