"""What computes a layer: our kernel, and PyTorch in each layout by each of its ways."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..build import build
from ..epilogue import Epilogue
from ..reference import Array, numpy_dtype
from ..shape import LAYOUTS, Shape
from .machine import keep_memory
from .problem import Problem, aligned, import_torch


@dataclass(frozen=True)
class Contender:
    """One way to compute a problem."""

    name: str
    """Such as ``dwtir`` or ``torch NHWC cudnn``."""
    call: Callable[[int], object]
    """Computes a set of the problem, on torch's current stream."""
    result: Callable[[], Array]
    """Returns the output for the first set, in the problem's layout."""


def ours(problem: Problem, schedule: str, *, name: str = "dwtir", on_miss: str = "warn") -> Contender:
    """Build our kernel; `schedule` and `on_miss` are as for `dwtir.build`."""
    shape = problem.shape
    kernel = build(shape, schedule, epilogue=problem.epilogue, target=problem.target, on_miss=on_miss)
    sets: list[list[Any]]
    outs: list[Any]
    if problem.target.kind == "cpu":
        sets = [list(map(aligned, problem.arrays)) for _ in range(problem.sets)]
        outs = [aligned(np.full(shape.result_shape, np.nan, numpy_dtype(shape.dtype))) for _ in sets]
    else:
        torch = import_torch()
        sets = [
            [_memory(name, tensor, shape) for name, tensor in zip(problem.names, found, strict=True)]
            for found in problem.tensors(shape.layout)
        ]
        dtype = getattr(torch, shape.dtype)
        outs = [torch.full(shape.result_shape, float("nan"), dtype=dtype, device="cuda") for _ in sets]

    def call(number: int) -> object:
        return kernel(*sets[number], out=outs[number])

    return Contender(name, call, lambda: _read(outs[0]))


def _read(out: Any) -> Array:
    return out if isinstance(out, np.ndarray) else np.asarray(out.float().cpu().numpy())


def _memory(name: str, tensor: Any, shape: Shape) -> Any:
    if shape.layout == "NCHW":
        return tensor
    if name == "weight":
        # (C*M, 1, kh, kw) with channels last is (kh, kw, C*M) in memory only if made so.
        return tensor.permute(2, 3, 0, 1).contiguous().reshape(shape.weight_shape)
    return tensor.permute(0, 2, 3, 1) if tensor.ndim == 4 else tensor


def peers(problem: Problem, layouts: Sequence[str] = LAYOUTS, *, compiled: bool = True) -> list[Contender]:
    """Return PyTorch's ways: by layout, on a GPU native and cuDNN, and for an epilogue compiled."""
    torch = import_torch("a benchmark against PyTorch")
    if problem.target.kind == "cpu":
        keep_memory()
        ways = [("torch {}", False, False)]
    else:
        ways = [("torch {} native", False, False), ("torch {} cudnn", True, False)]
        if compiled and problem.epilogue.steps:
            ways.append(("torch.compile {}", True, True))
            torch.compiler.reset()  # it refuses the same function of Python after eight shapes
    return [
        _torch(torch, problem, layout, name.format(layout), cudnn=cudnn, compiled=fused)
        for layout in layouts
        for name, cudnn, fused in ways
    ]


def _torch(torch: Any, problem: Problem, layout: str, name: str, *, cudnn: bool, compiled: bool) -> Contender:
    shape = problem.shape
    sets = problem.tensors(layout)
    if shape.operation == "forward":
        function = _function(torch, shape, problem.epilogue)
    else:
        function, sets = _gradient(torch, shape, layout, sets)
    if compiled:
        function = torch.compile(function, fullgraph=True)
    # Each set keeps its output, so that its memory is its own as ours is.
    outs: list[Any] = [None] * len(sets)

    def call(number: int) -> None:
        with convolutions(torch, cudnn=cudnn), torch.inference_mode():
            outs[number] = function(*sets[number])

    def result() -> Array:
        array = _read(outs[0])
        axes = (0, 2, 3, 1)
        if shape.operation == "grad_weight":
            array, axes = array.reshape(shape.in_channels, shape.channel_multiplier, *shape.kernel), (2, 3, 0, 1)
        return array.transpose(axes) if shape.layout == "NHWC" else array

    return Contender(name, call, result)


@contextlib.contextmanager
def convolutions(torch: Any, *, cudnn: bool) -> Iterator[None]:
    """Let PyTorch convolve by cuDNN at its best in full float32, or without it."""
    with torch.backends.cudnn.flags(enabled=cudnn, benchmark=True, allow_tf32=False):
        yield


def _function(torch: Any, shape: Shape, epilogue: Epilogue) -> Callable[..., Any]:
    functional = torch.nn.functional
    top, left, bottom, right = shape.padding
    symmetric = (top, left) == (bottom, right)
    names = list(epilogue.operands(shape))

    def compute(data: Any, weight: Any, *operands: Any) -> Any:
        given = dict(zip(names, operands, strict=True))
        if not symmetric:
            data = functional.pad(data, (left, right, top, bottom))
        # A bias that comes first is the convolution's own.
        own = given["bias"] if epilogue.steps[:1] == ("bias",) else None
        out = functional.conv2d(
            data, weight, own, shape.stride, (top, left) if symmetric else 0, shape.dilation, shape.in_channels
        )
        for step in epilogue.steps[1:] if own is not None else epilogue.steps:
            if step == "bias":
                out = out + given["bias"].view(-1, 1, 1)
            elif step == "scale_shift":
                out = out * given["scale"].view(-1, 1, 1) + given["shift"].view(-1, 1, 1)
            elif step == "residual":
                out = out + given["residual"]
            else:
                out = getattr(functional, step)(out)
        return out

    return compute


def _gradient(
    torch: Any, shape: Shape, layout: str, sets: list[list[Any]]
) -> tuple[Callable[..., Any], list[list[Any]]]:
    """Write a gradient by the operator that PyTorch's autograd calls, with the tensors to call it with.

    The sets, given and returned, are the inputs in torch's sense, in the order of
    ``shape.input_shapes``. Where torch's convolution does not have the padding, the weight's
    gradient is given padded data, as autograd keeps them; of the data's the padding is cut off.
    """
    pad = torch.nn.functional.pad
    form = torch.channels_last if layout == "NHWC" else torch.contiguous_format
    top, left, bottom, right = shape.padding
    symmetric = (top, left) == (bottom, right)
    of_data = shape.operation == "grad_data"

    def backward(grad_out: Any, data: Any, weight: Any) -> Any:
        geometry = shape.stride, (top, left) if symmetric else (0, 0), shape.dilation
        rest = False, (0, 0), shape.in_channels, (of_data, not of_data, False)
        grads = torch.ops.aten.convolution_backward(grad_out, data, weight, None, *geometry, *rest)
        return grads[0] if of_data else grads[1]

    def unread(*size: int) -> Any:
        """Stand for the tensor whose gradient is wanted: its size and memory format matter."""
        like = sets[0][0]
        return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=form)

    if of_data:
        rows, columns = shape.height, shape.width
        if not symmetric:
            rows, columns = rows + top + bottom, columns + left + right
        data = unread(shape.batch, shape.in_channels, rows, columns)

        def to_data(grad_out: Any, weight: Any) -> Any:
            grad = backward(grad_out, data, weight)
            return grad if symmetric else pad(grad, (-left, -right, -top, -bottom))

        return to_data, sets
    weight = unread(shape.out_channels, 1, *shape.kernel)
    if not symmetric:
        around = (left, right, top, bottom)
        sets = [[pad(data, around).contiguous(memory_format=form), grad_out] for data, grad_out in sets]
    return lambda data, grad_out: backward(grad_out, data, weight), sets
