"""A second host function of a kernel, which takes tensors as PyTorch has them.

To PyTorch an image is (N, C, H, W) and a weight (C * M, 1, kh, kw), however they lie in memory.
To make a view of a tensor in a kernel's layout takes PyTorch half as long as a launch, so compiled
code does it, after it has compared all sizes and strides.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from .shape import Shape
from .typed import IRModule, PrimFunc

NAME = "torch"
"""The function's name, beside ``main``."""
_DTYPES = "dwtir.dtypes"

Sizes: TypeAlias = tuple[int, ...]


def is_needed(shape: Shape) -> bool:
    """Tell whether PyTorch's sizes are others than the kernel's."""
    return shape.layout == "NHWC" or shape.channel_multiplier > 1


def in_torch(shape: Shape) -> dict[str, tuple[Sizes, Sizes]]:
    """Return PyTorch's sizes and strides of each image and weight, by name."""
    found = {}
    for name, extents in (*shape.input_shapes.items(), ("out", shape.result_shape)):
        is_weight = name == "weight" or (name == "out" and shape.operation == "grad_weight")
        if is_weight:
            channels = shape.out_channels, 1
            extents = channels + shape.kernel
            if shape.layout == "NHWC":
                extents = shape.kernel + channels
        order: tuple[int, ...] = (0, 1, 2, 3)
        if shape.layout == "NHWC":
            order = (2, 3, 0, 1) if is_weight else (0, 3, 1, 2)
        steps = [1]
        for extent in extents[:0:-1]:
            steps.insert(0, extent * steps[0])
        found[name] = tuple(extents[i] for i in order), tuple(steps[i] for i in order)
    return found


def add(mod: IRModule, shape: Shape) -> IRModule:
    """Add the function to a module to be compiled, where it is needed."""
    if not is_needed(shape):
        return mod
    import tvm
    from tvm import tirx
    from tvm.tirx.buffer import buffer_data

    params, taken, passed = mod["main"].params, [], []
    known = dict(zip((0, 1, len(params) - 1), in_torch(shape).values(), strict=True))
    for place, own in enumerate(params):
        extents, dtype = tuple(map(int, own.ty.shape)), str(own.ty.dtype)
        sizes, strides = known.get(place, (extents, ()))
        # Of one element, any stride will do.
        free = [
            tirx.Var(f"{own.name}_stride{axis}", "int32") if size == 1 else stride
            for axis, (size, stride) in enumerate(zip(sizes, strides, strict=False))
        ]
        taken.append(tirx.decl_buffer(sizes, dtype, own.name, strides=free))
        stack = tirx.tvm_stack_make_shape(*extents)
        passed.append(tirx.tvm_stack_make_array(buffer_data(taken[-1]), stack, 0, len(extents), dtype, 0))
    func = tirx.PrimFunc(taken, tirx.Evaluate(tirx.call_cpacked("main", *passed)))
    func = func.with_attr({"global_symbol": NAME, _DTYPES: [str(own.ty.dtype) for own in params]})
    main = mod.get_global_var("main")
    return tvm.IRModule({main: mod["main"], tvm.ir.GlobalVar(NAME): func})


def function_pass(change: Callable[[PrimFunc], PrimFunc]) -> Any:
    """Make a pass of what changes a function."""
    from tvm import tirx

    return tirx.transform.prim_func_pass(lambda func, _mod, _context: change(func), opt_level=0)


def pass_on_dtypes() -> Any:
    """Return a pass for TVM's call of ``main``: bfloat16 has become another type by then."""
    import tvm_ffi
    from tvm import ir, tirx

    op = ir.Op.get("tirx.tvm_call_cpacked")

    def restore(func: PrimFunc) -> PrimFunc:
        dtypes = func.attrs.get(_DTYPES)

        def typed(call: ir.Call) -> ir.Call:
            if dtypes is None or not (isinstance(call.op, ir.Op) and call.op.same_as(op)):
                return call
            name, *arrays = call.args
            passed = [
                tirx.tvm_stack_make_array(*array.args[:4], str(dtype), array.args[5])
                for array, dtype in zip(arrays, dtypes, strict=True)
            ]
            return tirx.call_cpacked(name, *passed)

        return tvm_ffi.structural_map(func, [(ir.Call, typed)])

    return function_pass(restore)
