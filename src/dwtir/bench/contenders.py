"""What computes a layer: our kernel, and PyTorch in each layout by each of its ways."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..build import build
from ..epilogue import Epilogue
from ..reference import numpy_dtype
from ..shape import DepthwiseConv2dShape
from .problem import Problem, import_torch

__all__ = ["Contender", "ours", "peers"]


@dataclass(frozen=True)
class Contender:
    """One way to compute a problem.

    Parameters
    ----------
    name : str
        Such as ``dwtir`` or ``torch NHWC cudnn``.
    layout : str
        Of its tensors.
    call : callable
        Computes one set of the problem, on torch's current stream.
    result : callable
        Returns the output for the first set as an array of the problem's layout.
    """

    name: str
    layout: str
    call: Callable[[int], object]
    result: Callable[[], np.ndarray[Any, Any]]


def ours(problem: Problem, schedule: str) -> Contender:
    """Build our kernel.

    Parameters
    ----------
    schedule : str
        As for `dwtir.build`.
    """
    shape = problem.shape
    kernel = build(shape, schedule, epilogue=problem.epilogue, target=problem.target)
    if problem.target.kind == "cpu":
        sets = [[array.copy() for array in problem.arrays] for _ in range(problem.sets)]
        outs = [np.empty(shape.out_shape, numpy_dtype(shape.dtype)) for _ in sets]
        outs[0].view(f"uint{8 * shape.itemsize}").fill(2 ** (8 * shape.itemsize) - 1)
        return Contender(
            "dwtir",
            shape.layout,
            lambda number: kernel(*sets[number], out=outs[number]),
            lambda: outs[0],
        )
    torch = import_torch("a benchmark on a GPU")
    tensors = [_memory(found, shape) for found in problem.tensors(shape.layout)]
    dtype = getattr(torch, shape.dtype)
    results = [
        torch.full(shape.out_shape, float("nan"), dtype=dtype, device="cuda") for _ in tensors
    ]
    return Contender(
        "dwtir",
        shape.layout,
        lambda number: kernel(*tensors[number], out=results[number]),
        lambda: np.asarray(results[0].float().cpu().numpy()),
    )


def _memory(tensors: list[Any], shape: DepthwiseConv2dShape) -> list[Any]:
    """Turn torch's tensors into ours, which are the same memory."""
    if shape.layout == "NCHW":
        return tensors
    data, weight, *operands = tensors
    # (C*M, 1, kh, kw) with channels last is (kh, kw, C*M) in memory only if made so.
    weight = weight.reshape(shape.out_channels, *shape.kernel).permute(1, 2, 0).contiguous()
    return [
        data.permute(0, 2, 3, 1),
        weight.reshape(shape.weight_shape),
        *(t.permute(0, 2, 3, 1) if t.ndim == 4 else t for t in operands),
    ]


def peers(problem: Problem) -> list[Contender]:
    """Return PyTorch's ways: both layouts, on a GPU native and cuDNN, compiled where it fuses.

    Raises
    ------
    ToolchainError
        If torch is not installed.
    """
    torch = import_torch("a benchmark against PyTorch")
    found = []
    for layout in ("NCHW", "NHWC"):
        if problem.target.kind == "cpu":
            found.append(_torch(torch, problem, layout, f"torch {layout}", cudnn=False))
            continue
        for cudnn in (False, True):
            name = f"torch {layout} {'cudnn' if cudnn else 'native'}"
            found.append(_torch(torch, problem, layout, name, cudnn=cudnn))
        if problem.epilogue.steps:
            name = f"torch.compile {layout}"
            found.append(_torch(torch, problem, layout, name, cudnn=True, compiled=True))
    return found


def _torch(
    torch: Any, problem: Problem, layout: str, name: str, *, cudnn: bool, compiled: bool = False
) -> Contender:
    shape = problem.shape
    sets = problem.tensors(layout)
    function = _function(torch, shape, problem.epilogue)
    if compiled:
        function = torch.compile(function, fullgraph=True)
    # Each set keeps its output, so that its memory is its own as ours is.
    outs: list[Any] = [None] * len(sets)

    def call(number: int) -> None:
        with _flags(torch, cudnn), torch.inference_mode():
            outs[number] = function(*sets[number])

    def result() -> np.ndarray[Any, Any]:
        array = np.asarray(outs[0].float().cpu().numpy())
        return array.transpose(0, 2, 3, 1) if shape.layout == "NHWC" else array

    return Contender(name, layout, call, result)


@contextlib.contextmanager
def _flags(torch: Any, cudnn: bool) -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=cudnn, benchmark=True, allow_tf32=False):
        yield


def _function(torch: Any, shape: DepthwiseConv2dShape, epilogue: Epilogue) -> Callable[..., Any]:
    """Write the layer as a PyTorch user would."""
    functional = torch.nn.functional
    top, left, bottom, right = shape.padding
    symmetric = (top, left) == (bottom, right)
    names = list(epilogue.operands(shape))
    activations = {
        "relu": functional.relu,
        "relu6": functional.relu6,
        "hardswish": functional.hardswish,
        "silu": functional.silu,
        "gelu": functional.gelu,
    }

    def compute(data: Any, weight: Any, *operands: Any) -> Any:
        given = dict(zip(names, operands, strict=True))
        if not symmetric:
            data = functional.pad(data, (left, right, top, bottom))
        # A bias that comes first is the convolution's own.
        own = given["bias"] if epilogue.steps[:1] == ("bias",) else None
        out = functional.conv2d(
            data,
            weight,
            own,
            shape.stride,
            (top, left) if symmetric else 0,
            shape.dilation,
            shape.in_channels,
        )
        for step in epilogue.steps[1:] if own is not None else epilogue.steps:
            if step == "bias":
                out = out + given["bias"].view(-1, 1, 1)
            elif step == "scale_shift":
                out = out * given["scale"].view(-1, 1, 1) + given["shift"].view(-1, 1, 1)
            elif step == "residual":
                out = out + given["residual"]
            else:
                out = activations[step](out)
        return out

    return compute
