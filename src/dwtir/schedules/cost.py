"""What a kernel is expected to take: the model by which a tile is chosen by hand.

A multiprocessor runs as many blocks at a time as its registers hold. They take as long as it takes to issue their
instructions, to move their lines through the L1 cache, and to wait for the loads of one thread; that many times over as
there are blocks. Memory takes its time for the tensors, more where blocks overlap, or write less than whole sectors. A
thread waits once where its registers hold all that it loads, else more often, which is why they are chosen too:
`Strategy.min_blocks`. How many it needs is known roughly: the closer to its limit, the less a tile is trusted.

The constants are fitted to 7854 kernels of 288 layers on an H200: what is preferred is 3.3 %
slower than the best of its layer, 3.7 to 4.1 % of layers left out of a fit. They compare tiles of
one layer. ``git show 139d1f6:bench/fit_cost.py`` fits them, but for that of shared sectors: 27a11b1.
"""

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from math import ceil, gcd, prod
from typing import NamedTuple

from ..shape import Shape
from ..target import Target
from .tiles import CLOCK, MAX_BLOCKS, MAX_THREADS, REGISTERS, longer, most_blocks, phases, reach, step

LINE, SECTOR = 128, 32
"""Bytes of a line of the L1 cache, and of the sectors that memory is written by."""

_SCHEDULERS = 4

# Registers: of every thread, and by sum, row of the tile, input in use at once and loaded value,
# unless that is converted when it is used; of a loop over kernel rows; and where there is room,
# for loads under way too, by loaded value and weight.
MOST_REGISTERS = 255
_REGISTERS, _PER_SUM, _PER_ROW, _PER_INPUT, _PER_VALUE = 5.13, 0.142, 1.82, 1.07, 0.141
_PER_LOOP, _PER_LOADED, _PER_WEIGHT = 4.66, 0.158, 1.83
_PER_HALF_SUM = 0.12
# That so many do not do, by how many times they are those needed: an exponent. How much longer
# it takes than expected when it is compiled anew, for it has more registers than it needs.
_CERTAINTY, _ANEW = 8.33, 1.13

# Instructions, beside one for each multiply-add.
_LOAD, _WEIGHT, _STORE, _CONVERSION, _START = 2.0, 7.76, 4.89, 0.561, 0.186
# In NHWC, of neighbouring inputs, a load of halves takes less: of 350 kernels of 22 layers the choice is 1.7 % behind
# the best, not 3.5.
_HALVES_LOAD = 0.5
# More of them: beyond what the instruction cache holds, where blocks hang over, in a loop over
# kernel rows, whose addresses and tests are computed each time, and by registers too few.
_UNCACHED, _CACHED = 0.157, 396.0
# As many times where weights are loaded one by one: of 25 layers, half of which settled it, the choice is 1 % behind
# the best that was tried, not 8.
_SINGLE_WEIGHT, _SINGLE_UNCACHED = 0.5, 2.0
_RAGGED, _IN_LOOP, _SPILL = 0.0354, 0.521, 0.19

# Cycles of a thread that runs alone.
_ALONE, _WAIT, _MORE_WAITS, _NEXT_STEP = 1.8, 116.0, 2.83, 1.14

_PER_LINE = 0.19  # cycles of the L1 cache
# Of tiles with a stride, whose loads share lines, to be compared: with 140 kernels of 15 layers more, the choice is 3 %
# behind the best, not 5.5.
_PER_STRIDED_LINE = {"NCHW": 0.5, "NHWC": 0.25}
_LAST_ROUND = 0.362  # of a last round that is not full
_LARGE_BLOCK = 0.0255  # lost for each warp of a block above four

_LAUNCH = 2.5e-6
# Of all tensors, and of what is moved beside: the halo, and sectors written in parts, by stores
# of one warp and of several blocks.
_BANDWIDTH, _HALO_BANDWIDTH = 4.69e12, 17.8e12
_SCATTERED_BANDWIDTH, _SHARED_BANDWIDTH = 3.31e12, 1.25e12

# For times that mean something: memory works while multiprocessors do, and the longer of the two
# times counts most.
_LAUNCHED, _BUSY, _COPY_BANDWIDTH, _LONGER = 1.79e-6, 0.61, 4.25e12, 1.68


class Work(NamedTuple):
    """What a thread does for its tile, how many threads do, and what they touch together."""

    threads: int
    blocks: int
    """Threads of a block, and blocks."""
    steps: int
    """How often a thread loads anew."""
    rows: int
    sums: int
    """Rows of results of a thread, and its results."""
    multiply_adds: int
    loads: int
    weights: int
    stores: float
    conversions: float
    """Instructions of a thread; loads are those of inputs."""
    in_use: float
    """Inputs that are multiplied together, all of which registers hold."""
    values: float
    weight_values: float
    """Registers that the loads of inputs and of weights fill, in one step."""
    halo: float
    """Inputs that a block reads, by those that are its own."""
    ragged: bool
    """Whether blocks hang over the last column or channel, so that accesses have a test."""
    lines: float = 1.0
    store_lines: float = 1.0
    weight_lines: float = 1.0
    """Lines of the L1 cache that a load of inputs, a store, or a load of weights touches, by warp."""
    scattered: float = 0.0
    """Sectors that the stores of a warp touch beyond those that its results fill, by the latter."""
    shared: float = 0.0
    """Sectors that blocks share in the results, by the sectors of all results."""
    single: bool = False
    """Whether loads and stores are of single elements, of an odd number of channels."""


def ranking(works: Iterable[Work], shape: Shape, target: Target) -> list[tuple[int, int]]:
    """Return the numbers of the works and their blocks, by the time they are expected to take."""
    model = Model(shape, target)
    estimates = sorted((*model.best(work), number) for number, work in enumerate(works))
    return [(number, min_blocks) for _, min_blocks, number in estimates]


@cache
def registers_for(threads: int, min_blocks: int) -> int:
    """Return the registers of a thread, if an SM is to have room for so many blocks."""
    warps = -(-threads // 32)
    return min(MOST_REGISTERS, REGISTERS // (32 * warps * min_blocks) // 8 * 8)


def registers_needed(work: Work) -> float:
    """Estimate the registers below which a thread spills."""
    needed = _REGISTERS + (_PER_HALF_SUM if work.conversions else _PER_SUM) * work.sums + _PER_ROW * work.rows
    needed += _PER_INPUT * work.in_use
    if work.conversions == 0:
        needed += _PER_VALUE * work.values
    return needed + _PER_LOOP * (work.steps > 1)


def registers_wanted(work: Work) -> float:
    """Estimate the registers that a thread takes where it may have more."""
    return registers_needed(work) + (_PER_LOADED * work.values + _PER_WEIGHT * work.weight_values)


def blocks_at_a_time(work: Work, registers: float, units: int) -> int:
    """Count the blocks that each multiprocessor runs at a time, with so many registers a thread."""
    return min(_fitting(ceil(work.threads / 32), ceil(registers / 8)), ceil(work.blocks / units))


@cache
def block_counts(threads: int) -> tuple[int, ...]:
    """List the blocks at a time worth trying, from the most registers to the least."""
    whole, most = -(-threads // 32) * 32, most_blocks(threads)
    counts = (REGISTERS // (registers * whole) for registers in (255, 168, 128, 96, 64, 48))
    return tuple(sorted({max(1, min(most, count)) for count in counts}))


class Model:
    """The model for one layer on one device."""

    def __init__(self, shape: Shape, target: Target) -> None:
        self._units = target.units
        inputs = prod(next(iter(shape.input_shapes.values()))) * shape.itemsize
        results = prod(shape.result_shape) * shape.itemsize
        is_strided = shape.operation == "forward" and max(shape.stride) > 1
        self._per_line = _PER_STRIDED_LINE[shape.layout] if is_strided else _PER_LINE
        loads_halves = shape.layout == "NHWC" and shape.itemsize == 2 and max(shape.stride + shape.dilation) == 1
        self._per_load = _HALVES_LOAD if loads_halves else _LOAD
        self._memory = shape.least_bytes / _BANDWIDTH
        self._streamed = shape.least_bytes / _COPY_BANDWIDTH
        self._halo = inputs / _HALO_BANDWIDTH
        self._scattered = results / _SCATTERED_BANDWIDTH
        self._shared = results / _SHARED_BANDWIDTH

    def best(self, work: Work) -> tuple[float, int]:
        """Return the least estimate, and the blocks at a time that it is of."""
        counts = block_counts(work.threads)
        return min(zip(self._estimates(work, counts), counts, strict=True))

    def seconds(self, work: Work, min_blocks: int) -> float:
        """Estimate the time of a kernel, for comparison with others of the same layer."""
        return next(self._estimates(work, (min_blocks,)))

    def absolute(self, work: Work) -> float:
        """Estimate the time of a kernel, for comparison with other strategies' kernels."""
        _, min_blocks = self.best(work)
        busy = _BUSY * _Tile(work, self._units).busy(registers_for(work.threads, min_blocks))
        return _LAUNCHED + longer(busy, self._streamed, _LONGER)

    def _estimates(self, work: Work, counts: Iterable[int]) -> Iterator[float]:
        memory = self._memory + self._halo * (work.halo - 1)
        memory += self._scattered * work.scattered + self._shared * work.shared
        tile = _Tile(work, self._units, self._per_line, self._per_load)
        # With too few registers it is compiled anew, for one block: see `nvrtc.compile_cubin`.
        anew = _ANEW * tile.busy(registers_for(work.threads, 1))
        for count in counts:
            limit = registers_for(work.threads, count)
            too_few = 1 / (1 + (limit / tile.needed) ** _CERTAINTY)
            busy = (1 - too_few) * tile.busy(limit) + too_few * anew
            yield _LAUNCH + busy + memory


class _Tile:
    """A tile on a multiprocessor: what does not depend on the registers of its threads."""

    def __init__(self, work: Work, units: int, per_line: float = _PER_LINE, per_load: float = _LOAD) -> None:
        self.needed = registers_needed(work)
        self._filled = work.values + _PER_WEIGHT * work.weight_values
        self._wanted = registers_wanted(work)
        self._sums = work.sums

        instructions = (
            work.multiply_adds
            + per_load * work.loads
            + _WEIGHT * work.weights * (_SINGLE_WEIGHT if work.single else 1)
            + _STORE * work.stores
            + _CONVERSION * work.conversions
            + _START
        )
        uncached = _UNCACHED * (_SINGLE_UNCACHED if work.single else 1)
        instructions += uncached * max(0.0, instructions - _CACHED * work.steps)
        instructions *= (1 + _RAGGED * work.ragged) * (1 + _IN_LOOP * (work.steps > 1))
        self._instructions = instructions
        lines = work.loads * work.lines + work.stores * work.store_lines
        lines += work.weights * work.weight_lines
        self._cache = lines * _SCHEDULERS * per_line
        self._wait = _WAIT * (1 + _NEXT_STEP * (work.steps - 1))

        self._warps = ceil(work.threads / 32)
        self._blocks = work.blocks / units
        self._most = max(1, ceil(self._blocks))
        self._cycle = (1 + _LARGE_BLOCK * max(0, self._warps - 4)) / CLOCK

    def busy(self, limit: int) -> float:
        """Estimate a multiprocessor's time for its blocks, of threads of `limit` registers."""
        instructions, alone = self._instructions, self._wait
        if limit < self.needed:
            instructions *= 1 + _SPILL * (self.needed / limit - 1)
        free = max(6.0, limit - _REGISTERS - self._sums)
        if free < self._filled:
            alone *= 1 + _MORE_WAITS * (self._filled / free - 1)
        alone += _ALONE * instructions

        fitting = _fitting(self._warps, ceil(min(self._wanted, limit) / 8))
        at_a_time = max(1.0, min(fitting, self._most) * self._warps / _SCHEDULERS)
        rounds = max(1.0, self._blocks / fitting)
        rounds += _LAST_ROUND * (ceil(rounds) - rounds)
        return rounds * ((instructions + self._cache) * at_a_time + alone) * self._cycle


@cache
def _fitting(warps: int, registers: int) -> int:
    """Count the blocks of so many times eight registers that a multiprocessor has room for."""
    threads, registers = 32 * warps, max(24, 8 * registers)
    return max(1, min(MAX_BLOCKS, MAX_THREADS // threads, REGISTERS // (registers * threads)))


@lru_cache(maxsize=4096)
def touched(unit: int, access: float, threads: tuple[tuple[float, float], ...]) -> float:
    """Count the units of memory, lines or sectors, that an access touches, on the average.

    `unit` and `access` are bytes, of a unit and of one thread. `threads` are their number and the
    bytes from one to the next; then the same of groups of those, and so on.
    """
    # A span that begins at any multiple of `grain` lies in so many units; groups of threads do.
    grain = gcd(unit, *(int(count) * int(apart) for count, apart in threads))
    units = 1 + max(0.0, access - gcd(int(access), unit)) / unit
    for count, apart in threads:
        access += (count - 1) * apart
        units = min(count * units, 1 + (ceil(access / grain) - 1) * grain / unit)
    return units


def conversions(shape: Shape, loaded: int, sums: int) -> float:
    """Count instructions from the type of the tensors to float32 and back."""
    if shape.dtype == "float32":
        return 0.0
    return loaded * (1.5 if shape.dtype == "bfloat16" else 1.0) + 0.5 * sums


def halo(shape: Shape, rows: int, cols: int) -> float:
    """Divide the inputs that a block of results reads by those that are its own."""
    ratio = 1.0
    for axis, count in enumerate((rows, cols)):
        results = min(count, (shape.result_height, shape.result_width)[axis])
        own = results * step(shape, axis) / phases(shape, axis)
        read = min(reach(shape, axis, results), (shape.height, shape.width)[axis])
        ratio *= max(1.0, read / own)
    return ratio
