"""The chosen tiles compile to machine code without spilling, on the layers of real networks."""

import os
from dataclasses import replace

import hypothesis
import pytest

import dwtir
from dwtir import STRATEGIES, Shape, schedules, suite
from dwtir.notation import LAYOUTS, OPERATIONS
from dwtir.target import resolve

parametrize = pytest.mark.parametrize

H200 = resolve("nvidia-h200")

# Layers of the networks that the project is measured on, spread over kernels, strides,
# batches, dtypes and layouts; and three with 9x9 and 11x11 kernels, which they do not have.
LAYERS = """
    1x1152x7x7_k5_p2_float16_nhwc 1x128x56x56_k7_p3_nhwc 1x256x16x16_k3_s2_p1_m2_float16 1x256x16x16_k7_s2_p3_m2
    1x256x28x28_k7_p3_bfloat16 1x48x112x112_k3_s2_p1_nhwc 1x96x56x56_k7_p3_bfloat16_nhwc
    8x128x28x28_k1_s2_float16_nhwc 8x128x32x32_k7_s2_p3_m2_float16 8x240x28x28_k3_s2_p0x0x1x1
    8x256x28x28_k3_p1_float16_nhwc 8x256x37x37_k3_p1 8x48x112x112_k1_s2_bfloat16 8x512x14x14_k27_p13_bfloat16_nhwc
    8x96x112x112_k3_s2_p0x0x1x1_nhwc 8x96x56x56_k1_bfloat16_nhwc 32x128x56x56_k31_p15_bfloat16
    32x160x28x28_k3_s2_p1_float16_nhwc 32x256x14x14_k1_float16 32x256x28x28_k29_p14_float16_nhwc
    32x32x112x112_k3_s2_p1_bfloat16_nhwc 32x384x14x14_k3_p1_bfloat16 32x512x14x14_k1 32x512x8x8_k3_p1_m2_bfloat16_nhwc
    32x64x64x64_k3_s2_p1_m2_float16 32x768x7x7_k5_p2_nhwc 32x960x7x7_k5_p2 128x1024x7x7_k13_p6_nhwc
    128x128x32x32_k3_s2_p1_m2_float16 128x144x56x56_k5_s2_p1x1x2x2 128x240x28x28_k5_s2_p2_bfloat16
    128x512x8x8_k1_m2_bfloat16 128x672x14x14_k5_s2_p1x1x2x2_float16 128x672x14x14_k5_s2_p2_bfloat16_nhwc
    128x96x28x28_k5_s2_p2_float16_nhwc 128x96x56x56_k5_p2 128x96x56x56_k7_p3 128x96x56x56_k1_s2_nhwc
    128x960x16x16_k5_s2_p2_float16_nhwc 4x96x28x28_k9_p4_float16 4x96x28x28_k9_p4_bfloat16_nhwc 8x64x56x56_k11_p5
    128x384x14x14_k7_p3
"""

# All are compiled as they are, and each as one of its gradients; nightly runs have them all.
CASES = [Shape.parse(text) for text in LAYERS.split()]
CASES += [replace(shape, operation="grad_weight" if shape.batch in (1, 32) else "grad_data") for shape in CASES]

NIGHTLY = os.environ.get("DWTIR_NIGHTLY") == "1" or hypothesis.settings.get_current_profile_name() == "nightly"


def check(shape):
    """Compile, and return the kernel if something is wrong with the machine code."""
    kernel = dwtir.build(shape, target=H200)
    use = kernel.resources()
    fits = 0 < use.registers <= 255 and use.shared_bytes <= kernel.target.shared_bytes_per_block
    return None if fits and use.spill_bytes == use.stack_bytes == 0 else (kernel, use)


@parametrize("shape", CASES, ids=str)
def test_the_chosen_tile_does_not_spill(shape):
    assert check(shape) is None


def test_the_cases_are_a_spread():
    assert len(set(CASES)) == len(CASES)
    assert {shape.kernel[0] for shape in CASES} >= {1, 3, 5, 7, 9, 11, 13, 27, 29, 31}
    assert {shape.batch for shape in CASES} >= {1, 8, 32, 128}
    assert {shape.stride[0] for shape in CASES} == {1, 2}
    assert len({(shape.dtype, shape.layout, shape.stride) for shape in CASES}) == 3 * 2 * 2
    chosen = {(schedules.choose(shape, H200).name, shape.operation) for shape in CASES}
    for name in {name for name, _ in chosen}:
        for operation in STRATEGIES[name].operations:
            assert (name, operation) in chosen


if NIGHTLY:

    @parametrize("layout", LAYOUTS)
    @parametrize("dtype", suite.DTYPES)
    @parametrize("batch", suite.BATCHES)
    @parametrize("network", suite.networks())
    @parametrize("operation", OPERATIONS)
    def test_no_layer_of_the_suite_spills(network, batch, dtype, layout, operation):
        layers = suite.network(network, batch=batch, dtype=dtype, layout=layout)
        shapes = [replace(layer.shape, operation=operation) for layer in layers]
        assert [wrong for shape in shapes if (wrong := check(shape))] == []
