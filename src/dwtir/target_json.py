"""A target in a tuning record: what differs from what is known of the device, and its checks."""

import re
from dataclasses import MISSING, asdict, fields
from typing import Any

from .errors import RecordError
from .target import KNOWN_GPUS, Target
from .traces import brief

_KNOWN = KNOWN_GPUS | {
    "cpu-znver5": Target(
        *("cpu-znver5", "cpu", "znver5", 2),
        warp_size=1,
        vector_bytes=64,
        features=("+avx2", "+avx512bw", "+avx512dq", "+avx512f", "+avx512vl", "+f16c", "+fma"),
    )
}
"""Devices of which records need not say more than their name."""

_FIELDS = tuple(entry.name for entry in fields(Target) if entry.name != "name")
# Far above any device; they keep the arithmetic on a hostile target short.
_LIMITS = {
    "units": (1, 1 << 16),
    "max_threads_per_block": (1, 1 << 12),
    "shared_bytes_per_block": (1, 1 << 20),
    "warp_size": (1, 128),
    "vector_bytes": (0, 1024),
}


def written(target: Target) -> dict[str, Any]:
    """Return what a record has to say of a target."""
    given = asdict(target) | {"features": list(target.features)}
    return {name: given[name] for name, default in _usual(target.name).items() if given[name] != default}


def read(name: str, value: object) -> Target:
    """Make a target of JSON values, which may be anybody's."""
    if not isinstance(value, dict) or not set(value) <= set(_FIELDS):
        raise RecordError(f"target may have {sorted(_FIELDS)}, got {brief(value)}")
    value = _usual(name) | value
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,99}", name):
        raise RecordError(f"device must be lower case with hyphens, got {name!r}")
    if value["kind"] not in ("cuda", "cpu", "opencl"):
        raise RecordError(f"target: kind must be cuda, cpu or opencl, got {brief(value['kind'])}")
    for key, (least, most) in _LIMITS.items():
        integer(f"target: {key}", value[key], least, most + 1)
    features = value["features"]
    if not isinstance(features, list) or len(features) > 64:
        raise RecordError(f"target: features must be a list, got {brief(features)}")
    for key in ("bandwidth", "fp32_rate"):
        if value[key] is not None and not (type(value[key]) in (int, float) and 0 < value[key] < 1e18):
            raise RecordError(f"target: {key} must be a number above 0, got {brief(value[key])}")
    names = tuple(text("target: features", feature) for feature in features)
    return Target(**value | {"name": name, "arch": text("arch", value["arch"]), "features": names})


def text(name: str, value: object) -> str:
    """Check a short printable text."""
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,200}", value):
        raise RecordError(f"{name} must be 1 to 200 printable ASCII characters, got {value!r:.200}")
    return value


def integer(name: str, value: object, least: int, bound: int) -> int:
    """Check an int from `least`, below `bound`."""
    if type(value) is not int or not least <= value < bound:
        raise RecordError(f"{name} must be an int from {least}, got {brief(value)}")
    return value


def _usual(device: str) -> dict[str, Any]:
    """Return what is not written of a target: what is known of the device, else the defaults.

    None is none where there is no default.
    """
    known = _KNOWN.get(device)
    usual = asdict(known) if known else {entry.name: entry.default for entry in fields(Target)}
    usual["features"] = list(known.features if known else ())
    return {name: None if usual[name] is MISSING else usual[name] for name in _FIELDS}
