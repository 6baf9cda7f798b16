"""Tensors computed from a module's, kept until those change."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .tensors import Tensor


class Derived:
    """Keeps what is computed from tensors, and computes it anew when one of them changed.

    Changes are seen by a tensor's version, which counts writes, and its address. New values
    are written where the old ones were, so that a CUDA graph captured with them never reads
    freed memory. Copies and pickles of this object are empty.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Any, list[Tensor]]] = {}

    def __reduce__(self) -> tuple[type[Derived], tuple[()]]:
        return Derived, ()

    def get(self, key: Hashable, sources: Sequence[Tensor], make: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what `make` computes from the sources: new tensors, the same sizes for a key.

        Nothing is kept where versions do not exist or tell nothing: of tensors of inference
        mode, and while a program is traced or a CUDA graph is captured.
        """
        if torch.compiler.is_compiling() or any(source.is_inference() for source in sources):
            return make()
        stamp = [(source.data_ptr(), source._version) for source in sources]
        found = self._found.get(key)
        if found is not None and found[0] == stamp:
            return found[1]
        if sources[0].is_cuda and torch.cuda.is_current_stream_capturing():
            return make()
        with torch.inference_mode(False), torch.no_grad():
            made = make()
            if found is not None:
                made = [old.copy_(new) for old, new in zip(found[1], made, strict=True)]
        if made[0].is_cuda:
            torch.cuda.current_stream(made[0].device).synchronize()  # others may use them at once
        self._found[key] = stamp, made
        return made
