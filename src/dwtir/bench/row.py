"""One measured layer: its times, the ratios, and what is doubtful about it."""

from dataclasses import dataclass
from typing import Any

from ..epilogue import Epilogue
from ..kernel import Timing
from ..shape import LAYOUTS, OPERATIONS, Shape
from ..target import Target
from ..tune.outcome import floor_seconds
from .machine import LOUD

WIDE = 0.1
"""Spread, p20 to p80 over the median, above which a time is flagged."""


def is_wide(timing: Timing) -> bool:
    """Tell whether measurements differ too much for their median to say much."""
    return timing.p80 - timing.p20 > WIDE * timing.median


@dataclass(frozen=True)
class Row:
    """One layer, measured."""

    shape: Shape
    epilogue: Epilogue
    target: Target
    """What was computed, and where; with the device's rates, where they are known."""
    cold: bool
    """Whether the inputs came from memory."""
    timings: dict[str, Timing]
    """Seconds by contender; ``dwtir`` is ours, the others have their layout in their names."""
    wrong: tuple[str, ...] = ()
    """Peers that were left out, and why."""
    networks: tuple[str, ...] = ()
    """The networks that have the layer, of those that were asked for."""
    load: float = 0.0
    """CPUs that others kept busy meanwhile, if on the CPU."""

    def __str__(self) -> str:
        return f"{self.shape}{self._steps}"

    @property
    def brief(self) -> str:
        return f"{self.shape.brief}{self._steps}"

    @property
    def short(self) -> str:
        """The layer without its batch, layout and type."""
        shape = self.shape
        rows, columns = shape.kernel
        numbers = {"s": max(shape.stride), "d": max(shape.dilation), "m": shape.channel_multiplier}
        parts = [f"{shape.in_channels}x{shape.height}x{shape.width} k{rows}x{columns}"]
        parts += [f"{letter}{number}" for letter, number in numbers.items() if number > 1]
        return " ".join(filter(None, [*parts, OPERATIONS[shape.operation], self._steps]))

    @property
    def _steps(self) -> str:
        return f"+{self.epilogue}" if self.epilogue.steps else ""

    @property
    def own(self) -> float:
        """Our median, in seconds."""
        return self.timings["dwtir"].median

    @property
    def least_bytes(self) -> int:
        """Bytes that must cross memory: every tensor once."""
        return self.shape.least_bytes + self.epilogue.least_bytes(self.shape)

    @property
    def floor(self) -> float | None:
        """The least time that memory and arithmetic allow.

        None where rates are not known, and for data that need not come from memory.
        """
        return floor_seconds(self.shape, self.target, self.epilogue) if self.cold else None

    def best(self, layout: str | None = None) -> tuple[str, float] | None:
        """Return the fastest peer, of one layout or of any, and its median in seconds."""
        found = [
            (name, timing.median)
            for name, timing in self.timings.items()
            if name != "dwtir" and layout in (None, _layout(name))
        ]
        return min(found, key=lambda peer: peer[::-1], default=None)

    def ratio(self, layout: str | None = None) -> float | None:
        """Return how many times faster we are than the fastest peer."""
        best = self.best(layout)
        return None if best is None else best[1] / self.own

    @property
    def wide(self) -> list[str]:
        """Contenders whose spread is too wide."""
        return [name for name, timing in self.timings.items() if is_wide(timing)]

    @property
    def disturbed(self) -> bool:
        """Whether others used so much of the CPU that its times say little."""
        return self.load > LOUD

    @property
    def doubtful(self) -> bool:
        return self.disturbed or bool(self.wide)

    @property
    def doubt(self) -> tuple[bool, float]:
        """What measurements are compared by: disturbed, and the widest spread."""
        return self.disturbed, max((t.p80 - t.p20) / t.median for t in self.timings.values())

    def facts(self) -> dict[str, Any]:
        """Return all of it as flat values, times in microseconds."""
        found: dict[str, Any] = {
            "shape": str(self.shape),
            "epilogue": str(self.epilogue),
            "device": self.target.name,
            "cold": self.cold,
            "networks": " ".join(self.networks),
            "floor_us": None if self.floor is None else self.floor * 1e6,
            "ratio_same_layout": self.ratio(self.shape.layout),
            "ratio_any_layout": self.ratio(),
            "wide": ", ".join(self.wide),
            "load": self.load,
            "left_out": "; ".join(self.wrong),
        }
        for name, timing in self.timings.items():
            for part in ("median", "p20", "p80"):
                found[f"{name} {part}_us"] = getattr(timing, part) * 1e6
        return found


def _layout(name: str) -> str:
    (layout,) = set(LAYOUTS) & set(name.split())
    return layout
