"""The schedule of the 2017 article: tiles in shared memory, threads and virtual threads.

Loop nest, for a block of block_h x block_w outputs of one channel::

    blockIdx.x = n * c            blockIdx.y = tiles of the channel
      weight_shared[KH, KW] = weight            (all threads)
      padded_shared[(block_h-1)*SH + (KH-1)*DH + 1, same for w] = data or 0
      vthread.y, vthread.x
        threadIdx.y, threadIdx.x
          acc_local[block_h / (vthread_y*thread_y), ...]
            for oh, ow: for kh, kw: acc += padded_shared * weight_shared
          out = epilogue(acc_local)

Shared bytes: (tile with its halo + KH*KW) * itemsize; registers: the sums. A thread's outputs lie side by side within a
virtual thread, these a sub-tile apart: with vthread_x = outputs per thread neighbours read other banks.

The kernel is bound by shared memory: an output costs 2*KH*KW reads of it.
The article binds n*c to blockIdx.y; here it is blockIdx.x, which alone has
room for more than 65535 channels.
"""

from dataclasses import dataclass
from math import prod

from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .base import Strategy, Values
from .loops import bind_threads, compute_at, get_blocks
from .tiles import reach


@dataclass(frozen=True)
class SharedTile(Strategy):
    """Tile of the 2017 article."""

    layouts = ("NCHW",)
    operations = ("forward",)

    block_h: int = 32
    block_w: int = 32
    """Outputs of one thread block. The size of the output makes it the article's first version, one channel a block."""
    thread_y: int = 8
    thread_x: int = 8
    vthread_y: int = 1
    vthread_x: int = 1
    """Threads and virtual threads over the rows and columns of a tile."""
    padding: str = "staged"
    """One of "staged", "inline": whether shared memory holds the padded tile, or the input alone
    with the test for padding in the inner loop."""

    @classmethod
    def claims(cls, shape: Shape, target: Target) -> bool:
        """Tell whether shared memory holds at least the window of one output."""
        least = cls(1, 1, 1, 1)._shared_bytes(shape, target)
        return super().claims(shape, target) and least <= target.shared_bytes_per_block

    @classmethod
    def one_channel(cls, shape: Shape, target: Target) -> Self:
        """Make the article's first version: a block computes a whole channel."""
        return cls(block_h=shape.out_height, block_w=shape.out_width)

    @classmethod
    def choose(cls, shape: Shape, target: Target) -> Self:
        """Take the article's best, shrunk until it is no larger than the output and fits.

        Threads cover 32 columns, one bank each; 8 rows of them make 4 outputs a thread from a 32x32 tile. A tile with
        its halo that outgrows shared memory (a large stride or kernel) is halved along its longer side.
        """
        block_h, block_w = min(32, shape.out_height), min(32, shape.out_width)
        while True:
            tile = cls(block_h, block_w, min(8, block_h), min(32, block_w))
            halved_h, halved_w = -(-block_h // 2), -(-block_w // 2)
            if tile._shared_bytes(shape, target) <= target.shared_bytes_per_block or block_h * block_w == 1:
                return tile
            block_h, block_w = (halved_h, block_w) if block_h >= block_w else (block_h, halved_w)

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        return {
            "block_h": (4, 8, 16, 32, 64),
            "block_w": (8, 16, 32, 64),
            "thread_y": (1, 2, 4, 8, 16, 32),
            "thread_x": (1, 2, 4, 8, 16, 32),
            "vthread_y": (1, 2, 4),
            "vthread_x": (1, 2, 4),
        }

    def check(self, shape: Shape, target: Target) -> None:
        self._require_in("padding", ("staged", "inline"))
        rows = -(-shape.out_height // self.block_h)
        columns = -(-shape.out_width // self.block_w)
        self._require(
            self.vthread_y * self.vthread_x <= 8,
            "virtual threads",
            self.vthread_y * self.vthread_x,
            "at most 8, for each multiplies the code",
        )
        shared, threads = self._shared_bytes(shape, target), self.thread_y * self.thread_x
        self._require_launch(target, threads=threads, shared_bytes=shared, grid_y=rows * columns)

    def _shared_bytes(self, shape: Shape, target: Target) -> int:
        """Bytes of the staged tile and filter; a tile is rounded up to whole threads."""
        rows, cols = self.vthread_y * self.thread_y, self.vthread_x * self.thread_x
        if self.padding == "inline":
            tile = shape.height * shape.width
        else:
            tile = reach(shape, 0, -(-self.block_h // rows) * rows) * reach(shape, 1, -(-self.block_w // cols) * cols)
        return (tile + prod(shape.kernel)) * shape.itemsize * target.widening(shape.dtype)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        pad, conv, epilogue = get_blocks(sch)

        # 1. One block computes a tile of one channel: blockIdx.x, blockIdx.y.
        n, c, oh, ow = sch.get_loops(epilogue)
        by, oh = sch.split(oh, [None, self.block_h])
        bx, ow = sch.split(ow, [None, self.block_w])
        vy, ty, oh = sch.split(oh, [self.vthread_y, self.thread_y, None])
        vx, tx, ow = sch.split(ow, [self.vthread_x, self.thread_x, None])
        sch.reorder(n, c, by, bx, vy, vx, ty, tx, oh, ow)
        channel, tile = sch.fuse(n, c), sch.fuse(by, bx)
        sch.bind(channel, "blockIdx.x")
        sch.bind(tile, "blockIdx.y")

        # 2. Threads next to each other; virtual threads a sub-tile apart.
        sch.bind(vy, "vthread.y")
        sch.bind(vx, "vthread.x")
        bind_threads(sch, ty, tx)

        # 3. The sums in registers; scale, shift and activation follow from there.
        compute_at(sch, conv, tx, "local")

        # 4. Input tile and filter in shared memory: each value is read KH*KW times
        #    and KH*KW*outputs times.
        if self.padding == "staged":
            sch.set_scope(pad, 0, "shared")
            stage = pad
        else:
            sch.compute_inline(pad)
            stage = sch.cache_read(conv, 0, "shared")
        filters = sch.cache_read(conv, 1, "shared")
        for copy in (stage, filters):
            compute_at(sch, copy, tile)
            _, *threads = sch.split(sch.fuse(*sch.get_loops(copy)[2:]), [None, self.thread_y, self.thread_x])
            bind_threads(sch, *threads)
