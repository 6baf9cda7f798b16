"""Fit the constants of `dwtir.schedules.tap_cost` to measured kernels, and print them.

    python bench/fit_tap_cost.py bench/taps-nvidia-h200.csv.xz [--steps 2000] [--seed 0] [--folds 4]

A file has a line for each tile: shape (empty where it is as in the line before), the fields of
`TapSums` in their order, registers of the first kernel, microseconds of both. The one here was
measured cold on an NVIDIA H200: driver 580.159.04, NVRTC 13.0.

What is made small is the mean, over layers, of the logarithm of how much slower the kernel is
that the model prefers than the best (the next two count half as much each), and of the model's
error on good kernels, with a factor for each layer left open. With folds, the constants are
also fitted without a part of the layers each time, and tried on those.
"""

from __future__ import annotations

import argparse
import csv
import lzma
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dwtir import DepthwiseConv2dShape
from dwtir.schedules import tap_cost
from dwtir.schedules.tap_cost import Tiles
from dwtir.target import Target, resolve

CONSTANTS = (
    *("_REGISTERS", "_PER_SUM"),
    *("_LOAD", "_CONVERSION", "_START", "_OVERHANG", "_AGAIN", "_GUARD"),
    *("_WAIT", "_MORE_WAITS", "_ALONE", "_PER_LOAD", "_PER_LINE", "_PER_WORD"),
    *("_TOGETHER", "_WITH_MEMORY", "_LAST_ROUND", "_LAST_TURN", "_LARGE_BLOCK"),
    *("_END", "_END_SUM", "_END_THREAD"),
    *("_BANDWIDTH", "_HALO_BANDWIDTH", "_LAUNCH", "_PER_PART", "_PARTS_BANDWIDTH"),
)
FRACTIONS = {"_LAST_ROUND", "_LAST_TURN"}


class Layer(NamedTuple):
    """The kernels of a layer."""

    shape: DepthwiseConv2dShape
    tiles: Tiles
    registers: NDArray[np.float64]
    measured: NDArray[np.float64]


def read(path: Path) -> list[Layer]:
    """Read measured kernels, by their shape."""
    kernels: dict[str, list[tuple[list[int], float, float]]] = defaultdict(list)
    shape = ""
    with lzma.open(path, "rt", newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            shape = row["shape"] or shape
            values = [int(value) for value in row["parameters"].split()]
            kernels[shape].append((values, float(row["registers"]), float(row["us"])))
    return [
        Layer(
            DepthwiseConv2dShape.parse(text),
            Tiles(*np.array([values for values, _, _ in found], dtype=np.float64).T),
            np.array([registers for _, registers, _ in found]),
            np.array([us for _, _, us in found]),
        )
        for text, found in kernels.items()
    ]


def regret(layer: Layer, target: Target) -> tuple[float, float, float]:
    """Return, as logarithms, how much slower the first and the first three are, and the error."""
    estimates = tap_cost.estimate(layer.tiles, layer.shape, target, layer.registers)
    best = layer.measured.min()
    slower = np.log(layer.measured[np.argsort(estimates)[:3]] / best)
    errors = np.log(1e6 * estimates / layer.measured)
    weights = (best / layer.measured) ** 1.5
    middle = np.average(errors, weights=weights)
    error = np.average(np.abs(errors - middle), weights=weights) + 0.15 * abs(middle)
    return float(slower[0]), float((slower[0] + slower[1:].mean()) / 2), float(error)


def put(values: dict[str, float]) -> None:
    """Set the constants."""
    for name, value in values.items():
        setattr(tap_cost, name, value)


def loss(layers: Sequence[Layer], target: Target) -> float:
    """Return what is made small."""
    return float(np.mean([sum(regret(layer, target)[1:]) for layer in layers]))


def fit(layers: Sequence[Layer], target: Target, steps: int, seed: int) -> dict[str, float]:
    """Change some of the constants at a time by chance, and keep what makes the loss smaller."""
    rng = np.random.default_rng(seed)
    values: dict[str, float] = {name: getattr(tap_cost, name) for name in CONSTANTS}
    least = loss(layers, target)
    for number in range(steps):
        width = 0.25 if number < steps / 2 else 0.1
        tried = {
            name: value * float(np.exp(rng.normal(0, width))) if rng.random() < 0.2 else value
            for name, value in values.items()
        }
        tried.update({name: min(1.0, tried[name]) for name in FRACTIONS})
        put(tried)
        found = loss(layers, target)
        if found < least:
            least, values = found, tried
    put(values)
    return values


def slower(layers: Sequence[Layer], target: Target) -> float:
    """Return how much slower the choices are than the best, in the geometric mean."""
    return float(np.exp(np.mean([regret(layer, target)[0] for layer in layers])))


def main() -> None:
    """Fit, and print the constants and what they achieve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", default="nvidia-h200")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folds", type=int, default=0)
    options = parser.parse_args()
    layers, target = read(options.file), resolve(options.target)
    start: dict[str, Any] = {name: getattr(tap_cost, name) for name in CONSTANTS}
    held = []
    for fold in range(options.folds):
        put(start)
        others = [layer for number, layer in enumerate(layers) if number % options.folds != fold]
        fit(others, target, options.steps, options.seed)
        tried = layers[fold :: options.folds]
        held += [regret(layer, target)[0] for layer in tried]
        print(
            f"fold {fold}: {slower(others, target):.3f}x fitted, {slower(tried, target):.3f}x not"
        )
    if held:
        print(f"layers left out: {np.exp(np.mean(held)):.3f}x slower than the best")
    put(start)
    for name, value in fit(layers, target, options.steps, options.seed).items():
        print(f"{name} = {value:.3g}")
    for layer in layers:
        print(f"{np.exp(regret(layer, target)[0]):.3f} {layer.shape}")
    chance = np.exp(np.mean([np.log(one.measured / one.measured.min()).mean() for one in layers]))
    print(
        f"{len(layers)} layers; slower than the best: {slower(layers, target):.3f}x chosen, "
        f"{chance:.3f}x by chance"
    )


if __name__ == "__main__":
    main()
