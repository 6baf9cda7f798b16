"""NVRTC: what it compiles, what it reports, and what it lacks."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import tvm_ffi

import dwtir
from backends import H200
from dwtir import Epilogue, Shape, cuda_functions, nvrtc
from dwtir.build import compile_kernel
from dwtir.errors import CompileError, InvalidTargetError
from dwtir.nvrtc import KernelResources, compile_cubin
from dwtir.schedules import ChannelPairs, ChannelVector, RegisterWindow, SplitImage
from dwtir.search_limits import Limit, SlowCompileError, SpillError, for_search
from dwtir.shape import DTYPES
from marks import dtypes, halves, needs_gpu, parametrize, raises
from processes import SITE, run_python, site_with


def generate(dtype, vector=4):
    shape = Shape.parse(f"1x64x16x16_k3_p1_{dtype}_nhwc")
    tile = ChannelVector(1, 2, vector, 64 // vector, 4, 1)
    return compile_kernel(shape, Epilogue(("silu", "gelu")), H200, tile).source()


@parametrize(("dtype", "times"), [("bfloat16", 1), ("float32", 0)])
def test_places_of_floats_are_hidden_beside_halves(dtype, times):
    shape = Shape.parse(f"1x3x10x13_k4_p0x0x3x4_d4_{dtype}")
    source = compile_kernel(shape, Epilogue(), H200, SplitImage(2, 1, 1)).source()
    assert cuda_functions.with_functions(source).count("apart(threadIdx.x) * 17") == times


def on_sm_90(source):
    return compile_cubin(source, "sm_90")


@pytest.fixture(scope="module")
def sources():
    return {dtype: generate(dtype) for dtype in DTYPES}


@parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_90a", "sm_100"])
@dtypes
def test_compiles_what_tvm_generates(sources, dtype, arch):
    cubin = compile_cubin(sources[dtype], arch)
    assert cubin.code.startswith(b"\x7fELF")
    (kernel,) = cubin.kernels
    assert kernel.name == "main_kernel"
    assert 8 <= kernel.registers <= 255
    assert (kernel.spill_store_bytes, kernel.shared_bytes) == (0, 0)


@dtypes
def test_halves_divide_by_products_each_second_time(sources, dtype):
    _, _, kernel = sources[dtype].partition("main_kernel(")
    found = re.findall(rf"{cuda_functions.SILU}\w*", kernel)
    assert found == [
        (cuda_functions.SILU, cuda_functions.SILU_BY_FMA)[n % 2 and dtype != "float32"] for n in range(len(found))
    ]
    assert len(found) > 1


def test_nchw_divides_by_the_instruction_alone():
    kernel = dwtir.build("1x8x16x16_k3_p1_float16", epilogue=("scale_shift", "silu"), target=H200).source()
    _, _, body = kernel.partition("main_kernel(")
    assert cuda_functions.SILU in body
    assert cuda_functions.SILU_BY_FMA not in body


@halves
def test_eight_lanes_are_one_16_byte_access(dtype):
    source = generate(dtype, vector=8)
    assert "uint4" in source
    assert on_sm_90(source).kernels[0].stack_frame_bytes == 0


@parametrize("about", ["32x192x8x8_k5_psame_bfloat16", "32x48x56x56_k3_psame_d2_bfloat16_wgrad"])
def test_eight_bfloat16_are_converted_on_a_t4(about):
    kernel = dwtir.build(about, target="tesla-t4")
    assert "make_ulonglong4((uint)16, " in kernel.source()
    assert kernel.resources().spill_bytes == 0


@parametrize("about", ["8x100x19x19_k5_psame_d2_bfloat16_dgrad", "8x64x32x32_k13_psame_bfloat16+shared_tile"])
def test_bfloat16_takes_no_more_shared_memory_there(about):
    layer, _, strategy = about.partition("+")
    assert dwtir.build(layer, strategy or "manual", target="tesla-t4").resources().shared_bytes <= 48 * 1024


def test_reports_the_resources_of_each_kernel():
    # `tile` has static shared memory; `frame` indexes a local array at run time.
    source = """
    extern "C" __global__ void tile(float *p) {
      __shared__ float s[300];
      s[threadIdx.x] = p[threadIdx.x];
      __syncthreads();
      p[threadIdx.x] = s[threadIdx.x ^ 1];
    }
    extern "C" __global__ void frame(float *p, int i) {
      float q[200];
      for (int k = 0; k < 200; ++k) q[k] = p[k * i];
      p[0] = q[i];
    }
    """
    tile, frame = sorted(on_sm_90(source).kernels, key=lambda kernel: kernel.name, reverse=True)
    assert tile == KernelResources("tile", tile.registers, 0, 0, 1200)
    assert (frame.name, frame.stack_frame_bytes, frame.shared_bytes) == ("frame", 800, 0)
    assert frame.registers > tile.registers > 0


# 16 blocks leave a thread 40 registers, fewer than its sums and inputs are.
SPILLING = RegisterWindow(7, 4, 5, 4, 2, 2, 2, min_blocks=16)


@pytest.fixture(scope="module")
def spilling():
    return compile_kernel(Shape.parse("8x64x56x56_k5x5_p2_float32_nchw"), Epilogue(), H200, SPILLING).source()


def test_search_compiles_no_kernel_anew(spilling, monkeypatch):
    ways = []
    compile_once = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *given: ways.append(given[0]) or compile_once(*given))
    (built,) = compile_cubin(spilling, "sm_90", SPILLING.min_blocks).kernels
    assert built.spill_store_bytes == 0
    tried = len(ways)
    assert tried > 1
    # TVM calls the compiler, and knows no errors of ours.
    compile_by_tvm = tvm_ffi.convert(lambda source, blocks: compile_cubin(source, "sm_90", blocks))
    with raises(SpillError, match=r"min_blocks=16 lets a thread spill \d+ bytes"), for_search(Limit(60)):
        compile_by_tvm(spilling, SPILLING.min_blocks)
    assert len(ways) == tried + 1
    with for_search(Limit(60)):
        assert compile_cubin(spilling, "sm_90", 1).kernels[0].spill_store_bytes == 0
    assert len(ways) == tried + 2


@parametrize(
    ("about", "schedule", "epilogue", "blocks"),
    [
        ("128x144x28x28_k5_p2_float16_nhwc", ChannelPairs(32, 2, 7, 2, 14, 1, 3), "scale_shift+silu", 3),
        # 4 spill, and ptxas alone leaves 2
        ("128x144x56x56_k3_s2_p1_float16_nhwc", "manual", "bias+residual+relu", 3),
        ("8x64x128x128_k21x1_p10x0_float16_nhwc", "manual", None, 16),
    ],
)
def test_what_spills_loses_few_blocks(about, schedule, epilogue, blocks):
    found = dwtir.build(about, schedule, epilogue=epilogue, target="nvidia-h200").resources()
    assert found.spill_bytes <= 24
    assert found.registers * 32 * -(-found.threads // 32) * blocks <= 65536


def test_search_stops_the_compiler(spilling):
    with raises(SlowCompileError, match=r"NVRTC was stopped, after 0.001 s"), for_search(Limit(1e-3)):
        on_sm_90(spilling)
    limit = Limit(60)
    limit.stop()  # as a thread does that no longer waits
    with raises(SlowCompileError, match="NVRTC was stopped"), for_search(limit):
        on_sm_90(spilling)
    assert on_sm_90(spilling).kernels[0].spill_store_bytes == 0


def test_arithmetic_is_not_fast_math():
    # Contraction is allowed; flushing subnormals and approximate division are not.
    def listing(expression):
        return on_sm_90(f'extern "C" __global__ void k(float *p) {{ p[0] = {expression}; }}').code

    assert listing("p[1] / p[2]") == listing("__fdiv_rn(p[1], p[2])")
    assert listing("sqrtf(p[1])") == listing("__fsqrt_rn(p[1])")
    assert listing("p[1] / p[2]") != listing("__fdividef(p[1], p[2])")
    assert listing("p[1] * p[2] + p[3]") == listing("__fmaf_rn(p[1], p[2], p[3])")


@parametrize("machine", ["any", needs_gpu("GPU")])
def test_compiling_again_reports_the_same(machine):
    # With a driver NVRTC would take the second from its cache, without the log.
    source = 'extern "C" __global__ void again(float *p) { p[threadIdx.x] *= 3; }'
    first, second = on_sm_90(source), on_sm_90(source)
    assert [kernel.name for kernel in first.kernels] == ["again"]
    assert second.kernels == first.kernels


def test_source_without_a_kernel_raises():
    with raises(CompileError, match="no kernel"):
        on_sm_90("__device__ int unused;")


def test_rejected_source_raises_with_the_log():
    source = '// __nv_bfloat16 in a comment\n\nextern "C" __global__ void k() { undeclared = 1; }'
    with raises(CompileError, match=r'dwtir.cu\(3\): error: identifier "undeclared"'):
        compile_cubin(source, "sm_75")


@parametrize("arch", ["sm_999", "compute_90", "sm_90 -G", ""])
def test_unknown_arch_raises(arch):
    with raises(InvalidTargetError, match=r"sm_90"):
        compile_cubin("", arch)


def test_threads_compile_independently(sources):
    names = [f"kernel_{index}" for index in range(8)]
    with ThreadPoolExecutor(4) as pool:
        cubins = pool.map(on_sm_90, (sources["float16"].replace("main_kernel", name) for name in names))
        assert [cubin.kernels[0].name for cubin in cubins] == names


def test_libcudacxx_headers_have_stand_ins(sources):
    # With libcu++ a small kernel takes a second, with ours 0.05 s.
    included = {name for text in sources.values() for name in re.findall(r"#include <(cuda/std/.+)>", text)}
    assert included
    assert included <= set(nvrtc._HEADERS)


TRY_COMPILE = """
import sys
from dwtir.errors import ToolchainError
from dwtir.nvrtc import compile_cubin
def attempt(source):
    try:
        print(len(compile_cubin(source, "sm_90").code) > 0)
    except ToolchainError as error:
        print(" ".join(str(error).split()))
attempt('extern "C" __global__ void k(float *p) { p[0] = 1; }')
attempt('#include <cuda_fp16.h>\\nextern "C" __global__ void k(half *p) { p[0] = 1.0f; }')
"""


def check_remedy(site, place, message, **environment):
    """The first source, or the second, is not compiled, and the one before is."""
    environment = {"CUDA_PATH": "/nowhere", "LD_LIBRARY_PATH": ""} | environment
    out = run_python(TRY_COMPILE, path=site, **environment).splitlines()
    assert out[:place] == ["True"] * place
    assert message in out[place]
    assert "pip install 'dwtir[cuda]'" in out[place]


def with_bindings(folder):
    return site_with(folder, "cuda*")


def test_missing_bindings_have_a_remedy(tmp_path):
    check_remedy(tmp_path, 0, "cuda-bindings is not usable")


def test_missing_nvrtc_has_a_remedy(tmp_path):
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):  # hide those on the loader's path
        (tmp_path / name).touch()
    site = with_bindings(tmp_path / "site")
    check_remedy(site, 0, "the NVRTC library is not usable", LD_LIBRARY_PATH=str(tmp_path))


def test_missing_headers_have_a_remedy(tmp_path):
    # The bindings look for pip packages, which -S hides, then on the loader's path.
    lib = SITE / "nvidia/cu13/lib"
    check_remedy(with_bindings(tmp_path), 1, "the CUDA headers are missing", LD_LIBRARY_PATH=str(lib))
