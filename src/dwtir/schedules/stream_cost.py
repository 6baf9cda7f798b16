"""What a kernel of `row_stream` is expected to take: the model by which its tile is chosen.

A thread takes as long over a row as its instructions are issued, in turns with other warps, and waits for what a row
loads, the less the further ahead that is. Rows loaded ahead make the loop longer, and take registers. Blocks come in
rounds. Memory works meanwhile: the longer time counts most.

Of 5485 kernels of 328 layers on an H200, most of which the constants are fitted to, what is
preferred is 3.7 % slower than the best in NHWC and 3.3 % in NCHW.
"""

from math import gcd, prod
from typing import NamedTuple

from ..shape import Shape
from .cost import SECTOR
from .tiles import CLOCK, longer

_LEAST_WARPS = 2.0
"""Warps of a scheduler that take no longer than fewer: each has to wait for its own results."""

_PER_TORN, _PER_SHARED = 3.5, 2.0
"""What a byte in a sector that warps share costs, in bytes moved once: each goes down the rows, and writes its part, at
its own pace. And more if blocks share it."""

STORE_BANDWIDTH = 5.3e12
"""Of the second cache, for stores: whole sectors, however little of one is written at a time."""


class _Constants(NamedTuple):
    access: float
    piece: float
    conversion: float
    row: float
    """Instructions of a row beside its multiply-adds: by load or store, and piece of memory above one that a warp
    takes; by conversion, and others."""
    fetch: float
    """Cycles until an instruction of the loop is there for the first time, once in a kernel."""
    uncached: float
    cached: float
    """By how much they take longer where a loop has more than so many instructions, by these."""
    mixed: float
    spare: float
    """And where a thread has less than so many registers to spare, by those."""
    row_wait: float
    start_wait: float
    """Cycles that a thread has to wait for the loads of a row and of its beginning."""
    launch: float
    bandwidth: float
    """Seconds, and bytes per second of memory."""
    longer: float
    """The exponent by which the longer of two times counts more."""


_CONSTANTS = {
    "NHWC": _Constants(0.437, 1.09, 0.198, 1.67, 2.59, 0.0642, 1510, 0.00568, 15.5, 468, 1670, 0.587e-6, 4.62e12, 1.82),
    "NCHW": _Constants(0.35, 1.45, 0.198, 1.23, 1.63, 0.0859, 885, 0.00244, 12.7, 353, 2520, 0.313e-6, 12.2e12, 1.01),
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
    depth: int
    ahead: int
    """Rows of the loop, and those that are loaded ahead."""
    spare: int
    """Registers that a thread may have beyond those that it needs."""
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
    row *= 1 + by.uncached * max(0.0, work.depth * row / by.cached - 1)
    row *= 1 + by.mixed * max(0.0, by.spare - work.spare)

    def cycles(blocks: float) -> float:
        warps = max(_LEAST_WARPS, blocks * work.warps / 4)
        return work.rows * (row * warps + by.row_wait / work.ahead) + by.start_wait

    full, rest = divmod(work.blocks, work.min_blocks)
    busy = full * cycles(work.min_blocks) + (cycles(max(1.0, rest)) if rest > 0 else 0.0)
    busy, memory = (busy + by.fetch * work.depth * row) / CLOCK, moved / by.bandwidth
    return by.launch + longer(busy, memory, by.longer)


def shared_bytes(shape: Shape, threads: int, vector: int = 1) -> float:
    """Count bytes that take as long as the results' sectors do that warps and blocks share.

    Threads are those of a block along a pixel of NHWC; each stores a vector of channels.
    """
    if shape.layout == "NCHW":
        return 0.0
    size, pixel = vector * shape.itemsize, shape.result_channels * shape.itemsize
    pieces = (min(32, threads) * size, _PER_TORN), (threads * size, _PER_SHARED)
    torn = sum(cost * (SECTOR - gcd(SECTOR, piece, pixel)) / piece for piece, cost in pieces if piece < pixel)
    return prod(shape.result_shape) * shape.itemsize * torn
