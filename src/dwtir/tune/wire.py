"""Strategies as JSON values, for messages to workers and for the journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidScheduleError
from ..schedules import STRATEGIES, Strategy

__all__ = ["strategy_from_json", "strategy_to_json"]


def strategy_to_json(strategy: Strategy) -> dict[str, Any]:
    """Write a strategy as JSON values."""
    return {"strategy": strategy.name, "parameters": strategy.parameters}


def strategy_from_json(values: Mapping[str, Any]) -> Strategy:
    """Read a strategy, whoever wrote it.

    Raises
    ------
    InvalidScheduleError
        If the name or a parameter is not one of ours.
    """
    name, parameters = values.get("strategy"), values.get("parameters")
    if not isinstance(name, str) or name not in STRATEGIES or not isinstance(parameters, Mapping):
        raise InvalidScheduleError(
            f"a strategy has a name, one of {', '.join(STRATEGIES)}, and parameters, got {values!r}"
        )
    return STRATEGIES[name].from_parameters(parameters)
