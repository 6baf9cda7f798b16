"""The reference on a part of a result finds what is wrong there, and nothing else."""

import numpy as np
import pytest

from dwtir import Epilogue, Shape, reference, spotcheck


@pytest.mark.parametrize("text", ["2x6x9x11_k3_s2x1_psame_m2", "3x8x7x7_k5_p2_float16_nhwc"])
@pytest.mark.parametrize("steps", ["", "scale_shift+residual+relu6", "_dgrad", "_wgrad"])
def test_a_right_result_is_within_the_bound(text, steps):
    if steps.startswith("_"):
        text, steps = text + steps, ""
    shape, epilogue = Shape.parse(text), Epilogue.of(steps or None)
    rng = np.random.default_rng(0)
    extents = (shape.input_shapes | epilogue.operands(shape)).values()
    inputs = [rng.standard_normal(e, np.float32).astype(shape.dtype) for e in extents]
    operands = dict(zip(epilogue.operands(shape), inputs[2:], strict=True))
    out = reference.depthwise_conv2d(shape, *inputs[:2], operands, epilogue=epilogue)
    out = out.astype(shape.dtype)
    assert spotcheck.error_ratio(shape, epilogue, inputs, out) <= 1

    for index in ((0, 0, 0, 0), (-1, -1, -1, -1)):
        wrong = out.copy()
        wrong[index] += 1
        assert spotcheck.error_ratio(shape, epilogue, inputs, wrong) > 1
        wrong[index] = np.nan
        assert spotcheck.error_ratio(shape, epilogue, inputs, wrong) == np.inf


def test_a_large_result_is_sampled_at_both_ends():
    shape = Shape.parse("16x64x64x64_k7_p3")
    epilogue = Epilogue()
    inputs = [np.ones(shape.data_shape, "float32"), np.ones(shape.weight_shape, "float32")]
    out = np.broadcast_to(
        reference.depthwise_conv2d(Shape.parse("1x1x64x64_k7_p3"), inputs[0][:1, :1], inputs[1][:1]), shape.out_shape
    ).astype(np.float32)
    assert spotcheck.error_ratio(shape, epilogue, inputs, out) <= 1
    for image in (0, -1):
        for channel in (0, -1):
            wrong = out.copy()
            wrong[image, channel, 5, 5] = 0
            assert spotcheck.error_ratio(shape, epilogue, inputs, wrong) > 1
