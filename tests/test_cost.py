"""The model by which a tile is chosen, and what the compiler is told of it."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends import H200, on_h200
from dwtir import Epilogue, Shape, compute, cuda_functions, nvrtc
from dwtir.schedules import (
    BandedMatrix,
    ChannelPairs,
    ChannelVector,
    RegisterWindow,
    RowStream,
    SplitImage,
    WholeImage,
    choose,
)
from dwtir.schedules.cost import Model, Work, block_counts, registers_for, touched
from dwtir.schedules.tiles import MAX_SIDE
from dwtir.target import KNOWN_GPUS, resolve
from kernels import layer, listed
from marks import layouts, parametrize
from strategies import epilogues, shapes

SILU, RESIDUAL = "scale_shift+silu", "scale_shift+residual+relu"
SHAPE = Shape.parse("64x256x56x56_k3_p1")
MODEL = Model(SHAPE, H200)
_FEW = {"threads": 128, "blocks": 10_000, "steps": 1, "rows": 4, "sums": 32, "multiply_adds": 288, "loads": 30}
_FEW |= {"weights": 9, "stores": 8, "conversions": 0, "in_use": 20, "values": 60, "weight_values": 9}
WORK = Work(**_FEW, halo=1.2, ragged=False, lines=4)
MORE = {"multiply_adds": 9000, "loads": 900, "conversions": 9000, "blocks": 40_000, "halo": 9.0, "steps": 9}
MORE |= {"lines": 32, "ragged": True, "store_lines": 32, "weight_lines": 32, "scattered": 1.0, "shared": 0.2}
MORE |= {"in_use": 200}


@parametrize(("name", "more"), MORE.items())
def test_more_work_takes_longer(name, more):
    assert MODEL.seconds(WORK._replace(**{name: more}), 4) > MODEL.seconds(WORK, 4)


LINES = {
    ((32, 4),): 1,  # 128 bytes from a multiple of 128
    ((32, 4), (1, 4000)): 1 + 96 / 128,  # and from any multiple of 32
    ((32, 16), (1, 4096)): 4,
    ((32, 784),): 32,  # a line each
    ((14, 4), (2, 784)): 2 * (1 + 48 / 128),  # 56 bytes from any multiple of eight
    ((30, 4),): 1 + 112 / 128,  # 120 bytes from any multiple of eight
    ((24, 4), (1.5, 1024)): 1.5 * 1.5,  # 96 bytes from any multiple of 32
    ((32, 0),): 1,
}


@parametrize(("threads", "lines"), LINES.items())
def test_lines_touched(threads, lines):
    assert touched(128, 4, threads) == lines


def test_blocks_share_sectors_of_odd_channels():
    shape = Shape.parse("128x240x28x28_k5_p2_nhwc")
    shared = {x: ChannelVector(7, 4, 1, x, 1, 1).work(shape).shared for x in (24, 30, 120)}
    assert shared[24] == shared[120] == 0
    assert 0.1 < shared[30] < 0.3


def test_rows_of_seven_are_scattered():
    whole, part = (
        RegisterWindow(7, cols, 7, 1, 8, 1, cols).work(Shape.parse(f"8x64x{size}x{size}_k3_p1"))
        for cols, size in ((8, 56), (1, 7))
    )
    assert part.scattered > whole.scattered
    assert not any((part.ragged, whole.ragged))


def test_kernel_compiled_anew_takes_longer():
    """Registers that do not do are expected where a tile needs nearly as many."""
    most, few = (MODEL.seconds(WORK._replace(in_use=n), 4) for n in (110, 20))
    assert most > 1.05 * few


def test_best_is_the_least_of_all_blocks():
    assert MODEL.best(WORK) == min((MODEL.seconds(WORK, count), count) for count in block_counts(WORK.threads))


def test_memory_is_the_least():
    idle = WORK._replace(multiply_adds=0, loads=0, weights=0, stores=0, halo=1.0, blocks=1)
    assert MODEL.seconds(idle, 1) > SHAPE.least_bytes / 5e12


@parametrize("threads", [1, 32, 33, 128, 196, 256, 1024])
def test_blocks_at_a_time_fit(threads):
    counts = block_counts(threads)
    assert counts == tuple(sorted(set(counts)))
    for count in counts:
        assert 1 <= count <= 32
        assert count == 1 or count * threads <= 2048
        assert 0 < registers_for(threads, count) <= 255
        assert registers_for(threads, count) * count * threads <= 65536 or count == 1


@given(
    shape=shapes(kernel=7) | shapes(batch=64, channels=256, size=112, flop=10**11),
    steps=epilogues(),
    target=st.sampled_from([*KNOWN_GPUS.values()]),
)
@example(Shape.parse("16x8x96x96_k1_p0x1x0x1_float16_nhwc"), "bias", H200)
@example(Shape.parse("64x160x57x57_k8_s1x2_p3_float16_nhwc"), "bias", KNOWN_GPUS["nvidia-l4"])
def test_choice_passes_its_check(shape, steps, target):
    epilogue = Epilogue.of(steps if shape.operation == "forward" else None)
    tile = choose(shape, target, epilogue)
    tile.check_use(shape, target)
    if isinstance(tile, RegisterWindow | ChannelVector) and not epilogue.steps:
        work = tile.counts(shape)
        assert tile.min_blocks <= -(-work.blocks // target.units)
        assert tile.min_blocks == 1 or registers_for(work.threads, tile.min_blocks) >= 72


def test_channels_are_divided_where_they_can_be():
    """Vectors that hang over the last channel would cost every access a test."""
    tile = ChannelVector.choose(Shape.parse("128x336x28x28_k7_p3_float16_nhwc"), H200)
    assert 336 % (tile.thread_x * tile.vector) == 0


@parametrize("images", ["64x251x56x56_k5_p2_float16", "128x90x56x56_k5_p2"])
def test_blocks_share_no_sectors_of_odd_pixels(images):
    shape = Shape.parse(f"{images}_nhwc")
    tile = RowStream.choose(shape, H200)
    assert tile.thread_x * tile.vector == shape.in_channels


# What each layer gets on an H200, some of them with an epilogue.
CHOICES = {
    "banded_channels": """
    float16_nhwc 8x192x28x28_k9_p4 8x96x56x56_k6_p3
    bfloat16_nhwc_dgrad 8x384x14x14_k7_p3
    """,
    "banded_matrix": """
    float16 128x96x56x56_k7_p3 128x96x57x57_k7_p3 32x192x35x35_k5_p2
    float16 128x480x14x14_k5_p2 64x256x56x56_k3_p1 128x512x14x14_k3_p1
    float16 64x240x56x56_k5_s2_p2 128x72x56x56_k5_s2_p2+scale_shift+silu
    float16_dgrad 128x96x56x56_k7_p3
    """,
    "banded_planes": """
    float16 128x1024x15x15_k13_p6
    bfloat16_nhwc 32x128x56x56_k31_p15
    float16_nhwc 16x65x40x40_k13_p6
    """,
    "banded_sums": "float16_wgrad 128x96x56x56_k7_p3 128x96x57x57_k7_p3 128x512x14x14_k3_p1 128x320x7x7_k3_p1",
    "channel_pairs": """
    float16_nhwc 128x96x56x56_k5_p2 128x96x56x56_k7_p3 128x384x14x14_k7_p3 128x96x56x56_k9_p4
    float16_nhwc 1x192x28x28_k13_p6 128x96x56x56_k5_p2+scale_shift+silu 128x384x14x14_k5_p2+bias+relu
    float16_nhwc 128x240x28x28_k5_p2+bias+silu 128x144x56x56_s2_k5_p2+scale_shift+silu 128x90x56x56_k5_p2
    float16_nhwc 128x97x56x56_k7_p3 64x243x28x28_k13_p6 256x1032x7x7_k5_p2
    float16_nhwc 8x121x56x56_k15_p7 32x423x32x32_k11_p5
    float16_nhwc_dgrad 128x96x56x56_k5_p2
    bfloat16_nhwc 128x672x14x14_k5_p2
    bfloat16_nhwc_dgrad 128x96x56x56_k7_p3
    """,
    "channel_vector": """
    float16_nhwc 1x96x56x56_k5_p2 1x384x14x14_k7_p3 64x256x56x56_k3_p1 128x97x56x56_k5_p2
    nhwc 64x256x56x56_k3_p1 128x96x56x56_k5_p2
    """,
    # Some halves: few products an input, odd planes in many pieces.
    "register_window": """
    nchw 1x96x56x56_k7_p3
    dgrad 128x64x112x112_k3_s2_p1
    float16_dgrad 1x240x28x28_k5_s2_p2 128x96x56x56_k13_p6_m2
    float16 127x95x57x57_k7_p3 64x96x112x112_k3_s2_p1 1x192x35x35_k3_p1 1x240x56x56_k5_s2_p2
    """,
    "row_stream": """
    float16_nhwc 128x96x56x56_k7_p6_d2 128x240x28x28_k5_p2+bias+gelu
    nchw 128x96x56x56_k7_p3
    nhwc 128x96x56x56_k7_p3
    """,
    "split_image": """
    nchw 128x96x56x56_k7_p6_d2 64x128x60x60_k3_p1 128x512x14x14_k3_p1 1x512x14x14_k27_p13
    nchw 64x192x11x11_k13_s2_p6 8x589x96x40_k17_p8 128x384x12x12_k3_s2_p1
    bfloat16 64x256x55x57_k3_p1
    float16_dgrad 64x128x56x56_k3_s3_p1 128x240x28x28_k5_s2_p2 128x96x56x56_k13_s2_p6
    dgrad 128x384x14x14_k7_p3 128x672x14x14_k5_s2_p2 128x256x28x28_k29_p14
    float16 128x240x28x28_k5_s2_p2 32x192x35x35_k3_p1 64x384x46x46_k5_s2_p2
    nhwc 128x512x14x14_k27_p13 16x333x17x19_k15_p7 8x1024x7x7_k13_p6
    float16_nhwc 1x1024x7x7_k13_p6 1x512x14x14_k27_p13
    nchw 8x1024x7x7_k7_p3 32x368x7x7_k7_p3
    """,
    # Some for want of registers, of outputs, or of whole vectors.
    "tap_sums": """
    wgrad 128x96x56x56_k7_p3
    float16_wgrad 32x128x56x56_k31_p15 1x24x14x14_k5_p2 64x256x56x56_k3_p1
    nhwc_wgrad 128x96x56x56_k7_p3
    float16_nhwc_wgrad 32x128x56x56_k31_p15 1x24x14x14_k5_p2 128x100x56x56_k7_p3 128x96x56x56_k7_p3_m2
    """,
    "unit_sums": "float16_nhwc_wgrad 128x96x56x56_k7_p3",
    "whole_image": """
    float16_nhwc 128x816x7x7_k7_p3
    nchw 128x768x7x7_k7_p3
    bfloat16 32x768x7x7_k7_p3
    """,
}
OF_LAYER = [(text, H200, name) for name, lines in CHOICES.items() for text in listed(lines)]
ELSEWHERE = [
    ("128x96x56x56_k7_p3_bfloat16", "nvidia-a100-sxm4-80gb", "banded_matrix"),
    ("128x96x56x56_k5_p2_bfloat16_wgrad", "nvidia-a100-sxm4-80gb", "banded_sums"),
    ("128x96x56x56_k5_p2_bfloat16_nhwc_wgrad", "nvidia-a100-sxm4-80gb", "unit_sums"),
    ("128x96x56x56_k7_p3_float16", "tesla-t4", "register_window"),
    ("128x96x56x56_k7_p3_float16_wgrad", "tesla-t4", "tap_sums"),
    ("128x96x56x56_k7_p3_float16_nhwc_wgrad", "tesla-t4", "tap_sums"),
    ("128x96x56x56_k7_p3_float16", "opencl", "register_window"),
]


@parametrize(("text", "target", "name"), [*OF_LAYER, *ELSEWHERE])
def test_who_gets_a_layer(text, target, name):
    """Much arithmetic is for streamed rows, or tensor cores."""
    shape, epilogue = layer(text)
    assert choose(shape, resolve(target), epilogue).name == name


@layouts
def test_small_images_take_turns_where_blocks_do(layout):
    """Measured on 128 of them: 6 and 14 % faster. On 32 all blocks are there at once."""
    for batch, turns in ((1, 1), (32, 1), (128, 2)):
        tile = WholeImage.choose(Shape.parse(f"{batch}x768x7x7_k7_p3_{layout}"), H200)
        assert tile.turns == turns


FASTEST = {
    "128x96x56x56_k5_p4_d2": SplitImage(2, 1, 56, 5),
    "128x48x56x56_k7_p3_m2": RegisterWindow(14, 4, 14, 4, 2, 4, 4, 4),
    "64x3x224x224_k3_s2_p1_m16": RegisterWindow(8, 2, 8, 1, 16, 4, 2, 5),
    "128x96x56x56_k7_p6_d2_float16": BandedMatrix(14, 7, 4, 1),
    "128x240x28x28_k5_p2_float16_nhwc": ChannelPairs(32, 2, 7, 4, 7, 1, 2, turns=2),
    "128x96x56x56_k7_s2_p3_float16": BandedMatrix(4, 7, 1, 16, "fours"),
    "128x384x14x14_k7_p3": SplitImage(32, 1, 7, 4, lanes=2),
}


@parametrize(("text", "tile"), FASTEST.items())
def test_choice_is_the_fastest_measured(text, tile):
    """Of parted images, multipliers, and what no vector divides, on an H200, or near."""
    assert choose(Shape.parse(text), H200) == tile


def test_warps_share_a_schedulers_registers():
    """Nine warps, three for one scheduler, have no more than twelve."""
    assert not RowStream(57, 10, 2, 48, 2, 1, 3, 3).is_promising(Shape.parse("128x96x57x57_k5_p2_float16_nhwc"))


@parametrize(("images", "tile"), [("float16_nhwc", (7, 1, 32, 4, 1, 3, 2)), ("nchw", (8, 4, 7, 18, 1, 3, 2))])
def test_no_row_has_code_of_its_own(images, tile):
    """The instruction cache keeps a loop over rows, not all rows."""
    short, long = (on_h200(f"8x96x56x56_k7_p3_{images}", RowStream(rows, *tile)) for rows in (14, 56))
    assert len(long.source()) == pytest.approx(len(short.source()), rel=0.05)
    assert long.resources().stack_bytes == 0


BESIDE = [
    *(("64x256x56x56_k3_p1_float16_nhwc", SILU), ("128x96x56x56_k5_p2_float16_nhwc", SILU)),
    *((f"128x96x56x56_k5_p2{form}", RESIDUAL) for form in ("", "_float16", "_float16_nhwc")),
]


@parametrize(("about", "epilogue"), BESIDE)
def test_epilogue_fits_beside_the_tile(about, epilogue):
    """As many threads are there at a time."""
    kernels = on_h200(about), on_h200(about, epilogue=epilogue)
    alone, beside = ((kernel.strategy.min_blocks, kernel.resources()) for kernel in kernels)
    assert beside[0] * beside[1].threads >= alone[0] * alone[1].threads
    assert beside[1].registers <= registers_for(beside[1].threads, beside[0])


CHANGED = [
    ("128x96x56x56_k7_p3", SILU, {"min_blocks": 3}),
    ("128x96x56x56_k7_p3", RESIDUAL, {"min_blocks": 3}),
    ("128x96x56x56_k5_p2_nhwc", SILU, {}),
    ("128x768x7x7_k7_p3", RESIDUAL, {"turns": 1}),
    ("128x768x7x7_k7_p3_float16", RESIDUAL, {}),
]


@parametrize(("about", "epilogue", "changed"), CHANGED)
def test_tile_makes_room_for_what_waits(about, epilogue, changed):
    alone, beside = (choose(Shape.parse(about), H200, Epilogue.of(steps)).parameters for steps in ("", epilogue))
    assert beside == alone | changed


def test_columns_come_and_leave_as_vectors():
    source = on_h200("8x96x56x56_k7_p3", RowStream(56, 8, 4, 7, 18, 1, 3, 2)).source()
    assert len(re.findall(r"= \*\(float4\*\)\(data_ptr", source)) == 3 * 4
    assert len(re.findall(r"\*\(float4\*\)\(out_ptr .* = ", source)) == (2 + 3) * 2


def test_tile_stays_within_the_slack():
    assert compute.SLACK == MAX_SIDE - 1


@layouts
def test_loads_are_vectors_from_one_address(layout):
    source = on_h200(f"8x64x56x56_k3_p1_{layout}").source().partition('#else\nextern "C"')[0]
    loads = re.findall(r"(\*\(float[24]\*\))?\(data_ptr \+ ([^;]*)\);", source)
    assert len(loads) > 3
    for vector, address in loads:
        assert vector
        assert "threadIdx" not in address
    assert "v_.x" not in source


def test_four_halves_are_copied_as_words():
    """TVM's struct of them is still the one that `cuda_functions` gives a copy of its own."""
    source = on_h200("8x64x56x56_k3_p1_float16_nhwc", ChannelVector(4, 2, 4, 16, 1, 1)).source()
    assert source.count(cuda_functions._FOUR_HALVES) == 1
    assert "half4 condval" in source


@parametrize(("rows", "y", "z"), [(14, 1, 4), (7, 4, 2), (14, 1, 8)])
def test_results_stay_in_registers(rows, y, z):
    """Also where as many planes share a block as blocks share a plane."""
    assert on_h200("8x64x56x56_k3_p1", RegisterWindow(rows, 4, 14, y, z, 4, 4)).resources().stack_bytes == 0


def test_few_blocks_have_more_loads_under_way():
    source = on_h200("1x384x14x14_k7_p3_nhwc", ChannelVector(2, 2, 1, 32, 2, 1)).source()
    left_alone, one, many = (nvrtc.compile_cubin(source, "sm_90", n).kernels[0].registers for n in (None, 1, 16))
    assert many <= registers_for(64, 16)
    assert max(left_alone, many) < one
