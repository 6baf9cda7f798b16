"""What a kernel is called with: every tensor is checked before compiled code sees it.

A kernel follows raw pointers. A tensor of another size, a view with gaps or an
address that a vector load cannot take would end in a wrong result or in a GPU
error that outlives the call, so none gets past `Signature.bind`.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .epilogue import Epilogue
from .errors import ArgumentError
from .reference import Array, numpy_dtype
from .shape import Shape
from .workspace import Workspace

ALIGNMENT = 16
"""Bytes that the first element of every tensor is aligned to: the widest vector of a GPU."""


class Bound(NamedTuple):
    """Checked arguments: what the compiled function takes, and what the caller gets."""

    arguments: tuple[Any, ...]
    result: Any
    device: Any = None
    """To wait for behind the launch: JAX reads results by streams of its own."""


@dataclass(frozen=True)
class _Facts:
    """What a check wants to know of a tensor, whichever library it comes from."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    contiguous: bool
    address: int


class Signature:
    """Names, shapes and dtype of a kernel's tensors, in the order of its parameters.

    The device is where they must be; OpenCL kernels take arrays of the host. The workspace has
    dtypes and shapes of the tensors before the output, which no caller sees.
    """

    def __init__(self, shape: Shape, epilogue: Epilogue, device: str, *, workspace: Workspace = ()) -> None:
        inputs = shape.input_shapes | epilogue.operands(shape)
        self.names = (*inputs, "out")
        self.shapes = (*inputs.values(), shape.result_shape)
        self.dtype = shape.dtype
        self.nbytes = tuple(prod(extents) * shape.itemsize for extents in self.shapes)
        self.device = device
        self._workspace = workspace
        self._scratch: dict[Any, list[Any]] = {}
        # torch's weight is the same memory as ours in NCHW, and with one filter the same shape.
        several = shape.channel_multiplier > 1 and shape.operation != "grad_weight"
        self._torch_weight = (shape.out_channels, 1, *shape.kernel) if shape.layout == "NCHW" and several else None
        self._numpy_dtype = numpy_dtype(shape.dtype)

    def bind(self, inputs: tuple[Any, ...], out: Any = None) -> Bound:
        """Check the tensors, or raise an `ArgumentError`; make the output if there is none."""
        if len(inputs) != len(self.names) - 1:
            wanted = ", ".join(self.names[:-1])
            raise ArgumentError(
                f"the kernel takes {len(self.names) - 1} tensors ({wanted}) and out=, got {len(inputs)}"
            )
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(inputs[0], torch.Tensor):
            return self._bind_torch(torch, inputs, out)
        if isinstance(inputs[0], np.ndarray):
            return self._bind_numpy(inputs, out)
        if self.device == "opencl":
            raise ArgumentError(f"OpenCL kernels take NumPy arrays, got {_kind(inputs[0])}")
        return self._bind_dlpack(inputs, out)

    def _named(self, inputs: tuple[Any, ...], out: Any) -> Iterator[tuple[str, tuple[int, ...], Any]]:
        return zip(self.names, self.shapes, inputs if out is None else (*inputs, out), strict=False)

    # torch: the hot path. Compiled code compares types, sizes, strides and devices itself;
    # here is what it does not look at. The words for an error come after.

    def _bind_torch(self, torch: Any, inputs: tuple[Any, ...], out: Any) -> Bound:
        inputs = self._with_own_weight(inputs)
        given = inputs if out is None else (*inputs, out)
        recording, fine, addresses = torch.is_grad_enabled(), True, []
        try:
            for tensor in given:
                address = tensor.data_ptr()
                if address % ALIGNMENT or tensor.is_neg() or (recording and tensor.requires_grad):
                    fine = False
                addresses.append(address)
        except (AttributeError, RuntimeError):  # no torch tensor, or one without memory
            fine = False
        if not fine:
            self.explain(inputs, out)
        if out is None:
            out = inputs[0].new_empty(self.shapes[-1])
        else:
            try:
                self._check_overlap(addresses)
            except ArgumentError:  # or a tensor is smaller than the kernel's, and ends before out
                self.explain(inputs, out)
                raise
        return Bound(self.arguments(inputs, out), out)

    def arguments(self, inputs: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        """Return what the compiled function takes of torch tensors: with a workspace."""
        if not self._workspace:
            return *inputs, out
        torch: Any = sys.modules["torch"]
        scratch = [inputs[0].new_empty(extents, dtype=getattr(torch, dtype)) for dtype, extents in self._workspace]
        return *inputs, *scratch, out

    def _with_own_weight(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """View torch's weight of several filters a channel as ours."""
        weight = inputs[1]
        if self._torch_weight is None or getattr(weight, "shape", None) != self._torch_weight:
            return inputs
        return (inputs[0], weight.view(self.shapes[1]), *inputs[2:]) if weight.is_contiguous() else inputs

    def explain(self, inputs: tuple[Any, ...], out: Any = None) -> None:
        """Look at torch's tensors as compiled code does, and raise an error for what it refuses."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(inputs[0], torch.Tensor):
            return
        inputs = self._with_own_weight(inputs)
        for name, shape, tensor in self._named(inputs, out):
            self._explain_torch(torch, name, shape, tensor, inputs[0].device)

    def _explain_torch(self, torch: Any, name: str, shape: tuple[int, ...], tensor: Any, device: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor like data, got {_kind(tensor)}")
        if self.device == "opencl":
            raise ArgumentError("OpenCL kernels take NumPy arrays, got torch tensors")
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"{name} must be a dense tensor, got layout {tensor.layout}")
        self._check(name, shape, _facts(tensor), str(device))
        if tensor.is_neg():
            raise ArgumentError(f"{name} is a negated view; call resolve_neg() on it")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"{name} requires a gradient, which a kernel does not record; "
                "call it under torch.no_grad() or with .detach()"
            )

    # NumPy: likewise.

    def _bind_numpy(self, inputs: tuple[Any, ...], out: Any) -> Bound:
        dtype, on_host = self._numpy_dtype, self.device != "cuda"
        tensors, addresses = [], []
        for name, shape, array in self._named(inputs, out):
            if (
                not isinstance(array, np.ndarray)
                or array.shape != shape
                or array.dtype != dtype
                or not array.flags.c_contiguous
                or not on_host
            ):
                self._explain_numpy(name, shape, array)
            tensor = _tensor_of_array(array, self.dtype)
            address = tensor.data_ptr() if array.flags.writeable else _address(array)
            if address % ALIGNMENT:
                self._explain_numpy(name, shape, array)
            tensors.append(tensor)
            addresses.append(address)
        if out is None:
            out = np.empty(self.shapes[-1], dtype)
            tensors.append(_tensor_of_array(out, self.dtype))
        else:
            if not out.flags.writeable:
                raise ArgumentError("out must be writeable, got a read-only array")
            self._check_overlap(addresses)
        if self.device == "opencl":
            scratch = [np.empty(extents, numpy_dtype(dtype)) for dtype, extents in self._workspace]
            return Bound((*inputs, *scratch, out), out)
        return Bound(tuple(tensors), out)

    def _explain_numpy(self, name: str, shape: tuple[int, ...], array: Any) -> None:
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"{name} must be a NumPy array like data, got {_kind(array)}")
        facts = _Facts(array.shape, str(array.dtype), "cpu", array.flags.c_contiguous, _address(array))
        self._check(name, shape, facts, "cpu")

    def _bind_dlpack(self, inputs: tuple[Any, ...], out: Any) -> Bound:
        import tvm_ffi

        tensors, facts = [], []
        for name, shape, array in self._named(inputs, out):
            if not hasattr(array, "__dlpack__"):
                raise ArgumentError(
                    f"{name} must be a NumPy array, a torch tensor or anything with __dlpack__, got {_kind(array)}"
                )
            tensor = tvm_ffi.from_dlpack(array)
            tensors.append(tensor)
            facts.append(_facts(tensor))
            self._check(name, shape, facts[-1], facts[0].device)
        import tvm

        device = tensors[0].device
        scratch = self._kept_workspace(device)
        if out is not None:
            self._check_overlap([fact.address for fact in facts])
            return Bound((*tensors[:-1], *scratch, tensors[-1]), out)
        made = tvm.runtime.empty(self.shapes[-1], self.dtype, device)
        result = _importer(inputs[0])(made)
        is_jax = type(result).__module__.startswith("jax")
        return Bound((*tensors, *scratch, made), result, made.device if is_jax else None)

    def _kept_workspace(self, device: Any) -> list[Any]:
        """Give a thread its workspace on a device, the same at every call.

        What is freed while a stream or a graph still uses it would be somebody else's; torch's allocator knows of
        these, TVM's does not.
        """
        import tvm

        key = (threading.get_ident(), str(device))
        if key not in self._scratch:
            self._scratch[key] = [tvm.runtime.empty(extents, dtype, device) for dtype, extents in self._workspace]
        return self._scratch[key]

    def _check(self, name: str, shape: tuple[int, ...], facts: _Facts, device: str) -> None:
        home = "cpu" if self.device == "opencl" else self.device
        if facts.device.partition(":")[0] != home:
            raise ArgumentError(f"{name} must be on {home}, got {facts.device}")
        if facts.device != device:
            raise ArgumentError(f"{name} must be on data's device {device}, got {facts.device}")
        if facts.shape != shape:
            raise ArgumentError(f"{name} must have shape {shape}, got {facts.shape}")
        if facts.dtype.removeprefix("torch.") != self.dtype:
            raise ArgumentError(f"{name} must be {self.dtype}, got {facts.dtype}")
        if not facts.contiguous:
            raise ArgumentError(f"{name} must be contiguous; make a contiguous copy of it")
        if facts.address % ALIGNMENT:
            raise ArgumentError(
                f"{name} must start at a multiple of {ALIGNMENT} bytes, got one "
                f"{facts.address % ALIGNMENT} bytes past it; make a copy of the view"
            )

    def _check_overlap(self, addresses: list[int]) -> None:
        *inputs, out = addresses
        end = out + self.nbytes[-1]
        for name, address, nbytes in zip(self.names, inputs, self.nbytes, strict=False):
            if address < end and out < address + nbytes:
                raise ArgumentError(f"out must not overlap {name} in memory")


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _facts(tensor: Any) -> _Facts:
    extents = tuple(map(int, tensor.shape))
    return _Facts(extents, str(tensor.dtype), str(tensor.device), tensor.is_contiguous(), tensor.data_ptr())


def _address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def on_gpu(array: Array) -> Any:
    """Copy an array to the first GPU, as a tensor of TVM's."""
    import tvm

    return tvm.runtime.tensor(array, tvm.cuda(0))


def _tensor_of_array(array: Array, dtype: str) -> Any:
    """Wrap an array for TVM; only bfloat16 and read-only arrays need help with DLPack."""
    import tvm  # noqa: F401  # gives tensors their views
    import tvm_ffi

    if not array.flags.writeable:
        array = array.copy()  # DLPack cannot say "read-only", and NumPy will not lie
    if dtype == "bfloat16":
        return tvm_ffi.from_dlpack(array.view(np.uint16))._create_view(array.shape, "bfloat16")
    return tvm_ffi.from_dlpack(array)


def _importer(array: Any) -> Callable[[Any], Any]:
    """Find the function that makes a DLPack tensor an array of the same library as `array`."""
    namespace = getattr(array, "__array_namespace__", None)
    library = namespace() if namespace else sys.modules.get(type(array).__module__.split(".")[0])
    found: Callable[[Any], Any] = getattr(library, "from_dlpack", lambda tensor: tensor)
    return found
