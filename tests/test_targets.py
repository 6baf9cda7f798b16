"""Targets by name, as mappings and of TVM; devices that are small, old or absent."""

import os

import tvm

from dwtir import InvalidTargetError
from dwtir.target import KNOWN_GPUS, cpu_features, resolve
from dwtir.threads import physical_cores
from marks import parametrize, raises
from processes import python

SM_90 = {"kind": "cuda", "arch": "sm_90"}


def test_targets_by_name():
    cpu = resolve("cpu")
    assert resolve("llvm") == cpu
    assert (cpu.kind, cpu.is_gpu, cpu.warp_size) == ("cpu", False, 1)
    assert cpu.vector_bytes in (16, 32, 64)
    assert resolve("opencl").kind == "opencl"
    for name, gpu in KNOWN_GPUS.items():
        assert resolve(name) is gpu
        assert gpu.name == name
        assert gpu.is_gpu
    assert resolve(cpu) is cpu
    unknown = resolve("sm_120")
    assert (unknown.name, unknown.arch, unknown.bandwidth) == ("sm_120", "sm_120", None)
    assert (unknown.max_threads_per_block, unknown.shared_bytes_per_block) == (1024, 49152)


def test_targets_as_mappings_and_of_tvm():
    h200 = KNOWN_GPUS["nvidia-h200"]
    for given in (SM_90, tvm.target.Target(SM_90), h200.tvm()):
        found = resolve(given)
        assert (found.kind, found.arch, found.warp_size) == ("cuda", "sm_90", 32)
        assert found.shared_bytes_per_block == h200.shared_bytes_per_block
        assert found.bandwidth is None, "measured on one device, not on all of an architecture"
    assert resolve({"kind": "cuda", "arch": "sm_75", "max_threads_per_block": 256}).max_threads_per_block == 256
    assert resolve(tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})).arch == "x86-64-v3"
    assert resolve({"kind": "opencl"}).kind == "opencl"
    assert resolve(resolve("cpu").tvm()).arch == resolve("cpu").arch


@parametrize(
    ("target", "message"),
    [
        ("tpu", r"unknown target 'tpu'; allowed are 'cuda', .*'nvidia-h200'"),
        ("cuda:x", "unknown target 'cuda:x'"),
        ("sm_ninety", "needs its architecture"),
        ("sm_90x", "needs its architecture"),
        ("sm_\uff19\uff10", "needs its architecture"),
        ({}, "kind must be cuda, llvm or opencl, got None"),
        ({"kind": "cuda"}, "needs its architecture, such as 'sm_90', got arch=None"),
        (SM_90 | {"max_threads_per_block": 0}, "threads_per_block must be a positive .* got 0"),
        ({"kind": "opencl", "max_shared_memory_per_block": "48k"}, "bytes_per_block must be a positive .* got '48k'"),
        (3, "got int"),
    ],
)
def test_targets_that_do_not_exist(target, message):
    with raises(InvalidTargetError, match=message):
        resolve(target)


def test_default_without_a_gpu():
    out = python(
        "import dwtir\n"
        "from dwtir.target import resolve\n"
        "assert resolve(None) == resolve('cpu')\n"
        "assert dwtir.build('1x4x9x9_k3').target.kind == 'cpu'\n"
        "try: resolve('cuda')\n"
        "except dwtir.ToolchainError as error: print(error)\n",
        CUDA_VISIBLE_DEVICES="",
        PYTHONWARNINGS="error",
    )
    assert "To fix it" in out


def test_hidden_instructions_are_not_used():
    has = {"avx2", "f16c", "fma"}
    assert {f"+{name}" for name in has} < set(cpu_features("znver4", has))
    assert "-avx512f" in cpu_features("znver4", has)
    assert "-avx512f" not in cpu_features("haswell", has)


def test_cpu_uses_the_cores_it_may(monkeypatch):
    """In new processes: TVM looks at it once; the user's own stays."""
    for name in [name for name in os.environ if name.endswith("NUM_THREADS")]:
        monkeypatch.delenv(name)
    code = (
        "import dwtir, numpy as np, tvm\n"
        "kernel = dwtir.build('1x8x16x16_k3_psame', target='cpu')\n"
        "kernel(np.ones((1, 8, 16, 16), 'float32'), np.ones((8, 1, 3, 3), 'float32'))\n"
        "print(tvm.get_global_func('runtime.NumThreads')())"
    )
    assert int(python(code)) == physical_cores()
    assert python(code, TVM_NUM_THREADS="1") == python(code, OMP_NUM_THREADS="1") == "1"
