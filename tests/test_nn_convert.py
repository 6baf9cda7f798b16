"""`dwtir.nn.convert`: what is replaced, fused and left."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dwtir import ArgumentError, Shape
from dwtir.nn import DepthwiseConv2d, convert, restore
from marks import gpu, parametrize, raises
from networks import FORMS, always, assert_close, chain, depthwise, example, forms, image_of, mobilenet, networks, stage
from streams import captured

pytestmark = pytest.mark.usefixtures("no_gradients")


def converted(model, image):
    expected = model(image)
    (layer,) = always(model, image).layers
    assert layer.replaced
    assert_close(model(image), expected)
    return layer


@forms
@networks
def test_network_computes_the_same(make, form):
    def addresses():
        return {name: values.data_ptr() for name, values in model.state_dict().items()}

    model, image, expected = example(form, make)
    state = addresses()
    assert always(model, image).replaced == [name for name, _ in model.named_modules() if name.endswith("depthwise")]
    assert_close(model(image), expected)
    assert model(image).stride() == expected.stride()
    assert addresses() == state
    restore(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(image), expected)


@parametrize("fuse", [True, False])
def test_report_names_each_layer(fuse):
    report = always(mobilenet(), image_of(2, 3, 32, 32), fuse=fuse)
    notes = [f"{i}.norm2, {i}.act2" if fuse else "" for i in (1, 2, 3)]
    assert [layer.note for layer in report.layers] == notes
    assert all(layer.replaced and layer.before is layer.after is None for layer in report.layers)
    assert report.layers[1].shape == str(Shape.parse("2x24x16x16_k3_s2_p1"))
    head, *rows, total = str(report).splitlines()
    assert head.split() == ["layer", "shape", "before", "us", "after", "us"]
    assert [row.split()[0] for row in rows] == ["1.depthwise", "2.depthwise", "3.depthwise"]
    assert total == "3 of 3 replaced"


@parametrize(  # any two of the three in all combinations
    ("norm", "bias", "form"), [(1, True, FORMS[0]), (1, False, FORMS[1]), (0, True, FORMS[1]), (0, False, FORMS[0])]
)
@parametrize("activation", [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.GELU, lambda: nn.ReLU(inplace=True), None])
def test_what_follows_is_folded(activation, norm, bias, form):
    followers = [nn.BatchNorm2d(6)] * norm + ([activation()] if activation else [])
    layer = converted(chain(depthwise(bias=bias), *followers, nn.Conv2d(6, 2, 1)), image_of(form=form))
    assert layer.note == ", ".join(str(1 + index) for index in range(len(followers)))


@parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_and_autocast(dtype):
    model, image, expected = example()
    tolerance = 16 * torch.finfo(dtype).eps * float(expected.abs().max())
    with torch.autocast("cpu", dtype=dtype):
        report = always(model, image)
        got = model(image)
    assert all(str(dtype).removeprefix("torch.") in layer.shape for layer in report.layers)
    torch.testing.assert_close(got.float(), expected, rtol=0.0, atol=tolerance)
    restore(model.to(dtype))
    image = image.to(dtype)
    assert len(always(model, image).replaced) == 3
    torch.testing.assert_close(model(image).float(), expected, rtol=0.0, atol=tolerance)


class Between(nn.Sequential):
    use = "nothing"

    def forward(self, image):
        conv, norm, act = self
        convolved = conv(image)
        if self.use == "before":
            convolved = convolved + 1
        normalised = norm(convolved)
        if self.use == "in place":
            convolved.neg_()
        out = act(normalised)
        if self.use == "residual":
            return out + convolved
        if self.use == "kept":
            self.seen = lambda: convolved
        if self.use == "output":
            return {"features": [normalised], "out": out}
        if self.use == "twice":
            return act(out - 1)
        return out


FOLDED = {"nothing": "1, 2", "output": "1", "twice": "1"}


@parametrize("use", [*FOLDED, "before", "in place", "residual", "kept"])
def test_what_others_use_is_not_folded(use):
    model, image = Between(*stage()).eval(), image_of()
    model.use = use
    expected = model(image)
    (layer,) = always(model, image).layers
    assert (layer.replaced, layer.note) == (True, FOLDED.get(use, ""))
    torch.testing.assert_close(model(image), expected, rtol=1e-5, atol=1e-5)


def test_what_is_watched_is_not_folded():
    model, image = stage(), image_of()
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    expected = model(image), seen.pop()
    assert always(model, image).layers[0].note == ""
    seen.clear()
    assert_close(model(image), expected[0])
    assert_close(seen[0], expected[1])


def test_what_runs_twice_is_not_fused():
    conv = depthwise()
    layer = converted(chain(conv, nn.ReLU(), conv, nn.ReLU()), image_of())
    assert (layer.name, layer.note) == ("0", "")


def test_images_of_any_strides():
    image, last = image_of(2, 6, 9, 9), image_of(2, 6, 9, 9, form=FORMS[1])
    for strange in (image[:1].expand(3, -1, -1, -1), image.transpose(2, 3), image[..., 1:, 2:], last[..., 1:]):
        converted(chain(depthwise(), nn.ReLU()), strange)


@parametrize(
    ("device", "batch", "note"),
    [("cpu", 0, "batch must be an integer >= 1, got 0"), ("meta", 1, "input must be on cpu or cuda, got meta")],
)
def test_empty_example_is_left(device, batch, note):
    with torch.device(device):
        (layer,) = always(chain(depthwise(), nn.ReLU()), image_of(batch, 6, 9, 9)).layers
    assert layer.note == note


def test_two_images_are_decided_apart():
    conv = depthwise()
    model, image = chain(conv, nn.MaxPool2d(2), conv), image_of(1, 6, 9, 8)
    expected = model(image)
    assert [layer.shape.split("_")[0] for layer in always(model, image).layers] == ["1x6x9x8", "1x6x4x4"]
    assert_close(model(image), expected)


# Classes with the names of timm's


class Conv2dSame(nn.Conv2d):
    def forward(self, image):
        return F.conv2d(F.pad(image, (0, 1, 1, 1)), self.weight, self.bias, self.stride, groups=6)


class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, drop, act):
        super().__init__(6)
        self.drop, self.act = drop, act

    def forward(self, image):
        return self.act(self.drop(super().forward(image)))


def test_tensorflows_padding():
    layer = converted(chain(Conv2dSame(6, 6, 3, 2, groups=6)), image_of(2, 6, 9, 8))
    assert layer.shape == str(Shape.parse("2x6x9x8_k3_s2_psame"))


@parametrize(
    ("follower", "folded"),
    [
        (nn.BatchNorm2d(6, affine=False), "1, 2"),
        (nn.BatchNorm2d(6, track_running_stats=False), ""),
        (nn.GroupNorm(2, 6), ""),
        (nn.GELU(approximate="tanh"), ""),
        (nn.Sigmoid(), ""),
        (BatchNormAct2d(nn.Identity(), nn.SiLU()), "1"),
        (BatchNormAct2d(nn.Identity(), nn.Identity()), "1, 2"),
        (BatchNormAct2d(nn.Identity(), nn.Sigmoid()), ""),
        (BatchNormAct2d(nn.Dropout(), nn.ReLU()), ""),
    ],
)
def test_what_is_a_step_is_folded(follower, folded):
    assert converted(chain(depthwise(), follower, nn.ReLU()), image_of()).note == folded


class Standardised(nn.Conv2d):
    def forward(self, image):
        return F.conv2d(image, self.weight / self.weight.norm(), self.bias, groups=6)


def with_own_forward():
    conv = depthwise()
    conv.forward = lambda image: image
    return conv


@parametrize(
    ("make", "reason"),
    [
        (lambda: depthwise(padding_mode="reflect"), "its padding is reflect"),
        (lambda: Standardised(6, 6, 3, groups=6), "its class Standardised computes something"),
        (with_own_forward, "it has a forward of its own"),
        (lambda: depthwise().double(), "input must be float32, .* got torch.float64"),
    ],
)
def test_what_no_kernel_computes_is_left(make, reason):
    model = chain(make())
    image = image_of().to(model[0].weight.dtype)
    expected = model(image)
    report = always(model, image)
    (layer,) = report.layers
    assert not layer.replaced
    assert re.match(reason, layer.note)
    assert str(report).count("left: ") == 1
    assert torch.equal(model(image), expected)


def test_layer_that_does_not_run_is_left():
    class First(nn.Sequential):
        def forward(self, image, run):
            return self[0](image) if run else image

    report = always(First(depthwise(), depthwise()), (image_of(), True))
    assert report.replaced == ["0"]
    assert [layer.replaced for layer in report.layers] == [True, False]
    assert str(report).splitlines()[-2].split("  ")[-1] == "left: the example does not run it"


def test_other_convolutions_are_not_reported():
    report = always(chain(nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 1, groups=3), nn.Conv2d(6, 1, 1)), image_of())
    assert report.layers == ()
    assert str(report).splitlines()[-1] == "0 of 0 replaced"


def test_modules_may_be_called_by_keyword():
    class Named(nn.Sequential):
        def forward(self, image):
            return self[1](input=self[0](input=image))

    assert converted(Named(depthwise(), nn.BatchNorm2d(6)).eval(), image_of()).note == "1"


def test_convert_starts_from_the_originals():
    model, image, expected = example()
    for size in (16, 32):
        assert len(always(model, image_of(1, 3, size, size)).replaced) == 3
    assert_close(model(image), expected)
    restore(model)
    restore(model)
    assert torch.equal(model(image), expected)


def test_model_in_training_stays_as_it_is():
    model = mobilenet().train()
    model[1].eval()
    original = copy.deepcopy(model)
    always(model, image_of(2, 3, 32, 32))
    assert [module.training for module in model.modules()] == [module.training for module in original.modules()]
    assert all(torch.equal(model.state_dict()[name], values) for name, values in original.state_dict().items())


def test_our_own_modules_are_fused():
    model = chain(DepthwiseConv2d(6, 12, 3, 2, "SAME"), nn.BatchNorm2d(12), nn.SiLU())
    assert converted(model, image_of()).note == "1, 2"


def test_what_is_not_faster_is_left():
    """No time is expected of either; what the report says of them is what happens."""
    model, image = chain(depthwise(), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6)), image_of(1, 6, 24, 24)
    expected = model(image)
    report = convert(model, image)
    assert len(report.layers) == 2
    for layer in report.layers:
        assert layer.replaced == (layer.after < layer.before)
        assert layer.note == ({"0": "1", "2": ""}[layer.name] if layer.replaced else "slower")
        assert ("forward" in model[int(layer.name)].__dict__) == layer.replaced
    assert_close(model(image), expected)


def test_wrong_arguments_are_refused():
    with raises(ArgumentError, match=r"model must be a torch\.nn\.Module, got str"):
        convert("mobilenet", image_of())
    with raises(ArgumentError, match="when must be 'faster' or 'always', got 'never'"):
        convert(depthwise(), image_of(), when="never")


def test_failing_model_is_as_it_was():
    model = mobilenet()
    with raises(RuntimeError, match="channels"):
        always(model, image_of(1, 4, 9, 9))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@gpu
@parametrize("options", [{"when": "always"}, {}, {"graphs": True}])
@forms
@networks
def test_networks_on_a_gpu(make, form, options):
    model, image = make().cuda(), image_of(2, 3, 32, 32, form=form).cuda()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = model(image)
        convert(model, image, **options)
        torch.testing.assert_close(model(image), expected, rtol=1e-3, atol=1e-3)
        graph, got = captured(lambda: model(image))
        graph.replay()
        assert torch.equal(got, model(image))
