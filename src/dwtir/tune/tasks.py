"""The layers to tune: named by their text form, a file, a suite, a network or a model."""

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from .. import suite
from ..epilogue import NO_STEPS, Epilogue, EpilogueLike
from ..errors import ArgumentError, DwtirError, InvalidEpilogueError, InvalidShapeError, RecordError, ToolchainError
from ..files import read_json
from ..shape import Shape
from .outcome import Task

_MAX_FILE_BYTES = 1 << 20
LIBRARIES = ("timm", "torchvision")
"""Where networks are from that the suite does not have."""


class Forms(NamedTuple):
    """What layers of networks are wanted in: every combination of these."""

    batches: Sequence[int] = (1,)
    dtypes: Sequence[str] = ("float32",)
    layouts: Sequence[str] = ("NCHW",)


ONE_FORM = Forms()


def by_use(tasks: Iterable[Task]) -> list[Task]:
    """Sort by the operations in all runs of the layer, most first."""
    return sorted(tasks, key=lambda task: task.count * task.shape.flop, reverse=True)


def for_operations(tasks: Iterable[Task], operations: Iterable[str]) -> list[Task]:
    """Return the layers' tasks for each of the operations; gradients have no epilogue."""
    return _distinct(
        Task(
            replace(task.shape, operation=operation), task.epilogue if operation == "forward" else NO_STEPS, task.count
        )
        for operation, task in product(operations, tasks)
    )


def from_shapes(texts: Iterable[str], epilogue: EpilogueLike = None) -> list[Task]:
    """Return the tasks of layers given in the text form of `DepthwiseConv2dShape`."""
    steps = Epilogue.of(epilogue)
    return _distinct(Task(Shape.parse(text), steps) for text in texts)


def from_file(path: str | Path, epilogue: EpilogueLike = None) -> list[Task]:
    """Return the tasks that a JSON file lists.

    Parameters
    ----------
    path : path
        A list of at most 1 MiB. An entry is the text form of a shape, or an object with the
        parameters of `DepthwiseConv2dShape` and perhaps ``layers``, their number in the
        network, and ``epilogue``, a text or a list of steps.
    epilogue : epilogue, optional
        For the entries that have none of their own.

    Raises
    ------
    RecordError
        If the file cannot be read or is not a list.
    InvalidShapeError, InvalidEpilogueError
        If an entry is no layer; the message has the file and the index of the entry, from 0.
    """
    steps = Epilogue.of(epilogue)
    try:
        entries = read_json(Path(path), _MAX_FILE_BYTES)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    if not isinstance(entries, list):
        raise RecordError(f"{path}: must be a JSON list of layers, got {type(entries).__name__}")
    tasks = []
    for index, entry in enumerate(entries):
        try:
            tasks.append(_entry(entry, steps))
        except DwtirError as error:
            raise type(error)(f"{path}: entry {index}: {error}") from error
    return _distinct(tasks)


def _entry(entry: Any, epilogue: Epilogue) -> Task:
    if not isinstance(entry, dict):
        return Task(Shape.of(entry), epilogue)
    parameters = dict(entry)
    count = parameters.pop("layers", 1)
    steps = parameters.pop("epilogue", epilogue)
    if type(count) is not int or count < 1:
        raise InvalidShapeError(f"layers must be an integer >= 1, got {count!r}")
    if isinstance(steps, dict):
        raise InvalidEpilogueError(f"epilogue must be a text or a list of steps, got {steps!r}")
    return Task(Shape.of(parameters), Epilogue.of(steps), count)


def from_suite(name: str, forms: Forms, epilogue: EpilogueLike = None) -> list[Task]:
    """Return the tasks of a part of the suite.

    Parameters
    ----------
    name : {"seeds", "all"}
        The articles' rows, which have a batch size of their own, or all networks.
    """
    if name == "seeds":
        return _distinct(
            Task(replace(row, dtype=dtype, layout=layout), Epilogue.of(epilogue))
            for dtype, layout in product(forms.dtypes, forms.layouts)
            for row, _ in suite.seed_rows()
        )
    if name == "all":
        return _distinct(task for network in suite.networks() for task in from_network(network, forms, epilogue))
    raise InvalidShapeError(f"the suite has no part {name!r}; allowed are seeds, all")


def from_network(name: str, forms: Forms, epilogue: EpilogueLike = None) -> list[Task]:
    """Return the depthwise layers of a network.

    Parameters
    ----------
    name : str
        A network of the suite, with or without the library in front, else ``timm/NAME``,
        ``torchvision/NAME`` or ``NAME``, an image classifier of an installed library, which is
        built without weights and run once on an image of its size.

    Raises
    ------
    InvalidShapeError
        If there is no such network, or its model cannot be run.
    ToolchainError
        If the suite has no such network, and no library that might is installed.
    """
    steps = Epilogue.of(epilogue)
    if any(name in (full, full.rpartition("/")[2]) for full in suite.networks()):
        return _distinct(
            Task(layer.shape, steps, layer.count)
            for batch, dtype, layout in product(*forms)
            for layer in suite.network(name, batch=batch, dtype=dtype, layout=layout)
        )
    return _tasks(_trace_by_name(*_find(name)), forms, steps)


def from_model(model: Any, example_input: Any, forms: Forms = ONE_FORM, epilogue: EpilogueLike = None) -> list[Task]:
    """Return the depthwise layers that a model runs.

    Parameters
    ----------
    model : torch.nn.Module
        Is run once in evaluation mode, without gradients. A layer counts as often as it is
        run; one whose padding is not zeros is left out.
    example_input : torch.Tensor or tuple
        What the model is called with; a tuple is its positional arguments. Its batch and dtype do not matter.
    """
    steps = Epilogue.of(epilogue)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    return _tasks(_trace(model, example_input), forms, steps)


def depthwise_parameters(conv: Any, height: int, width: int) -> dict[str, Any] | None:
    """Return the parameters of a ``torch.nn.Conv2d`` on an image, besides batch, dtype and layout.

    None if the layer is not depthwise, has one channel, or its padding is not zeros.
    """
    if not conv.groups == conv.in_channels > 1 or conv.padding_mode != "zeros":
        return None
    # timm's layers that pad as TensorFlow does. torch's "same" is for stride 1: no difference.
    pads_itself = type(conv).__name__.startswith("Conv2dSame") or getattr(conv, "same_pad", False)
    return {
        "in_channels": conv.in_channels,
        "height": height,
        "width": width,
        "kernel": conv.kernel_size,
        "stride": conv.stride,
        "padding": "SAME" if pads_itself else conv.padding,
        "dilation": conv.dilation,
        "channel_multiplier": conv.out_channels // conv.groups,
    }


def _distinct(tasks: Iterable[Task]) -> list[Task]:
    counts: Counter[tuple[Shape, Epilogue]] = Counter()
    for task in tasks:
        counts[task.shape, task.epilogue] += task.count
    return [Task(shape, epilogue, count) for (shape, epilogue), count in counts.items()]


def _tasks(layers: Iterable[dict[str, Any]], forms: Forms, epilogue: Epilogue) -> list[Task]:
    return _distinct(
        Task(Shape(**layer, batch=batch, dtype=dtype, layout=layout), epilogue)
        for batch, dtype, layout in product(*forms)
        for layer in layers
    )


def _find(name: str) -> tuple[ModuleType, str]:
    prefix, _, model_name = name.rpartition("/")
    candidates = LIBRARIES if not prefix else (prefix,) if prefix in LIBRARIES else ()
    installed, missing = [], []
    for candidate in candidates:
        try:
            library = import_module(candidate)
        except ImportError:
            missing.append(candidate)
            continue
        if has_model(library, model_name):
            return library, model_name
        installed.append(candidate)
    known = f"the suite has no network {name!r}; it has {', '.join(suite.networks())}"
    if candidates and not installed:
        raise ToolchainError(f"{known}; for others {' or '.join(missing)} must be installed")
    searched = "".join(f"; the installed {library} has none of that name" for library in installed)
    absent = "".join(f"; {library} is not installed" for library in missing)
    raise InvalidShapeError(f"{known}; others are timm/NAME or torchvision/NAME{searched}{absent}")


def has_model(library: Any, name: str) -> bool:
    """Tell whether an installed timm or torchvision has an image classifier of a name."""
    if library.__name__ == "timm":
        return bool(library.is_model(name))
    return name in library.models.list_models(module=library.models)


def build_model(library: Any, name: str) -> tuple[Any, tuple[int, ...]]:
    """Return a model without weights, and the channels, height and width of its image."""
    if library.__name__ == "timm":
        model = library.create_model(name, pretrained=False)
        return model, tuple(model.pretrained_cfg.get("input_size", (3, 224, 224)))
    model = library.models.get_model(name, weights=None)
    crop = getattr(library.models.get_model_weights(name).DEFAULT.transforms(), "crop_size", [224])
    return model, (3, crop[0], crop[-1])


def _trace_by_name(library: ModuleType, name: str) -> list[dict[str, Any]]:
    torch = sys.modules["torch"]
    for device in ("meta", "cpu"):
        try:
            with torch.device(device):
                model, size = build_model(library, name)
                return _trace(model, torch.zeros(1, *size))
        except Exception as error:  # whatever the model's own code raises
            failure = error
    raise InvalidShapeError(f"cannot run {library.__name__}/{name}: {failure!r}") from failure


def _trace(model: Any, example_input: Any) -> list[dict[str, Any]]:
    torch = sys.modules["torch"]
    layers: list[dict[str, Any]] = []

    def note(conv: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        image = args[0] if args else named["input"]
        layer = depthwise_parameters(conv, image.shape[-2], image.shape[-1])
        if layer is not None:
            layers.append(layer)

    with torch.no_grad(), ExitStack() as restored:
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                restored.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
            if module.training:
                restored.callback(setattr, module, "training", True)
        model.eval()
        model(*example_input) if isinstance(example_input, tuple) else model(example_input)
    return layers
