"""What the two articles published, every table and each time once; and the same measured here.

"2017" is "Optimize Deep Learning GPU Operators with TVM: A Depthwise Convolution Example" on a GTX 1080, whose library
is TensorFlow 1.2. "2025" is "TVM: 2D Depth Conv GPU Optimization" on a T4, whose library is PyTorch. All is float32,
NCHW and warm.

Here the library is PyTorch, and AutoTVM's result is the tuning database's. The
article of 2025 gives v1 as 2.3 times as fast as naive; its times make that 4.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TypeAlias

from ..epilogue import Epilogue
from ..errors import NotTunedError
from ..kernel import Timing
from ..shape import Shape
from ..target import Target
from .contenders import Contender, ours, peers
from .problem import Problem
from .rounds import checked, in_turns
from .timers import open_timer

LIBRARY = "library"
"""Way of a case that the article computed by its library, and we by PyTorch."""

TUNED = "tuned"
"""Way of a case whose schedule was found by a search."""


@dataclass(frozen=True)
class Article:
    """Where numbers were published, and what they were measured on."""

    name: str
    device: str
    library: str


@dataclass(frozen=True)
class Case:
    """One thing that an article timed."""

    shape: str
    """The layer, as `DepthwiseConv2dShape.parse` reads it."""
    way: str
    """`LIBRARY`, `TUNED`, or the name of a step in `dwtir.ARTICLE_STEPS`."""
    epilogue: str = ""
    """Steps behind the convolution: fused by a schedule, separate in a library."""


@dataclass(frozen=True)
class Table:
    """A table of an article, in ratios."""

    article: Article
    title: str
    against: tuple[str, ...]
    """What its times are compared with, in words."""
    lines: dict[Case, tuple[Case | None, ...]]
    """The cases in their order, each with a case for every entry of `against`, or None."""


_2017, _2025 = Article("2017", "GTX 1080", "tf-1.2"), Article("2025", "T4", "PyTorch")

_BEST = "vthreads_1x2"
"""The schedule that the article of 2017 ends with."""
_FUSED = "scale_shift+relu"


def _square(size: int, way: str, epilogue: str = "", *, kernel: int = 3, filters: int = 1) -> Case:
    multiplier = f"_m{filters}" if filters > 1 else ""
    return Case(f"1x256x{size}x{size}_k{kernel}_psame{multiplier}", way, epilogue)


_LADDER_US = {
    Case("3x4x16x32_k7_psame", way): us
    for way, us in {"naive": 3290.4, "v1": 768.7, "v2": 76.2, "v3": 10.1, "v4": 8.0, TUNED: 3.5, LIBRARY: 69.6}.items()
}
_NAIVE, *_STEPS, _BY_LIBRARY = _LADDER_US

PUBLISHED_US = {
    **{
        _square(size, way): us
        for way, times in {
            LIBRARY: {21: 16.1, 32: 34.8, 64: 130.9, 96: 251.6},
            "one_channel": {21: 9.1, 32: 14.5, 64: 98.9, 96: 387.4},
            "blocks_32x32": {64: 63.4, 96: 132.5},
            "threads_8x32": {32: 9.7},
            "threads_4x32": {32: 8.8, 96: 95.9},
            "threads_1x32": {32: 17.7},
            "threads_32x1": {32: 32.5},
            "vthreads_1x4": {96: 103.1},
            _BEST: {96: 90.9},
        }.items()
        for size, us in times.items()
    },
    **{
        _square(96, way, kernel=kernel, filters=filters): us
        for kernel, filters, *times in ((5, 1, 597.6, 128.9), (3, 2, 659.9, 143.7), (5, 2, 1203.9, 170.5))
        for way, us in zip((LIBRARY, _BEST), times, strict=True)
    },
    _square(96, LIBRARY, _FUSED): 419.9,
    _square(96, _BEST, _FUSED): 91.5,
    **_LADDER_US,
}
"""Microseconds, as published."""


TABLES = (
    Table(
        _2017,
        "One channel a block",
        ("the library",),
        {_square(size, "one_channel"): (_square(size, LIBRARY),) for size in (21, 32, 64, 96)},
    ),
    Table(
        _2017,
        "Blocks of 32 x 32 outputs",
        ("the library", "one channel a block"),
        {_square(size, "blocks_32x32"): (_square(size, LIBRARY), _square(size, "one_channel")) for size in (64, 96)},
    ),
    Table(
        _2017,
        "Numbers of threads",
        ("8 x 32 threads",),
        {
            _square(32, f"threads_{threads}"): (_square(32, "threads_8x32"),)
            for threads in ("8x32", "4x32", "1x32", "32x1")
        },
    ),
    Table(
        _2017,
        "Virtual threads",
        ("8 x 8 threads", "the library"),
        {
            _square(96, way): (_square(96, "blocks_32x32"), _square(96, LIBRARY))
            for way in ("blocks_32x32", "vthreads_1x4", "threads_4x32", _BEST)
        },
    ),
    Table(
        _2017,
        "Kernel size and channel multiplier",
        ("the library",),
        {
            _square(96, _BEST, kernel=kernel, filters=filters): (_square(96, LIBRARY, kernel=kernel, filters=filters),)
            for filters in (1, 2)
            for kernel in (3, 5)
        },
    ),
    Table(
        _2017,
        "Scale, shift and ReLU: separate in the library, fused by us",
        ("the library with them", "the same without them"),
        {
            _square(96, LIBRARY, _FUSED): (None, _square(96, LIBRARY)),
            _square(96, _BEST): (_square(96, LIBRARY, _FUSED), None),
            _square(96, _BEST, _FUSED): (_square(96, LIBRARY, _FUSED), _square(96, _BEST)),
        },
    ),
    Table(
        _2025,
        "From naive to tuned",
        ("naive", "the step before"),
        {
            _NAIVE: (_NAIVE, None),
            **{step: (_NAIVE, before) for before, step in pairwise((_NAIVE, *_STEPS))},
            _BY_LIBRARY: (_NAIVE, None),
        },
    ),
)
"""The articles' tables, in their order."""

NEEDS_GPU = "needs a GPU"

Found: TypeAlias = "Timing | str"
"""The times of a case, or why there are none."""


def measure(target: Target, *, baselines: bool, rounds: int) -> dict[Case, Found]:
    """Time all cases of the articles, warm as they did; without a GPU none has a time.

    The library's cases, if asked for, are measured by the fastest way of PyTorch in NCHW.
    """
    if target.kind != "cuda":
        return dict.fromkeys(PUBLISHED_US, NEEDS_GPU)
    found: dict[Case, Found] = {}
    layer = attrgetter("shape", "epilogue")
    for (shape, epilogue), group in groupby(sorted(PUBLISHED_US, key=layer), key=layer):
        problem = Problem(Shape.parse(shape), Epilogue.of(epilogue), target, cold=False)
        found |= _measure_layer(problem, list(group), baselines, rounds)
    return {case: found[case] for case in PUBLISHED_US}


def _measure_layer(problem: Problem, cases: list[Case], baselines: bool, rounds: int) -> dict[Case, Found]:
    found: dict[Case, Found] = {}
    own: list[Contender] = []
    for case in cases:
        if case.way == LIBRARY:
            continue
        try:
            own.append(ours(problem, case.way, name=case.way, on_miss="error"))
        except NotTunedError:
            found[case] = "no tuning record"
    others = peers(problem, ["NCHW"], compiled=False) if baselines else []
    right, wrong = checked(problem, own, others)
    timings = in_turns(open_timer(problem.target, right, problem.sets, patience=0), right, rounds)
    library = [timings[peer.name] for peer in others if peer.name in timings]
    for case in cases:
        if case.way in timings:
            found[case] = timings[case.way]
        elif case.way == LIBRARY:
            fastest = min(library, key=lambda timing: timing.median, default=None)
            found[case] = fastest or "; ".join(wrong) or "not asked for"
    return found


def table_cells(table: Table, found: Mapping[Case, Found]) -> list[tuple[str, ...]]:
    """Write a table of an article as cells, the first line its head.

    Ratios are how many times faster a line is than what it is against, as published and here.
    """
    head = ["layer", "schedule", table.article.device, "here"]
    for name in table.against:
        head += [f"over {name}", "here"]
    lines = [tuple(head)]
    for case, bases in table.lines.items():
        way = f"{table.article.library}, here PyTorch" if case.way == LIBRARY else case.way
        what = f"{way} + {case.epilogue.replace('+', ' + ')}" if case.epilogue else way
        here = time if isinstance(time := found[case], str) else f"{time.median * 1e6:.2f}"
        line = [case.shape, what, f"{PUBLISHED_US[case]:.1f}", here]
        for base in bases:
            published = base and f"{PUBLISHED_US[base] / PUBLISHED_US[case]:.2f}x"
            line += [published or "", _ratio(found[base], found[case]) if base else ""]
        lines.append(tuple(line))
    return lines


def _ratio(base: Found, case: Found) -> str:
    if isinstance(base, str) or isinstance(case, str):
        return "-"
    return f"{base.median / case.median:.2f}x"
