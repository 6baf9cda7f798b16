"""Fit the constants of `dwtir.schedules.cost` to measured kernels, and print them.

    python bench/fit_cost.py bench/kernels-nvidia-h200.csv [--steps 500] [--seed 0]

A file has a line for each kernel: shape and strategy (empty where they are as in the line
before), the strategy's parameters in their order, registers, spilled bytes, microseconds.
The one here was measured cold on an NVIDIA H200: driver 580.159.04, NVRTC 13.0, the least
of two CUDA graphs of about a millisecond each. The tiles are the fastest of earlier
measurements, those that the model of the time preferred, and others by chance, each with
three numbers of `min_blocks`.

What is made small is the mean, over layers, of the logarithm of how much slower the kernel
is that the model prefers than the best (its second choice counts as much), and of the
model's error on good kernels, with a factor for each layer left open.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dwtir import DepthwiseConv2dShape, schedules
from dwtir.schedules import cost
from dwtir.target import Target, resolve

CONSTANTS = (
    *("_REGISTERS", "_PER_SUM", "_PER_VALUE", "_PER_WEIGHT"),
    *("_LOAD", "_WEIGHT", "_STORE", "_CONVERSION", "_START", "_RAGGED", "_SPILL"),
    *("_ALONE", "_WAIT", "_MORE_WAITS", "_PER_LOAD", "_NEXT_STEP", "_PER_LINE"),
    *("_LAST_ROUND", "_LARGE_BLOCK", "_TOGETHER", "_WITH_MEMORY"),
    *("_LAUNCH", "_BANDWIDTH", "_HALO_BANDWIDTH"),
)


class Layer(NamedTuple):
    """A layer's kernels: what the model knows of each, and what was measured."""

    model: cost.Model
    works: list[cost.Work]
    min_blocks: list[int]
    measured: np.ndarray[Any, Any]


def read(path: Path, target: Target) -> dict[str, Layer]:
    """Read measured kernels by their shape."""
    kernels: dict[str, list[tuple[cost.Work, int, float]]] = defaultdict(list)
    shape, strategy = "", ""
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            shape, strategy = row["shape"] or shape, row["strategy"] or strategy
            values = [int(v) if v.isdigit() else v for v in row["parameters"].split()]
            tile: Any = schedules.STRATEGIES[strategy](*values)
            work = tile.work(DepthwiseConv2dShape.parse(shape))
            kernels[shape].append((work, tile.min_blocks, float(row["us"])))
    layers = {}
    for text, found in kernels.items():
        works, min_blocks, measured = zip(*found, strict=True)
        model = cost.Model(DepthwiseConv2dShape.parse(text), target)
        layers[text] = Layer(model, list(works), list(min_blocks), np.array(measured))
    return layers


def regret(layer: Layer, choices: int) -> tuple[float, float]:
    """Return how much slower the model's first choices are, and its error, as logarithms."""
    estimates = np.array(
        [layer.model.seconds(*kernel) for kernel in zip(layer.works, layer.min_blocks, strict=True)]
    )
    best = layer.measured.min()
    first = np.argsort(estimates)[:choices]
    errors = np.log(1e6 * estimates / layer.measured)
    weights = (best / layer.measured) ** 1.5
    middle = np.average(errors, weights=weights)
    slower = float(np.log(layer.measured[first] / best).mean())
    return slower, float(np.average(np.abs(errors - middle), weights=weights))


def loss(layers: Iterable[Layer]) -> float:
    """Return what is made small."""
    return float(np.mean([sum(regret(layer, 2)) for layer in layers]))


def main() -> None:
    """Fit, and print the constants and what they achieve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", default="nvidia-h200")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    layers = read(options.file, resolve(options.target)).values()
    rng = np.random.default_rng(options.seed)
    values = np.array([getattr(cost, name) for name in CONSTANTS])
    least = loss(layers)
    for _ in range(options.steps):
        changed = rng.random(len(values)) < 0.25
        tried = values * np.exp(np.where(changed, rng.normal(0, 0.1, len(values)), 0))
        for name, value in zip(CONSTANTS, tried, strict=True):
            setattr(cost, name, float(value))
        found = loss(layers)
        if found < least:
            least, values = found, tried
    for name, value in zip(CONSTANTS, values, strict=True):
        setattr(cost, name, float(value))
        print(f"{name} = {value:.3g}")
    slower = np.exp(np.mean([regret(layer, 1)[0] for layer in layers]))
    chance = np.exp(np.mean([np.log(v.measured / v.measured.min()).mean() for v in layers]))
    print(
        f"{len(layers)} layers; slower than the best: {slower:.3f}x chosen, {chance:.3f}x by chance"
    )


if __name__ == "__main__":
    main()
