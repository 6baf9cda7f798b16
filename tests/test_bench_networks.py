"""The benchmark of whole networks, on small ones."""

import dataclasses
import json
import sys
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dwtir
from dwtir import ArgumentError, CompileError, InvalidShapeError, ToolchainError
from dwtir.bench import training
from dwtir.bench.__main__ import main
from dwtir.bench.inference import infer
from dwtir.bench.network_row import NUDGED, NetworkRow, cells, fields
from dwtir.bench.networks import Network, find, seeded
from dwtir.bench.training import PRECISIONS, train
from dwtir.kernel import Timing
from dwtir.nn import DepthwiseConv2d, replace
from dwtir.target import resolve
from marks import dtypes, gpu, layouts, parametrize, raises, warnings_allowed
from processes import command

CPU = resolve("cpu")
IMAGE = (3, 16, 16)


def module():
    with seeded():
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6()),
            *(nn.Conv2d(16, 16, 5, stride=2, padding=2, groups=16), nn.AdaptiveAvgPool2d(1)),
            *(nn.Flatten(), nn.Dropout(0.1), nn.Linear(16, 10)),
        )


@pytest.fixture(scope="module")
def network():
    return Network.of("small", module(), IMAGE)


def test_network_is_made_fit_to_be_compared(network):
    model, again = network.model, Network.of("small", module(), IMAGE).model
    for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert not any(part.training for part in model.modules())
    assert model[1].momentum == 0.1
    with seeded(), torch.no_grad():
        found = model[:2](torch.randn(4, *IMAGE))
    assert found.mean(dim=(0, 2, 3)).abs().max() < 1e-4, "not the statistics of those images"


@parametrize(("model", "message"), [("small", "model must be a torch.nn.Module"), (nn.Flatten(), "no depthwise")])
def test_other_models_are_refused(model, message):
    with raises(ArgumentError, match=message):
        Network.of("small", model, IMAGE)


COMPILED = "torch.compile", "dwtir compile"


def check_ways(found, ways):
    assert found.notes == ()
    assert set(found.timings) == {"torch", "dwtir", *ways}
    assert (found.replaced, found.layers) == (2, 2)


def inference(network, *ways, target=CPU, **options):
    found = infer(network, target, when="always", rounds=2, **options)
    check_ways(found, ways)
    assert all(t.p20 <= t.median <= t.p80 for t in found.timings.values())
    assert 0 < found.share < 1
    assert (found.losses, found.loss_difference()) == ({}, None)
    return found


@parametrize(("dtype", "layout"), [("float32", "NCHW"), ("float16", "NCHW"), ("bfloat16", "NHWC")])
def test_inference(network, dtype, layout):
    before = deepcopy(network.model.state_dict())
    found = inference(network, batch=2, dtype=dtype, layout=layout, compiled=False)
    assert (found.run, found.batch, found.dtype, found.layout) == ("inference", 2, dtype, layout)
    assert all(torch.equal(before[k], v) for k, v in network.model.state_dict().items())


@warnings_allowed
def test_compiled_inference(network):
    inference(network, *COMPILED, layout="NHWC")


@gpu
@warnings_allowed
@layouts
@dtypes
def test_inference_on_a_gpu(network, dtype, layout):
    inference(network, *COMPILED, target=resolve("cuda"), batch=4, dtype=dtype, layout=layout.upper())


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.runs = 0

    def forward(self, image):
        self.runs += 1
        return self.conv(image) * 10.0**self.runs


class Twofold(Counting):
    def forward(self, image):
        return image, self.conv(image)


@parametrize(
    ("model", "message"),
    [
        (Counting, "must be finite and the same in each run"),
        (Twofold, "cannot run it in float32 on cpu.*the output must be a tensor, got tuple"),
    ],
)
def test_networks_that_cannot_be_compared(model, message):
    network = Network.of("it", model(), (4, 8, 8))
    with raises(ArgumentError, match=message):
        infer(network, CPU, compiled=False, rounds=1)


class Suspicious(Counting):
    """Computes something else when its convolution is not torch's."""

    def forward(self, image):
        own = "forward" in self.conv.__dict__ or isinstance(self.conv, DepthwiseConv2d)
        return self.conv(image).mean((2, 3)) * (2 if own else 1)


def test_wrong_results_are_found():
    torch.manual_seed(0)  # there are weights by which only a later loss tells
    network = Network.of("it", Suspicious(), (4, 8, 8))
    with raises(CompileError, match=r"^it by dwtir: its error is 1.0e\+00, 1.0e-04 is"):
        infer(network, CPU, when="always", compiled=False, rounds=1)
    with raises(CompileError, match="the loss of step 1 of it in float32 is"):
        train(network, CPU, batch=4, steps=2, compiled=False, rounds=1)


# Training


def test_replaced_layers_keep_their_parameters():
    class Own(nn.Conv2d):
        pass

    shared = nn.Conv2d(4, 8, 3, stride=2, padding="valid", groups=4, padding_mode="reflect")
    inner = nn.Sequential(shared, nn.Conv2d(8, 8, 1))
    model = nn.Sequential(shared, inner, Own(8, 8, 3, groups=8)).eval()
    assert replace(model) == 1
    assert isinstance(model[0], DepthwiseConv2d)
    assert model[0] is inner[0]
    assert (model[0].weight, model[0].bias) == (shared.weight, shared.bias)
    assert not model[0].training
    assert (type(inner[1]), type(model[2])) == (nn.Conv2d, Own)
    image = torch.randn(1, 4, 9, 9)
    torch.testing.assert_close(model[0](image), shared(image))


def check_training(network, *ways, target=CPU, **options):
    found = train(network, target, steps=20, rounds=2, **options)
    check_ways(found, ways)
    assert set(found.losses) == {*found.timings, NUDGED}
    assert all(len(losses) == 20 for losses in found.losses.values())
    assert found.losses["dwtir"][-1] < found.losses["dwtir"][0]
    assert all(found.loss_difference(way) < 0.05 for way in found.losses)
    assert found.share is None


def test_training(network):
    check_training(network, batch=4, compiled=False)


@warnings_allowed
def test_compiled_training(network):
    check_training(network, *COMPILED, batch=4, precision="bfloat16 autocast", layout="NHWC")


def test_graph_begins_with_the_present_weights(monkeypatch):
    def captured(step, pool):
        step()
        return SimpleNamespace(replay=step, pool=lambda: pool)

    monkeypatch.setattr(training, "captured", captured)
    images = torch.randn(4, *IMAGE)
    eager, graph = (training._Trainer(module(), images, "float32") for _ in range(2))
    assert graph.capture("pool") == "pool"
    assert graph.curve(3) == eager.curve(3)


@gpu
@warnings_allowed
@layouts
@parametrize("precision", PRECISIONS)
def test_training_on_a_gpu(network, precision, layout):
    ways = ("torch graph", "dwtir graph", *COMPILED)
    check_training(network, *ways, target=resolve("cuda"), batch=8, precision=precision, layout=layout.upper())


def test_training_that_cannot_be(network):
    with raises(ArgumentError, match="steps must be >= 2, got 1"):
        train(network, CPU, steps=1)
    normal = nn.Sequential(*module()[:8], nn.BatchNorm2d(16), nn.Flatten())
    with raises(ArgumentError, match=r"cannot train it in float32 on cpu.*more than 1 value"):
        train(Network.of("it", normal, IMAGE), CPU, batch=1)


def test_row_compares_the_fastest_ways():
    timings = {"torch": Timing(4e-3, 4e-3, 4e-3, 7), "torch.compile": Timing(3e-3, 3e-3, 3e-3, 7)}
    timings["dwtir"] = Timing(2e-3, 1.5e-3, 2.5e-3, 7)
    about = {"network": "small", "run": "inference", "batch": 1, "dtype": "float32", "layout": "NCHW"}
    row = NetworkRow(**about, timings=timings, replaced=1, layers=2, share=0.25, notes=("dwtir compile: it cannot",))
    assert row.ratio == pytest.approx(1.5)
    head, line = cells([row])
    ways = ("torch ms", "torch graph ms", "torch.compile ms", "dwtir ms", "dwtir graph ms", "dwtir compile ms")
    more = ("ratio", "depthwise %", "replaced", "loss differs", "nudged")
    assert head == ("network", "run", "batch", "type", "layout", *ways, *more)
    assert line[:11] == ("small", "inference", "1", "float32", "NCHW", "4.000", "-", "3.000", "2.000~", "-", "-")
    assert line[11:] == ("1.50x", "25", "1 of 2", "-", "-")
    losses = {"torch": [2.0, 1.5], "dwtir": [2.0, 1.25], NUDGED: [1.5, 1.5]}
    loud = dataclasses.replace(row, load=0.5, losses=losses)
    _, line = cells([loud])
    assert (line[5], *line[-2:]) == ("4.000!", "2.5e-01", "5.0e-01")
    assert fields(loud)["us"]["torch"] == [4000.0, 4000.0, 4000.0, 7]
    assert (fields(loud)["losses"], fields(loud)["loss_difference"]) == (losses, 0.25)


# The command


@pytest.fixture
def library(monkeypatch):
    """A small library with timm's interface, whose only network is the one above."""

    def create_model(name, pretrained):
        assert (name, pretrained) == ("small", False)
        model = module()
        model.pretrained_cfg = {"input_size": IMAGE}
        return model

    timm = SimpleNamespace(__name__="timm", is_model="small".__eq__, create_model=create_model)
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "torchvision", None)


@pytest.mark.usefixtures("library")
def test_command(tmp_path, capsys):
    path, run = tmp_path / "rows.json", command(main, capsys)
    words = ("network", "small", "--end-to-end", "--target", "cpu", "--rounds", 2, "--eager", "--json", path)
    printed, _ = run(*words, "--batch", 1, 2, "--when", "always")
    found = json.loads(path.read_text())
    assert found["format"] == "end-to-end 1"
    assert found["about"]["dwtir"] == dwtir.__version__
    assert [(row["network"], row["batch"]) for row in found["rows"]] == [("timm/small", 1), ("timm/small", 2)]
    assert printed.count("timm/small") == 2
    assert printed.startswith("device cpu")
    run(*words, "--train", "--steps", 3, "--batch", 4)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["run"], row["dtype"]) for row in rows] == [("training", precision) for precision in PRECISIONS]
    assert all(len(losses) == 3 for row in rows for losses in row["losses"].values())


@pytest.mark.usefixtures("library")
def test_networks_that_are_not_there():
    for name, error, message in (
        ("mobilenet_v2", ToolchainError, "mobilenet_v2 needs torchvision: pip install torchv"),
        ("timm/large", InvalidShapeError, "timm has no network 'timm/large'"),
        ("keras/small", InvalidShapeError, r"a network is timm/NAME.*got 'keras/small'"),
    ):
        with raises(error, match=message):
            find(name)
