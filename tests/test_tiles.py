"""Tiles that do not fit a layer are refused, in words that name the field and what it may be."""

import re
import runpy
from dataclasses import replace
from pathlib import Path

from backends import H200
from dwtir import Epilogue, InvalidScheduleError, Shape
from dwtir.schedules import (
    BandedChannels,
    BandedMatrix,
    BandedSums,
    ChannelPairs,
    SplitImage,
    TapSums,
    UnitSums,
    WholeImage,
)
from dwtir.target import resolve
from marks import parametrize, raises

# A layer, a tile that fits it, and what of either is changed: what is said then.
REFUSED = {
    ("2x8x12x12_k7_p3_float16", BandedMatrix(4, 7, 1)): """
    dtype=float32: float16 or bfloat16
    stride=2 operation=grad_data: stride 1
    rows=65: must be at most 64
    kernel_rows=8: must be at most 7
    rows=12 warps=2: warps must be at most 1
    height=14 width=14 loads=fours: loads must be one of ('pairs', 'planes')
    batch=9 height=64 width=64 kernel=63 padding=31 rows=60 kernel_rows=63: unrolled loads
    batch=9 height=64 width=64 kernel=31 padding=15 rows=32 kernel_rows=31: unrolled products
    """,
    ("8x96x56x56_k5_p2_float16_nhwc", ChannelPairs(32, 1, 14, 4, 14, 2, 3)): """
    channels=20: must be a multiple of 8
    channels=104: must be at most 96
    images=9: must be at most 8
    across=15: must be at most 14
    rows=57: must be at most 56
    steps=15: must be at most 14
    steps=2 rows=2: rows of a block must be at least 1
    rows=56 steps=1: unrolled products must be at most 640
    channels=96 ahead=9: shared bytes per block must be at most
    min_blocks=17: must be at most
    words=3: must be one of
    in_channels=12: channels must be at most 16, got 32
    channel_multiplier=3: channels must be a multiple of 24, got 32
    kernel=1 padding=0 stride=2: stride at most the kernel
    stride=2 operation=grad_data: of gradients it and channel_multiplier 1
    """,
    ("8x96x56x56_k7_p3_float16_nhwc", BandedChannels(4, 2, 7, 4, 4, 3)): """
    rows=57: must be at most 56
    down=15: must be at most 14
    across=8: must be at most 7
    down=4: tiles of an image must be at most 16
    channels=8: must be one of
    warps=3: channels of a block must be a multiple of 8
    rows=56 down=1: unrolled products must be at most 1024
    warps=32: shared bytes per block must be at most 101376
    in_channels=12: channels by eights
    channel_multiplier=2: channels by eights
    stride=2: channels by eights
    dilation=2: channels by eights
    """,
    ("32x32x28x28_k7_p3_float16_nchw_wgrad", BandedSums(14, 4, 2, 2, 3)): """
    rows=29: must be at most 28, got 29
    warps=17: must be at most 16, got 17
    parts=6: must be at most 4, got 6
    parts=1: part_threads must be a divisor of the parts, 1, got 2
    kernel=33 padding=16 rows=7: sums of a thread must be at most 128
    kernel=13 padding=6 rows=7: shared bytes per block must be
    dilation=9 padding=27: unrolled loads must be at most 1024
    dtype=float32: of float16 or bfloat16 in NCHW
    """,
    ("32x32x28x28_k7_p3_float16_nhwc_wgrad", UnitSums(16, 1, 4, 4, 6, 3, 1, 2)): """
    together=3: must be one of (1, 2, 4, 8), got 3
    channels=12: must be a multiple of 8, got 12
    warps=5: channels must be a multiple of 40, got 16
    channels=24 warps=1: must be a divisor of 32, got 24
    images=3: must be a multiple of 2, got 3
    parts=300: must be at most 248, got 300
    parts=4: part_threads must be a divisor of the parts, 4, got 3
    parts=128 part_threads=128: threads per block must be at most 1024
    warps=2: sums of a thread must be at most 128
    ahead=40: shared bytes per block must be at most 232448
    images=64: unrolled products must be at most 1024
    width=1200: unrolled loads must be at most 1024
    dtype=float32: of float16 or bfloat16 in NHWC
    in_channels=20: of whole vectors of channels
    """,
    ("8x32x56x56_k3_p1_nchw_wgrad", TapSums(4, 4, 3, 3, 1, 1, 64, 4, 4, 1, 4, 4, 1)): """
    lanes=3: must be one of (1, 2, 4), got 3
    channels=2: must be 1 in NCHW, got 2
    kernel_rows=2: must be a divisor of 3, got 2
    kernel_threads=3: kernel_rows must be a divisor of 3, got 9
    rows=57: must be at most 56, got 57
    threads=1569: must be at most 1568, got 1569
    parts=26: must be at most 25, got 26
    part_threads=3: must be a divisor of the parts, 4
    threads=1025 parts=1 part_threads=1: threads per block
    """,
    ("8x32x56x56_k3_p1_float16_nhwc_wgrad", TapSums(4, 4, 3, 3, 2, 16, 4, 8, 8, 1, 1, 1, 1)): """
    grad_lanes=2: must be one of (1,), got 2
    vector=16: must be one of (1, 2, 4, 8), got 16
    channels=17: must be at most 16, got 17
    vector=4 channels=8 threads=64: shared bytes per block
    """,
    ("1x1x130x130_k128x1_wgrad", TapSums(1, 1, 1, 1, 1, 1, 1, 1, 1, kernel_threads=64)): """
    kernel_threads=128: must be at most 64, got 128
    """,
    ("1x1x40x40_k12_wgrad", TapSums(1, 1, 6, 12, 1, 1, 1, 1, 1)): """
    kernel_rows=12: sums of a thread must be at most 128, got 144
    """,
    ("2x8x57x57_k3_p1", SplitImage(4, 1, 4, 1, 4, 3)): """
    thread_y=2: parts and pieces must be 1 but in NCHW, of single images, got (4, 3)
    layout=NHWC: parts and pieces must be 1 but in NCHW
    parts=56: must be as many as have columns, got 56
    bands=20: must be at most 57, got 60
    lanes=4: must be one of (8,), got 4
    bands=1 parts=1 pieces=57: threads or results of an image must be a vector's elements or more, got 1
    """,
    ("1x8x6x1_k2x1_d2_nhwc", WholeImage(2, 1, 1, 16)): """
    turns=2: must be at most 1, got 2
    """,
}
CASES = [(*fitting, line.strip()) for fitting, lines in REFUSED.items() for line in lines.strip().splitlines()]


@parametrize(("about", "tile", "line"), CASES)
def test_what_does_not_fit_is_refused(about, tile, line):
    shape, (changes, complaint) = Shape.parse(about), line.split(": ")
    if complaint.startswith("must"):
        complaint = f"{changes.partition('=')[0]} {complaint}"
    tile.check_use(shape, H200)
    pairs = (one.split("=") for one in changes.split())
    values = {name: int(value) if value.isdecimal() else value for name, value in pairs}
    others = {name: values.pop(name) for name in [*values] if name in Shape.__dataclass_fields__}
    with raises(InvalidScheduleError, match=re.escape(complaint)):
        replace(tile, **values).check_use(replace(shape, **others), H200)


def test_tensor_cores_are_of_newer_devices():
    with raises(InvalidScheduleError, match="from sm_80 on"):
        BandedMatrix(4, 7, 1).check_use(Shape.parse("2x8x12x12_k7_p3_float16"), resolve("tesla-t4"))


def test_what_compute_sanitizer_runs_fits():
    script = runpy.run_path(str(Path(__file__).parents[1] / "ci/sanitize.py"))
    tiles = [(shape, tile) for shape, tile in script["cases"](H200) if not isinstance(tile, str)]
    names = "banded_matrix banded_sums channel_pairs channel_vector register_window split_image whole_image"
    assert sorted({tile.name for _, tile in tiles}) == names.split()
    for shape, tile in tiles:
        tile.check_use(shape, H200, Epilogue.of(script["EPILOGUE"] if shape.operation == "forward" else None))
