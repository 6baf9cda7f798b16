"""Marks that many tests have."""

import pytest

parametrize, gpu, raises = pytest.mark.parametrize, pytest.mark.gpu, pytest.raises
warnings_allowed = pytest.mark.filterwarnings("default")


def needs_gpu(*values):
    return pytest.param(*values, marks=gpu)


devices = parametrize("device", ["cpu", needs_gpu("cuda")])
dtypes = parametrize("dtype", ["float32", "float16", "bfloat16"])
halves = parametrize("dtype", ["float16", "bfloat16"])
layouts = parametrize("layout", ["nchw", "nhwc"])
