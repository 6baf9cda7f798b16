"""The pointwise steps that can be fused behind the convolution."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from .errors import InvalidEpilogueError
from .shape import Shape

STEPS: dict[str, tuple[str, ...]] = {
    "bias": ("bias",),
    "scale_shift": ("scale", "shift"),
    "residual": ("residual",),
    "relu": (),
    "relu6": (),
    "hardswish": (),
    "silu": (),
    "gelu": (),
}
"""The steps, and the tensors each of them takes.

``bias``, ``scale`` and ``shift`` hold one value an output channel, ``residual`` has the shape of the output. All have
the dtype of the convolution and are widened to float32, in which the epilogue is computed; the result is rounded once.
``gelu`` is the exact one, by erf.
"""


@dataclass(frozen=True)
class Epilogue:
    """Steps applied to the convolution's float32 sums, in the order given.

    Raises
    ------
    InvalidEpilogueError
        If a step is unknown, or one that takes a tensor is repeated.

    Examples
    --------
    >>> Epilogue.of("scale_shift+relu").steps
    ('scale_shift', 'relu')
    """

    steps: tuple[str, ...] = ()
    """Names from `STEPS`. A step that takes a tensor occurs at most once."""

    def __post_init__(self) -> None:
        for step in self.steps:
            if step not in STEPS:
                raise InvalidEpilogueError(f"unknown epilogue step {step!r}; allowed are {', '.join(STEPS)}")
            if STEPS[step] and self.steps.count(step) > 1:
                raise InvalidEpilogueError(
                    f"the epilogue step {step!r} takes a tensor and may occur once, got {self.steps.count(step)} times"
                )

    @classmethod
    def of(cls, value: "EpilogueLike") -> "Epilogue":
        """Take an epilogue as an object, ``"bias+relu"``, a sequence of names, or None."""
        if isinstance(value, Epilogue):
            return value
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(tuple(part.strip() for part in value.split("+")) if value.strip() else ())
        if isinstance(value, Iterable):
            steps = tuple(value)
            if all(isinstance(step, str) for step in steps):
                return cls(steps)
        raise InvalidEpilogueError(f"an epilogue is None, 'bias+relu' or a sequence of step names, got {value!r}")

    def __str__(self) -> str:
        return "+".join(self.steps) or "none"

    @property
    def has_exponential(self) -> bool:
        """Whether an exponential is taken of results."""
        return not {"silu", "gelu"}.isdisjoint(self.steps)

    @property
    def waits(self) -> bool:
        """Whether results wait in registers, for a residual or an exponential."""
        return self.has_exponential or "residual" in self.steps

    def operands(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        """Name and shape of each tensor that the steps take, in the order of use."""
        return {
            name: shape.out_shape if name == "residual" else (shape.out_channels,)
            for step in self.steps
            for name in STEPS[step]
        }

    def check_for(self, shape: Shape) -> None:
        """Refuse steps behind a gradient."""
        if self.steps and shape.operation != "forward":
            raise InvalidEpilogueError(
                f"only the forward convolution has an epilogue, got {self} for {shape.operation}"
            )

    def least_bytes(self, shape: Shape) -> int:
        """Bytes of the extra tensors, each read once."""
        return shape.itemsize * sum(map(prod, self.operands(shape).values()))


EpilogueLike: TypeAlias = Epilogue | str | Iterable[str] | None
"""What functions of dwtir take as an epilogue."""


NO_STEPS = Epilogue()
