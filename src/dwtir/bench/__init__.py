"""Benchmarks: our kernels and PyTorch's on the same layers, in the same run.

A ``problem`` holds a layer's tensors, ``contenders`` are what computes it,
``rounds`` checks and times them in turns, ``results`` keeps what came of it, for
``report`` and ``plots`` to show. Whole ``networks`` are run by ``inference`` and
``training``, for ``end_to_end``.
``python -m dwtir.bench`` is the command.
"""

from .rounds import bench_layer
from .row import Row

__all__ = ["Row", "bench_layer"]
