"""The products with banded matrices: what they are made of, and what their tiles cover."""

import re
from collections import Counter
from itertools import product

import hypothesis.strategies as st
from hypothesis import given

from backends import H200, REPLAY, on_h200, replay_and_cuda
from dwtir import Shape
from dwtir.bands import COLUMNS, DEPTH, TILES, Bands
from dwtir.nvrtc import _with_min_blocks
from dwtir.planes import Planes
from dwtir.schedules import BandedMatrix, BandedPlanes
from dwtir.sheets import BANKS
from kernels import layer
from marks import layouts, parametrize
from strategies import shapes


@parametrize(("dtype", "ending"), [("float16", ""), ("bfloat16", "_dgrad")])
@parametrize("about", ["8x32x56x56_k7_p3", "2x16x40x40_k13_p6", "2x8x56x56_k31_p15"])
def test_each_product_is_one_instruction(about, dtype, ending):
    shape = Shape.parse(f"{about}_{dtype}_nchw{ending}")
    kernel, short = on_h200(shape), dtype.replace("loat", "")
    tile = kernel.strategy
    assert isinstance(tile, BandedMatrix)
    products = tile.rows * tile.kernel_rows * Bands(shape, tile.rows, tile.kernel_rows).depth_steps
    assert kernel.source().count(f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32") == products
    resources = kernel.resources()
    assert resources.threads == 32 * tile.warps
    assert resources.shared_bytes == 0


@parametrize(
    ("tile", "about"),
    [
        (BandedMatrix(7, 5, 2, 1, "planes", 2), "5x6x28x28_k5_p2_float16+bias+residual+relu"),
        (BandedMatrix(14, 7, 2, 1, "planes"), "17x3x14x14_k7_p3_bfloat16_dgrad"),
        (
            BandedMatrix(7, 3, 2, 1, "planes", 3),
            "26x3x14x14_k3_p1_float16+scale_shift+residual+relu6",
        ),  # a turn too many
        (BandedMatrix(14, 3, 2, 1, "planes", 2), "9x3x28x28_k3_s2x1_p1_bfloat16+scale_shift+relu6"),
        (BandedMatrix(5, 5, 2, 1, "planes", 2), "5x3x20x20_k5_p2_float16"),
        (BandedMatrix(9, 5, 2, 1, "planes", 2), "17x2x18x22_k5x3_p2x0_float16"),
        (BandedMatrix(13, 7, 3, 1, "planes", 4), "9x2x48x48_k7_p3_float16"),
        (BandedMatrix(8, 3, 4, 1, "planes", 2), "3x2x58x58_k3_p1_bfloat16+residual+relu"),  # padded
        (BandedMatrix(7, 3, 4, 1, "planes", 1), "3x2x52x52_k3x5_p1x2_float16"),  # and by narrower vectors
    ],
)
@replay_and_cuda
def test_planes_come_and_leave_by_vectors(backend, tile, about):
    shape, epilogue = layer(about)
    backend.check(tile, shape, epilogue)
    bands, source = tile.sizes(shape), on_h200(shape, tile, epilogue=epilogue).source()
    own = bands.leaving.vector
    assert re.search(rf"\(({ {8: 'uint4', 4: 'half4|nv_bfloat164'}[own] })\*\)\(out_ptr".replace(" ", ""), source)
    if tile.turns > 1:
        assert f"ptx_cp_async_legacy_pred_{'cg_16' if bands.sheet.vector == 8 else 'ca_8'}" in source
    assert source.count("mma_sync_aligned_m16n8k16") > tile.rows * tile.kernel_rows


@parametrize(
    ("about", "rows", "alike"),
    [("28x28", 14, 1), ("28x28", 7, 2), ("14x14", 14, 1), ("48x48", 12, 4), ("48x48", 6, 1), ("58x58", 8, 1)],
)
def test_planes_lie_apart_as_banks_want_it(about, rows, alike):
    bands = BandedMatrix(rows, 5, 1, loads="planes").sizes(Shape.parse(f"8x4x{about}_k5_p2_float16"))
    tiles = [*product(range(bands.images), range(bands.down), range(4))]
    for sheet in (bands.sheet, bands.leaving):
        found = [sheet.pitch * n + sheet.place(y, 0) + 2 * lane for n, y, lane in tiles]
        assert max(Counter(place // 2 % 32 for place in found).values()) == sheet.alike == alike
        assert 0 <= sheet.pitch - sheet.vectors * sheet.vector < BANKS


COPIERS = {
    "32x128x56x56_k31_p15_float16_nhwc": 256,
    "8x256x28x28_k29_p14_bfloat16_nhwc_dgrad": 32,
    "128x1024x7x7_k13_p6_float16_nchw": 256,
}


@parametrize(("about", "copiers"), COPIERS.items())
def test_planes_are_copied_as_vectors(about, copiers):
    shape = Shape.parse(about)
    tile = BandedPlanes.choose(shape, H200)
    kernel = on_h200(shape, tile)
    source = kernel.source()
    nhwc = shape.layout == "NHWC"
    bounds = [int(count) for count in re.findall(r"_bounds__\((\d+)\) \w+\([^)]*\);", source)]
    assert bounds == [copiers, 32 * tile.warps, 256][: 3 if nhwc else 2]
    assert len(re.findall(r"\(uint4\*\)\(planes_ptr", source)) == (8 if nhwc else 0)
    assert len(re.findall(r"\(uint4\*\)\(out_ptr", source)) == (2 if nhwc else 0)
    assert [about for about, _ in kernel.info.workspace] == [shape.dtype, "float32"][: 1 + nhwc]
    resources = kernel.resources()
    assert resources.shared_bytes == resources.stack_bytes == 0


def test_min_blocks_are_those_of_the_products():
    shape = Shape.parse("32x64x14x14_k11_p5_float16_nhwc")
    source = on_h200(shape, BandedPlanes(7, 11, 4, 3)).source()
    bounded = re.findall(r"_bounds__\((.*?)\) (\w+)\(", _with_min_blocks(source, 5))
    assert bounded[:3] == bounded[3:]
    assert bounded[:3] == [("32", "main_kernel"), ("128, 5", "main_kernel_1"), ("256", "main_kernel_2")]


@parametrize("epilogue", ["bias+relu", "scale_shift+residual+silu"])
def test_results_and_residuals_move_in_pairs(epilogue):
    source = on_h200("8x32x56x56_k7_p3_float16", "banded_matrix", epilogue=epilogue).source()
    assert re.search(r"\*\(half2\*\)\(out_ptr", source)
    assert not re.search(r"[^*]\bout_ptr\[", source)
    assert ("residual" in epilogue) == bool(re.search(r"\*\(half2\*\)\(residual_ptr", source))
    assert "= residual_ptr[" not in source


@given(shape=shapes(layouts=("NCHW",), dtypes=("float16",)), rows=st.integers(1, 20), kernel_rows=st.integers(1, 11))
def test_tiles_cover_results_and_windows_inputs(shape, rows, kernel_rows):
    bands = Bands(shape, rows, kernel_rows)
    tiles = shape.batch * bands.down * bands.across
    down, across = bands.parts
    assert 0 <= TILES * bands.groups - tiles * across < TILES
    assert len({bands.place(tile) for tile in range(tiles)}) == tiles
    assert bands.place(tiles - 1) == (shape.batch - 1, bands.down - 1, bands.across - 1)
    assert bands.down % down == 0
    assert bands.down * rows >= shape.out_height
    assert bands.across * COLUMNS * across >= shape.out_width + bands.alternates_results
    last = bands.shift + (COLUMNS - 1) * shape.stride[1]
    last += (shape.kernel[1] - 1) * bands.dilation[1]
    last = min(last, (bands.left + shape.width) // across - 1)
    assert 0 <= bands.depth_steps * DEPTH - 1 - last < DEPTH
    assert bands.kernel_steps * kernel_rows >= bands.product_rows
    assert bands.left % 2 == 0 or bands.alternates or not bands.has_pairs


ODD = {
    "2x2x13x15_k3_p1_float16": (4, 3),
    "1x3x14x23_k7_p3_bfloat16": (6, 7),
    "2x4x13x15_k5_p1x0x2x2_float16_dgrad": (4, 5),
    "2x2x13x15_k7_p3_d2_m2_float16": (13, 4),
    "2x3x14x23_k5_s2_p2_float16": (3, 4),
    "2x2x15x17_k3_s2_p1_m3_bfloat16": (8, 3),
    "2x3x14x13_k3_d2_p2_float16": (2, 3),
    "2x1x12x11_k5x3_s2x1_p2x1_m2_float16": (2, 5),
    "1x2x9x11_k5_p1x0x2x2_float16_dgrad": (9, 5),
    "2x2x7x9_k13_p6_float16": (7, 2),  # by rows of the image
    "3x2x5x3_k3x4_p2x3_float16": (2, 3),
}


FOURS = {
    "2x2x9x12_k5_p2_float16": (4, 5),
    "2x3x8x20_k7_p3_bfloat16_dgrad": (8, 7),
    "2x2x9x16_k5_s2_p2_float16": (3, 5),
    "1x2x9x8_k5_p1x0x3x0_d2x1_m2_float16": (3, 2),
    "1x2x12x12_k13_p6_float16": (12, 4),
}


@parametrize(("about", "rows"), (ODD | FOURS).items())
def test_odd_widths_load_pairs_and_others_fours(about, rows):
    loads, lanes, other = ("pairs", 2, 4) if about in ODD else ("fours", 4, 2)
    shape, strategy = Shape.parse(about), BandedMatrix(*rows, 1, loads=loads)
    assert strategy.sizes(shape).alternates == (about in ODD)
    REPLAY.check(strategy, shape)
    kernel = on_h200(shape, strategy)
    assert re.search(rf"(half|nv_bfloat16){lanes}\*", kernel.source())
    has_pairs = shape.result_width % 2 == 0 or strategy.sizes(shape).alternates_results
    assert has_pairs == bool(re.search(r"2\*\)\(out_ptr", kernel.source()))
    assert not re.search(rf"= (data|grad_out|image)_ptr\[|{other}\*\)\((data|grad_out)", kernel.source())


def test_odd_widths_leave_in_pairs_with_a_residual():
    shape, strategy = Shape.parse("2x3x14x23_k3_p1_float16"), BandedMatrix(6, 3, 1)
    assert strategy.sizes(shape).alternates_results
    REPLAY.check(strategy, shape, "bias+residual+relu")


TURNS = {
    "128x96x56x56_k5_p2_float16": (7, 5, 4, 6, "planes", 2),
    "32x96x112x112_k5_p2_float16": (8, 5, 4, 6, "fours", 1),
    "1x96x56x56_k5_p2_float16": (7, 5, 4, 1, "pairs", 1),
    "64x128x64x64_k7_p3_bfloat16": (8, 7, 4, 6, "planes", 2),
    "128x240x28x28_k3_p1_bfloat16": (7, 3, 2, 12, "planes", 2),
    "128x480x14x14_k5_p2_float16": (7, 5, 1, 25, "planes", 2),
    "128x480x14x14_k3_p1_float16": (7, 3, 2, 12, "planes", 2),
    "8x480x14x14_k5_p2_float16": (7, 5, 1, 25, "planes", 2),
    "128x128x48x48_k7_p3_float16": (6, 7, 3, 9, "planes", 2),
}


@parametrize(("about", "tile"), TURNS.items())
def test_many_warps_take_turns(about, tile):
    shape = Shape.parse(about)
    strategy = BandedMatrix.choose(shape, H200)
    assert tuple(strategy.parameters.values()) == tile
    resources = on_h200(shape, strategy).resources()
    assert 65536 // (resources.registers * resources.threads) >= strategy.min_blocks


@parametrize(
    "about", ["64x256x57x57_k3_p1_float16", "128x96x57x57_k7_p3_bfloat16_dgrad", "64x96x75x75_k5_s2_p2_float16"]
)
def test_odd_widths_leave_room_for_many_warps(about):
    shape = Shape.parse(about)
    tiles = BandedMatrix.guesses(shape, H200)
    tile, expected = tiles[0], [tile.expected_seconds(shape, H200) for tile in tiles]
    assert tile == BandedMatrix.choose(shape, H200)
    assert expected == sorted(expected, key=lambda seconds: seconds or 0.0)
    space = BandedMatrix.space(shape, H200)
    assert all(tile.parameters[field] in space[field] for tile in tiles for field in space)
    resources = on_h200(shape, tile).resources()
    blocks = 65536 // (resources.registers * 32 * tile.warps)
    assert tile.min_blocks <= blocks
    assert blocks * tile.warps >= 8


BY_IMAGE = "3x1x7x7_k13_p6_dgrad", "2x1x7x7_k13_s2_p6_m2", "1x1x14x14_k27_p13", "1x2x3x2_k7x31_p4x30x2x1"
# The last three are in parts.
BY_KERNEL = """
    3x1x14x14_k7x13_p3x6 2x1x6x4_k13x11_p3x5x9x2
    2x2x7x6_k5_p8_d4 1x3x9x10_k7x5_p6x4x5x3_d2_m2 3x1x6x8_k5x3_p5x2_d3x2_dgrad
"""


@layouts
@parametrize("about", [*BY_IMAGE, *BY_KERNEL.split()])
def test_images_smaller_than_the_kernel(about, layout):
    shape = Shape.parse(f"{about}_float16_{layout}")
    assert Bands(shape, shape.result_height, 1).goes_by_image == (about in BY_IMAGE)
    for strategy, rows in product((BandedMatrix, BandedPlanes), {2, shape.result_height}):
        if shape.layout in strategy.layouts:
            REPLAY.check(strategy(rows, 2, 1), shape)


@given(shape=shapes(dtypes=("float16",)))
def test_every_pixel_has_one_place_in_its_plane(shape):
    planes = Planes(Bands(shape, 1, 1, is_copied=True))
    assert planes.pitch % 2 == 0
    places = map(planes.place, range(planes.images))
    inside = [place for place in places if place[2] < shape.width]
    pixels = product(range(shape.batch), range(shape.height), range(shape.width))
    assert inside == list(pixels)


@given(shape=shapes(layouts=("NCHW",), dtypes=("bfloat16",), channels=900, batch=130, flop=2**26))
def test_chosen_tile_is_worth_trying(shape):
    if BandedMatrix.claims(shape, H200):
        tile = BandedMatrix.choose(shape, H200)
        tile.check_use(shape, H200)
        assert tile.is_promising(shape)
