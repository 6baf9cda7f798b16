"""CUDA discovery, TVM's CUDA runtime, and device properties."""

import os
import shutil
import subprocess
from pathlib import Path

import tvm

from dwtir import cuda
from marks import gpu, parametrize
from processes import SITE, run_python

# Discovery


def toolkit_at(root, lib="lib64", include="include"):
    for file in (f"{lib}/libcudart.so.13", f"{include}/cuda_fp16.h"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    return root


PRINT_TOOLKIT = "t = cuda.find_toolkit(); print(t.cudart, t.include)"


def test_finds_the_pip_packages_before_a_toolkit(tmp_path):
    toolkit_at(tmp_path)
    cudart, include = map(Path, run_python(PRINT_TOOLKIT, CUDA_PATH=str(tmp_path)).split())
    lib = SITE / "nvidia/cu13/lib"
    assert (cudart, include) == (lib / "libcudart.so.13", lib.parent / "include")


@parametrize("variable", ["CUDA_PATH", "CUDA_HOME"])
@parametrize("base", ["", f"targets/{os.uname().machine}-linux/"])
def test_finds_a_toolkit_by_variable(tmp_path, variable, base):
    root = toolkit_at(tmp_path / "toolkit", f"{base}lib", f"{base}include")
    found = run_python(PRINT_TOOLKIT, path=tmp_path / "site", **{variable: str(root)}).split()
    assert found == [str(root / base / end) for end in ("lib/libcudart.so.13", "include")]


def test_finds_a_toolkit_by_its_compiler(tmp_path):
    root = toolkit_at(tmp_path / "toolkit")
    compiler, link = root / "bin/nvcc", tmp_path / "bin/nvcc"
    for file in (compiler, link):
        file.parent.mkdir()
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    link.symlink_to(compiler)
    found = run_python(PRINT_TOOLKIT, path=tmp_path / "site", PATH=str(link.parent))
    assert found.split()[1] == str(root / "include")


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


def test_loader_says_why_there_is_no_driver(tmp_path):
    # An unusable file hides whatever driver there is.
    (tmp_path / "libcuda.so.1").touch()
    status, *others = run_python(STATUS, LD_LIBRARY_PATH=str(tmp_path)).splitlines()
    usable, reason, remedy = status.split("|")
    assert (usable, remedy) == ("False", cuda.INSTALL_DRIVER)
    assert reason.startswith("no NVIDIA driver library: ")
    assert "file too short" in reason
    assert others == ["0", "raised", "raised"]


@parametrize("broken", [False, True])
def test_loader_says_why_there_is_no_cuda_runtime(tmp_path, broken):
    toolkit = toolkit_at(tmp_path / "toolkit") if broken else tmp_path / "nowhere"
    (tmp_path / "libcudart.so.13").touch()
    out = run_python(
        "status = cuda.cudart_status();print(status.usable, status.reason, status.remedy, sep='|')",
        path=tmp_path / "site",
        LD_LIBRARY_PATH=str(tmp_path),
        CUDA_PATH=str(toolkit),
    )
    usable, reason, remedy = out.strip().split("|")
    assert (usable, remedy) == ("False", "pip install 'dwtir[cuda]'")
    where = "the CUDA runtime library does not load: " if broken else "no CUDA runtime library: "
    assert reason.startswith(f"{where}{toolkit if broken else tmp_path}")
    assert reason.endswith("libcudart.so.13: file too short")


def test_loads_the_packages_cuda_runtime():
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
def test_unsuitable_driver_is_reported(tmp_path, name, answer, reason, count):
    code = STATUS.replace("for step in", "for step in () and")
    out = run_python(code, LD_LIBRARY_PATH=build_driver(tmp_path, **{name: answer}))
    assert out.splitlines() == [f"False|{reason}|{cuda.INSTALL_DRIVER}", count]


def test_loader_says_what_tvms_runtime_lacks(tmp_path):
    # This driver lacks nearly every symbol: the loader names one of them.
    out = run_python("print(cuda.load_runtime().reason)", LD_LIBRARY_PATH=build_driver(tmp_path))
    assert out.startswith("TVM's CUDA runtime does not load: ")
    assert "undefined symbol: cu" in out


def test_device_properties_are_the_drivers(tmp_path):
    out = run_python(
        "p = cuda.device_properties(1); print(cuda.folder_name(p.name), p.arch,"
        "p.driver_version, p.multiprocessors, p.shared_bytes_per_block, sep='|')\n"
        "try: cuda.device_properties(2)\n"
        "except cuda.ToolchainError as error: print(error)",
        LD_LIBRARY_PATH=build_driver(tmp_path),
    ).splitlines()
    assert out[0] == "nvidia-second-tm|sm_121|13.0|16000|8000"
    assert "device index must be in [0, 2), got 2" in out[1]


def test_attribute_numbers_are_the_headers():
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


ORDERS = {
    "dwtir alone": "cuda.load_runtime()",
    "tvm first": "import tvm; cuda.load_runtime()",
    "torch, then tvm": "import torch; torch.ones(1).cuda(); import tvm; cuda.load_runtime()",
    "tvm, then torch": "import tvm; import torch; torch.ones(1).cuda(); cuda.load_runtime()",
    "torch last": "cuda.load_runtime(); import torch; torch.ones(1).cuda()",
    "no autoload": "import os; os.environ['TVM_DEVICE_BACKEND_AUTOLOAD'] = '0'; import tvm",
}


@gpu
@parametrize("order", ORDERS)
def test_runtime_loads_in_any_order(order):
    out = run_python(
        f"{ORDERS[order]}\ncuda.load_runtime().require()\n"
        "import tvm\nassert tvm.cuda(0).exist\n"
        "a = tvm.runtime.tensor([1.0, 2.0], device=tvm.cuda(0)); print(a.numpy().tolist())"
    )
    assert out.strip() == "[1.0, 2.0]"


@gpu
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
