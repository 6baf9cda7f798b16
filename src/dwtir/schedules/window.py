"""What the strategies that keep an input window in registers have in common: their choice."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import gcd, prod
from typing import Any, ClassVar, NamedTuple, cast

from ..epilogue import Epilogue
from ..shape import Shape
from ..space_to_batch import SpaceToBatch, space_to_batch, splits_of
from ..target import Target
from ..typed import LoopRV, SBlockRV, Schedule, Self
from .base import Strategy, varied, with_guesses
from .cost import (
    LINE,
    SECTOR,
    Model,
    Work,
    blocks_at_a_time,
    conversions,
    halo,
    ranking,
    registers_for,
    registers_needed,
    registers_wanted,
    touched,
)
from .loops import compute_at, number, stage_operands, unroll_all
from .tiles import (
    BLOCK_COUNTS,
    MAX_LOADS,
    MAX_SIDE,
    MAX_SUMS,
    MAX_UNROLLED,
    REGISTERS,
    loads_of,
    most_blocks,
    phases,
    reach,
    rows_in_use,
    step,
    taps,
    unrolled_of,
    whole_phases,
    windows_of,
)

_LEAST_REGISTERS = 0.7
"""Of the registers that a thread is expected to need: with fewer, kernels spill."""

_FEW_RESIDUALS = 28
"""Registers of a residual that is loaded with the inputs: kernels take up to 17 % less, of more registers 24 % more."""

_MANY_PRODUCTS, _HELD = 6, 0.8
_FEW_REGISTERS, _MANY_REGISTERS = 72, 88
"""By which registers are held, but for gradients with a stride: of 333 tiles with other bounds the choice is 1.1 %
behind their best."""

_FEW_READERS = 3
"""Blocks that read the same inputs, above which L2 takes longer than memory."""


class Access(NamedTuple):
    """What a thread has of a tensor in one piece, and where its neighbours have theirs."""

    size: int
    """Elements of a load or a store."""
    right: float
    down: float
    deep: float
    """Elements from a thread to the next along `thread_x` and `thread_y`, and along `thread_z` from one of these
    groups of threads to the next."""
    beside: int = 1
    """Threads along `thread_z` of a group, whose elements lie side by side."""

    def touched(self, unit: int, warp: tuple[float, float, float], itemsize: int) -> float:
        """Count the units of memory that so many threads each way touch, on the average."""
        x, y, z = warp
        beside = min(self.beside, z)
        threads = (x, self.right * itemsize), (y, self.down * itemsize), (z / beside, self.deep * itemsize)
        return touched(unit, self.size * beside * itemsize, threads)

    def lines(self, warp: tuple[float, float, float], itemsize: int) -> float:
        """Count the lines that a warp touches, and as many as its elements fill at the least."""
        return max(self.touched(LINE, warp, itemsize), 32 * self.size * itemsize / LINE)


class Footprint(NamedTuple):
    """What the threads of a block touch of the tensors."""

    inputs: Access
    results: Access
    weights: Access
    """The loads and stores of neighbouring threads."""
    piece: int
    """Results of a block that lie side by side; none where no other block's are next to them."""
    begins: int
    """Results whose multiples pieces begin at."""


class Window(Strategy):
    """A strategy whose tile is chosen by the model of `cost`."""

    one_by_one: ClassVar[dict[str, int]] = {}
    """Fields of tiles whose columns are not side by side."""

    most_registers: ClassVar[int]
    """What `_registers` counts, above which kernels spill."""

    most_values: ClassVar[int]
    """Inputs and sums of a "tile", above which some kernels spill: ptxas does not always work its way down."""

    rows: int
    cols: int
    thread_x: int
    thread_y: int
    thread_z: int
    min_blocks: int
    window: str
    """One of `WINDOWS`."""
    split: str
    """One of `space_to_batch.SPLITS`: what of a dilated image is an image of its own."""

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> tuple[Self, ...]:
        return cast("tuple[Self, ...]", _ranked(cls, shape, target))

    def with_room_for(self, shape: Shape, epilogue: Epilogue, target: Target) -> Self:
        """Let as many blocks run at a time as without the epilogue, or the next count above.

        Left more registers, ptxas fills them with the epilogue of many results at once.
        """
        if self.window != "tile" or not epilogue.steps:
            return self
        work = self.counts(shape)
        count, least = blocks_at_a_time(work, self._taken(work), target.units), registers_needed(work)
        counts = (n for n in BLOCK_COUNTS if count <= n <= most_blocks(work.threads))
        more = (n for n in counts if registers_for(work.threads, n) >= least)
        return replace(self, min_blocks=next(more, count))  # type: ignore[type-var]

    def held(self, shape: Shape, target: Target) -> Self:
        """Hold ptxas, which takes what it may, to the registers that the model counts on.

        One that multiplies each float32 many times needs no more; others have loads under way.
        """
        work = self.counts(shape)
        if not work.conversions and work.multiply_adds > _MANY_PRODUCTS * work.values:
            share = 1.0 if shape.operation == "grad_data" and max(shape.stride) > 1 else _HELD
            registers = max(_FEW_REGISTERS, share * registers_needed(work))
        else:
            registers = max(_MANY_REGISTERS, self._taken(work))
        return replace(self, min_blocks=blocks_at_a_time(work, registers, target.units))  # type: ignore[type-var]

    def _taken(self, work: Work) -> float:
        return min(registers_wanted(work), registers_for(work.threads, self.min_blocks))

    @classmethod
    def space(cls, shape: Shape, target: Target) -> dict[str, tuple[int, ...]]:
        first, *others = cls.guesses(shape, target)
        alike = [first, *(tile for tile in others if (tile.window, tile.split) == (first.window, first.split))]
        values = cls.usual_values(first._split(shape).small, first.window)
        return with_guesses(values | (dict.fromkeys(cls.one_by_one, ()) if first.split == "both" else {}), alike)

    @classmethod
    @abstractmethod
    def usual_values(cls, shape: Shape, window: str) -> dict[str, Iterable[int]]:
        """List the values of each field that are worth trying whatever the guesses are."""

    @classmethod
    @abstractmethod
    def tiles(cls, shape: Shape, window: str) -> Iterator[Self]:
        """List the tiles worth comparing, if they are promising."""

    @classmethod
    def least(cls, shape: Shape) -> Self:
        """Return a tile for shapes of which no larger one fits."""
        window = windows_of(shape)[-1]
        rows, cols = (whole_phases(shape, axis, 1, window) for axis in (0, 1))
        return cls(rows, cols, *cls._least_block(shape), window=window)  # type: ignore[call-arg]

    @classmethod
    @abstractmethod
    def _least_block(cls, shape: Shape) -> tuple[int, ...]:
        """Return the fields of `least` after `cols`, up to `thread_z`."""

    @property
    def _threads(self) -> int:
        return self.thread_x * self.thread_y * self.thread_z

    @property
    @abstractmethod
    def sums(self) -> int:
        """Results of a thread."""

    def is_promising(self, shape: Shape) -> bool:
        shape = self._split(shape).small
        if self._registers(shape) > min(self.most_registers, REGISTERS // self._threads):
            return False
        vector = self.sums // (self.rows * self.cols)
        values = vector * loads_of(shape, self.rows, self.cols, "tile") + self.sums
        return (
            self.sums <= MAX_SUMS
            and (self.window != "tile" or values <= self.most_values)
            and unrolled_of(shape, self.sums, self.window) <= MAX_UNROLLED
            and loads_of(shape, self.rows, self.cols, self.window) <= MAX_LOADS
            and self._has_registers(shape)
        )

    def sizes(self, shape: Shape) -> Shape | SpaceToBatch:
        return shape if self.split == "none" else self._split(shape)

    def _split(self, shape: Shape) -> SpaceToBatch:
        return space_to_batch(shape, self.split)

    def check(self, shape: Shape, target: Target) -> None:
        self._require_in("split", splits_of(shape))
        shape = self._split(shape).small
        self._require_in("window", windows_of(shape))
        self._require_whole_phases(shape, self.rows, self.cols, self.window)
        self._require_most("thread_z", self.thread_z, 64)
        self._require_most("sums of a thread", self.sums, MAX_SUMS)
        self._require_most("rows and cols", max(self.rows, self.cols), MAX_SIDE)
        self._require_most("unrolled loads", loads_of(shape, self.rows, self.cols, self.window), MAX_LOADS)
        self._require_launch(target, threads=self._threads)

    @abstractmethod
    def _accesses(self, shape: Shape, width: int) -> tuple[int, int, int]:
        """Count the loads of so many inputs of a row, and the values of each, and of a store."""

    @abstractmethod
    def _block(self, shape: Shape) -> tuple[int, int, int]:
        """Count the rows, columns and channels of a block, in NCHW those of all images."""

    def counts(self, shape: Shape) -> Work:
        shape = self._split(shape).small
        steps, rows = self._steps(shape)
        width = self.cols if self.window == "tap" else reach(shape, 1, self.cols)
        loads, lanes, stored = self._accesses(shape, width)
        down, right, deep = self._block(shape)
        images, channels = shape.batch, shape.result_channels
        if shape.layout == "NCHW":
            images, channels = 1, images * channels
        vector, weights = self.sums // (self.rows * self.cols), prod(taps(shape))
        tiles = -(-shape.result_height // down) * -(-shape.result_width // right)
        readers = shape.channel_multiplier / deep if shape.operation == "forward" else 1
        return Work(
            threads=self._threads,
            blocks=images * tiles * -(-channels // deep),
            steps=steps,
            rows=self.rows,
            sums=self.sums,
            multiply_adds=self.sums * weights,
            loads=steps * rows * loads,
            weights=weights,
            stores=self.sums / stored,
            conversions=conversions(shape, steps * rows * width * vector, self.sums),
            in_use=self._in_use(shape) * vector,
            values=rows * loads * lanes * shape.itemsize / 4,
            weight_values=vector * weights / steps * (0.6 if shape.itemsize == 2 else 1),
            halo=halo(shape, down, right) * max(1, readers / _FEW_READERS),
            ragged=shape.result_width % right != 0 or channels % deep != 0,
        )

    @abstractmethod
    def footprint(self, shape: Shape) -> Footprint:
        """Tell where the threads of a block have their inputs, results and weights."""

    @staticmethod
    def _inputs_apart(shape: Shape) -> tuple[float, float, float]:
        multiplier = float(shape.channel_multiplier)
        down, right = (step(shape, axis) / phases(shape, axis) for axis in (0, 1))
        return 1 / multiplier if shape.operation == "forward" else multiplier, down, right

    def work(self, shape: Shape) -> Work:
        """Count what a thread does, and what its warp and its block touch of the tensors."""
        size = shape.itemsize
        inputs, results, weights, piece, begins = self.footprint(shape)
        is_single = shape.layout == "NHWC" and shape.result_channels % 2 > 0
        warp = self._warp(is_single)
        filled = min(32, self._threads) * results.size * size
        sectors = SECTOR * results.touched(SECTOR, warp, size) / filled - 1
        return self.counts(shape)._replace(
            lines=inputs.lines(warp, size),
            store_lines=results.lines(warp, size),
            weight_lines=weights.lines(warp, size),
            scattered=max(0.0, sectors),
            shared=(SECTOR - gcd(SECTOR, begins * size)) / (piece * size) if piece else 0,
            single=is_single,
        )

    def _warp(self, is_single: bool) -> tuple[float, float, float]:
        """Find the threads of a warp each way, on the average.

        Of an odd number of channels few warps have one pixel alone: each has a piece of one, or some.
        """
        x, share = min(32.0, self.thread_x), max(1.0, 32 / self.thread_x)
        if is_single and self.thread_x > 32:
            threads, warps = self._threads, -(-self._threads // 32)
            pieces = warps + sum(first % 32 > 0 for first in range(self.thread_x, threads, self.thread_x))
            x, share = threads / pieces, pieces / warps
        y = min(share, self.thread_y)
        return x, y, min(max(1.0, share / y), self.thread_z)

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        return Model(shape, target).absolute(self.work(shape))

    def _staged(self, sch: Schedule, epilogue: SBlockRV) -> SBlockRV:
        if self.split == "none":
            return sch.cache_write(epilogue, 0, "local")
        sch.set_scope(epilogue, 0, "local")
        return sch.get_sblock("store")

    def _place(
        self, sch: Schedule, shape: Shape, epilogue: SBlockRV, row: LoopRV, thread: LoopRV, lanes: Any = None
    ) -> LoopRV:
        """Compute results below the thread's loop, or if all inputs are there, a row's.

        Of all together ptxas stores none until the last is there, and holds up to 64 registers more. A residual is
        loaded with the inputs, or if it takes many registers, with each row of results, which then waits for its own,
        as ptxas moves no load ahead of another row's stores.
        """
        at = row if self.window == "tile" else thread
        compute_at(sch, epilogue, at)
        unroll_all(sch, sch.get_loops(epilogue)[-2 - (shape.layout == "NHWC") :])
        if self.split == "none":
            few = number(sch, self.sums) * shape.itemsize <= 4 * _FEW_RESIDUALS
            stage_operands(sch, epilogue, thread, thread if few else at, lanes)
        return at

    @abstractmethod
    def _registers(self, shape: Shape) -> int:
        """Count the registers that are live at once, of a small image of the split."""

    def _live_inputs(self, shape: Shape) -> int:
        """Count the inputs of a channel in the window's rows in use.

        Of a "tile" those are the rows under one output, for the unrolled code works its way down.
        """
        if self.window == "tile":
            return loads_of(shape, rows_in_use(shape, self.rows), self.cols, "row")
        return loads_of(shape, self.rows, self.cols, self.window)

    def _has_registers(self, shape: Shape) -> bool:
        """Tell whether `min_blocks` leaves a thread the registers that it needs, or nearly."""
        if self.min_blocks == 1:
            return True
        work = self.counts(shape)
        return registers_for(work.threads, self.min_blocks) >= _LEAST_REGISTERS * registers_needed(work)

    def _steps(self, shape: Shape) -> tuple[int, int]:
        kernel_h, kernel_w = taps(shape)
        if self.window == "tile":
            return 1, reach(shape, 0, self.rows)
        return kernel_h if self.window == "row" else kernel_h * kernel_w, self.rows

    def _in_use(self, shape: Shape) -> int:
        """Count the inputs of a channel that are multiplied together: of the rows under one tap."""
        if self.window == "tile":
            return loads_of(shape, min(self.rows, rows_in_use(shape, self.rows)), self.cols, "row")
        return loads_of(shape, self.rows, self.cols, self.window)


@lru_cache(maxsize=256)
def _ranked(cls: type[Window], shape: Shape, target: Target) -> tuple[Window, ...]:
    tiles = [*_tiles(cls, shape, ("tile", "row"))] or [*_tiles(cls, shape, ("tap",))] or [cls.least(shape)]
    ranked = ranking((tile.work(shape) for tile in tiles), shape, target)
    best = (replace(tiles[number], min_blocks=count) for number, count in ranked)  # type: ignore[type-var]
    held = (tile.held(shape, target) for tile in best)
    return varied(held, lambda tile: (tile.rows, tile.cols, tile.window, tile.split))


def _tiles(cls: type[Window], shape: Shape, windows: tuple[str, ...]) -> Iterator[Window]:
    for split in splits_of(shape):
        fields = {"split": split} | (cls.one_by_one if split == "both" else {})
        for window in windows_of(shape):
            if window in windows:
                small = space_to_batch(shape, split).small
                for tile in cls.tiles(small, window):
                    if tile.is_promising(small):
                        yield replace(tile, **fields)  # type: ignore[type-var]
