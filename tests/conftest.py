"""Options that all tests share: Hypothesis profiles, and what `gpu` tests do without a GPU."""

import os

import pytest
from hypothesis import settings

import dwtir
from dwtir import cuda
from kernels import EPILOGUE, SHAPE

for profile, examples in {"ci": 4, "dev": 25, "gpu": 100, "nightly": 400}.items():
    about = {"derandomize": True} if profile == "ci" else {}
    settings.register_profile(profile, max_examples=examples, deadline=None, print_blob=True, **about)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

REQUIRE_GPU = os.environ.get("DWTIR_REQUIRE_GPU") == "1"


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DWTIR_CACHE_DIR", str(folder / "cache"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.delenv("DWTIR_TUNE_DB", raising=False)
        yield


@pytest.fixture(scope="session")
def kernel():
    return dwtir.build(SHAPE, epilogue=EPILOGUE, target="cpu")


@pytest.fixture(scope="session")
def opencl_kernel():
    return dwtir.build(SHAPE, epilogue=EPILOGUE, target="opencl")


@pytest.fixture(scope="session")
def foreign_kernel():
    """A kernel for a GPU that no machine of ours has."""
    return dwtir.build(SHAPE, target="sm_87")


@pytest.fixture
def no_gradients():
    import torch

    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def pytest_collection_modifyitems(config, items):
    """Leave `gpu` tests out, rather than skip them, without a GPU; they fail where one is required."""
    if REQUIRE_GPU or cuda.device_count():
        return
    kept, left = [], []
    for item in items:
        (left if item.get_closest_marker("gpu") else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
