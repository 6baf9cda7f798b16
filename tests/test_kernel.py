"""A kernel: what it says of itself, schedules' names, and calls."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tvm
from numpy.testing import assert_array_equal
from tvm.ir import load_json

import dwtir
from dwtir import ArgumentError, InvalidScheduleError, Resources, Shape, ToolchainError, entry, reference
from dwtir.kernel import KernelInfo
from dwtir.schedules import Cpu, RegisterWindow, SharedTile
from dwtir.target import resolve
from kernels import EPILOGUE, SHAPE, check, expected_of, tensors_of
from marks import devices, dtypes, parametrize, raises


def test_kernel_of_the_cpu_can_be_looked_at(kernel):
    assert (kernel.shape, kernel.epilogue, kernel.target) == (SHAPE, EPILOGUE, resolve("cpu"))
    assert isinstance(kernel.strategy, Cpu)
    assert repr(kernel) == f"<Kernel {SHAPE} bias+relu {kernel.strategy} for {kernel.target.name}>"
    assert 'T.sblock("depthwise_conv2d' in kernel.script()
    assert ".text" in kernel.source()
    assert kernel.resources() == Resources()
    assert kernel.resources().threads is None
    versions = {"dwtir": dwtir.__version__, "apache-tvm": "0.27.0.post1"}
    assert kernel.provenance == versions | {"schedule": "manual", "chosen": "manual"}
    assert any(inst[0] == "ComputeAt" for inst in load_json(kernel.trace)[0])


def test_kernel_of_opencl_can_be_looked_at(opencl_kernel):
    resources = opencl_kernel.resources()
    assert resources.grid is not None
    assert resources.threads > 1
    assert "__kernel" in opencl_kernel.source()
    assert 'thread="threadIdx.x"' in opencl_kernel.script()


def test_kernel_for_an_absent_gpu_is_not_run(foreign_kernel, tmp_path):
    resources = foreign_kernel.resources()
    assert resources.registers > 0
    assert resources.spill_bytes == 0
    assert "__global__" in foreign_kernel.source()
    with raises(ArgumentError, match="data must be on cuda, got cpu"):
        foreign_kernel(*tensors_of(foreign_kernel))
    for use in (foreign_kernel.time, lambda: foreign_kernel.export(tmp_path / "kernel.so")):
        with raises(ToolchainError, match=r"sm_87.*not in this machine.*dwtir doctor"):
            use()
    assert not list(tmp_path.iterdir())


def test_cpu_is_timed(kernel):
    timing = kernel.time(repeats=5, min_repeat_ms=1)
    assert 0 < timing.p20 <= timing.median <= timing.p80 < np.inf
    assert timing.repeats == 5


def test_opencl_is_neither_timed_nor_exported(opencl_kernel, tmp_path):
    with raises(ToolchainError, match="opencl are not timed"):
        opencl_kernel.time()
    with raises(ToolchainError, match="opencl cannot be exported"):
        opencl_kernel.export(tmp_path / "kernel.so")


@parametrize("name", ["kernel", "opencl_kernel", "foreign_kernel"])
def test_description_survives_json(name, request):
    info = request.getfixturevalue(name).info
    assert KernelInfo.from_json(json.loads(json.dumps(info.to_json()))) == info


# Schedules


def test_schedules_by_name_and_as_objects():
    text = "1x8x33x35_k3_psame"
    manual = RegisterWindow.choose(Shape.parse(text), resolve("opencl"))
    steps, tile = SharedTile(thread_y=8, thread_x=32), SharedTile(block_h=16)
    for schedule, strategy, chosen in (
        *(("manual", manual, "manual"), ("register_window", manual, "step")),
        *(("threads_8x32", steps, "step"), (tile, tile, "object")),
    ):
        kernel = dwtir.build(text, schedule, target="opencl")
        found = kernel.provenance
        assert (kernel.strategy, found["chosen"], found["schedule"]) == (strategy, chosen, str(schedule))
        check(kernel)


UNFIT = [
    ("fast", "cpu", r"unknown schedule 'fast'; allowed are 'manual', 'tuned', .*naive.*cpu"),
    (None, "cpu", "a schedule is a name or a Strategy, got NoneType"),
    ("v4", "cpu", "must be forward in NCHW on a GPU, got"),
    ("cpu", "opencl", "must be forward or grad_data in NCHW or NHWC on a CPU, got"),
    (Cpu(1, 1, 5), "cpu", "lanes must be one of"),
    (SharedTile(thread_y=64, thread_x=32), "opencl", "threads per block must be at most 1024"),
    (SharedTile(vthread_y=16), "opencl", "virtual threads must be at most 8"),
    (SharedTile(padding="none"), "opencl", "padding must be one of .* got none"),
]


@parametrize(("schedule", "target", "message"), UNFIT)
def test_schedules_that_do_not_fit(schedule, target, message):
    with raises(InvalidScheduleError, match=message):
        dwtir.build(SHAPE, schedule, target=target)


WRONG = [
    ({"shape": "1x2x3x4"}, dwtir.InvalidShapeError),
    ({"epilogue": "tanh"}, dwtir.InvalidEpilogueError),
    ({"target": "tpu"}, dwtir.InvalidTargetError),
    ({"on_miss": "ignore"}, InvalidScheduleError),
]


@parametrize(("arguments", "error"), WRONG)
def test_build_refuses_wrong_arguments(arguments, error):
    with raises(error):
        dwtir.build(**({"shape": "1x4x9x9_k3", "target": "cpu"} | arguments))


# Calls


@pytest.fixture(params=["kernel", "opencl_kernel"])
def either(request):
    return request.getfixturevalue(request.param)


def exchanged(tensors, place, other):
    return [*tensors[:place], other, *tensors[place + 1 :]]


def aligned(shape, dtype, offset=0):
    """Make an array of NaN that starts `offset` bytes after a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + 128, 0xFF, np.uint8)
    skip = -memory.ctypes.data % 64 + offset
    return memory[skip : skip + size].view(dtype).reshape(shape)


@parametrize("target", ["cpu", "opencl"])
@dtypes
def test_numpy_arrays_in_and_out(target, dtype):
    kernel = dwtir.build(replace(SHAPE, dtype=dtype), epilogue=EPILOGUE, target=target)
    got = kernel(*tensors_of(kernel))
    assert isinstance(got, np.ndarray)
    assert (got.dtype, got.shape) == (reference.numpy_dtype(dtype), SHAPE.out_shape)
    assert_array_equal(got.astype(np.float64), expected_of(kernel))


def test_out_is_returned_and_inputs_may_be_read_only(either):
    tensors = tensors_of(either)
    for tensor in tensors:
        tensor.flags.writeable = False
    out = aligned(SHAPE.out_shape, np.float32)
    assert either(*tensors, out=out) is out
    assert_array_equal(out, expected_of(either))


def test_axis_of_one_has_any_stride():
    kernel = dwtir.build("1x6x9x1_k3x1", target="cpu")
    data, weight = tensors_of(kernel)
    odd = np.lib.stride_tricks.as_strided(data, strides=(12, *data.strides[1:3], 40))
    assert odd.flags.c_contiguous
    assert_array_equal(kernel(odd, weight), expected_of(kernel))


def test_dlpack_tensors_in_and_out(kernel):
    tensors = [tvm.runtime.tensor(array) for array in tensors_of(kernel)]
    got = kernel(*tensors)
    assert isinstance(got, tvm.runtime.Tensor)
    assert_array_equal(got.numpy(), expected_of(kernel))
    out = tvm.runtime.tensor(np.full(SHAPE.out_shape, np.nan, np.float32))
    assert kernel(*tensors, out=out) is out
    assert_array_equal(out.numpy(), expected_of(kernel))


def wrapped(array):
    return SimpleNamespace(__dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__)


def test_tensors_of_unknown_libraries(kernel):
    def refused(message, place, wrong, **out):
        with raises(ArgumentError, match=message):
            kernel(*exchanged(tensors, place, wrapped(wrong)), **out)

    tensors = list(map(wrapped, tensors_of(kernel)))
    assert_array_equal(kernel(*tensors).numpy(), expected_of(kernel))
    refused(r"data must have shape \(2, 6, 9, 11\), got \(1,", 0, np.ones((1, 6, 9, 11), np.float32))
    refused("weight must be float32, got float64", 1, np.ones(SHAPE.weight_shape))
    refused("data must be contiguous", 0, np.ones((2, 6, 9, 22), np.float32)[..., ::2])
    refused("data must start at a multiple of 16 bytes, got one 4", 0, aligned(SHAPE.data_shape, np.float32, 4))
    out = aligned(SHAPE.out_shape, np.float32)
    data = out.ravel()[: 2 * 6 * 9 * 11].reshape(SHAPE.data_shape)
    refused("out must not overlap data", 0, data, out=wrapped(out))


SHIFTED = aligned(SHAPE.data_shape, np.float32, 8)
WRONG_CALLS = {
    r"takes 3 tensors \(data, weight, bias\) and out=, got 2": lambda d, w, b: (d, w),
    "weight must be a NumPy array like data, got list": lambda d, w, b: (d, w.tolist(), b),
    "data must be a NumPy array, a torch tensor or anything with __dlpack__, got list"
    "|OpenCL kernels take NumPy arrays, got list": lambda d, w, b: (d.tolist(), w, b),
    # as torch has it
    r"weight must have shape \(6, 2, 3, 3\), got \(12, 1, 3, 3\)": lambda d, w, b: (d, w.reshape(12, 1, 3, 3), b),
    "data must be float32, got float64": lambda d, w, b: (d.astype(np.float64), w, b),
    "weight must be float32, got >f4": lambda d, w, b: (d, w.astype(">f4"), b),
    "data must be contiguous; make a contiguous copy": lambda d, w, b: (np.asfortranarray(d), w, b),
    "data must start at a multiple of 16 bytes, got one 8 bytes past it": lambda d, w, b: (SHIFTED, w, b),
}


@parametrize("message", WRONG_CALLS)
def test_wrong_tensors_are_refused(message, either):
    with raises(ArgumentError, match=message) as error:
        either(*WRONG_CALLS[message](*tensors_of(either)))
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, TypeError)


WRONG_OUTPUTS = {
    r"out must have shape \(2, 12, 5, 11\), got \(2, 12, 5, 12\)": np.empty((2, 12, 5, 12), np.float32),
    "out must be float32, got float64": np.empty(SHAPE.out_shape),
    "out must be writeable, got a read-only array": np.frombuffer(bytes(5280), "f4").reshape(SHAPE.out_shape),
    "out must be a NumPy array like data, got tvm": tvm.runtime.empty(SHAPE.out_shape, "float32"),
}


@parametrize("message", WRONG_OUTPUTS)
def test_wrong_outputs_are_refused(message, either):
    with raises(ArgumentError, match=message):
        either(*tensors_of(either), out=WRONG_OUTPUTS[message])


@parametrize("index", [0, 1, 2])
def test_out_must_not_overlap_an_input(kernel, index):
    tensors = tensors_of(kernel)
    name, array = ("data", "weight", "bias")[index], tensors[index]
    begin, end = 2048, 2048 + int(np.prod(SHAPE.out_shape))
    memory = aligned((end + 2048,), np.float32)
    out = memory[begin:end].reshape(SHAPE.out_shape)
    apart = begin - array.size, end
    for first in (*apart, apart[0] + 4, begin, end - 4):
        tensors[index] = memory[first : first + array.size].reshape(array.shape)
        tensors[index][...] = array
        if first in apart:
            assert_array_equal(kernel(*tensors, out=out), expected_of(kernel))
        else:
            with raises(ArgumentError, match=f"out must not overlap {name} in memory"):
                kernel(*tensors, out=out)


def test_refused_call_writes_nothing(kernel):
    out = np.full(SHAPE.out_shape, 7, np.float32)
    data, weight, _ = tensors_of(kernel)
    with raises(ArgumentError):
        kernel(data, weight, np.zeros(13, np.float32), out=out)
    assert (out == 7).all()


def test_threads_may_share_a_kernel(either):
    with ThreadPoolExecutor(4) as pool:
        for seed, got in enumerate(pool.map(lambda seed: either(*tensors_of(either, seed)), range(40))):
            assert_array_equal(got, expected_of(either, seed))


def test_torch_tensors_on_the_cpu(kernel):
    data, weight, bias = (torch.from_numpy(array) for array in tensors_of(kernel))
    for shape in (SHAPE.weight_shape, (12, 1, 3, 3)):
        got = kernel(data, weight.reshape(shape), bias)
        assert isinstance(got, torch.Tensor)
        assert_array_equal(got.numpy(), expected_of(kernel))


@parametrize("end", ["bfloat16_nhwc", "m2_bfloat16_nhwc_dgrad", "nhwc_wgrad", "m2"])
def test_launcher_compares_sizes_and_strides(end):
    kernel = dwtir.build(f"2x6x5x4_k3x2_p1_{end}", target="cpu")
    dtype, launch = getattr(torch, kernel.shape.dtype), kernel.launcher()
    tensors = [torch.empty_strided(*sizes, dtype=dtype).zero_() for sizes in entry.in_torch(kernel.shape).values()]
    launch(*tensors)
    for place, tensor in enumerate(tensors):
        spread = torch.stack([tensor, tensor], dim=-1)[..., 0]
        for wrong in (tensor[:-1], spread, tensor.to(torch.float16), tensor.to("meta")):
            with raises((TypeError, ValueError, RuntimeError)):
                launch(*exchanged(tensors, place, wrong))


@devices
def test_wrong_torch_tensors_are_refused(device):
    kernel = dwtir.build(SHAPE, epilogue=EPILOGUE, target=device)
    tensors = data, weight, bias = [torch.from_numpy(array).to(device) for array in tensors_of(kernel)]
    away = "cpu" if device == "cuda" else "meta"
    size = np.prod(SHAPE.out_shape)
    memory = torch.empty(4096, device=device)
    begin, behind = (memory[first : first + size].view(SHAPE.out_shape) for first in (0, 64))
    with_gradient = weight.clone().requires_grad_()
    for place, wrong, message, out in (
        (0, data.to(away), f"data must be on {device}, got {away}", None),
        (1, weight.to(away), f"weight must be on {device}, got {away}", None),
        (2, bias.half(), "bias must be float32, got torch.float16", None),
        (0, data.transpose(2, 3).contiguous().transpose(2, 3), "data must be contig", None),
        (0, memory[1:][: data.numel()].view(data.shape), "data must start at a multiple of 16 bytes, got one 4", None),
        (1, with_gradient, "weight requires a gradient", None),
        (0, data.to_sparse(), "data must be a dense tensor", None),
        (1, weight.cpu().numpy(), "weight must be a torch.Tensor like data, got numpy", None),
        (0, memory[: data.numel()].view(data.shape), "out must not overlap data", begin),
        # Too small, and out begins where it ends: by the kernel's sizes the two would overlap.
        (0, memory[:64], r"data must have shape .*, got \(64,\)", behind),
    ):
        with raises(ArgumentError, match=message):
            kernel(*exchanged(tensors, place, wrong), out=out)
    with torch.no_grad():
        kernel(data, with_gradient, bias)
