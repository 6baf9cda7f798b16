"""From a scheduled function to code: TVM lowers it, NVRTC or LLVM compiles it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from . import cuda, nvrtc
from .nvrtc import Cubin
from .target import Target

if TYPE_CHECKING:
    import tvm

__all__ = ["Compiled", "compile_module"]


@dataclass(frozen=True)
class Compiled:
    """Code for a device.

    Parameters
    ----------
    library : tvm.runtime.Module
        The host function ``main`` and what it launches. For CUDA it runs only
        where `cubin` is given.
    source : str
        CUDA C++, or LLVM's assembly.
    cubin : Cubin or None
        The machine code inside `library`; None on the CPU, and where no CUDA
        runtime could take it.
    """

    library: tvm.runtime.Module
    source: str
    cubin: Cubin | None = None


def compile_module(mod: tvm.IRModule, target: Target) -> Compiled:
    """Compile a scheduled module for CUDA or the CPU.

    Raises
    ------
    ToolchainError
        If NVRTC or the CUDA headers are missing.
    CompileError
        If the generated source is rejected.
    """
    import tvm

    if target.kind == "cpu":
        library = tvm.compile(mod, target=target.tvm()).mod
        return Compiled(library, str(library.inspect_source("asm")))

    cuda.load_runtime()
    _install_callback()
    cubins: list[Cubin] = []

    def compile_source(source: str) -> bytes:
        cubins.append(nvrtc.compile_cubin(source, target.arch))
        return cubins[-1].code

    token = _compile_source.set(compile_source)
    try:
        library = tvm.compile(mod, target=target.tvm()).mod
    finally:
        _compile_source.reset(token)
    (device,) = library.imports
    return Compiled(library, str(device.inspect_source("cuda")), cubins[0] if cubins else None)


_compile_source: ContextVar[Callable[[str], bytes] | None] = ContextVar("source", default=None)


@cache
def _install_callback() -> None:
    """Stand between TVM's CUDA code generator and its compiler, for our own calls only.

    TVM asks a global function for machine code, and on machines with a CUDA
    runtime does so while it generates code. Ours compiles what `compile_module`
    is waiting for, and passes everybody else's source to TVM's.
    """
    import tvm.support.nvcc  # registers TVM's own  # noqa: F401
    import tvm_ffi

    name = "tvm_callback_cuda_compile"
    others: Any = tvm_ffi.get_global_func(name)

    def callback(source: str) -> Any:
        ours = _compile_source.get()
        return others(source) if ours is None else ours(str(source))

    tvm_ffi.register_global_func(name, callback, override=True)
