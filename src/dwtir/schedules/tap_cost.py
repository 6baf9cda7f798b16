"""What a tile of `tap_sums` is expected to take: the model by which one is chosen by hand.

A multiprocessor runs as many blocks at a time as its registers and its shared memory hold.
A turn of theirs, one tile of outputs for each thread, takes as long as it takes to issue
their instructions, to move their lines through the L1 cache, and to wait for the loads of
one thread, which overlap in part. A block takes as long as its turns and, at the end, the
sums over its threads; that many times over as there are rounds of blocks, or else as long
as memory takes for the tensors, the rows that two tiles share among them. Then the second
kernel runs over the parts.

The constants are fitted to 809 kernels of 24 layers, measured on an H200, by how much slower
the kernel is that the model prefers than the best of the same layer: 3 % in the geometric
mean, on layers left out of the fit as well, where one taken at random is 36 % slower. They
serve to compare tiles of one layer, and say little about a time. The measurements and the
program that fits the constants are in the history: ``git show 139d1f6:bench/fit_tap_cost.py``.
"""

from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..shape import Shape
from ..target import Target
from .tiles import MAX_BLOCKS, MAX_THREADS, REGISTERS, SHARED

Numbers: TypeAlias = NDArray[np.float64]

_SCHEDULERS = 4
_MOST_REGISTERS = 255
_LINE = 128  # bytes
_SECTOR = 32  # bytes

# Registers of a thread that hold no inputs: of every one, and by sum.
_REGISTERS, _PER_SUM = 12.5, 0.593

# Sums and loaded values of a tile that ptxas finds room for, by the registers that `min_blocks`
# leaves: where all tiles are whole, and else. Of 1673 such kernels none spilled, and five were
# compiled again without `min_blocks`; of 897 others, 282.
_SPREAD, _HELD = 1.45, 0.9

# Instructions of a turn, beside one for each multiply-add.
_LOAD, _CONVERSION, _START = 1.84, 2.32, 11.8
_OVERHANG = 0.438  # by multiply-add, where columns hang over the last
_GUARD = 0.0052  # more of them, where a thread may be beyond the last tile
_AGAIN = 0.0639  # more of them, where registers hold a fraction of what is loaded

# Cycles of a turn of a thread that runs alone.
_WAIT, _MORE_WAITS, _ALONE, _PER_LOAD = 148.0, 0.0422, 1.2, 1.38

_PER_LINE, _PER_WORD = 0.267, 0.416  # cycles of the L1 cache, of 128 bytes and of 4 for each thread
_TOGETHER, _WITH_MEMORY = 1.7, 1.79  # exponents: 1 adds times up, a large one takes the longest
_LAST_ROUND, _LAST_TURN = 0.43, 0.179  # of a last round or turn that is not full
_LARGE_BLOCK = 0.00251  # lost for each warp of a block above four

# Cycles of a block's end: of every one, by sum of a thread, by sum over threads.
_END, _END_SUM, _END_THREAD = 1.09e3, 5.46, 17.7

_CLOCK, _BANDWIDTH, _HALO_BANDWIDTH = 1.755e9, 4.8e12, 1.42e13  # Hz, bytes/s, bytes/s
LAUNCH, _PER_PART, _PARTS_BANDWIDTH = 3.08e-6, 8.2e-9, 7.76e12  # s, s, bytes/s


class Tiles(NamedTuple):
    """The fields of `TapSums`, one value for each tile."""

    rows: Numbers
    cols: Numbers
    kernel_rows: Numbers
    kernel_cols: Numbers
    vector: Numbers
    channels: Numbers
    threads: Numbers
    parts: Numbers
    part_threads: Numbers
    kernel_threads: Numbers
    lanes: Numbers
    grad_lanes: Numbers
    min_blocks: Numbers


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


def warps_of(tiles: Any) -> Any:
    """Count the warps of a block."""
    return np.ceil(tiles.channels * tiles.threads * tiles.kernel_threads / 32)


def shared_bytes(tiles: Any) -> Any:
    """Count the bytes of shared memory in which a block leaves its sums."""
    sums = tiles.kernel_rows * tiles.kernel_cols * tiles.vector
    return 4 * sums * tiles.channels * tiles.threads * tiles.kernel_threads


def allocated_bytes(tiles: Any, shape: Shape) -> Any:
    """Count the bytes that TVM takes for that: also the places in the sums of the last, idle threads."""
    taps, channels = tiles.kernel_rows * tiles.kernel_threads, tiles.vector * tiles.channels
    of_tap = tiles.kernel_cols * channels
    inner = np.where(taps > 1, of_tap, np.where(tiles.kernel_cols > 1, channels, 1))
    most = np.where(taps > 1, shape.kernel[0], np.where(tiles.kernel_cols > 1, shape.kernel[1], shape.in_channels))
    threads = tiles.channels * tiles.threads * tiles.kernel_threads
    outer = np.minimum(most, np.ceil(np.ceil(taps * of_tap / threads) * threads / inner))
    return 4 * tiles.threads * np.where(taps * of_tap > 1, outer * inner, 1)


def is_held(tiles: Any, shape: Shape, exact: Any = None) -> Any:
    """Tell whether registers hold a tile: its sums, inputs and gradients.

    Where no thread, row, column or channel is beyond the last, which `exact` says where it is
    known, the loads of a tile are under no common test, and ptxas spreads them over its products:
    it holds a part of the tile at a time, at least a row of the window, and halves as they are
    loaded. One sum always fits.
    """
    height, width = window(tiles, shape)
    sums = tiles.kernel_rows * tiles.kernel_cols * tiles.vector
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


def estimate(tiles: Any, shape: Shape, target: Target, registers: Any = None) -> Numbers:
    """Estimate the seconds of both kernels, for comparison with other tiles of the layer.

    Where a thread's registers are known, so are the blocks at a time. Else these are `min_blocks`,
    for ptxas may take all the registers that those leave.
    """
    height, width = window(tiles, shape)
    sums = tiles.kernel_rows * tiles.kernel_cols * tiles.vector
    outputs = tiles.rows * tiles.cols
    inputs, grads = _vectors(tiles, height, width), _grads(tiles)
    size = shape.itemsize
    warps = warps_of(tiles)

    # Instructions of a turn.
    limit = _register_limit(warps * tiles.min_blocks)
    loaded = loaded_registers(tiles, shape)
    own = _REGISTERS + _PER_SUM * sums
    tight = np.maximum(0, loaded / np.maximum(6, limit - own) - 1)
    more = (1 + _AGAIN * tight) * (1 + _GUARD * ~is_exact(tiles, shape))
    overhang = _OVERHANG * (shape.out_width % tiles.cols != 0)
    converted = (height * width + outputs) * tiles.vector * (size == 2)
    instructions = (1 + overhang) * sums * outputs + _LOAD * (inputs + grads)
    instructions = more * (instructions + _CONVERSION * converted + _START)

    # Blocks of a multiprocessor at a time.
    fitting = tiles.min_blocks
    if registers is not None:
        fitting = _SCHEDULERS * (REGISTERS // (32 * _SCHEDULERS) // registers) // warps
        for bound in (MAX_BLOCKS, MAX_THREADS // 32 // warps, SHARED // (1024 + shared_bytes(tiles))):
            fitting = np.minimum(fitting, bound)
    fitting = np.maximum(1, fitting)
    blocks = tiles.parts * other_blocks(tiles, shape) / target.units
    active = np.minimum(fitting, np.ceil(blocks))

    # A turn, and a block.
    issue = np.maximum(1, active * warps / _SCHEDULERS) * instructions
    of_inputs, of_grads = _lines(tiles, shape)
    lines = inputs * of_inputs + grads * of_grads
    words = np.maximum(tiles.vector, tiles.lanes) * inputs
    words = (words + np.maximum(tiles.vector, tiles.grad_lanes) * grads) * size / 4
    cache = active * warps * (lines * _PER_LINE + words * _PER_WORD)
    alone = _WAIT * (1 + _MORE_WAITS * tight) + _ALONE * instructions
    alone = alone + _PER_LOAD * (inputs + grads)
    turn = (issue**_TOGETHER + cache**_TOGETHER + alone**_TOGETHER) ** (1 / _TOGETHER)
    turns = tiles_of_channel(tiles, shape) / (tiles.threads * tiles.parts)
    turns = np.maximum(1, turns + _LAST_TURN * (np.ceil(turns) - turns))
    end = _END_SUM * sums * np.maximum(1, active * warps / _SCHEDULERS)
    end = end + _END + _END_THREAD * tiles.threads * np.ceil(sums / tiles.threads)
    rounds = np.maximum(1, blocks / fitting)
    rounds = rounds + _LAST_ROUND * (np.ceil(rounds) - rounds)
    busy = rounds * (turns * turn + end) / _CLOCK * (1 + _LARGE_BLOCK * np.maximum(0, warps - 4))

    memory = _memory_seconds(tiles, shape)
    first = (busy**_WITH_MEMORY + memory**_WITH_MEMORY) ** (1 / _WITH_MEMORY)
    return np.asarray(LAUNCH + first + parts_seconds(shape, tiles.parts, tiles.part_threads))


def parts_seconds(shape: Shape, parts: Any, part_threads: Any) -> Any:
    """Estimate the time of the second kernel; `LAUNCH` is that of both launches."""
    moved = 8 * prod(shape.weight_shape) * parts
    return _PER_PART * parts / part_threads + moved / _PARTS_BANDWIDTH


def _register_limit(warps: Any) -> Any:
    """Return the registers of a thread, if an SM is to have room for so many warps.

    Each of its four schedulers has a quarter of them, and of the warps.
    """
    warps = _SCHEDULERS * np.ceil(warps / _SCHEDULERS)
    return np.minimum(_MOST_REGISTERS, REGISTERS // (32 * warps) // 8 * 8)


def _vectors(tiles: Any, height: Any, width: Any) -> Any:
    """Count the loads of inputs; a row of vectors in NCHW begins anywhere in the first."""
    return height * np.where(tiles.lanes == 1, width, (width - 2) // tiles.lanes + 2)


def _grads(tiles: Any) -> Any:
    return tiles.rows * tiles.cols / tiles.grad_lanes


def _lines(tiles: Any, shape: Shape) -> tuple[Any, Any]:
    """Count the lines of the L1 cache that a warp touches in a load, of inputs and of gradients.

    Threads over kernel rows load the same gradients, and rows of the input that one another's
    tiles begin at.
    """
    channels = np.minimum(32, tiles.channels)
    of_warp = np.minimum(tiles.threads, 32 / channels)
    kernel_rows = np.clip(32 / (channels * of_warp), 1, tiles.kernel_threads)
    across = np.minimum(of_warp, np.ceil(shape.out_width / tiles.cols))
    rows = of_warp / across
    apart = tiles.rows * shape.stride[0] / (tiles.kernel_rows * shape.dilation[0])
    distinct = np.minimum(rows * kernel_rows, (rows - 1) * apart + kernel_rows)
    if shape.layout == "NHWC":
        run = np.ceil(channels * tiles.vector * shape.itemsize / _LINE)
        return distinct * across * run, rows * across * run
    size = shape.itemsize * across / _LINE
    data = np.clip(size * np.maximum(tiles.lanes, tiles.cols * shape.stride[1]), 1, across)
    grads = np.clip(size * np.maximum(tiles.grad_lanes, tiles.cols), 1, across)
    return distinct * data, rows * grads


def _memory_seconds(tiles: Any, shape: Shape) -> Any:
    """Estimate the time of the tensors, and that of rows which two tiles load."""
    kernel_h, kernel_w = shape.kernel
    kernel_rows = tiles.kernel_rows * tiles.kernel_threads
    down = tiles.rows * shape.stride[0]
    height = down - shape.stride[0] + (kernel_rows - 1) * shape.dilation[0] + 1
    data, grad = (prod(sizes) * shape.itemsize for sizes in shape.input_shapes.values())
    read = data * np.maximum(1, height / down) * shape.channel_multiplier + grad
    read = read * (kernel_h / kernel_rows) * (kernel_w / tiles.kernel_cols)
    if shape.layout == "NHWC":
        run = tiles.channels * tiles.vector * shape.itemsize
        read = read * np.ceil(run / _SECTOR) * _SECTOR / run
    return shape.least_bytes / _BANDWIDTH + np.maximum(0, read - data - grad) / _HALO_BANDWIDTH
