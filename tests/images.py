"""Images in both of torch's memory formats."""

import pytest
import torch

FORMS = [torch.contiguous_format, torch.channels_last]
forms = pytest.mark.parametrize("form", FORMS)


def image_in(form, *size):
    return torch.randn(size or (2, 6, 9, 10)).contiguous(memory_format=form)
