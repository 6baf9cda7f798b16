"""NHWC halves on tensor cores: what the strategies take, and results."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import dwtir
from backends import H200, on_h200, replay_and_cuda
from dwtir import Epilogue, InvalidScheduleError, Shape
from dwtir.schedules import BandedChannels, ChannelPairs, choose
from dwtir.target import resolve
from kernels import layer, listed, merged_bytes
from marks import parametrize
from strategies import error_bound, oracle, real_tensors

PAIRS = """
    float16_nhwc 128x96x56x56_k5_p2 128x384x14x14_k7_p3+scale_shift+silu 128x97x56x56_k11_p5+bias+relu
    float16_nhwc 8x40x28x27_k5_p2_s2+bias+silu 128x240x28x28_k5_p2+bias+relu
    bfloat16_nhwc 128x384x14x14_k5_p2+scale_shift+residual+relu 32x384x14x14_k13_p6 128x240x28x28_k5_p2+scale_shift+relu
    bfloat16_nhwc_dgrad 128x192x28x28_k7_p3
"""


BESIDE = "float16_nhwc 128x240x28x28_k5_p2 128x72x56x56_k5_s2_p2 128x480x14x14_k5_p2 128x1152x7x7_k5_p2"


@parametrize("about", listed(BESIDE))
def test_lanes_read_from_all_banks(about):
    """Eight at a time, of two strips, none of a later stage; of a sector's vectors `cp.async` makes one request."""
    shape, _ = layer(about)
    pairs = ChannelPairs.choose(shape, H200).sizes(shape)
    strips, wide, vectors = 1 + pairs.beside, 4 * shape.stride[1], range(pairs.source_vectors)
    last = pairs.images - 1, pairs.stage_rows - 1, (pairs.line - 1) * wide + 4 * pairs.quads - 1
    assert max(pairs.input_at(0, *last, vector) for vector in vectors) == pairs.stage_halves - 8
    for lane, vector in product(range(0, pairs.images * pairs.line // strips - 1, 2), vectors):
        pixels = [*product((divmod(strips * n, pairs.line) for n in (lane, lane + 1)), range(4))]
        places = [pairs.input_at(0, n, 0, x * wide + i, vector) // 8 for (n, x), i in pixels]
        beside = [pairs.input_at(0, n, 0, x * wide + i, vector ^ 1) // 8 for (n, x), i in pixels]
        assert len({place % 8 for place in places}) == 8
        assert [place ^ 1 for place in places] == beside


@parametrize("channels", [7, 33, 97, 1001])
@parametrize("first", [0, 3])
def test_lanes_read_words_of_shifted_pixels_from_all_banks(channels, first):
    shape = Shape.parse(f"4x{channels}x56x56_k7_p3_float16_nhwc")
    pairs = ChannelPairs(8 * min(-(-channels // 8), 6), 1, 14, 2, 4, 1).sizes(shape)
    places = (pairs.input_at(0, 0, 0, 4 + lane, 0) + (first + lane * channels) % 8 for lane in range(32))
    assert len({place // 2 % 32 for place in places}) == 32


@parametrize("about", listed(PAIRS))
def test_channel_pairs_are_what_the_tile_says(about):
    shape, epilogue = layer(about)
    tile = ChannelPairs.choose(shape, H200).with_room_for(shape, epilogue, H200)
    pairs = tile.sizes(shape)
    kernel = on_h200(shape, tile, epilogue=epilogue)
    source, resources = kernel.source(), kernel.resources()
    twice = pairs.skips and pairs.steps > 1  # with tests for rows of padding, and without
    assert source.count("mma.sync.aligned.m16n8k") == pairs.products * (1 + twice)
    assert (resources.threads, resources.stack_bytes) == (32 * pairs.warps, 0)
    assert resources.shared_bytes == pairs.shared_bytes(epilogue)
    assert resources.registers * resources.threads * tile.min_blocks <= 65536
    assert (resources.shared_bytes + 1024) * tile.min_blocks <= 228 * 1024
    assert source.count("__syncthreads();") == 2, "of the first stage, and of the last results"
    assert source.count("dwtir_await((") == (1 + (pairs.rests > 0)) * (pairs.steps > 1)


@parametrize(
    "about",
    [
        "float16_8x96x56x56_k7_p3",
        "bfloat16_dgrad_8x80x28x27_k9_p4",
        "bfloat16_32x384x14x14_k7_p3+scale_shift+residual+relu",
    ],
)
def test_banded_channels_are_what_the_tile_says(about):
    shape, epilogue = layer(f"nhwc_{about}")
    tile = BandedChannels.choose(shape, H200)
    panels = tile.sizes(shape)
    kernel = on_h200(shape, tile, epilogue=epilogue)
    products = tile.rows * shape.kernel[0] * panels.depth_steps * tile.channels
    assert kernel.source().count("mma.sync.aligned.m16n8k16") == products
    resources = kernel.resources()
    assert (resources.threads, resources.stack_bytes) == (32 * tile.warps, 0)
    assert resources.shared_bytes == panels.shared_bytes("residual" in epilogue.steps)
    assert resources.registers * resources.threads * min(2, tile.min_blocks) <= 65536


def test_kernel_that_sees_no_input_compiles():
    assert (
        on_h200("1x8x1x1_k2_d2_p1_bfloat16_nhwc", ChannelPairs(8, 1, 1, 1, 1, 1, words=1)).resources().stack_bytes == 0
    )


@parametrize(
    ("about", "alone", "rows", "blocks"),
    [
        ("128x240x28x28_k5_p2+scale_shift+relu6", ChannelPairs(32, 2, 7, 4, 7, 1, 2), 4, 2),
        ("128x240x28x28_k5_p2+residual", ChannelPairs(32, 2, 7, 4, 7, 1, 2), 2, 2),
        ("128x96x56x56_k7_p3+bias+silu", ChannelPairs(48, 1, 14, 4, 14, 1, 1, 2), 4, 1),
        ("128x96x56x56_k7_p3+residual", ChannelPairs(48, 1, 14, 4, 14, 1, 1, 2), 3, 1),
        ("128x96x56x56_k5_p2+residual", ChannelPairs(96, 1, 14, 1, 56, 3, 1), 1, 1),
    ],
)
def test_fused_steps_cost_rows_and_no_block(about, alone, rows, blocks):
    shape, epilogue = layer(f"float16_nhwc_{about}")
    tile = alone.with_room_for(shape, epilogue, H200)
    assert replace(tile, turns=1).sizes(shape).blocks == alone.sizes(shape).blocks
    assert (tile.rows, tile.min_blocks) == (rows, blocks)
    assert (tile.dynamic_bytes(shape, epilogue) + 1024) * blocks <= 228 * 1024


@parametrize("target", ["sm_86", "sm_120", "nvidia-l4", "nvidia-a100-sxm4-80gb"])
@parametrize(
    "about",
    [
        "128x96x56x56_k7_p3_float16_nhwc+scale_shift+residual+silu",
        "128x240x28x28_k5_p2_bfloat16_nhwc+gelu",
        "128x256x7x56_k9_s2_p4x3x4x4_float16_nhwc",
        "64x1024x7x28_k19_s2_p9x8x9x9_float16_nhwc+bias+silu",
        "128x96x224x14_k9_nhwc_dgrad",
    ],
)
def test_smaller_devices_have_room_for_fused_steps(about, target):
    shape, epilogue = layer(about)
    place = shape, resolve(target)
    if ChannelPairs.claims(*place):
        ChannelPairs.choose(*place).with_room_for(shape, epilogue, place[1]).check_use(*place, epilogue)
    choose(*place, epilogue).check_use(*place, epilogue)


def test_fused_steps_without_room_are_refused():
    shape, tile = Shape.parse("128x96x56x56_k7_p3_float16_nhwc"), ChannelPairs(48, 1, 14, 4, 14, 1, 1, 2)
    with pytest.raises(InvalidScheduleError, match="shared bytes per block with epilogue residual must be at most 2"):
        dwtir.build(shape, tile, epilogue="residual", target=H200)


@parametrize(
    "tile",
    [
        ChannelPairs(16, 1, 3, 1, 7, 1),
        ChannelPairs(32, 2, 2, 3, 3, 2),
        ChannelPairs(16, 2, 2, 4, 2, 3),
        ChannelPairs(8, 3, 3, 7, 1, 1),
        ChannelPairs(16, 2, 2, 2, 4, 2, words=2),
        ChannelPairs(8, 3, 3, 7, 1, 1, words=1),  # four
        ChannelPairs(16, 1, 3, 2, 4, 3, words=2, turns=3),  # rings of three images, and of two
    ],
)
@replay_and_cuda
@parametrize(
    ("kernel", "epilogue"),
    [
        ("k3x5_p1x2", "bias+residual+relu"),
        ("k7x5_p3x2", "scale_shift+relu"),  # rows of padding are left out
        ("k3x5_p1x2", "scale_shift+bias"),
        ("k3x5_p1x2", "bias+relu6"),  # sums begin with the bias
        ("k3_p1", "bias+relu6"),  # a pixel behind the window is 1, and the bias its weight
    ],
)
def test_tiles_that_hang_over_every_edge(tile, backend, kernel, epilogue):
    backend.check(tile, f"4x40x7x11_{kernel}_float16_nhwc", epilogue)


@parametrize(
    ("tile", "about"),
    [
        (ChannelPairs(32, 2, 2, 2, 4, 2), "float16_4x24x7x11_k3x5_p1x2_m2+bias+residual+relu"),
        (ChannelPairs(16, 2, 2, 2, 4, 2, words=1), "float16_3x16x7x11_k7_p3_m2+scale_shift+relu"),
        (ChannelPairs(24, 2, 2, 3, 3, 2), "bfloat16_4x24x7x11_k3_p1_m3+bias+relu6"),
        (ChannelPairs(40, 2, 1, 2, 3, 2), "float16_2x8x7x11_k5_s2_p4_m5+bias+relu"),
        (ChannelPairs(16, 1, 3, 1, 7, 1), "float16_3x20x7x11_k3x5_p1x2+bias+residual+relu"),  # 4 move together
        (ChannelPairs(24, 2, 3, 2, 3, 1, words=2), "float16_3x22x7x11_k3_p1+scale_shift+residual+relu"),  # 2
        (ChannelPairs(8, 1, 3, 1, 7, 1), "bfloat16_3x3x7x11_k5_p2+scale_shift+residual+relu"),  # alone
        (ChannelPairs(8, 3, 1, 1, 3, 1, words=4), "float16_3x1x1x1_k5_s2_p6_d2"),
        (ChannelPairs(16, 2, 3, 1, 1, 1), "bfloat16_dgrad_3x13x7x11_k5_p2"),
        (ChannelPairs(48, 2, 3, 2, 3, 1), "float16_3x10x7x11_k3_p1_m3+bias+relu"),
        (ChannelPairs(8, 2, 2, 2, 4, 1, turns=3), "float16_7x20x7x11_k5_p2+scale_shift+residual"),
        (ChannelPairs(16, 1, 1, 1, 6, 2, words=2, turns=2), "bfloat16_5x16x19x7_k5_s2_p2+bias+relu"),
    ],
)
@replay_and_cuda
def test_multipliers_and_parts_of_vectors(backend, tile, about):
    backend.check(tile, *layer(f"nhwc_{about}"))


@given(*map(st.integers, (1, 1, 1, 0, 0, 1, 1, 1), (7, 3, 3, 5, 6, 13, 5, 14)))
def test_each_row_is_left_once(kernel, stride, dilation, top, bottom, height, rows, steps):
    """Of any padding; and all have a row of the kernel in common, for the bias."""
    assume(height + top + bottom > (kernel - 1) * dilation >= stride - 1)
    name = f"1x8x{height}x8_k{kernel}x3_s{stride}x1_p{top}x1x{bottom}x1_d{dilation}x1_float16_nhwc"
    shape = Shape.parse(name)
    rows = min(rows, shape.result_height)
    tiles = (ChannelPairs(8, 1, 2, rows, count, 1) for count in range(steps, 0, -1))
    tile = next(tile for tile in tiles if tile.fits(shape, H200))
    pairs, seen, left = tile.sizes(shape), [set() for _ in range(shape.result_height)], []
    for block, step, row in product(range(pairs.blocks[1]), range(pairs.steps + pairs.rests), range(pairs.stage_rows)):
        first = step * rows + pairs.begun - pairs.delay
        met = pairs.met(row) if step < pairs.steps else [(result, kernel - 1) for result in range(rows) if not row]
        for result, tap in met:
            out = block * pairs.height + first + result
            if not (0 <= first + result < pairs.height and out < shape.result_height):
                continue
            if step < pairs.steps:
                at = block * pairs.height * stride + pairs.first_row + step * pairs.stage_rows + row
                assert at == out * stride - top + tap * dilation
                seen[out].add(tap)
            if tap == kernel - 1 and result < rows:
                left.append(out)
    assert sorted(left) == list(range(shape.result_height))
    for out, taps in enumerate(seen):
        assert taps >= {tap for tap in range(kernel) if 0 <= out * stride - top + tap * dilation < height}
        assert pairs.common_tap in taps


@replay_and_cuda
def test_one_step_alone_may_have_no_padding(backend):
    tile = ChannelPairs(8, 1, 3, 5, 2, 2, words=2)
    backend.check(tile, "2x8x7x11_k7x5_p3x2_float16_nhwc", "bias+relu")


ALONE = ChannelPairs(8, 2, 1, 1, 1, 1), "2x8x1x1_k1_float16_nhwc", "bias"


@replay_and_cuda
def test_warp_alone_in_a_step_alone(backend):
    backend.check(*ALONE)


@parametrize(
    ("tile", "text", "steps"),
    [
        ALONE,
        (ChannelPairs(8, 1, 2, 1, 1, 1, words=2), "5x24x1x14_k2x1_p1x0_float16_nhwc", "bias+silu"),
        (ChannelPairs(8, 2, 2, 2, 1, 1, words=1), "3x8x12x23_k9_p4_float16_nhwc", "bias+silu"),
        (ChannelPairs(24, 2, 1, 1, 1, 2, words=1), "3x24x15x13_k7x1_p3x0_float16_nhwc", "bias+residual"),
        (ChannelPairs(32, 2, 5, 1, 1, 1), "2x48x2x17_k3x5_p1x2_bfloat16_nhwc", ""),
        (ChannelPairs(16, 2, 3, 2, 4, 2, words=2), "3x13x12x11_k5_p2_float16_nhwc", "bias"),
    ],
)
def test_nothing_in_shared_memory_overlaps(tile, text, steps):
    """TVM sees neither copies nor what other warps still read."""
    place = Shape.parse(text), Epilogue.of(steps)
    assert merged_bytes(*place, tile) == tile.dynamic_bytes(*place)


@replay_and_cuda
@parametrize(
    "tile",
    [
        ChannelPairs(16, 4, 3, 4, 2, 1),
        ChannelPairs(16, 2, 3, 1, 7, 2),
        ChannelPairs(16, 1, 3, 4, 2, 1, words=2),  # warps that share vectors
    ],
)
@parametrize("bias", ["", "bias+"])
def test_some_tiles_take_silu_in_registers(backend, tile, bias):
    shape, steps = layer(f"5x40x7x11_k3x5_p1x2_float16_nhwc+{bias}scale_shift+silu")
    assert tile.sizes(shape).fused(steps).own == Epilogue.of("scale_shift+silu")
    tensors = real_tensors(shape, steps, 0)
    (got,) = backend.run(tile, shape, steps, tensors)
    assert (abs(got - oracle(shape, steps, tensors)) <= error_bound(shape, steps, tensors)).all()


@parametrize(("steps", "is_kept"), [("bias+relu", True), ("bias+residual", True), ("bias+silu", False)])
def test_silu_has_a_tile_of_its_own(steps, is_kept):
    shape, epilogue = layer(f"128x96x56x56_k5_p2_float16_nhwc+{steps}")
    tile = ChannelPairs(32, 1, 14, 1, 56, 2, 3)
    found = tile.with_room_for(shape, epilogue, H200)
    assert (found == tile) == is_kept
    assert is_kept or found == choose(shape, H200, epilogue)
