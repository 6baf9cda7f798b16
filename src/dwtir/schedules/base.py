"""What a strategy is: its parameters, their choice and their space; and how strategies are compared."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache, lru_cache
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from ..epilogue import NO_STEPS, Epilogue
from ..errors import InvalidScheduleError
from ..shape import DTYPES, LAYOUTS, Shape
from ..target import Target
from ..typed import PrimFunc, Schedule, Self
from .loops import sample
from .tiles import MAX_BLOCKS, MAX_THREADS, most_blocks, whole_phases

_MAX_GRID_Y = 65535
_GUESSES = 24
_ALIKE = 3

_Tile = TypeVar("_Tile", bound="Strategy")
Values: TypeAlias = Mapping[str, Iterable[int]]


class Strategy(ABC):
    """One way to schedule the convolution; a subclass is a frozen dataclass of its tile.

    `choose` picks the tile by hand, `space` lists what a search may try, and `apply` is the schedule itself. `apply`
    uses every field only as a factor of a split, so that a field may be an int or a random variable of the schedule:
    the same text serves both. A field that changes the structure of the loops is a string and is never drawn, or is
    used by `define`.
    """

    name: ClassVar[str]
    """Name of the strategy in `build`, in records and in tables: that of the class."""

    on_gpu: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    operations: ClassVar[tuple[str, ...]] = ("forward", "grad_data")
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    needs_mma: ClassVar[bool] = False

    device: ClassVar[str] = "a GPU"
    """What `on_gpu` and the like ask for, in messages."""

    hoist: ClassVar[bool] = False
    """Whether tests of threads and blocks leave the unrolled loops that they stand in."""

    simplify: ClassVar[bool] = False
    """Whether TVM needs simpler indices to see that a thread's results fit its registers."""

    silu_by_fma: ClassVar[bool] = True
    """Whether every second SiLU of NHWC halves is one of `cuda_functions.SILU_BY_FMA`."""

    min_blocks: int | None = None
    """Blocks that an SM shall have room for at a time, where a strategy says so: the fewer, the more registers
    has a thread, and the more loads under way."""

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<=.)(?=[A-Z])", "_", cls.__name__).lower()

    def takes_lines(self, shape: Shape) -> bool:
        """Tell whether `line_loads.LOAD` loads inputs: blocks read parts of lines, others the rest soon."""
        return False

    @classmethod
    def claims(cls, shape: Shape, target: Target) -> bool:
        """Tell whether the strategy schedules the shape on the device, in some tile."""
        return cls._is_for(shape, target)

    @classmethod
    def _is_for(cls, shape: Shape, target: Target) -> bool:
        return (
            shape.layout in cls.layouts
            and shape.operation in cls.operations
            and shape.dtype in cls.dtypes
            and cls.on_gpu == target.is_gpu
            and (target.has_mma or not cls.needs_mma)
        )

    @classmethod
    def pays(cls, shape: Shape, target: Target) -> bool:
        """Tell whether "manual" takes it, where it claims the shape, and not a later strategy."""
        return True

    @classmethod
    def choose(cls, shape: Shape, target: Target) -> Self:
        """Pick a tile by reasoning about the shape and the target. It passes `check`.

        A strategy says this or `guesses`, of which the other is made.
        """
        return cls.guesses(shape, target)[0]

    @classmethod
    def guesses(cls, shape: Shape, target: Target) -> tuple[Self, ...]:
        """List tiles that may well be the fastest, by the model if there is one. `choose` picks the first."""
        return (cls.choose(shape, target),)

    def dynamic_bytes(self, shape: Shape, epilogue: Epilogue) -> int:
        """Count the shared memory of a block that only a launch tells."""
        return 0

    def suits(self, shape: Shape, epilogue: Epilogue) -> bool:
        """Tell whether "manual" takes the tile with an epilogue too, and not a later strategy."""
        return True

    def with_room_for(self, shape: Shape, epilogue: Epilogue, target: Target) -> Self:
        """Return the tile with the registers that an epilogue needs, if it was chosen without."""
        return self

    def expected_seconds(self, shape: Shape, target: Target) -> float | None:
        """Estimate the time of all kernels of the tile; None where the strategy has no model of it."""
        return None

    @classmethod
    def space(cls, shape: Shape, target: Target) -> dict[str, tuple[int, ...]]:
        """List the values of each numeric field that are worth trying.

        Those that `choose` gives are among them, for a search to start there. Combinations may still fail `check`.
        Fields left out keep the values of `choose`.
        """
        return with_guesses(cls.usual(shape, target), cls.guesses(shape, target))

    @classmethod
    def usual(cls, shape: Shape, target: Target) -> Values:
        """List the values of each field that are worth trying whatever the guesses are."""
        return {}

    @abstractmethod
    def check(self, shape: Shape, target: Target) -> None:
        """Refuse a tile that does not fit the shape or the device.

        Raises
        ------
        InvalidScheduleError
            With the field or resource, its value and its limit.
        """

    def fits(self, shape: Shape, target: Target) -> bool:
        """Tell whether the tile passes `check`."""
        try:
            self.check(shape, target)
        except InvalidScheduleError:
            return False
        return True

    def is_promising(self, shape: Shape) -> bool:
        """Tell whether a search should try a tile that passes `check`.

        What is known to spill or to compile for many seconds is not worth its time.
        """
        return True

    def check_use(self, shape: Shape, target: Target, epilogue: Epilogue = NO_STEPS) -> None:
        """Refuse a shape or device that the strategy is not for, `check` the tile, and its room for fused steps."""
        self._require(
            self._is_for(shape, target),
            "shape and target",
            f"{shape} on {target.name}",
            f"{' or '.join(self.operations)}{self._of_dtypes()} in {' or '.join(self.layouts)} on {self.device}",
        )
        self.check(shape, target)
        shared = self.dynamic_bytes(shape, epilogue)
        self._require_most(f"shared bytes per block with epilogue {epilogue}", shared, target.most_shared_bytes)

    @classmethod
    def _of_dtypes(cls) -> str:
        return "" if set(cls.dtypes) == set(DTYPES) else f" of {' or '.join(cls.dtypes)}"

    def define(self, shape: Shape, epilogue: Epilogue) -> PrimFunc:
        """Define what `apply` transforms: the shape's operation as `compute` has it for such sizes."""
        from .. import compute

        return compute.define(self.sizes(shape), epilogue)

    def sizes(self, shape: Shape) -> Any:
        """Return the sizes by which `compute` defines the operation: of blocks, or the shape alone."""
        return shape

    @abstractmethod
    def apply(self, sch: Schedule, shape: Shape) -> None:
        """Transform the loops of `define`."""

    @classmethod
    def draw(
        cls, sch: Schedule, shape: Shape, target: Target, decisions: Mapping[str, int] | None = None
    ) -> tuple[Self, Self]:
        """Draw the fields of `space` as random variables of the schedule.

        Parameters
        ----------
        decisions : mapping of str to int, optional
            Values to start from, for some or all fields; the rest is sampled.

        Returns
        -------
        (Strategy, Strategy)
            The strategy of random variables, for `apply`, and the one of the values drawn, for `check`.
        """
        chosen = cls.choose(shape, target).parameters
        variables, values = dict(chosen), dict(chosen)
        for field, candidates in cls.space(shape, target).items():
            decision = candidates.index(decisions[field]) if decisions and field in decisions else None
            variables[field] = sample(sch, candidates, decision)
            values[field] = int(sch.get(variables[field]))
        return cls(**variables), cls(**values)

    @property
    def parameters(self) -> dict[str, Any]:
        """The tile as a mapping of field to value."""
        return {name: getattr(self, name) for name in _kinds(type(self))}

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, object]) -> Self:
        """Build the strategy from outside values: its fields, those that have no default at least, ints positive."""
        kinds, needed = _kinds(cls), {field.name for field in fields(cls) if field.default is MISSING}  # type: ignore[arg-type]
        if not needed <= set(parameters) <= set(kinds):
            raise InvalidScheduleError(f"{cls.name} has the parameters {sorted(kinds)}, got {sorted(parameters)}")
        for name, value in parameters.items():
            wanted = kinds[name]
            if type(value) is not wanted or (wanted is int and not 0 < value < 2**31):  # type: ignore[operator]
                raise InvalidScheduleError(
                    f"{cls.name}: {name} must be a {'positive int' if wanted is int else 'string'}, got {value!r}"
                )
        return cls(**parameters)

    def __str__(self) -> str:
        inside = ", ".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.name}({inside})"

    def _require(self, condition: bool, what: str, got: object, allowed: str) -> None:
        if not condition:
            raise InvalidScheduleError(f"{self}: {what} must be {allowed}, got {got}")

    def _require_most(self, what: str, value: int, most: int, where: str = "") -> None:
        self._require(value <= most, what, value, f"at most {most}{where}")

    def _require_fields(self, **most: int) -> None:
        for field, value in most.items():
            self._require_most(field, getattr(self, field), value)

    def _require_in(self, field: str, allowed: tuple[object, ...]) -> None:
        value = getattr(self, field)
        self._require(value in allowed, field, value, f"one of {allowed}")

    def _require_whole_phases(self, shape: Shape, rows: int, cols: int, window: str) -> None:
        for axis, (name, size) in enumerate((("rows", rows), ("cols", cols))):
            fitted = whole_phases(shape, axis, size, window)
            self._require(size == fitted, name, size, f"in whole phases of the stride: {fitted}")

    def _require_launch(self, target: Target, *, threads: int, shared_bytes: int = 0, grid_y: int = 1) -> None:
        blocks = self.min_blocks or 1
        self._require(
            blocks == 1 or blocks <= most_blocks(threads),
            "min_blocks",
            blocks,
            f"at most {MAX_BLOCKS}, of at most {MAX_THREADS} threads together",
        )
        where = f" on {target.name}"
        self._require_most("threads per block", threads, target.max_threads_per_block, where)
        self._require_most("shared bytes per block", shared_bytes, target.shared_bytes_per_block, where)
        self._require_most("blocks in y", grid_y, _MAX_GRID_Y)


@cache
def _kinds(strategy: type[Strategy]) -> dict[str, object]:
    return {field.name: field.type for field in fields(strategy)}  # type: ignore[arg-type]  # subclasses are dataclasses


@lru_cache(maxsize=256)
def _chosen(kind: type[Strategy], shape: Shape, target: Target) -> Strategy:
    return kind.choose(shape, target)


def expected(kind: type[Strategy], shape: Shape, target: Target) -> float:
    """Estimate the time of what a strategy with a model chooses."""
    seconds = _chosen(kind, shape, target).expected_seconds(shape, target)
    assert seconds is not None
    return seconds


def is_beaten(seconds: float, kinds: Iterable[type[Strategy]], shape: Shape, target: Target) -> bool:
    """Tell whether one of the strategies that claim the shape should take no longer; the first are asked first."""
    return any(kind.claims(shape, target) and expected(kind, shape, target) <= seconds for kind in kinds)


def paying(kinds: Iterable[type[Strategy]], shape: Shape, target: Target) -> Iterator[Strategy]:
    """Choose the tile of each strategy that claims the shape and pays, in their order."""
    return (_chosen(kind, shape, target) for kind in kinds if kind.claims(shape, target) and kind.pays(shape, target))


def by_time(tiles: Iterable[_Tile], shape: Shape, target: Target) -> tuple[_Tile, ...]:
    """Put tiles of a strategy with a model in order, the fastest first."""
    return tuple(sorted(tiles, key=lambda tile: cast(float, tile.expected_seconds(shape, target))))


def varied(tiles: Iterable[_Tile], likeness: Callable[[_Tile], object]) -> tuple[_Tile, ...]:
    """Take the first tiles for guesses, but no more than a few that are alike."""
    found: list[_Tile] = []
    alike: Counter[object] = Counter()
    for tile in tiles:
        alike[likeness(tile)] += 1
        if alike[likeness(tile)] <= _ALIKE:
            found.append(tile)
        if len(found) == _GUESSES:
            break
    return tuple(found)


def with_guesses(values: Values, tiles: Iterable[Strategy]) -> dict[str, tuple[int, ...]]:
    """Add the fields of some tiles to the values that are worth trying."""
    found = [tile.parameters for tile in tiles]
    return {
        field: tuple(sorted({*usual, *(parameters[field] for parameters in found)})) for field, usual in values.items()
    }
