"""CUDA discovery, TVM's CUDA runtime, device properties, and NVRTC.

What depends on the state of a process (what it imported, what it can see) runs
in a child process with another environment.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tvm
import tvm_ffi

from dwtir import Epilogue, Shape, cuda, nvrtc
from dwtir.build import compile_kernel
from dwtir.errors import CompileError, InvalidTargetError
from dwtir.nvrtc import KernelResources, compile_cubin
from dwtir.schedules import ChannelVector, RegisterWindow
from dwtir.search_limits import Limit, SlowCompileError, SpillError, for_search
from dwtir.target import resolve
from processes import run

parametrize = pytest.mark.parametrize

H200 = resolve("nvidia-h200")
SITE = Path(sysconfig.get_path("purelib"))


def run_python(code, *, path=None, **environment):
    """Run code, which has `cuda`, in a child process; `path`, dwtir and NumPy replace the site-packages folder."""
    if path:
        site_with(path, "numpy*")
        (path / "dwtir").symlink_to(Path(cuda.__file__).parent)
        environment["PYTHONPATH"] = str(path)
    code = f"from dwtir import cuda\n{code}"
    return run(*(["-S"] if path else []), "-c", code, **environment).stdout


def site_with(folder, packages):
    """Make a site-packages folder that has only these packages of ours."""
    folder.mkdir(exist_ok=True)
    for entry in SITE.glob(packages):
        (folder / entry.name).symlink_to(entry)
    return folder


def with_bindings(folder):
    return site_with(folder, "cuda*")


# Discovery


def toolkit_at(root, lib="lib64", include="include"):
    for file in (f"{lib}/libcudart.so.13", f"{lib}/libnvrtc.so.13", f"{include}/cuda_fp16.h"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


PRINT_TOOLKIT = "t = cuda.find_toolkit(); print(t.cudart, t.nvrtc, t.include)"


def test_finds_the_pip_packages_before_a_toolkit(tmp_path):
    toolkit_at(tmp_path)
    cudart, nvrtc, include = map(Path, run_python(PRINT_TOOLKIT, CUDA_PATH=str(tmp_path)).split())
    lib = SITE / "nvidia/cu13/lib"
    assert (cudart, nvrtc.parent, include) == (lib / "libcudart.so.13", lib, lib.parent / "include")


@parametrize("variable", ["CUDA_PATH", "CUDA_HOME"])
@parametrize("base", ["", f"targets/{os.uname().machine}-linux/"])
def test_finds_a_toolkit_by_variable(tmp_path, variable, base):
    root = toolkit_at(tmp_path / "toolkit", f"{base}lib", f"{base}include")
    others = {"CUDA_PATH": "", "CUDA_HOME": ""} | {variable: str(root)}
    found = run_python(PRINT_TOOLKIT, path=tmp_path / "site", **others).split()
    assert found == [str(root / base / end) for end in ("lib/libcudart.so.13", "lib/libnvrtc.so.13", "include")]


def test_finds_a_toolkit_by_its_compiler(tmp_path):
    root = toolkit_at(tmp_path / "toolkit")
    compiler, link = root / "bin/nvcc", tmp_path / "bin/nvcc"
    for file in (compiler, link):
        file.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    link.symlink_to(compiler)
    found = run_python(PRINT_TOOLKIT, path=tmp_path / "site", PATH=str(link.parent), CUDA_PATH="", CUDA_HOME="")
    assert found.split()[2] == str(root / "include")


# The driver and TVM's CUDA runtime

STATUS = """
from dwtir import nvrtc
from dwtir.errors import ToolchainError
status = cuda.load_runtime()
assert cuda.load_runtime() is status
print(status.usable, status.reason, status.remedy, sep="|")
print(cuda.device_count())
for step in (status.require, cuda.device_properties):
    try:
        step()
    except ToolchainError as error:
        assert status.reason in str(error) and status.remedy in str(error)
        print("raised")
"""


def test_a_missing_driver_is_reported_with_the_loaders_words(tmp_path):
    # An unusable file hides whatever driver there is.
    (tmp_path / "libcuda.so.1").touch()
    status, *others = run_python(STATUS, LD_LIBRARY_PATH=str(tmp_path)).splitlines()
    usable, reason, remedy = status.split("|")
    assert (usable, remedy) == ("False", cuda.INSTALL_DRIVER)
    assert reason.startswith("no NVIDIA driver library: ")
    assert "file too short" in reason
    assert others == ["0", "raised", "raised"]


@parametrize("broken", [False, True])
def test_a_missing_cuda_runtime_is_reported_with_the_loaders_words(tmp_path, broken):
    toolkit = toolkit_at(tmp_path / "toolkit") if broken else tmp_path / "nowhere"
    (tmp_path / "libcudart.so.13").touch()
    out = run_python(
        "status = cuda.cudart_status();print(status.usable, status.reason, status.remedy, sep='|')",
        path=tmp_path / "site",
        LD_LIBRARY_PATH=str(tmp_path),
        CUDA_PATH=str(toolkit),
        CUDA_HOME="",
    )
    usable, reason, remedy = out.strip().split("|")
    assert (usable, remedy) == ("False", "pip install 'dwtir[cuda]'")
    where = "the CUDA runtime library does not load: " if broken else "no CUDA runtime library: "
    assert reason.startswith(f"{where}{toolkit if broken else tmp_path}")
    assert reason.endswith("libcudart.so.13: file too short")


def test_loads_the_cuda_runtime_of_the_pip_package():
    code = "import ctypes; assert cuda.cudart_status().usable;"
    out = run_python(f"{code}print(ctypes.CDLL('libcudart.so.13')._name)", LD_LIBRARY_PATH="")
    assert out.strip() == "libcudart.so.13"


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return INIT; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int index) { *device = index + 40; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, device == 41 ? "NVIDIA Second (TM)" : "NVIDIA First", size);
  return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 12 : attribute == 76 ? 1 : 1000 * attribute;
  return 0;
}
int cuGetErrorName(int error, const char **text) { *text = "CUDA_ERROR_NO_DEVICE"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no device here"; return 0; }
"""


def build_driver(folder, *, init=0, version=13000, count=2):
    """Build a driver library that answers as told; return its folder."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    assert compiler, "these tests need a C compiler"
    (folder / "driver.c").write_text(DRIVER)
    options = ["-shared", "-fPIC", f"-DINIT={init}", f"-DVERSION={version}", f"-DCOUNT={count}"]
    subprocess.run([compiler, *options, "-o", "libcuda.so.1", "driver.c"], cwd=folder, check=True)
    return str(folder)


UNSUITABLE = [
    ("init", 100, "cuInit failed: CUDA_ERROR_NO_DEVICE: no device here", "0"),
    ("version", 12080, "the NVIDIA driver supports only CUDA 12.8", "2"),
    ("count", 0, "the NVIDIA driver shows no device", "0"),
]


@parametrize(("name", "answer", "reason", "count"), UNSUITABLE)
def test_an_unsuitable_driver_is_reported(tmp_path, name, answer, reason, count):
    code = STATUS.replace("for step in", "for step in () and")
    out = run_python(code, LD_LIBRARY_PATH=build_driver(tmp_path, **{name: answer}))
    assert out.splitlines() == [f"False|{reason}|{cuda.INSTALL_DRIVER}", count]


def test_a_cuda_runtime_that_tvm_cannot_load_is_reported(tmp_path):
    # This driver lacks nearly every symbol: the loader names one of them.
    code = "print(cuda.load_runtime().reason)"
    out = run_python(code, LD_LIBRARY_PATH=build_driver(tmp_path))
    assert out.startswith("TVM's CUDA runtime does not load: ")
    assert "undefined symbol: cu" in out


def test_device_properties_come_from_the_driver(tmp_path):
    out = run_python(
        "p = cuda.device_properties(1); print(p.folder_name, p.arch,"
        "p.driver_version, p.multiprocessors, p.shared_bytes_per_block_optin, sep='|')\n"
        "try: cuda.device_properties(2)\n"
        "except cuda.ToolchainError as error: print(error)",
        LD_LIBRARY_PATH=build_driver(tmp_path),
    ).splitlines()
    assert out[0] == "nvidia-second-tm|sm_121|13.0|16000|97000"
    assert "device index must be in [0, 2), got 2" in out[1]


def test_attribute_numbers_are_those_of_the_cuda_headers():
    from cuda.bindings.driver import CUdevice_attribute

    others = {"multiprocessors": "MULTIPROCESSOR_COUNT", "l2_bytes": "L2_CACHE_SIZE"}
    for field, number in cuda._ATTRIBUTES.items():
        name = others.get(field, field.upper().replace("SHARED_BYTES", "SHARED_MEMORY"))
        found = CUdevice_attribute(number).name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        assert found in (name, f"MAX_{name}")
    capability = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    assert int(capability) == cuda._COMPUTE_CAPABILITY_MAJOR


FOLDERS = {"NVIDIA A100-SXM4-80GB": "nvidia-a100-sxm4-80gb", "../../etc/passwd": "etc-passwd", "": "unknown"}


@parametrize(("name", "folder"), FOLDERS.items())
def test_folder_name(name, folder):
    assert cuda.folder_name(name) == folder


# NVRTC


DTYPES = "float32", "float16", "bfloat16"
dtypes = parametrize("dtype", DTYPES)


def generate(dtype, vector=4):
    """CUDA source by TVM: vector loads and stores around scalar float32 arithmetic."""
    shape = Shape.parse(f"1x64x16x16_k3_p1_{dtype}_nhwc")
    tile = ChannelVector(1, 2, vector, 64 // vector, 4, 1)
    return compile_kernel(shape, Epilogue(("silu", "gelu")), H200, tile).source()


def on_sm_90(source):
    return compile_cubin(source, "sm_90")


@pytest.fixture(scope="module")
def sources():
    return {dtype: generate(dtype) for dtype in DTYPES}


@parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_90a", "sm_100"])
@dtypes
def test_compiles_what_tvm_generates(sources, dtype, arch):
    cubin = compile_cubin(sources[dtype], arch)
    assert cubin.arch == arch
    assert cubin.code.startswith(b"\x7fELF")
    (kernel,) = cubin.kernels
    assert kernel.name == "main_kernel"
    assert 8 <= kernel.registers <= 255
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.shared_bytes) == (0, 0, 0)


@dtypes
def test_only_halves_take_the_factor_of_a_sigmoid_with_them(sources, dtype):
    found = re.findall(rf"{nvrtc.SIGMOID}\(.*?, \S+/\*(\S+)\*/\)", sources[dtype])
    factor = 1 if dtype == "float32" else pytest.approx(nvrtc.SIGMOID_FACTOR)
    assert found
    assert all(float(one) == factor for one in found)


@parametrize("dtype", DTYPES[1:])
def test_eight_lanes_are_one_16_byte_access(dtype):
    source = generate(dtype, vector=8)
    assert "uint4" in source
    assert on_sm_90(source).kernels[0].stack_frame_bytes == 0


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
    assert tile == KernelResources("tile", tile.registers, 0, 0, 0, 1200)
    assert (frame.name, frame.stack_frame_bytes, frame.shared_bytes) == ("frame", 800, 0)
    assert frame.registers > tile.registers > 0


# 16 blocks leave a thread 40 registers, fewer than its sums and inputs are.
SPILLING = RegisterWindow(7, 4, 5, 4, 2, 2, 2, min_blocks=16)


@pytest.fixture(scope="module")
def spilling():
    return compile_kernel(Shape.parse("8x64x56x56_k5x5_p2_float32_nchw"), Epilogue(), H200, SPILLING).source()


def test_a_search_takes_no_kernel_that_was_compiled_anew(spilling, monkeypatch):
    ways = []
    compile_once = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *given: ways.append(given[1]) or compile_once(*given))
    (built,) = compile_cubin(spilling, "sm_90", SPILLING.min_blocks).kernels
    assert built.spill_store_bytes == 0
    assert len(ways) == 2
    # TVM calls the compiler, and knows no errors of ours.
    compile_by_tvm = tvm_ffi.convert(lambda source, blocks: compile_cubin(source, "sm_90", blocks))
    with pytest.raises(SpillError, match=r"min_blocks=16 lets a thread spill \d+ bytes"), for_search(Limit(60)):
        compile_by_tvm(spilling, SPILLING.min_blocks)
    assert len(ways) == 3
    with for_search(Limit(60)):
        assert compile_cubin(spilling, "sm_90", 1).kernels == (built,)
    assert len(ways) == 4


def test_a_search_stops_the_compiler(spilling):
    with pytest.raises(SlowCompileError, match=r"NVRTC was stopped, after 0.001 s"), for_search(Limit(1e-3)):
        on_sm_90(spilling)
    limit = Limit(60)
    limit.stop()  # as a thread does that no longer waits
    with pytest.raises(SlowCompileError, match="NVRTC was stopped"), for_search(limit):
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


@parametrize("machine", ["any", pytest.param("GPU", marks=pytest.mark.gpu)])
def test_a_second_compilation_reports_the_same(machine):
    # With a driver NVRTC would take the second from its cache, without the log.
    source = 'extern "C" __global__ void again(float *p) { p[threadIdx.x] *= 3; }'
    first, second = on_sm_90(source), on_sm_90(source)
    assert [kernel.name for kernel in first.kernels] == ["again"]
    assert second.kernels == first.kernels


def test_source_without_a_kernel_raises():
    with pytest.raises(CompileError, match="no kernel"):
        on_sm_90("__device__ int unused;")


def test_rejected_source_raises_with_the_log():
    source = '// __nv_bfloat16 in a comment\n\nextern "C" __global__ void k() { undeclared = 1; }'
    with pytest.raises(CompileError, match=r'dwtir.cu\(3\): error: identifier "undeclared"'):
        compile_cubin(source, "sm_75")


@parametrize("arch", ["sm_999", "compute_90", "sm_90 -G", ""])
def test_unknown_arch_raises(arch):
    with pytest.raises(InvalidTargetError, match=r"sm_90"):
        compile_cubin("", arch)


def test_threads_compile_independently(sources):
    names = [f"kernel_{index}" for index in range(8)]
    with ThreadPoolExecutor(4) as pool:
        cubins = pool.map(on_sm_90, (sources["float16"].replace("main_kernel", name) for name in names))
        assert [cubin.kernels[0].name for cubin in cubins] == names


def test_every_header_of_libcudacxx_has_a_stand_in(sources):
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
NO_TOOLKIT = {"CUDA_PATH": "/nowhere", "CUDA_HOME": "", "LD_LIBRARY_PATH": ""}


def check_remedy(site, place, message, **environment):
    """The first source, or the second, is not compiled, and the one before is."""
    out = run_python(TRY_COMPILE, path=site, **NO_TOOLKIT | environment).splitlines()
    assert out[:place] == ["True"] * place
    assert message in out[place]
    assert "pip install 'dwtir[cuda]'" in out[place]


def test_missing_bindings_raise_with_the_remedy(tmp_path):
    check_remedy(tmp_path, 0, "cuda-bindings is not usable")


def test_missing_nvrtc_raises_with_the_remedy(tmp_path):
    for name in ("libnvrtc.so.13", "libnvrtc.so.12"):  # hide those on the loader's path
        (tmp_path / name).touch()
    site = with_bindings(tmp_path / "site")
    check_remedy(site, 0, "the NVRTC library is not usable", LD_LIBRARY_PATH=str(tmp_path))


def test_missing_headers_raise_with_the_remedy_where_they_are_needed(tmp_path):
    # The bindings look for pip packages where -S hides them, and then on the loader's path.
    lib = SITE / "nvidia/cu13/lib"
    check_remedy(with_bindings(tmp_path), 1, "the CUDA headers are missing", LD_LIBRARY_PATH=str(lib))


# With a GPU


ORDERS = {
    "dwtir alone": "cuda.load_runtime()",
    "tvm first": "import tvm; cuda.load_runtime()",
    "torch, then tvm": "import torch; torch.ones(1).cuda(); import tvm; cuda.load_runtime()",
    "tvm, then torch": "import tvm; import torch; torch.ones(1).cuda(); cuda.load_runtime()",
    "torch last": "cuda.load_runtime(); import torch; torch.ones(1).cuda()",
    "no autoload": "import os; os.environ['TVM_DEVICE_BACKEND_AUTOLOAD'] = '0'; import tvm",
}


@pytest.mark.gpu
@parametrize("order", ORDERS)
def test_runtime_loads_in_any_order(order):
    out = run_python(
        f"{ORDERS[order]}\ncuda.load_runtime().require()\n"
        "import tvm\nassert tvm.cuda(0).exist\n"
        "a = tvm.runtime.tensor([1.0, 2.0], device=tvm.cuda(0)); print(a.numpy().tolist())"
    )
    assert out.strip() == "[1.0, 2.0]"


@pytest.mark.gpu
def test_properties_agree_with_tvm():
    cuda.load_runtime().require()
    assert cuda.device_count() >= 1
    found = cuda.device_properties()
    device = tvm.cuda(0)
    assert found.name == device.device_name
    assert found.arch == "sm_" + device.compute_version.replace(".", "")
    assert found.warp_size == device.warp_size
    assert found.multiprocessors == device.multi_processor_count
    assert found.max_threads_per_block == device.max_threads_per_block
    assert found.shared_bytes_per_block == device.max_shared_memory_per_block
    assert found.l2_bytes == device.l2_cache_size_bytes
    assert found.shared_bytes_per_block_optin >= found.shared_bytes_per_block
