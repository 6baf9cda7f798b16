"""The layers that the command's words name, and the networks that have them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from .. import suite
from ..epilogue import Epilogue
from ..errors import InvalidShapeError
from ..tune import Task, tasks
from ..tune.tasks import Forms


@dataclass(frozen=True)
class Layer:
    """A layer to measure, and the named networks that have it."""

    task: Task
    networks: tuple[str, ...] = ()


def named(
    words: Sequence[str], forms: Forms, *, operations: Sequence[str] = ("forward",), epilogue: str | None = None
) -> list[Layer]:
    """Find layers, each once.

    Words are ``suite``, all its networks; ``seeds``, the articles' rows; ``network`` and names; or
    shapes. Dtypes and layouts are of networks and of the articles' rows; batches and operations, the
    convolution and its gradients, of networks only.
    """
    kind, *names = words
    if kind in ("suite", "seeds") and names:
        raise InvalidShapeError(f"{kind} stands alone, got {' '.join(names)} after it")
    if kind == "network" and not names:
        raise InvalidShapeError("network is followed by a name, got none")
    if kind not in ("suite", "network") and set(operations) != {"forward"}:
        raise InvalidShapeError(
            f"operations are chosen for suite and network, and a shape ends in _dgrad or _wgrad; "
            f"got {', '.join(operations)} for {kind}"
        )
    if kind == "seeds":
        return [Layer(replace(task, epilogue=Epilogue.of(epilogue))) for task in tasks.from_suite("seeds", forms)]
    if kind not in ("suite", "network"):
        return [_checked(Layer(task)) for task in tasks.from_shapes(words, epilogue)]
    found: dict[str, Layer] = {}
    for name in suite.networks() if kind == "suite" else names:
        for operation, task in product(operations, tasks.from_network(name, forms, epilogue)):
            task = replace(task, shape=replace(task.shape, operation=operation))
            found[str(task)] = _checked(Layer(task, (*found.get(str(task), Layer(task)).networks, name)))
    return list(found.values())


def _checked(layer: Layer) -> Layer:
    layer.task.epilogue.check_for(layer.task.shape)
    return layer
