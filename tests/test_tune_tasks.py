"""What names layers to tune becomes tasks, each layer once, in order, with its count; and the suite's networks."""

import json
import re
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest

from dwtir import Epilogue, InvalidEpilogueError, InvalidShapeError, Shape, suite
from dwtir.errors import RecordError, ToolchainError
from dwtir.tune import tasks
from dwtir.tune.outcome import Task
from dwtir.tune.tasks import ONE_FORM, Forms
from marks import gpu, parametrize, raises

shape = Shape.parse
HALF = Forms((2,), ("float16",), ("NHWC",))
RELU, BIAS_RELU = Epilogue(("relu",)), Epilogue(("bias", "relu"))


def test_equal_layers_are_one_task():
    texts = ["1x8x9x9_k3_psame", "1x8x9x9_k5", "1x8x9x9_k3_p1"]
    expected = [Task(shape(texts[0]), BIAS_RELU, 2), Task(shape(texts[1]), BIAS_RELU)]
    assert tasks.from_shapes(texts, "bias+relu") == expected
    assert tasks.from_shapes([]) == []
    with raises(InvalidShapeError, match="cannot read 'k3y'"):
        tasks.from_shapes([*texts, "1x8x9x9_k3y"])


def test_most_used_first():
    """A layer counts by all its runs, and equals stay in order."""
    small, large = shape("1x8x8x8_k3_p1"), shape("1x8x16x16_k3_p1")
    given = [Task(small, count=3), Task(small, count=4), Task(large), Task(small, count=5)]
    assert large.flop == 4 * small.flop
    assert tasks.by_use(given) == [given[3], given[1], given[2], given[0]]


def test_gradients_have_no_epilogue():
    forward = [Task(shape("1x8x9x9_k3_p1"), RELU, 3)]
    found = tasks.for_operations(forward, ("forward", "grad_weight"))
    assert found == [*forward, Task(shape("1x8x9x9_k3_p1_wgrad"), Epilogue(), 3)]


def test_seeds_keep_their_batch():
    rows = [row for row, _ in suite.seed_rows()]
    for dtype, layouts in (("float32", ("NCHW",)), ("float16", ("NCHW", "NHWC"))):
        found = tasks.from_suite("seeds", Forms((64,), (dtype,), layouts))
        expected = [replace(row, dtype=dtype, layout=layout) for layout in layouts for row in rows]
        assert [task.shape for task in found] == expected


def test_whole_suite():
    batches, layouts = (1, 8), ("NCHW", "NHWC")
    found = tasks.from_suite("all", Forms(batches, ("bfloat16",), layouts))
    assert len({task.shape for task in found}) == len(found)
    runs = sum(layer.count for name in suite.networks() for layer in suite.network(name))
    for form in product(batches, layouts):
        assert sum(t.count for t in found if (t.shape.batch, t.shape.layout) == form) == runs
    assert {task.shape.dtype for task in found} == {"bfloat16"}
    with raises(InvalidShapeError, match="no part 'seed'; allowed are seeds, all"):
        tasks.from_suite("seed", ONE_FORM)


def counted(layers):
    return [(layer.shape, layer.count) for layer in layers]


def network(name, batches=(1,), epilogue=None):
    return tasks.from_network(name, Forms(batches), epilogue)


def test_suite_needs_no_library():
    found = network("mobilenet_v2", batches=(1, 32), epilogue="scale_shift+relu6")
    assert found == network("torchvision/mobilenet_v2", batches=(1, 32), epilogue=["scale_shift", "relu6"])
    assert counted(found) == counted(suite.network("mobilenet_v2") + suite.network("mobilenet_v2", batch=32))
    assert {task.epilogue for task in found} == {Epilogue(("scale_shift", "relu6"))}
    assert network("timm/cspresnext50") == []
    with raises(InvalidShapeError, match="batch must be an integer >= 1, got 0"):
        network("mobilenet_v2", batches=(0,))
    with raises(InvalidShapeError, match="no network 'timm/hub/vgg';"):
        network("timm/hub/vgg")


@parametrize("name", ["vgg11", "torchvision/vgg11"])
def test_other_networks_need_a_library(name, monkeypatch):
    for library in ("timm", "torchvision"):
        monkeypatch.setitem(sys.modules, library, None)
    with raises(ToolchainError, match=r"it has torch.*; for others .*torchvision must be"):
        network(name)


def conv(**changes):
    """Return the attributes that ``torch.nn.Conv2d(8, 8, 3, groups=8)`` has."""
    same = {"in_channels": 8, "out_channels": 8, "groups": 8, "padding_mode": "zeros"}
    pairs = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    return SimpleNamespace(**same | pairs | changes)


class Conv2dSame(SimpleNamespace):
    """Named as timm's."""


@parametrize(
    ("layer", "text"),
    [
        (conv(), "k3"),
        (conv(kernel_size=(3, 5), stride=(2, 1), padding=(1, 2)), "k3x5_s2x1_p1x2"),
        (conv(padding="same", dilation=(2, 3), kernel_size=(4, 3)), "k4x3_d2x3_p3x3x3x3"),
        (conv(padding="valid", out_channels=24), "k3_m3"),
        (conv(same_pad=True, stride=(2, 2)), "k3_s2_p0x1x1x1"),
        (conv(same_pad=False, stride=(2, 2)), "k3_s2"),
        (Conv2dSame(**vars(conv(stride=(2, 2)))), "k3_s2_p0x1x1x1"),
    ],
)
def test_depthwise_layers_are_shapes(layer, text):
    assert Shape(batch=1, **tasks.depthwise_parameters(layer, 10, 11)) == shape(f"1x8x10x11_{text}")


@parametrize("changes", [{"groups": 1}, {"groups": 4}, {"in_channels": 1, "groups": 1}, {"padding_mode": "reflect"}])
def test_other_layers_are_left_out(changes):
    assert tasks.depthwise_parameters(conv(**changes), 10, 10) is None


@gpu  # not for the GPU itself: torch and timm are where the GPU is
@parametrize("network", ["convnext_tiny", "mobilenetv2_100", "tf_efficientnet_b0"])
def test_networks_of_timm(network):
    found = tasks.from_network(f"timm/{network}", HALF)
    assert found
    assert {(t.shape.batch, t.shape.dtype, t.shape.layout) for t in found} == {(2, "float16", "NHWC")}
    for name in (name for name in suite.networks() if name.endswith(f"/{network}")):
        assert set(counted(found)) == set(counted(suite.network(name, batch=2, dtype="float16", layout="NHWC")))


@gpu
def test_model_is_traced_by_running_it():
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.never_run = nn.Conv2d(8, 8, 7, groups=8)
            self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=8)
            self.again = nn.Conv2d(16, 16, 5, padding="same", dilation=2, groups=16)
            self.mirror = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", groups=16)
            self.norm = nn.BatchNorm2d(16)
            self.stem = nn.Conv2d(3, 8, 1)

        def forward(self, image, factor):
            image = self.down(input=self.stem(image)) * factor
            return self.norm(self.mirror(self.again(self.again(image))))

    with torch.device("meta"):
        model, image = Block(), torch.zeros(1, 3, 20, 31)
    model.norm.eval()
    found = tasks.from_model(model, (image, 2), HALF._replace(batches=(1, 4)), "relu")
    assert found == [
        Task(shape(f"{batch}x{text}_float16_nhwc"), RELU, count)
        for batch in (1, 4)
        for text, count in (("8x20x31_k3_s2_p1_m2", 1), ("16x10x16_k5_d2_p4", 2))
    ]
    assert model.training
    assert not model.norm.training
    with raises(TypeError):
        tasks.from_model(model, image)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.training


@pytest.fixture
def path(tmp_path):
    return tmp_path / "layers.json"


LAYER = {"batch": 1, "in_channels": 8, "height": 9, "width": 9, "kernel": [3, 3]}


def test_file_lists_layers(path):
    changes = [{"padding": [1, 1, 1, 1], "layers": 3}, {"epilogue": "bias"}]
    changes += [{"epilogue": ["bias"], "kernel": 3}, {"epilogue": None}]
    path.write_text(json.dumps(["1x8x9x9_k3_psame", *(LAYER | change for change in changes)]))
    assert tasks.from_file(path, "relu") == [
        Task(shape("1x8x9x9_k3_p1"), RELU, 4),
        Task(shape("1x8x9x9_k3"), Epilogue(("bias",)), 2),
        Task(shape("1x8x9x9_k3"), Epilogue(), 1),
    ]
    path.write_text("[]")
    assert tasks.from_file(str(path)) == []


@parametrize(
    ("entry", "error", "reason"),
    [
        (LAYER | {"kernle": 3}, InvalidShapeError, "unknown shape parameters ['kernle']"),
        (LAYER | {"layers": 0}, InvalidShapeError, "layers must be an integer >= 1, got 0"),
        (LAYER | {"epilogue": 6}, InvalidEpilogueError, "an epilogue is None"),
        (7, InvalidShapeError, "a shape is a DepthwiseConv2dShape, its text form or"),
    ],
)
def test_wrong_entry_is_named(path, entry, error, reason):
    path.write_text(json.dumps(["1x8x9x9_k3", entry]))
    with raises(error, match=re.escape(f"{path}: entry 1: {reason}")):
        tasks.from_file(path)


@parametrize(
    ("data", "reason"),
    [
        (None, "not a file"),
        (b"[", "not readable as JSON"),
        (b"{}", "must be a JSON list of layers, got dict"),
        (b"[" + b" " * (1 << 20) + b"]", "larger than 1048576 bytes"),
    ],
)
def test_wrong_file_is_named(path, data, reason):
    if data is not None:
        path.write_bytes(data)
    with raises(RecordError, match=re.escape(f"{path}: {reason}")):
        tasks.from_file(path)


# The suite


def test_networks_have_every_form():
    assert len(suite.networks()) == 41
    # Five of the published networks have no depthwise layer.
    assert sum(bool(suite.network(name)) for name in suite.networks()) == 36
    for name in suite.networks():
        layers = suite.network(name, batch=8, dtype="float16", layout="NHWC")
        shapes = [layer.shape for layer in layers]
        assert len(set(shapes)) == len(shapes)
        assert {(s.batch, s.dtype, s.layout) for s in shapes} <= {(8, "float16", "NHWC")}
        assert all(layer.count >= 1 for layer in layers)


def test_networks_have_short_names():
    assert suite.network("mobilenet_v2") == suite.network("torchvision/mobilenet_v2")
    assert suite.network("mobilenet_v2")[0].shape == Shape.parse("1x32x112x112_k3_p1")
    with raises(InvalidShapeError, match="the suite has no network 'vgg'; allowed are"):
        suite.network("vgg")
