"""Options that layers and whole networks have in common."""

import argparse


def add_measuring(parser: argparse.ArgumentParser, each: str) -> None:
    """Add how often and where to measure `each`, a layer or a network."""
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (default 7)")
    parser.add_argument(
        "--patience",
        type=float,
        default=0,
        metavar="SECONDS",
        help=f"for others to leave the CPU, a {each} (default 0)",
    )
    parser.add_argument("--target", help="cuda or cpu; the GPU if there is one")
