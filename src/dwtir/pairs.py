"""The convolution of NHWC halves as products of matrices whose depth are pairs of channels: sizes and places.

In memory two channels of a pixel are one word of 32 bits, and a tensor core takes words as they are: of
8 pixels and 2 channels as the depth of a product, 4 results and 2 channels as its columns, and 16 strips
as its rows. The other matrix is banded, and has zeros between the two channels::

    out[4 * strip + x, c] = sum over i, d of input[4 * strip * SW + i, d] * band[(i, d), (x, c)]
    band[(i, d), (x, c)] = weight[(i - x * SW) / DW, c] if c // M == d, else 0 (of multiplier M)

A strip is 4 columns of results. A block has strips side by side, of some images and channels, and goes down their
rows: a step takes the next stage of inputs, and leaves the results that see no later ones. A pixel's vectors of
channels lie in such an order that the lanes of a warp, which read the same vector of other pixels, read from all
banks, and a sector's two stay together: `cp.async` would ask L2 twice for them.

Where rows have an odd number of strips, and products room for one more, a lane's two are side by side: what both see
is read once, and no place takes a division by that number.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

from .bands import window_of
from .epilogue import NO_STEPS, STEPS, Epilogue
from .shape import Shape

STRIPS, COLUMNS, PIXELS = 16, 4, 8
"""Strips of a product, columns of a strip, and pixels of a product's depth."""

VECTOR = 8
"""Channels that move together: 16 bytes, which are `WORDS` pairs, each an operand of a product."""

WORDS = VECTOR // 2

SECTOR = 32
"""Bytes that memory moves at least."""

LAG = 2
"""Steps from the products of a result to its storing: meanwhile no warp waits for others that are one behind."""

ALIGNED = 64
"""Bytes that what lies in shared memory begins at a multiple of."""

_HELD = 98
"""Registers of a lane for sums and weights, those of 7x7 by two pairs of channels, beside which steps have room."""

_MOST_THERE = 0.72
"""Share of rows that are in the image from which on those of padding are multiplied too."""


@dataclass(frozen=True)
class Pairs:
    """Sizes of a block's share of a convolution, or of the data's gradient of one with stride 1.

    The fields are those of `dwtir.schedules.ChannelPairs`.
    """

    shape: Shape
    channels: int
    images: int
    across: int
    rows: int
    steps: int
    ahead: int
    words: int
    turns: int

    @property
    def vectors(self) -> int:
        """Vectors of a pixel of results."""
        return self.channels // VECTOR

    @property
    def source_vectors(self) -> int:
        """Vectors of a pixel of inputs."""
        return self.vectors // self.shape.channel_multiplier

    @property
    def is_shifted(self) -> bool:
        """Whether pixels begin anywhere, and are copied with what is around. Of even channels, twos take less."""
        return self.shape.in_channels % 2 > 0

    @property
    def source_span(self) -> int:
        """Channels of inputs that move together: with a number of channels that is no multiple of `VECTOR`, fewer."""
        return VECTOR if self.is_shifted else gcd(self.shape.in_channels, VECTOR)

    @property
    def source_pieces(self) -> int:
        """Vectors of memory that are copied of a pixel."""
        return self.source_vectors + self.is_shifted

    @property
    def result_span(self) -> int:
        """Channels of results that move together: with a number of channels that is no multiple of `VECTOR`, fewer."""
        return gcd(self.shape.result_channels, VECTOR)

    @property
    def partial(self) -> float:
        """Times the bytes of results, for the sectors that blocks share of the same pixels: each takes 2.5 more."""
        blocks, channels = self.blocks[-1], self.shape.result_channels
        if blocks == 1 or 2 * channels % SECTOR == 0:
            return 1.0
        beyond = SECTOR - 2 * self.result_span  # of a block's share of a pixel, which may begin anywhere, on average
        return 1 + 2.5 * blocks * beyond / (2 * channels)

    @property
    def repeats(self) -> int:
        """Pairs of results, side by side in a warp, whose inputs are the same pair."""
        multiplier = self.shape.channel_multiplier
        return multiplier if self.words % multiplier == 0 else 1

    @property
    def beside(self) -> bool:
        """Whether a lane's two strips are side by side: where rows of an odd number leave room for one more."""
        groups, longer = (-(-self.images * n // STRIPS) for n in (self.across, self.across + 1))
        return self.across % 2 == 1 < self.across and groups == longer

    @property
    def line(self) -> int:
        """Strips in a row of an image, the one beyond an odd last one included."""
        return self.across + self.beside

    @property
    def groups(self) -> int:
        """Groups of strips, each of a product's."""
        return -(-self.images * self.line // STRIPS)

    @property
    def parts(self) -> int:
        """Warps of a group: one for each vector, or more."""
        return self.channels // (2 * self.words)

    @property
    def warps(self) -> int:
        return self.parts * self.groups

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """Blocks over images, rows, columns and channels."""
        shape = self.shape
        return (
            -(-shape.batch // (self.images * self.turns)),
            -(-shape.result_height // self.height),
            -(-shape.result_width // (self.across * COLUMNS)),
            -(-shape.result_channels // self.channels),
        )

    @cached_property
    def window(self) -> int:
        """Columns of inputs that a strip reads."""
        return window_of(self.shape, 1, COLUMNS)

    @cached_property
    def quads(self) -> int:
        """Loads of a row of a window, of four pixels each."""
        return -(-self.window * 2 // PIXELS)

    @cached_property
    def loads(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Loads of a row of a lane's two windows, each with the quads of the strips that it is."""
        apart, quads = min(self.quads, self.shape.stride[1] if self.beside else STRIPS * COLUMNS), range(self.quads)
        places = range(apart + self.quads)
        return tuple(tuple((n, at - n * apart) for n in range(2) if at - n * apart in quads) for at in places)

    @property
    def has_spare(self) -> bool:
        """Whether there is a pixel behind a window in what is loaded, which can be 1 for a bias to be its weight."""
        return self.window < self.quads * COLUMNS

    @property
    def depths(self) -> tuple[tuple[int, int], ...]:
        """The products that a row of the kernel takes, by their depth, and how many: of two quads, then of one."""
        deep, single = divmod(self.quads, 2)
        return tuple((depth, count) for depth, count in ((16, deep), (8, single)) if count)

    @cached_property
    def seen(self) -> int:
        """Rows of results that see an input, at the most."""
        shape = self.shape
        return (shape.kernel[0] - 1) * shape.dilation[0] // shape.stride[0] + 1

    @cached_property
    def delay(self) -> int:
        """Rows of results that a step begins and does not leave."""
        return self.seen - 1 if self.steps > 1 else 0

    @property
    def sums(self) -> int:
        """Rows of sums that a warp keeps at a time."""
        return self.seen if self.steps > 1 else min(self.seen, self.rows)

    @property
    def held(self) -> int:
        """Registers of a lane for weights and sums."""
        return self.words * (self.quads * self.shape.kernel[0] + 4 * self.sums)

    @property
    def above(self) -> int:
        """Rows of results that begin in the padding above an image and go on in it."""
        return min(max(0, self.shape.before[0]) // self.shape.stride[0], self.delay)

    @cached_property
    def is_whole(self) -> bool:
        """Whether a block has all rows of an image, and no stage of the padding above."""
        shape = self.shape
        spare = self.rows * self.steps + self.above - shape.result_height
        down = (self.rows * self.steps + self.above) * shape.stride[0] - shape.before[0]
        return spare >= self.delay or (
            down >= shape.source[0] and self._tap(self.above) < (spare + 1) * shape.stride[0]
        )

    @property
    def begun(self) -> int:
        """Rows of results that no step begins."""
        return self.above if self.is_whole else 0

    @property
    def rests(self) -> int:
        """Steps behind those with a stage: they leave results that see no more of an image."""
        left = self.shape.result_height - (self.rows * self.steps - self.delay + self.begun)
        return max(0, -(-left // self.rows)) if self.is_whole else 0

    @property
    def leaving(self) -> int:
        """Steps of a turn, with a stage or without."""
        return self.steps + self.rests

    def _tap(self, begun: int) -> int:
        """Find how far down the kernel the first row is that all results see, after so many begun."""
        return -(-begun * self.shape.stride[0] // self.shape.dilation[0]) * self.shape.dilation[0]

    @property
    def common_tap(self) -> int:
        """A row of the kernel that all results are multiplied by."""
        return self._tap(self.begun) // self.shape.dilation[0]

    @property
    def height(self) -> int:
        """Rows of results of a block."""
        return self.rows * (self.steps + self.rests) - self.delay + self.begun

    @property
    def first_row(self) -> int:
        """The first row of inputs of the first block: rows of padding are before the image."""
        return self.begun * self.shape.stride[0] - self.shape.before[0]

    @property
    def input_rows(self) -> int:
        return window_of(self.shape, 0, self.height - self.begun)

    @property
    def stage_rows(self) -> int:
        return self.rows * self.shape.stride[0] if self.steps > 1 else self.input_rows

    @property
    def stages(self) -> int:
        """Stages in shared memory: those ahead, the next one, and those that warps take or have just taken."""
        return min(self.ahead + 3, self.steps * self.turns)

    @property
    def buffers(self) -> int:
        """Steps whose results are in shared memory: warps leave one while others do, and store another."""
        return LAG + 1 if self.steps > 1 else 1

    @cached_property
    def _meetings(self) -> tuple[tuple[int, int, int], ...]:
        """List rows of inputs, from a stage's first on, each with a sum it is part of and the row of the kernel."""
        kernel, stride, dilation = (sizes[0] for sizes in (self.shape.kernel, self.shape.stride, self.shape.dilation))
        sums = range(self.rows + self.delay)
        return tuple(((n - self.delay) * stride + tap * dilation, n, tap) for n in sums for tap in range(kernel))

    def met(self, row: int) -> tuple[tuple[int, int], ...]:
        """List the sums that a row of a stage is part of, each with the row of the kernel."""
        return tuple((result, tap) for at, result, tap in self._meetings if at == row)

    @property
    def skips(self) -> bool:
        """Whether it pays to leave out rows of padding, by a test: where they are many, and registers left."""
        rows, height = window_of(self.shape, 0, self.shape.result_height), self.shape.source[0]
        beyond = self.first_row < 0 or self.first_row + self.steps * self.stage_rows > height
        return beyond and self.words < WORDS and height <= _MOST_THERE * rows

    @cached_property
    def products(self) -> int:
        met = sum(0 <= row < self.stage_rows for row, *_ in self._meetings)
        return self.words * met * sum(count for _, count in self.depths)

    @property
    def width(self) -> int:
        """Columns of a stage."""
        return COLUMNS * ((self.across - 1) * self.shape.stride[1] + self.quads)

    @property
    def stage_halves(self) -> int:
        """Those of its pixels, and of what a strip beyond the last one reads behind them."""
        beyond = COLUMNS * self.shape.stride[1] * self.beside
        return (self.images * self.stage_rows * self._before(self.width) + self._before(beyond)) * VECTOR

    def _before(self, columns: int) -> int:
        """Count the vectors before a pixel of a row. Lanes read words of those that are shifted, from all banks."""
        if not self.is_shifted:
            return columns * self.source_vectors
        return columns * (self.source_pieces | 1) + columns // PIXELS * 2

    @property
    def results(self) -> int:
        """Results of a step."""
        return self.images * self.rows * self.across * COLUMNS * self.channels

    def fused(self, epilogue: Epilogue) -> "Fused":
        """Part an epilogue: steps of few instructions take registers, with four images or few rows SiLU too.

        With more rows registers are full, in which three blocks of 5x5 and two of 7x7 share an SM. Warps that share
        vectors may have some left.
        """
        left = self.words < WORDS and self.held <= _HELD
        alone = self.images == 1 and not left
        if alone and self.has_spare:
            return Fused(False, NO_STEPS, epilogue)
        bias = epilogue.steps[:1] == ("bias",)
        others = Epilogue(epilogue.steps[bias:])
        few = {"relu", "relu6"} if alone else {"relu", "relu6", "bias", "scale_shift", "hardswish"}
        if left or self.images >= 4 or (self.images > 1 and self.rows <= 1 + (self.shape.kernel[0] >= 7)):
            few.add("silu")
        return Fused(bias, others, NO_STEPS) if few.issuperset(others.steps) else Fused(bias, NO_STEPS, others)

    def shared_bytes(self, epilogue: Epilogue) -> int:
        """Count the bytes of shared memory: for inputs, results or float32 sums, a residual and other operands."""
        fused, size = self.fused(epilogue), self.shape.itemsize
        taken = size if fused.shared.steps else 4
        parts = [
            self.stages * self.stage_halves * size,
            self.buffers * self.results * (4 if fused.shared.steps else size),
            self.buffers * self.results * size * ("residual" in epilogue.steps),
            8 * (self.steps > 1),  # the barrier
            self.channels * 8 * (fused.bias and not self.has_spare),
            *(self.channels * taken for _ in fused.taken),
        ]
        return sum(-(-part // ALIGNED) * ALIGNED for part in parts)

    def stage(self, turn: Any, step: Any) -> Any:
        """Count the stages before that of a step of a turn."""
        return turn * self.steps + step

    def number(self, turn: Any, step: Any) -> Any:
        """Count the steps before one of a turn."""
        return turn * self.leaving + step

    def input_at(self, stage: Any, image: Any, row: Any, column: Any, vector: Any) -> Any:
        """Find a vector of inputs in shared memory, by its place in a stage."""
        line = (image * self.stage_rows + row) * self._before(self.width)
        if self.is_shifted:
            place = self._before(column) + vector
        else:
            place = self._place(image, column, vector, self.source_vectors, self.shape.stride[1])
        return stage * self.stage_halves + (line + place) * VECTOR

    def result_at(self, image: Any, row: Any, column: Any, part: Any, size: int) -> Any:
        """Find 16 bytes of results in shared memory, of so many."""
        line, parts = (image * self.rows + row) * self.across * COLUMNS, self.channels // size
        return (line * parts + self._place(image, column, part, parts, 1)) * size

    def _place(self, image: Any, column: Any, part: Any, parts: int, stride: int) -> Any:
        """Find 16 bytes of a pixel of a row, of so many: those that eight lanes read are in different banks.

        The lanes' columns differ by 1, by 2 and by what is from a strip to the next lane's, which may be of another
        image. Each changes a bit of the place, but those by which pixels lie in other banks anyway.
        """
        apart = COLUMNS * stride * (1 + self.beside)
        lanes = self.line // (1 + self.beside)  # of a row
        numbers = column, column // 2, column // (apart & -apart) + image * (lanes % 2)
        for bit, number in enumerate(numbers[4 - gcd(parts, VECTOR).bit_length() :]):
            part = part // (2 << bit) * (2 << bit) + (part // (1 << bit) + number) % 2 * (1 << bit) + part % (1 << bit)
        return column * parts + part


class Fused(NamedTuple):
    """Where steps are applied: whether sums begin with a bias, and what they take in registers or shared memory."""

    bias: bool
    own: Epilogue
    shared: Epilogue

    @property
    def taken(self) -> list[str]:
        """Operands of the others that have a value for each channel."""
        return [name for step in (self.own.steps or self.shared.steps) for name in STEPS[step] if name != "residual"]
