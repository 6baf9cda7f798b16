"""Fit the constants of `dwtir.schedules.cost` to measured kernels, and print them.

    python bench/fit_cost.py bench/kernels-nvidia-h200.csv.xz [--steps 500] [--seed 0]

A file has a line for each kernel: shape and strategy (empty where they are as in the line
before), the strategy's parameters in their order, and microseconds.
The one here was measured cold on an NVIDIA H200: driver 580.159.04, NVRTC 13.0, the least
of two CUDA graphs of about a millisecond each. It is an excerpt of 7854 kernels of 288 layers,
in three rounds: the first of tiles by chance and of the best known, the second and the third
of what the model of then preferred. Of each layer it holds the seven fastest kernels, four or five
that the model of the third round preferred most, and two by chance, one of each tile with the same
registers. Layers are left out whose kernels all take the same time, nearly, and of kernels of
less than 3.5 us those that were 1.5 times as slow as the best, for such a time is wrong now
and then.

What is made small is the mean, over layers, of the logarithm of how much slower the kernel
is that the model prefers than the best, with three times its square, and half of the model's
error on good kernels, with a factor for each layer left open. Kernels with nearly the least
estimate count too, and more than the first alone, for the model does not know times so well.

The constants in `dwtir.schedules.cost` are from some 20 000 such steps, with all 7854 kernels,
where the errors of the registers, and of whether they do, were made small as well. `_SPILL` is
not fitted: tiles that spill are excluded.
"""

from __future__ import annotations

import argparse
import csv
import lzma
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dwtir import DepthwiseConv2dShape, schedules
from dwtir.schedules import cost
from dwtir.target import Target, resolve

CONSTANTS = (
    *("_REGISTERS", "_PER_SUM", "_PER_ROW", "_PER_INPUT", "_PER_VALUE"),
    *("_PER_LOOP", "_PER_LOADED", "_PER_WEIGHT", "_CERTAINTY", "_ANEW"),
    *("_LOAD", "_WEIGHT", "_STORE", "_CONVERSION", "_START"),
    *("_UNCACHED", "_CACHED", "_RAGGED", "_IN_LOOP"),
    *("_ALONE", "_WAIT", "_MORE_WAITS", "_NEXT_STEP", "_PER_LINE", "_LAST_ROUND", "_LARGE_BLOCK"),
    *("_LAUNCH", "_BANDWIDTH", "_HALO_BANDWIDTH", "_SCATTERED_BANDWIDTH", "_SHARED_BANDWIDTH"),
)


_CLOSE = 0.04
"""Logarithm of how far apart two estimates are for the model to tell them from each other."""


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
    with lzma.open(path, "rt", newline="", encoding="utf-8") as stream:
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


def regret(layer: Layer) -> tuple[float, float, float]:
    """Return how much slower the model's choice is, with its neighbours, and its error, as logs."""
    estimates = np.log(
        [layer.model.seconds(*kernel) for kernel in zip(layer.works, layer.min_blocks, strict=True)]
    )
    slower = np.log(layer.measured / layer.measured.min())
    near = np.exp((estimates.min() - estimates) / _CLOSE)
    errors = estimates - np.log(layer.measured)
    weights = np.exp(-1.5 * slower)
    middle = np.average(errors, weights=weights)
    error = np.average(np.abs(errors - middle), weights=weights)
    first = slower[np.lexsort((np.array(layer.min_blocks), estimates))[0]]
    return float(first), float(np.average(slower, weights=near)), float(error)


def loss(layers: Iterable[Layer]) -> float:
    """Return what is made small."""
    first, near, error = np.transpose([regret(layer) for layer in layers])
    return float(np.mean(near + 3 * near**2 + 0.4 * (first + 3 * first**2) + error / 2))


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
    slower = np.exp(np.mean([regret(layer)[0] for layer in layers]))
    chance = np.exp(np.mean([np.log(v.measured / v.measured.min()).mean() for v in layers]))
    print(
        f"{len(layers)} layers; slower than the best: {slower:.3f}x chosen, {chance:.3f}x by chance"
    )


if __name__ == "__main__":
    main()
