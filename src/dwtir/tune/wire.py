"""Strategies as JSON values, for messages to workers and for the journal."""

from collections.abc import Mapping
from typing import Any

from ..records import read_strategy
from ..schedules import Strategy


def strategy_to_json(strategy: Strategy) -> dict[str, Any]:
    """Write a strategy as JSON values."""
    return {"strategy": strategy.name, "parameters": strategy.parameters}


def strategy_from_json(values: Mapping[str, Any]) -> Strategy:
    """Read a strategy, whoever wrote it."""
    return read_strategy(values.get("strategy"), values.get("parameters"))
