"""What the two articles published: every table, each time once, and what they compare.

"2017" is "Optimize Deep Learning GPU Operators with TVM: A Depthwise Convolution
Example" on a GTX 1080, whose library is TensorFlow 1.2. "2025" is "TVM: 2D Depth
Conv GPU Optimization" on a T4, whose library is PyTorch. All is float32 and NCHW, on
the same data again and again.

Here the library is PyTorch, and AutoTVM's result is the tuning database's. The
article of 2025 gives v1 as 2.3 times as fast as naive; its times make that 4.3.
"""

from dataclasses import dataclass
from itertools import pairwise

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


ARTICLES = (Article("2017", "GTX 1080", "tf-1.2"), Article("2025", "T4", "PyTorch"))
_2017, _2025 = ARTICLES

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
        for way, times in (
            (LIBRARY, {21: 16.1, 32: 34.8, 64: 130.9, 96: 251.6}),
            ("one_channel", {21: 9.1, 32: 14.5, 64: 98.9, 96: 387.4}),
            ("blocks_32x32", {64: 63.4, 96: 132.5}),
            *(("threads_8x32", {32: 9.7}), ("threads_4x32", {32: 8.8}), ("threads_1x32", {32: 17.7})),
            *(("threads_32x1", {32: 32.5}), ("vthreads_1x4", {96: 103.1}), ("threads_4x32", {96: 95.9})),
            (_BEST, {96: 90.9}),
        )
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
