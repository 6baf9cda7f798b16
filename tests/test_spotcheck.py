"""The reference on a part of a result finds what is wrong there, and nothing else."""

from itertools import product

import numpy as np
import pytest

from dwtir import Epilogue, Shape, reference, spotcheck
from kernels import layer
from strategies import oracle, real_tensors


@pytest.mark.parametrize("text", ["2x6x9x11_k3_s2x1_psame_m2", "3x8x7x7_k5_p2_float16_nhwc"])
@pytest.mark.parametrize("steps", ["", "+scale_shift+residual+relu6", "_dgrad", "_wgrad"])
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
