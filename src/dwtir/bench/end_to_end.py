"""The command ``python -m dwtir.bench network NAME --end-to-end``."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..tables import aligned
from ..target import Target, resolve
from . import network_row
from .inference import infer
from .machine import Clocks, about
from .network_row import NetworkRow
from .networks import Network, find
from .rounds import add_measuring, check_target
from .row import WIDE
from .training import PRECISIONS, train

_FORMAT = "end-to-end 1"


def main(arguments: Sequence[str]) -> int:
    """Measure the networks that are named; return the exit status."""
    options = _parser().parse_args(arguments)
    word, *names = options.what
    if word != "network" or not names:
        raise ArgumentError(f"--end-to-end is of network NAME ..., got {' '.join(options.what)}")
    for name in ("rounds", "batch"):
        given = getattr(options, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            raise ArgumentError(f"--{name} must be >= 1, got {given}")
    target = resolve(options.target)
    check_target(target)
    networks = [find(name) for name in names]
    clocks = Clocks(target)
    facts = about(target)
    rows: list[NetworkRow] = []
    for row in _rows(networks, target, options):
        clocks.sample()
        facts |= clocks.about()
        rows.append(row)
        print(aligned(network_row.cells([row]))[-1], file=sys.stderr, flush=True)
        if options.json is not None:
            found = {"format": _FORMAT, "about": facts, "rows": list(map(network_row.fields, rows))}
            options.json.write_text(f"{json.dumps(found, indent=1)}\n", encoding="utf-8")
    print("\n".join(_text(facts, rows)))
    return 0


def _rows(networks: Sequence[Network], target: Target, options: argparse.Namespace) -> Iterator[NetworkRow]:
    common: dict[str, Any] = {name: getattr(options, name) for name in ("rounds", "patience")}
    common["compiled"] = not options.eager
    for network, batch, layout in product(networks, options.batch, options.layout):
        common |= {"batch": batch, "layout": layout}
        if options.train:
            for precision in PRECISIONS:
                yield train(network, target, precision=precision, steps=options.steps, **common)
        else:
            for dtype in options.dtype:
                yield infer(network, target, dtype=dtype, when=options.when, **common)


def _text(facts: dict[str, str], rows: Sequence[NetworkRow]) -> list[str]:
    lines = [", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    lines += aligned(network_row.cells(rows))
    lines += [
        "",
        "ratio: the fastest way of PyTorch alone over the fastest with dwtir's kernels;",
        "depthwise %: of eager PyTorch's time, in depthwise convolutions;",
        "loss differs: the most in any step; nudged: as much for PyTorch alone, by a rounding;",
        f"~: spread (p20 to p80) above {100 * WIDE:.0f} %; !: others used the CPU",
    ]
    return lines + [f"{row.network}: {note}" for row in rows for note in row.notes]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dwtir.bench network NAME ... --end-to-end",
        description="Run whole networks by PyTorch, and with dwtir's kernels in them, in turns, "
        "after a check of the results. On a GPU all run in CUDA graphs, training without too.",
    )
    add = parser.add_argument
    add("what", nargs="+", metavar="network NAME", help="of timm or torchvision")
    add("--end-to-end", action="store_true", required=True)
    add("--train", action="store_true", help="steps of a training, and their losses")
    add("--steps", type=int, default=50, help="for the losses (default 50)")
    add("--when", choices=("faster", "always"), default="faster", help="to convert a layer")
    add("--eager", action="store_true", help="without torch.compile")
    add_measuring(parser, "network")
    add("--json", type=Path, metavar="FILE", help="write all there")
    return parser
