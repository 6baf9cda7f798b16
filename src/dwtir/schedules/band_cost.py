"""An estimate of the time that `banded_matrix` takes in rows of an odd width."""

from math import ceil, gcd, prod

from ..bands import COLUMNS, Bands
from .band_tiles import FEW_TAPS
from .tiles import CLOCK, REGISTERS, longer

# Fitted to 224 kernels of 19 layers on an H200: a launch; bytes a second, also by the window's model, and of rows that
# begin anywhere; cycles of a start, a product, a load, a store to a row, and of a warp whose code's length doubles its
# time; warps that take as long as a wait; what an even number of tiles in a column adds; and how bytes and work come
# together.
_LAUNCH, _BANDWIDTH, _WINDOW_BANDWIDTH, _OF_ANY_ROWS = 2.2e-6, 4.2e12, 4.4e12, 3.6e12
_START, _PRODUCT, _LOAD, _STORE, _CACHED, _WAIT, _EVEN_COLUMN, _TOGETHER = 209, 5.37, 1.55, 1.72, 4040, 0.7, 0.05, 1.6
_PER_BAND = 2.5  # registers that the compiler takes, where it may
# How much longer threads take by the part of the registers they want that they have not, and blocks of one warp with
# few taps: of 880 kernels of 60 layers the choice is 3 % behind the best.
_TIGHT, _ALONE = 0.05, 0.04

OF_ANY_ROWS = 1 / _OF_ANY_ROWS - 1 / _WINDOW_BANDWIDTH
"""Seconds that a window's model leaves out for each byte."""


def expected_seconds(bands: Bands, warps: int, registers: int, units: int) -> float:
    """Estimate the time of blocks of so many warps: stores take long, in as many rows as 8 tiles lie in.

    A thread has so many registers at the most.
    """
    shape = bands.shape
    pieces = (COLUMNS - gcd(COLUMNS, bands.across)) / bands.across + 1
    inside = shape.result_height / bands.down
    is_single = shape.result_width % 2 == 1 and not bands.alternates_results
    stores = 4 * inside * pieces**2 * (1 + is_single)
    warp = _START + _PRODUCT * bands.kernel_steps * bands.products + _LOAD * bands.loads + _STORE * stores
    warp *= 1 + warp / _CACHED

    wanted = 8 * ceil((bands.loads + 4 * bands.rows + _PER_BAND * bands.band_registers) / 8)
    fitting = REGISTERS // (32 * warps * min(256, registers, wanted))
    blocks = ceil(bands.groups / warps) * shape.result_channels / units
    at_a_time = max(1.0, min(fitting, ceil(blocks)) * warps / 4)
    busy = ceil(max(1.0, blocks / fitting)) * warp * (at_a_time + _WAIT * bands.kernel_steps)
    busy *= 1 + _EVEN_COLUMN * (bands.down % 2 == 0)
    is_alone = warps == 1 and prod(shape.kernel) <= FEW_TAPS
    more = 1 + _TIGHT * max(0.0, wanted / registers - 1) + _ALONE * is_alone
    return more * longer(busy / CLOCK, shape.least_bytes / _BANDWIDTH, _TOGETHER) + _LAUNCH
