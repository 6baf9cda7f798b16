"""One way through: shape, computation, schedule, code, kernel."""

import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from . import cache, cuda, database, entry, schedules, versions
from .epilogue import Epilogue, EpilogueLike
from .errors import InvalidScheduleError, NotTunedError, RecordError
from .kernel import Kernel, KernelInfo, from_library
from .resources import Resources, launch, with_cubin_resources
from .schedules import Strategy
from .shape import Shape, ShapeLike
from .target import Target, TargetLike, resolve
from .typed import Schedule
from .workspace import Workspace, hoist

if TYPE_CHECKING:
    from .compiler import Compiled


class NotTunedWarning(UserWarning):
    """A tuned kernel was asked for and there is no record; the manual one was built."""


def build(
    shape: ShapeLike,
    schedule: str | Strategy = "manual",
    *,
    epilogue: EpilogueLike = None,
    target: TargetLike = None,
    on_miss: str = "warn",
) -> Kernel:
    """Build a kernel for a depthwise convolution.

    Parameters
    ----------
    shape : DepthwiseConv2dShape, str or mapping
        What is computed; see `DepthwiseConv2dShape.of`.
    schedule : str or Strategy
        ``"manual"`` chooses strategy and tile by reasoning, ``"tuned"`` takes them from the tuning database. Otherwise
        the name of an article's step or of a strategy, or a strategy object.
    epilogue : Epilogue, str, sequence of str or None
        Steps fused behind the convolution; see `Epilogue`.
    target : Target, str, mapping, tvm.target.Target or None
        The device; None is the GPU that is present, else the CPU. See `target.resolve`.
    on_miss : {"warn", "error"}
        What ``schedule="tuned"`` does without a record: build the manual schedule with a `NotTunedWarning`, or raise.

    Returns
    -------
    Kernel

    Raises
    ------
    InvalidShapeError, InvalidEpilogueError, InvalidTargetError, InvalidScheduleError
        If an argument is not valid, before any compiler sees it.
    NotTunedError
        With ``on_miss="error"``, if there is no record.
    ToolchainError
        If a compiler or runtime that the target needs is missing.

    Examples
    --------
    >>> import dwtir, numpy as np
    >>> kernel = dwtir.build("1x8x16x16_k3_psame", target="cpu")
    >>> kernel(np.ones((1, 8, 16, 16), "float32"), np.ones((8, 1, 3, 3), "float32"))[0, 0, 0, 0]
    np.float32(4.0)
    """
    checked = Shape.of(shape)
    steps = Epilogue.of(epilogue)
    steps.check_for(checked)
    device = resolve(target)
    strategy, provenance = _find_strategy(checked, steps, schedule, device, on_miss)
    strategy.check_use(checked, device, steps)
    order = _Order(checked, steps, device, strategy, provenance)
    if device.kind == "opencl":
        return _build_opencl(order)

    name = cache.key(shape=str(checked), epilogue=str(steps), target=asdict(device), strategy=str(strategy))
    is_kept = device.kind == "cpu" or cuda.load_runtime().usable  # what runs here
    cached = _cached(name, provenance) if is_kept else None
    if cached is not None:
        return cached

    kernel, compiled = _compile(order, for_torch=True)
    if is_kept:
        cache.store(name, compiled.library, kernel.info.to_json())
    return kernel


def compile_kernel(shape: Shape, epilogue: Epilogue, target: Target, strategy: Strategy) -> Kernel:
    """Compile one candidate for CUDA or the CPU, past the cache: most are never used again."""
    strategy.check_use(shape, target, epilogue)
    return _compile(_Order(shape, epilogue, target, strategy, {"chosen": "candidate"}))[0]


class _Order(NamedTuple):
    """What is to be built: the first fields of `KernelInfo`."""

    shape: Shape
    epilogue: Epilogue
    target: Target
    strategy: Strategy
    provenance: dict[str, str]

    def describe(self, sch: Schedule, source: str, resources: Resources, workspace: Workspace) -> KernelInfo:
        from tvm.ir import save_json

        return KernelInfo(*self, sch.mod["main"].script(), save_json(sch.trace.as_json()), source, resources, workspace)


def _compile(order: _Order, *, for_torch: bool = False) -> "tuple[Kernel, Compiled]":
    from .compiler import compile_module

    shape, epilogue, target, strategy, _ = order
    sch = schedule_for(shape, epilogue, strategy)
    mod, workspace = hoist(sch.mod) if target.is_gpu else (sch.mod, ())
    if for_torch:
        mod = entry.add(mod, shape)
    compiled = compile_module(
        *(mod, target, strategy.min_blocks),
        hoist=strategy.hoist,
        simplify=strategy.simplify,
        by_fma=shape.layout == "NHWC" and strategy.silu_by_fma,
        by_lines=strategy.takes_lines(shape),
    )
    resources = _launch(sch, strategy.dynamic_bytes(shape, epilogue)) if target.is_gpu else Resources()
    if compiled.cubin is not None:
        resources = with_cubin_resources(resources, compiled.cubin)
    return from_library(order.describe(sch, compiled.source, resources, workspace), compiled.library), compiled


def schedule_for(shape: Shape, epilogue: Epilogue, strategy: Strategy) -> Schedule:
    """Define the convolution and apply a strategy to it."""
    from tvm.s_tir import Schedule

    sch = Schedule(strategy.define(shape, epilogue))
    strategy.apply(sch, shape)
    return sch


def _find_strategy(
    shape: Shape, epilogue: Epilogue, schedule: str | Strategy, target: Target, on_miss: str
) -> tuple[Strategy, dict[str, str]]:
    if on_miss not in ("warn", "error"):
        raise InvalidScheduleError(f"on_miss must be 'warn' or 'error', got {on_miss!r}")
    provenance = versions.own() | {"schedule": str(schedule)}
    if isinstance(schedule, Strategy):
        return schedule, provenance | {"chosen": "object"}
    if not isinstance(schedule, str):
        raise InvalidScheduleError(f"a schedule is a name or a Strategy, got {type(schedule).__name__}")
    if schedule == "tuned":
        found = database.find(shape, target, epilogue)
        if found is not None:
            strategy, path = found
            return strategy, provenance | {"chosen": "tuned", "record": str(path)}
        wanted = f"{shape} --epilogue {epilogue}" if epilogue.steps else str(shape)
        missing = f"no tuning record for {shape} on {target.name}; to make one: python -m dwtir.tune {wanted}"
        if on_miss == "error":
            raise NotTunedError(missing)
        warnings.warn(f"{missing}. Building the manual schedule.", NotTunedWarning, stacklevel=3)
    elif schedule != "manual":
        return schedules.named(schedule, shape, target, epilogue), provenance | {"chosen": "step"}
    return schedules.choose(shape, target, epilogue), provenance | {"chosen": "manual"}


def _cached(name: str, provenance: dict[str, str]) -> Kernel | None:
    found = cache.load(name)
    if found is None:
        return None
    library, code, description = found
    try:
        info = KernelInfo.from_json(description | {"provenance": provenance})
    except RecordError as error:
        cache.discard(name, error)
        return None
    return from_library(info, library, code)


def _build_opencl(order: _Order) -> Kernel:
    from .opencl import compile_opencl

    sch = schedule_for(order.shape, order.epilogue, order.strategy)
    mod, workspace = hoist(sch.mod)
    compiled = compile_opencl(mod, max_threads=order.target.max_threads_per_block)
    resources = Resources(compiled.grid, compiled.block, compiled.local_bytes)
    return Kernel(order.describe(sch, compiled.source, resources, workspace), compiled)


def _launch(sch: Schedule, shared_bytes: int) -> Resources:
    """Read grid and block of the first kernel off the thread bindings of a schedule."""
    import tvm_ffi
    from tvm import tirx

    extents: dict[str, int] = {}

    def visit(loop: tirx.For) -> None:
        if loop.thread_binding is not None:
            extents[str(loop.thread_binding.thread_tag)] = int(loop.extent)

    body = sch.mod["main"].body.block.body
    tvm_ffi.structural_walk(body.seq[0] if isinstance(body, tirx.SeqStmt) else body, [(tirx.For, visit)])
    return Resources(*launch(extents), shared_bytes)
