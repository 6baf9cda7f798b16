"""The gradients: adjoints of the convolution, reproducible, and kernels like any other."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

import dwtir
from backends import CPU, CUDA, OPENCL
from dwtir import Epilogue, InvalidEpilogueError, Shape, reference, schedules
from dwtir.notation import OPERATIONS
from marks import devices, gpu, layouts, needs_gpu, parametrize
from strategies import integer_tensors, named_shapes, real_tensors, seeds, shapes
from streams import captured

GRADIENTS = [operation for operation in OPERATIONS if operation != "forward"]


def all_tensors(shape, seed):
    """Make data, weight and the gradient of the output."""
    wanted = (replace(shape, operation=operation) for operation in OPERATIONS)
    return {name: array for one in wanted for name, array in real_tensors(one, Epilogue(), seed).items()}


@given(shape=shapes(flop=200_000), seed=seeds)
@named_shapes(seed=0)
def test_the_oracle_is_its_own_adjoint(shape, seed):
    """A convolution is linear in data and in weight: <g, y> = <dx, x> = <dw, w>.

    As dx does not know x, nor dw w, this makes them the derivatives.
    """
    tensors = {name: array.astype(np.float64) for name, array in all_tensors(shape, seed).items()}
    results = {}
    for operation in OPERATIONS:
        one = replace(shape, operation=operation)
        results[operation] = reference.depthwise_conv2d(one, *(tensors[name] for name in one.input_shapes))
    pairs = {"forward": "grad_out", "grad_data": "data", "grad_weight": "weight"}
    products = [np.vdot(tensors[name], results[operation]) for operation, name in pairs.items()]
    size = np.linalg.norm(tensors["grad_out"]) * np.linalg.norm(results["forward"])
    np.testing.assert_allclose(products, products[0], rtol=0, atol=1e-12 * max(size, 1))


@parametrize("backend", [CPU, OPENCL, needs_gpu(CUDA)])
@layouts
def test_the_weights_gradient_is_the_same_bits_every_time(backend, layout):
    shape = Shape.parse(f"3x40x29x31_k3_s2_p1_{layout}_wgrad")
    tile = schedules.choose(shape, backend.target())
    if backend.on_gpu:
        tile = replace(tile, threads=tile.threads // 2, parts=2, part_threads=2)
    first, *others = backend.run(tile, shape, Epilogue(), *[real_tensors(shape, Epilogue(), 0)] * 4)
    assert {other.tobytes() for other in others} == {first.tobytes()}


@parametrize("operation", GRADIENTS)
def test_a_gradient_has_no_epilogue(operation):
    shape = replace(Shape.parse("1x4x9x9_k3_p1"), operation=operation)
    with pytest.raises(InvalidEpilogueError, match=f"got bias.* for {operation}"):
        dwtir.build(shape, epilogue="bias", target="cpu")


@parametrize("target", ["cpu", "opencl", needs_gpu("cuda")])
@layouts
@parametrize("ending", ["dgrad", "wgrad"])
def test_a_gradient_is_built_and_called_like_a_convolution(target, layout, ending):
    shape = Shape.parse(f"2x24x17x15_k5_s2x1_p2_m2_{layout}_{ending}")
    kernel = dwtir.build(shape, target=target)
    tensors = list(integer_tensors(shape, Epilogue(), 0).values())
    expected = reference.depthwise_conv2d(shape, *tensors)
    if target == "cuda":
        tensors = [torch.from_numpy(array).cuda() for array in tensors]
    out = kernel(*tensors)
    np.testing.assert_array_equal(out.cpu().numpy() if target == "cuda" else out, expected)
    assert (kernel.info.workspace != ()) == (getattr(kernel.strategy, "parts", 1) > 1)
    first, second = shape.input_shapes
    with pytest.raises(dwtir.ArgumentError, match=f"{second} must have shape"):
        kernel(tensors[0], tensors[0])
    with pytest.raises(dwtir.ArgumentError, match=f"takes 2 tensors \\({first}, {second}\\)"):
        kernel(tensors[0])


@devices
def test_a_saved_gradient_is_loaded(device, tmp_path):
    kernel, file = dwtir.build("2x24x17x15_k3_p1_nhwc_wgrad", target=device), tmp_path / "kernel.so"
    kernel.export(file)
    again = dwtir.load(file)
    assert again.info == replace(kernel.info, resources=again.info.resources)


@gpu
def test_a_workspace_lives_as_long_as_a_graph():
    """torch's tensors and TVM's, captured in a CUDA graph and replayed on other values."""
    shape = Shape.parse("4x64x30x30_k3_p1_wgrad")
    kernel = dwtir.build(shape, target="cuda")
    extents = shape.data_shape, shape.out_shape, shape.weight_shape
    data, grad, out = (torch.randn(one, device="cuda") for one in extents)
    kernel(data, grad, out=out)
    graph, _ = captured(lambda: kernel(data, grad, out=out))
    data.copy_(torch.randn_like(data))
    rubbish = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    graph.replay()
    assert torch.equal(out, kernel(data, grad))
    assert len(rubbish) == 8
