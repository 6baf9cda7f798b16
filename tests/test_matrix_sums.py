"""The weight's gradient as products of matrices: what it is made of, and what its tiles cover."""

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from backends import H200, REPLAY, on_h200
from dwtir import Epilogue, Shape
from dwtir.bands import COLUMNS, TILES
from dwtir.diagonals import INPUTS, Diagonals
from dwtir.schedules import BandedSums, UnitSums
from dwtir.units import LANES, Units
from kernels import merged_bytes
from strategies import shapes

parametrize = pytest.mark.parametrize

OF_LAYOUT = {"NCHW": BandedSums, "NHWC": UnitSums}
LAYERS = """
    32x96x56x56_k5_p2_nchw 32x96x56x56_k7_p3_nchw 32x96x28x28_k9_p4_nchw 128x192x28x28_k5_p2_nhwc
    128x384x14x14_k9_p4_nhwc
"""


@parametrize("dtype", ["float16", "bfloat16"])
@parametrize("about", LAYERS.split())
def test_each_product_is_one_instruction(about, dtype):
    shape = replace(Shape.parse(f"{about}_wgrad"), dtype=dtype)
    kernel = on_h200(shape)
    tile, source, resources = kernel.strategy, kernel.source(), kernel.resources()
    assert isinstance(tile, OF_LAYOUT[shape.layout])
    sizes = tile.sizes(shape)
    rows = shape.kernel[0] * sizes.spans
    if isinstance(tile, BandedSums):
        partial, products = shape.weight_shape, tile.rows * rows
        assert re.search(r"half2\*|nv_bfloat162\*", source)
        assert resources.shared_bytes == 16 * rows * resources.threads
    else:
        taps = tile.channels * shape.kernel[0] * shape.kernel[1]
        partial = (shape.in_channels // tile.channels, taps)
        products = sizes.ring * sizes.own * sizes.groups * rows
        assert resources.shared_bytes == sizes.shared_bytes
    assert kernel.info.workspace == (("float32", (tile.parts, *partial)),)
    assert source.count("mma.sync.aligned.m16n8k16") == products
    assert resources.threads == 32 * tile.warps
    assert tile.min_blocks * resources.threads * resources.registers <= 65536


@parametrize("about", ["2x8x13x17_k3_p1", "32x96x28x28_k7_p3"])
def test_barriers_stand_between_zeros_copies_products_and_sums(about):
    shape = Shape.parse(f"{about}_float16_nhwc_wgrad")
    tile = replace(UnitSums.choose(shape, H200), ahead=2)
    source = on_h200(shape, tile).source()
    source = source[source.rindex("main_kernel(") :]
    zeros, first, steps, sums, *_ = source.split("__syncthreads();")
    assert "(uint4*)" in zeros
    assert "cp_async" not in zeros
    assert first.index("commit_group") < first.index("wait_group_2")
    order = re.findall(r"dwtir_await|commit_group(?=\()|wait_group_\d(?=\()|mbarrier_arrive", steps)
    of_step = ["dwtir_await", "commit_group", "wait_group_2", "mbarrier_arrive"]
    assert order == [*of_step * tile.sizes(shape).ring, "wait_group_0"]
    assert steps.rindex("mma.sync") < steps.index("wait_group_0")
    assert "float2*)(((float*)buf_dyn_shmem_ptr" in sums


ANY_TILE = {
    "2x2x14x16_k5_p2_float16": BandedSums(2, 2, 1, 1),
    "3x3x13x24_k7_p3_bfloat16": BandedSums(3, 2, 2, 2),
    "6x3x14x14_k5_s2_p2_float16": BandedSums(2, 1, 2, 1),
    "5x2x11x12_k3x4_p1x2x0x1_d2_m2_float16": BandedSums(2, 2, 1, 1),
    "3x2x9x13_k5_p1x3x2x0_bfloat16": BandedSums(3, 2, 1, 1),  # odd width: one by one
    "3x16x9x11_k3_p1_float16_nhwc": UnitSums(16, 2, 2, 2, 3, 3),
    "2x8x7x7_k3_p2_bfloat16_nhwc": UnitSums(8, 1, 4, 1, 1, 1),
    "3x8x11x13_k5_s2_p2_float16_nhwc": UnitSums(8, 4, 4, 2, 2, 1, 2),
    "2x16x10x12_k3x4_p1x2x0x1_d2_float16_nhwc": UnitSums(16, 8, 2, 1, 2, 2, 2),
}


@parametrize(("about", "tile"), ANY_TILE.items())
def test_any_tile_is_right(about, tile):
    shape = Shape.parse(f"{about}_wgrad")
    REPLAY.check(tile, shape)
    if isinstance(tile, UnitSums):
        assert merged_bytes(shape, Epilogue(), tile) == tile.dynamic_bytes(shape, Epilogue())


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


@given(
    shape=shapes(layouts=("NHWC",), dtypes=("float16",)),
    channels=st.sampled_from([8, 16, 24, 48]),
    together=st.sampled_from([1, 2, 4, 8]),
    pairs=st.integers(1, 4),
    parts=st.integers(1, 9),
)
def test_the_windows_see_all_inputs_of_their_gradients(shape, channels, together, pairs, parts):
    shape = replace(shape, operation="grad_weight")
    sizes = Units(shape, channels, together, 2 * pairs, 1, parts, 1)
    units, right = pairs * sizes.across, (shape.kernel[1] - 1) * shape.dilation[1]
    assert 0 <= LANES * sizes.groups - units < LANES
    assert sizes.across * sizes.columns >= shape.out_width
    assert (sizes.columns - 1) * shape.stride[1] + right == sizes.window - 1
    assert 0 <= 2 * sizes.columns * sizes.spans - sizes.window < 2 * sizes.columns
    for unit in range(units):
        pair, column = divmod(unit, sizes.across)
        first = column * sizes.columns * shape.stride[1]
        for i in range(sizes.window):
            place = sizes.place(unit) + sizes.input_column(i)
            assert place == pair * sizes.pitch + sizes.input_column(first + i)
            assert 0 <= place + sizes.vectors - 1 - pair * sizes.pitch < sizes.pitch
    columns = {sizes.input_column(column) for column in range(shape.padding[1] + shape.width)}
    assert len(columns) == shape.padding[1] + shape.width
    assert max(columns) + sizes.vectors <= sizes.pitch
    assert sizes.grad_column(shape.out_width - 1) + sizes.vectors <= sizes.across * sizes.apart[1]
    # A gradient's last inputs come before the next image, and its part sees them all.
    seen = shape.padding[0] + shape.height - 1
    assert sizes.steps > seen // shape.stride[0]
    assert sizes.parts * sizes.part_steps >= sizes.all_steps
    assert sizes.turns * sizes.ring >= sizes.part_steps + sizes.ring - 1
    even = sizes.even_parts(parts)
    assert 1 <= even <= parts
    assert replace(sizes, parts=even).part_steps == sizes.part_steps


@parametrize("layout", OF_LAYOUT)
@given(shape=shapes(dtypes=("bfloat16",), channels=900, batch=130, flop=2**26))
def test_the_chosen_tile_is_one_of_those_worth_trying(layout, shape):
    shape, kind = replace(shape, operation="grad_weight", layout=layout), OF_LAYOUT[layout]
    if kind is UnitSums:  # which wants whole vectors
        shape = replace(shape, channel_multiplier=1, in_channels=LANES * shape.in_channels)
    if kind.claims(shape, H200):
        guesses, space = kind.guesses(shape, H200), kind.space(shape, H200)
        assert guesses[0] == kind.choose(shape, H200)
        for tile in guesses:
            tile.check_use(shape, H200)
            assert tile.is_promising(shape)
            assert all(value in space[field] for field, value in tile.parameters.items())
