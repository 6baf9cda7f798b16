"""What a shape and an epilogue accept, what they refuse and in which words, and their derived numbers."""

import json
import re
from dataclasses import asdict
from math import prod

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from dwtir import Epilogue, InvalidEpilogueError, InvalidShapeError, Shape
from dwtir.epilogue import STEPS
from marks import parametrize, raises
from strategies import epilogues, invalid_shapes, shapes

parse = Shape.parse


def make(**parameters):
    base = {"batch": 1, "in_channels": 4, "height": 9, "width": 9, "kernel": 3}
    return Shape(**base | parameters)


@given(shapes())
def test_texts_name_shapes_exactly(shape):
    text = str(shape)
    assert parse(text) == parse(shape.brief) == Shape.of(text) == Shape.of(asdict(shape)) == shape
    assert len(shape.brief) <= len(text)
    assert re.fullmatch(r"[0-9a-z_]{1,150}", text), "not a file name on every system"
    assert Shape.of(shape) is shape


def test_brief_texts_are_brief():
    texts = """
        1x2x3x4_k3_float32_nchw 1x2x9x9_k3x5_s2_p1x2x1x2_d2_m3_float16_nhwc_dgrad
        1x2x9x9_k3_s1x2_p1_d2x1_bfloat16_nchw_wgrad
    """
    assert [parse(text).brief for text in texts.split()] == texts.split()


def test_short_texts_take_the_defaults():
    full = "2x8x16x15_k3x3_s1x1_p0x0x0x0_d1x1_m1_float32_nchw"
    assert str(parse("2x8x16x15_k3")) == full
    assert str(parse("  k3_pvalid_2X8x16x15_NCHW_Float32 \n")) == full
    full = "1x8x16x16_k3x5_s2x2_p1x2x1x2_d3x3_m4_bfloat16_nhwc"
    assert str(parse("1x8x16x16_k3x5_p1x2_s2_d3_m4_bfloat16_nhwc")) == full
    assert parse("1x8x16x16_k3_p1x2x3x4").padding == (1, 2, 3, 4)
    assert parse("1x8x16x16_k3_psame").padding == (1, 1, 1, 1)


def test_padding_in_all_forms():
    assert make(padding=2).padding == (2, 2, 2, 2)
    assert make(padding=(1, 2)).padding == (1, 2, 1, 2)
    assert make(padding=[1, 2, 3, 4]).padding == (1, 2, 3, 4)
    assert make(padding="valid").padding == (0, 0, 0, 0)
    assert make(padding="VALID", kernel=9).out_shape == (1, 4, 1, 1)


# Worked by hand from https://www.tensorflow.org/api_docs/python/tf/nn#notes_on_padding_2:
# output = ceil(size / stride), total = (output - 1) * stride + reach - size, less half before.
@parametrize(
    ("size", "kernel", "stride", "dilation", "before", "after", "out"),
    [
        (9, 3, 1, 1, 1, 1, 9),
        (224, 3, 2, 1, 0, 1, 112),  # (111 * 2 + 3) - 224 = 1: all of it at the end
        (225, 3, 2, 1, 1, 1, 113),  # (112 * 2 + 3) - 225 = 2
        (112, 5, 2, 1, 1, 2, 56),  # (55 * 2 + 5) - 112 = 3
        (10, 3, 1, 4, 4, 4, 10),  # (9 + 9) - 10 = 8
        (10, 2, 3, 1, 0, 1, 4),  # (3 * 3 + 2) - 10 = 1
        (9, 2, 3, 1, 0, 0, 3),  # (2 * 3 + 2) - 9 = -1: none
        (1, 11, 5, 1, 5, 5, 1),
    ],
)
def test_same_is_tensorflows(size, kernel, stride, dilation, before, after, out):
    for turn in (1, -1):  # down, and across
        (height, width), kernels, strides, dilations, padded, outs = (
            (value, one)[::turn]
            for value, one in ((size, 1), (kernel, 1), (stride, 1), (dilation, 1), ((before, after), (0, 0)), (out, 1))
        )
        shape = make(height=height, width=width, kernel=kernels, stride=strides, dilation=dilations, padding="same")
        assert shape.padding == (*(first for first, _ in padded), *(last for _, last in padded))
        assert (shape.out_height, shape.out_width) == outs


@given(shapes())
def test_last_output_fits(shape):
    top, left, bottom, right = shape.padding
    for size, out, axis in (
        (shape.height + top + bottom, shape.out_height, 0),
        (shape.width + left + right, shape.out_width, 1),
    ):
        reach = shape.dilation[axis] * (shape.kernel[axis] - 1)
        assert (out - 1) * shape.stride[axis] + reach < size
        assert out * shape.stride[axis] + reach >= size


def test_tensors_and_counts():
    nchw, nhwc = (parse(f"2x3x5x7_k3x2_m4_float16_{layout}") for layout in ("nchw", "nhwc"))
    assert (nchw.data_shape, nchw.weight_shape, nchw.out_shape) == ((2, 3, 5, 7), (3, 4, 3, 2), (2, 12, 3, 6))
    assert (nhwc.data_shape, nhwc.weight_shape, nhwc.out_shape) == ((2, 5, 7, 3), (3, 2, 3, 4), (2, 3, 6, 12))
    for shape in (nchw, nhwc):
        assert shape.out_channels == 12
        # 2 * 12 * 3 * 6 outputs of 3 * 2 taps, a multiplication and an addition each
        assert shape.flop == 432 * 6 * 2
        assert shape.itemsize == 2
        assert shape.least_bytes == 2 * (2 * 3 * 5 * 7 + 3 * 4 * 3 * 2 + 432)


def test_numbers_of_numpy_become_plain():
    sizes = {"batch": np.int64(2), "in_channels": np.uint8(4), "channel_multiplier": np.int64(3)}
    shape = make(**sizes, kernel=(np.int32(3), 3), stride=np.int16(2), padding=(np.int64(1),) * 4)
    assert shape == make(batch=2, kernel=3, stride=2, padding=1, channel_multiplier=3)
    assert json.dumps(asdict(shape)), "no number of NumPy's is JSON"


@given(invalid_shapes())
def test_wrong_parameters_are_named(case):
    parameters, word = case
    with raises(InvalidShapeError, match=word):
        make(**parameters)


@parametrize(
    ("parameters", "message"),
    [
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"in_channels": 2.0}, "in_channels must be an integer >= 1, got 2.0"),
        ({"dilation": (1, 2, 3)}, "dilation must be one value or a pair, got (1, 2, 3)"),
        ({"padding": -1}, "padding must be an integer >= 0, got -1"),
        ({"padding": "FULL"}, "padding must be 'SAME', 'VALID' or integers, got 'FULL'"),
        (
            {"padding": (1, 2, 3)},
            "padding must be one value, (vertical, horizontal) or (top, left, bottom, right), got (1, 2, 3)",
        ),
        ({"dtype": "float64"}, "dtype must be one of float32, float16, bfloat16, got 'float64'"),
        (
            {"kernel": (1, 5), "dilation": 3},
            "the output is empty: the kernel reaches over 13 of the padded width, which must be at least that, got 9",
        ),
        (
            {"channel_multiplier": 2**28, "kernel": 1},
            f"the output of shape (1, {2**30}, 9, 9) has {81 * 2**30} elements; "
            "kernels index with int32 and allow at most 2147483647",
        ),
    ],
)
def test_errors_say_what_is_allowed(parameters, message):
    with raises(InvalidShapeError) as error:
        make(**parameters)
    assert str(error.value) == message
    assert isinstance(error.value, ValueError)


def test_limit_of_indices_is_exact():
    most = 2**31 - 1
    line = {"height": 1, "width": 1, "kernel": 1}
    assert make(in_channels=most, **line).out_shape == (1, most, 1, 1)
    with raises(InvalidShapeError, match=f"input .* {most + 1} elements"):
        make(in_channels=most + 1, **line)
    # Padding counts: 46341 ** 2 is just over 2 ** 31.
    assert make(in_channels=1, height=1, width=1, padding=23169, kernel=46339).out_height == 1
    with raises(InvalidShapeError, match="padded input"):
        make(in_channels=1, height=1, width=1, padding=23170, kernel=46341)


@parametrize(
    ("text", "word"),
    [
        ("", "cannot read ''"),
        ("1x2x3x4", "lacks its sizes or its kernel"),
        ("1x2x9x9_k3_k3", "kernel is given twice"),
        ("1x2x9x9_k3_p1x2x3", "cannot read 'p1x2x3'"),
        ("1x2x9x9_k3_float64", "cannot read 'float64'"),
        ("1x2x9x9_k3__s1", "cannot read ''"),
        ("1x2x9x9_k3/../../etc", "cannot read 'k3/../../etc'"),
        ("1x2x9x9_k٣", "cannot read 'k٣'"),
        ("1x2x9x9_k3_p" + "9" * 11, "cannot read"),
    ],
)
def test_texts_that_are_no_shape(text, word):
    with raises(InvalidShapeError, match=re.escape(word)):
        parse(text)


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        shape = parse(text)
    except InvalidShapeError:
        return
    assert parse(str(shape)) == shape


@parametrize(
    ("mapping", "message"),
    [
        ({"batch": 1}, r"missing shape parameters \['height', 'in_channels', 'kernel', 'width'\]"),
        (asdict(make()) | {"groups": 4}, r"unknown shape parameters \['groups'\]"),
        (asdict(make()) | {3: 4}, r"unknown shape parameters \[3\]"),
    ],
)
def test_mappings_that_are_no_shape(mapping, message):
    with raises(InvalidShapeError, match=message):
        Shape.of(mapping)


@parametrize("value", [None, 3, (1, 2, 3, 4), b"1x2x9x9_k3"])
def test_objects_that_are_no_shape(value):
    with raises(InvalidShapeError, match=f"got {type(value).__name__}"):
        Shape.of(value)


# Epilogues


@given(epilogues())
def test_all_forms_mean_the_same(epilogue):
    assert Epilogue.of(epilogue) is epilogue
    assert Epilogue.of(epilogue.steps) == epilogue
    assert Epilogue.of(iter(epilogue.steps)) == epilogue
    assert Epilogue.of(" + ".join(epilogue.steps)) == epilogue
    if epilogue.steps:
        assert Epilogue.of(str(epilogue)) == epilogue
    else:
        assert str(epilogue) == "none"


def test_nothing_is_no_steps():
    assert {Epilogue.of(nothing) for nothing in (None, "", "  ", ())} == {Epilogue.of([])} == {Epilogue()}


@given(epilogues(), shapes())
def test_each_step_has_its_tensors_in_order(epilogue, shape):
    operands = epilogue.operands(shape)
    assert list(operands) == [name for step in epilogue.steps for name in STEPS[step]]
    for name, extents in operands.items():
        assert extents == (shape.out_shape if name == "residual" else (shape.out_channels,))
    assert epilogue.least_bytes(shape) == shape.itemsize * sum(map(prod, operands.values()))


REFUSED = [
    ("none", "unknown epilogue step 'none'; allowed are bias, scale_shift"),
    ("bias+", "unknown epilogue step ''"),
    (["relu", "tanh"], "unknown epilogue step 'tanh'"),
    ("bias+relu+bias", "'bias' takes a tensor and may occur once, got 2 times"),
    (3, "sequence of step names, got 3"),
]


@parametrize(("value", "message"), REFUSED)
def test_what_is_no_epilogue(value, message):
    with raises(InvalidEpilogueError, match=message):
        Epilogue.of(value)
