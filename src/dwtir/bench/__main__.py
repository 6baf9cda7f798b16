"""The command ``python -m dwtir.bench``."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import cuda
from ..errors import DwtirError, InvalidShapeError
from ..shape import DTYPES, LAYOUTS
from ..target import Target, resolve
from ..tune import Task, tasks
from .report import Row, summary, table, write_csv, write_json
from .rounds import bench_layer


def main(arguments: Sequence[str]) -> int:
    """Measure the layers that are named; return the process's exit status."""
    options = _parser().parse_args(arguments)
    try:
        target = resolve(options.target)
        rows: list[Row] = []
        for task in _layers(options):
            rows.append(
                bench_layer(
                    task.shape,
                    target,
                    epilogue=task.epilogue,
                    schedule=options.schedule,
                    cold=not options.warm,
                    baselines=options.baselines == "torch",
                    rounds=options.rounds,
                )
            )
            print(table(rows[-1:])[-1], file=sys.stderr, flush=True)
        about = _about(target)
        print("\n".join([", ".join(f"{k} {v}" for k, v in about.items()), "", *table(rows)]))
        print("\n".join(["", *summary(rows)]))
        if options.csv is not None:
            with options.csv.open("w", newline="", encoding="utf-8") as stream:
                write_csv(rows, stream)
        if options.json is not None:
            with options.json.open("w", encoding="utf-8") as stream:
                write_json(rows, about, stream)
    except (DwtirError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dwtir.bench",
        description="Time layers by dwtir and by PyTorch, in turns, after a check of the results.",
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="WHAT",
        help="shapes; or suite; or seeds; or network NAME, of the suite, timm or torchvision",
    )
    for name, allowed in (("dtype", tuple(DTYPES)), ("layout", LAYOUTS)):
        parser.add_argument(
            f"--{name}", nargs="+", choices=allowed, default=[allowed[0]], help="of networks"
        )
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="of networks")
    parser.add_argument("--epilogue", help="fused steps, such as bias+relu")
    parser.add_argument("--schedule", default="manual", help="ours: manual, tuned, or a step")
    parser.add_argument("--baselines", choices=("torch", "none"), default="torch")
    parser.add_argument("--warm", action="store_true", help="data that stays in the caches")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--target", help="cuda or cpu; the GPU if there is one")
    parser.add_argument("--csv", type=Path, help="write the rows there")
    parser.add_argument("--json", type=Path, help="write the rows there, with versions")
    return parser


def _layers(options: argparse.Namespace) -> list[Task]:
    forms = {"batches": options.batch, "dtypes": options.dtype, "layouts": options.layout}
    kind, *names = options.what
    if kind in ("suite", "seeds") and not names:
        return tasks.from_suite("all" if kind == "suite" else kind, **forms)
    if kind == "network":
        if not names:
            raise InvalidShapeError("network is followed by a name, got none")
        found = [
            task
            for name in names
            for task in tasks.from_network(name, **forms, epilogue=options.epilogue)
        ]
        return list({str(task): task for task in found}.values())
    return tasks.from_shapes(options.what, options.epilogue)


def _about(target: Target) -> dict[str, str]:
    """Say what was measured on, and with which versions."""
    about = {"device": target.name, "python": platform.python_version()}
    for package in ("dwtir", "apache-tvm", "torch"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = "none"
    if target.kind == "cuda":
        properties = cuda.device_properties()
        about |= {"gpu": properties.name, "driver for CUDA": properties.driver_version}
    return about


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
