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

With ``window="tile"`` all taps are unrolled and each input of the window is loaded once. Of larger kernels each row
loads its own inputs: ``"row"``. With hundreds of columns, or a dilation that leaves most of it unused, each tap does:
``"tap"``.

Registers: KH rows of the window (in "row": `rows` of them) + rows*cols sums, and weights as there is room. No shared
memory: neighbouring threads share their halo through L1.

A row of the window is loaded as vectors of `lanes` inputs, from the aligned one that holds its first input to the one
that holds its last: each costs no more than one of its elements.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import ClassVar

from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .loops import bind, compute_at, get_blocks, unroll_all, unroll_in_source
from .tiles import (
    BLOCK_COUNTS,
    MAX_SIDE,
    divisors,
    even_split,
    even_tiles,
    inputs_of,
    phases,
    step,
    taps,
    vectors,
    whole_phases,
)
from .window import Access, Footprint, Window


@dataclass(frozen=True)
class RegisterWindow(Window):
    """Tile of the NCHW register window."""

    layouts = ("NCHW",)
    simplify = True
    one_by_one: ClassVar[dict[str, int]] = {"lanes": 1, "store": 1}
    most_registers = 230
    most_values = 400

    rows: int
    cols: int
    """Outputs of one thread."""
    thread_x: int
    thread_y: int
    thread_z: int
    """Threads of a block over columns, rows and channels."""
    lanes: int = 1
    """Inputs of a vector load. It divides the inputs from one tile to the next."""
    store: int = 1
    """Outputs of a vector store. It divides the outputs of a row."""
    min_blocks: int = 1
    window: str = "tile"
    split: str = "none"

    @classmethod
    def tiles(cls, shape: Shape, window: str) -> Iterator[Self]:
        """List tiles with the widest vectors. Blocks take whole rows of tiles first, then rows below, then channels."""
        channels = shape.batch * shape.result_channels
        depths = [n for n in range(64, 0, -1) if channels % n == 0]
        for rows, cols in product(even_tiles(shape, 0, (1, 2, 4, 7, 8, 14), window), _widths(shape, window)):
            lanes = _allowed_lanes(shape, cols, window)[-1]
            store = vectors(shape, shape.result_width, cols)[-1]
            if not cls(rows, cols, 1, 1, 1, lanes, store, window=window).is_promising(shape):
                continue
            across, down = -(-shape.result_width // cols), -(-shape.result_height // rows)
            blocks = set()
            for most_x, most_y, most in product((8, 64), (1, 4, 16), (64, 128)):
                x = even_split(across, most_x)
                y = even_split(down, min(most_y, max(1, most // x)))
                z = next(n for n in depths if n <= max(1, most // (x * y)))
                blocks.add((x, y, z))
            for x, y, z in blocks:
                yield cls(rows, cols, x, y, z, lanes, store, window=window)

    @classmethod
    def _least_block(cls, shape: Shape) -> tuple[int, ...]:
        return even_split(shape.result_width, 64), 1, 1

    @classmethod
    def usual_values(cls, shape: Shape, window: str) -> dict[str, Iterable[int]]:
        widths = _widths(shape, window)
        counts = [even_split(-(-shape.result_width // cols), 64) for cols in widths]
        return {
            "rows": even_tiles(shape, 0, (1, 2, 4, 7, 8, 14, 28), window),
            "cols": widths,
            "thread_x": (8, 16, 32, *counts),
            "thread_y": (1, 2, 4, 8, 16),
            "thread_z": (1, 2, 4, 8, 16),
            "min_blocks": BLOCK_COUNTS,
            "lanes": (1,) if window == "tap" else divisors(shape.row_lanes),
            "store": vectors(shape, shape.result_width),
        }

    def check(self, shape: Shape, target: Target) -> None:
        super().check(shape, target)
        is_row = self.split != "both"
        self._require_in("lanes", _allowed_lanes(shape, self.cols, self.window) if is_row else (1,))
        self._require_in("store", vectors(shape, shape.result_width, self.cols) if is_row else (1,))

    @property
    def sums(self) -> int:
        return self.rows * self.cols

    def _registers(self, shape: Shape) -> int:
        return self._live_inputs(shape) + self.sums

    def _accesses(self, shape: Shape, width: int) -> tuple[int, int, int]:
        if self.window == "tap":
            return width, self.lanes, self.store
        return (-shape.padding[1] % self.lanes + width - 1) // self.lanes + 1, self.lanes, self.store

    def _block(self, shape: Shape) -> tuple[int, int, int]:
        return self.rows * self.thread_y, self.cols * self.thread_x, self.thread_z

    def footprint(self, shape: Shape) -> Footprint:
        inputs, down, right = self._inputs_apart(shape)
        height, width = shape.result_height, shape.result_width
        *_, input_height, input_width = next(iter(shape.input_shapes.values()))
        if self.split != "none":
            return self._of_small_images(shape, input_width)
        piece = self.cols * self.thread_x
        if piece >= width:
            below = self.rows * self.thread_y
            piece = width * min(below, height)
            if below >= height:
                piece *= 0 if self.thread_z >= shape.batch * shape.result_channels else self.thread_z
        return Footprint(
            inputs=Access(
                self.lanes, self.cols * right, self.rows * down * input_width, input_height * input_width * inputs
            ),
            results=Access(self.store, self.cols, self.rows * width, height * width),
            weights=Access(1, 0, 0, prod(taps(shape))),
            piece=piece,
            begins=gcd(piece, width),
        )

    def _of_small_images(self, shape: Shape, input_width: int) -> Footprint:
        """Tell the same of threads whose next image begins at the next row, or at the next column."""
        *_, down, across = self._split(shape)
        right, below = self.cols * across, self.rows * down
        width, piece = shape.result_width, min(self.cols * self.thread_x, shape.result_width)
        return Footprint(
            inputs=Access(self.lanes, right, below * input_width, input_width, across),
            results=Access(self.store, right, below * width, width, across),
            weights=Access(1, 0, 0, 0),
            piece=piece if across == 1 else 0,
            begins=gcd(piece, width),
        )

    def apply(self, sch: Schedule, shape: Shape) -> None:
        pad, conv, epilogue = get_blocks(sch)
        *_, columns = sch.get_loops(pad)
        _, lanes = sch.split(columns, [None, self.lanes])
        vectors = sch.blockize(lanes)
        store = self._staged(sch, epilogue)

        # 1. Threads over channels, rows and columns of tiles; all the rest are blocks.
        n, c, oh, ow = sch.get_loops(store)
        bz, tz = sch.split(sch.fuse(n, c), [None, self.thread_z])
        by, ty, oh = sch.split(oh, [None, self.thread_y, self.rows])
        bx, tx, ow = sch.split(ow, [None, self.thread_x, self.cols])
        sch.reorder(bz, by, bx, tz, ty, tx, oh, ow)
        bind(sch, (bz, by, bx), tz, ty, tx)

        # 2. The outputs of a row leave as vectors.
        row = self._place(sch, shape, epilogue, oh, tx, self.store)
        ow, vector = sch.split(ow, [None, self.store])
        sch.unroll(oh)
        sch.unroll(ow)
        sch.vectorize(vector)

        # 3. Sums in registers, all taps of a kernel row for all outputs in straight line.
        compute_at(sch, conv, row, "local")
        *_, conv_n, conv_c, conv_oh, conv_ow, kh, kw = sch.get_loops(conv)
        sch.reorder(conv_n, conv_c, kh, kw, conv_oh, conv_ow)

        # 4. The input window in registers, in whole vectors.
        sch.set_scope(pad, 0, "local")
        at, unrolled = {"tile": (tx, conv_n), "row": (kh, kw), "tap": (kw, conv_oh)}[self.window]
        compute_at(sch, vectors, at)
        unroll_all(sch, sch.get_loops(vectors)[-2 - (inputs_of(shape) > 1) :])
        sch.vectorize(lanes)
        unroll_in_source(sch, unrolled)


def _widths(shape: Shape, window: str) -> list[int]:
    sizes = (whole_phases(shape, 1, n, window) for n in (1, 2, 4, 7, 8, 12, 14, 16))
    least = whole_phases(shape, 1, 1, window)
    return sorted({n for n in sizes if n == least or n <= min(shape.result_width, MAX_SIDE)})


def _allowed_lanes(shape: Shape, cols: int, window: str) -> tuple[int, ...]:
    """List the vectors whose multiples a tile of `cols` begins at; a single tap's may be none."""
    apart = cols * step(shape, 1) // phases(shape, 1)
    widest = 1 if window == "tap" else shape.row_lanes
    return divisors(gcd(apart, widest))
