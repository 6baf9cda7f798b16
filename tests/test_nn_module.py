"""`dwtir.nn.DepthwiseConv2d` beside torch's module."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import randn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from dwtir import ArgumentError
from dwtir.nn import DepthwiseConv2d, replace
from marks import parametrize, raises
from networks import FORMS, forms, image_in
from processes import python

# What torch says of its own convolution, once a process.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


CONFIGURATIONS = {
    "plain": {},
    "stride, no bias": {"stride": (2, 1), "padding": (1, 0), "bias": False},
    "multiplier": {"out_channels": 12, "padding": 2, "dilation": 2},
    "same": {"kernel_size": (4, 5), "padding": "same"},
    "valid": {"padding": "valid"},
    "reflect": {"padding": (1, 2), "padding_mode": "reflect"},
    "circular": {"kernel_size": 4, "padding": "same", "padding_mode": "circular"},
}


def both(configuration):
    arguments = {"in_channels": 6, "out_channels": 6, "kernel_size": 3} | CONFIGURATIONS[configuration]
    for kind in (DepthwiseConv2d, torch.nn.Conv2d):
        torch.manual_seed(0)
        yield kind(**arguments, groups=6)


def test_image_that_has_only_a_size():
    module = DepthwiseConv2d(4, 8, 3, 2, "SAME", device="meta")
    assert module(torch.empty(2, 4, 9, 11, device="meta")).shape == (2, 8, 5, 6)


def test_gradients_of_a_checkpoint():
    module, image = DepthwiseConv2d(6, 6, 3), randn(1, 6, 8, 8)
    checkpoint(module, image, use_reentrant=False).sum().backward()
    got, module.weight.grad = module.weight.grad, None
    module(image).sum().backward()
    assert torch.equal(got, module.weight.grad)


@forms
def test_optimiser_may_write_data(form):
    """Such a write does not change the weight's version."""
    ours, theirs = both("multiplier")
    image = image_in(form)
    for _ in range(3):
        for module in (ours, theirs):
            module.zero_grad()
            module(image).square().mean().backward()
            for parameter in module.parameters():
                parameter.data.sub_(0.1 * parameter.grad)
        with torch.no_grad():
            assert_close(ours(image), theirs(image))


@forms
def test_gradients_under_autocast(form):
    ours, theirs = both("plain")
    image = image_in(form)
    for module in (ours, theirs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(image).float().square().mean()
        loss.backward()
    for got, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert got.grad.dtype == torch.float32
        assert_close(got.grad, expected.grad, rtol=0.05, atol=0.05)


@forms
@parametrize("configuration", CONFIGURATIONS)
def test_module_is_torchs(configuration, form):
    ours, theirs = both(configuration)
    image = image_in(form)
    for (name, values), (other, expected) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(values, expected)
    assert repr(ours) == repr(theirs).replace("Conv2d", "DepthwiseConv2d")
    assert_close(ours(image), theirs(image))
    assert_close(ours(image[0]), theirs(image[0]))
    theirs.load_state_dict(copy.deepcopy(ours).state_dict())
    with torch.no_grad():
        ours.weight.neg_()
        theirs.load_state_dict(ours.state_dict())
    assert_close(ours(image), theirs(image))


def test_groups_may_be_left_out():
    assert DepthwiseConv2d(6, 12, 3).groups == 6
    with raises(ArgumentError, match="groups must be in_channels, 6, got 3"):
        DepthwiseConv2d(6, 12, 3, groups=3)
    with raises(ValueError, match="out_channels must be divisible by groups"):
        DepthwiseConv2d(6, 8, 3)


def test_other_channels_are_no_other_multiplier():
    for size in ((1, 4, 9, 9), (4, 9, 9)):
        with raises(ArgumentError, match="input must have 6 channels, got"):
            DepthwiseConv2d(6, 12, 3)(torch.zeros(size))


@parametrize("padding_mode", ["zeros", "replicate"])
@parametrize("padding", ["SAME", (1, 0, 2, 3), [1, 0, 2, 3]])
def test_module_has_own_paddings(padding, padding_mode):
    module, image = DepthwiseConv2d(6, 6, 3, 2, padding, padding_mode=padding_mode), randn(1, 6, 9, 10)
    around = (0, 1, 1, 1) if padding == "SAME" else (0, 3, 1, 2)
    padded = F.pad(image, around, mode="constant" if padding_mode == "zeros" else padding_mode)
    assert_close(module(image), F.conv2d(padded, module.weight, module.bias, 2, groups=6))


@parametrize("dtype", [torch.bfloat16, torch.float16])
@forms
def test_autocast_decides_the_type(dtype, form):
    ours, _ = both("plain")
    image = image_in(form)
    with torch.autocast("cpu", dtype=dtype):
        got = ours(image)
    assert got.dtype == dtype
    assert torch.equal(got, copy.deepcopy(ours).to(dtype)(image.to(dtype)))
    with torch.autocast("cpu", enabled=False):
        assert ours(image).dtype == torch.float32


def test_threads_may_share_a_module():
    ours, theirs = both("plain")

    def right(image):
        with torch.no_grad():
            return torch.allclose(ours(image), theirs(image), atol=1e-5)

    images = [image_in(FORMS[index % 2], 1 + index % 3, 6, 9, 10) for index in range(24)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, images))


def test_weight_at_the_address_of_another():
    """``vector_to_parameters`` writes no version, and freed memory comes back."""
    module, image = DepthwiseConv2d(64, 64, 3, bias=False), image_in(FORMS[1], 1, 64, 9, 9)
    values = parameters_to_vector(module.parameters()).detach()
    with torch.no_grad():
        for factor in range(1, 5):
            vector_to_parameters(values * factor, module.parameters())
            assert_close(module(image), F.conv2d(image, module.weight, groups=64))
            vector_to_parameters(values, module.parameters())


def test_fx_takes_it_for_one():
    module, image = DepthwiseConv2d(6, 6, 3, padding=1, padding_mode="reflect"), randn(2, 6, 8, 8)
    assert torch.equal(torch.fx.symbolic_trace(torch.nn.Sequential(module))(image), module(image))


def test_computed_weight_is_computed_by_calls_alone():
    module = torch.nn.utils.parametrizations.spectral_norm(DepthwiseConv2d(6, 6, 3))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    module.to(torch.float32)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())


def test_runs_in_a_fork():
    """Which has no thread of the pool."""
    python("""
import os, signal, torch
from dwtir.nn import DepthwiseConv2d
module, image = DepthwiseConv2d(64, 64, 3), torch.zeros(8, 64, 56, 56)
torch.set_grad_enabled(False)
module(image)
if os.fork():
    assert os.wait()[1] == 0
else:
    signal.alarm(60)
    module(image)
    os._exit(0)
""")


def test_shared_convolutions_and_what_they_hold():
    conv, other = (torch.nn.Conv2d(6, 6, 3, groups=6) for _ in range(2))
    other.register_buffer("mask", torch.ones(1))
    model = torch.nn.Sequential(conv, torch.nn.ReLU(), conv, other)
    assert replace(model) == 1
    assert model[0] is model[2]
    assert type(model[0]) is DepthwiseConv2d
    assert model[3] is other
