"""Lower scheduled TensorIR to OpenCL C, with 16-bit floats as bits.

PoCL has no ``half`` and OpenCL no ``bfloat16``, so both are kept as ``ushort``,
also in local memory. A cast becomes a conversion that rounds to nearest even;
loads and stores stay vectors. Arithmetic in 16 bits is refused, not emulated.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InvalidScheduleError
from .reference import numpy_dtype
from .resources import launch
from .typed import IRModule

_KINDS = {"float16": "f16", "bfloat16": "bf16"}
_LANES = (2, 3, 4, 8, 16)

# Conversions called by the generated code; {V} is the number of lanes, empty for a scalar.
_HELPERS = {
    "f16_to_f32": "float{V} {name}(ushort{V} x) {{ return vload_half{V}(0, (const half *)&x); }}",
    "f32_to_f16": """ushort{V} {name}(float{V} x) {{
  ushort{V} bits;
  vstore_half{V}_rte(x, 0, (half *)&bits);
  return bits;
}}""",
    "bf16_to_f32": """float{V} {name}(ushort{V} x) {{
  return as_float{V}(convert_uint{V}(x) << 16);
}}""",
    # Rounds by carrying out of the lower half; a NaN must not carry into another value.
    "f32_to_bf16": """ushort{V} {name}(float{V} x) {{
  uint{V} bits = as_uint{V}(x);
  uint{V} even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return convert_ushort{V}(select(even, (bits >> 16) | 0x40u, isnan(x)));
}}""",
}


@dataclass(frozen=True)
class Launch:
    """One kernel and how it is launched."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    """Work-groups, and work-items of one, in x, y and z."""
    local_bytes: int
    """Local (in CUDA: shared) memory of a work-group."""
    order: list[int]
    """For each argument of the kernel, the index of its buffer in the function's parameters."""


@dataclass(frozen=True)
class Lowered:
    """OpenCL C and how to launch it."""

    source: str
    launches: list[Launch]
    """In the order in which they run."""
    params: list[tuple[str, tuple[int, ...], str]]
    """Name, shape and dtype of the function's buffers, in order."""


def lower(mod: IRModule, max_threads: int) -> Lowered:
    """Generate OpenCL C for a module with one PrimFunc ``main`` on buffers of static shape."""
    import tvm

    params = [(p.name, tuple(int(n) for n in p.ty.shape), str(p.ty.dtype)) for p in mod["main"].params]
    kernels, target = _lower_device(mod, max_threads)
    launches, functions, helpers = [], {}, set()
    for name, func in kernels.items():
        grid, block, local_bytes = _launch(func)
        if math.prod(block) > max_threads:
            raise InvalidScheduleError(f"block {block} has more than {max_threads} threads")
        order = _argument_order([p[0] for p in params], [p.name for p in func.params])
        launches.append(Launch(name, grid, block, local_bytes, order))
        functions[name], used = _floats_as_bits(func)
        helpers |= used
    try:
        built = tvm.get_global_func("target.build.opencl")(tvm.IRModule(functions), target)
    except RuntimeError as error:
        raise InvalidScheduleError(f"OpenCL cannot express this schedule: {error}") from error
    source = "\n".join([*sorted(helpers), built.inspect_source()])
    assert "cl_khr_fp16" not in source, f"a float16 was left over:\n{source}"
    return Lowered(source, launches, params)


def _lower_device(mod: IRModule, max_threads: int) -> tuple[dict[str, Any], Any]:
    """Lower as TVM does, up to code generation: the kernels by name, in their order."""
    import tvm
    from tvm.tirx.build import split_host_device_mods

    limits = {"max_num_threads": max_threads, "max_threads_per_block": max_threads}
    target = tvm.target.Target({"kind": "opencl", **limits}, host={"kind": "llvm"})
    pipeline, _, finalize = tvm.tirx.get_default_tir_pipeline(target)
    # TVM would widen bfloat16 buffers in local memory to float32, which CUDA does not.
    not_passes = ["tirx.BF16ComputeLegalize", "tirx.BF16StorageLegalize"]
    try:
        with tvm.transform.PassContext(disabled_pass=not_passes):
            lowered = pipeline(tvm.tirx.transform.BindTarget(target)(mod))
            kernels = {
                var.name_hint: func
                for device_mod in split_host_device_mods(lowered)[1].values()
                for var, func in finalize()(device_mod).functions.items()
            }
    except RuntimeError as error:
        raise InvalidScheduleError(f"TVM cannot lower this schedule: {error}") from error
    if not kernels:
        raise InvalidScheduleError("the function becomes no kernel: bind its loops to blockIdx and threadIdx")
    # TVM numbers them as the host function calls them: main_kernel, main_kernel_1, ...
    return {name: kernels[name] for name in sorted(kernels, key=lambda k: (len(k), k))}, target


def _launch(func: Any) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    """Grid, block and bytes of local memory; refuses what OpenCL lacks."""
    import tvm_ffi
    from tvm import ir, tirx

    extents: dict[str, int] = {}
    local_bytes = 0
    refused: list[str] = []  # An exception from a callback would arrive as a RuntimeError.

    def attribute(node: Any) -> None:
        if node.attr_key == "thread_extent":
            extents[node.node.thread_tag] = int(node.value)

    def allocate(node: Any) -> None:
        nonlocal local_bytes
        scope, dtype = node.buffer.scope(), node.buffer.ty.dtype.dtype
        if scope == "shared":
            local_bytes += math.prod(int(n) for n in node.buffer.ty.shape) * dtype.lanes * dtype.bits // 8
        elif scope != "local":
            # The code generator would turn shared.dyn into private memory without a word.
            refused.append(f"{node.buffer.name} is {scope!r}, memory can be 'shared' or 'local'")

    def vector(node: Any) -> None:
        if int(node.lanes) not in _LANES:
            refused.append(f"{node} has {int(node.lanes)} lanes, vectors can have {_LANES}")

    def compute(node: Any) -> None:
        operands = node.args if isinstance(node, ir.Call) else (node.a, node.b)
        is_conditional = isinstance(node, ir.Call) and node.op.same_as(ir.Op.get("prim.if_then_else"))
        if any(map(_kind, (node, *operands))) and not is_conditional:
            refused.append(f"{node} computes in 16 bits, cast to float32 first")

    computing = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Min, tirx.Max, ir.Call)
    comparing = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
    callbacks = [(tirx.AttrStmt, attribute), (tirx.AllocBuffer, allocate), (tirx.Ramp, vector)]
    tvm_ffi.structural_walk(func.body, [*callbacks, ((*computing, *comparing), compute)])
    if refused:
        raise InvalidScheduleError(f"OpenCL cannot run this schedule: {'; '.join(refused)}")
    return *launch(extents), local_bytes


def _argument_order(params: list[str], kernel_params: list[str]) -> list[int]:
    """Which array each kernel argument is: TVM sorts them and calls them ``<name>_ptr``."""
    position = {f"{name}_ptr": i for i, name in enumerate(params)}
    if len(position) != len(params):
        raise InvalidScheduleError(f"parameters must have different names, got {params}")
    foreign = [name for name in kernel_params if name not in position]
    if foreign:
        raise InvalidScheduleError(
            f"the kernel takes {foreign}, which are no parameters: an intermediate buffer "
            "needs the scope 'shared' or 'local', or to be a parameter"
        )
    return [position[name] for name in kernel_params]


def _kind(expr: Any) -> str | None:
    from tvm import ir

    base = str(expr.ty.dtype).split("x")[0] if isinstance(expr.ty, ir.PrimType) else ""
    return _KINDS.get(base)


def _floats_as_bits(func: Any) -> tuple[Any, set[str]]:
    """Keep float16 and bfloat16 as uint16; also the text of the conversions called."""
    import tvm_ffi
    from tvm import ir, tirx

    helpers: set[str] = set()

    def convert(value: Any, direction: str, base: str) -> Any:
        lanes = value.ty.dtype.lanes
        name = f"dwtir_{direction}_x{lanes}"
        helpers.add(_HELPERS[direction].format(V=lanes if lanes > 1 else "", name=name))
        return tirx.call_pure_extern(_vector(base, lanes), name, value)

    def cast(node: Any, mutator: Any) -> Any:
        source, target = _kind(node.value), _kind(node)
        if source is None and target is None:
            return mutator.default_mutate(node)
        value = mutator.mutate(node.value)
        if source:
            value = convert(value, f"{source}_to_f32", "float32")
        middle = _vector("float32", node.ty.dtype.lanes) if target else str(node.ty.dtype)
        if str(value.ty.dtype) != middle:
            value = tirx.Cast(middle, value)
        return convert(value, f"f32_to_{target}", "uint16") if target else value

    def constant(node: Any, _: Any) -> Any:
        if _kind(node) is None:
            return node
        return tirx.IntImm("uint16", int(np.array(node.value, numpy_dtype(str(node.ty.dtype))).view(np.uint16)))

    @functools.cache
    def as_bits(var: Any) -> Any:
        return tirx.Var(var.name, _vector("uint16", var.ty.dtype.lanes))

    def variable(node: Any, mutator: Any) -> Any:
        return as_bits(node) if _kind(node) else mutator.default_mutate(node)

    def retype(node: Any, _: Any) -> Any:
        base = str(node.dtype).split("x")[0]
        return ir.PrimType(_vector("uint16", node.dtype.lanes)) if base in _KINDS else node

    def move(node: Any, mutator: Any) -> Any:
        # Default mutation would keep the old type of 16 bits.
        if _kind(node) is None:
            return mutator.default_mutate(node)
        if isinstance(node, tirx.Broadcast):
            return tirx.Broadcast(mutator.mutate(node.value), node.lanes)
        if isinstance(node, tirx.Select):
            return tirx.Select(*map(mutator.mutate, (node.condition, node.true_value, node.false_value)))
        return tirx.if_then_else(*map(mutator.mutate, node.args))

    callbacks = [(tirx.Cast, cast), (tirx.FloatImm, constant), (tirx.Var, variable), (ir.PrimType, retype)]
    return tvm_ffi.structural_mutate(func, [*callbacks, ((tirx.Broadcast, tirx.Select, ir.Call), move)]), helpers


def _vector(base: str, lanes: int) -> str:
    return base if lanes == 1 else f"{base}x{lanes}"
