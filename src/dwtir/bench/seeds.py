"""Measures what the articles measured: the same layers, by the steps of the same names."""

from collections.abc import Mapping
from itertools import groupby
from typing import TypeAlias

from ..epilogue import Epilogue
from ..errors import NotTunedError
from ..kernel import Timing
from ..shape import Shape
from ..target import Target
from .articles import LIBRARY, PUBLISHED_US, Case, Table
from .contenders import Contender, ours, peers
from .problem import Problem
from .rounds import checked, in_turns
from .timers import open_timer

NEEDS_GPU = "needs a GPU"

Found: TypeAlias = "Timing | str"
"""The times of a case, or why there are none."""


def measure(target: Target, *, baselines: bool, rounds: int) -> dict[Case, Found]:
    """Time all cases of the articles, warm as they did; without a GPU none has a time.

    The library's cases, if asked for, are measured by the fastest way of PyTorch in NCHW.
    """
    if target.kind != "cuda":
        return dict.fromkeys(PUBLISHED_US, NEEDS_GPU)
    found: dict[Case, Found] = {}
    cases = sorted(PUBLISHED_US, key=_layer)
    for (shape, epilogue), group in groupby(cases, key=_layer):
        problem = Problem(Shape.parse(shape), Epilogue.of(epilogue), target, cold=False)
        found |= _measure_layer(problem, list(group), baselines, rounds)
    return {case: found[case] for case in PUBLISHED_US}


def _layer(case: Case) -> tuple[str, str]:
    return case.shape, case.epilogue


def _measure_layer(problem: Problem, cases: list[Case], baselines: bool, rounds: int) -> dict[Case, Found]:
    found: dict[Case, Found] = {}
    own: list[Contender] = []
    for case in cases:
        if case.way == LIBRARY:
            continue
        try:
            own.append(ours(problem, case.way, name=case.way, on_miss="error"))
        except NotTunedError:
            found[case] = "no tuning record"
    others = peers(problem, ["NCHW"], compiled=False) if baselines else []
    right, wrong = checked(problem, own, others)
    timer = open_timer(problem.target, right, problem.sets, patience=0)
    timings = in_turns(timer, right, rounds)
    library = [timings[peer.name] for peer in others if peer.name in timings]
    for case in cases:
        if case.way in timings:
            found[case] = timings[case.way]
        elif case.way == LIBRARY:
            fastest = min(library, key=lambda timing: timing.median, default=None)
            found[case] = fastest or "; ".join(wrong) or "not asked for"
    return found


def table_cells(table: Table, found: Mapping[Case, Found]) -> list[tuple[str, ...]]:
    """Write a table of an article as cells, the first line its head.

    Ratios are how many times faster a line is than what it is against, as published and here.
    """
    head = ["layer", "schedule", table.article.device, "here"]
    for name in table.against:
        head += [f"over {name}", "here"]
    lines = [tuple(head)]
    for case, bases in table.lines.items():
        way = f"{table.article.library}, here PyTorch" if case.way == LIBRARY else case.way
        what = f"{way} + {case.epilogue.replace('+', ' + ')}" if case.epilogue else way
        here = time if isinstance(time := found[case], str) else f"{time.median * 1e6:.2f}"
        line = [case.shape, what, f"{PUBLISHED_US[case]:.1f}", here]
        for base in bases:
            if base is None:
                line += ["", ""]
            else:
                line += [f"{PUBLISHED_US[base] / PUBLISHED_US[case]:.2f}x", _ratio(found[base], found[case])]
        lines.append(tuple(line))
    return lines


def _ratio(base: Found, case: Found) -> str:
    if isinstance(base, str) or isinstance(case, str):
        return "-"
    return f"{base.median / case.median:.2f}x"
