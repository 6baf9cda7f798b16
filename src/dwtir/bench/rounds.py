"""Checks contenders, and times them in turns, so that a drifting clock hits all alike."""

from argparse import ArgumentParser
from collections.abc import Sequence
from math import prod, sqrt

import numpy as np

from .. import spotcheck
from ..epilogue import NO_STEPS, Epilogue
from ..errors import ArgumentError, CompileError, InvalidTargetError
from ..kernel import Timing
from ..shape import DTYPES, LAYOUTS, Shape
from ..target import Target
from .contenders import Contender, ours, peers
from .problem import Problem
from .row import Row
from .timers import Timer, open_timer

_MAX_REASON = 200
_PEER_ERROR = {"float32": 1e-5, "float16": 2.0**-7, "bfloat16": 2.0**-4}
"""Of the largest output: peers round after each step, and some sum in half precision."""
_SUM_ERROR = 2.0**-23


def bench_layer(
    shape: Shape,
    target: Target,
    *,
    epilogue: Epilogue = NO_STEPS,
    schedule: str = "manual",
    cold: bool = True,
    baselines: bool = True,
    rounds: int = 7,
    patience: float = 0.0,
) -> Row:
    """Measure one layer by our kernel and by PyTorch's.

    Parameters
    ----------
    schedule : str
        Ours, as for `dwtir.build`.
    cold : bool
        Whether the inputs rotate through three times the last cache.
    baselines : bool
        Whether PyTorch is measured too.
    rounds : int
        How often each contender is measured, in turns.
    patience : float
        Seconds to wait for others to leave the CPU; what they disturb is measured again.

    Raises
    ------
    CompileError
        If our result is wrong.
    InvalidTargetError
        If there is no benchmark for the device.
    ToolchainError
        If torch is needed and not installed.
    """
    check_target(target)
    problem = Problem(shape, epilogue, target, cold)
    right, wrong = checked(problem, [ours(problem, schedule)], peers(problem) if baselines else ())
    timer = open_timer(target, right, problem.sets, patience)
    return Row(shape, epilogue, target, cold, in_turns(timer, right, rounds), tuple(wrong), load=timer.load)


def check_target(target: Target) -> None:
    """Refuse a device without a benchmark."""
    if target.kind not in ("cuda", "cpu"):
        raise InvalidTargetError(f"the target of a benchmark is cuda or cpu, got {target.name!r}")


def checked(
    problem: Problem, own: Sequence[Contender], others: Sequence[Contender]
) -> tuple[list[Contender], list[str]]:
    """Run each once; return those that are right, and why other peers are left out.

    One of ours that is wrong is a `CompileError`.
    """
    right, wrong = [], []
    for contender in own:
        contender.call(0)
        expected = contender.result()
        ratio = spotcheck.error_ratio(problem.shape, problem.epilogue, problem.arrays, expected)
        if not ratio <= 1:
            raise CompileError(f"{contender.name}, {problem.shape}: the error is {ratio:.1f} times what it may be")
        right.append(contender)
    expected = expected.astype(np.float32)
    allowed = _peer_error(problem.shape) * float(np.abs(expected).max())
    for contender in others:
        try:
            contender.call(0)
            error = float(np.abs(contender.result() - expected).max())
        except Exception as failure:  # what a library says to a layer that it does not take
            wrong.append(f"{contender.name}: {in_short(failure)}")
            continue
        if error <= allowed:
            right.append(contender)
        else:
            wrong.append(f"{contender.name}: its error is {error:.1e}, {allowed:.1e} is allowed")
    return right, wrong


def in_short(error: Exception) -> str:
    """Write an error in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_REASON]


def _peer_error(shape: Shape) -> float:
    """Return what a peer may be off, as a part of the largest output.

    Errors of a sum of n random terms grow with the root of n; the weight's gradient sums over all outputs of a channel.
    """
    terms = shape.flop / (2 * prod(shape.result_shape))
    return _PEER_ERROR[shape.dtype] + _SUM_ERROR * sqrt(terms)


def in_turns(timer: Timer, contenders: Sequence[Contender], rounds: int) -> dict[str, Timing]:
    """Measure contenders in turns; return the times by name."""
    if rounds < 1:
        raise ArgumentError(f"rounds must be >= 1, got {rounds}")
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            times[contender.name].append(timer.seconds(contender))
    return {name: Timing.of(measured) for name, measured in times.items()}


def add_measuring(parser: ArgumentParser, each: str) -> None:
    """Add the options of what of networks, how often and where to measure `each`, a layer or a network."""
    add, usage = parser.add_argument, f"for others to leave the CPU, a {each} (default 0)"
    for name, allowed in (("dtype", tuple(DTYPES)), ("layout", LAYOUTS)):
        add(f"--{name}", nargs="+", choices=allowed, default=[allowed[0]], help="of networks")
    add("--batch", nargs="+", type=int, default=[1], help="of networks")
    add("--rounds", type=int, default=7, help="measurements of each (default 7)")
    add("--patience", type=float, default=0, metavar="SECONDS", help=usage)
    add("--target", help="cuda or cpu; the GPU if there is one")
