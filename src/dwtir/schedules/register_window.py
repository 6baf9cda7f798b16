"""NCHW: every thread keeps the input window of its outputs in registers.

Loop nest, for a thread's rows x cols outputs of one channel::

    blockIdx.x = (n * c / thread_z) * (oh tiles) * (ow tiles)
      threadIdx.z = n * c     threadIdx.y = oh / rows     threadIdx.x = ow / cols
        window[(rows-1)*SH + (KH-1)*DH + 1, same for w] = data or 0   "tile"
        for kh:
          window[rows, (cols-1)*SW + (KW-1)*DW + 1] = data or 0       "row"
          for kw: for oh, ow: acc += window * weight
        out = epilogue(acc)

With ``window="tile"`` all taps are unrolled and each input of the window is
loaded once. ``window="row"`` is for kernels whose window does not fit: the
loop over kernel rows stays, and each of them loads the inputs it needs.

Registers: KH rows of the window + rows*cols sums + KH*KW weights (in "row": rows
rows, KW weights).
No shared memory: neighbouring threads share their halo through L1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..shape import DepthwiseConv2dShape
from ..target import Target
from .base import Strategy, get_blocks, stage_operands, stage_output, unroll_in_source
from .tiles import even_split, largest_divisor, reach, with_value

if TYPE_CHECKING:
    from tvm.s_tir import Schedule

__all__ = ["RegisterWindow"]

_REGISTERS = 200
"""Registers that window, sums and weights may take, of 255; addresses and predicates
take the rest."""


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
    window : {"tile", "row"}
        Whether registers hold the whole input window or that of one kernel row.
    """

    name: ClassVar[str] = "register_window"
    layouts: ClassVar[tuple[str, ...]] = ("NCHW",)

    rows: int
    cols: int
    thread_x: int
    thread_y: int
    thread_z: int
    window: str = "tile"

    @classmethod
    def choose(cls, shape: DepthwiseConv2dShape, target: Target) -> RegisterWindow:
        """Choose the tile by what limits it: registers, the width of loads, idle threads.

        Columns: a warp's load takes elements ``cols * stride`` apart, so that 4 is
        where it spreads over as many cache lines as a warp may ask for at once.
        A store is one vector then. Odd widths are stored one by one, and two
        columns share most of their window already.
        Rows: every thread loads the halo of KH-1 rows anew, so the taller the
        better, up to 8, where the halo of a 3x3 kernel costs a quarter.
        """
        widest = max(1, 4 // shape.stride[1]) if shape.out_width % 2 == 0 else 2
        cols = max(n for n in _allowed_columns(shape) if n <= max(1, min(widest, shape.out_width)))
        window = "tile" if cls(1, cols, 1, 1, 1)._registers(shape) <= _REGISTERS else "row"
        tallest = max(
            (
                rows
                for rows in range(1, min(8, shape.out_height) + 1)
                if cls(rows, cols, 1, 1, 1, window)._registers(shape) <= _REGISTERS
            ),
            default=1,
        )
        rows = even_split(shape.out_height, tallest)

        # A block is about 256 threads: whole rows of tiles first, then the rows below
        # them, then channels. More would deal the work to the SMs too coarsely.
        thread_x = even_split(-(-shape.out_width // cols), 64)
        thread_y = even_split(-(-shape.out_height // rows), max(1, 256 // thread_x))
        channels = shape.batch * shape.out_channels
        thread_z = largest_divisor(channels, max(1, min(64, 256 // (thread_x * thread_y))))
        return cls(rows, cols, thread_x, thread_y, thread_z, window)

    @classmethod
    def space(cls, shape: DepthwiseConv2dShape, target: Target) -> dict[str, tuple[int, ...]]:
        chosen = cls.choose(shape, target)
        widths = [cols for cols in (1, 2, 4, 8) if cols in _allowed_columns(shape)]
        tiles_x, tiles_y = -(-shape.out_width // chosen.cols), -(-shape.out_height // chosen.rows)
        return {
            "rows": with_value(chosen.rows, (1, 2, 4, 7, 8, 14)),
            "cols": with_value(chosen.cols, widths),
            "thread_x": with_value(chosen.thread_x, (8, 16, 32, min(64, tiles_x))),
            "thread_y": with_value(chosen.thread_y, (1, 2, 4, 8, min(32, tiles_y))),
            "thread_z": with_value(chosen.thread_z, (1, 2, 4, 8)),
        }

    def check(self, shape: DepthwiseConv2dShape, target: Target) -> None:
        self._require(self.window in ("tile", "row"), "window", self.window, "'tile' or 'row'")
        self._require(
            self.cols in _allowed_columns(shape),
            "cols",
            self.cols,
            f"a power of two that divides the even output width {shape.out_width}, up to 16 bytes",
        )
        self._require(self.thread_z <= 64, "thread_z", self.thread_z, "at most 64")
        sums = self.rows * self.cols
        self._require(sums <= 128, "sums of a thread", sums, "at most 128")
        self._require_launch(target, threads=self.thread_x * self.thread_y * self.thread_z)

    def _registers(self, shape: DepthwiseConv2dShape) -> int:
        """Count the registers that are live at once: the window's rows in use, sums and weights.

        The unrolled code works its way down the window, so that of a "tile" no more
        than the rows under one output are needed at a time.
        """
        whole = self.window == "tile"
        rows = min(shape.kernel[0], reach(shape, 0, self.rows)) if whole else self.rows
        taps = shape.kernel[1] * (shape.kernel[0] if whole else 1)
        return rows * reach(shape, 1, self.cols) + self.rows * self.cols + taps

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
        vector = shape.out_width % 2 == 0
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
        sch.compute_at(pad, tx if self.window == "tile" else kh, preserve_unit_loops=True)
        for loop in sch.get_loops(pad)[-2:]:
            sch.unroll(loop)
        unroll_in_source(sch, conv_n if self.window == "tile" else kw)


def _allowed_columns(shape: DepthwiseConv2dShape) -> tuple[int, ...]:
    widest = 16 // shape.itemsize
    powers = [cols for cols in (1, 2, 4, 8) if cols <= widest]
    if shape.out_width % 2:
        return tuple(powers)
    return tuple(cols for cols in powers if shape.out_width % cols == 0)
