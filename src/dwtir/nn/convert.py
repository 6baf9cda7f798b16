"""Takes a network's depthwise layers to dwtir's kernels and back, or for training to `DepthwiseConv2d`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..errors import ArgumentError, InvalidScheduleError, InvalidShapeError
from ..tables import aligned, number
from .chain import Chain, is_depthwise, is_patched, require_module, steps_of, why_not
from .converted import ConvertedForward, FoldedForward, form_of
from .measure import medians
from .module import DepthwiseConv2d
from .observe import Image, Run, observe

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
            times = (number(seconds, digits=1, scale=1e6) for seconds in (layer.before, layer.after))
            replaced = f"replaced, with {layer.note}" if layer.note else "replaced"
            rows.append((layer.name, layer.shape or "-", *times, replaced if layer.replaced else f"left: {layer.note}"))
        total = f"{len(self.replaced)} of {len({layer.name for layer in self.layers})} replaced"
        return "\n".join([*aligned(rows), total])


def convert(
    model: torch.nn.Module, example_input: Any, *, fuse: bool = True, when: str = "faster", graphs: bool = False
) -> Report:
    """Let the depthwise layers of a network run dwtir's kernels, for inference.

    The model is run once, in evaluation mode, to see what its layers are called with. A layer is replaced for the
    shapes, types, memory formats and kind of device that it is seen with, whatever the batch size, if its kernel is
    faster. Anything else, as calls that want a gradient, runs the original modules, with one warning a layer. Training
    is as it was: for that there is `replace`.

    Modules keep their places and parameters. A replaced convolution gets a ``forward`` of its
    own, and so do the modules that became part of its kernel, which then pass on what they
    are given. Kernels for other batch sizes are built when they are met.

    Parameters
    ----------
    model : torch.nn.Module
        Is changed; `restore` takes it back.
    example_input : torch.Tensor or tuple
        What the model is called with; a tuple is its positional arguments. Under autocast
        the layers are seen with its type.
    fuse : bool
        Whether a batch normalisation and an activation become part of the kernel before them, if nobody else uses what
        is in between when the example is run. Their values are computed when the model's change, as tensors' versions
        show: not after a write through ``.data``, nor in the replay of a CUDA graph captured before.
    when : {"faster", "always"}
        Which kernels are used: those that, measured alone on random images in turns, are
        faster than the original modules, or all. In a network on the CPU, threads of TVM and
        of torch get in each other's way, so there the whole is worth a look.
    graphs : bool
        Whether layers on a GPU are measured in CUDA graphs, instead of by calls from Python.

    Returns
    -------
    Report
        What became of each layer; ``print`` shows it as a table.

    Raises
    ------
    ArgumentError
        If the model is no module or `when` is unknown.

    Examples
    --------
    >>> import torch, dwtir.nn
    >>> conv = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    >>> model = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    >>> report = dwtir.nn.convert(model, torch.zeros(1, 8, 9, 9), when="always")
    >>> report.layers[0].note
    '1, 2'
    """
    require_module(model)
    if when not in ("faster", "always"):
        raise ArgumentError(f"when must be 'faster' or 'always', got {when!r}")
    measure = partial(medians, graphs=graphs) if when == "faster" else None
    restore(model)
    names = {module: name for name, module in model.named_modules()}
    convs = list(filter(is_depthwise, names))
    untouched = {module for module in names if not is_patched(module)}
    followers = [module for module in names if module in untouched and steps_of(module)]
    inside = {inner for module in followers for inner in module.modules() if inner is not module}
    reasons = {conv: why_not(conv) for conv in convs}
    watched = [conv for conv in convs if reasons[conv] is None] + [f for f in followers if f not in inside]
    runs = observe(model, example_input, watched)
    layers: list[ConvertedLayer] = []
    forwards: list[ConvertedForward] = []
    for conv in sorted(convs, key=[*runs, *convs].index):
        if conv not in runs:
            layers.append(ConvertedLayer(names[conv], "", False, reasons[conv] or "the example does not run it"))
            continue
        chain = Chain(conv, _followers(conv, runs) if fuse and conv in untouched else ())
        forward = ConvertedForward(names[conv], chain)
        note = ", ".join(names[follower] for follower in chain.followers)
        layers += [_decide(forward, image, note, measure) for image in dict.fromkeys(run.image for run in runs[conv])]
        if forward.forms:
            forwards.append(forward)
    for forward in forwards:
        forward.chain.conv.forward = forward
        for follower in forward.chain.followers:
            follower.forward = FoldedForward(forward.chain, follower)
    return Report(tuple(layers))


def restore(model: torch.nn.Module) -> None:
    """Take back what `convert` did to a model."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, ConvertedForward | FoldedForward):  # of a chain, all or none
            for part in (forward.chain.conv, *forward.chain.followers):
                part.__dict__.pop("forward", None)


def _followers(conv: Any, runs: Mapping[Any, Sequence[Run]]) -> tuple[Any, ...]:
    found: list[Any] = []
    last = conv
    while len(runs.get(last, ())) == 1:
        (run,) = runs[last]
        follower = run.users[0] if len(set(run.users)) == 1 else None
        steps = None if follower is None else steps_of(follower)
        if steps is None or len(runs[follower]) != 1 or (found and steps[0] == "scale_shift"):
            break
        found.append(follower)
        if steps != ("scale_shift",):
            break
        last = follower
    return tuple(found)


def _decide(
    forward: ConvertedForward, image: Image, note: str, measure: Callable[..., list[float]] | None
) -> ConvertedLayer:
    with image.context(), torch.no_grad():
        example = image.random()
        try:
            shape = str(forward.shape(example))
            forward.run(example)
        except (ArgumentError, InvalidShapeError, InvalidScheduleError) as error:
            return ConvertedLayer(forward.name, "", False, str(error))
        before = after = None
        if measure is not None:
            calls = [partial(forward.chain.original, example), partial(forward.run, example)]
            before, after = measure(calls, image.device)
            if after >= before:
                return ConvertedLayer(forward.name, shape, False, "slower", before, after)
        forward.forms.add(form_of(example))
    return ConvertedLayer(forward.name, shape, True, note, before, after)


def replace(model: torch.nn.Module) -> int:
    """Let the depthwise convolutions of a network be `DepthwiseConv2d`, with their gradients.

    Parameters stay the same objects, which an optimizer may have already. Subclasses of
    ``torch.nn.Conv2d``, and those with hooks or a ``forward`` of their own, are left. For
    channels-last images, ``model.to(memory_format=torch.channels_last)`` then lays out the weights.

    Parameters
    ----------
    model : torch.nn.Module
        Is changed: the modules inside of it, not itself.

    Returns
    -------
    int
        How many were replaced.

    Raises
    ------
    ArgumentError
        If the model is no module.

    Examples
    --------
    >>> import torch, dwtir.nn
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.ReLU())
    >>> dwtir.nn.replace(model)
    1
    """
    require_module(model)
    replaced: dict[Any, DepthwiseConv2d] = {}
    for parent in list(model.modules()):
        for name, conv in list(parent._modules.items()):  # each name, also of the same one
            if type(conv) is torch.nn.Conv2d and is_depthwise(conv) and not is_patched(conv) and _is_plain(conv):
                if conv not in replaced:
                    replaced[conv] = _like(conv)
                setattr(parent, name, replaced[conv])
    return len(replaced)


def _is_plain(conv: Any) -> bool:
    return set(conv._parameters) == {"weight", "bias"} and not (conv._buffers or conv._modules)


def _like(conv: Any) -> DepthwiseConv2d:
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
    same = {name: getattr(conv, name) for name in names}
    made = DepthwiseConv2d(**same, bias=conv.bias is not None, device="meta")
    made.weight, made.bias = conv.weight, conv.bias
    made.train(conv.training)
    return made
