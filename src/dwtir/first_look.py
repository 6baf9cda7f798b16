"""The articles' layers with every step of both ladders: built, checked, timed, in one table."""

import re
from dataclasses import dataclass

import numpy as np

from . import opencl, reference
from ._version import __version__
from .arguments import on_gpu
from .build import build, schedule_for
from .epilogue import NO_STEPS
from .errors import DwtirError
from .reference import Array
from .replay import replay_on_cpu
from .resources import Resources
from .schedules import ARTICLE_STEPS, named
from .shape import Shape
from .tables import number
from .target import KNOWN_GPUS, Target, resolve

_LAYERS = ("1x256x96x96_k3x3_p1", "3x4x16x32_k7x7_p3")
_HEAD = ("step", "runs on", "grid", "block", "shared B", "regs", "spill B", "error", "us", "gain")
_FORMATS = ("<14", "<12", ">12", ">10", ">9", ">5", ">8", ">9", ">10", ">7")


class _Problem:
    def __init__(self, text: str) -> None:
        self.shape = Shape.parse(text)
        self.data, self.weight = reference.random_inputs(self.shape, NO_STEPS)
        given = self.shape, self.data, self.weight
        self.expected, self.bound = reference.depthwise_conv2d(*given), reference.error_bound(*given)


@dataclass(frozen=True)
class _Row:
    step: str
    runs_on: str
    resources: Resources
    error: float
    right: bool
    seconds: float | None


def main(target: str | None) -> int:
    """Print the tables; return 1 if a kernel was wrong or failed, else 0."""
    try:
        device = resolve(target)
    except DwtirError as error:
        print(error)
        return 1
    if device.is_gpu:
        how = f"All steps run on {device.name}."
    elif opencl.available() is None:
        how = "GPU steps run as OpenCL (correctness only: a CPU's time says nothing about them)."
    else:
        how = (
            "GPU steps run as the LLVM replay of their trace, without barriers and without times; "
            "pip install 'dwtir[opencl]' runs them as OpenCL."
        )
    print(f"dwtir {__version__} on {device.name} ({device.arch}). {how}")
    failures = 0
    for text in _LAYERS:
        problem = _Problem(text)
        print(f"\n{problem.shape}: {problem.shape.flop / 1e6:.1f} MFLOP, ", end="")
        print(f"{problem.shape.least_bytes / 1e6:.2f} MB at least")
        _print_cells(_HEAD)
        for article, steps in ({"": {"manual": None}} | ARTICLE_STEPS).items():
            previous = None
            for step in steps:
                try:
                    row = _run(problem, step, device)
                except DwtirError as error:
                    failures += 1
                    print(f"{step}: {type(error).__name__}: {error}")
                    continue
                failures += not row.right
                _print_row(row, previous)
                previous = row.seconds if article else None
    print(f"\n{'all kernels are right' if not failures else f'{failures} kernels FAILED'}")
    return 1 if failures else 0


def _run(problem: _Problem, step: str, device: Target) -> _Row:
    if device.kind == "cuda":
        runs_on = "CUDA"
    elif device.kind == "opencl" or (step != "manual" and opencl.available() is None):
        runs_on = "OpenCL"
    else:
        runs_on = "CPU" if step == "manual" else "LLVM replay"
    resources, seconds = Resources(), None
    if runs_on == "LLVM replay":
        out = _replayed(problem, step)
    else:
        kernel = build(problem.shape, step, target="opencl" if runs_on == "OpenCL" else device)
        resources = kernel.resources()
        seconds = None if runs_on == "OpenCL" else kernel.time().median
        if runs_on == "CUDA":
            out = kernel(on_gpu(problem.data), on_gpu(problem.weight)).numpy()
        else:
            out = kernel(problem.data, problem.weight)
    error = np.abs(out.astype(np.float64) - problem.expected)
    return _Row(step, runs_on, resources, float(error.max()), bool((error <= problem.bound).all()), seconds)


def _replayed(problem: _Problem, step: str) -> Array:
    """Run a GPU step on LLVM, for a GPU of the usual limits."""
    import tvm
    import tvm_ffi

    gpu = KNOWN_GPUS["nvidia-h200"]
    strategy = named(step, problem.shape, gpu)
    strategy.check_use(problem.shape, gpu)
    about = problem.shape, NO_STEPS
    mod = replay_on_cpu(schedule_for(*about, strategy), strategy.define(*about))
    out = np.full(problem.shape.out_shape, np.nan, np.float32)
    arrays = (problem.data, problem.weight, out)
    tvm.compile(mod, target=resolve("cpu").tvm())["main"](*map(tvm_ffi.from_dlpack, arrays))
    return out


def _print_row(row: _Row, previous: float | None) -> None:
    use = row.resources
    gain = previous / row.seconds if previous and row.seconds else None
    _print_cells(
        (
            row.step,
            row.runs_on,
            *map(_extents, (use.grid, use.block)),
            *("-" if n is None else str(n) for n in (use.shared_bytes, use.registers, use.spill_bytes)),
            f"{row.error:.1e}" if row.right else "WRONG",
            number(row.seconds, scale=1e6),
            number(gain, "x"),
        )
    )


def _extents(extents: tuple[int, int, int] | None) -> str:
    return "-" if extents is None else re.sub("(x1)+$", "", "x".join(map(str, extents)))


def _print_cells(cells: tuple[str, ...]) -> None:
    print(" ".join(map(format, cells, _FORMATS)).rstrip(), flush=True)
