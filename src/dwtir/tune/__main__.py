"""The command ``python -m dwtir.tune``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..errors import DwtirError
from .search import SEARCHES
from .session import Outcome, Trial, tune


def main(arguments: list[str]) -> int:
    """Tune the layers that are named; return the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dwtir.tune",
        description="Search for the fastest schedule of layers on the device that is here, and "
        "record it for dwtir.build(..., schedule='tuned').",
    )
    parser.add_argument("shapes", nargs="+", metavar="SHAPE", help="such as 1x256x96x96_k3_psame")
    parser.add_argument("--epilogue", help="fused steps, such as bias+relu")
    parser.add_argument("--target", help="cuda or cpu; the GPU if there is one")
    parser.add_argument("--search", choices=sorted(SEARCHES), default="random")
    parser.add_argument("--trials", type=int, default=64, help="strategies to try (default 64)")
    parser.add_argument("--budget", type=float, help="seconds for each layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--db", type=Path, help="folder for the records; the user's by default")
    parser.add_argument("--json", action="store_true", help="one JSON object a layer on stdout")
    options = parser.parse_args(arguments)

    failed = 0
    for text in options.shapes:

        def show(trial: Trial, best: Trial) -> None:
            if not options.json:
                print(_line(trial, best), flush=True)

        try:
            outcome = tune(
                text,
                epilogue=options.epilogue,
                target=options.target,
                search=options.search,
                trials=options.trials,
                budget=options.budget,
                seed=options.seed,
                folder=options.db,
                report=show,
            )
        except DwtirError as error:
            print(f"{text}: {type(error).__name__}: {error}", file=sys.stderr)
            failed += 1
            continue
        print(json.dumps(_summary(outcome)) if options.json else _closing(outcome), flush=True)
    return 1 if failed else 0


def _line(trial: Trial, best: Trial) -> str:
    took = trial.error if trial.seconds is None else f"{trial.seconds * 1e6:10.2f} us"
    least = (best.seconds or 0.0) * 1e6
    return f"{trial.number:4} {took}  best {least:10.2f} us  {trial.strategy}"


def _summary(outcome: Outcome) -> dict[str, object]:
    record = outcome.record
    return {
        "shape": str(record.shape),
        "device": record.device,
        "strategy": str(record.strategy),
        "median_us": record.median_secs * 1e6,
        "manual_us": (record.manual_median_secs or 0.0) * 1e6,
        "trials": len(outcome.trials),
        "failed": sum(trial.seconds is None for trial in outcome.trials),
        "seconds": outcome.seconds,
        "path": str(outcome.path),
        "written": outcome.written,
    }


def _closing(outcome: Outcome) -> str:
    facts = _summary(outcome)
    kept = "written" if outcome.written else "kept as it was, being at least as good"
    return (
        f"{facts['shape']}: {facts['median_us']:.2f} us, manual {facts['manual_us']:.2f} us, "
        f"{facts['trials']} trials ({facts['failed']} failed) in {facts['seconds']:.1f} s\n"
        f"{facts['strategy']}\n{facts['path']} {kept}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
