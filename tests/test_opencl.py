"""Generated OpenCL on a real device, PoCL on most machines: nothing is mocked."""

import re

import numpy as np
from tvm import s_tir
from tvm.script import tirx as T

from dwtir import Epilogue, Shape, compute, opencl
from dwtir.errors import ArgumentError, CompileError, InvalidScheduleError, ToolchainError
from dwtir.opencl import OpenCLKernel, compile_opencl
from dwtir.opencl_source import Launch, Lowered
from dwtir.reference import numpy_dtype
from marks import halves, parametrize, raises
from processes import python


def on_threads(func, threads=64, lanes=1):
    sch = s_tir.Schedule(func)
    bx, tx, lane = sch.split(sch.get_loops(sch.get_sblock("step"))[0], [None, threads, lanes])
    sch.bind(bx, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    if lanes > 1:
        sch.vectorize(lane)
    return sch


def over(count, source, target, value):

    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((count,), source), out: T.Buffer((count,), target)) -> None:
        for i in T.serial(count):
            with T.sblock("step"):
                vi = T.axis.spatial(count, i)
                out[vi] = value(vi, a[vi])

    return main


def copy_as(source, target, count, lanes):
    return on_threads(over(count, source, target, lambda i, x: T.cast(x, target)), lanes=lanes)


def every_value(dtype):
    return np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype))


all_lanes = parametrize("lanes", [1, 2, 4, 8])


@all_lanes
@halves
def test_16_bits_widen_exactly(dtype, lanes):
    every = every_value(dtype)
    out = np.empty(every.shape, np.float32)
    kernel = compile_opencl(copy_as(dtype, "float32", every.size, lanes).mod)
    kernel(every, out)
    np.testing.assert_array_equal(out, every.astype(np.float32))
    assert lanes == 1 or f"vload{lanes}(0, a_ptr" in kernel.source


@all_lanes
@halves
def test_casts_round_to_nearest_even(dtype, lanes):
    every = every_value(dtype)
    infinity = np.float32(np.inf).astype(every.dtype).view(np.uint16)
    finite = np.unique(every[(every.view(np.uint16) & 0x7FFF) < infinity].astype(np.float64))
    ties = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(way)) for way in (np.inf, -np.inf)]
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 65519, 65520, 1e-45], np.float32)
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    values = np.concatenate([ties, *beside, special, nans])
    values = np.resize(values, -(-values.size // 512) * 512)
    out = np.empty(values.shape, every.dtype)
    kernel = compile_opencl(copy_as("float32", dtype, values.size, lanes).mod)
    kernel(values, out)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(every.dtype)
    number = ~np.isnan(values)
    assert np.array_equal(out[number].view(np.uint16), expected[number].view(np.uint16))
    assert np.isnan(out[~number].astype(np.float32)).all()
    assert lanes == 1 or f"vstore{lanes}(" in kernel.source


def test_16_bit_selections_are_unchanged():
    def select(i, x):
        return T.Select(i % 2 == 0, x, T.cast(1.005859375, "bfloat16"))

    a = np.arange(64).astype(numpy_dtype("bfloat16"))
    out = np.zeros_like(a)
    compile_opencl(on_threads(over(64, "bfloat16", "bfloat16", select), 16).mod)(a, out)
    rounded = np.float32(1.005859375).astype(a.dtype)
    assert np.array_equal(out, np.where(np.arange(64) % 2 == 0, a, rounded))


def test_arithmetic_in_16_bits_is_refused():
    double = over(64, "float16", "float16", lambda i, x: x + x)
    with raises(InvalidScheduleError, match="computes in 16 bits, cast to float32 first"):
        compile_opencl(on_threads(double).mod)


def three_operands():
    """Names whose order, sorted, is neither that of the parameters nor its reverse."""

    @T.prim_func(s_tir=True)
    def main(
        zeta: T.Buffer((64,), "float32"),
        alpha: T.Buffer((64,), "float32"),
        mid: T.Buffer((64,), "float32"),
        beta: T.Buffer((64,), "float32"),
    ) -> None:
        for i in T.serial(48):
            with T.sblock("step"):
                vi = T.axis.spatial(48, i)
                beta[vi] = zeta[vi] + alpha[vi] * T.float32(10) + mid[vi] * T.float32(100)

    return compile_opencl(on_threads(main, 16).mod)


def test_arrays_are_taken_in_order():
    kernel = three_operands()
    ones = np.ones(64, np.float32)
    out = np.full(64, -1, np.float32)
    kernel(ones, 2 * ones, 3 * ones, out)
    assert (out[:48] == 321).all()
    assert (out[48:] == -1).all()  # Not written by the kernel, so not touched.


def test_wrong_arrays_are_refused():
    kernel = three_operands()
    good = np.ones(64, np.float32)
    frozen = good.copy()
    frozen.flags.writeable = False
    for arrays, message in (
        ((good, good, good), "takes 4 arrays .*, got 3"),
        ((good, good, good.astype(np.float64), good), r"mid must be float32\[64\], got float64\[64\]"),
        ((good, good[1:], good, good), r"alpha must be float32\[64\], got float32\[63\]"),
        ((np.ones(128, np.float32)[::2], good, good, good), "zeta must be C-contiguous"),
        ((good, good, good, frozen), "beta must be writeable"),
    ):
        with raises(ArgumentError, match=message):
            kernel(*arrays)


def two_steps(scope):
    """Copy by way of a buffer, which a kernel of its own fills if it is global."""
    sch = copy_as("float32", "float32", 4096, 1)
    block = sch.get_sblock("step")
    first = sch.cache_read(block, 0, scope)
    if scope == "global":
        sch.bind(sch.get_loops(first)[0], "blockIdx.x")
    else:
        sch.compute_at(first, sch.get_loops(block)[0])
        sch.bind(sch.get_loops(first)[-1], "threadIdx.x")
    return sch


@parametrize(
    ("schedule", "message"),
    [
        (lambda: two_steps("global"), "a_global.*no parameters: an intermediate buffer"),
        (lambda: two_steps("shared.dyn"), "a_shared.* is 'shared.dyn', memory can be"),
        (lambda: copy_as("float32", "float32", 4096, 32), "has 32 lanes, vectors can have"),
        (lambda: s_tir.Schedule(compute.depthwise_conv2d(Shape.parse("1x2x5x5_k3"), Epilogue())), "no kernel: bind"),
    ],
    ids=["memory between kernels", "shared.dyn", "32 lanes", "unbound"],
)
def test_what_opencl_cannot_express_is_named(schedule, message):
    mod = schedule().mod
    with raises(InvalidScheduleError, match=message):
        compile_opencl(mod)


def test_limits_are_checked_first():
    mod = copy_as("float32", "float32", 4096, 1).mod
    with raises(InvalidScheduleError, match=r"block \(64, 1, 1\) has more than 32 threads"):
        compile_opencl(mod, max_threads=32)
    device = opencl.find_device()
    most, local = device.max_work_group_size, device.local_mem_size
    for threads, shared, message in (
        (2 * most, 0, f"does not fit .*at most {most} work-items"),
        (1, local + 1, f"{local + 1} bytes of local memory"),
    ):
        launch = Launch("main_kernel", (1, 1, 1), (1, threads, 1), shared, [])
        with raises(InvalidScheduleError, match=message):
            OpenCLKernel(Lowered("", [launch], []))


def test_errors_show_the_build_log():
    source = "__kernel void main_kernel(__global float* a) { a[0] = undeclared_thing; }"
    launch = Launch("main_kernel", (1, 1, 1), (1, 1, 1), 0, [0])
    with raises(CompileError, match="undeclared_thing") as error:
        OpenCLKernel(Lowered(source, [launch], [("a", (1,), "float32")]))
    assert "use of undeclared identifier" in str(error.value)
    assert source in str(error.value)


def test_missing_pyopencl_has_a_remedy():
    message = python(
        "import sys; sys.modules['pyopencl'] = None\n"
        "from dwtir.opencl import available, compile_opencl\n"
        "from dwtir.errors import ToolchainError\n"
        "import tvm\n"
        "try: compile_opencl(tvm.IRModule())\n"
        "except ToolchainError as error: assert str(error) == available(); print(error)"
    )
    assert message.startswith("PyOpenCL is missing")
    assert message.endswith("pip install 'dwtir[opencl]'")


def test_missing_platform_has_a_remedy():
    message = python(
        "from dwtir.opencl import available; print(available())",
        OCL_ICD_FILENAMES="/nowhere/driver.so",
        OCL_ICD_VENDORS="/nowhere",
    )
    assert message.startswith("no OpenCL platform was found")
    assert message.endswith("pip install 'dwtir[opencl]'")


def test_device_is_chosen_by_name(monkeypatch):
    name = opencl.find_device().name.strip()
    monkeypatch.setenv("DWTIR_OPENCL_DEVICE", name.upper())
    assert opencl.find_device().name.strip() == name
    monkeypatch.setenv("DWTIR_OPENCL_DEVICE", "no such device")
    with raises(ToolchainError, match=f"'no such device' matches .*{re.escape(name)}"):
        opencl.find_device()
    assert "matches none of" in str(opencl.available())
