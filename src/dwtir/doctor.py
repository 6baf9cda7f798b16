"""``python -m dwtir doctor``: what this machine has, what it lacks, and how to get it."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from . import cuda
from .checks import CHECKS, TARGETS, Finding


def main(argv: Sequence[str] | None = None) -> int:
    """Print the findings; return 0 when the chosen device can work."""
    what = "Check what dwtir needs on this machine, and say how to get what is missing."
    parser = argparse.ArgumentParser(prog="python -m dwtir doctor", description=what)
    parser.add_argument("--target", choices=TARGETS, help="the device that has to work (default: CUDA, else CPU)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(argv)

    # As target.resolve(None) decides: a GPU that is present has to work.
    target = arguments.target or ("cuda" if cuda.device_count() else "cpu")
    findings = [check(target) for check in CHECKS]
    works = all(finding.status == "ok" for finding in findings if finding.required)
    if arguments.json:
        print(json.dumps({"target": target, "works": works, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        _print_table(findings)
        print(f"\n{target} {'works' if works else 'does not work'} on this machine.")
    return 0 if works else 1


def _print_table(findings: Sequence[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    indent = " " * (width + 2 + len("missing") + 2)
    for finding in findings:
        first, *rest = finding.detail.splitlines() or [""]
        print(f"{finding.name:{width}}  {finding.status:7}  {first}")
        for line in rest:
            print(f"{indent}{line}")
        if finding.status != "ok":
            print(f"{indent}{'needed' if finding.required else 'optional'}: {finding.remedy}")


if __name__ == "__main__":
    sys.exit(main())
