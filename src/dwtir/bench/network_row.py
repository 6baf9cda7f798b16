"""One measured network: its times, what became of its layers, and its losses in training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..kernel import Timing
from ..tables import number
from .machine import LOUD
from .results import microseconds
from .row import is_wide

WAYS = ("torch", "torch graph", "torch.compile", "dwtir", "dwtir graph", "dwtir compile")
"""The network as it is and with our kernels: eager, by a CUDA graph, compiled.

On a GPU all of inference is by graphs, of training the latter two.
"""

NUDGED = "torch nudged"
"""PyTorch from weights that differ by a rounding: how fast roundings grow."""

_HEAD = (
    *("network", "run", "batch", "type", "layout"),
    *(f"{way} ms" for way in WAYS),
    *("ratio", "depthwise %", "replaced", "loss differs", "nudged"),
)


@dataclass(frozen=True)
class NetworkRow:
    """A network on images of one batch size, type and layout."""

    network: str
    run: str
    """Either "inference" or "training"."""
    batch: int
    dtype: str
    """Of the weights and images; or ``bfloat16 autocast``."""
    layout: str
    timings: dict[str, Timing]
    """Seconds of a run, by way."""
    replaced: int
    layers: int
    """Depthwise layers that run dwtir's kernels, and all."""
    share: float | None = None
    """The part of eager PyTorch's time in depthwise convolutions."""
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Of each step of the training, by way, and of a `NUDGED` one."""
    notes: tuple[str, ...] = ()
    """Ways that were left out, or not run in a CUDA graph, and why."""
    load: float = 0.0
    """CPUs that others kept busy meanwhile, if on the CPU."""

    @property
    def ratio(self) -> float:
        """How many times faster the fastest way with our kernels is than the fastest without."""
        own, torch = (
            min(t.median for way, t in self.timings.items() if way.startswith(library))
            for library in ("dwtir", "torch")
        )
        return torch / own

    def loss_difference(self, way: str = "dwtir") -> float | None:
        """Return the most that a loss differs from PyTorch's; None without training."""
        if not self.losses:
            return None
        return max(abs(one - other) for one, other in zip(self.losses["torch"], self.losses[way], strict=True))


def cells(rows: Sequence[NetworkRow]) -> list[tuple[str, ...]]:
    """Write rows as cells, the first line their head."""
    return [_HEAD, *map(_cells, rows)]


def _cells(row: NetworkRow) -> tuple[str, ...]:
    return (
        *(row.network, row.run, str(row.batch), row.dtype, row.layout),
        *(_milliseconds(row, way) for way in WAYS),
        number(row.ratio, "x"),
        number(row.share, digits=0, scale=100),
        f"{row.replaced} of {row.layers}",
        *("-" if most is None else f"{most:.1e}" for most in map(row.loss_difference, ("dwtir", NUDGED))),
    )


def _milliseconds(row: NetworkRow, way: str) -> str:
    if (timing := row.timings.get(way)) is None:
        return "-"
    mark = "!" if row.load > LOUD else "~" if is_wide(timing) else ""
    return f"{timing.median * 1e3:.3f}{mark}"


def fields(row: NetworkRow) -> dict[str, Any]:
    """Describe a row for JSON, with the `microseconds` of each way."""
    names = ("network", "run", "batch", "dtype", "layout", "replaced", "layers", "share", "ratio", "notes")
    return {name: getattr(row, name) for name in names} | {
        "loss_difference": row.loss_difference(),
        "load": round(row.load, 2),
        "losses": {way: list(losses) for way, losses in row.losses.items()},
        "us": {way: microseconds(timing) for way, timing in row.timings.items()},
    }
