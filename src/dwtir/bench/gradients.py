"""PyTorch's gradients of a layer, by the operator that its autograd calls."""

from collections.abc import Callable
from typing import Any

from ..shape import Shape


def gradient(
    torch: Any, shape: Shape, layout: str, sets: list[list[Any]]
) -> tuple[Callable[..., Any], list[list[Any]]]:
    """Write a gradient as PyTorch computes it, with the tensors to call it with.

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

    def to_weight(data: Any, grad_out: Any) -> Any:
        return backward(grad_out, data, weight)

    if not symmetric:
        around = (left, right, top, bottom)
        sets = [[pad(data, around).contiguous(memory_format=form), grad_out] for data, grad_out in sets]
    return to_weight, sets
