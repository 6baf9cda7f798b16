"""Random tensors of one layer, in as many sets as keep the caches from helping."""

from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np

from .. import timing
from ..epilogue import Epilogue
from ..errors import ToolchainError
from ..reference import Array, random_inputs
from ..shape import Shape
from ..target import Target

_CACHE_SIZES = 3
_MAX_SETS = 64
_ALIGNMENT = 64


def import_torch(what: str = "a benchmark on a GPU") -> Any:
    """Import torch, or say what needs it."""
    try:
        import torch
    except ImportError as error:
        raise ToolchainError(f"{what} needs torch: pip install 'dwtir[bench,torch]'") from error
    return torch


def aligned(array: Array) -> Array:
    """Copy an array to memory that is aligned as PyTorch's is; NumPy aligns to 16 bytes."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % _ALIGNMENT
    copy = memory[skip : skip + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


class Problem:
    """A layer's inputs on a device.

    Its arrays, in the shape's layout, have the names of ``shape.input_shapes`` and of the epilogue's
    operands; if cold, in as many sets as are three times the last cache.
    """

    def __init__(self, shape: Shape, epilogue: Epilogue, target: Target, cold: bool) -> None:
        self.shape, self.epilogue, self.target = shape, epilogue, target
        self.names = [*shape.input_shapes, *epilogue.operands(shape)]
        self.arrays = random_inputs(shape, epilogue)
        set_bytes = sum(a.nbytes for a in self.arrays) + prod(shape.result_shape) * shape.itemsize
        if not cold:
            self.sets = 1
        elif target.kind == "cuda":
            self.sets = timing.rotation(set_bytes)
        else:
            self.sets = min(max(2, ceil(_CACHE_SIZES * _last_cache() / set_bytes)), _MAX_SETS)
        self._tensors: dict[str, list[list[Any]]] = {}

    def tensors(self, layout: str) -> list[list[Any]]:
        """Return the sets as torch tensors of a layout: NCHW, or NHWC with channels last.

        A weight is (out_channels, 1, kh, kw), an image (N, C, H, W); in NHWC both are permuted
        views of contiguous memory.
        """
        if layout not in self._tensors:
            torch = import_torch("a benchmark against PyTorch")
            device = "cuda" if self.target.kind == "cuda" else "cpu"
            dtype = getattr(torch, self.shape.dtype)
            first = [
                torch.from_numpy(np.ascontiguousarray(array.astype(np.float32))).to(device, dtype)
                for array in map(self._as_nchw, self.names, self.arrays)
            ]
            form = torch.channels_last if layout == "NHWC" else torch.contiguous_format
            first = [t.contiguous(memory_format=form) if t.ndim == 4 else t for t in first]
            self._tensors[layout] = [
                [tensor.clone(memory_format=torch.preserve_format) for tensor in first] for _ in range(self.sets)
            ]
        return self._tensors[layout]

    def _as_nchw(self, name: str, array: Array) -> Array:
        shape = self.shape
        nhwc = shape.layout == "NHWC"
        if name == "weight":
            filters = array.transpose(2, 3, 0, 1) if nhwc else array
            return filters.reshape(shape.out_channels, 1, *shape.kernel)
        return array.transpose(0, 3, 1, 2) if nhwc and array.ndim == 4 else array


def _last_cache() -> int:
    sizes = [32 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes)
