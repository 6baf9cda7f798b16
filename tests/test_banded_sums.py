"""The weight's gradient as diagonals of products: who gets it, what it is made of, who is not."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import dwtir
from backends import H200, REPLAY
from dwtir import DepthwiseConv2dShape, Epilogue, InvalidScheduleError, reference, schedules
from dwtir.bands import COLUMNS, TILES
from dwtir.diagonals import INPUTS, Diagonals
from dwtir.schedules import BandedSums, TapSums
from dwtir.target import resolve
from strategies import integer_tensors, shapes

SHAPE = DepthwiseConv2dShape.parse("32x32x28x28_k7_p3_float16_wgrad")
TILE = BandedSums(14, 4, 2, 2, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("about", ["32x96x56x56_k5_p2", "32x96x56x56_k7_p3", "32x96x28x28_k9_p4"])
def test_each_product_is_one_instruction(about, dtype):
    shape = DepthwiseConv2dShape.parse(f"{about}_{dtype}_wgrad")
    kernel = dwtir.build(shape, target="nvidia-h200")
    tile = kernel.strategy
    assert isinstance(tile, BandedSums)
    assert kernel.info.workspace == (("float32", (tile.parts, *shape.weight_shape)),)
    source, spans = kernel.source(), tile.sizes(shape).spans
    assert source.count("mma.sync.aligned.m16n8k16") == tile.rows * shape.kernel[0] * spans
    assert re.search(r"half2\*|nv_bfloat162\*", source)
    resources = kernel.resources()
    assert resources.threads == 32 * tile.warps
    assert resources.shared_bytes == 16 * shape.kernel[0] * spans * resources.threads
    assert resources.spill_bytes == 0
    assert tile.min_blocks * resources.threads * resources.registers <= 65536


@pytest.mark.parametrize(
    ("about", "target", "is_banded"),
    [
        ("128x96x56x56_k7_p3_float16", "nvidia-h200", True),
        ("128x96x56x56_k5_p2_bfloat16", "nvidia-a100-sxm4-80gb", True),
        ("128x96x56x56_k7_p3_float16", "tesla-t4", False),
        ("128x96x56x56_k7_p3", "nvidia-h200", False),
        ("64x256x56x56_k3_p1_float16", "nvidia-h200", False),
        ("128x96x57x57_k7_p3_float16", "nvidia-h200", False),  # no pairs
        ("32x128x56x56_k31_p15_float16", "nvidia-h200", False),  # nor registers for its sums
        ("1x384x14x14_k5_p2_float16", "nvidia-h200", False),  # few outputs
    ],
)
def test_who_gets_tensor_cores(about, target, is_banded):
    shape = DepthwiseConv2dShape.parse(f"{about}_wgrad")
    chosen = schedules.choose(shape, resolve(target))
    assert type(chosen) is (BandedSums if is_banded else TapSums)


@pytest.mark.parametrize(
    ("shape", "change", "complaint"),
    [
        (SHAPE, {"rows": 29}, "rows must be at most 28, got 29"),
        (SHAPE, {"warps": 17}, "warps must be at most 16, got 17"),
        (SHAPE, {"parts": 6}, "parts must be at most 4, got 6"),
        (SHAPE, {"parts": 1}, "part_threads must be a divisor of the parts, 1, got 2"),
        (SHAPE, {"min_blocks": 17}, "min_blocks must be at most 32, of at most 2048 threads"),
        (
            replace(SHAPE, kernel=33, padding=16),
            {"rows": 7},
            "sums of a thread must be at most 128",
        ),
        (replace(SHAPE, kernel=13, padding=6), {"rows": 7}, "shared bytes per block must be"),
        (replace(SHAPE, dilation=9, padding=27), {}, "unrolled loads must be at most 1024"),
        (replace(SHAPE, dtype="float32"), {}, "of float16 or bfloat16 in NCHW"),
    ],
)
def test_what_does_not_fit_is_refused(shape, change, complaint):
    TILE.check_use(SHAPE, H200)
    with pytest.raises(InvalidScheduleError, match=re.escape(complaint)):
        replace(TILE, **change).check_use(shape, H200)


@pytest.mark.parametrize(
    ("about", "tile"),
    [
        ("2x2x14x16_k5_p2_float16", (2, 2, 1, 1)),
        ("3x3x13x24_k7_p3_bfloat16", (3, 2, 2, 2)),
        ("6x3x14x14_k5_s2_p2_float16", (2, 1, 2, 1)),
        ("5x2x11x12_k3x4_p1x2x0x1_d2_m2_float16", (2, 2, 1, 1)),
        ("3x2x9x13_k5_p1x3x2x0_bfloat16", (3, 2, 1, 1)),  # of an odd width, one by one
    ],
)
def test_any_tile_is_right(about, tile):
    shape, strategy = DepthwiseConv2dShape.parse(f"{about}_wgrad"), BandedSums(*tile)
    tensors = integer_tensors(shape, Epilogue(), 0)
    expected = reference.depthwise_conv2d(shape, *tensors.values())
    (got,) = REPLAY.run(strategy, shape, Epilogue(), tensors)
    np.testing.assert_array_equal(got, expected)


@given(shape=shapes(layouts=("NCHW",), dtypes=("float16",)), rows=st.integers(1, 20))
def test_the_tiles_cover_all_outputs_and_the_window_their_inputs(shape, rows):
    sizes = Diagonals(replace(shape, operation="grad_weight"), rows, 2, 3)
    tiles = shape.batch * sizes.down * sizes.across
    assert 0 <= TILES * sizes.groups - tiles < TILES
    assert 0 <= 6 * sizes.turns - sizes.groups < 6
    assert len({sizes.place(tile) for tile in range(tiles)}) == tiles
    assert sizes.place(tiles - 1) == (shape.batch - 1, sizes.down - 1, sizes.across - 1)
    assert sizes.down * rows >= shape.out_height
    assert sizes.across * COLUMNS >= shape.out_width
    last = sizes.shift + (COLUMNS - 1) * shape.stride[1]
    last += (shape.kernel[1] - 1) * shape.dilation[1]
    assert 0 <= sizes.spans * INPUTS - 1 - last < INPUTS
    assert (shape.padding[1] + sizes.shift) % 2 == 0


@given(shape=shapes(layouts=("NCHW",), dtypes=("bfloat16",), channels=900, batch=130, flop=2**26))
def test_the_chosen_tile_is_one_of_those_worth_trying(shape):
    shape = replace(shape, operation="grad_weight")
    if BandedSums.claims(shape, H200):
        guesses, space = BandedSums.guesses(shape, H200), BandedSums.space(shape, H200)
        assert guesses[0] == BandedSums.choose(shape, H200)
        for tile in guesses:
            tile.check_use(shape, H200)
            assert tile.is_promising(shape)
            assert all(value in space[field] for field, value in tile.parameters.items())
