"""The suite's data travels with the package and says what it says."""

import pytest

from dwtir import InvalidShapeError, Shape, suite


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
    with pytest.raises(InvalidShapeError, match="the suite has no network 'vgg'; allowed are"):
        suite.network("vgg")
