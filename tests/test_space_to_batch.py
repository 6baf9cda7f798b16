"""Dilated convolutions by images whose rows and columns are a dilation apart."""

from dataclasses import replace

from hypothesis import assume, given

from backends import H200, OPENCL, REPLAY
from dwtir import InvalidScheduleError, Shape
from dwtir.schedules import ChannelVector, RegisterWindow
from dwtir.space_to_batch import SPLITS, space_to_batch, splits_of
from marks import parametrize, raises
from strategies import shapes

backends = parametrize("backend", [REPLAY, OPENCL])
WIDE = "2x3x13x24_k3x2_p4x0x1x2_d3x2_float16_nchw"  # rows are vectors, and no side is a multiple of its dilation


@given(shapes())
def test_small_images_have_all_results_and_few_more(shape):
    assume(shape.operation != "grad_weight")
    for split in splits_of(shape):
        _, small, down, across = space_to_batch(shape, split)
        assert small.dilation[0] == 1 or split == "none"
        for side, apart in (("height", down), ("width", across)):
            for extents in ("", "result_", "out_"):
                assert getattr(small, extents + side) == -(-getattr(shape, extents + side) // apart)


@backends
@parametrize("epilogue", [None, "scale_shift+residual+relu"])
@parametrize("window", ["tile", "row"])
@parametrize(
    ("text", "split", "lanes"),
    [(WIDE, "rows", 8), (WIDE, "both", 1), ("1x5x17x11_k2x3_p3_d5_m3_bfloat16_nchw", "both", 1)],
)
def test_every_split_in_nchw_computes_the_same(text, split, lanes, window, epilogue, backend):
    tile = RegisterWindow(2, 8, 3, 1, 5, lanes, lanes, window=window, split=split)
    backend.check(tile, text, epilogue)


@backends
@parametrize(
    ("text", "epilogue"),
    [
        ("2x8x9x7_k3x2_p4x0x1x2_d3x2_float16_nhwc", "bias+residual"),
        ("1x6x9x7_k3_p3_d4_m2_nhwc", "relu"),
        ("1x4x10x9_k3x2_p1x0_d2x3_nhwc_dgrad", None),
        ("1x4x10x12_k2x3_p3x1_d4x2_bfloat16_nhwc_dgrad", None),
    ],
)
def test_split_in_nhwc_computes_the_same(text, epilogue, backend):
    backend.check(ChannelVector(2, 2, 2, 2, 2, 3, split="both"), text, epilogue)


@parametrize("split", SPLITS)
def test_gradient_is_turned_round(split):
    text = "2x3x13x24_k3x2_p7x0x1x2_d3x2_nchw_dgrad"  # with zeros before it, and without
    REPLAY.check(RegisterWindow(3, 4, 2, 2, 3, split=split), text)


def test_what_has_no_split_is_refused():
    for text in ("1x4x9x9_k3_s2_d2_nchw", "1x4x9x9_k3_d2_m2_nchw_dgrad"):
        tile = RegisterWindow.choose(Shape.parse(text), H200)
        with raises(InvalidScheduleError, match=r"split must be one of \('none',\), got rows"):
            replace(tile, split="rows").check(Shape.parse(text), H200)
    shape = Shape.parse("1x4x9x8_k3_d2_nchw")
    with raises(InvalidScheduleError, match=r"lanes must be one of \(1,\), got 2"):
        RegisterWindow(2, 2, 2, 2, 2, lanes=2, split="both").check(shape, H200)
    with raises(InvalidScheduleError, match="split must be one of"):
        ChannelVector(2, 2, 2, 2, 2, 2, split="rows").check(replace(shape, layout="NHWC"), H200)
    huge = Shape.parse("1x1x46340x46340_k2_d9_nchw")  # as many pixels as indices
    assert splits_of(huge) == ("none",)


@parametrize(
    ("text", "split"),
    [
        ("4x512x65x65_k3_p12_d12_nchw", "both"),
        ("64x256x56x56_k3_p4_d4_float16_nchw", "rows"),
        ("4x2048x33x33_k3_p12_d12_float16_nhwc", "both"),
        ("64x256x56x56_k3_p1_float16_nchw", "none"),
    ],
)
def test_where_images_are_split(text, split):
    shape = Shape.parse(text)
    strategy = RegisterWindow if shape.layout == "NCHW" else ChannelVector
    assert strategy.choose(shape, H200).split == split
