"""The gradient of the weight on the CPU: channels in parallel, sums in vector registers.

Loop nest::

    NCHW                                     NHWC
    parallel c * m                           parallel (c / lanes) * m
      for n, oh / band:                        for n, oh / band:
        padded[...] = one channel or 0           padded[..., lanes] = some channels or 0
        for kh / kernel_rows, oh, ow / lanes     for kh / kernel_rows, oh, ow
          for kh: for kw:                          for kh: for kw:
            sums of `lanes` columns                  sums of `lanes` channels
      out = sum of the lanes                   out = sums

The sums of some kernel rows stay in vector registers while the outputs of a band of
rows go by, whose input stays in the cache. In NCHW a vector divides the width, for the
columns past the edge of an image have no place in a sum.
"""

from dataclasses import dataclass

from ..shape import Shape
from ..target import Target
from ..typed import Schedule, Self
from .base import Strategy, Values
from .cpu import copy_input
from .loops import get_blocks, unroll_all
from .tiles import divisors, largest_divisor


@dataclass(frozen=True)
class CpuTapSums(Strategy):
    """Tile of the weight's gradient on the CPU."""

    on_gpu = False
    device = "a CPU"
    operations = ("grad_weight",)

    kernel_rows: int
    """Kernel rows whose sums are in registers at a time; divides them."""
    lanes: int
    """float32 values of one vector: columns (NCHW) or channels (NHWC), which it divides."""

    @classmethod
    def choose(cls, shape: Shape, target: Target) -> Self:
        """Take the vector of the fewest instructions, and as many kernel rows as registers hold the sums of."""
        registers = 16 if target.vector_bytes < 64 else 32
        rows = (registers - 4) // shape.kernel[1]
        # A vector is as many instructions as its size is powers of two.
        lanes = min(_lanes(shape, target), key=lambda n: (n.bit_count() / n, -n))
        return cls(largest_divisor(shape.kernel[0], max(1, rows)), lanes)

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        return {"kernel_rows": divisors(shape.kernel[0]), "lanes": _lanes(shape, target)}

    def check(self, shape: Shape, target: Target) -> None:
        for field, allowed in self.space(shape, target).items():
            self._require_in(field, allowed)

    def apply(self, sch: Schedule, shape: Shape) -> None:
        pad, conv, epilogue = get_blocks(sch)

        # 1. A core has some channels; taps around the lanes, images and outputs around them.
        if shape.layout == "NCHW":
            c, m, kh, kw, n, oh, ow = sch.get_loops(conv)
            ow, lane = sch.split(ow, [None, self.lanes])
            core = [c, m]
        else:
            kh, kw, c, m, n, oh, ow = sch.get_loops(conv)
            bc, lane = sch.split(c, [None, self.lanes])
            core = [bc, m]
        bkh, kh = sch.split(kh, [None, self.kernel_rows])
        band, oh = sch.split(oh, [None, _band(shape)])
        sch.reorder(*core, n, band, bkh, oh, ow, kh, kw, lane)
        taps = conv
        if shape.layout == "NCHW":
            taps = sch.rfactor(lane, 4)
        *core, n, band, bkh, oh, ow, kh, kw, lane = sch.get_loops(taps)
        cores = sch.fuse(*core)
        sch.parallel(cores)

        # 2. The padded input of a band, and the results when all images are done.
        copy_input(sch, pad, taps, band, shape.stride[1] if shape.layout == "NCHW" else 1)
        if shape.layout == "NHWC":
            sch.vectorize(sch.get_loops(pad)[-1])
        for result in (epilogue,) if taps is conv else (conv, epilogue):
            sch.reverse_compute_at(result, cores, preserve_unit_loops=True)

        # 3. The sums in registers.
        sch.vectorize(lane)
        unroll_all(sch, [kh, kw])
        sch.decompose_reduction(taps, n)


def _band(shape: Shape) -> int:
    """Count the output rows of a band: a divisor, of whose input not half is copied twice."""
    least = max(4, 2 * (shape.kernel[0] - 1) * shape.dilation[0] // shape.stride[0])
    return min(rows for rows in divisors(shape.out_height) if rows >= min(least, shape.out_height))


def _lanes(shape: Shape, target: Target) -> tuple[int, ...]:
    widest = max(1, target.vector_bytes // 4)
    extent = shape.out_width if shape.layout == "NCHW" else shape.in_channels
    return tuple(n for n in divisors(extent) if n <= widest)
