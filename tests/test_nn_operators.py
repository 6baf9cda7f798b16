"""The operators inside torch, and what imports what."""

from functools import partial

import pytest
import torch
from torch import randn
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from dwtir import ArgumentError
from dwtir.nn import DepthwiseConv2d, ops
from dwtir.nn.functional import depthwise_conv2d
from dwtir.nn.tensors import memory_format
from marks import devices, gpu, parametrize, raises, warnings_allowed
from networks import forms, image_in
from processes import python
from streams import captured, on_another_stream

GEOMETRY = ((2, 1), (1, 1, 2, 0), (1, 2))


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch.manual_seed(0)
    torch.compiler.reset()


def images():
    image = randn(2, 6, 9, 11)
    last = image.contiguous(memory_format=torch.channels_last)
    return {
        "contiguous": image,
        "channels last": last,
        "cropped": image[..., 1:],
        "channels last, cropped": last[..., 1:, :],
        "transposed": image.transpose(2, 3),
        "expanded": image[:1].expand(3, -1, -1, -1),
        "misaligned": image.flatten()[6 * 9 * 11 :].view(1, 6, 9, 11),
        "channels backwards": last.permute(0, 3, 2, 1)[:, :6],
    }


@parametrize("wanted", [False, True])
@parametrize("name", images())
def test_torch_checks_the_operators(name, wanted):
    """The schemas are right, and the fake kernels' results have the real ones' strides."""
    image, weight, bias = images()[name].requires_grad_(wanted), randn(12, 1, 3, 3, requires_grad=wanted), randn(12)
    for given in (bias,) if wanted else (bias, None):
        opcheck(ops.depthwise_conv2d, (image, weight, given, *GEOMETRY))
    if not wanted:
        opcheck(ops.fused, (image, weight, [bias], "bias+relu", *GEOMETRY))
    gradient = torch.randn_like(ops.depthwise_conv2d(image, weight, None, *GEOMETRY)).requires_grad_(wanted)
    last = memory_format(image) is torch.channels_last
    opcheck(ops.grad_data, (gradient, weight, image.shape, last, *GEOMETRY))
    opcheck(ops.grad_weight, (image, gradient, weight.shape, *GEOMETRY))


def test_epilogue_has_no_gradient():
    given = (randn(1, 4, 5, 5), randn(4, 1, 3, 3, requires_grad=True), [], "relu", *GEOMETRY)
    with raises(ArgumentError, match="a fused epilogue has no gradient"):
        ops.fused(*given)
    with torch.no_grad():
        ops.fused(*given)


def network(padding="SAME"):
    first = DepthwiseConv2d(8, 16, 3, 2, padding)
    return torch.nn.Sequential(first, torch.nn.ReLU(), DepthwiseConv2d(16, 16, 5, 1, "same", 2))


compiled_graph = partial(torch.compile, fullgraph=True, backend="aot_eager")


class _Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


class _Tagged(torch.Tensor):
    """A tensor that is told of the functions that get it."""


def test_who_watches_sees_the_operators():
    image, weight = randn(1, 6, 8, 8), randn(6, 1, 3, 3, requires_grad=True)
    filters = "dwtir.depthwise_conv2d_grad_weight.default"
    with _Seen() as seen:
        out = depthwise_conv2d(image, weight)
        out.sum().backward()
    assert {"dwtir.depthwise_conv2d.default", filters} <= seen.names
    alone = depthwise_conv2d(image, weight)
    assert_close(alone, out)
    with _Seen() as seen:
        alone.sum().backward()
    assert filters in seen.names


def test_subclass_of_a_tensor_stays_one():
    assert type(depthwise_conv2d(randn(1, 6, 8, 8).as_subclass(_Tagged), randn(6, 1, 3, 3))) is _Tagged


def test_tensor_without_values():
    with FakeTensorMode() as mode:
        assert depthwise_conv2d(mode.from_tensor(randn(1, 6, 8, 8)), torch.empty(6, 1, 3, 3)).shape == (1, 6, 6, 6)
    with raises(NotImplementedError):
        depthwise_conv2d(randn(1, 6, 8, 8).to_sparse(), randn(6, 1, 3, 3))


@forms
def test_plain_tensors_give_the_same(form):
    values = [randn(2, 6, 9, 11).to(memory_format=form), randn(12, 1, 3, 3), randn(12)]
    found = []
    for compute in (ops.depthwise_conv2d, depthwise_conv2d):
        tensors = [value.clone().requires_grad_() for value in values]
        out = compute(*tensors, *GEOMETRY)
        first = torch.autograd.grad(out.pow(2).sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(grad.pow(2).sum() for grad in first), tensors)
        found.append((out, *first, *second))
    for ours, theirs in zip(*found, strict=True):
        assert ours.stride() == theirs.stride()
        assert_close(ours, theirs, rtol=0, atol=0)


@parametrize("mixed", [False, True])
@forms
def test_compiles_as_one_graph(form, mixed):
    model, image = network(), image_in(form, 2, 8, 15, 17)
    compiled = compiled_graph(model)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        assert torch.equal(compiled(image), model(image))
        assert compiled(image).stride() == model(image).stride()


@warnings_allowed
@parametrize("options", [{"backend": "aot_eager", "dynamic": True}, {"backend": "inductor"}])
def test_compiles_for_sizes_that_change(options):
    model = network()
    compiled = torch.compile(model, fullgraph=True, **options)
    sizes = [(2, 8, 15, 17), (3, 8, 15, 17), (5, 8, 22, 13)]
    with torch.no_grad():
        for image in map(randn, sizes[: 3 if "dynamic" in options else 1]):
            assert_close(compiled(image), model(image))


@forms
def test_compiles_with_gradients(form):
    model, image = network(), image_in(form, 2, 8, 15, 17)
    compiled = compiled_graph(model)
    for _ in range(2):
        found = []
        for function in (compiled, model):
            model.zero_grad()
            function(image).square().mean().backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        assert_close(*found)
        torch.optim.SGD(model.parameters(), 0.1).step()


@warnings_allowed
@parametrize("padding", ["SAME", 1])
def test_exports(padding):
    """TensorFlow's padding needs the image's size; torch's leaves it open."""
    model, image = network(padding).eval(), randn(2, 8, 15, 17)
    sizes, height = {0: torch.export.Dim("batch")}, 15
    if padding != "SAME":
        sizes[2], height = torch.export.Dim("height", min=4), 22
    exported = torch.export.export(model, (image,), dynamic_shapes=(sizes,)).module()
    with torch.no_grad():
        for example in (image, randn(5, 8, height, 17)):
            assert torch.equal(exported(example), model(example))


def batched(tensors, dims):
    return [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(tensors, dims, strict=True)]


@forms
@parametrize("dims", [(0, None, None), (None, 0, 0), (2, 0, None), (0, None, 0)])
def test_maps_over_a_dimension(dims, form):
    images = torch.stack([image_in(form, 2, 8, 9, 7) for _ in range(3)])
    given = batched([images, randn(3, 16, 1, 3, 3), randn(3, 16)], dims)
    functions = partial(depthwise_conv2d, padding=1), partial(F.conv2d, padding=1, groups=8)
    assert_close(*(torch.vmap(function, dims)(*given) for function in functions))


@parametrize("dims", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_maps_over_the_gradients(dims):
    geometry = ((1, 1), (1, 1, 1, 1), (1, 1))
    image, out, weight = (2, 8, 9, 7), (2, 16, 9, 7), (16, 1, 3, 3)

    for function, *sizes in (
        (lambda *tensors: ops.grad_data(*tensors, image, False, *geometry), out, weight),
        (lambda *tensors: ops.grad_weight(*tensors, weight, *geometry), image, out),
    ):
        tensors = [randn(3, *size) for size in sizes]
        one_by_one = [
            function(*(t[0 if d is None else i] for t, d in zip(tensors, dims, strict=True))) for i in range(3)
        ]
        assert_close(torch.vmap(function, dims)(*batched(tensors, dims)), torch.stack(one_by_one))


USE = """
import torch, dwtir.nn
image = torch.ones(1, 4, 5, 5, device=DEVICE)
print(dwtir.nn.DepthwiseConv2d(4, 4, 3, bias=False, device=DEVICE)(image).shape[-1])
print(int(torch.nn.functional.relu(image).sum()))
"""


@devices
@parametrize("first", ["torch", "tvm", "dwtir", "dwtir.nn"])
def test_order_of_imports_does_not_matter(first, device):
    assert python(f"import {first}" + USE.replace("DEVICE", repr(device))) == "3\n100"


def test_without_torch_the_extra_is_named():
    code = """
import sys
sys.modules["torch"] = None
import dwtir
dwtir.build("1x2x5x5_k3", target="cpu")
try:
    import dwtir.nn
except dwtir.ToolchainError as error:
    print(error)
"""
    assert python(code) == "dwtir.nn needs torch: pip install 'dwtir[torch]'"


def on_gpu(form):
    return image_in(form, 2, 8, 9, 9).cuda(), randn(8, 1, 3, 3).cuda()


@gpu
def test_runs_on_the_current_stream():
    image, weight = on_gpu(torch.channels_last)
    expected = depthwise_conv2d(image, weight)
    assert torch.equal(on_another_stream(lambda late: depthwise_conv2d(late, weight), image), expected)


@gpu
@forms
def test_cuda_graph_sees_the_present_weight(form):
    image, weight = on_gpu(form)
    depthwise_conv2d(image, weight)
    graph, got = captured(lambda: depthwise_conv2d(image, weight))
    for factor in (1, 2, -1):
        weight.mul_(factor)
        graph.replay()
        assert torch.equal(got, depthwise_conv2d(image, weight))


@gpu
def test_runs_on_another_device():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    image, weight = randn(2, 8, 9, 9), randn(8, 1, 3, 3)
    got = depthwise_conv2d(image.to(last), weight.to(last))
    assert got.device == last
    assert_close(got.cpu(), F.conv2d(image, weight, groups=8))


def test_operators_are_there_by_name():
    assert ops.depthwise_conv2d is torch.ops.dwtir.depthwise_conv2d.default
