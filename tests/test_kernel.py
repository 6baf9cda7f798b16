"""What a kernel says of itself, and what `dwtir.build` makes of a schedule's name."""

import json

import numpy as np
import pytest
from tvm.ir import load_json

import dwtir
from dwtir import ArgumentError, InvalidScheduleError, Resources, Shape, ToolchainError
from dwtir.kernel import KernelInfo
from dwtir.schedules import Cpu, RegisterWindow, SharedTile
from dwtir.target import resolve
from kernels import EPILOGUE, SHAPE, check, tensors_of


def test_a_kernel_of_the_cpu_can_be_looked_at(kernel):
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


def test_a_kernel_of_opencl_can_be_looked_at(opencl_kernel):
    resources = opencl_kernel.resources()
    assert resources.grid is not None
    assert resources.threads > 1
    assert "__kernel" in opencl_kernel.source()
    assert 'thread="threadIdx.x"' in opencl_kernel.script()


def test_a_kernel_for_an_absent_gpu_can_be_looked_at_but_not_run(foreign_kernel, tmp_path):
    resources = foreign_kernel.resources()
    assert resources.registers > 0
    assert resources.spill_bytes == 0
    assert "__global__" in foreign_kernel.source()
    with pytest.raises(ArgumentError, match="data must be on cuda, got cpu"):
        foreign_kernel(*tensors_of(foreign_kernel))
    for use in (foreign_kernel.time, lambda: foreign_kernel.export(tmp_path / "kernel.so")):
        with pytest.raises(ToolchainError, match=r"sm_87.*not in this machine.*dwtir doctor"):
            use()
    assert not list(tmp_path.iterdir())


def test_the_cpu_is_timed(kernel):
    timing = kernel.time(repeats=5, min_repeat_ms=1)
    assert 0 < timing.p20 <= timing.median <= timing.p80 < np.inf
    assert timing.repeats == 5


def test_opencl_is_neither_timed_nor_exported(opencl_kernel, tmp_path):
    with pytest.raises(ToolchainError, match="opencl are not timed"):
        opencl_kernel.time()
    with pytest.raises(ToolchainError, match="opencl cannot be exported"):
        opencl_kernel.export(tmp_path / "kernel.so")


@pytest.mark.parametrize("name", ["kernel", "opencl_kernel", "foreign_kernel"])
def test_the_description_survives_json(name, request):
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
    (SharedTile(padding="none"), "opencl", "padding must be 'staged' or 'inline', got none"),
]


@pytest.mark.parametrize(("schedule", "target", "message"), UNFIT)
def test_schedules_that_do_not_fit(schedule, target, message):
    with pytest.raises(InvalidScheduleError, match=message):
        dwtir.build(SHAPE, schedule, target=target)


WRONG = [
    ({"shape": "1x2x3x4"}, dwtir.InvalidShapeError),
    ({"epilogue": "tanh"}, dwtir.InvalidEpilogueError),
    ({"target": "tpu"}, dwtir.InvalidTargetError),
    ({"on_miss": "ignore"}, InvalidScheduleError),
]


@pytest.mark.parametrize(("arguments", "error"), WRONG)
def test_build_refuses_wrong_arguments(arguments, error):
    with pytest.raises(error):
        dwtir.build(**({"shape": "1x4x9x9_k3", "target": "cpu"} | arguments))
