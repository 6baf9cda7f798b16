"""The strategies, and how one of them is found for a shape, a target and a name."""

from collections.abc import Callable
from typing import TypeAlias

from ..epilogue import NO_STEPS, Epilogue
from ..errors import InvalidScheduleError
from ..shape import Shape
from ..target import Target
from .banded_channels import BandedChannels
from .banded_matrix import BandedMatrix
from .banded_planes import BandedPlanes
from .banded_sums import BandedSums
from .base import Strategy, paying
from .channel_pairs import ChannelPairs
from .channel_vector import ChannelVector
from .cpu import Cpu
from .cpu_tap_sums import CpuTapSums
from .ladder import LADDER_STEPS, Ladder
from .loops import sample
from .register_window import RegisterWindow
from .row_stream import RowStream
from .shared_tile import SharedTile
from .split_image import SplitImage
from .tap_sums import TapSums
from .unit_sums import UnitSums
from .whole_image import WholeImage

__all__ = ["Ladder", "SharedTile", "Strategy", "sample"]

STRATEGIES: dict[str, type[Strategy]] = {
    strategy.name: strategy
    for strategy in (
        WholeImage,
        SplitImage,
        ChannelPairs,
        BandedChannels,
        BandedMatrix,
        BandedPlanes,
        RowStream,
        RegisterWindow,
        ChannelVector,
        BandedSums,
        UnitSums,
        TapSums,
        Cpu,
        CpuTapSums,
        SharedTile,
        Ladder,
    )
}
"""All strategies by name; of those that claim a shape, "manual" takes the first that pays."""

_Step: TypeAlias = Callable[[Shape, Target], Strategy]


def _fixed(strategy: Strategy) -> _Step:
    return lambda shape, target: strategy


ARTICLE_STEPS: dict[str, dict[str, _Step]] = {
    "2025": {step: _fixed(Ladder(step)) for step in LADDER_STEPS},
    "2017": {
        "one_channel": SharedTile.one_channel,
        "blocks_32x32": _fixed(SharedTile()),
        "threads_32x1": _fixed(SharedTile(thread_y=32, thread_x=1)),
        "threads_1x32": _fixed(SharedTile(thread_y=1, thread_x=32)),
        "threads_8x32": _fixed(SharedTile(thread_y=8, thread_x=32)),
        "threads_4x32": _fixed(SharedTile(thread_y=4, thread_x=32)),
        "vthreads_1x4": _fixed(SharedTile(vthread_x=4)),
        "vthreads_2x2": _fixed(SharedTile(vthread_y=2, vthread_x=2)),
        "vthreads_1x2": _fixed(SharedTile(thread_y=8, thread_x=16, vthread_x=2)),
    },
}
"""The steps of the two articles, in their order; each is a name that `build` takes."""


def choose(shape: Shape, target: Target, epilogue: Epilogue = NO_STEPS) -> Strategy:
    """Pick strategy and tile for ``schedule="manual"``."""
    for tile in paying(STRATEGIES.values(), shape, target):
        if tile.suits(shape, epilogue):
            return tile.with_room_for(shape, epilogue, target)
    raise InvalidScheduleError(f"no strategy for {shape} on {target.name}")


def named(name: str, shape: Shape, target: Target, epilogue: Epilogue = NO_STEPS) -> Strategy:
    """Find a strategy by the name of a step or of the strategy itself, for this layout and device, or refuse."""
    steps = {step: make for ladder in ARTICLE_STEPS.values() for step, make in ladder.items()}
    if name in steps:
        return steps[name](shape, target)
    if name in STRATEGIES:
        return STRATEGIES[name].choose(shape, target).with_room_for(shape, epilogue, target)
    raise InvalidScheduleError(
        f"unknown schedule {name!r}; allowed are 'manual', 'tuned', the steps "
        f"{', '.join(steps)}, the strategies {', '.join(STRATEGIES)}, and strategy objects"
    )
