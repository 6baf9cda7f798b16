"""NHWC halves on tensor cores, two channels at a time.

Loop nest, for strips of 4 columns of results, of some images and channels::

    blockIdx.x = images * rows * columns * channels
      copies of the first stages begin                          by 16 bytes, into a ring of stages in shared
      threadIdx.y = warp, of 8 channels of 16 strips
        threadIdx.x = lane:  band[KH] = weight or 0             registers
      for step:                                                 some rows down
        wait until all warps were here in the step before;  copies of a later stage begin
        threads:  out = epilogue(results of the step of two before)
        for row of the stage:
          threadIdx.x = lane:  window = staged
          for the rows of results that it meets:  sums += window x band[kh]     one instruction for two channels
          threadIdx.x = lane:  results = sums that are complete                 shared
        sums of results that see rows below stay for the next step
      threads:  out = epilogue(results of the last two steps)

No warp waits for others that are in the same step: while some multiply, others fuse and store. That takes two more
stages, and room for the results of three steps.

What lies in memory side by side, two channels of a pixel, is one register of an operand: nothing is turned round, each
input is copied once and read twice. With several steps a block keeps KH rows of sums; warps may share vectors, and from
9x9 on do, for registers to hold them and the weights. A block of all rows takes no steps for padding; others leave it
out where it is much. Where all blocks are there at once, they may take turns: go on with the next images, whose copies
begin while the last rows of those before are multiplied and stored. Results leave by whole lines. With a multiplier
a pair of results takes either or both of a pair of inputs. Channels that are no multiple of 8 move by fours or by twos;
of an odd number inputs come with what is around them in memory, and results leave alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, product
from math import ceil, prod

from ..bands import window_of
from ..epilogue import NO_STEPS, Epilogue
from ..pairs import COLUMNS, STRIPS, VECTOR, WORDS, Pairs
from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .banded_channels import BandedChannels
from .banded_planes import BandedPlanes
from .base import Strategy, Values, by_time, expected, is_beaten, varied
from .channel_vector import ChannelVector
from .cost import registers_for
from .loops import bind_threads, block_names, loops_of
from .row_stream import RowStream
from .tiles import BLOCK_COUNTS, MAX_THREADS, REGISTERS, SHARED, even_split

_MOST = Epilogue(("bias", "scale_shift", "residual"))
"""Fused steps that take the least and the most shared memory."""

_MAX_PRODUCTS = 640
"""Products of a warp in a step, in straight line."""

_LEAST_TAPS, _LEAST_SINGLE_TAPS = 25, 26  # with odd channels, whose results leave alone, 5x5 mostly takes longer
"""Taps from which it pays: with fewer, memory is all that kernels wait for, and `channel_vector` keeps it busier."""

_CHANNELS, _ROWS, _WORDS = (16, 32, 48, 64, 80, 96), (7, 4, 3, 2, 1), (4, 2, 1)
"""Channels of a block, rows of a step, pairs of channels of a warp (1 above 7x7) worth trying."""

_MOST_CHANNELS = 128
"""Channels of a block worth trying, of a number of channels that is no multiple of a vector."""

_TURNS, _ALONE = range(2, 9), 0.95
"""Turns worth trying, and what a block with some takes of the expected time if an SM has no other."""

_SHIFTED = 1.12  # times the expected, of odd channels: the choice of 70 layers is 2.2 % behind the best

_SILU = 1.1  # times that of vectors that are a warp's, of 13 layers; those chosen are 3.4 % behind

_FULL, _WIDE = {1: 0.55, 2: 0.9}, 64
"""The part of an SM's one or two blocks that has to be there, and the most channels of one."""

_REGISTERS, _PER_ROW = {4: (46, 1.0), 2: (19, 1.25), 1: (34, 1.0)}, 6
"""Registers of a thread beside its sums and weights, by its words, and how often it has those."""

# Time: of a launch; cycles of a quarter of an SM for a quad of a product, a row of a window, a run of channels that
# moves, a step and a block; what few warps and few blocks add, also to memory's, and what little and much under way (of
# 64 KB of an SM) and a last round not full; how memory and products overlap; bytes of memory. Of vectors that are a
# warp's, and that warps share. Fitted to 595 kernels of 36 layers on an H200: the choice is 2.2 % behind the best.
_CLOCK = 1.98e9
_FEW_TAPS = 49
_PARTS = 0.8  # how a run's time grows with the parts it moves in, of 346 kernels of 15 layers
_DOUBT, _SURE = 1.2e-6, 9e-6  # by which others have to take longer; times from which on `banded_channels` need not
_WHOLE = (2.14e-6, 0.627, 0.259, 1.03, 100, 169, 0.843, 0.855, 0.182, 0.114, 0.722, 1, 20.1, 7.31e12)
_PARTED = (1.23e-6, 0.106, 2.89, 0.684, 137, 696, 0.124, 0.995, 0.0488, 0.0498, 1.59, 0.237, 2.4, 9.47e12)


@dataclass(frozen=True)
class ChannelPairs(Strategy):
    """Tile of the products over pairs of channels.

    Parameters
    ----------
    channels, images : int
        Channels and images of a block.
    across : int
        Strips of a block in a row of an image.
    rows, steps : int
        Rows of results that a step leaves, and steps of a block.
    ahead : int
        Stages whose copies are under way, if there is more than one step.
    min_blocks : int
        Blocks that an SM shall have room for at a time.
    """

    layouts = ("NHWC",)
    dtypes = ("float16", "bfloat16")
    needs_mma = True
    silu_by_fma = False  # warps that are at different places share what computes it better: 4 % less time
    device = "a GPU from sm_80 on (stride at most the kernel; of gradients it and channel_multiplier 1)"

    channels: int
    images: int
    across: int
    rows: int
    steps: int
    ahead: int
    min_blocks: int = 1
    words: int = WORDS
    """Pairs of channels of a warp: a vector's, or with more warps for it 2 or 1."""
    turns: int = 1
    """How often a block goes down its images' rows, each time those of the next images."""

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        return (
            super()._is_for(shape, target)
            and shape.stride[0] <= window_of(shape, 0, 1)  # it copies all rows
            and (shape.operation == "forward" or (*shape.stride, shape.channel_multiplier) == (1, 1, 1))
        )

    @classmethod
    def claims(cls, shape: Shape, target: Target) -> bool:
        """Tell whether there is room for a tile, whatever steps are fused."""
        return super().claims(shape, target) and any(True for _ in cls._tiles(shape, target, _MOST))

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        if prod(shape.kernel) < (_LEAST_SINGLE_TAPS if shape.result_channels % 2 else _LEAST_TAPS):
            return False
        rivals = (ChannelVector, RowStream) if RowStream.claims(shape, target) else (ChannelVector, BandedPlanes)
        own = expected(cls, shape, target)
        if is_beaten(own + _DOUBT, rivals, shape, target):
            return False
        return BandedPlanes in rivals or not is_beaten(own + _DOUBT * (own < _SURE), (BandedChannels,), shape, target)

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> tuple[Self, ...]:
        tiles = by_time(cls._tiles(shape, target), shape, target)
        return varied(tiles, lambda tile: (tile.channels, tile.rows, tile.words)) or (
            cls(cls._least(shape), 1, 1, 1, 1, 1),
        )

    @staticmethod
    def _least(shape: Shape) -> int:
        return VECTOR * shape.channel_multiplier

    @classmethod
    def _tiles(cls, shape: Shape, target: Target, epilogue: Epilogue = NO_STEPS) -> Iterator[Self]:
        width, height = -(-shape.result_width // COLUMNS), shape.result_height
        across = even_split(width, STRIPS)
        images = min(shape.batch, max(1, STRIPS // across))
        least = cls._least(shape)
        whole = -(-shape.result_channels // least) * least
        channels = {n for n in _CHANNELS if n <= whole and (n < 64 or whole % n == 0) and n % least == 0} or {least}
        if shape.result_channels % VECTOR:  # sectors that blocks share are moved by each of them
            channels |= {n for n in (-(-whole // least // 2) * least, whole) if n <= _MOST_CHANNELS}
        most = 3 if prod(shape.kernel) > _FEW_TAPS else 2
        shares = _WORDS[: most if max(shape.dilation) == 1 else 1]
        for words, channel, rows, parts, ahead in product(
            shares, sorted(channels), _ROWS[::-1], (1, 2, 4, 8, 14, 28), (1, 2, 3)
        ):
            part = even_split(height, -(-height // parts))
            if part < rows or (part == rows and ahead > 1):
                continue
            tile = cls(channel, images, across, rows, 1, ahead, words=words)._down(shape, part)
            blocks = tile._room(shape, epilogue)
            if blocks and tile.dynamic_bytes(shape, epilogue) <= target.most_shared_bytes:
                tile = replace(tile, min_blocks=min(blocks, BLOCK_COUNTS[-1]))
                yield from (tile, *tile._in_turns(shape, epilogue, target))

    def _in_turns(self, shape: Shape, epilogue: Epilogue, target: Target) -> Iterator[Self]:
        """List the tile whose blocks are all there at a time, and go on with other images, if they fill the SMs."""
        is_wide = self.min_blocks == 1 and self.channels > _WIDE
        if self.steps == 1 or self.min_blocks not in _FULL or is_wide or shape.result_channels % 2:
            return
        room = target.units * self.min_blocks
        tile = replace(self, turns=ceil(prod(self.sizes(shape).blocks) / room))
        is_full = _FULL[self.min_blocks] * room <= prod(tile.sizes(shape).blocks) <= room
        fits = tile.dynamic_bytes(shape, epilogue) <= target.most_shared_bytes  # a turn's stages are more
        if is_full and fits and tile.turns in _TURNS and tile._room(shape, epilogue) >= tile.min_blocks:
            yield tile

    def _down(self, shape: Shape, rows: int) -> Self:
        if rows <= self.rows:
            return replace(self, steps=1)
        least = replace(self, steps=2).sizes(shape)
        if rows < shape.result_height:
            return replace(self, steps=-(-(rows + least.delay) // self.rows))
        tiles = (replace(self, steps=steps) for steps in count(max(2, -(-(rows - least.above) // self.rows))))
        return next(tile for tile in tiles if tile.sizes(shape).is_whole)

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        least = cls._least(shape)
        return {
            "channels": [n for n in (least, *_CHANNELS) if n < shape.result_channels + least and n % least == 0],
            "images": (1, 2, 4, 8),
            "across": (1, even_split(-(-shape.result_width // COLUMNS), STRIPS)),
            "rows": _ROWS,
            "steps": (1,),
            "ahead": (1, 2, 3),
            "min_blocks": BLOCK_COUNTS,
            "words": _WORDS,
            "turns": (1, *_TURNS),
        }

    def is_promising(self, shape: Shape) -> bool:
        return self._room(shape, NO_STEPS) >= self.min_blocks

    def _room(self, shape: Shape, epilogue: Epilogue) -> int:
        pairs = self.sizes(shape)
        others, times = _REGISTERS[self.words]
        needed = int(others + times * pairs.held) + _PER_ROW * max(0, self.rows - 2)
        threads = 32 * pairs.warps
        if needed > registers_for(threads, 1) or pairs.products > _MAX_PRODUCTS:
            return 0
        shared = pairs.shared_bytes(epilogue) + 1024
        return min(REGISTERS // (threads * -(-needed // 8) * 8), SHARED // shared, MAX_THREADS // threads)

    def check(self, shape: Shape, target: Target) -> None:
        pairs = self.sizes(shape)
        least = self._least(shape)
        self._require(self.channels % least == 0, "channels", self.channels, f"a multiple of {least}")
        self._require_most("channels", self.channels, -(-shape.result_channels // least) * least)
        self._require_in("words", _WORDS)
        across, height = -(-shape.result_width // COLUMNS), shape.result_height
        steps = self._down(shape, height).steps
        self._require_fields(images=shape.batch, across=across, rows=height, steps=steps)
        self._require(pairs.height > 0, "rows of a block", pairs.height, "at least 1")
        turns = -(-shape.batch // self.images) if self.steps > 1 else 1
        self._require_most("turns", self.turns, turns, ", and 1 of a step alone")
        self._require_most("unrolled products", pairs.products, _MAX_PRODUCTS)
        self._require_most("shared bytes per block", pairs.shared_bytes(NO_STEPS), target.most_shared_bytes)
        self._require_launch(target, threads=32 * pairs.warps)

    def suits(self, shape: Shape, epilogue: Epilogue) -> bool:
        """Leave the error function of several images, of many instructions, to `row_stream`."""
        return self.images == 1 or max(shape.stride) > 1 or "gelu" not in epilogue.steps

    def with_room_for(self, shape: Shape, epilogue: Epilogue, target: Target) -> Self:
        """Return the tile, or if fused steps leave too little room, the fastest of those with room.

        So too with SiLU, by which warps that have a whole vector take longer than those that share one.
        """
        has_room = self.dynamic_bytes(shape, epilogue) <= target.most_shared_bytes
        times = _SILU if "silu" in epilogue.steps else 1
        if has_room and times == 1 and self._room(shape, epilogue) >= self.min_blocks:
            return self

        def seconds(tile: Self) -> float:
            return tile.expected_seconds(shape, target) * (times if tile.words == WORDS else 1)

        return min(self._tiles(shape, target, epilogue), key=seconds, default=self)

    def dynamic_bytes(self, shape: Shape, epilogue: Epilogue) -> int:
        return self.sizes(shape).shared_bytes(epilogue)

    def sizes(self, shape: Shape) -> Pairs:
        sizes = self.channels, self.images, self.across, self.rows, self.steps, self.ahead, self.words, self.turns
        return Pairs(shape, *sizes)

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        fitted = _WHOLE if self.words == WORDS else _PARTED
        launch, of_product, row, run, step, first, few_warps, few_blocks, alone, *others = fitted
        little, much, last, overlap, bandwidth = others
        pairs = self.sizes(shape)
        blocks, products = prod(pairs.blocks), pairs.products // sum(count for _, count in pairs.depths)
        at_a_time = min(self.min_blocks, ceil(blocks / target.units))
        rows, columns = (min(sizes) for sizes in zip((pairs.input_rows, pairs.width), shape.source, strict=True))
        read = self.turns * prod(pairs.blocks[:3]) * pairs.images * rows * columns * shape.in_channels
        under_way = at_a_time * shape.itemsize * pairs.stage_halves * (self.ahead if self.steps > 1 else 1) / 65536
        rounds = max(1.0, blocks / (target.units * self.min_blocks))
        memory = shape.itemsize * (read + prod(shape.result_shape) * pairs.partial) / bandwidth
        memory *= 1 + little / under_way + much * under_way
        memory *= (1 + last * (ceil(rounds) / rounds - 1)) * (1 + alone / at_a_time)
        warp = of_product * products * pairs.quads + row * (len(pairs.loads) * pairs.stage_rows + self.rows)
        warps = pairs.warps if pairs.warps < 4 else 4 * ceil(pairs.warps / 4)  # as many as the fullest quarter has
        runs = pairs.images * pairs.stage_rows * pairs.width * (VECTOR / pairs.source_span) ** _PARTS
        runs *= pairs.source_pieces / pairs.source_vectors
        runs += pairs.results // self.channels * (VECTOR / pairs.result_span) ** _PARTS
        rest = pairs.rests * (step + warps * row * self.rows)
        busy = self.turns * (self.steps * (step + warps * warp + run * runs) + rest) + first
        busy *= ceil(blocks / target.units) / _CLOCK
        busy *= 1 + few_warps / (pairs.warps * at_a_time) + few_blocks / at_a_time
        least, most = sorted((memory, busy))
        seconds = float(launch + most * (1 + (least / most) ** overlap) ** (1 / overlap))
        times = _SHIFTED if pairs.is_shifted else 1
        return seconds * times * (_ALONE if self.turns > 1 and self.min_blocks == 1 else 1)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        from ..compute import async_copy, mma

        for name in block_names(sch):
            loops = loops_of(sch, name)
            if name.startswith(("first", "band", "ready", "begin", "pad", "epilogue", "shift")):
                bind_threads(sch, *loops[-2:])
            elif name.startswith("copy"):
                if (lanes := int(sch.get(loops[-1]).extent)) > 1:
                    sch.tensorize(loops[-1], async_copy.intrinsic(shape.dtype, lanes))
            elif name.startswith("multiply"):
                sch.bind(loops[-1], "threadIdx.y")
            elif name.startswith(("start", "window", "leave")):
                bind_threads(sch, loops[-1])
            elif name.startswith("products"):
                sch.tensorize(loops[-4], mma.intrinsic(shape.dtype, 8 if name.startswith("products8") else 16))
        sch.bind(sch.fuse(*loops_of(sch, "block")), "blockIdx.x")
