"""A layer's tensors on a device, on which candidates are checked and timed."""

import contextlib
from collections.abc import Iterator
from math import prod

import numpy as np

from .. import schedules, spotcheck
from ..arguments import on_gpu
from ..build import compile_kernel
from ..errors import CompileError, DeviceError, DwtirError
from ..kernel import Kernel
from ..reference import Array, numpy_dtype
from ..target import Target
from ..timing import L2_SIZES, GraphTimer, rotation
from .outcome import Task

_RESIDENT_SETS = 3 * L2_SIZES
"""Sets of tensors that are timed if a third of the L2 cache holds one."""


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Take every error but our own for the end of the device."""
    try:
        yield
    except DwtirError:
        raise
    except Exception as error:
        raise DeviceError(f"{type(error).__name__}: {error}") from error


class WrongResultError(CompileError):
    """A candidate computed something else than the reference."""


class Testbed:
    """Checks candidates of one layer, and times them on the CPU, with data in its caches.

    The tensors are small integers, so that every right kernel gives the same bits; none is the beginning of another,
    for sums of squares are too large for halves. A part of the manual kernel's output is compared with the float64
    reference, for about a second; then every candidate with all of it.
    """

    def __init__(self, task: Task, target: Target) -> None:
        self.task, self.target = task, target
        shape = task.shape
        values = np.random.default_rng(0).integers(-2, 3, 1_000_003)
        values = values.astype(numpy_dtype(shape.dtype))
        extents = (shape.input_shapes | task.epilogue.operands(shape)).values()
        parts = (np.roll(values, number * 333_331) for number in range(len(extents)))
        self._inputs = [np.resize(part, size) for part, size in zip(parts, extents, strict=True)]
        self._prepare()
        manual = schedules.choose(shape, target, task.epilogue)
        self._expected = self._output(compile_kernel(shape, task.epilogue, target, manual))
        if reason := spotcheck.complaint(manual, shape, task.epilogue, self._inputs, self._expected):
            raise WrongResultError(reason)

    def _prepare(self) -> None:
        """Put the inputs where kernels take them from."""

    def _output(self, kernel: Kernel) -> Array:
        return np.asarray(kernel(*self._inputs))

    def _not_numbers(self) -> Array:
        """Make an output with all bits set, which is a NaN."""
        shape, bits = self.task.shape, f"uint{8 * self.task.shape.itemsize}"
        return np.full(shape.result_shape, np.iinfo(bits).max, bits).view(numpy_dtype(shape.dtype))

    def check(self, kernel: Kernel) -> None:
        """Compare a candidate's output with all that is expected, or raise a `WrongResultError`."""
        out = self._output(kernel)
        if np.array_equal(_bits(out), _bits(self._expected)):  # the fast way, and the usual one
            return
        if self.task.epilogue.steps:
            # Compilers contract products and sums differently.
            unit = 2.0 ** {"float32": -22, "float16": -9, "bfloat16": -6}[self.task.shape.dtype]
            found, right = out.astype(np.float32), self._expected.astype(np.float32)
            wrong = int((~(np.abs(found - right) <= unit * (1 + np.abs(right)))).sum())
        else:
            wrong = int((out != self._expected).sum())
        if wrong:
            raise WrongResultError(f"wrong result: {wrong} of {out.size} outputs differ")

    def times(self, kernel: Kernel, limit: float | None = None) -> tuple[float, ...]:
        """Measure the seconds of a call, several times, or if far above `limit`, the best so far, once."""
        return tuple(kernel.time(*self._inputs, repeats=1, min_repeat_ms=4).median for _ in range(5))


class CudaTestbed(Testbed):
    """Times candidates on a GPU cold: graphs of calls on tensors beyond the L2 cache.

    Where that holds a set, each second call is warm; times are the mean.
    """

    def _prepare(self) -> None:
        import tvm

        shape, gpu = self.task.shape, tvm.cuda(0)
        set_bytes = sum(a.nbytes for a in self._inputs) + shape.itemsize * prod(shape.result_shape)
        self._timer = GraphTimer()
        self._sets = [[*map(on_gpu, self._inputs)] for _ in range(rotation(set_bytes))]
        self._in_turn = 2 if len(self._sets) >= _RESIDENT_SETS else 1
        self._outs = [tvm.runtime.empty(shape.result_shape, shape.dtype, gpu) for _ in self._sets]
        self._nans = on_gpu(self._not_numbers())

    def _output(self, kernel: Kernel) -> Array:
        out = self._outs[0]
        out.copyfrom(self._nans)  # so that an output left out is seen
        kernel(*self._sets[0], out=out)
        array: Array = out.numpy()
        return array

    def times(self, kernel: Kernel, limit: float | None = None) -> tuple[float, ...]:
        def call(number: int) -> None:
            place = number // self._in_turn
            kernel(*self._sets[place], out=self._outs[place])

        return self._timer.seconds(call, self._in_turn * len(self._sets), limit=limit)


def open_testbed(task: Task, target: Target) -> Testbed:
    """Make the testbed of a device of this process: its first GPU, or its CPU."""
    return (CudaTestbed if target.kind == "cuda" else Testbed)(task, target)


def _bits(array: Array) -> Array:
    return array.view(f"uint{8 * array.itemsize}")
