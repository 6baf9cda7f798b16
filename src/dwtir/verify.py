"""Building a tuning record again, or for a device, and running it against the reference."""

import numpy as np

from . import cuda, reference, schedules, spotcheck
from .arguments import on_gpu
from .build import build, compile_kernel
from .epilogue import NO_STEPS
from .errors import CompileError, DwtirError, RecordError
from .kernel import Kernel
from .records import Record
from .shape import Shape
from .target import Target, resolve


def verify_record(record: Record) -> str:
    """Build a record's kernel and, where its device is here, check its result; say what was done.

    Of a large result some images and channels are compared; see `spotcheck.error_ratio`.

    Raises
    ------
    DwtirError
        If it cannot be built, or gives wrong results.
    """
    try:
        kernel = build(record.shape, record.strategy, epilogue=record.epilogue, target=record.target)
        if not _is_present(record.target):
            return f"built; {record.device} is not here to run it"
        verify_kernel(kernel)
    except DwtirError:
        raise
    except Exception as error:  # what a compiler says to a schedule that it cannot take
        raise CompileError(f"{record.strategy} does not build for {record.shape}: {error}") from error
    return f"built and right on {record.shape}"


def verify_device(target: Target) -> None:
    """Build a small kernel for a device that is here, past the cache, and check its result.

    Raises
    ------
    DwtirError
        If it cannot be built, or gives wrong results.
    """
    shape = Shape.parse("1x8x9x9_k3")
    if target.kind == "opencl":
        kernel = build(shape, target=target)
    else:
        kernel = compile_kernel(shape, NO_STEPS, target, schedules.choose(shape, target))
    verify_kernel(kernel)


def _is_present(target: Target) -> bool:
    is_here = target.kind == "cpu" or (target.kind == "cuda" and cuda.device_count() > 0)
    return is_here and resolve(target.kind).name == target.name


def verify_kernel(kernel: Kernel) -> None:
    """Run a kernel on random inputs; a `RecordError` says how wrong the result is."""
    inputs = reference.random_inputs(kernel.shape, kernel.epilogue)
    out = np.full(kernel.shape.result_shape, np.nan, inputs[0].dtype)
    if kernel.target.kind == "cuda":
        out = kernel(*map(on_gpu, inputs), out=on_gpu(out)).numpy()
    else:
        kernel(*inputs, out=out)
    if reason := spotcheck.complaint(kernel.strategy, kernel.shape, kernel.epilogue, inputs, out):
        raise RecordError(reason)
