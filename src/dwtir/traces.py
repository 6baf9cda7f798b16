"""MetaSchedule traces of our own strategies, and traces from outside.

A trace from outside never reaches TVM, whose loader does not check what it
reads. As JSON it has to be, to the letter, the trace that our strategy makes;
that one is used.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from . import files
from .epilogue import NO_STEPS, Epilogue
from .errors import DwtirError, InvalidScheduleError, RecordError
from .schedules import STRATEGIES, Strategy, sample
from .shape import Shape
from .target import Target
from .typed import Schedule

TraceJson: TypeAlias = list[Any]
"""``[instructions, decisions]``, as `tvm.s_tir.schedule.Trace.as_json` gives it."""


def space_trace(
    strategy: Strategy, shape: Shape, target: Target, epilogue: Epilogue = NO_STEPS
) -> tuple[Schedule, TraceJson]:
    """Schedule the convolution with the tile as random variables, decided as in `strategy`.

    Fields outside the strategy's space, or with a value that the space does not list, are constants of the schedule;
    the others are drawn as by `Strategy.draw`. The trace is returned with it, as plain JSON values.
    """
    chosen = strategy.parameters
    listed = {field: values for field, values in strategy.space(shape, target).items() if chosen[field] in values}
    sch = _drawn(strategy, shape, epilogue, listed)
    return sch, plain(sch.trace.as_json())


def decided(strategy: Strategy, shape: Shape, epilogue: Epilogue) -> Schedule:
    """Schedule the convolution with each number of the tile drawn from itself alone.

    Its trace is what a record keeps: it says the parameters, and depends on nothing but them.
    """
    return _drawn(strategy, shape, epilogue, {field: (n,) for field, n in _numbers(strategy).items()})


def _numbers(strategy: Strategy) -> dict[str, int]:
    return {field: value for field, value in strategy.parameters.items() if type(value) is int}


def _drawn(strategy: Strategy, shape: Shape, epilogue: Epilogue, candidates: Mapping[str, Sequence[int]]) -> Schedule:
    """Schedule the convolution with some fields drawn, each decided as in `strategy`."""
    from tvm.s_tir import Schedule

    variables = strategy.parameters
    try:
        sch = Schedule(strategy.define(shape, epilogue))
        for field, values in candidates.items():
            variables[field] = sample(sch, values, values.index(variables[field]))
        type(strategy)(**variables).apply(sch, shape)
    except DwtirError:
        raise
    except Exception as error:  # whatever TVM raises on a shape at the edge of its arithmetic
        reason = next(iter(str(error).strip().splitlines()[-1:]), type(error).__name__)
        raise InvalidScheduleError(f"{strategy} cannot be applied to {shape}: {reason}") from error
    return sch


@lru_cache(maxsize=256)
def expected_trace(strategy: Strategy, shape: Shape, epilogue: Epilogue) -> str:
    """Return the JSON text of the trace of `decided`."""
    return dump(plain(decided(strategy, shape, epilogue).trace.as_json()))


def recognise(trace: TraceJson, shape: Shape, target: Target, epilogue: Epilogue) -> Strategy:
    """Find the strategy and parameters that make a trace; a `RecordError` if none does."""
    text, drawn = dump(plain(trace)), _draws(trace)
    for strategy in STRATEGIES.values():
        if strategy.claims(shape, target):
            for tile, fields in _readings(strategy, drawn, shape, target):
                try:
                    found = strategy.from_parameters(tile.parameters | fields)
                    found.check_use(shape, target)
                    if text in (
                        dump(space_trace(found, shape, target, epilogue)[1]),
                        expected_trace(found, shape, epilogue),
                    ):
                        return found
                except DwtirError:
                    continue
    raise RecordError(f"the trace must be one of dwtir's strategies for {shape}, got another")


def _draws(trace: Any) -> list[tuple[list[Any], Any]]:
    """List what a trace, which may be any JSON, draws from, and what it draws; else nothing."""
    try:
        instructions, decisions = trace
        chosen = dict(decisions)
        return [
            (inst[2][0], inst[2][0][chosen[index]])
            for index, inst in enumerate(instructions)
            if inst[0] == "SampleCategorical"
        ]
    except (LookupError, TypeError, ValueError):
        return []


def _readings(
    strategy: type[Strategy], drawn: Sequence[tuple[list[Any], Any]], shape: Shape, target: Target
) -> Iterator[tuple[Strategy, dict[str, Any]]]:
    """Yield what draws mean if they are of `strategy`, of its space or decided: a tile's fields."""
    space = strategy.space(shape, target)
    tiles = strategy.guesses(shape, target)
    if [candidates for candidates, _ in drawn] == list(map(list, space.values())):
        readings = [(tiles[0], list(space))]
    else:
        readings = [(tile, list(_numbers(tile))) for tile in tiles]
    for tile, fields in readings:
        if len(fields) == len(drawn):
            yield tile, dict(zip(fields, (value for _, value in drawn), strict=True))


def without_postprocs(trace: Any) -> Any:
    """Leave out of a trace, which may be any JSON, what MetaSchedule does after our schedule."""
    try:
        instructions, decisions = trace
        end = [instruction[0] for instruction in instructions].index("EnterPostproc")
        return [instructions[:end], [decision for decision in decisions if decision[0] < end]]
    except (LookupError, TypeError, ValueError):
        return trace


def plain(value: Any) -> Any:
    """Turn TVM's containers and numbers into JSON values, and bools into ints as its files do."""
    if value is None:
        return None
    if isinstance(value, str):
        return _one_line(str(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if type(value).__name__ in ("IntImm", "FloatImm"):
        return value.value
    if hasattr(value, "items"):
        return {str(key): plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value]


def _one_line(text: str) -> str:
    """Rewrite an index map, which TVM puts into traces as JSON text with line breaks or without."""
    if '"root_index"' in text[:32]:
        with contextlib.suppress(RecordError):
            return dump(files.parse_json(text.encode()))
    return text


def dump(value: Any) -> str:
    """Write JSON compactly; equal texts are equal values of equal types."""
    return json.dumps(value, separators=(",", ":"))


def brief(value: object) -> str:
    """Show a value of any size in a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # ints of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 120 else f"{text[:117]}..."
