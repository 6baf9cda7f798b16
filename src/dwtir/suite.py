"""The layers that the project is measured on: the articles' rows, and networks' layers.

The data is ``data/suite.json.xz`` (``xz -dc`` shows it): layers of published networks, read
off their public model code at inference resolution, each with how often the network runs
it, and the rows of both articles with the times that their authors published.
"""

import json
import lzma
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from .errors import InvalidShapeError
from .shape import Shape

BATCHES = (1, 8, 32, 128)
"""Batch sizes that each layer of a network is measured with."""

DTYPES = ("float32", "float16", "bfloat16")
"""Types that each layer of a network is measured with, in both layouts."""


@dataclass(frozen=True)
class Layer:
    """One distinct layer of a network, and how often the network runs it."""

    shape: Shape
    count: int = 1


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lzma.decompress((files("dwtir") / "data" / "suite.json.xz").read_bytes()))
    return found


def networks() -> tuple[str, ...]:
    """Name the networks of the suite, such as ``torchvision/mobilenet_v2``."""
    return tuple(_data()["networks"])


def network(name: str, *, batch: int = 1, dtype: str = "float32", layout: str = "NCHW") -> tuple[Layer, ...]:
    """Return the distinct depthwise layers of one network.

    Parameters
    ----------
    name : str
        One of `networks`, with or without the library in front.

    Raises
    ------
    InvalidShapeError
        If the suite has no such network, or two of that name.
    """
    found = [full for full in networks() if name in (full, full.rpartition("/")[2])]
    if len(found) != 1:
        raise InvalidShapeError(
            f"the suite has {'no' if not found else 'more than one'} network {name!r}; "
            f"allowed are {', '.join(networks())}"
        )
    common: dict[str, Any] = {"batch": batch, "dtype": dtype, "layout": layout}
    return tuple(
        Layer(replace(Shape.parse(text), **common), count) for text, count in _data()["networks"][found[0]].items()
    )


def seed_rows() -> tuple[tuple[Shape, dict[str, float]], ...]:
    """Return the articles' rows: the layer, and its published times in microseconds."""
    articles = _data()["seed_rows"].values()
    return tuple((Shape.parse(text), published) for rows in articles for text, published in rows.items())
