"""What a kernel is expected to take: the model by which a tile is chosen by hand.

A multiprocessor runs as many blocks at a time as its registers hold. They take as long as
it takes to issue their instructions, to move their lines through the L1 cache, and to wait
for the loads of one thread, which overlap in part; that many times over as there are
blocks, or else as long as memory takes for the tensors. A thread waits once where its
registers hold all that it loads, and more often where they do not, which is why the
registers of a thread are chosen too: `Strategy.min_blocks`.

The constants are fitted to 2295 kernels of 118 layers, measured on an H200, by how much
slower the kernel is that the model prefers than the best of the same layer: 5 % in the
geometric mean, where one taken at random is 33 % slower. They serve to compare tiles of
one layer, and say little about a time. ``bench/fit_cost.py`` fits them anew, to this or
another GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import ceil, prod
from typing import NamedTuple

from ..shape import DepthwiseConv2dShape
from ..target import Target
from .tiles import MAX_BLOCKS, MAX_THREADS, REGISTERS, phases, reach, step

__all__ = ["Model", "Work", "block_counts", "conversions", "fastest", "halo", "registers_for"]

_SCHEDULERS = 4

# Registers: of every thread, and by sum, by loaded value and by weight.
_MOST_REGISTERS = 255
_REGISTERS, _PER_SUM, _PER_VALUE, _PER_WEIGHT = 23.4, 1.95, 3.7, 1.5

# Instructions, beside one for each multiply-add.
_LOAD, _WEIGHT, _STORE, _CONVERSION, _START = 1.5, 0.48, 1.5, 1.04, 12.0
_RAGGED, _SPILL = 0.1, 0.19  # more of them: where vectors hang over, by registers too many

# Cycles of a thread that runs alone.
_ALONE, _WAIT, _MORE_WAITS, _PER_LOAD, _NEXT_STEP = 0.56, 293.0, 0.22, 3.8, 0.385

_PER_LINE = 0.3
_LAST_ROUND = 0.32  # of a last round that is not full
_LARGE_BLOCK = 0.014  # lost for each warp of a block above four
_TOGETHER, _WITH_MEMORY = 1.27, 1.62  # exponents: 1 adds times up, a large one takes the longest

_CLOCK, _LAUNCH, _BANDWIDTH, _HALO_BANDWIDTH = 1.755e9, 1.73e-6, 4.9e12, 26e12


class Work(NamedTuple):
    """What a thread does for its tile, and how many threads do.

    Parameters
    ----------
    threads, blocks : int
        Threads of a block, and blocks.
    sums : int
        Results of a thread.
    multiply_adds, loads, weights, stores, conversions : float
        Instructions of a thread; loads are those of inputs.
    values, weight_values : float
        Registers that the loads of inputs and of weights fill, in one step.
    steps : int
        How often a thread loads anew.
    lines, weight_lines : float
        Cycles of the L1 cache that a load of inputs, or of weights, takes a warp.
    halo : float
        Inputs that a block reads, by those that are its own.
    ragged : bool
        Whether vectors of channels hang over the last, so that every access has a test.
    """

    threads: int
    blocks: int
    sums: int
    multiply_adds: int
    loads: int
    weights: int
    stores: float
    conversions: float
    values: float
    weight_values: float
    steps: int
    lines: float
    weight_lines: float
    halo: float
    ragged: bool


def fastest(works: Iterable[Work], shape: DepthwiseConv2dShape, target: Target) -> tuple[int, int]:
    """Return the number of the work that is expected to take the least time, and its blocks."""
    model = Model(shape, target)
    _, min_blocks, number = min((*model.best(work), number) for number, work in enumerate(works))
    return number, min_blocks


def registers_for(threads: int, min_blocks: int) -> int:
    """Return the registers of a thread, if an SM is to have room for so many blocks."""
    warps = -(-threads // 32)
    return min(_MOST_REGISTERS, REGISTERS // (32 * warps * min_blocks) // 8 * 8)


@cache
def block_counts(threads: int) -> tuple[int, ...]:
    """List the blocks at a time that are worth trying, from the most registers to the least."""
    whole = -(-threads // 32) * 32
    most = min(MAX_BLOCKS, MAX_THREADS // whole)
    counts = (REGISTERS // (registers * whole) for registers in (255, 168, 128, 96, 64, 48))
    return tuple(sorted({max(1, min(most, count)) for count in counts}))


class Model:
    """The model for one layer on one device."""

    def __init__(self, shape: DepthwiseConv2dShape, target: Target) -> None:
        self._units = target.units
        inputs = prod(next(iter(shape.input_shapes.values()))) * shape.itemsize
        self._memory = shape.least_bytes / _BANDWIDTH
        self._halo = inputs / _HALO_BANDWIDTH

    def best(self, work: Work) -> tuple[float, int]:
        """Return the least estimate over the blocks at a time, and those blocks."""
        return min((self.seconds(work, count), count) for count in block_counts(work.threads))

    def seconds(self, work: Work, min_blocks: int) -> float:
        """Estimate the time of a kernel, for comparison with others of the same layer."""
        warps = ceil(work.threads / 32)
        limit = registers_for(work.threads, min_blocks)
        own = _REGISTERS + _PER_SUM * work.sums
        registers = own + _PER_VALUE * work.values + _PER_WEIGHT * work.weight_values
        registers = max(24, ceil(min(registers, limit) / 8) * 8)
        spilled = max(0.0, own / limit - 1)
        free = max(6.0, limit - own)
        waits = (work.values + _PER_WEIGHT * work.weight_values) / free
        waits = 1 + _MORE_WAITS * max(0.0, waits - 1)

        instructions = (
            work.multiply_adds
            + _LOAD * work.loads
            + _WEIGHT * work.weights
            + _STORE * work.stores
            + _CONVERSION * work.conversions
            + _START
        )
        instructions *= (1 + _RAGGED * work.ragged) * (1 + _SPILL * spilled)

        blocks = work.blocks / self._units
        fitting = min(
            MAX_BLOCKS, MAX_THREADS // (32 * warps), REGISTERS // (registers * 32 * warps)
        )
        fitting = max(1, fitting)
        at_a_time = max(1.0, min(fitting, max(1, ceil(blocks))) * warps / _SCHEDULERS)
        issue = instructions * at_a_time
        lines = (work.loads + work.stores) * work.lines + work.weights * work.weight_lines
        cache = lines * at_a_time * _SCHEDULERS * _PER_LINE
        alone = (
            _WAIT * waits * (1 + _NEXT_STEP * (work.steps - 1))
            + _ALONE * instructions
            + _PER_LOAD * (work.loads + work.weights)
        )
        together = (issue**_TOGETHER + cache**_TOGETHER + alone**_TOGETHER) ** (1 / _TOGETHER)
        rounds = max(1.0, blocks / fitting)
        rounds += _LAST_ROUND * (ceil(rounds) - rounds)
        busy = rounds * together / _CLOCK * (1 + _LARGE_BLOCK * max(0, warps - 4))

        memory = self._memory + self._halo * (work.halo - 1)
        return float(_LAUNCH + (busy**_WITH_MEMORY + memory**_WITH_MEMORY) ** (1 / _WITH_MEMORY))


def conversions(shape: DepthwiseConv2dShape, loaded: int, sums: int) -> float:
    """Count instructions from the type of the tensors to float32 and back."""
    if shape.dtype == "float32":
        return 0.0
    return loaded * (1.5 if shape.dtype == "bfloat16" else 1.0) + 0.5 * sums


def halo(shape: DepthwiseConv2dShape, rows: int, cols: int) -> float:
    """Divide the inputs that a block of results reads by those that are its own."""
    ratio = 1.0
    for axis, count in enumerate((rows, cols)):
        results = min(count, (shape.result_height, shape.result_width)[axis])
        own = results * step(shape, axis) / phases(shape, axis)
        read = min(reach(shape, axis, results), (shape.height, shape.width)[axis])
        ratio *= max(1.0, read / own)
    return ratio
