"""Halves on tensor cores by way of planes: NHWC, and images of an odd width.

Up to three kernels. The first copies the images into planes of one channel each, as
`dwtir.planes` has them; the second is that of `banded_matrix`, on the planes. In NHWC
it leaves its float32 sums in the order of its tiles, and the third brings them back::

    blockIdx.x = positions * channels              threads = positions, vectors of channels
      gathered[8 positions, 8 channels] = data or 0 or weight
      planes[8 channels, 8 positions] = gathered
    blockIdx.x = c * (groups of 16 tiles / warps)
      sums = products, as in `banded_matrix`
    blockIdx.x = tiles * channels                  threads = columns, vectors of channels
      out[8 channels] = epilogue(sums)

To turn 8 x 8 halves round takes a few instructions; all loads and stores are vectors. No shared memory, no barriers.
"""

from dataclasses import dataclass
from math import prod

from ..bands import Bands
from ..planes import Planes, channel_threads
from ..shape import LAYOUTS, Shape
from ..target import Target
from ..typed import Schedule
from .banded_matrix import BandedMatrix, place_residual
from .base import expected
from .channel_vector import ChannelVector
from .loops import bind, compute_at, unroll_all
from .register_window import RegisterWindow
from .tiles import CLOCK

_LEAST_TAPS = 144
"""Products of an input with weights from which on the copies pay: of a 12x12 kernel."""

_MOST = 2**31
_LAUNCH, _BANDWIDTH, _PER_CHANNEL = 2e-6, 8e12, 0.75e12  # the last by channels side by side
_OF_WINDOW = 0.86
"""Of their expected time windows in registers take with so many taps."""


@dataclass(frozen=True)
class BandedPlanes(BandedMatrix):
    """Tile of the products, as of `BandedMatrix`."""

    layouts = LAYOUTS
    registers = (285, 350)
    cycles = (1.0, 0.5, 2.4, 2.0, 20.0, 0.0)

    @classmethod
    def claims(cls, shape: Shape, target: Target) -> bool:
        """Tell whether there are so many taps that copies pay, and no way without them."""
        return (
            cls._is_for(shape, target)
            and prod(shape.kernel) >= _LEAST_TAPS * prod(shape.stride)
            and (shape.layout == "NHWC" or Bands(shape, 1, 1).is_odd)
            and len(cls._tiles(shape)) > 0
        )

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        window = RegisterWindow if shape.layout == "NCHW" else ChannelVector
        return expected(cls, shape, target) < _OF_WINDOW * expected(window, shape, target)

    def is_promising(self, shape: Shape) -> bool:
        return super().is_promising(shape) and max(self._elements(shape)) < _MOST

    def sizes(self, shape: Shape) -> Bands:
        return Bands(shape, self.rows, self.kernel_rows, is_copied=True)

    def _elements(self, shape: Shape) -> tuple[int, int]:
        bands = self.sizes(shape)
        sums = 128 * shape.result_channels * bands.groups * bands.rows
        planes = bands.source_channels * Planes(bands).positions
        return planes, sums if shape.layout == "NHWC" else 0

    def check(self, shape: Shape, target: Target) -> None:
        super().check(shape, target)
        count = max(self._elements(shape))
        self._require(count < _MOST, "elements of a workspace", count, f"less than {_MOST}")

    def expected_seconds(self, shape: Shape, target: Target) -> float:
        return self._cycles(shape, target) / CLOCK

    def _cycles(self, shape: Shape, target: Target) -> float:
        planes, sums = self._elements(shape)
        moved = shape.least_bytes + 2 * shape.itemsize * planes + 8 * sums
        single = _PER_CHANNEL * prod(channel_threads(shape.result_channels))
        bandwidth = min(_BANDWIDTH, single) if shape.layout == "NHWC" else _BANDWIDTH
        seconds = moved / bandwidth + _LAUNCH * (3 if sums else 2)
        return super()._cycles(shape, target) + seconds * CLOCK

    def apply(self, sch: Schedule, shape: Shape) -> None:
        self._copy(sch, shape)
        if shape.layout == "NCHW":
            super().apply(sch, shape)
            return
        pad, band, conv, sums = map(sch.get_sblock, ("pad", "band", "depthwise_conv2d", "sums"))
        warp, _ = self._deal(sch, shape, sums)
        *outer, pair = sch.get_loops(sums)[-3:]
        unroll_all(sch, outer)
        sch.vectorize(pair)
        self._multiply(sch, shape, (pad, band, conv), warp)
        _bring_back(sch, shape)

    def _copy(self, sch: Schedule, shape: Shape) -> None:
        gather, turn = map(sch.get_sblock, ("gather", "planes"))
        planes = sch.cache_write(turn, 0, "local")
        (channel_count, channels), threads, places = Planes(self.sizes(shape)).split
        c, f = sch.get_loops(planes)
        bc, tc, c = sch.split(c, [None, channel_count, channels])
        bf, tf, f = sch.split(f, [None, threads, places])
        sch.reorder(bf, bc, tf, tc, c, f)
        bind(sch, (bf, bc), tf, tc)
        sch.unroll(c)
        sch.vectorize(f)
        compute_at(sch, turn, tc)
        unroll_all(sch, sch.get_loops(turn)[-2:])
        compute_at(sch, gather, tc, "local")
        *_, f, c = sch.get_loops(gather)
        sch.unroll(f)
        whole = shape.layout == "NCHW" or shape.channel_multiplier == 1  # the weights' vectors
        sch.vectorize(c) if whole else sch.unroll(c)


def _bring_back(sch: Schedule, shape: Shape) -> None:
    """Let threads go along channels: fuse the epilogue, and store vectors."""
    epilogue, store = map(sch.get_sblock, ("epilogue", "store"))
    threads, lanes = channel_threads(shape.result_channels)
    c, group, rows, lane, half, pair = sch.get_loops(store)
    bc, tc, c = sch.split(c, [None, threads, lanes])
    sch.reorder(group, rows, half, bc, lane, tc, pair, c)
    bind(sch, (group, rows, half, bc), lane, tc)
    sums = sch.cache_read(epilogue, 0, "local")
    compute_at(sch, epilogue, tc)
    sch.set_scope(epilogue, 0, "local")
    unroll_all(sch, sch.get_loops(epilogue)[-6:])
    compute_at(sch, sums, tc)
    *outer, innermost = sch.get_loops(sums)[-6:]
    unroll_all(sch, outer)
    sch.vectorize(innermost)
    sch.unroll(pair)
    sch.vectorize(c)
    for load in place_residual(sch, epilogue, tc):
        c, *others = sch.get_loops(load)[-6:]
        sch.reorder(*others, c)
        unroll_all(sch, others)
        sch.vectorize(c)
