"""NCHW: every thread keeps the input window of its outputs in registers.

Loop nest, for a thread's rows x cols outputs of one channel::

    blockIdx.x = (n * c / thread_z) * (oh tiles) * (ow tiles)
      threadIdx.z = n * c     threadIdx.y = oh / rows     threadIdx.x = ow / cols
        window[(rows-1)*SH + (KH-1)*DH + 1, same for w] = data or 0   "tile"
        for kh:
          window[rows, (cols-1)*SW + (KW-1)*DW + 1] = data or 0       "row"
          for kw:
            window[rows, cols] = data or 0                            "tap"
            for oh, ow: acc += window * weight
        out = epilogue(acc)

With ``window="tile"`` all taps are unrolled and each input of the window is
loaded once. Kernels too large for that keep the loop over their rows, and each
of those loads its own inputs: ``"row"``. With hundreds of columns, or a dilation
that leaves most of a window unused, each tap loads its own: ``"tap"``.

Registers: KH rows of the window (in "row": `rows` of them) + rows*cols sums, and
as many weights as are left room for: they are the same for a whole warp, or nearly.
No shared memory: neighbouring threads share their halo through L1.
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
    largest_divisor,
    loads_of,
    occupy,
    phases,
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

__all__ = ["RegisterWindow"]

_REGISTERS = 200
"""Registers that window and sums may take, of 255; addresses, predicates and the weights
of the moment take the rest."""

_MOST_REGISTERS = 260
"""Registers by the same count, above which every kernel spills."""


@dataclass(frozen=True)
class RegisterWindow(Strategy):
    """Tile of the NCHW register window.

    Parameters
    ----------
    rows, cols : int
        Outputs of one thread. `cols` divides the output width where that is
        even, for then the outputs of a row are stored as one vector.
    thread_x, thread_y, thread_z : int
        Threads of a block over columns, rows and channels.
    window : {"tile", "row", "tap"}
        Whether registers hold the whole input window, that of one kernel row or of one tap.
    """

    name: ClassVar[str] = "register_window"
    layouts: ClassVar[tuple[str, ...]] = ("NCHW",)
    operations: ClassVar[tuple[str, ...]] = ("forward", "grad_data")

    rows: int
    cols: int
    thread_x: int
    thread_y: int
    thread_z: int
    window: str = "tile"

    @classmethod
    def choose(cls, shape: DepthwiseConv2dShape, target: Target) -> RegisterWindow:
        """Choose the tile by what limits it: registers, the width of loads, idle threads.

        Columns: with stride 1, four: a warp's load spreads over as many cache lines
        as it may ask for at once, and a store is one vector. A larger stride spreads
        the loads already and leaves less to share. Odd widths are stored one by one,
        and two columns share most of their window.
        Rows: every thread loads the halo of KH-1 rows anew, so the taller the
        better, up to 8, where the halo of a 3x3 kernel costs a quarter.
        """
        widest = 1 if step(shape, 1) > 1 else 2 if shape.result_width % 2 else 4
        columns = _allowed_columns(shape)
        allowed = [n for n in columns if n <= min(widest, shape.result_width)] or [columns[0]]

        def widths(window: str) -> list[int]:
            return [n for n in allowed if n == whole_phases(shape, 1, n, window)] or [1]

        def fits(rows: int, cols: int, window: str) -> bool:
            tile = cls(rows, cols, 1, 1, 1, window)
            return (
                tile._registers(shape) <= _REGISTERS
                and loads_of(shape, rows, cols, window) <= MAX_LOADS
                and unrolled_of(shape, rows * cols, window) <= MAX_UNROLLED
            )

        window, cols, least = next(
            (window, n, least)
            for window in windows_of(shape)
            for n in reversed(widths(window))
            if fits(least := whole_phases(shape, 0, 1, window), n, window)
        )
        tallest = (
            max(rows for rows in range(least, 9, least) if fits(rows, cols, window))
            if (least <= 8)
            else least
        )
        rows = even_tile(shape, 0, tallest, window)
        rows, cols, _ = occupy(shape, target, rows, cols, window=window)
        cols = max((n for n in widths(window) if n <= cols), default=widths(window)[0])

        # A block is about 256 threads: whole rows of tiles first, then the rows below
        # them, then channels. More would deal the work to the SMs too coarsely.
        thread_x = threads_over(-(-shape.result_width // cols), 64)
        thread_y = threads_over(-(-shape.result_height // rows), max(1, 256 // thread_x))
        channels = shape.batch * shape.result_channels
        thread_z = largest_divisor(channels, max(1, min(64, 256 // (thread_x * thread_y))))
        return cls(rows, cols, thread_x, thread_y, thread_z, window)

    @classmethod
    def space(cls, shape: DepthwiseConv2dShape, target: Target) -> dict[str, tuple[int, ...]]:
        chosen = cls.choose(shape, target)
        widths = [chosen.cols] if chosen.window == "tap" else _allowed_columns(shape)
        counts = [threads_over(-(-shape.result_width // cols), 64) for cols in widths]
        return {
            "rows": with_value(
                chosen.rows, even_tiles(shape, 0, (1, 2, 4, 7, 8, 14, 28), chosen.window)
            ),
            "cols": with_value(chosen.cols, widths),
            "thread_x": with_value(chosen.thread_x, (8, 16, 32, *counts)),
            "thread_y": with_value(chosen.thread_y, (1, 2, 4, 8, 16)),
            "thread_z": with_value(chosen.thread_z, (1, 2, 4, 8, 16)),
        }

    def is_promising(self, shape: DepthwiseConv2dShape) -> bool:
        sums = self.rows * self.cols
        most = min(_MOST_REGISTERS, REGISTERS // (self.thread_x * self.thread_y * self.thread_z))
        return (
            self._registers(shape) <= most and unrolled_of(shape, sums, self.window) <= MAX_UNROLLED
        )

    def check(self, shape: DepthwiseConv2dShape, target: Target) -> None:
        self._require_window(shape, self.window)
        alone = self.cols == whole_phases(shape, 1, self.cols, self.window) == 1
        self._require(
            alone or self.cols in _allowed_columns(shape),
            "cols",
            self.cols,
            f"one of {_allowed_columns(shape)}: what leaves as a vector of up to 16 bytes",
        )
        self._require_whole_phases(shape, self.rows, self.cols, self.window)
        self._require(self.thread_z <= 64, "thread_z", self.thread_z, "at most 64")
        sums = self.rows * self.cols
        self._require(sums <= 128, "sums of a thread", sums, "at most 128")
        loads = loads_of(shape, self.rows, self.cols, self.window)
        self._require(loads <= MAX_LOADS, "unrolled loads", loads, f"at most {MAX_LOADS}")
        self._require_launch(target, threads=self.thread_x * self.thread_y * self.thread_z)

    def _registers(self, shape: DepthwiseConv2dShape) -> int:
        """Count the registers that are live at once: the window's rows in use and the sums.

        The unrolled code works its way down the window, so that of a "tile" no more
        than the rows under one output are needed at a time. The weights
        are loaded again sooner than anything spills.
        """
        if self.window == "tap":
            return 2 * self.rows * self.cols
        rows = min(taps(shape)[0], reach(shape, 0, self.rows))
        rows = rows if self.window == "tile" else self.rows
        return rows * reach(shape, 1, self.cols) * inputs_of(shape) + self.rows * self.cols

    def apply(self, sch: Schedule, shape: DepthwiseConv2dShape) -> None:
        pad, conv, epilogue = get_blocks(sch)
        store = stage_output(sch, epilogue)

        # 1. Threads over channels, rows and columns of tiles; all the rest are blocks.
        n, c, oh, ow = sch.get_loops(store)
        bz, tz = sch.split(sch.fuse(n, c), [None, self.thread_z])
        by, ty, oh = sch.split(oh, [None, self.thread_y, self.rows])
        bx, tx, ow = sch.split(ow, [None, self.thread_x, self.cols])
        sch.reorder(bz, by, bx, tz, ty, tx, oh, ow)
        sch.bind(sch.fuse(bz, by, bx), "blockIdx.x")
        sch.bind(tz, "threadIdx.z")
        sch.bind(ty, "threadIdx.y")
        sch.bind(tx, "threadIdx.x")

        # 2. The outputs of a row leave as one vector.
        vector = _is_vector(shape, _allowed_columns(shape)[0])
        sch.compute_at(epilogue, tx, preserve_unit_loops=True)
        for loop in sch.get_loops(epilogue)[-2:]:
            sch.unroll(loop)
        stage_operands(sch, epilogue, tx, vector=vector)
        sch.unroll(oh)
        if vector:
            sch.vectorize(ow)
        else:
            sch.unroll(ow)

        # 3. Sums in registers, all taps of a kernel row for all outputs in straight line.
        sch.set_scope(conv, 0, "local")
        sch.compute_at(conv, tx, preserve_unit_loops=True)
        *_, conv_n, conv_c, conv_oh, conv_ow, kh, kw = sch.get_loops(conv)
        sch.reorder(conv_n, conv_c, kh, kw, conv_oh, conv_ow)

        # 4. The input window in registers. Unrolled here and not by the CUDA compiler,
        #    because TVM proves most tests for padding away once an index is a number.
        sch.set_scope(pad, 0, "local")
        at, unrolled = {"tile": (tx, conv_n), "row": (kh, kw), "tap": (kw, conv_oh)}[self.window]
        sch.compute_at(pad, at, preserve_unit_loops=True)
        for loop in sch.get_loops(pad)[-2:]:
            sch.unroll(loop)
        unroll_in_source(sch, unrolled)


def _allowed_columns(shape: DepthwiseConv2dShape) -> tuple[int, ...]:
    """List the widths of a tile: those that leave as one vector, where there are any."""
    unit, widest = phases(shape, 1), 16 // shape.itemsize
    widths = tuple(unit * n for n in (1, 2, 4, 8) if unit * n <= widest) or (unit,)
    return tuple(n for n in widths if _is_vector(shape, n)) or widths


def _is_vector(shape: DepthwiseConv2dShape, cols: int) -> bool:
    """Tell whether the results of a row are a vector: whole in any tile, and aligned."""
    power_of_two = cols & (cols - 1) == 0
    return shape.result_width % 2 == 0 and shape.result_width % cols == 0 and power_of_two
