"""Benchmarks: our kernels and PyTorch's on the same layers, in the same run.

A ``problem`` holds a layer's tensors, ``contenders`` are what computes it,
``rounds`` checks and times them in turns, ``report`` says what came of it.
``python -m dwtir.bench`` is the command.
"""

from __future__ import annotations

from .report import Row
from .rounds import bench_layer

__all__ = ["Row", "bench_layer"]
