"""What `convert` did to each layer, as objects and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..tables import aligned

_HEAD: tuple[str, ...] = ("layer", "shape", "before us", "after us", "")


@dataclass(frozen=True)
class ConvertedLayer:
    """A depthwise layer on an image of one shape, and what became of it."""

    name: str
    """The convolution's name in the model."""
    shape: str
    """Text form of its `dwtir.DepthwiseConv2dShape`; "" if it never ran or has none."""
    replaced: bool
    """Whether calls of this shape run dwtir's kernel."""
    note: str
    """Why not; or the modules that are part of the kernel."""
    before: float | None = None
    after: float | None = None
    """Median seconds of the original modules and of the kernel, where they were measured."""


@dataclass(frozen=True)
class Report:
    """What `convert` did: ``print(report)`` is a table."""

    layers: Sequence[ConvertedLayer]

    @property
    def replaced(self) -> list[str]:
        """The names of the layers that run dwtir's kernels for at least one shape."""
        return list(dict.fromkeys(layer.name for layer in self.layers if layer.replaced))

    def __str__(self) -> str:
        rows = [_HEAD]
        for layer in self.layers:
            times = ("-" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in (layer.before, layer.after))
            replaced = f"replaced, with {layer.note}" if layer.note else "replaced"
            rows.append((layer.name, layer.shape or "-", *times, replaced if layer.replaced else f"left: {layer.note}"))
        total = f"{len(self.replaced)} of {len({layer.name for layer in self.layers})} replaced"
        return "\n".join([*aligned(rows), total])
