"""From a scheduled function to code: TVM lowers it, NVRTC or LLVM compiles it."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from math import gcd
from typing import Any

from . import cuda, cuda_functions, entry, line_loads, nvrtc
from .errors import DwtirError
from .nvrtc import Cubin
from .target import Target
from .typed import IRModule, Module, PrimFunc


@dataclass(frozen=True)
class Compiled:
    """Code for a device."""

    library: Module
    """The host function ``main`` and what it launches. For CUDA it runs only where `cubin` is given."""
    source: str
    """CUDA C++, or LLVM's assembly."""
    cubin: Cubin | None = None
    """The machine code inside `library`; None on the CPU, and where no CUDA runtime could take it."""


def compile_module(
    mod: IRModule,
    target: Target,
    min_blocks: int | None = None,
    *,
    hoist: bool = False,
    simplify: bool = False,
    by_fma: bool = False,
    by_lines: bool = False,
) -> Compiled:
    """Compile a scheduled module for CUDA or the CPU.

    Parameters
    ----------
    min_blocks, hoist, simplify
        For CUDA; see `Strategy`.
    by_fma
        Whether SiLU of halves divides on multiply-add units too: 3 to 11 % faster in NHWC, and up to 12 %
        slower in NCHW, where these have more to do.
    by_lines
        Whether inputs are loaded by `line_loads.LOAD`.
    """
    import tvm

    if target.kind == "cpu":
        library = tvm.compile(mod, target=target.tvm(), tir_pipeline=_cpu_pipeline()).mod
        return Compiled(library, str(library.inspect_source("asm")))

    cuda.load_runtime()
    _install_callback()
    cubins: list[Cubin] = []
    refusals: list[DwtirError] = []

    def written(source: str) -> str:
        return line_loads.by_lines(source) if by_lines else source

    def compile_source(source: str) -> bytes:
        try:
            cubins.append(nvrtc.compile_cubin(written(source), target.arch, min_blocks))
        except DwtirError as error:
            refusals.append(error)
            raise
        return cubins[-1].code

    token = _compile_source.set(compile_source)
    try:
        with tvm.transform.PassContext(config=_HOISTED if hoist else {}):
            pipeline = _pipeline(simplify, target.launches_early, by_fma)
            library = tvm.compile(mod, target=target.tvm(), tir_pipeline=pipeline).mod
    except Exception:
        if refusals:  # TVM, in between, knows no errors of ours
            raise refusals[0] from None
        raise
    finally:
        _compile_source.reset(token)
    (device,) = library.imports
    return Compiled(library, written(str(device.inspect_source("cuda"))), cubins[0] if cubins else None)


_HOISTED = {"s_tir.HoistIfThenElse": {"support_block_scope_hoisting": True}}

_compile_source: ContextVar[Callable[[str], bytes] | None] = ContextVar("source", default=None)


@cache
def _pipeline(simplify: bool, early: bool, by_fma: bool) -> str:
    """Name TVM's passes for a schedule, with common subexpressions kept to the end.

    TVM finds the address that a thread's loads have in common, and later writes it into each again: half of a small
    kernel's instructions, for the CUDA compiler computes nothing before a branch that one side alone needs.

    The first passes show the operands of tensor cores' instructions before TVM finds what each thread has of a buffer.
    """
    from tvm.s_tir import transform as s_transform
    from tvm.tirx.transform import CommonSubexprElim, LowerIntrin, LowerWarpMemory, StmtSimplify

    begin = [
        s_transform.LowerInitBlock(),
        s_transform.PlanAndUpdateBufferAllocationLocation(),
        s_transform.ConvertBlocksToOpaque(),
        s_transform.LowerMatchBuffer(),
    ]
    if simplify:
        begin.append(StmtSimplify())
    finish = [s_transform.InjectPTXAsyncCopy(), LowerWarpMemory(), _name_steps(by_fma), _name_from(), StmtSimplify()]
    finish += [CommonSubexprElim(), _show_alignment(), LowerIntrin()]
    if early:
        finish.append(_launch_early())
    return _registered(f"dwtir{'-simplified' * simplify}{'-early' * early}{'-fma' * by_fma}", begin, finish)


@cache
def _cpu_pipeline() -> str:
    return _registered("dwtir-cpu", [], [])


def _registered(name: str, begin: list[Any], finish: list[Any]) -> str:
    """Name TVM's passes with some before, and others for what runs on a GPU."""
    from tvm import transform
    from tvm.s_tir.pipeline import default_s_tir_pipeline
    from tvm.tirx import compilation_pipeline

    lower, finish_host, _ = default_s_tir_pipeline()
    compilation_pipeline.register_tir_pipeline(
        name,
        lambda: (
            transform.Sequential([*begin, lower]),
            lambda: transform.Sequential([entry.pass_on_dtypes(), finish_host()]),
            lambda: transform.Sequential(finish),
        ),
    )
    return name


_LANES = 8


def _show_alignment() -> Any:
    """Bind an eighth (a quarter, a half) of what is a multiple of it.

    The code generator loads a vector only where it sees that the address is a multiple of
    its length, and does not look up what a variable is bound to.
    """
    import tvm_ffi
    from tvm import tirx
    from tvm.sym import Analyzer

    def show(func: PrimFunc) -> PrimFunc:
        analyzer = Analyzer()
        values: dict[tirx.Var, tirx.Expr] = {}

        def bind(node: tirx.Bind) -> tirx.Stmt:
            if str(node.value.ty) != "int32":
                return node
            known = analyzer.modular_set(node.value)
            lanes = gcd(int(known.coeff), int(known.base), _LANES)
            if lanes == 1:
                return node
            part = tirx.Var(node.var.name, "int32")
            values[node.var] = part * lanes
            return tirx.Bind(part, analyzer.simplify(tirx.floordiv(node.value, lanes)))

        return tvm_ffi.structural_map(func, [(tirx.Bind, bind), (tirx.Var, lambda var: values.get(var, var))])

    return entry.function_pass(show)


def _launch_early() -> Any:
    """Launch each kernel but the first, which would begin later, while the one before runs, and let it wait."""
    from tvm import tirx

    parameters, dynamic, early = (
        f"tirx.{name}" for name in ("kernel_launch_params", "use_dyn_shared_memory", "use_programtic_dependent_launch")
    )

    def wait(func: PrimFunc) -> PrimFunc:
        if str(func.attrs["global_symbol"]).endswith("_kernel"):  # later ones have a number
            return func
        tags = [str(tag) for tag in func.attrs[parameters]]
        tags.insert(len(tags) - (dynamic in tags), early)
        has_waited = tirx.call_extern("int32", cuda_functions.WAIT) != 0
        return func.with_body(tirx.IfThenElse(has_waited, func.body, None)).with_attr(parameters, tags)

    return entry.function_pass(wait)


def _name_steps(by_fma: bool) -> Any:
    """Call `cuda_functions`' least and most, for CUDA's lose NaN, and SiLU: TVM's has an exponential and a division.

    It wants x times a factor, with which x above 2.3e38 is infinite. Of halves, what is multiplied and added before
    takes it along, an instruction less; and if wanted, each second result divides without the units that exponentials
    wait for.
    """
    import tvm_ffi
    from tvm import ir, tirx

    sigmoid = ir.Op.get("tirx.sigmoid")
    factor = tirx.const(cuda_functions.SILU_FACTOR, "float32")

    def scaled(value: tirx.Expr) -> tirx.Expr:
        if isinstance(value, tirx.Add):
            return scaled(value.a) + value.b * factor
        if isinstance(value, tirx.Mul):
            return value.a * (value.b * factor)
        return value * factor

    def named(func: PrimFunc) -> PrimFunc:
        is_half = any("float16" in str(parameter.ty) for parameter in func.params)
        names = cycle((cuda_functions.SILU, cuda_functions.SILU_BY_FMA)[: 1 + (is_half and by_fma)])

        def name(product: tirx.Mul) -> tirx.Expr:
            value, gate = product.a, product.b
            if not (isinstance(gate, ir.Call) and gate.op.same_as(sigmoid)):
                return product
            return tirx.call_pure_extern("float32", next(names), scaled(value) if is_half else value * factor)

        def bound(pair: tirx.Max | tirx.Min) -> tirx.Expr:
            if str(pair.ty) != "float32":
                return pair
            function = cuda_functions.MAX if isinstance(pair, tirx.Max) else cuda_functions.MIN
            return tirx.call_pure_extern("float32", function, pair.a, pair.b)

        return tvm_ffi.structural_map(func, [(tirx.Mul, name), (tirx.Max, bound), (tirx.Min, bound)])

    return entry.function_pass(named)


def _name_from() -> Any:
    """Call a function of `cuda_functions` for a pair of halves in registers from a place on or the next.

    TVM takes each half alone. The pair behind is there too.
    """
    import tvm_ffi
    from tvm import ir, tirx
    from tvm.sym import Analyzer

    chosen = ir.Op.get("prim.if_then_else")

    def name(call: ir.Call) -> tirx.Expr:
        if not (call.op.same_as(chosen) and str(call.ty.dtype) in ("float16x2", "bfloat16x2")):
            return call
        is_odd, *pairs = call.args
        own = [pair.source for pair in pairs if isinstance(pair, ir.TensorLoad) and pair.source.scope() == "local"]
        if len(own) < 2 or not own[0].same_as(own[1]):
            return call
        odd, even = (getattr(pair.indices[0], "base", 0) for pair in pairs)
        if not Analyzer().can_prove_equal(odd - even, 1):
            return call
        behind = tirx.BufferLoad(own[0], [tirx.Ramp(even + 2, 1, 2)])
        words = [tirx.reinterpret("uint32", pair) for pair in (pairs[1], behind)]
        word = tirx.call_pure_extern("uint32", cuda_functions.FROM, *words, is_odd)
        return tirx.reinterpret(str(call.ty.dtype), word)

    return entry.function_pass(lambda func: tvm_ffi.structural_map(func, [(ir.Call, name)]))


@cache
def _install_callback() -> None:
    """Stand between TVM's CUDA code generator and its compiler, for our own calls only.

    TVM asks a global function for machine code. Ours compiles what `compile_module` waits for, and passes others'
    sources to TVM's.
    """
    import tvm.support.nvcc  # registers TVM's own  # noqa: F401
    import tvm_ffi

    name = "tvm_callback_cuda_compile"
    others: Any = tvm_ffi.get_global_func(name)

    def callback(source: str) -> Any:
        ours = _compile_source.get()
        return others(source) if ours is None else ours(str(source))

    tvm_ffi.register_global_func(name, callback, override=True)
