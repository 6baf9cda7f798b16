"""The ways a schedule runs, behind one interface.

``replay``
    a GPU schedule without its thread bindings, compiled by LLVM;
``cpu``
    `dwtir.build` for the processor;
``opencl``
    `dwtir.build` for OpenCL, which is PoCL on most machines: work-groups and barriers;
``cuda``
    `dwtir.build` for the GPU that is present, called with torch tensors.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import numpy as np
import tvm

import dwtir
from dwtir import STRATEGIES, Epilogue, Shape, Strategy, Target
from dwtir.arguments import ALIGNMENT, Signature
from dwtir.build import schedule_for
from dwtir.reference import numpy_dtype
from dwtir.replay import replay_on_cpu
from dwtir.target import resolve
from marks import needs_gpu, parametrize
from strategies import Array, integer_tensors, oracle

Run: TypeAlias = Callable[[Sequence["Guarded"]], None]
"""Calls a kernel with its inputs and, last, its output."""

_GUARD = 512  # bytes before and after a tensor
_OUTPUT_GUARD, _INPUT_GUARD = 0xA5, 0xFF  # 0xFF is NaN in all dtypes: reading it shows


class Guarded:
    """A tensor with memory around it that nobody may write, and nobody may use.

    Its address is a multiple of `ALIGNMENT` and of no larger power of two, for that is all a kernel may count on.
    """

    def __init__(self, array, guard):
        size = array.nbytes
        memory = np.full(size + 2 * _GUARD + 64, guard, np.uint8)
        skip = (ALIGNMENT - memory.ctypes.data) % 64
        self.memory = memory[skip : skip + size + 2 * _GUARD]
        self.guard = guard
        self.place = slice(_GUARD, _GUARD + size)
        self.array: Array = self.memory[self.place].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        assert self.array.ctypes.data % 64 == ALIGNMENT

    def check_surroundings(self, name):
        around = np.delete(self.memory, np.r_[self.place])
        assert (around == self.guard).all(), f"memory around {name} was written"


@dataclass(frozen=True)
class Backend:
    """One way to run a schedule: which target it is made for, and what makes a `Run` of it."""

    name: str
    target: Callable[[], Target]
    compile: Callable[[Strategy, Shape, Epilogue], Run]

    @property
    def __name__(self):
        return self.name  # as pytest shows it

    @property
    def on_gpu(self):
        return self.name != "cpu"

    def run(self, strategy, shape, epilogue, *inputs):
        """Compile once and run on each set of inputs; return the outputs as float64."""
        return run_guarded(self.compile(strategy, shape, epilogue), shape, inputs)

    def check(self, strategy, shape, steps=None):
        """Run on small integers, where every sum is exact."""
        shape, epilogue = Shape.of(shape), Epilogue.of(steps)
        tensors = integer_tensors(shape, epilogue, 0)
        (got,) = self.run(strategy, shape, epilogue, tensors)
        np.testing.assert_array_equal(got, oracle(shape, epilogue, tensors), err_msg=str(strategy))


def run_guarded(run, shape, inputs):
    outputs = []
    for tensors in inputs:
        unwritten = np.full(shape.result_shape, np.nan, np.float32).astype(numpy_dtype(shape.dtype))
        guarded = {name: Guarded(array, _INPUT_GUARD) for name, array in tensors.items()}
        guarded["out"] = Guarded(unwritten, _OUTPUT_GUARD)
        run(list(guarded.values()))
        for name, tensor in guarded.items():
            tensor.check_surroundings(name)
            if name != "out":
                assert tensor.array.tobytes() == tensors[name].tobytes(), f"{name} was written"
        outputs.append(guarded["out"].array.astype(np.float64))
    return outputs


def llvm(mod, shape, epilogue):
    """Compile a module for this processor, without optimisation: it runs once or twice."""
    host = resolve("cpu")
    config = {"kind": "llvm", "mcpu": host.arch, "mattr": list(host.features), "opt-level": 0}
    # One takes the square of the length of a straight line: 45 s for 480 products. The other lets a buffer lie over one
    # that warps read before a barrier, which loops over warps do not know.
    with tvm.transform.PassContext(disabled_pass=["tirx.CommonSubexprElim", "tirx.StorageRewrite"]):
        main = tvm.compile(mod, target=tvm.target.Target(config, host=config)).mod["main"]
    signature = Signature(shape, epilogue, "cpu")

    def run(tensors):
        *inputs, out = (tensor.array for tensor in tensors)
        main(*signature.bind(tuple(inputs), out).arguments)

    return run


def replay(strategy, sch, shape, epilogue):
    return llvm(replay_on_cpu(sch, strategy.define(shape, epilogue)), shape, epilogue)


def _replay(strategy, shape, epilogue):
    strategy.check_use(shape, H200)
    return replay(strategy, schedule_for(shape, epilogue, strategy), shape, epilogue)


def _build(target):
    def compile_kernel(strategy, shape, epilogue):
        kernel = dwtir.build(shape, strategy, epilogue=epilogue, target=target)

        def run(tensors):
            *inputs, out = (tensor.array for tensor in tensors)
            assert kernel(*inputs, out=out) is out

        return run

    return compile_kernel


def _cuda(strategy, shape, epilogue):
    import torch

    kernel = dwtir.build(shape, strategy, epilogue=epilogue, target="cuda")

    def run(tensors):
        memories = [torch.empty(tensor.memory.size + ALIGNMENT, dtype=torch.uint8, device="cuda") for tensor in tensors]
        moved = []
        for tensor, memory in zip(tensors, memories, strict=True):
            # torch aligns to 512 bytes.
            memory[ALIGNMENT:].copy_(torch.from_numpy(tensor.memory))
            inside = memory[ALIGNMENT:][tensor.place].view(getattr(torch, shape.dtype))
            moved.append(inside.view(tensor.array.shape))
        assert kernel(*moved[:-1], out=moved[-1]) is moved[-1]
        for tensor, memory in zip(tensors, memories, strict=True):
            tensor.memory[...] = memory[ALIGNMENT:].cpu().numpy()

    return run


H200 = resolve("nvidia-h200")
REPLAY = Backend("replay", lambda: H200, _replay)
CPU = Backend("cpu", lambda: resolve("cpu"), _build("cpu"))
OPENCL = Backend("opencl", lambda: resolve("opencl"), _build("opencl"))
CUDA = Backend("cuda", lambda: resolve("cuda"), _cuda)


def parameters(backend, *others):
    return needs_gpu(backend, *others) if backend is CUDA else (backend, *others)


replay_and_cuda = parametrize("backend", [REPLAY, needs_gpu(CUDA)])


def on_h200(shape, schedule="manual", **others):
    """Build a kernel for an H200, which need not be there; a test fails whose kernel spills registers."""
    kernel = dwtir.build(shape, schedule, target=H200, **others)
    assert kernel.resources().spill_bytes == 0
    return kernel


def kernel_names(source):
    return set(re.findall(r"__global__ void.* (\w+)\(", source))


def cells(turn):
    """List backend, strategy, operation, layout and dtype for the cases of a test.

    Every strategy has each of them on a GPU; else, where both can run it, replay and OpenCL take turns; `turn` says
    which begins. So two tests with turns 0 and 1 have every case on both.
    """
    found = []
    for strategy in STRATEGIES.values():
        hosts = [CPU] if not strategy.on_gpu else [REPLAY, OPENCL][: 1 if strategy.needs_mma else 2]
        cases = product(strategy.operations, strategy.layouts, strategy.dtypes)
        for number, case in enumerate(cases, turn):
            for backend in (hosts[number % len(hosts)], *([CUDA] if strategy.on_gpu else [])):
                found.append(parameters(backend, strategy, *case))
    return found
