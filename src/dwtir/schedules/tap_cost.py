"""What a tile of `tap_sums` is expected to take: the model by which one is chosen by hand.

It is that of `cost` for each turn, one tile of outputs for each thread, but shared memory limits the blocks at a time
too, and what a turn takes overlaps in part. A block takes as long as its turns and the sums over its threads; that many
times over as there are rounds of blocks, or as long as memory takes, with rows that two tiles share. Of several parts,
the second kernel comes then.

The constants are fitted to 2200 kernels of 130 layers on an H200: what is preferred is 4 % slower
than the best of its layer, 5.6 % of layers left out of a fit.
"""

from collections import namedtuple
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..shape import Shape
from ..target import Target
from .cost import LINE, MOST_REGISTERS, SECTOR
from .tiles import CLOCK, REGISTERS

Numbers: TypeAlias = NDArray[np.float64]

_SCHEDULERS = 4

# Sums and loaded values of a tile that ptxas finds room for, by the registers that `min_blocks`
# leaves: where all tiles are whole, and else.
_SPREAD, _HELD = 1.45, 0.9

# Instructions of a turn, beside one for each multiply-add.
_LOAD, _CONVERSION = 2.87, 1.55
_OVERHANG = 0.58  # by multiply-add, where columns hang over the last
_GUARD = 0.14  # more of them, where a thread may be beyond the last tile

# Cycles: of a turn of a thread that runs alone, and by instruction; of the L1 cache for 128 bytes; of a
# block's end, by sum of a thread.
_WAIT, _ALONE, _PER_LINE, _END_SUM = 648.0, 1.625, 0.57, 14.8
_ROW_TESTS = 1.0  # more to wait, where rows hang over the last and each is under a test of its own
_TOGETHER, _WITH_MEMORY = 1.99, 1.81  # exponents: 1 adds times up, a large one takes the longest

_BANDWIDTH, _HALO_BANDWIDTH = 4.93e12, 1.73e13  # bytes/s
_PARTIAL = 0.1  # of a line beside its sectors
_APART = 161.0  # bytes of a turn of a block for which memory takes twice as long
LAUNCH, _SECOND, _PARTS_BANDWIDTH = 1.48e-6, 1.37e-6, 1.61e12  # s, s of the second kernel, and its bytes/s


Tiles = namedtuple(
    "Tiles",
    "rows cols kernel_rows kernel_cols vector channels threads parts part_threads kernel_threads lanes grad_lanes "
    "min_blocks",
)
"""The fields of `TapSums`, one value for each tile."""


def tiles_of_channel(tiles: Any, shape: Shape) -> Any:
    """Count the tiles of outputs of one channel."""
    across = np.ceil(shape.out_width / tiles.cols)
    return shape.batch * np.ceil(shape.out_height / tiles.rows) * across


def other_blocks(tiles: Any, shape: Shape) -> Any:
    """Count the blocks of a part: tiles of channels and of taps."""
    kernel_h, kernel_w = shape.kernel
    taps = kernel_h / (tiles.kernel_rows * tiles.kernel_threads) * (kernel_w / tiles.kernel_cols)
    channels = np.ceil(shape.in_channels / (tiles.vector * tiles.channels))
    return channels * shape.channel_multiplier * taps


def window(tiles: Any, shape: Shape) -> tuple[Any, Any]:
    """Count rows and columns of the input that a tile's products take."""
    (down, right), (row, col) = shape.stride, shape.dilation
    height = (tiles.rows - 1) * down + (tiles.kernel_rows - 1) * row + 1
    return height, (tiles.cols - 1) * right + (tiles.kernel_cols - 1) * col + 1


def sums_of(tiles: Any) -> Any:
    """Count the sums of a thread."""
    return tiles.kernel_rows * tiles.kernel_cols * tiles.vector


def threads_of(tiles: Any) -> Any:
    """Count the threads of a block."""
    return tiles.channels * tiles.threads * tiles.kernel_threads


def warps_of(tiles: Any) -> Any:
    """Count the warps of a block."""
    return np.ceil(threads_of(tiles) / 32)


def shared_bytes(tiles: Any) -> Any:
    """Count the bytes of shared memory in which a block leaves its sums."""
    return 4 * sums_of(tiles) * threads_of(tiles)


def allocated_bytes(tiles: Any, shape: Shape) -> Any:
    """Count the bytes that TVM takes for that: also the places in the sums of the last, idle threads."""
    taps, channels = tiles.kernel_rows * tiles.kernel_threads, tiles.vector * tiles.channels
    of_tap = tiles.kernel_cols * channels
    inner = np.where(taps > 1, of_tap, np.where(tiles.kernel_cols > 1, channels, 1))
    most = np.where(taps > 1, shape.kernel[0], np.where(tiles.kernel_cols > 1, shape.kernel[1], shape.in_channels))
    threads = threads_of(tiles)
    outer = np.minimum(most, np.ceil(np.ceil(taps * of_tap / threads) * threads / inner))
    return 4 * tiles.threads * np.where(taps * of_tap > 1, outer * inner, 1)


def is_held(tiles: Any, shape: Shape, exact: Any = None) -> Any:
    """Tell whether registers hold a tile: its sums, inputs and gradients. One sum always fits.

    Where nothing is beyond the last, as `exact` may say, loads are under no common test, and ptxas spreads them over
    the products: it holds a part of the tile at a time, at least a row of the window, and halves as they are loaded.
    """
    height, width = window(tiles, shape)
    sums = sums_of(tiles)
    values = (height * width + tiles.rows * tiles.cols) * tiles.vector
    limit = _register_limit(warps_of(tiles) * tiles.min_blocks)
    exact = is_exact(tiles, shape) if exact is None else exact
    spread = exact & (sums + loaded_registers(tiles, shape) <= _SPREAD * limit)
    spread &= sums + width * tiles.vector <= limit
    return spread | (sums + values <= _HELD * limit) | (sums == 1)


def is_exact(tiles: Any, shape: Shape) -> Any:
    """Tell whether no thread, row, column or channel is beyond the last."""
    exact = tiles_of_channel(tiles, shape) % (tiles.threads * tiles.parts) == 0
    for count, part in (
        (shape.out_height, tiles.rows),
        (shape.out_width, tiles.cols),
        (shape.in_channels, tiles.vector * tiles.channels),
    ):
        exact &= count % part == 0
    return exact


def loaded_registers(tiles: Any, shape: Shape) -> Any:
    """Count the registers that the loads of a tile fill, halves of a vector two by two."""
    height, width = window(tiles, shape)
    words = shape.itemsize / 4
    of_data = np.maximum(1, np.maximum(tiles.vector, tiles.lanes) * words)
    of_grad = np.maximum(1, np.maximum(tiles.vector, tiles.grad_lanes) * words)
    return _vectors(tiles, height, width) * of_data + _grads(tiles) * of_grad


def estimate(tiles: Any, shape: Shape, target: Target) -> Numbers:
    """Estimate the seconds of both kernels.

    Blocks at a time are `min_blocks`, for ptxas may take all the registers that those leave.
    """
    height, width = window(tiles, shape)
    sums = sums_of(tiles)
    outputs = tiles.rows * tiles.cols
    inputs, grads = _vectors(tiles, height, width), _grads(tiles)
    size = shape.itemsize
    warps = warps_of(tiles)

    # Instructions of a turn.
    more = 1 + _GUARD * ~is_exact(tiles, shape)
    overhang = _OVERHANG * (shape.out_width % tiles.cols != 0)
    converted = (height * width + outputs) * tiles.vector * (size == 2)
    instructions = (1 + overhang) * sums * outputs + _LOAD * (inputs + grads)
    instructions = more * (instructions + _CONVERSION * converted)

    # Blocks of a multiprocessor at a time.
    fitting = np.maximum(1, tiles.min_blocks)
    blocks = tiles.parts * other_blocks(tiles, shape) / target.units
    active = np.minimum(fitting, np.ceil(blocks))

    # A turn, and a block.
    turns = tiles_of_channel(tiles, shape) / (tiles.threads * tiles.parts)
    issue = np.maximum(1, active * warps / _SCHEDULERS) * instructions
    of_inputs, of_grads = _lines(tiles, shape)
    lines = inputs * of_inputs + grads * of_grads
    cache = active * warps * lines * _PER_LINE
    tested = (shape.out_height % tiles.rows != 0) & (turns == np.ceil(turns))
    alone = (_WAIT + _ALONE * instructions) * (1 + _ROW_TESTS * tested)
    turn = (issue**_TOGETHER + cache**_TOGETHER + alone**_TOGETHER) ** (1 / _TOGETHER)
    end = _END_SUM * sums * np.maximum(1, active * warps / _SCHEDULERS)
    busy = np.ceil(blocks / fitting) * (np.ceil(turns) * turn + end) / CLOCK

    together = tiles.threads * tiles.rows * tiles.cols * tiles.channels * tiles.vector * size
    memory = _memory_seconds(tiles, shape) * (1 + _APART / together)
    first = (busy**_WITH_MEMORY + memory**_WITH_MEMORY) ** (1 / _WITH_MEMORY)
    return np.asarray(LAUNCH + first + parts_seconds(shape, tiles.parts))


def parts_seconds(shape: Shape, parts: Any) -> Any:
    """Estimate the time of the second kernel, which several parts take."""
    return np.where(np.asarray(parts) > 1, _SECOND + 8 * prod(shape.weight_shape) * parts / _PARTS_BANDWIDTH, 0)


def _register_limit(warps: Any) -> Any:
    """Return the registers of a thread, if an SM has room for so many warps: each scheduler has a quarter of both."""
    warps = _SCHEDULERS * np.ceil(warps / _SCHEDULERS)
    return np.minimum(MOST_REGISTERS, REGISTERS // (32 * warps) // 8 * 8)


def _vectors(tiles: Any, height: Any, width: Any) -> Any:
    """Count the loads of inputs; a row of vectors in NCHW begins anywhere in the first."""
    return height * np.where(tiles.lanes == 1, width, (width - 2) // tiles.lanes + 2)


def _grads(tiles: Any) -> Any:
    return tiles.rows * tiles.cols / tiles.grad_lanes


def _lines(tiles: Any, shape: Shape) -> tuple[Any, Any]:
    """Count the lines of the L1 cache that a warp touches in a load, of inputs and of gradients.

    Threads over kernel rows load the same gradients, and in part the same rows of the input.
    """
    met = 1 + (32 - np.gcd(np.asarray(tiles.channels, int), 32)) / tiles.channels
    channels = np.minimum(32, tiles.channels)
    of_warp = np.minimum(tiles.threads, met)
    kernel_rows = np.clip(32 / (channels * of_warp), 1, tiles.kernel_threads)
    across = np.minimum(of_warp, np.ceil(shape.out_width / tiles.cols))
    rows = of_warp / across
    apart = tiles.rows * shape.stride[0] / (tiles.kernel_rows * shape.dilation[0])
    distinct = np.minimum(rows * kernel_rows, (rows - 1) * apart + kernel_rows)
    if shape.layout == "NHWC":
        run = np.ceil(channels * tiles.vector * shape.itemsize / LINE)
        return distinct * across * run, rows * across * run
    size = shape.itemsize * across / LINE
    data = np.clip(size * np.maximum(tiles.lanes, tiles.cols * shape.stride[1]), 1, across)
    grads = np.clip(size * np.maximum(tiles.grad_lanes, tiles.cols), 1, across)
    return distinct * data, rows * grads


def _memory_seconds(tiles: Any, shape: Shape) -> Any:
    kernel_h, kernel_w = shape.kernel
    kernel_rows = tiles.kernel_rows * tiles.kernel_threads
    down = tiles.rows * shape.stride[0]
    height = down - shape.stride[0] + (kernel_rows - 1) * shape.dilation[0] + 1
    data, grad = (prod(sizes) * shape.itemsize for sizes in shape.input_shapes.values())
    read = data * np.maximum(1, height / down) * shape.channel_multiplier + grad
    read = read * (kernel_h / kernel_rows) * (kernel_w / tiles.kernel_cols)
    if shape.layout == "NHWC":
        run = tiles.channels * tiles.vector * shape.itemsize
        sectors, lines = (np.ceil(run / size) * size / run for size in (SECTOR, LINE))
        read = read * sectors * (1 + _PARTIAL * (lines - 1))
    return shape.least_bytes / _BANDWIDTH + np.maximum(0, read - data - grad) / _HALO_BANDWIDTH
