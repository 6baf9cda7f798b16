"""Run scheduled TensorIR as OpenCL C, so that GPU schedules are proven without a GPU.

TVM's wheel generates OpenCL C but cannot launch it. PyOpenCL can: on a graphics
card, or else on the processor through PoCL, which runs real work-groups with local
memory and barriers.

    IRModule -> opencl_source: OpenCL C -> PyOpenCL
"""

import functools
import math
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from . import pocl
from .errors import ArgumentError, CompileError, InvalidScheduleError, ToolchainError
from .opencl_source import Lowered, lower
from .reference import Array
from .typed import IRModule

if TYPE_CHECKING:
    import pyopencl

_REMEDY = "install it with: pip install 'dwtir[opencl]'"


class OpenCLKernel:
    """A function compiled to OpenCL kernels, called with NumPy arrays.

    Built by :func:`compile_opencl`.

    Attributes
    ----------
    source : str
        The OpenCL C text.
    grid, block : tuple of int
        Work-groups of the first kernel, and work-items of one, in x, y and z.
    local_bytes : int
        Local (in CUDA: shared) memory of one of its work-groups.
    """

    def __init__(self, lowered: Lowered) -> None:
        import pyopencl as cl

        self.source = lowered.source
        self._params, self._launches = lowered.params, lowered.launches
        first = lowered.launches[0]
        self.grid, self.block, self.local_bytes = first.grid, first.block, first.local_bytes
        # Arguments are set on the kernel object, so calls must not interleave.
        self._lock = threading.Lock()
        device, self._context, self._queue = _open_device(_wanted_device())
        for launch in lowered.launches:
            _check_limits(device, launch.block, launch.local_bytes)
        # PoCL's optimiser takes up to 3 s a kernel, and saves milliseconds.
        options = ["-cl-opt-disable"] if device.type & cl.device_type.CPU else []
        try:
            program = cl.Program(self._context, self.source).build(options)
            self._kernels = [cl.Kernel(program, launch.name) for launch in lowered.launches]
        except cl.Error as error:
            raise CompileError(f"{_name(device)} rejected the kernel: {error}\n{self.source}") from error

    def __repr__(self) -> str:
        return f"OpenCLKernel(grid={self.grid}, block={self.block}, local_bytes={self.local_bytes})"

    def __call__(self, *arrays: Array) -> None:
        """Run once, synchronously, on a C-contiguous array for each parameter of the PrimFunc.

        The last one receives the output; what the kernel does not write keeps its value.
        """
        import pyopencl as cl

        self._check_arrays(arrays)
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        # As bytes, because the buffer protocol has no bfloat16.
        data = [array.reshape(-1).view(np.uint8) for array in arrays]
        try:
            with self._lock:
                buffers = [cl.Buffer(self._context, flags, hostbuf=bytes_) for bytes_ in data]
                for kernel, launch in zip(self._kernels, self._launches, strict=True):
                    kernel.set_args(*(buffers[i] for i in launch.order))
                    total = tuple(groups * items for groups, items in zip(launch.grid, launch.block, strict=True))
                    cl.enqueue_nd_range_kernel(self._queue, kernel, total, launch.block)
                cl.enqueue_copy(self._queue, data[-1], buffers[-1], is_blocking=True)
        except cl.Error as error:  # PoCL compiles for the work-group size here, not in build().
            raise CompileError(f"{self!r} failed to run: {error}\n{self.source}") from error

    def _check_arrays(self, arrays: tuple[Array, ...]) -> None:
        names = [name for name, _, _ in self._params]
        if len(arrays) != len(names):
            raise ArgumentError(f"takes {len(names)} arrays {names}, got {len(arrays)}")
        for array, (name, shape, dtype) in zip(arrays, self._params, strict=True):
            if array.shape != shape or str(array.dtype) != dtype:
                raise ArgumentError(f"{name} must be {dtype}{list(shape)}, got {array.dtype}{list(array.shape)}")
            if not array.flags.c_contiguous:
                raise ArgumentError(f"{name} must be C-contiguous, got strides {array.strides}")
        if not arrays[-1].flags.writeable:
            raise ArgumentError(f"{names[-1]} must be writeable, got a read-only array")


def compile_opencl(mod: IRModule, *, max_threads: int = 1024) -> OpenCLKernel:
    """Compile a scheduled function to OpenCL and load it on :func:`find_device`'s device.

    Its parameters are buffers of static shape, the output last; its loops are bound to blocks and
    threads. A schedule that exceeds `max_threads` or a limit of the device, or needs what OpenCL
    lacks, is an `InvalidScheduleError`; a `CompileError` holds the log.
    """
    find_device()  # Reports a missing package before a second of lowering.
    return OpenCLKernel(lower(mod, max_threads))


def _check_limits(device: "pyopencl.Device", block: tuple[int, int, int], local_bytes: int) -> None:
    most, sizes = device.max_work_group_size, tuple(device.max_work_item_sizes[:3])
    if math.prod(block) > most or any(n > size for n, size in zip(block, sizes, strict=True)):
        raise InvalidScheduleError(f"block {block} does not fit {_name(device)}: at most {most} work-items, {sizes}")
    if local_bytes > device.local_mem_size:
        raise InvalidScheduleError(
            f"a work-group needs {local_bytes} bytes of local memory, {_name(device)} has {device.local_mem_size}"
        )


def available() -> str | None:
    """Why OpenCL cannot be used here, or None if it can."""
    try:
        find_device()
    except ToolchainError as error:
        return str(error)
    return None


def find_device() -> "pyopencl.Device":
    """Find the OpenCL device that kernels run on: a GPU if there is one, else a CPU.

    The environment variable ``DWTIR_OPENCL_DEVICE`` picks another, by any part of
    the names of its platform and itself, in upper or lower case.
    """
    return _open_device(_wanted_device())[0]


def _wanted_device() -> str:
    return os.environ.get("DWTIR_OPENCL_DEVICE", "").lower()


def _name(device: "pyopencl.Device") -> str:
    return f"{device.platform.name.strip()}: {device.name.strip()}"


@functools.cache
def _open_device(wanted: str) -> "tuple[pyopencl.Device, pyopencl.Context, pyopencl.CommandQueue]":
    try:
        import pyopencl as cl
    except ImportError as error:
        raise ToolchainError(f"PyOpenCL is missing ({error}); {_REMEDY}") from error
    try:
        devices = [d for platform in cl.get_platforms() for d in platform.get_devices()]
    except cl.Error as error:
        raise ToolchainError(f"no OpenCL platform was found ({error}); {_REMEDY}") from error
    matching = [d for d in devices if wanted in _name(d).lower()]
    if not matching:
        raise ToolchainError(f"DWTIR_OPENCL_DEVICE={wanted!r} matches none of {[_name(d) for d in devices]}")
    device = min(matching, key=lambda d: 0 if d.type & cl.device_type.GPU else 1)
    if "PoCL 3.0" in device.platform.version and device.version.endswith("-generic"):
        try:
            pocl.name_cpu(device)
        except OSError as error:
            raise ToolchainError(
                f"PoCL 3.0 does not know this processor and could not be helped ({error}); "
                "install a newer PoCL or another OpenCL driver"
            ) from error
    context = cl.Context([device])
    return device, context, cl.CommandQueue(context)
