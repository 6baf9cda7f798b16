"""The weight's gradient: what its tile is refused for, and what the model chooses."""

import re
from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from backends import H200, on_h200
from dwtir import InvalidScheduleError, Shape
from dwtir.nvrtc import _with_min_blocks
from dwtir.schedules import TapSums, choose
from dwtir.schedules.tap_cost import Tiles, allocated_bytes, estimate, other_blocks, tiles_of_channel
from dwtir.schedules.tap_tiles import ranked

NCHW = Shape.parse("8x32x56x56_k3_p1_float32_nchw_wgrad")
NHWC = Shape.parse("8x32x56x56_k3_p1_float16_nhwc_wgrad")
parametrize = pytest.mark.parametrize
both_layouts = parametrize("layout", ["nchw", "nhwc"])
IN_NCHW = TapSums(4, 4, 3, 3, 1, 1, 64, 4, 4, 1, 4, 4, 1)
IN_NHWC = TapSums(4, 4, 3, 3, 2, 16, 4, 8, 8, 1, 1, 1, 1)

# Layers with enough work for every multiprocessor, in both layouts and types.
LARGE = """
    64x256x56x56_k3_p1 128x96x56x56_k7_p3 128x240x28x28_k5_s2_p2
    128x384x14x14_k7_p3 32x960x7x7_k3_p1 32x128x56x56_k31_p15
"""


@parametrize(
    ("about", "tile"),
    [
        ("3x40x32x32_k21_p0x10x0x10_m3_float32_nhwc", TapSums(3, 16, 1, 21, 1, 40, 2, 6, 6, 3)),
        ("8x960x96x96_k1_s3_p0x0x1x1_bfloat16_nhwc", TapSums(1, 1, 1, 1, 8, 8, 24, 52, 26)),
        ("2x16x32x2_k27_s2_p26_d2_m3_float16_nhwc", TapSums(1, 1, 1, 9, 1, 16, 10, 2, 2)),
        ("1x256x56x56_k1_float16_nchw", TapSums(4, 8, 1, 1, 1, 1, 20, 5, 5, 1, 8, 8)),
        ("8x32x56x56_k3_p1_float32_nchw", IN_NCHW),
    ],
)
def test_shared_memory_is_what_is_allocated(about, tile):
    shape = Shape.parse(f"{about}_wgrad")
    assert allocated_bytes(tile, shape) == on_h200(shape, tile).resources().shared_bytes
    choose(shape, H200).check(shape, H200)


@both_layouts
def test_threads_like_rows_are_refused(layout):
    """TVM cannot lower such a tile: it does not see how high the window is."""
    shape = Shape.parse(f"3x6x23x1_k8_d3x1_p10x3x11x4_{layout}_wgrad")
    tile = TapSums(12, 1, 4, 4, 1, 6 if layout == "nhwc" else 1, 2, 3, 3, kernel_threads=2)
    mixed_up = ({}, {"threads": 1}, {"parts": 1, "part_threads": 1})
    check_tiles(shape, tile, mixed_up, fine=({"kernel_threads": 1}, {"rows": 11}))


def test_threads_like_taps_are_refused():
    """Nor does it see how wide it is."""
    shape = Shape.parse("1x1x3x9_k1x2_s2_d1x4_p0_wgrad")
    tile = TapSums(1, 2, 1, 1, 1, 1, threads=2, parts=1, part_threads=1)
    check_tiles(shape, tile, [{}], fine=({"threads": 1}, {"threads": 4}, {"cols": 1}))


def check_tiles(shape, tile, mixed_up, fine):
    for change in mixed_up:
        with pytest.raises(InvalidScheduleError, match="threads must be more or less"):
            replace(tile, **change).check(shape, H200)
    for change in fine:
        on_h200(shape, replace(tile, **change))


@parametrize("shape", [NCHW, NHWC], ids=str)
def test_min_blocks_bounds_the_first_kernel(shape):
    """The second has other threads, of which so many blocks may not fit."""
    tile = replace(IN_NCHW if shape == NCHW else IN_NHWC, min_blocks=6)
    kernel = on_h200(shape, tile)
    bounded = _with_min_blocks(kernel.source(), tile.min_blocks)
    bounds = dict(re.findall(r"__launch_bounds__\(([\d, ]+)\) (\w+)\(", bounded))
    assert {"64, 6": "main_kernel"}.items() <= bounds.items()
    assert all("," not in bound for bound, name in bounds.items() if name == "main_kernel_1")
    assert kernel.resources().registers <= 65536 // (6 * 64)


ODD = """
    1x1x1x1_k1 1x7x200x200_k112_p56 1x3x9x1030_k1x1021 1x3x9x1030_k1x1030_nhwc 4x64x112x112_k113_p60_nhwc
    128x1x997x997_k3_p1 1x997x31x31_k3_p1_float16_nhwc 8x30x31x37_k7_s3_p5_d2_m3_bfloat16_nhwc 1x64x512x512_k64_p31
"""


@parametrize("text", ODD.split())
def test_no_shape_is_too_odd(text):
    shape = Shape.parse(f"{text}_wgrad")
    tile = TapSums.choose(shape, H200)
    tile.check(shape, H200)
    assert tile.is_promising(shape)


@both_layouts
@parametrize("dtype", ["float32", "float16"])
@parametrize("layer", LARGE.split())
def test_large_layers_keep_the_device_busy(layer, dtype, layout):
    """The choice is the least estimate; no column, thread or multiprocessor idles for long."""
    shape = Shape.parse(f"{layer}_{dtype}_{layout}_wgrad")
    tile = TapSums.choose(shape, H200)
    assert shape.out_width % tile.cols == 0, "a column too many is a branch for each output"
    turns = float(tiles_of_channel(tile, shape)) / (tile.threads * tile.parts)
    assert turns > 0.8 * ceil(turns), "threads idle in the last turn"
    rounds = tile.parts * float(other_blocks(tile, shape)) / (H200.units * tile.min_blocks)
    # One part saves the second kernel, more than idle multiprocessors may cost.
    assert tile.parts == 1 or rounds > 0.7 * ceil(rounds), "the last round of blocks is nearly empty"
    best = ranked(shape, H200)
    estimates = estimate(Tiles(*np.array(best, dtype=np.float64).T), shape, H200)
    assert np.isfinite(estimates).all()
    assert (np.diff(estimates) >= 0).all()
    assert tuple(tile.parameters.values()) == best[0]


def test_kernels_of_31_rows_share_loads():
    tile = TapSums.choose(Shape.parse("32x128x56x56_k31_p15_float32_nchw_wgrad"), H200)
    assert tile.kernel_rows * tile.kernel_cols * tile.vector <= 128
    assert tile.kernel_threads > 1
