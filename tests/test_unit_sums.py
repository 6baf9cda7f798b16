"""The weight's gradient as products over units of channels: who gets it, and its sizes."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import dwtir
from backends import H200, REPLAY
from dwtir import DepthwiseConv2dShape, Epilogue, InvalidScheduleError, reference, schedules
from dwtir.schedules import TapSums, UnitSums
from dwtir.target import resolve
from dwtir.units import LANES, Units
from strategies import integer_tensors, shapes

SHAPE = DepthwiseConv2dShape.parse("32x32x28x28_k7_p3_float16_nhwc_wgrad")
TILE = UnitSums(16, 1, 4, 4, 6, 3, 1, 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("about", ["128x192x28x28_k5_p2", "128x384x14x14_k9_p4"])
def test_each_product_is_one_instruction(about, dtype):
    shape = DepthwiseConv2dShape.parse(f"{about}_{dtype}_nhwc_wgrad")
    kernel = dwtir.build(shape, target="nvidia-h200")
    tile = kernel.strategy
    assert isinstance(tile, UnitSums)
    sizes, taps = tile.sizes(shape), tile.channels * shape.kernel[0] * shape.kernel[1]
    chunks = shape.in_channels // tile.channels
    assert kernel.info.workspace == (("float32", (tile.parts, chunks, taps)),)
    products = sizes.unrolled * sizes.own * sizes.groups * shape.kernel[0] * sizes.spans
    assert kernel.source().count("mma.sync.aligned.m16n8k16") == products
    resources = kernel.resources()
    assert resources.threads == 32 * tile.warps
    assert resources.shared_bytes == sizes.shared_bytes
    assert resources.spill_bytes == 0
    assert tile.min_blocks * resources.threads * resources.registers <= 65536


@pytest.mark.parametrize(
    ("about", "target", "is_units"),
    [
        ("128x96x56x56_k7_p3_float16", "nvidia-h200", True),
        ("128x96x56x56_k5_p2_bfloat16", "nvidia-a100-sxm4-80gb", True),
        ("128x96x56x56_k7_p3_float16", "tesla-t4", False),
        ("128x96x56x56_k7_p3", "nvidia-h200", False),
        ("128x100x56x56_k7_p3_float16", "nvidia-h200", False),  # no whole vectors
        ("128x96x56x56_k7_p3_m2_float16", "nvidia-h200", False),
        ("32x128x56x56_k31_p15_float16", "nvidia-h200", False),  # no registers for its sums
        ("1x24x14x14_k5_p2_float16", "nvidia-h200", False),  # few outputs
    ],
)
def test_who_gets_tensor_cores(about, target, is_units):
    shape = DepthwiseConv2dShape.parse(f"{about}_nhwc_wgrad")
    chosen = schedules.choose(shape, resolve(target))
    assert type(chosen) is (UnitSums if is_units else TapSums)


@pytest.mark.parametrize(
    ("shape", "change", "complaint"),
    [
        (SHAPE, {"together": 3}, "together must be in (1, 2, 4, 8), got 3"),
        (SHAPE, {"channels": 12}, "channels must be a multiple of 8, got 12"),
        (SHAPE, {"warps": 5}, "channels must be a multiple of 40, got 16"),
        (SHAPE, {"channels": 24, "warps": 1}, "channels must be a divisor of 32, got 24"),
        (SHAPE, {"images": 3}, "images must be a multiple of 2, got 3"),
        (SHAPE, {"parts": 300}, "parts must be at most 248, got 300"),
        (SHAPE, {"parts": 4}, "part_threads must be a divisor of 4, got 3"),
        (SHAPE, {"parts": 128, "part_threads": 128}, "threads per block must be at most 1024"),
        (SHAPE, {"min_blocks": 17}, "min_blocks must be at most 32, of at most 2048 threads"),
        (SHAPE, {"warps": 2}, "sums of a thread must be at most 128"),
        (SHAPE, {"images": 16}, "shared bytes per block must be"),
        (SHAPE, {"images": 64}, "unrolled products must be at most 1024"),
        (replace(SHAPE, width=1200), {}, "unrolled loads must be at most 1024"),
        (replace(SHAPE, dtype="float32"), {}, "of float16 or bfloat16 in NHWC"),
        (replace(SHAPE, in_channels=20), {}, "of whole vectors of channels"),
    ],
)
def test_what_does_not_fit_is_refused(shape, change, complaint):
    TILE.check_use(SHAPE, H200)
    with pytest.raises(InvalidScheduleError, match=re.escape(complaint)):
        replace(TILE, **change).check_use(shape, H200)


@pytest.mark.parametrize(
    ("about", "tile"),
    [
        ("3x16x9x11_k3_p1_float16", (16, 2, 2, 2, 3, 3)),
        ("2x8x7x7_k3_p2_bfloat16", (8, 1, 4, 1, 1, 1)),
        ("3x8x11x13_k5_s2_p2_float16", (8, 4, 4, 2, 2, 1, 2)),
        ("2x16x10x12_k3x4_p1x2x0x1_d2_float16", (16, 8, 2, 1, 2, 2, 2)),
    ],
)
def test_any_tile_is_right(about, tile):
    shape, strategy = DepthwiseConv2dShape.parse(f"{about}_nhwc_wgrad"), UnitSums(*tile)
    strategy.check_use(shape, H200)
    tensors = integer_tensors(shape, Epilogue(), 0)
    expected = reference.depthwise_conv2d(shape, *tensors.values())
    (got,) = REPLAY.run(strategy, shape, Epilogue(), tensors)
    np.testing.assert_array_equal(got, expected)


@given(
    shape=shapes(layouts=("NHWC",), dtypes=("float16",)),
    together=st.sampled_from([1, 2, 4, 8]),
    pairs=st.integers(1, 4),
    parts=st.integers(1, 9),
)
def test_the_windows_see_all_inputs_of_their_gradients(shape, together, pairs, parts):
    shape = replace(shape, operation="grad_weight")
    sizes = Units(shape, 8, together, 2 * pairs, 1, parts, 1)
    units, right = pairs * sizes.across, (shape.kernel[1] - 1) * shape.dilation[1]
    assert 0 <= LANES * sizes.groups - units < LANES
    assert sizes.across * sizes.columns >= shape.out_width
    assert (sizes.columns - 1) * shape.stride[1] + right < sizes.window
    for unit in range(units):
        pair, column = divmod(unit, sizes.across)
        first = column * sizes.columns * shape.stride[1]
        assert sizes.place(unit) == pair * sizes.pitch + first
        assert first + sizes.window <= sizes.pitch
    assert sizes.place(LANES * sizes.groups - 1) + sizes.window <= sizes.input_columns
    assert shape.padding[1] + shape.width <= sizes.pitch
    # A gradient's last inputs come before the next image, and its part sees them all.
    seen = shape.padding[0] + shape.height - 1
    assert sizes.steps > seen // shape.stride[0]
    assert sizes.parts * sizes.part_steps >= sizes.all_steps
    assert sizes.turns * sizes.unrolled >= sizes.part_steps + sizes.ring - 1
    even = sizes.even_parts(parts)
    assert 1 <= even <= parts
    assert replace(sizes, parts=even).turns == sizes.turns


@given(shape=shapes(layouts=("NHWC",), dtypes=("bfloat16",), batch=130, flop=2**26))
def test_the_chosen_tile_is_one_of_those_worth_trying(shape):
    channels = LANES * shape.in_channels
    shape = replace(shape, operation="grad_weight", channel_multiplier=1, in_channels=channels)
    if UnitSums.claims(shape, H200):
        guesses, space = UnitSums.guesses(shape, H200), UnitSums.space(shape, H200)
        assert guesses[0] == UnitSums.choose(shape, H200)
        for tile in guesses:
            tile.check_use(shape, H200)
            assert tile.is_promising(shape)
            assert all(value in space[field] for field, value in tile.parameters.items())
