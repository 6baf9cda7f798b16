"""Random tensors of one layer, in as many sets as keep the caches from helping."""

from __future__ import annotations

from math import ceil, prod
from pathlib import Path
from typing import Any

import numpy as np

from .. import timing
from ..epilogue import Epilogue
from ..errors import ToolchainError
from ..reference import numpy_dtype
from ..shape import DepthwiseConv2dShape
from ..target import Target

__all__ = ["Problem", "import_torch"]

_CACHE_SIZES = 3
_MAX_SETS = 64


def import_torch(what: str) -> Any:
    """Import torch, or say who needs it.

    Raises
    ------
    ToolchainError
        If it is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ToolchainError(f"{what} needs torch: pip install 'dwtir[bench,torch]'") from error
    return torch


class Problem:
    """A layer's inputs on a device.

    Parameters
    ----------
    shape, epilogue, target
        What is computed, and where.
    cold : bool
        Whether there are sets enough to be three times the last cache.

    Attributes
    ----------
    arrays : list of array
        Data, weight and the epilogue's operands, in the shape's layout.
    sets : int
        How often they are there.
    """

    def __init__(
        self, shape: DepthwiseConv2dShape, epilogue: Epilogue, target: Target, cold: bool
    ) -> None:
        self.shape, self.epilogue, self.target = shape, epilogue, target
        rng = np.random.default_rng(0)
        extents = (shape.data_shape, shape.weight_shape, *epilogue.operands(shape).values())
        self.arrays = [self._normal(rng, extent) for extent in extents]
        set_bytes = sum(a.nbytes for a in self.arrays) + prod(shape.out_shape) * shape.itemsize
        self.sets = self._rotation(set_bytes) if cold else 1
        self._tensors: dict[str, list[list[Any]]] = {}

    def _normal(self, rng: np.random.Generator, extent: tuple[int, ...]) -> np.ndarray[Any, Any]:
        values = rng.standard_normal(min(prod(extent), 2**20), np.float32)
        return np.resize(values, extent).astype(numpy_dtype(self.shape.dtype))

    def _rotation(self, set_bytes: int) -> int:
        if self.target.kind == "cuda":
            return timing.rotation(set_bytes)
        return min(max(2, ceil(_CACHE_SIZES * _last_cache() / set_bytes)), _MAX_SETS)

    def tensors(self, layout: str) -> list[list[Any]]:
        """Return the sets as torch tensors of a layout: NCHW, or NHWC with channels last.

        The weight is (out_channels, 1, kh, kw) in torch's sense, the data
        (N, C, H, W); in NHWC both are permuted views of contiguous memory.
        """
        if layout not in self._tensors:
            torch = import_torch("a benchmark against PyTorch")
            device = "cuda" if self.target.kind == "cuda" else "cpu"
            dtype = getattr(torch, self.shape.dtype)
            first = [
                torch.from_numpy(np.ascontiguousarray(array.astype(np.float32))).to(device, dtype)
                for array in self._as_nchw()
            ]
            form = torch.channels_last if layout == "NHWC" else torch.contiguous_format
            first = [t.contiguous(memory_format=form) if t.ndim == 4 else t for t in first]
            self._tensors[layout] = [first] + [
                [tensor.clone(memory_format=torch.preserve_format) for tensor in first]
                for _ in range(self.sets - 1)
            ]
        return self._tensors[layout]

    def _as_nchw(self) -> list[np.ndarray[Any, Any]]:
        data, weight, *operands = self.arrays
        if self.shape.layout == "NHWC":
            data = data.transpose(0, 3, 1, 2)
            weight = weight.transpose(2, 3, 0, 1)
            operands = [a.transpose(0, 3, 1, 2) if a.ndim == 4 else a for a in operands]
        return [data, weight.reshape(self.shape.out_channels, 1, *self.shape.kernel), *operands]


def _last_cache() -> int:
    """Return the bytes of the CPU's largest cache, as Linux describes it; 32 MiB if it does not."""
    sizes = [32 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes)
