"""The chosen tiles compile to machine code without spilling, on the layers of real networks."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from importlib import metadata

import hypothesis

import dwtir
from backends import H200, kernel_names, on_h200
from dwtir import STRATEGIES, Shape, cuda_functions, line_loads, nvrtc, schedules, suite
from dwtir.notation import LAYOUTS, OPERATIONS
from dwtir.strips import Strip
from kernels import listed
from marks import parametrize

# Layers of the measured networks, and three with 9x9 and 11x11 kernels.
LAYERS = """
    float32 1x256x16x16_k7_s2_p3_m2 8x240x28x28_k3_s2_p0x0x1x1 8x256x37x37_k3_p1 32x512x14x14_k1 32x960x7x7_k5_p2
    float32 128x144x56x56_k5_s2_p1x1x2x2 128x96x56x56_k5_p2 128x96x56x56_k7_p3 8x64x56x56_k11_p5 128x384x14x14_k7_p3
    bfloat16 1x256x28x28_k7_p3 8x48x112x112_k1_s2 32x128x56x56_k31_p15 32x384x14x14_k3_p1 128x240x28x28_k5_s2_p2
    bfloat16 128x512x8x8_k1_m2
    bfloat16_nhwc 1x96x56x56_k7_p3 8x512x14x14_k27_p13 8x96x56x56_k1 32x32x112x112_k3_s2_p1 32x512x8x8_k3_p1_m2
    bfloat16_nhwc 128x672x14x14_k5_s2_p2 4x96x28x28_k9_p4
    float16 1x256x16x16_k3_s2_p1_m2 8x128x32x32_k7_s2_p3_m2 32x256x14x14_k1 32x64x64x64_k3_s2_p1_m2
    float16 128x128x32x32_k3_s2_p1_m2 128x672x14x14_k5_s2_p1x1x2x2 4x96x28x28_k9_p4
    float16_nhwc 1x1152x7x7_k5_p2 8x128x28x28_k1_s2 8x256x28x28_k3_p1 32x160x28x28_k3_s2_p1 32x256x28x28_k29_p14
    float16_nhwc 128x96x28x28_k5_p2 128x960x16x16_k5_s2_p2
    nhwc 1x128x56x56_k7_p3 1x48x112x112_k3_s2_p1 8x96x112x112_k3_s2_p0x0x1x1 32x768x7x7_k5_p2 128x1024x7x7_k13_p6
    nhwc 128x96x56x56_k1_s2
"""

# All as they are, and each as one of its gradients; nightly runs have them all.
CASES = list(map(Shape.parse, listed(LAYERS)))
CASES += [replace(shape, operation="grad_weight" if shape.batch in (1, 32) else "grad_data") for shape in CASES]

NIGHTLY = os.environ.get("DWTIR_NIGHTLY") == "1" or hypothesis.settings.get_current_profile_name() == "nightly"


def check(shape):
    """Compile, and return the kernel if something is wrong with the machine code."""
    kernel = dwtir.build(shape, target=H200)
    use = kernel.resources()
    fits = 0 < use.registers <= 255 and use.shared_bytes <= kernel.target.most_shared_bytes
    return None if fits and use.spill_bytes == use.stack_bytes == 0 else (kernel, use)


@parametrize("shape", CASES, ids=str)
def test_chosen_tile_does_not_spill(shape):
    assert check(shape) is None


def test_cases_are_a_spread():
    assert len(set(CASES)) == len(CASES)
    assert {shape.kernel[0] for shape in CASES} >= {1, 3, 5, 7, 9, 11, 13, 27, 29, 31}
    assert {shape.batch for shape in CASES} >= {1, 8, 32, 128}
    assert {shape.stride[0] for shape in CASES} == {1, 2}
    assert len({(shape.dtype, shape.layout, shape.stride) for shape in CASES}) == 3 * 2 * 2
    chosen = {(schedules.choose(shape, H200).name, shape.operation) for shape in CASES}
    assert chosen == {(name, operation) for name, _ in chosen for operation in STRATEGIES[name].operations}


def disassembled(kernel, path):
    path.write_bytes(nvrtc.compile_cubin(kernel.source(), "sm_90", kernel.strategy.min_blocks).code)
    files = metadata.files("nvidia-cuda-nvdisasm") if shutil.which("nvdisasm") is None else []
    tool = next((file.locate() for file in files if file.name == "nvdisasm"), "nvdisasm")
    return subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout


@parametrize(
    "name",
    [f"4x96x{about}" for about in ("28x28_k29_p14_float16_nhwc", "28x28_k5_float16_nhwc_wgrad", "112x112_k5_wgrad")],
)
def test_kernels_wait_for_the_one_before(name, tmp_path):
    kernel = on_h200(name)
    waiting = set()
    for text in disassembled(kernel, tmp_path / "cubin").split("\n.text.")[1:]:
        before, wait, after = text.partition("ACQBULK")
        if wait:
            assert "EXIT" in after.split("LDG")[0]
            assert not re.search(r"\b(LDG?|STG?|LDGSTS)\b", before)
            waiting.add(text.split(":")[0])
    assert waiting == kernel_names(kernel.source()) - {"main_kernel"} != set()
    assert cuda_functions.WAIT not in dwtir.build(name, target="sm_80").source()


@parametrize(("cols", "products"), [(14, 86), (7, 49)])
def test_whole_rows_have_no_products_with_padding(cols, products, tmp_path):
    shape, tile = Shape.parse("8x64x14x14_k7_p3_nhwc"), schedules.RowStream(14, cols, 1, 32, 1, 1, 8, 2)
    assert Strip(shape, cols, 1).products == products
    text = disassembled(on_h200(shape, tile), tmp_path / "cubin")
    assert len(re.findall(r"\bFFMA\b", text)) == 2 * 7 * products, "of two rows, all that the loop has"


@parametrize(
    ("about", "blocks", "asked", "done"),
    [
        ("16x9x9_k3_p1_wgrad", 1, True, True),
        ("72x56x56_k3_p1_nhwc_wgrad", 1, True, True),
        ("72x56x56_k3_p1_nhwc_wgrad", 3, True, False),  # it would spill
        ("64x28x28_k3_p1_nhwc_wgrad", 1, False, False),
        ("32x28x28_k5_p2_float16_wgrad", 3, True, True),
        ("32x28x28_k5_p2_float16", 12, False, True),  # TVM's
        ("97x28x28_k3_p1_nhwc", 3, True, True),
    ],
)
def test_parts_of_lines_bring_the_whole(about, blocks, asked, done, tmp_path):
    shape = Shape.parse(f"128x{about}")
    kernel = on_h200(shape, replace(schedules.choose(shape, H200), min_blocks=blocks))
    assert (line_loads.LOAD in kernel.source()) == asked
    assert (".LTC128B" in disassembled(kernel, tmp_path / "cubin")) == done


LOADED = """extern "C"
  int cse_v2 = (cse_v1 + 4);
  if ((0 < x) && (y < 3)) {
    condval = *(half2*)(data_ptr + ((cse_v1 * 2) - 6));
  } else {
    condval = make_half2(0x0p+0f);
  }
  a = *(half2*)(data_ptr + (cse_v2 * 2));
  b = data_ptr[((int)threadIdx.x) + c[0]];
"""


def test_places_of_loads_by_lines():
    tvms, lines = line_loads.by_lines(LOADED).split("#else\n")
    size = "(int)sizeof(*data_ptr)"
    assert tvms == f"#ifdef {line_loads.PLAIN}\n{LOADED}"
    assert lines.splitlines()[2:5] == [
        f"  condval = dwtir_load<-6 * {size}>((half2*)(data_ptr + (cse_v1 * 2)), (0 < x) && (y < 3));",
        f"  a = dwtir_load<8 * {size}>((half2*)(data_ptr + (cse_v1) * 2));",
        f"  b = dwtir_load<0 * {size}>((data_ptr + ((int)threadIdx.x) + c[0]));",
    ]


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
