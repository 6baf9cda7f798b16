"""The second kernel of the weight's gradient: the sum over the parts of the first, if there are several.

`part_threads` threads sum the partials of one tap, and one of them their sums. The order is the
same in every run, and so are the bits of the result.
"""

from math import prod
from typing import Any

from ..shape import Shape
from ..target import Target
from ..typed import Schedule
from .base import Strategy
from .loops import bind_threads, compute_at, get_blocks
from .tiles import largest_divisor

MOST_PART_THREADS = 32
"""Threads over the parts of a tap: more would have few parts each."""

_MOST_TAPS = 256
"""Taps of a kernel in NCHW that are a block's: beyond, a row of them."""

_MOST_LOADS = 64
"""Parts of one thread that are loaded together, before the first is added."""


class PartSums(Strategy):
    """A strategy that has such a second kernel."""

    operations = ("grad_weight",)

    parts: int
    part_threads: int
    """Threads of the second kernel over the parts, which it divides."""

    def _require_parts(self, shape: Shape, target: Target, channels: int) -> None:
        self._require(
            self.parts % self.part_threads == 0,
            "part_threads",
            self.part_threads,
            f"a divisor of the parts, {self.parts}",
        )
        share = taps_of_block(shape, channels) * self.part_threads
        alone = self.from_parameters(self.parameters | {"min_blocks": 1})
        alone._require_launch(target, threads=share, shared_bytes=4 * share)


def taps_of_block(shape: Shape, channels: int) -> int:
    """Count the taps of a block: a channel's, or a row of a large kernel (NCHW), or one of some channels (NHWC)."""
    if shape.layout == "NHWC":
        return channels
    return prod(shape.kernel) if prod(shape.kernel) <= _MOST_TAPS else shape.kernel[1]


def part_threads_for(parts: int, shape: Shape, channels: int, target: Target) -> int:
    """Find how many threads share the parts, if a block has so many channels in NHWC."""
    most = min(MOST_PART_THREADS, target.max_threads_per_block // taps_of_block(shape, channels))
    return largest_divisor(parts, max(1, most))


def sum_parts(sch: Schedule, shape: Shape, part_threads: Any, channels: Any) -> None:
    """Give a block the taps of `taps_of_block`, and its threads the parts.

    The convolution sums up the parts in its outermost loop; `channels` are those of a block in NHWC.
    """
    _, total, epilogue = get_blocks(sch)
    parts = sch.get_loops(total)[0]
    _, share = sch.split(parts, [None, part_threads])
    shared_sum = sch.rfactor(share, 0)

    nchw = shape.layout == "NCHW"
    whole = nchw and prod(shape.kernel) <= _MOST_TAPS
    if nchw:
        c, m, kh, tap = sch.get_loops(epilogue)
        if whole:
            tap = sch.fuse(kh, tap)
        block = sch.fuse(c, m) if whole else sch.fuse(c, m, kh)
    else:
        kh, kw, c, m = sch.get_loops(epilogue)
        bc, tap = sch.split(c, [None, channels])
        sch.reorder(kh, kw, bc, m, tap)
        block = sch.fuse(kh, kw, bc, m)
    sch.bind(block, "blockIdx.x")
    sch.bind(tap, "threadIdx.x")
    compute_at(sch, total, tap, "local")

    sch.set_scope(shared_sum, 0, "shared")
    leave = sch.cache_write(shared_sum, 0, "local")
    compute_at(sch, leave, block)
    _, share, *taps = sch.get_loops(leave)
    tap = sch.fuse(*taps[2:]) if whole else taps[3 if nchw else 2]
    sch.reorder(share, tap)
    bind_threads(sch, share, tap)
    sch.compute_at(shared_sum, sch.get_loops(leave)[-1], preserve_unit_loops=True)
    parts = sch.get_loops(shared_sum)[-6]
    sch.annotate(parts, "pragma_auto_unroll_max_step", _MOST_LOADS)
    sch.annotate(parts, "pragma_unroll_explicit", 0)
