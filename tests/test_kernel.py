"""What a caller meets: tensors in and out, errors, saved kernels, the cache, records, targets."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.ir import load_json

import dwtir
from dwtir import (
    ArgumentError,
    DepthwiseConv2dShape,
    Epilogue,
    InvalidEpilogueError,
    InvalidScheduleError,
    InvalidShapeError,
    InvalidTargetError,
    Kernel,
    NotTunedError,
    NotTunedWarning,
    RecordError,
    Resources,
    Strategy,
    Target,
    ToolchainError,
    database,
    reference,
)
from dwtir.kernel import KernelInfo
from dwtir.records import Record
from dwtir.schedules import Cpu, RegisterWindow, SharedTile
from dwtir.target import KNOWN_GPUS, resolve
from dwtir.threads import physical_cores
from processes import python
from strategies import Array, integer_tensors

SHAPE = DepthwiseConv2dShape.parse("2x6x9x11_k3_s2x1_psame_m2")
EPILOGUE = Epilogue(("bias", "relu"))


def tensors_of(kernel: Kernel, seed: int = 0) -> list[Array]:
    return list(integer_tensors(kernel.shape, kernel.epilogue, seed).values())


def expected_of(kernel: Kernel, seed: int = 0) -> Array:
    tensors = integer_tensors(kernel.shape, kernel.epilogue, seed)
    data, weight, *_ = tensors.values()
    return reference.depthwise_conv2d(kernel.shape, data, weight, tensors, epilogue=kernel.epilogue)


def check(kernel: Kernel) -> None:
    got = kernel(*tensors_of(kernel))
    np.testing.assert_array_equal(np.asarray(got, np.float64), expected_of(kernel))


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return dwtir.build(SHAPE, epilogue=EPILOGUE, target="cpu")


@pytest.fixture(scope="module")
def opencl_kernel() -> Kernel:
    return dwtir.build(SHAPE, epilogue=EPILOGUE, target="opencl")


@pytest.fixture(scope="module")
def foreign_kernel() -> Kernel:
    """A kernel for a GPU that no machine of ours has."""
    return dwtir.build(SHAPE, target="sm_87")


def aligned(shape: tuple[int, ...], dtype: Any, offset: int = 0) -> Array:
    """Make an array of NaN that starts `offset` bytes after a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + 128, 0xFF, np.uint8)
    skip = -memory.ctypes.data % 64 + offset
    return memory[skip : skip + size].view(dtype).reshape(shape)


# Calling


@pytest.mark.parametrize("target", ["cpu", "opencl"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_numpy_arrays_in_and_out(target: str, dtype: str) -> None:
    kernel = dwtir.build(replace(SHAPE, dtype=dtype), epilogue=EPILOGUE, target=target)
    got = kernel(*tensors_of(kernel))
    assert isinstance(got, np.ndarray)
    assert got.dtype == reference.numpy_dtype(dtype)
    assert got.shape == SHAPE.out_shape
    np.testing.assert_array_equal(got.astype(np.float64), expected_of(kernel))


@pytest.mark.parametrize("target", ["cpu", "opencl"])
def test_out_is_written_and_returned(target: str, request: pytest.FixtureRequest) -> None:
    kernel = request.getfixturevalue("kernel" if target == "cpu" else "opencl_kernel")
    out = aligned(SHAPE.out_shape, np.float32)
    assert kernel(*tensors_of(kernel), out=out) is out
    np.testing.assert_array_equal(out, expected_of(kernel))


@pytest.mark.parametrize("target", ["cpu", "opencl"])
def test_inputs_may_be_read_only(target: str, request: pytest.FixtureRequest) -> None:
    kernel = request.getfixturevalue("kernel" if target == "cpu" else "opencl_kernel")
    tensors = tensors_of(kernel)
    for tensor in tensors:
        tensor.flags.writeable = False
    np.testing.assert_array_equal(kernel(*tensors), expected_of(kernel))


def test_any_stride_of_an_axis_of_one_is_contiguous() -> None:
    kernel = dwtir.build("1x6x9x1_k3x1", target="cpu")
    data, weight = tensors_of(kernel)
    odd = np.lib.stride_tricks.as_strided(data, strides=(12, *data.strides[1:3], 40))
    assert odd.flags.c_contiguous
    np.testing.assert_array_equal(kernel(odd, weight), expected_of(kernel))


def test_dlpack_tensors_in_and_out(kernel: Kernel) -> None:
    tensors = [tvm.runtime.tensor(array) for array in tensors_of(kernel)]
    got = kernel(*tensors)
    assert isinstance(got, tvm.runtime.Tensor)
    np.testing.assert_array_equal(got.numpy(), expected_of(kernel))
    out = tvm.runtime.tensor(np.full(SHAPE.out_shape, np.nan, np.float32))
    assert kernel(*tensors, out=out) is out
    np.testing.assert_array_equal(out.numpy(), expected_of(kernel))


class Wrapped:
    """A tensor of a library that dwtir has never heard of."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_tensors_of_unknown_libraries(kernel: Kernel) -> None:
    tensors = [Wrapped(array) for array in tensors_of(kernel)]
    np.testing.assert_array_equal(kernel(*tensors).numpy(), expected_of(kernel))
    with pytest.raises(ArgumentError, match=r"data must have shape \(2, 6, 9, 11\), got \(1,"):
        kernel(Wrapped(np.ones((1, 6, 9, 11), np.float32)), *tensors[1:])
    with pytest.raises(ArgumentError, match="weight must be float32, got float64"):
        kernel(tensors[0], Wrapped(np.ones(SHAPE.weight_shape)), tensors[2])
    with pytest.raises(ArgumentError, match="data must be contiguous"):
        kernel(Wrapped(np.ones((2, 6, 9, 22), np.float32)[..., ::2]), *tensors[1:])
    with pytest.raises(ArgumentError, match="data must start at a multiple of 16 bytes, got one 4"):
        kernel(Wrapped(aligned(SHAPE.data_shape, np.float32, 4)), *tensors[1:])
    memory = aligned((2 * 12 * 5 * 11,), np.float32)
    data, out = memory[: 2 * 6 * 9 * 11].reshape(SHAPE.data_shape), memory.reshape(SHAPE.out_shape)
    with pytest.raises(ArgumentError, match="out must not overlap data"):
        kernel(Wrapped(data), *tensors[1:], out=Wrapped(out))


def test_opencl_takes_numpy_arrays_only(opencl_kernel: Kernel) -> None:
    with pytest.raises(ArgumentError, match="OpenCL kernels take NumPy arrays, got"):
        opencl_kernel(*[tvm.runtime.tensor(array) for array in tensors_of(opencl_kernel)])


Change = Callable[[list[Any]], None]


def _drop_last(tensors: list[Any]) -> None:
    tensors.pop()


def _repeat_last(tensors: list[Any]) -> None:
    tensors.append(tensors[-1])


def _replace(index: int, value: Callable[[Any], Any]) -> Change:
    def change(tensors: list[Any]) -> None:
        tensors[index] = value(tensors[index])

    return change


def _misaligned(array: Array) -> Array:
    moved = aligned(array.shape, array.dtype, 8)
    moved[...] = array
    return moved


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array


WRONG_CALLS: dict[str, tuple[Change, str]] = {
    "no operand": (
        _drop_last,
        r"takes 3 tensors \(data, weight, bias\) and out=, got 2",
    ),
    "one too many": (_repeat_last, "takes 3 tensors .*, got 4"),
    "a list": (
        _replace(1, lambda array: array.tolist()),
        "weight must be a NumPy array like data, got list",
    ),
    "nothing": (_replace(2, lambda array: None), "bias must be a NumPy array .* got NoneType"),
    "data of no library": (
        _replace(0, lambda array: array.tolist()),
        "data must be a NumPy array, a torch tensor or anything with __dlpack__, got list",
    ),
    "batch": (
        _replace(0, lambda array: array[:1]),
        r"data must have shape \(2, 6, 9, 11\), got \(1, 6, 9, 11\)",
    ),
    "rank": (_replace(0, lambda array: array[0]), "data must have shape"),
    "torch's weight in NumPy": (
        _replace(1, lambda array: array.reshape(12, 1, 3, 3)),
        r"weight must have shape \(6, 2, 3, 3\), got \(12, 1, 3, 3\)",
    ),
    "bias of the inputs": (_replace(2, lambda array: array[:6]), r"bias must have shape \(12,\)"),
    "float64": (
        _replace(0, lambda array: array.astype(np.float64)),
        "data must be float32, got float64",
    ),
    "int32": (_replace(1, lambda array: array.view(np.int32)), "weight must be float32, got int32"),
    "bytes swapped": (
        _replace(1, lambda array: array.astype(">f4")),
        "weight must be float32, got >f4",
    ),
    "transposed": (
        _replace(0, lambda array: np.asfortranarray(array)),
        "data must be contiguous; make a contiguous copy",
    ),
    "broadcast": (
        _replace(2, lambda array: np.broadcast_to(array[:1], (12,))),
        "bias must be contiguous",
    ),
    "misaligned": (
        _replace(0, _misaligned),
        "data must start at a multiple of 16 bytes, got one 8 bytes past it",
    ),
}


@pytest.mark.parametrize("target", ["cpu", "opencl"])
@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_tensors_are_refused(case: str, target: str, request: pytest.FixtureRequest) -> None:
    kernel = request.getfixturevalue("kernel" if target == "cpu" else "opencl_kernel")
    change, message = WRONG_CALLS[case]
    if target == "opencl" and case == "data of no library":
        message = "OpenCL kernels take NumPy arrays, got list"
    tensors: list[Any] = tensors_of(kernel)
    change(tensors)
    with pytest.raises(ArgumentError, match=message) as error:
        kernel(*tensors)
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, TypeError)


WRONG_OUTPUTS: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "shape": (
        lambda tensors: np.empty((2, 12, 5, 12), np.float32),
        r"out must have shape \(2, 12, 5, 11\), got \(2, 12, 5, 12\)",
    ),
    "dtype": (lambda tensors: np.empty(SHAPE.out_shape), "out must be float32, got float64"),
    "read-only": (
        lambda tensors: _frozen(np.empty(SHAPE.out_shape, np.float32)),
        "out must be writeable, got a read-only array",
    ),
    "kind": (
        lambda tensors: tvm.runtime.empty(SHAPE.out_shape, "float32"),
        "out must be a NumPy array like data, got tvm",
    ),
    "misaligned": (
        lambda tensors: aligned(SHAPE.out_shape, np.float32, 4),
        "out must start at a multiple of 16 bytes",
    ),
    "not contiguous": (
        lambda tensors: np.empty((2, 12, 5, 22), np.float32)[..., ::2],
        "out must be contiguous",
    ),
}


@pytest.mark.parametrize("target", ["cpu", "opencl"])
@pytest.mark.parametrize("case", WRONG_OUTPUTS)
def test_wrong_outputs_are_refused(case: str, target: str, request: pytest.FixtureRequest) -> None:
    kernel = request.getfixturevalue("kernel" if target == "cpu" else "opencl_kernel")
    make, message = WRONG_OUTPUTS[case]
    tensors = tensors_of(kernel)
    with pytest.raises(ArgumentError, match=message):
        kernel(*tensors, out=make(tensors))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_out_must_not_overlap_an_input(kernel: Kernel, index: int) -> None:
    tensors = tensors_of(kernel)
    name = ("data", "weight", "bias")[index]
    size = int(np.prod(SHAPE.out_shape))
    memory = aligned((size + 4096,), np.float32)
    out = memory[2048 : 2048 + size].reshape(SHAPE.out_shape)
    length = tensors[index].size
    for first, overlaps in (
        (2048 - length, False),
        (2048 - length + 4, True),
        (2048, True),
        (2048 + size - 4, True),
        (2048 + size, False),
    ):
        place = memory[first : first + length].reshape(tensors[index].shape)
        place[...] = tensors[index]
        given = [*tensors[:index], place, *tensors[index + 1 :]]
        if overlaps:
            with pytest.raises(ArgumentError, match=f"out must not overlap {name} in memory"):
                kernel(*given, out=out)
        else:
            np.testing.assert_array_equal(kernel(*given, out=out), expected_of(kernel))


def test_a_refused_call_writes_nothing(kernel: Kernel) -> None:
    out = np.full(SHAPE.out_shape, 7, np.float32)
    data, weight, _ = tensors_of(kernel)
    with pytest.raises(ArgumentError):
        kernel(data, weight, np.zeros(13, np.float32), out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("target", ["cpu", "opencl"])
def test_threads_may_share_a_kernel(target: str, request: pytest.FixtureRequest) -> None:
    kernel = request.getfixturevalue("kernel" if target == "cpu" else "opencl_kernel")

    def right(seed: int) -> bool:
        return np.array_equal(kernel(*tensors_of(kernel, seed)), expected_of(kernel, seed))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(40)))


if importlib.util.find_spec("torch") is not None:  # torch is no dependency of the tests

    def test_torch_tensors_on_the_cpu(kernel: Kernel) -> None:
        import torch

        data, weight, bias = (torch.from_numpy(array) for array in tensors_of(kernel))
        for shape in (SHAPE.weight_shape, (12, 1, 3, 3)):
            got = kernel(data, weight.reshape(shape), bias)
            assert isinstance(got, torch.Tensor)
            np.testing.assert_array_equal(got.numpy(), expected_of(kernel))
        with pytest.raises(ArgumentError, match="weight requires a gradient"):
            kernel(data, weight.clone().requires_grad_(), bias)


# torch on a GPU; `test_gpu` has the calls that succeed


@pytest.fixture(scope="module")
def cuda_kernel() -> Kernel:
    return dwtir.build(SHAPE, epilogue=EPILOGUE, target="cuda")


@pytest.mark.parametrize("home", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_wrong_torch_tensors_are_refused(request: pytest.FixtureRequest, home: str) -> None:
    import torch

    kernel: Kernel = request.getfixturevalue("cuda_kernel" if home == "cuda" else "kernel")
    data, weight, bias = (torch.from_numpy(array).to(home) for array in tensors_of(kernel))
    away = "cpu" if home == "cuda" else "meta"
    shifted = torch.empty(data.numel() + 1, device=home)[1:].view(data.shape)
    for wrong, message in (
        ((data.to(away), weight, bias), f"data must be on {home}, got {away}"),
        ((data, weight.to(away), bias), f"weight must be on {home}, got {away}"),
        ((data, weight, bias.half()), "bias must be float32, got torch.float16"),
        ((data[:1], weight, bias), r"data must have shape \(2, 6, 9, 11\), got \(1,"),
        ((data.transpose(2, 3).contiguous().transpose(2, 3), weight, bias), "data must be contig"),
        ((shifted, weight, bias), "data must start at a multiple of 16 bytes, got one 4"),
        ((data, weight.clone().requires_grad_(), bias), "weight requires a gradient"),
        ((data.to_sparse(), weight, bias), "data must be a dense tensor"),
        ((data, weight.cpu().numpy(), bias), "weight must be a torch.Tensor like data, got numpy"),
        ((data, weight), "takes 3 tensors"),
    ):
        with pytest.raises(ArgumentError, match=message):
            kernel(*wrong)
    memory = torch.empty(4096, device=home)
    overlapping = memory[: data.numel()].view(data.shape)
    with pytest.raises(ArgumentError, match="out must not overlap data"):
        kernel(
            overlapping, weight, bias, out=memory[: np.prod(SHAPE.out_shape)].view(SHAPE.out_shape)
        )
    with torch.no_grad():
        kernel(data, weight.clone().requires_grad_(), bias)

    # Too small, and out begins where it ends: by the kernel's sizes the two would overlap.
    small, after = memory[:64], memory[64 : 64 + np.prod(SHAPE.out_shape)]
    with pytest.raises(ArgumentError, match=r"data must have shape .*, got \(64,\)"):
        kernel(small, weight, bias, out=after.view(SHAPE.out_shape))


# What a kernel says of itself


def test_a_kernel_of_the_cpu_can_be_looked_at(kernel: Kernel) -> None:
    assert (kernel.shape, kernel.epilogue, kernel.target) == (SHAPE, EPILOGUE, resolve("cpu"))
    assert isinstance(kernel.strategy, Cpu)
    assert repr(kernel) == f"<Kernel {SHAPE} bias+relu {kernel.strategy} for {kernel.target.name}>"
    assert 'T.sblock("depthwise_conv2d' in kernel.script()
    assert ".text" in kernel.source()
    assert kernel.resources() == Resources()
    assert kernel.resources().threads is None
    assert kernel.provenance == {
        "dwtir": dwtir.__version__,
        "apache-tvm": "0.27.0.post1",
        "schedule": "manual",
        "chosen": "manual",
    }
    assert any(inst[0] == "ComputeAt" for inst in load_json(kernel.trace)[0])


def test_a_kernel_of_opencl_can_be_looked_at(opencl_kernel: Kernel) -> None:
    resources = opencl_kernel.resources()
    assert resources.grid is not None
    assert resources.threads is not None
    assert resources.threads > 1
    assert "__kernel" in opencl_kernel.source()
    assert 'thread="threadIdx.x"' in opencl_kernel.script()


def test_a_kernel_for_an_absent_gpu_can_be_looked_at_but_not_run(
    foreign_kernel: Kernel, tmp_path: Path
) -> None:
    resources = foreign_kernel.resources()
    assert resources.registers is not None
    assert resources.registers > 0
    assert resources.spill_bytes == 0
    assert "__global__" in foreign_kernel.source()
    tensors = tensors_of(foreign_kernel)
    with pytest.raises(ArgumentError, match="data must be on cuda, got cpu"):
        foreign_kernel(*tensors)
    for use in (foreign_kernel.time, lambda: foreign_kernel.export(tmp_path / "kernel.so")):
        with pytest.raises(ToolchainError, match=r"sm_87.*not in this machine.*dwtir doctor"):
            use()
    assert not list(tmp_path.iterdir())


def test_the_cpu_is_timed(kernel: Kernel) -> None:
    timing = kernel.time(repeats=5, min_repeat_ms=1)
    assert 0 < timing.p20 <= timing.median <= timing.p80
    assert timing.repeats == 5
    assert np.isfinite(timing.p80)


def test_opencl_is_neither_timed_nor_exported(opencl_kernel: Kernel, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="opencl are not timed"):
        opencl_kernel.time()
    with pytest.raises(ToolchainError, match="opencl cannot be exported"):
        opencl_kernel.export(tmp_path / "kernel.so")


@pytest.mark.parametrize("name", ["kernel", "opencl_kernel", "foreign_kernel"])
def test_the_description_survives_json(name: str, request: pytest.FixtureRequest) -> None:
    info = request.getfixturevalue(name).info
    assert KernelInfo.from_json(json.loads(json.dumps(info.to_json()))) == info


# Saved kernels

LOAD = """
import sys, numpy as np, dwtir
kernel = dwtir.load(sys.argv[1])
arrays = np.load(sys.argv[2])
np.save(sys.argv[3], kernel(*[arrays[name] for name in sorted(arrays)]))
print(kernel)
print(open("/proc/self/maps").read())
"""


def test_a_saved_kernel_runs_without_the_compiler(kernel: Kernel, tmp_path: Path) -> None:
    kernel.export(str(tmp_path / "new folder" / "kernel.so"))
    tensors = tensors_of(kernel)
    np.savez(tmp_path / "in.npz", **{f"{i}": array for i, array in enumerate(tensors)})
    child = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-c", LOAD),
            *(str(tmp_path / "new folder" / "kernel.so"), str(tmp_path / "in.npz")),
            str(tmp_path / "out.npy"),
        ],
        env=os.environ | {"TVM_USE_RUNTIME_LIB": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith(repr(kernel))
    assert "libtvm_runtime.so" in child.stdout
    assert "libtvm_compiler" not in child.stdout
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), kernel(*tensors))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loaded_kernel_is_the_saved_one(dtype: str, tmp_path: Path) -> None:
    kernel = dwtir.build(replace(SHAPE, dtype=dtype), epilogue=EPILOGUE, target="cpu")
    path = tmp_path / "kernel.so"
    kernel.export(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["kernel.so"], "left-overs"
    loaded = dwtir.load(path)
    assert loaded.info == kernel.info
    check(loaded)


@pytest.fixture(scope="module")
def saved_bytes(kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "kernel.so"
    kernel.export(path)
    return path.read_bytes()


def load_bytes(content: bytes, folder: Path) -> Kernel:
    path = folder / "kernel.so"
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    return dwtir.load(path)


def refused(content: bytes, folder: Path) -> bool:
    """Load a damaged file: it is refused by name, or the damage touched nothing that counts."""
    try:
        loaded = load_bytes(content, folder)
    except RecordError as error:
        return str(folder / "kernel.so") in str(error)
    check(loaded)
    return False


def test_flipped_bits_in_the_code_are_found(saved_bytes: bytes, tmp_path: Path) -> None:
    code = saved_bytes.index(b"PK\x03\x04")
    rng = np.random.default_rng(0)
    for place in [0, 1, 7, 40, code - 1, *rng.integers(0, code, 100)]:
        damaged = bytearray(saved_bytes)
        damaged[place] ^= 1 << int(rng.integers(8))
        assert refused(bytes(damaged), tmp_path)


def test_flipped_bits_in_the_description_are_found_or_harmless(
    saved_bytes: bytes, tmp_path: Path
) -> None:
    start = saved_bytes.index(b"PK\x03\x04")
    rng = np.random.default_rng(0)
    headers = [*range(start, start + 40), *range(len(saved_bytes) - 77, len(saved_bytes))]
    found = 0
    for place in [*headers, *rng.integers(start, len(saved_bytes), 200)]:
        damaged = bytearray(saved_bytes)
        damaged[place] ^= int(rng.integers(1, 256))
        found += refused(bytes(damaged), tmp_path)
    assert found > 200


def test_truncated_files_are_refused(saved_bytes: bytes, tmp_path: Path) -> None:
    size = len(saved_bytes)
    for length in [0, 1, 3, 4, 64, size // 2, *range(size - 120, size, 7), size - 1]:
        assert refused(saved_bytes[:length], tmp_path)


def test_foreign_files_are_refused(kernel: Kernel, tmp_path: Path) -> None:
    path = tmp_path / "kernel.so"
    with pytest.raises(RecordError, match=r"kernel\.so: no such file"):
        dwtir.load(path)
    with pytest.raises(RecordError, match="not a kernel saved by dwtir"):
        dwtir.load(tmp_path)
    path.write_text("hello")
    with pytest.raises(RecordError, match="not a kernel saved by dwtir"):
        dwtir.load(path)
    shutil.copy(sys.executable, path)
    with pytest.raises(RecordError, match="not a kernel saved by dwtir"):
        dwtir.load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other.json", "{}")
    with pytest.raises(RecordError, match="not a kernel saved by dwtir"):
        dwtir.load(path)


def rewrite(content: bytes, change: Callable[[dict[str, Any]], Any], path: Path) -> None:
    """Change the description of a saved kernel; the code and its digest stay right."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    with zipfile.ZipFile(path) as archive:
        record = json.loads(archive.read("dwtir.json"))
    changed = change(record)
    path.write_bytes(content[: content.index(b"PK\x03\x04")])
    with zipfile.ZipFile(path, "a") as archive:
        text = changed if isinstance(changed, str | bytes) else json.dumps(record)
        archive.writestr("dwtir.json", text)


def _set(*keys_and_value: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last, value = keys_and_value

    def change(record: dict[str, Any]) -> None:
        place = record
        for key in keys:
            place = place[key]
        place[last] = value

    return change


def _without(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(record: dict[str, Any]) -> None:
        place = record
        for key in keys[:-1]:
            place = place[key]
        del place[keys[-1]]

    return change


FOREIGN_DESCRIPTIONS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "schema": (_set("schema", 2), "not a kernel of schema 1"),
    "tvm": (_set("tvm", "0.18.0"), "made by TVM 0.18.0, this is 0.27.0"),
    "no tvm": (_without("tvm"), "made by TVM None"),
    "negative": (_set("code_bytes", -1), "description is damaged"),
    "too long": (_set("code_bytes", 2**40), "description is damaged"),
    "bool": (_set("code_bytes", True), "description is damaged"),
    "float": (_set("code_bytes", 1e3), "description is damaged"),
    "digest": (_set("code_sha256", "0" * 64), "code is damaged; its SHA-256"),
    "no digest": (_set("code_sha256", None), "code is damaged; its SHA-256"),
    "no kernel": (_set("kernel", None), "description is damaged"),
    "list": (lambda record: "[]", "not a kernel of schema 1"),
    "no json": (lambda record: "{", "not a kernel saved by dwtir"),
    "bytes": (lambda record: b"\xff\xfe\x00", "not a kernel saved by dwtir"),
    "nested": (lambda record: "[" * 200_000, "not a kernel saved by dwtir"),
    "shape": (_set("kernel", "shape", "1x2x3x4"), "description is damaged"),
    "shape's type": (_set("kernel", "shape", 3), "description is damaged"),
    "epilogue": (_set("kernel", "epilogue", ["tanh"]), "description is damaged"),
    "strategy": (_set("kernel", "strategy", "magic"), "description is damaged"),
    "strategy's type": (_set("kernel", "strategy", []), "description is damaged"),
    "parameters": (_set("kernel", "parameters", "rows", True), "description is damaged"),
    "parameters' type": (_set("kernel", "parameters", 3), "description is damaged"),
    "target": (_set("kernel", "target", {}), "description is damaged"),
    "target's field": (_set("kernel", "target", "colour", "red"), "description is damaged"),
    "target's features": (_set("kernel", "target", "features", 3), "description is damaged"),
    "provenance": (_set("kernel", "provenance", []), "description is damaged"),
    "resources": (_set("kernel", "resources", {"gold": 1}), "description is damaged"),
    "resources' type": (_set("kernel", "resources", None), "description is damaged"),
    "workspace": (_set("kernel", "workspace", [["int8", [4]]]), "a workspace must be one of"),
    "no script": (_without("kernel", "script"), "description is damaged"),
}


@pytest.mark.parametrize("case", FOREIGN_DESCRIPTIONS)
def test_foreign_descriptions_are_refused(case: str, saved_bytes: bytes, tmp_path: Path) -> None:
    change, message = FOREIGN_DESCRIPTIONS[case]
    path = tmp_path / "kernel.so"
    rewrite(saved_bytes, change, path)
    with pytest.raises(RecordError, match=message) as error:
        dwtir.load(path)
    assert str(path) in str(error.value)


# The cache


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "parent" / "cache"
    monkeypatch.setenv("DWTIR_CACHE_DIR", str(folder))
    return folder


BUILD = """
import sys, numpy as np, dwtir
kernel = dwtir.build("1x8x16x16_k3_psame", target="cpu")
print("compiled" if "dwtir.compiler" in sys.modules else "found")
assert kernel(np.ones((1, 8, 16, 16), "float32"), np.ones((8, 1, 3, 3), "float32")).sum() == 16928
"""


def test_a_kernel_of_an_earlier_process_is_there_at_once(cache_dir: Path) -> None:
    assert python(BUILD, PYTHONWARNINGS="error") == "compiled"
    (file,) = cache_dir.iterdir()
    assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = file.stat()
    assert python(BUILD, PYTHONWARNINGS="error") == "found"
    after = file.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_what_is_built_decides_the_file(cache_dir: Path) -> None:
    texts = ["1x4x8x8_k3", "1x4x8x9_k3", "1x4x8x8_k3_float16"]
    for text in texts * 2:
        dwtir.build(text, target="cpu")
    assert len(list(cache_dir.iterdir())) == 3
    dwtir.build(texts[0], epilogue="relu", target="cpu")
    dwtir.build(texts[0], Cpu(rows=2, cols=1, lanes=4), target="cpu")
    dwtir.build(texts[0], target={"kind": "llvm", "mcpu": "x86-64-v2"})
    assert len(list(cache_dir.iterdir())) == 6


def test_a_cached_kernel_is_told_how_it_was_asked_for(cache_dir: Path) -> None:
    manual = dwtir.build(SHAPE, target="cpu")
    named = dwtir.build(SHAPE, "cpu", target="cpu")
    assert len(list(cache_dir.iterdir())) == 1
    assert manual.provenance["chosen"] == "manual"
    assert named.provenance["chosen"] == "step"
    assert named.script() == manual.script()
    check(named)


def _flip_code(path: Path, content: bytes) -> None:
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def _cut(path: Path, content: bytes) -> None:
    path.write_bytes(content[:-1])


def _describe_nothing(path: Path, content: bytes) -> None:
    rewrite(content, _set("kernel", {}), path)


@pytest.mark.parametrize("damage", [_flip_code, _cut, _describe_nothing])
def test_a_damaged_file_is_built_again(
    damage: Callable[[Path, bytes], None], cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dwtir.build(SHAPE, target="cpu")
    (file,) = cache_dir.iterdir()
    content = file.read_bytes()
    file.unlink()
    damage(file, content)
    file.chmod(0o600)
    with caplog.at_level(logging.WARNING, "dwtir"):
        check(dwtir.build(SHAPE, target="cpu"))
    assert [str(file) in message for message in caplog.messages] == [True]
    caplog.clear()
    check(dwtir.build(SHAPE, target="cpu"))
    assert caplog.messages == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_can_write_is_not_used(
    mode: int, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dir.mkdir(parents=True)
    cache_dir.chmod(mode)
    with caplog.at_level(logging.WARNING, "dwtir"):
        check(dwtir.build(SHAPE, target="cpu"))
    assert list(cache_dir.iterdir()) == []
    assert f"{cache_dir} is not used" in caplog.text
    assert "writable by nobody else" in caplog.text


def test_a_file_that_others_can_write_is_not_loaded(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dwtir.build(SHAPE, target="cpu")
    (file,) = cache_dir.iterdir()
    file.chmod(0o622)
    before = file.stat().st_ino
    with caplog.at_level(logging.WARNING, "dwtir"):
        check(dwtir.build(SHAPE, target="cpu"))
    assert f"{file} is not used" in caplog.text
    assert file.stat().st_ino != before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_costs_only_the_cache(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dir.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "dwtir"):
        check(dwtir.build(SHAPE, target="cpu"))
    assert "kernels are not cached" in caplog.text


# Schedules


def test_schedules_by_name_and_as_objects() -> None:
    target = resolve("opencl")
    text = "1x8x33x35_k3_psame"
    for schedule, strategy, chosen in (
        ("manual", RegisterWindow, "manual"),
        ("register_window", RegisterWindow, "step"),
        ("threads_8x32", SharedTile(thread_y=8, thread_x=32), "step"),
        (SharedTile(block_h=16), SharedTile(block_h=16), "object"),
    ):
        kernel = dwtir.build(text, schedule, target="opencl")
        if isinstance(strategy, type):
            shape = DepthwiseConv2dShape.parse(text)
            assert kernel.strategy == strategy.choose(shape, target)
        else:
            assert kernel.strategy == strategy
        assert kernel.provenance["chosen"] == chosen
        assert kernel.provenance["schedule"] == str(schedule)
        check(kernel)


@pytest.mark.parametrize(
    ("schedule", "target", "message"),
    [
        ("fast", "cpu", r"unknown schedule 'fast'; allowed are 'manual', 'tuned', .*naive.*cpu"),
        ("", "cpu", "unknown schedule ''"),
        (None, "cpu", "a schedule is a name or a Strategy, got NoneType"),
        (Cpu, "cpu", "a schedule is a name or a Strategy, got "),
        ("v4", "cpu", "must be forward in NCHW on a GPU, got"),
        ("cpu", "opencl", "must be forward or grad_data in NCHW or NHWC on a CPU, got"),
        (Cpu(1, 1, 5), "cpu", "lanes must be one of"),
        (SharedTile(thread_y=64, thread_x=32), "opencl", "threads per block must be at most 1024"),
        (SharedTile(padding="none"), "opencl", "padding must be 'staged' or 'inline', got none"),
    ],
)
def test_schedules_that_do_not_fit(schedule: Any, target: str, message: str) -> None:
    with pytest.raises(InvalidScheduleError, match=message):
        dwtir.build(SHAPE, schedule, target=target)


def test_a_strategy_for_the_other_layout_is_refused() -> None:
    nhwc = replace(SHAPE, layout="NHWC")
    with pytest.raises(InvalidScheduleError, match=r"nhwc on opencl|in NCHW"):
        dwtir.build(nhwc, "register_window", target="opencl")
    with pytest.raises(InvalidScheduleError, match="in NHWC on a GPU"):
        dwtir.build(SHAPE, "channel_vector", target="opencl")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"shape": "1x2x3x4"}, InvalidShapeError),
        ({"shape": {"batch": 1}}, InvalidShapeError),
        ({"epilogue": "tanh"}, InvalidEpilogueError),
        ({"target": "tpu"}, InvalidTargetError),
        ({"on_miss": "ignore"}, InvalidScheduleError),
    ],
)
def test_build_refuses_wrong_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        dwtir.build(**({"shape": "1x4x9x9_k3", "target": "cpu"} | arguments))


# Records


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for this CPU's records, of a database that is otherwise empty."""
    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path / "records"))
    found = tmp_path / "records" / resolve("cpu").name
    found.mkdir(parents=True)
    return found


TILE = Cpu(rows=3, cols=1, lanes=2)


def record(target: str = "cpu", tile: Strategy = TILE, **changes: Any) -> dict[str, Any]:
    return Record.measured(tile, SHAPE, resolve(target), [1e-6]).as_json() | changes


def test_without_a_record_the_manual_schedule_is_built_with_one_warning(folder: Path) -> None:
    with pytest.warns(NotTunedWarning) as caught:
        kernel = dwtir.build(SHAPE, "tuned", target="cpu")
    (warning,) = caught
    assert f"python -m dwtir.tune {SHAPE}" in str(warning.message)
    assert resolve("cpu").name in str(warning.message)
    assert warning.filename == __file__
    assert kernel.strategy == Cpu.choose(SHAPE, resolve("cpu"))
    assert kernel.provenance["chosen"] == "manual"
    assert kernel.provenance["schedule"] == "tuned"
    with pytest.raises(NotTunedError, match=f"python -m dwtir.tune {SHAPE}") as error:
        dwtir.build(SHAPE, "tuned", target="cpu", on_miss="error")
    assert isinstance(error.value, LookupError)


def test_a_record_is_used(folder: Path) -> None:
    path = folder / f"{SHAPE}.json"
    path.write_text(json.dumps(record()))
    kernel = dwtir.build(SHAPE, "tuned", epilogue=EPILOGUE, target="cpu", on_miss="error")
    assert kernel.strategy == TILE
    assert kernel.strategy != Cpu.choose(SHAPE, resolve("cpu"))
    assert kernel.provenance["chosen"] == "tuned"
    assert kernel.provenance["record"] == str(path)
    check(kernel)
    other = replace(SHAPE, width=12)
    with pytest.raises(NotTunedError):
        dwtir.build(other, "tuned", target="cpu", on_miss="error")


def test_records_are_looked_for_in_order(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    users = tmp_path / "data" / "dwtir" / "tune_db" / folder.name
    users.mkdir(parents=True)
    (users / f"{SHAPE}.json").write_text(json.dumps(record(tile=Cpu(1, 1, 1))))
    assert dwtir.build(SHAPE, "tuned", target="cpu").strategy == Cpu(1, 1, 1)
    (folder / f"{SHAPE}.json").write_text(json.dumps(record()))
    assert dwtir.build(SHAPE, "tuned", target="cpu").strategy == TILE
    *_, shipped = database.folders()
    assert shipped == database.shipped_folder()


HOSTILE_RECORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "schema": (lambda: record(schema=1), "schema must be 2, got 1"),
    "device": (lambda: record(device="nvidia-h200"), "device must be 'cpu-.*', got 'nvidia-h200'"),
    "shape": (lambda: record(shape="1x1x9x9_k3"), "shape must be written"),
    "no device": (lambda: {"schema": 2, "shape": str(SHAPE)}, "missing .*'device'"),
    "strategy": (lambda: record(strategy="magic"), "unknown strategy 'magic'"),
    "strategy's type": (lambda: record(strategy=["cpu"]), "unknown strategy"),
    "code": (lambda: record(strategy="__import__('os')"), "unknown strategy"),
    "another device's": (
        lambda: record(strategy="shared_tile", parameters=SharedTile().parameters),
        "in NCHW on a GPU",
    ),
    "no parameters": (lambda: record(parameters=None), "parameters must be an object, got None"),
    "list": (lambda: record(parameters=[3, 1, 2]), "parameters must be an object"),
    "missing": (lambda: record(parameters={"rows": 1}), "has the parameters .*, got"),
    "extra": (lambda: record(parameters=TILE.parameters | {"x": 1}), "has the parameters"),
    "bool": (
        lambda: record(parameters=TILE.parameters | {"rows": True}),
        "rows must be a positive int, got True",
    ),
    "float": (lambda: record(parameters=TILE.parameters | {"rows": 3.0}), "rows must be .* 3.0"),
    "string": (lambda: record(parameters=TILE.parameters | {"rows": "3"}), "rows must be .* '3'"),
    "zero": (lambda: record(parameters=TILE.parameters | {"cols": 0}), "cols must be .* 0"),
    "negative": (lambda: record(parameters=TILE.parameters | {"cols": -1}), "cols must be .* -1"),
    "too large": (lambda: record(parameters=TILE.parameters | {"rows": 2**31}), "rows must be"),
    "tile": (lambda: record(parameters=TILE.parameters | {"rows": 4096}), "at most 64, got 4096"),
    "nested": (lambda: record(parameters=TILE.parameters | {"rows": {"a": [[]]}}), "rows must be"),
    "array": (lambda: [record()], "a record is a JSON object"),
    "null": (lambda: None, "a record is a JSON object"),
    "empty": (lambda: b"", "not readable as JSON"),
    "no JSON": (lambda: b"{'schema': 1}", "not readable as JSON"),
    "binary": (lambda: bytes(range(256)), "not readable as JSON"),
    "deep": (lambda: b"[" * 6_000, "not readable as JSON"),
    "digits": (lambda: b'{"schema": 1' + b"0" * 5_000 + b"}", "not readable as JSON"),
    "huge": (lambda: record(padding="x" * 9_000), "larger than 8192 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE_RECORDS)
def test_a_hostile_record_is_named_and_not_used(case: str, folder: Path) -> None:
    make, message = HOSTILE_RECORDS[case]
    content = make()
    path = folder / f"{SHAPE}.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kernel = dwtir.build(SHAPE, "tuned", target="cpu")
    assert [warning.category for warning in caught] == [database.RecordWarning, NotTunedWarning]
    assert str(path) in str(caught[0].message)
    assert re.search(message, str(caught[0].message))
    assert kernel.strategy == Cpu.choose(SHAPE, resolve("cpu"))
    assert kernel.provenance["chosen"] == "manual"


def test_a_tile_too_large_for_the_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DWTIR_TUNE_DB", str(tmp_path))
    path = tmp_path / "nvidia-h200" / f"{SHAPE}.json"
    path.parent.mkdir()
    for tile, message in (
        (SharedTile(thread_y=64, thread_x=64), "threads per block must be at most 1024"),
        (SharedTile(block_h=256, block_w=256), "shared bytes per block must be at most 49152"),
        (SharedTile(vthread_y=16), "virtual threads must be at most 8"),
    ):
        content = record("nvidia-h200", SharedTile()) | {"parameters": tile.parameters}
        path.write_text(json.dumps(content))
        with pytest.warns(database.RecordWarning, match=message):
            assert database.find(SHAPE, KNOWN_GPUS["nvidia-h200"]) is None


# Targets


def test_targets_by_name() -> None:
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


def test_targets_as_mappings_and_of_tvm() -> None:
    h200 = KNOWN_GPUS["nvidia-h200"]
    for given in (
        {"kind": "cuda", "arch": "sm_90"},
        tvm.target.Target({"kind": "cuda", "arch": "sm_90"}),
        h200.tvm(),
    ):
        found = resolve(given)
        assert (found.kind, found.arch, found.warp_size) == ("cuda", "sm_90", 32)
        assert found.shared_bytes_per_block == h200.shared_bytes_per_block
        assert found.bandwidth is None, "measured on one device, not on all of an architecture"
    small = resolve({"kind": "cuda", "arch": "sm_75", "max_threads_per_block": 256})
    assert small.max_threads_per_block == 256
    assert resolve(tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})).arch == "x86-64-v3"
    assert resolve({"kind": "opencl"}).kind == "opencl"
    assert resolve(resolve("cpu").tvm()).arch == resolve("cpu").arch


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tpu", r"unknown target 'tpu'; allowed are 'cuda', .*'nvidia-h200'"),
        ("", "unknown target ''"),
        ("cuda:x", "unknown target 'cuda:x'"),
        ("cuda:", "unknown target 'cuda:'"),
        ("sm_", "needs its architecture"),
        ("sm_ninety", "needs its architecture"),
        ({}, "kind must be cuda, llvm or opencl, got None"),
        ({"kind": "metal"}, "kind must be cuda, llvm or opencl, got 'metal'"),
        ({"kind": "cuda"}, "needs its architecture, such as 'sm_90', got arch=None"),
        ({"kind": "cuda", "arch": 90}, "got arch=90"),
        (
            {"kind": "cuda", "arch": "sm_90", "max_threads_per_block": 0},
            "max_threads_per_block must be a positive integer, got 0",
        ),
        (
            {"kind": "opencl", "max_shared_memory_per_block": "48k"},
            "shared_bytes_per_block must be a positive integer, got '48k'",
        ),
        ({"kind": "opencl", "thread_warp_size": True}, "warp_size must be a positive integer"),
        (3, "got int"),
    ],
)
def test_targets_that_do_not_exist(target: Any, message: str) -> None:
    with pytest.raises(InvalidTargetError, match=message):
        resolve(target)


def test_a_small_device_refuses_large_blocks() -> None:
    target = resolve("opencl")
    small = replace(target, max_threads_per_block=64)
    with pytest.raises(InvalidScheduleError, match="threads per block must be at most 64"):
        dwtir.build(SHAPE, SharedTile(thread_y=8, thread_x=16), target=small)


def test_an_architecture_that_nvrtc_does_not_know_is_refused() -> None:
    kernel = dwtir.build(SHAPE, target="sm_31")
    with pytest.raises(InvalidTargetError, match="does not know the architecture sm_31"):
        kernel.resources()


def test_without_a_gpu_the_cpu_is_the_default() -> None:
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


def test_a_target_is_a_value() -> None:
    target = resolve("cpu")
    assert Target(**asdict(target)) == target
    assert hash(target) == hash(resolve("cpu"))


def test_the_cpu_uses_the_cores_it_may() -> None:
    """In a new process, since TVM looks at the setting only once; the user's own setting stays."""
    code = (
        "import dwtir, numpy as np, tvm\n"
        "kernel = dwtir.build('1x8x16x16_k3_psame', target='cpu')\n"
        "kernel(np.ones((1, 8, 16, 16), 'float32'), np.ones((8, 1, 3, 3), 'float32'))\n"
        "print(tvm.get_global_func('runtime.NumThreads')())"
    )

    def threads(**environment: str) -> int:
        own = {k: v for k, v in os.environ.items() if not k.endswith("NUM_THREADS")}
        return int(
            subprocess.check_output([sys.executable, "-c", code], env={**own, **environment})
        )

    assert threads() == physical_cores()
    assert threads(TVM_NUM_THREADS="1") == 1
    assert threads(OMP_NUM_THREADS="1") == 1
