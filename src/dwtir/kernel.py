"""A compiled convolution that can be called, timed, looked at and saved."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from . import cuda, entry, saved
from .arguments import Signature
from .epilogue import Epilogue
from .errors import DwtirError, RecordError, ToolchainError
from .reference import random_inputs
from .resources import Resources, with_cubin_resources
from .schedules import STRATEGIES, Strategy
from .shape import DepthwiseConv2dShape
from .target import Target, resolve
from .threads import use_all_cores
from .typed import Module
from .workspace import Workspace, checked_dtype


@dataclass(frozen=True)
class Timing:
    """Seconds that one call takes on the device, over repeated measurements."""

    median: float
    p20: float
    p80: float
    repeats: int

    @classmethod
    def of(cls, times: Sequence[float]) -> "Timing":
        """Take the times of repeated measurements."""
        p20, median, p80 = map(float, np.quantile(times, (0.2, 0.5, 0.8)))
        return cls(median, p20, p80, len(times))


@dataclass(frozen=True)
class KernelInfo:
    """All that is known of a kernel besides its code."""

    shape: DepthwiseConv2dShape
    epilogue: Epilogue
    target: Target
    strategy: Strategy
    """What was built."""
    provenance: dict[str, str]
    """Where the schedule came from: ``schedule`` as it was asked for, ``chosen`` ("manual",
    "tuned", "step" or "object"), the ``record``'s file, if any, and versions."""
    script: str
    """The scheduled TensorIR as TVMScript."""
    trace: str
    """The schedule's trace as TVM's JSON."""
    source: str
    """Generated CUDA C++ or OpenCL C, or assembly."""
    resources: Resources
    workspace: Workspace = ()
    """Dtypes and shapes of the tensors that the kernel takes before its output."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values from which `from_json` makes the same object."""
        return {
            "shape": str(self.shape),
            "epilogue": list(self.epilogue.steps),
            "target": asdict(self.target),
            "strategy": self.strategy.name,
            "parameters": self.strategy.parameters,
            "resources": asdict(self.resources),
            **{name: getattr(self, name) for name in ("provenance", "script", "trace", "source", "workspace")},
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "KernelInfo":
        """Rebuild the object; a foreign or damaged description raises RecordError."""
        try:
            resources: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in values["resources"].items()
            }
            return cls(
                shape=DepthwiseConv2dShape.parse(values["shape"]),
                epilogue=Epilogue.of(values["epilogue"]),
                target=Target.from_json(values["target"]),
                strategy=STRATEGIES[values["strategy"]].from_parameters(values["parameters"]),
                provenance={str(k): str(v) for k, v in values["provenance"].items()},
                resources=Resources(**resources),
                workspace=tuple(
                    (checked_dtype(dtype), tuple(map(int, extents))) for dtype, extents in values["workspace"]
                ),
                **{name: str(values[name]) for name in ("script", "trace", "source")},
            )
        except (DwtirError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"the kernel's description is damaged: {error!r}") from error


class Kernel:
    """A depthwise convolution or a gradient of it, compiled for one shape and device.

    Made by `build` and `load`. Calling it takes ``data``, ``weight`` and the
    epilogue's tensors in the epilogue's order (for a gradient the tensors of
    ``shape.input_shapes``), and returns the output, which is
    allocated by the caller's library unless ``out=`` gives it. torch tensors run
    on torch's current stream of their device, also while a CUDA graph is captured.

    Attributes
    ----------
    shape, epilogue, target, strategy, provenance, trace
        See `KernelInfo`.
    """

    def __init__(
        self,
        info: KernelInfo,
        run: Callable[..., None] | None,
        library: Module | None = None,
        code: bytes | None = None,
    ) -> None:
        self.info = info
        self._run = run
        self._library = library
        self._code = code
        self._signature = Signature(info.shape, info.epilogue, info.target.kind, workspace=info.workspace)
        self.shape = info.shape
        self.epilogue = info.epilogue
        self.target = info.target
        self._on_gpu = info.target.kind == "cuda"
        self.strategy = info.strategy
        self.provenance = info.provenance
        self.trace = info.trace

    def __repr__(self) -> str:
        return f"<Kernel {self.shape} {self.epilogue} {self.strategy} for {self.target.name}>"

    def __call__(self, *inputs: Any, out: Any = None) -> Any:
        """Compute the convolution or the gradient.

        Parameters
        ----------
        *inputs : NumPy array, torch.Tensor or DLPack object
            ``data``, ``weight`` and the epilogue's tensors (for a gradient, the tensors of ``shape.input_shapes``):
            contiguous, of the shape's layout and dtype, on the kernel's device. In NCHW, torch's weight of shape
            (out_channels, 1, kh, kw) is taken as well.
        out : same kind, optional
            Where the result is written; must not overlap the inputs.

        Returns
        -------
        same kind
            ``out``, or a new tensor.

        Raises
        ------
        ArgumentError
            If a tensor is not what the kernel was built for.
        ToolchainError
            If the kernel was compiled for a GPU that is not here.
        """
        arguments, result, device = self._signature.bind(inputs, out)
        run = self._run or self._cannot_run()
        try:
            with self._on_device(inputs[0]):
                run(*arguments)
            if device is not None:
                device.sync()
        except Exception:
            self._signature.explain(inputs, out)
            raise
        return result

    def launcher(self) -> Callable[..., None]:
        """Return what computes from torch tensors as `entry` says, for many calls.

        It takes the inputs and ``out``, and makes no checks but those of compiled code; `explain`
        says what these refuse. The caller knows that the tensors are aligned, not negated and
        apart in memory, and that nobody wants a gradient of them. The kernel is one of `build`.
        """
        run, signature = self._run or self._cannot_run(), self._signature
        if self._library is not None and entry.is_needed(self.shape):
            run = self._library[entry.NAME]

        def look_and_launch(*tensors: Any) -> None:
            arguments = signature.arguments(tensors[:-1], tensors[-1])
            with self._on_device(tensors[0]):
                run(*arguments)

        is_alone = not self._on_gpu or sys.modules["torch"].cuda.device_count() == 1
        return run if is_alone and not self.info.workspace else look_and_launch

    def explain(self, *inputs: Any) -> None:
        """Raise an `ArgumentError` if torch tensors, in the kernel's layout, are none for it."""
        self._signature.explain(inputs)

    def _on_device(self, tensor: Any) -> AbstractContextManager[Any]:
        """Make a torch tensor's GPU the current one, which compiled code leaves so."""
        if not self._on_gpu or not getattr(tensor, "is_cuda", False):
            return _HERE
        torch: Any = sys.modules["torch"]
        if tensor.get_device() == torch._C._cuda_getDevice():
            return _HERE
        device: AbstractContextManager[Any] = torch.cuda.device(tensor.device)
        return device

    def script(self) -> str:
        """Return the scheduled TensorIR as TVMScript."""
        return self.info.script

    def source(self) -> str:
        """Return the generated CUDA C++ or OpenCL C, or the CPU's assembly."""
        return self.info.source

    def resources(self) -> Resources:
        """Return grid, block, shared memory, registers and spills.

        A kernel for a GPU that is not here is compiled to machine code for this.
        """
        return self._resources

    @cached_property
    def _resources(self) -> Resources:
        known = self.info.resources
        if self.target.kind != "cuda" or known.registers is not None:
            return known
        from .nvrtc import compile_cubin

        cubin = compile_cubin(self.info.source, self.target.arch, self.info.strategy.min_blocks)
        return with_cubin_resources(known, cubin)

    def time(self, *tensors: Any, repeats: int = 20, min_repeat_ms: int = 5) -> Timing:
        """Measure the kernel on data that stays in the caches.

        Parameters
        ----------
        *tensors : NumPy array, torch.Tensor or DLPack object
            What the kernel would be called with, on its device; random data if there are none.
        repeats : int
            Measurements; each runs the kernel until `min_repeat_ms` have passed.

        Returns
        -------
        Timing
            In seconds, by the device's own clock.

        Raises
        ------
        ArgumentError
            If a tensor is not what the kernel was built for.
        ToolchainError
            If the device is not here, or is an OpenCL device, whose time on a CPU would say nothing about a GPU.
        """
        library = self._library_that_runs("are not timed")
        import tvm

        device = tvm.cuda(0) if self.target.kind == "cuda" else tvm.cpu(0)
        if not tensors:
            tensors = tuple(tvm.runtime.tensor(a, device) for a in random_inputs(self.shape, self.epilogue))
        arguments, *_ = self._signature.bind(tensors)
        evaluator = library.time_evaluator("main", device, number=1, repeat=repeats, min_repeat_ms=min_repeat_ms)
        return Timing.of(evaluator(*arguments).results)

    def export(self, path: str | Path) -> None:
        """Save the kernel as a shared library that `load` reads.

        Raises
        ------
        ToolchainError
            If there is no C compiler to link with, or the kernel's device is
            not here and its machine code therefore not in the library.
        """
        library = self._library_that_runs("cannot be exported")
        saved.write(Path(path), self._code or library, replace(self.info, resources=self.resources()).to_json())

    def _library_that_runs(self, otherwise: str) -> Module:
        if self._run is None:
            self._cannot_run()
        if self._library is None:
            raise ToolchainError(f"kernels for {self.target.name} {otherwise}")
        return self._library

    def _cannot_run(self) -> Callable[..., None]:
        raise ToolchainError(
            f"the kernel is compiled for {self.target.name} ({self.target.arch}), which is not "
            "in this machine or not usable; `python -m dwtir doctor --target cuda` says why"
        )


_HERE = nullcontext()


def load(path: str | Path) -> Kernel:
    """Load a kernel that `Kernel.export` saved.

    The process needs TVM's runtime only: with ``TVM_USE_RUNTIME_LIB=1`` in the environment the compiler is never
    loaded. Loading runs the file's code, so load only files that you would run.

    Raises
    ------
    RecordError
        If the file is damaged, foreign, or of another TVM.
    ToolchainError
        If the kernel's device is not here.
    """
    cuda.load_runtime()  # a CUDA kernel inside the library needs it; others do not care
    library, code, description = saved.read(Path(path))
    try:
        info = KernelInfo.from_json(description)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    return from_library(info, library, code)


def from_library(info: KernelInfo, library: Module, code: bytes | None = None) -> Kernel:
    """Make a kernel of a library, runnable if its device is here.

    A library that was loaded comes with its code, without which it could not be saved again.
    """
    if info.target.kind == "cuda" and not (cuda.load_runtime().usable and resolve("cuda").arch == info.target.arch):
        return Kernel(info, None, library, code)
    if info.target.kind == "cpu":
        use_all_cores()
    return Kernel(info, library["main"], library, code)
