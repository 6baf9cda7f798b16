"""Building a tuning record again, and running it against the reference."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from . import cuda, reference
from .build import build
from .errors import CompileError, DwtirError, RecordError
from .kernel import Kernel
from .records import Record
from .shape import DepthwiseConv2dShape
from .target import Target, resolve

__all__ = ["verify_record"]

_MAX_PRODUCTS = 1 << 26
"""Multiply-adds that the reference does in about a second."""


def verify_record(record: Record) -> str:
    """Build a record's kernel; where its device is present, run it against the reference.

    A shape that takes the reference long is run with fewer images and
    channels, if the strategy takes the smaller shape.

    Returns
    -------
    str
        What was done.

    Raises
    ------
    DwtirError
        If it cannot be built, or gives wrong results.
    """
    try:
        kernel = build(
            record.shape, record.strategy, epilogue=record.epilogue, target=record.target
        )
        if not _is_present(record.target):
            return f"built; {record.device} is not here to run it"
        shape = _small(record)
        if shape is None:
            return "built; too large to be run against the reference"
        if shape != record.shape:
            kernel = build(shape, record.strategy, epilogue=record.epilogue, target=record.target)
        _compare(kernel)
    except DwtirError:
        raise
    except Exception as error:  # what a compiler says to a schedule that it cannot take
        raise CompileError(
            f"{record.strategy} does not build for {record.shape}: {error}"
        ) from error
    return f"built and right on {shape}"


def _is_present(target: Target) -> bool:
    if target.kind == "cpu":
        return resolve("cpu").name == target.name
    return target.kind == "cuda" and cuda.device_count() > 0 and resolve().name == target.name


def _small(record: Record) -> DepthwiseConv2dShape | None:
    """Find a shape that the reference can take: this one, or one of fewer images and channels."""
    channels = record.shape.in_channels
    for batch, count in (
        (record.shape.batch, channels),
        (1, channels),
        *((1, n) for n in (64, 32, 16, 8, 4, 2, 1) if n < channels),
    ):
        shape = replace(record.shape, batch=batch, in_channels=count)
        if prod(shape.out_shape) * prod(shape.kernel) <= _MAX_PRODUCTS:
            try:
                record.strategy.check_use(shape, record.target)
            except DwtirError:
                continue
            return shape
    return None


def _compare(kernel: Kernel) -> None:
    random = np.random.default_rng(0)
    dtype = reference.numpy_dtype(kernel.shape.dtype)

    def tensor(extents: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return random.uniform(-1, 1, extents).astype(dtype)

    shapes = kernel.epilogue.operands(kernel.shape)
    first, second = map(tensor, kernel.shape.input_shapes.values())
    operands = {name: tensor(extents) for name, extents in shapes.items()}
    arguments: list[Any] = [first, second, *operands.values()]
    if kernel.target.kind == "cuda":
        import tvm

        arguments = [tvm.runtime.tensor(array, tvm.cuda(0)) for array in arguments]
        out = kernel(*arguments).numpy()
    else:
        out = np.asarray(kernel(*arguments))
    about = (kernel.shape, first, second, operands)
    expected = reference.depthwise_conv2d(*about, epilogue=kernel.epilogue)
    bound = reference.error_bound(*about, epilogue=kernel.epilogue)
    error = np.abs(out.astype(np.float64) - expected)
    if not (error <= bound).all():
        raise RecordError(
            f"{kernel.strategy} is wrong on {kernel.shape}: the error must be at most "
            f"{float(bound.max()):.1e}, got {float(np.nan_to_num(error, nan=np.inf).max()):.1e}"
        )
