"""`dwtir.nn`: the function and its gradients, beside those of torch."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import randn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.testing import assert_close

from dwtir import ArgumentError, Epilogue, InvalidShapeError, Shape, reference
from dwtir.nn import DepthwiseConv2d, eager
from dwtir.nn.functional import depthwise_conv2d
from dwtir.nn.tensors import arranged, memory_format, packed_weight
from marks import devices, parametrize, raises
from networks import FORMS, forms, image_in
from strategies import error_bound, named_shapes, real_tensors, seeds, shapes

BIAS = Epilogue(("bias",))


# Images of every kind


def as_they_are(image):
    return image


def cropped(image):
    around = F.pad(image, (1, 0, 2, 1)).contiguous(memory_format=memory_format(image))
    return around[..., 2:-1, 1:]


def turned(image):
    return image.transpose(2, 3).contiguous().transpose(2, 3)


def misaligned(image):
    memory = torch.empty(image.numel() + 1, dtype=image.dtype, device=image.device)
    return memory[1:].as_strided(image.shape, image.stride()).copy_(image)


KINDS = [as_they_are, cropped, turned, misaligned]


def torch_tensors(shape, seed, device="cpu"):
    dtype, arrays = getattr(torch, shape.dtype), real_tensors(shape, BIAS, seed).values()
    data, weight, bias = (torch.from_numpy(array.astype(np.float32)).to(device, dtype) for array in arrays)
    if shape.layout == "NHWC":
        data, weight = data.permute(0, 3, 1, 2), weight.permute(2, 3, 0, 1)
    return data, weight.reshape(shape.out_channels, 1, *shape.kernel), bias


def torchs(shape, data, weight, bias=None):
    top, left, bottom, right = shape.padding
    data = F.pad(data, (left, right, top, bottom))
    return F.conv2d(data, weight, bias, shape.stride, 0, shape.dilation, groups=shape.in_channels)


@devices
@given(shape=shapes(flop=200_000), kind=st.sampled_from(KINDS), seed=seeds)
@named_shapes(kind=cropped, seed=0)
def test_function_and_gradients_are_torchs(device, shape, kind, seed):
    data, weight, bias = torch_tensors(shape, seed, device)
    image, geometry = kind(data), (shape.stride, shape.padding, shape.dilation)
    got = depthwise_conv2d(image, weight, bias, *geometry)
    assert (got.dtype, got.device) == (image.dtype, image.device)
    assert got.stride() == torch.empty(got.shape, memory_format=memory_format(image)).stride()
    expected = torchs(shape, *(tensor.cpu().double() for tensor in (data, weight, bias)))
    bound = torch.from_numpy(error_bound(shape, BIAS, real_tensors(shape, BIAS, seed)))
    if shape.layout == "NHWC":
        bound = bound.permute(0, 3, 1, 2)
    assert ((got.cpu().double() - expected).abs() <= bound).all()

    tensors = [tensor.requires_grad_() for tensor in (image, weight, bias)]
    out = depthwise_conv2d(*tensors, *geometry)
    gradient = randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(device, out.dtype)
    got = torch.autograd.grad(out, tensors, kind(gradient))
    assert torch.equal(got[2], kind(gradient).sum((0, 2, 3)))
    image, filters, out_gradient = (t.detach().double().cpu().numpy() for t in (data, weight, gradient))
    shape = replace(shape, layout="NCHW")
    filters = filters.reshape(shape.weight_shape)
    inputs_of = {"grad_data": (out_gradient, filters), "grad_weight": (image, out_gradient)}
    for result, (operation, inputs) in zip(got, inputs_of.items(), strict=False):
        described = replace(shape, operation=operation)
        expected = reference.depthwise_conv2d(described, *inputs)
        found = result.double().cpu().numpy().reshape(expected.shape)
        assert (np.abs(found - expected) <= reference.error_bound(described, *inputs)).all(), operation


@forms
def test_both_formats_need_no_copy(form):
    image = image_in(form, 2, 3, 5, 7)
    assert memory_format(image) is form
    assert arranged(image, form) is image


@forms
def test_empty_batch(form):
    image = torch.empty(0, 4, 9, 11, requires_grad=True).contiguous(memory_format=form)
    weight = randn(8, 1, 3, 3, requires_grad=True)
    got = depthwise_conv2d(image, weight, stride=2)
    assert got.shape == F.conv2d(image, weight, None, 2, groups=4).shape
    got.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@forms
def test_same_sizes_may_lie_otherwise(form):
    """What a call came to is kept; it is not for tensors that only look alike."""
    image = image_in(form, 2, 6, 9, 9)
    weight, bias = randn(6, 1, 3, 3), randn(6)
    alike = [(image, weight, bias)] * 2
    alike += [(other, weight, bias) for other in (*(kind(image) for kind in KINDS), image._neg_view())]
    alike += [(image, other, bias) for other in (weight._neg_view(), weight.mT, misaligned(weight))]
    alike += [(image, weight, other) for other in (bias.repeat(2)[::2], misaligned(bias))]
    with torch.inference_mode():
        alike.append((image.clone(), weight.clone(), bias))
    for stride in (1, (2, 1), [2, 1]):
        for tensors in alike:
            assert_close(depthwise_conv2d(*tensors, stride, 1), F.conv2d(*tensors, stride, 1, groups=6))


@parametrize(("size", "stride"), [((9, 10), 1), ((9, 10), 2), ((7, 5), (3, 2))])
@parametrize("dilation", [1, 2])
def test_tensorflows_padding(size, stride, dilation):
    image, weight = randn(1, 4, *size), randn(4, 1, 3, 4)
    shape = replace(Shape.parse(f"1x4x{size[0]}x{size[1]}_k3x4"), stride=stride, dilation=dilation, padding="SAME")
    assert_close(depthwise_conv2d(image, weight, None, stride, "SAME", dilation), torchs(shape, image, weight))


IMAGE, WEIGHT = torch.zeros(1, 4, 9, 9), torch.zeros(8, 1, 3, 3)


@parametrize(
    ("arguments", "message"),
    [
        ((IMAGE[0, 0], WEIGHT), r"input must be \(N, C, H, W\) or \(C, H, W\), got \(9, 9\)"),
        ((IMAGE[:, :0], WEIGHT), r"input must have channels, got \(1, 0, 9, 9\)"),
        ((IMAGE, WEIGHT[:6]), r"weight must be \(k \* 4, 1, kh, kw\) .* got \(6, 1, 3, 3\)"),
        ((IMAGE.double(), WEIGHT.double()), "input must be float32, .* got torch.float64"),
        ((IMAGE, WEIGHT.half()), "weight must be float32, got torch.float16"),
        ((IMAGE, WEIGHT, torch.zeros(4)), r"bias must have shape \(8,\), got \(4,\)"),
        ((IMAGE, WEIGHT, None, 0), "stride must be >= 1, got 0"),
        ((IMAGE, WEIGHT, None, (1, 2, 3)), r"stride must be one integer or two, got \(1, 2, 3\)"),
        ((IMAGE, WEIGHT, None, 1, (1, 2, 3)), "padding must be one, two or four integers"),
        ((IMAGE, WEIGHT, None, 1, "full"), "padding must be integers, 'valid', 'same' or 'SAME'"),
        ((IMAGE, WEIGHT, None, 2, "same"), "padding='same' is for a stride of 1"),
        ((IMAGE, WEIGHT, None, 1, 0, 1.5), "dilation must be integers, got 1.5"),
    ],
)
def test_what_no_kernel_takes_is_refused(arguments, message):
    with raises(ArgumentError, match=message):
        depthwise_conv2d(*arguments)


def test_empty_output_is_refused():
    with raises(InvalidShapeError, match="the output is empty"):
        depthwise_conv2d(IMAGE, torch.zeros(4, 1, 11, 11))


# The packed weight: it follows the weight


def assert_right(weight):
    image = image_in(torch.channels_last, 1, 6, 5, 5)
    assert_close(depthwise_conv2d(image, weight), F.conv2d(image, weight, groups=6))


@parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.copy_(randn(6, 1, 3, 3)),
        lambda weight: setattr(weight, "data", randn(6, 1, 3, 3)),
        lambda weight: weight.detach()[1].zero_(),
    ],
)
def test_changed_weight_is_packed_anew(change):
    weight = randn(6, 1, 3, 3)
    assert_right(weight)
    assert packed_weight(weight) is packed_weight(weight)
    change(weight)
    assert_right(weight)


def test_packed_weights_are_freed():
    weight = randn(6, 1, 3, 3)
    alive = weakref.ref(packed_weight(weight))
    gc.collect()
    assert alive() is not None
    del weight
    gc.collect()
    assert alive() is None


def test_weight_without_a_version():
    with torch.inference_mode():
        weight = randn(6, 1, 3, 3)
        for _ in range(2):
            assert_right(weight)
            weight.mul_(2)


def test_right_weights_are_not_copied():
    weight = randn(3, 3, 6).permute(2, 0, 1).unsqueeze(1)
    assert packed_weight(weight).data_ptr() == weight.data_ptr()
    assert_right(weight)


@parametrize("multiplier", [1, 2])
def test_channels_last_trains_a_packed_weight(multiplier):
    layer = DepthwiseConv2d(4, 4 * multiplier, 3, padding=1).to(memory_format=torch.channels_last)
    other = torch.nn.Conv2d(4, 4 * multiplier, 3, padding=1, groups=4)
    other.load_state_dict(layer.state_dict())
    assert layer.weight.permute(2, 3, 0, 1).is_contiguous()
    for image in (image_in(form, 2, 4, 6, 5) for form in FORMS):
        for net in (layer, other):
            net.zero_grad()
            net(image).square().sum().backward()
        for ours, theirs in ((layer.weight, other.weight), (layer.bias, other.bias)):
            assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert layer.weight.grad.stride() == layer.weight.stride()
    assert layer.to(memory_format=torch.contiguous_format).weight.is_contiguous()


@forms
def test_gradients_of_gradients(form):
    def penalty(function, groups):
        torch.manual_seed(0)
        image = image_in(form, 2, 6, 9, 8).requires_grad_()
        weight, bias = (randn(n, requires_grad=True) for n in ((12, 1, 3, 3), (12,)))
        tensors = (image, weight, bias)
        out = function(*tensors, (2, 1), (1, 2), (1, 2), **groups)
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum() + first[1].sum(), tensors[:2])
        return [*first, *second]

    ours, theirs = penalty(depthwise_conv2d, {}), penalty(F.conv2d, {"groups": 6})
    for got, expected in zip(ours, theirs, strict=True):
        assert_close(got, expected, rtol=1e-5, atol=1e-6 * float(expected.detach().abs().max()))


@parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_wanted_gradients(wanted):
    image, weight = randn(1, 4, 7, 7, requires_grad=wanted[0]), randn(4, 1, 3, 3, requires_grad=wanted[1])
    out = depthwise_conv2d(image, weight)
    assert out.requires_grad == any(wanted)
    if any(wanted):
        out.sum().backward()
    assert (image.grad is not None, weight.grad is not None) == wanted


# Who looks at what is computed


def convolution(image):
    return depthwise_conv2d(image, torch.ones(6, 1, 3, 3))


def test_no_forward_mode():
    image = randn(1, 6, 5, 5)
    with raises(ArgumentError, match="no forward-mode derivatives"):
        torch.func.jvp(convolution, (image,), (image,))
    with forward_ad.dual_level():
        convolution(image)
        with raises(ArgumentError, match="no forward-mode derivatives"):
            convolution(forward_ad.make_dual(image, image))


@forms
def test_jacobian_of_all_outputs_at_once(form):
    image = image_in(form, 1, 6, 4, 4)
    found = torch.autograd.functional.jacobian(convolution, image, vectorize=True)
    assert_close(found, torch.autograd.functional.jacobian(convolution, image))


def test_default_device_is_nobody_who_looks():
    image = randn(1, 6, 5, 5)
    with torch.device("cpu"):
        assert eager.key(image, torch.ones(6, 1, 3, 3), None) is not None


def test_saved_tensors_may_come_back_in_another_layout():
    image, weight = image_in(FORMS[1]), randn(6, 1, 3, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().contiguous(), lambda tensor: tensor):
        out = depthwise_conv2d(image, weight)
    (found,) = torch.autograd.grad(out.sum(), weight)
    assert_close(found, torch.autograd.grad(F.conv2d(image, weight, groups=6).sum(), weight)[0])


@parametrize(("image", "weight"), [((0, 4, 9, 9), (6, 2, 3, 3)), ((0, 6, 1, 1), (6, 1, 3, 3))])
def test_no_images_are_checked_too(image, weight):
    with raises((ArgumentError, InvalidShapeError)):
        depthwise_conv2d(torch.zeros(image), torch.zeros(weight))
