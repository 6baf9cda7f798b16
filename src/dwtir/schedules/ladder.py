"""The steps of the 2025 article, from one thread a batch item to a grid of thread blocks.

Each step inlines the padding and gives more of the loops to the GPU::

    naive   blockIdx.x = n                    for c, oh, ow: for kh, kw
    v1      blockIdx.x = n   blockIdx.y = c   for oh, ow:    for kh, kw
    v2      blockIdx.x = n*c blockIdx.y = oh  for ow:        for kh, kw
    v3      blockIdx.x = n*c blockIdx.y = oh/16, threadIdx.y = oh%16,
            threadIdx.x = ow%16               for ow/16:     for kh, kw
    v4      blockIdx.x = n*c blockIdx.y = oh/16 * ow/16,
            threadIdx.y = oh%16, threadIdx.x = ow%16         for kh, kw

The article sums into global memory; here the sum of one output is in a
register, because the convolution and its epilogue are separate blocks.
No step reuses a loaded value: KH * KW loads an output. Registers: one sum; shared memory: none.
"""

from dataclasses import dataclass

from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .base import Strategy, Values
from .loops import bind_threads, compute_at, get_blocks

LADDER_STEPS = ("naive", "v1", "v2", "v3", "v4")


@dataclass(frozen=True)
class Ladder(Strategy):
    """A step of the 2025 article."""

    layouts = ("NCHW",)
    operations = ("forward",)

    step: str = "v4"
    """One of `LADDER_STEPS`."""
    thread_y: int = 16
    thread_x: int = 16
    """Threads of a block over rows and columns, in v3 and v4."""

    @classmethod
    def choose(cls, shape: Shape, target: Target) -> Self:
        return cls()

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        return {"thread_y": (1, 2, 4, 8, 16, 32), "thread_x": (8, 16, 32, 64)}

    def check(self, shape: Shape, target: Target) -> None:
        self._require_in("step", LADDER_STEPS)
        rows = -(-shape.out_height // self.thread_y)
        columns = -(-shape.out_width // self.thread_x)
        threads = self.thread_y * self.thread_x if self.step in ("v3", "v4") else 1
        grids = {"naive": 1, "v1": shape.out_channels, "v2": shape.out_height, "v3": rows, "v4": rows * columns}
        self._require_launch(target, threads=threads, grid_y=grids[self.step])

    def apply(self, sch: Schedule, shape: Shape) -> None:
        pad, conv, epilogue = get_blocks(sch)

        # 1. Padding is a test in the innermost loop, not a buffer.
        sch.compute_inline(pad)

        # 2. Blocks, then threads. `innermost` is the loop of one output.
        n, c, oh, ow = sch.get_loops(epilogue)
        innermost = ow
        if self.step == "naive":
            sch.bind(n, "blockIdx.x")
        elif self.step == "v1":
            sch.bind(n, "blockIdx.x")
            sch.bind(c, "blockIdx.y")
        elif self.step == "v2":
            sch.bind(sch.fuse(n, c), "blockIdx.x")
            sch.bind(oh, "blockIdx.y")
        else:
            by, ty = sch.split(oh, [None, self.thread_y])
            bx, tx = sch.split(ow, [None, self.thread_x])
            if self.step == "v4":
                sch.reorder(by, bx, ty, tx)
                by = sch.fuse(by, bx)
            sch.bind(sch.fuse(n, c), "blockIdx.x")
            sch.bind(by, "blockIdx.y")
            bind_threads(sch, ty, tx)
            innermost = tx

        # 3. The sum of one output in a register.
        compute_at(sch, conv, innermost, "local")
