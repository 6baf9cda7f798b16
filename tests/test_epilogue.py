"""What an epilogue accepts, the tensors it takes, and what its steps compute."""

from itertools import pairwise
from math import erf, exp, prod

import numpy as np
import pytest
from hypothesis import given

from dwtir import Epilogue, InvalidEpilogueError, Shape, reference
from dwtir.epilogue import STEPS
from marks import parametrize
from strategies import epilogues, shapes


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
    with pytest.raises(InvalidEpilogueError, match=message):
        Epilogue.of(value)


def by_definition(step, x):
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
def test_the_oracles_steps_are_the_published_functions(step):
    points = np.array([-40.0, -6.5, -3.0, -1.25, -0.0, 0.5, 1.0, 2.75, 3.0, 5.5, 6.0, 7.5, 40.0])
    shape = Shape.parse(f"1x1x1x{points.size}_k1")
    operands = {"bias": np.array([2.5]), "scale": np.array([3.0]), "shift": np.array([-0.5])}
    operands["residual"] = np.full(shape.out_shape, 2.0)
    data = points.reshape(shape.data_shape)
    got = reference.depthwise_conv2d(shape, data, np.ones((1, 1, 1, 1)), operands, epilogue=step).ravel()
    np.testing.assert_allclose(got, np.array([by_definition(step, float(x)) for x in points]), rtol=1e-14, atol=1e-15)


def test_steps_are_applied_in_the_order_given():
    shape = Shape.parse("1x1x1x2_k1")
    data, weight = np.array([[[[-4.0, 1.0]]]]), np.ones((1, 1, 1, 1))
    operands = {"bias": np.array([2.0])}

    for epilogue, expected in (("bias+relu", [0.0, 3.0]), ("relu+bias", [2.0, 3.0])):
        result = reference.depthwise_conv2d(shape, data, weight, operands, epilogue=epilogue)
        assert result.ravel().tolist() == expected


def test_the_slopes_of_the_error_bound_hold():
    """No step may stretch a difference more than `error_bound` reckons with."""
    x = np.linspace(-12, 12, 4801)
    for step in ("relu", "relu6", "hardswish", "silu", "gelu"):
        y = [by_definition(step, float(value)) for value in x]
        steepest = max(abs(b - a) for a, b in pairwise(y)) / (x[1] - x[0])
        assert 0.9 < steepest <= reference._SLOPE[step] * (1 + 1e-9)
