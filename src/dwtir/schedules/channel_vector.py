"""NHWC: every thread computes a few pixels of one vector of channels.

Loop nest, for a thread's rows x cols outputs of `vector` channels::

    blockIdx.x = n * (oh tiles) * (ow tiles) * (channel tiles)
      threadIdx.z = oh / rows    threadIdx.y = ow / cols    threadIdx.x = c / vector
        weight_local[KH, KW, vector] = weight                            "tile"
        window[(rows-1)*SH + (KH-1)*DH + 1, same for w, vector] = data or 0
        for kh:
          weight_local[KW, vector], window[rows, ..., vector]            "row"
          for kw:
            weight_local[vector], window[rows, cols, vector]             "tap"
            for oh, ow: for lanes: acc += window * weight_local
        out_local = epilogue(acc)
        out = out_local

Data, weights and outputs move as vectors of `vector` channels, 16 bytes where
the channels allow it; a warp's accesses are contiguous. The arithmetic is in
scalars, for CUDA has no vectors of 8 floats.

Registers: vector * (KH rows of the window + sums + weights). No shared memory:
threads share their halo through L1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..shape import DepthwiseConv2dShape
from ..target import Target
from .base import Strategy, get_blocks, stage_operands, stage_output, unroll_in_source
from .tiles import (
    MAX_LOADS,
    MAX_UNROLLED,
    REGISTERS,
    even_tile,
    even_tiles,
    inputs_of,
    loads_of,
    occupy,
    reach,
    step,
    taps,
    threads_over,
    unrolled_of,
    whole_phases,
    windows_of,
    with_value,
)

if TYPE_CHECKING:
    from tvm.s_tir import Schedule

__all__ = ["ChannelVector"]

_REGISTERS = 136
"""Registers for the window's rows in use and the sums. The rest of 255 is for weights,
addresses, and the loads under way; with less of it some shapes spill."""

_MOST_REGISTERS = 200
"""Registers by the same count, above which every kernel spills."""


@dataclass(frozen=True)
class ChannelVector(Strategy):
    """Tile of the NHWC channel vectors.

    Parameters
    ----------
    rows, cols : int
        Output pixels of one thread.
    vector : int
        Output channels of one thread: a power of two that divides them, and that
        divides the channel multiplier or is a multiple of it.
    thread_x, thread_y, thread_z : int
        Threads of a block over channel vectors, columns and rows of tiles.
    window : {"tile", "row", "tap"}
        Whether registers hold the whole input window, that of one kernel row or of one tap.
    """

    name: ClassVar[str] = "channel_vector"
    layouts: ClassVar[tuple[str, ...]] = ("NHWC",)
    operations: ClassVar[tuple[str, ...]] = ("forward", "grad_data")

    rows: int
    cols: int
    vector: int
    thread_x: int
    thread_y: int
    thread_z: int
    window: str = "tile"

    @classmethod
    def choose(cls, shape: DepthwiseConv2dShape, target: Target) -> ChannelVector:
        """Choose the tile by what limits it: registers, loads per output, idle threads.

        Columns: a window is KW-1 columns wider than its outputs, so with about
        KW-1 of them half of what is loaded is new. Rows likewise, up to 8.
        Vector: the widest whose window and sums fit, if need be with half the rows.
        The larger the kernel, the fewer channels: reusing a window of 7x7 taps is
        worth more than a wide load. Eight halves become eight floats, so that only
        a 1x1 kernel has the registers for them. Where no window fits, the kernel's
        rows come one by one.
        """
        halo = max(2, shape.kernel[1] - 1)
        widths = {
            whole_phases(shape, 1, n)
            for n in range(1, min(7, shape.result_width) + 1)
            if n <= halo + 1
        }
        cols = min(
            widths,
            key=lambda n: (-(-shape.result_width // n) * n * (1 + abs(n - halo) / 16), -n),
        )
        tall = even_tile(shape, 0, max(1, 8 // step(shape, 0)))
        vectors = tuple(n for n in _vectors(shape) if n <= 4 or shape.kernel == (1, 1))
        heights = (tall, whole_phases(shape, 0, -(-tall // 2)))
        tiles = ((rows, cols, n, "tile") for n in reversed(vectors) for rows in heights)
        narrow = max(n for n in vectors if n <= max(2, vectors[0]))
        rest = (
            (whole_phases(shape, 0, 1, w), whole_phases(shape, 1, cols, w), narrow, w)
            for w in windows_of(shape)
            if w != "tile"
        )

        def fits(rows: int, cols: int, vector: int, window: str) -> bool:
            tile = cls(rows, cols, vector, 1, 1, 1, window)
            return (
                (window != "tile" or tile._registers(shape) <= _REGISTERS)
                and loads_of(shape, rows, cols, window) <= MAX_LOADS
                and unrolled_of(shape, rows * cols * vector, window) <= MAX_UNROLLED
            )

        rows, cols, vector, window = next(tile for tile in (*tiles, *rest) if fits(*tile))
        rows, cols, vector = occupy(shape, target, rows, cols, vector, window)
        vector = max(n for n in vectors if n <= max(vector, vectors[0]))

        # A warp's access is as long as its channels are contiguous: channels first.
        thread_x = threads_over(shape.result_channels // vector, 128)
        thread_y = threads_over(-(-shape.result_width // cols), max(1, 128 // thread_x))
        thread_z = threads_over(
            -(-shape.result_height // rows), max(1, min(64, 128 // (thread_x * thread_y)))
        )
        return cls(rows, cols, vector, thread_x, thread_y, thread_z, window)

    @classmethod
    def space(cls, shape: DepthwiseConv2dShape, target: Target) -> dict[str, tuple[int, ...]]:
        chosen = cls.choose(shape, target)
        counts = [threads_over(shape.result_channels // lanes, 128) for lanes in _vectors(shape)]
        return {
            "rows": with_value(
                chosen.rows, even_tiles(shape, 0, (1, 2, 4, 7, 8, 14), chosen.window)
            ),
            "cols": with_value(
                chosen.cols, even_tiles(shape, 1, (1, 2, 3, 4, 7, 8), chosen.window)
            ),
            "vector": _vectors(shape),
            "thread_x": with_value(chosen.thread_x, (8, 16, 32, 64, *counts)),
            "thread_y": with_value(chosen.thread_y, (1, 2, 4, 7, 8, 16)),
            "thread_z": with_value(chosen.thread_z, (1, 2, 4, 8)),
        }

    def is_promising(self, shape: DepthwiseConv2dShape) -> bool:
        sums = self.rows * self.cols * self.vector
        most = min(_MOST_REGISTERS, REGISTERS // (self.thread_x * self.thread_y * self.thread_z))
        return unrolled_of(shape, sums, self.window) <= MAX_UNROLLED and (
            self.window != "tile" or self._registers(shape) <= most
        )

    def check(self, shape: DepthwiseConv2dShape, target: Target) -> None:
        self._require_window(shape, self.window)
        loads = loads_of(shape, self.rows, self.cols, self.window)
        self._require(loads <= MAX_LOADS, "unrolled loads", loads, f"at most {MAX_LOADS}")
        self._require(self.vector in _vectors(shape), "vector", self.vector, f"{_vectors(shape)}")
        self._require_whole_phases(shape, self.rows, self.cols, self.window)
        self._require(self.thread_z <= 64, "thread_z", self.thread_z, "at most 64")
        sums = self.rows * self.cols * self.vector
        self._require(sums <= 128, "sums of a thread", sums, "at most 128")
        self._require_launch(target, threads=self.thread_x * self.thread_y * self.thread_z)

    def _registers(self, shape: DepthwiseConv2dShape) -> int:
        """Count the registers for the window's rows in use, those under one output, and sums.

        A half takes a whole one, for it is converted once and kept as a float.
        """
        window = taps(shape)[0] * reach(shape, 1, self.cols) * inputs_of(shape)
        return self.vector * (window + self.rows * self.cols)

    def apply(self, sch: Schedule, shape: DepthwiseConv2dShape) -> None:
        pad, conv, epilogue = get_blocks(sch)
        weight_local = sch.cache_read(conv, 1, "local")
        store = stage_output(sch, epilogue)

        # 1. Threads over channel vectors, columns and rows; all the rest are blocks.
        n, oh, ow, c = sch.get_loops(store)
        bz, tz, oh = sch.split(oh, [None, self.thread_z, self.rows])
        by, ty, ow = sch.split(ow, [None, self.thread_y, self.cols])
        bx, tx, c = sch.split(c, [None, self.thread_x, self.vector])
        sch.reorder(n, bz, by, bx, tz, ty, tx, oh, ow, c)
        sch.bind(sch.fuse(n, bz, by, bx), "blockIdx.x")
        sch.bind(tz, "threadIdx.z")
        sch.bind(ty, "threadIdx.y")
        sch.bind(tx, "threadIdx.x")

        # 2. Outputs are rounded one by one and leave as one vector a pixel.
        sch.compute_at(epilogue, tx, preserve_unit_loops=True)
        for loop in sch.get_loops(epilogue)[-3:]:
            sch.unroll(loop)
        stage_operands(sch, epilogue, tx, vector=True)
        sch.unroll(oh)
        sch.unroll(ow)
        sch.vectorize(c)

        # 3. Sums in registers, all taps of a kernel row for all outputs in straight line.
        sch.set_scope(conv, 0, "local")
        sch.compute_at(conv, tx, preserve_unit_loops=True)
        *_, conv_n, conv_oh, conv_ow, conv_c, kh, kw = sch.get_loops(conv)
        sch.reorder(conv_n, kh, kw, conv_oh, conv_ow, conv_c)

        # 4. Window and weights in registers, loaded as vectors. Unrolled here, because
        #    TVM proves most tests for padding away once an index is a number.
        at, unrolled = {"tile": (tx, conv_n), "row": (kh, kw), "tap": (kw, conv_oh)}[self.window]
        sch.set_scope(pad, 0, "local")
        for load in (pad, weight_local):
            sch.compute_at(load, at, preserve_unit_loops=True)
        vectorize = sch.vectorize if _is_vector(shape) else sch.unroll
        *outer, channels = sch.get_loops(pad)[-3:]
        for loop in outer:
            sch.unroll(loop)
        vectorize(channels)
        *outer, channels, filters = sch.get_loops(weight_local)[-4:]
        for loop in outer:
            sch.unroll(loop)
        vectorize(sch.fuse(channels, filters))
        unroll_in_source(sch, unrolled)


def _vectors(shape: DepthwiseConv2dShape) -> tuple[int, ...]:
    """List the vectors a thread may compute: powers of two up to 16 bytes of output.

    A vector holds all outputs of its input channels, or outputs of one alone,
    so that its inputs are a vector too. The data's gradient reads all outputs of
    a channel: that is the vector, where there are several.
    """
    multiplier = shape.channel_multiplier
    if shape.operation == "grad_data" and multiplier > 1:
        return (1,)
    return tuple(
        lanes
        for lanes in (1, 2, 4, 8)
        if lanes * shape.itemsize <= 16
        and shape.result_channels % lanes == 0
        and (lanes % multiplier == 0 or multiplier % lanes == 0)
    )


def _is_vector(shape: DepthwiseConv2dShape) -> bool:
    """Tell whether the channels that a thread reads of a pixel are a vector of the device."""
    inputs = inputs_of(shape)
    return inputs in (1, 2, 4, 8) and inputs * shape.itemsize <= 16
