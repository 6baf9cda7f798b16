"""`banded_matrix` with planes in shared memory: the choice of a tile, and the copies."""

from collections.abc import Callable
from math import ceil, prod

from ..bands import COLUMNS, Bands
from ..shape import Shape
from ..sheets import BANKS
from ..target import Target
from ..typed import SBlockRV, Schedule
from .loops import bind_threads, compute_at
from .tiles import MAX_BLOCKS, REGISTERS, SHARED

_LEAST_TAPS, _MANY_TAPS, _MOST_TAPS, _SECTOR = 9, 25, 49, 16
"""Taps between which planes pay; with less than many not where rows are whole sectors, which others load by vectors."""

_LEAST_TURNS, _SOME, _MANY = 2, 5, 24
"""Turns of blocks, and warps with many taps and with few, for each SM, from which on they pay."""

_FULL, _MOST_ALIKE = 0.6, 2
"""The least share of tiles' columns that are results, and the most loads of which all but one wait."""

_ROWS, _TURNS = range(5, 19), {4: (2,), 8: (2, 4)}
"""Rows of tiles, and turns by the halves of a vector, worth trying: a loop with many copies is slow."""

_LARGE, _FEW_WARPS = 64, 16
"""Columns above which others are faster where 16 bytes are aligned, and warps of an SM below which they always are."""

# Of 1100 kernels of 31 layers on an H200: registers of a thread, and for each row of a tile; what loads of a lane's row
# of inputs cost, results, a tile, a row of it by its registers, waits, and how cost grows by rows that are no results.
# The choice of heights is 1 % behind the best. And rows of warps' tiles that keep an SM busy.
_LEAST_REGISTERS, _PER_ROW = 36, 5.2
_OF_INPUTS, _OF_RESULTS, _OF_TILE, _OF_ROOM, _OF_WAITS, _OF_WASTE = 6.0, 1.6, 10, 1.94, 0.85, 2.6
_BUSY_ROWS = 140


def choose(bands_of: Callable[[int], Bands], shape: Shape, target: Target) -> dict[str, int] | None:
    """Choose the fields of a tile, of bands by their rows, if there are enough planes, and tiles are nearly full."""
    taps, is_aligned = prod(shape.kernel), shape.source[1] % _SECTOR == 0
    if shape.source[1] > _LARGE and shape.source[1] % 8 == 0 and taps > _MANY_TAPS:
        return None
    if not (_MANY_TAPS if is_aligned else _LEAST_TAPS) <= taps <= _MOST_TAPS:
        return None
    candidates = [bands for bands in map(bands_of, _ROWS) if bands.can_stage and _pays(bands, target)]
    if not candidates:
        return None
    bands = min(candidates, key=_of_rows)
    tried = _TURNS[bands.sheet.vector][: 1 + (bands.images > 1)]  # of one image, two always take less
    turns = min(tried, key=lambda turns: _of_turns(bands, turns, target.units))
    turns = min(turns, bands.groups // bands.sides)
    return {"rows": bands.rows, "warps": bands.sides, "min_blocks": _at_a_time(bands, turns), "turns": turns}


def stage(sch: Schedule, bands: Bands, store: SBlockRV, warps: int, turns: int, *, has_residual: bool) -> None:
    """Let planes come and leave by way of shared memory, by vectors that a block's threads share.

    Those of the next turn, and what its results are added to, begin to come before a turn's sums.
    """
    _, turn, *_ = sch.get_loops(store)
    spread = sch.get_sblock("spread")
    sch.set_scope(store, 0, "shared.dyn")
    sch.reverse_compute_at(spread, turn, preserve_unit_loops=True)
    sch.storage_align(store, 0, 2, BANKS, bands.leaving.pitch % BANKS)
    sheets = {"sheet": bands.sheet} | ({"beside": bands.leaving} if has_residual else {})
    loads = {sch.get_sblock(name): sheet for name, sheet in sheets.items()}
    for load, sheet in loads.items():
        compute_at(sch, load, turn, "shared.dyn")
        sch.storage_align(load, 0, 2, BANKS, sheet.pitch % BANKS)
    for block in (*loads, spread):
        *_, planes, images, vectors, vector = sch.get_loops(block)
        rounds, warp, lane = sch.split(sch.fuse(planes, images, vectors), [None, warps, 32])
        bind_threads(sch, warp, lane)
        sch.vectorize(vector)
        sch.unroll(rounds)
    if turns > 1:
        stages = [*[0] * len(loads), 1, 1, 1]  # of loads; zeros, products and ends of sums, and the store
        sch.annotate(turn, "software_pipeline_stage", stages)
        sch.annotate(turn, "software_pipeline_order", list(range(len(stages))))
        sch.annotate(turn, "software_pipeline_async_stages", [0])


def _pays(bands: Bands, target: Target) -> bool:
    shape = bands.shape
    warps = bands.groups * shape.result_channels / target.units
    return (
        bands.staged_bytes(2, has_residual=True) <= target.most_shared_bytes
        and bands.sheet.alike <= _MOST_ALIKE
        and bands.images * 2 <= shape.batch
        and _at_a_time(bands, 2) * bands.sides >= _FEW_WARPS
        and warps >= _LEAST_TURNS * bands.sides
        and warps >= (_SOME if prod(shape.kernel) >= _MANY_TAPS else _MANY)
        and shape.result_width > _FULL * bands.across * COLUMNS
    )


def _of_rows(bands: Bands) -> float:
    rows, shape = bands.rows, bands.shape
    loads, stores = (1 + _OF_WAITS * (sheet.alike - 1) for sheet in (bands.sheet, bands.leaving))
    cost = _OF_INPUTS * loads * bands.window_rows(shape.kernel[0]) / rows
    cost += _OF_RESULTS * stores + _OF_TILE + _OF_ROOM * rows
    return float(cost * (bands.down * rows / shape.result_height) ** _OF_WASTE)


def _at_a_time(bands: Bands, turns: int) -> int:
    threads, shared = 32 * bands.sides, bands.staged_bytes(turns) + 1024
    registers = ceil((_LEAST_REGISTERS + _PER_ROW * bands.rows) / 8) * 8
    return min(MAX_BLOCKS, SHARED // shared, REGISTERS // (threads * registers))


def _of_turns(bands: Bands, turns: int, units: int) -> float:
    """Estimate the time of an SM's planes, to compare turns.

    The last blocks take as long as those that keep an SM busy. First planes are waited for, half of a turn.
    """
    together = _at_a_time(bands, turns)
    few = min(together, _BUSY_ROWS / bands.rows / bands.sides)
    blocks = ceil(bands.groups / (bands.sides * turns)) * bands.shape.result_channels / units
    full, rest = divmod(blocks, together)
    sums = turns * (full * together + (max(few, ceil(rest)) if rest else 0))
    return sums + (min(together, ceil(blocks)) + few * (ceil(blocks / together) - 1)) / 2
