"""The oracle against the definition of sums and of epilogues, its bound against real sums, and both on a part."""

from itertools import pairwise, product
from math import erf, exp

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dwtir import Epilogue, Shape, reference, spotcheck
from dwtir.epilogue import STEPS
from kernels import layer
from marks import dtypes, layouts, parametrize
from strategies import epilogues, error_bound, named_shapes, oracle, real_tensors, seeds, shapes

tiny_shapes = shapes(batch=2, channels=3, size=9, kernel=5, multiplier=3, flop=4000)


def by_definition(shape, data, weight):
    nchw = shape.layout == "NCHW"
    out = np.zeros(shape.out_shape)
    sizes = (shape.batch, shape.out_channels, shape.out_height, shape.out_width, *shape.kernel)
    for n, oc, oh, ow, kh, kw in np.ndindex(*sizes):
        c, m = divmod(oc, shape.channel_multiplier)
        ih = oh * shape.stride[0] + kh * shape.dilation[0] - shape.padding[0]
        iw = ow * shape.stride[1] + kw * shape.dilation[1] - shape.padding[1]
        if 0 <= ih < shape.height and 0 <= iw < shape.width:
            x = data[n, c, ih, iw] if nchw else data[n, ih, iw, c]
            w = weight[c, m, kh, kw] if nchw else weight[kh, kw, c, m]
            out[(n, oc, oh, ow) if nchw else (n, oh, ow, oc)] += float(x) * float(w)
    return out


@given(shape=tiny_shapes, seed=seeds)
@named_shapes(seed=0)
def test_oracle_is_the_definition(shape, seed):
    data, weight = real_tensors(shape, Epilogue(), seed).values()
    got = reference.depthwise_conv2d(shape, data, weight)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, by_definition(shape, data, weight), rtol=1e-13, atol=1e-13)


@given(shape=tiny_shapes, seed=seeds)
def test_oracles_epilogue_is_by_channel(shape, seed):
    epilogue = Epilogue(("scale_shift", "residual", "bias"))
    tensors = {name: array.astype(np.float64) for name, array in real_tensors(shape, epilogue, seed).items()}
    plain = reference.depthwise_conv2d(shape, tensors["data"], tensors["weight"])
    got = oracle(shape, epilogue, tensors)
    for index in np.ndindex(*shape.out_shape):
        c = index[1 if shape.layout == "NCHW" else 3]
        expected = plain[index] * tensors["scale"][c] + tensors["shift"][c]
        expected += tensors["residual"][index] + tensors["bias"][c]
        assert got[index] == pytest.approx(expected, rel=1e-12, abs=1e-12)


def float32_sums(shape, data, weight, order):
    total = np.zeros(shape.out_shape, np.float32)
    for tap in order:
        total += by_tap(shape, data, weight, tap).astype(np.float32)
    return total


def by_tap(shape, data, weight, tap):
    alone = np.zeros(shape.weight_shape)
    place = (..., *tap) if shape.layout == "NCHW" else tap
    alone[place] = weight[place].astype(np.float64)
    return reference.depthwise_conv2d(shape, data, alone)


@given(shape=shapes(batch=2, channels=3, size=12, kernel=5, flop=20_000), seed=seeds, data=st.data())
def test_sums_in_any_order_keep_the_bound(shape, seed, data):
    image, weight = real_tensors(shape, Epilogue(), seed).values()
    order = data.draw(st.permutations(list(np.ndindex(*shape.kernel))))
    rounded = float32_sums(shape, image, weight, order).astype(reference.numpy_dtype(shape.dtype)).astype(np.float64)
    expected = reference.depthwise_conv2d(shape, image, weight)
    bound = reference.error_bound(shape, image, weight)
    assert bound.shape == shape.out_shape
    assert (np.abs(rounded - expected) <= bound).all()


@given(shape=tiny_shapes, epilogue=epilogues(), seed=seeds)
def test_bound_with_an_epilogue(shape, epilogue, seed):
    bound = error_bound(shape, epilogue, real_tensors(shape, epilogue, seed))
    assert np.isfinite(bound).all()
    assert (bound > 0).all()


@layouts
@dtypes
def test_bound_is_tight(dtype, layout):
    """A wrong tap, a 16-bit sum, or twice the roundings must not hide under the bound."""
    shape = Shape.parse(f"1x4x20x20_k3_p1_{dtype}_{layout}")
    data, weight = real_tensors(shape, Epilogue(), 0).values()
    expected = reference.depthwise_conv2d(shape, data, weight)
    bound = reference.error_bound(shape, data, weight)
    unit = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    magnitude = reference.depthwise_conv2d(shape, np.abs(data), np.abs(weight))
    assert (bound <= unit * np.abs(expected) + 12 * 2.0**-24 * magnitude + 1e-6).all()

    # One tap of one channel off by 1 %:
    place = (1, 0, 1, 1) if layout == "nchw" else (1, 1, 1, 0)
    wrong = weight.astype(np.float64)
    wrong[place] *= 1.01
    off = np.abs(reference.depthwise_conv2d(shape, data, wrong) - expected)
    assert (off > bound).mean() > 0.15 if dtype != "bfloat16" else (off > bound).any()

    if dtype != "float32":  # Sums rounded to 16 bits after every tap:
        total = np.zeros(shape.out_shape)
        for tap in np.ndindex(3, 3):
            total = total + by_tap(shape, data, weight, tap)
            total = total.astype(np.float32).astype(data.dtype).astype(np.float64)
        assert (np.abs(total - expected) > bound).any()


# Epilogues


def of_step(step, x):
    return {
        "bias": x + 2.5,
        "scale_shift": x * 3.0 - 0.5,
        "residual": x + 2.0,
        "relu": x if x > 0 else 0.0,
        "relu6": min(max(x, 0.0), 6.0),
        "hardswish": 0.0 if x <= -3 else x if x >= 3 else x * (x + 3) / 6,
        "silu": x / (1 + exp(-x)),
        "gelu": x * 0.5 * (1 + erf(x / 2**0.5)),
    }[step]


@parametrize("step", STEPS)
def test_oracles_steps_are_as_published(step):
    points = np.array([-40.0, -6.5, -3.0, -1.25, -0.0, 0.5, 1.0, 2.75, 3.0, 5.5, 6.0, 7.5, 40.0])
    shape = Shape.parse(f"1x1x1x{points.size}_k1")
    operands = {"bias": np.array([2.5]), "scale": np.array([3.0]), "shift": np.array([-0.5])}
    operands["residual"] = np.full(shape.out_shape, 2.0)
    data = points.reshape(shape.data_shape)
    got = reference.depthwise_conv2d(shape, data, np.ones((1, 1, 1, 1)), operands, epilogue=step).ravel()
    np.testing.assert_allclose(got, np.array([of_step(step, float(x)) for x in points]), rtol=1e-14, atol=1e-15)


def test_steps_apply_in_order():
    shape = Shape.parse("1x1x1x2_k1")
    data, weight = np.array([[[[-4.0, 1.0]]]]), np.ones((1, 1, 1, 1))
    operands = {"bias": np.array([2.0])}

    for epilogue, expected in (("bias+relu", [0.0, 3.0]), ("relu+bias", [2.0, 3.0])):
        result = reference.depthwise_conv2d(shape, data, weight, operands, epilogue=epilogue)
        assert result.ravel().tolist() == expected


def test_slopes_of_the_error_bound_hold():
    x = np.linspace(-12, 12, 4801)
    for step in ("relu", "relu6", "hardswish", "silu", "gelu"):
        y = [of_step(step, float(value)) for value in x]
        steepest = max(abs(b - a) for a, b in pairwise(y)) / (x[1] - x[0])
        assert 0.9 < steepest <= reference._SLOPE[step] * (1 + 1e-9)


# `spotcheck`


@parametrize("text", ["2x6x9x11_k3_s2x1_psame_m2", "3x8x7x7_k5_p2_float16_nhwc"])
@parametrize("steps", ["", "+scale_shift+residual+relu6", "_dgrad", "_wgrad"])
def test_right_results_are_within_bounds(text, steps):
    shape, epilogue = layer(text + steps)
    tensors = real_tensors(shape, epilogue, 0)
    inputs = list(tensors.values())
    out = oracle(shape, epilogue, tensors).astype(shape.dtype)
    assert spotcheck.error_ratio(shape, epilogue, inputs, out) <= 1

    for index in ((0, 0, 0, 0), (-1, -1, -1, -1)):
        wrong = out.copy()
        wrong[index] += 1
        assert spotcheck.error_ratio(shape, epilogue, inputs, wrong) > 1
        wrong[index] = np.nan
        assert spotcheck.error_ratio(shape, epilogue, inputs, wrong) == np.inf


def test_large_results_are_sampled():
    shape, epilogue = Shape.parse("16x64x64x64_k7_p3"), Epilogue()
    inputs = [np.ones(shape.data_shape, "float32"), np.ones(shape.weight_shape, "float32")]
    out = np.broadcast_to(
        reference.depthwise_conv2d(Shape.parse("1x1x64x64_k7_p3"), inputs[0][:1, :1], inputs[1][:1]), shape.out_shape
    ).astype(np.float32)
    assert spotcheck.error_ratio(shape, epilogue, inputs, out) <= 1
    for place in product((0, -1), (0, -1), (5,), (5,)):
        wrong = out.copy()
        wrong[place] = 0
        assert spotcheck.error_ratio(shape, epilogue, inputs, wrong) > 1
