"""Networks to convert, and images in both of torch's memory formats."""

from collections import OrderedDict
from functools import partial

import torch
from torch import nn

from dwtir.nn import convert
from marks import parametrize

FORMS = [torch.contiguous_format, torch.channels_last]
forms = parametrize("form", FORMS)
always = partial(convert, when="always")


class InvertedResidual(nn.Sequential):
    def __init__(self, channels, stride, activation):
        hidden = 3 * channels
        parts = OrderedDict(
            expand=nn.Conv2d(channels, hidden, 1, bias=False),
            norm1=nn.BatchNorm2d(hidden),
            act1=activation(),
            depthwise=nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            norm2=nn.BatchNorm2d(hidden),
            act2=activation(),
            project=nn.Conv2d(hidden, channels, 1, bias=False),
            norm3=nn.BatchNorm2d(channels),
        )
        super().__init__(parts)
        self.residual = stride == 1

    def forward(self, image):
        out = super().forward(image)
        return image + out if self.residual else out


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, image):
        out = self.depthwise(image).permute(0, 2, 3, 1)
        return image + self.mlp(self.norm(out)).permute(0, 3, 1, 2)


def norms_of(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def chain(*modules):
    model = nn.Sequential(*modules).eval()
    for norm in norms_of(model):
        if norm.running_mean is not None:
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            for parameter in norm.parameters():
                nn.init.normal_(parameter)
    return model


def mobilenet():
    return chain(
        nn.Conv2d(3, 8, 3, 2, 1),
        InvertedResidual(8, 1, lambda: nn.ReLU6(inplace=True)),
        InvertedResidual(8, 2, nn.Hardswish),
        InvertedResidual(8, 1, lambda: nn.SiLU(inplace=True)),
    )


def convnext():
    return chain(nn.Conv2d(3, 8, 4, 4), ConvNeXtBlock(8), ConvNeXtBlock(8))


networks = parametrize("make", [mobilenet, convnext])


def image_of(*size, form=FORMS[0]):
    return torch.randn(size or (2, 6, 9, 7)).contiguous(memory_format=form)


def image_in(form, *size):
    return image_of(*(size or (2, 6, 9, 10)), form=form)


def example(form=FORMS[0], make=mobilenet):
    model, image = make(), image_of(2, 3, 32, 32, form=form)
    return model, image, model(image)


def depthwise(**others):
    return nn.Conv2d(6, 6, 3, padding=1, groups=6, **others)


def stage():
    return chain(depthwise(), nn.BatchNorm2d(6), nn.ReLU())


def assert_close(got, expected):
    """Compare float32 results of sums in another order, and of folded normalisations."""
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6 * float(expected.abs().max()))
