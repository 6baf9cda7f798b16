"""The words of a shape: element types, layouts, operations, and the text form read."""

import re
from typing import Any

from .errors import InvalidShapeError

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Supported element types and their size in bytes."""

LAYOUTS = ("NCHW", "NHWC")

OPERATIONS = {"forward": "", "grad_data": "dgrad", "grad_weight": "wgrad"}
"""The convolution and its two gradients, and how the text form of a shape ends for each."""

_SIZES = ("batch", "in_channels", "height", "width")
_NUMBERED = {
    "k": ("kernel", (1, 2)),
    "s": ("stride", (1, 2)),
    "p": ("padding", (1, 2, 4)),
    "d": ("dilation", (1, 2)),
    "m": ("channel_multiplier", (1,)),
}


def parameters_of(text: str) -> dict[str, Any]:
    """Read the parameters that a text names."""
    parameters: dict[str, Any] = {}
    for token in text.strip().split("_"):
        name, entry = _parse_token(token, text)
        for key in name if isinstance(name, tuple) else (name,):
            if key in parameters:
                raise InvalidShapeError(f"{key} is given twice in shape {text!r}")
        if isinstance(name, tuple):
            parameters.update(zip(name, entry, strict=True))
        else:
            parameters[name] = entry
    if not {"batch", "kernel"} <= parameters.keys():
        raise InvalidShapeError(
            f"shape {text!r} lacks its sizes or its kernel; write for example '1x256x96x96_k3x3_psame'"
        )
    return parameters


def _parse_token(token: str, text: str) -> tuple[str | tuple[str, ...], Any]:
    """Read one part of the text form: the parameters it names and their values."""
    lowered = token.lower()
    if lowered in DTYPES:
        return "dtype", lowered
    if lowered.upper() in LAYOUTS:
        return "layout", lowered.upper()
    for operation, ending in OPERATIONS.items():
        if lowered == ending != "":
            return "operation", operation
    if lowered in ("psame", "pvalid"):
        return "padding", lowered[1:].upper()
    match = re.fullmatch(r"([kspdm]?)(\d{1,10}(?:x\d{1,10})*)", lowered, flags=re.ASCII)
    if match:
        values = tuple(int(digits) for digits in match[2].split("x"))
        if not match[1] and len(values) == len(_SIZES):
            return _SIZES, values
        if match[1] and len(values) in _NUMBERED[match[1]][1]:
            return _NUMBERED[match[1]][0], values if len(values) > 1 else values[0]
    raise InvalidShapeError(
        f"cannot read {token!r} in shape {text!r}; write for example '1x256x96x96_k3x3_s1x1_psame_d1x1_m1_float32_nchw'"
    )
