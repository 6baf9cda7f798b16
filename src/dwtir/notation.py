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
        for name, value in _parse_token(token, text).items():
            if name in parameters:
                raise InvalidShapeError(f"{name} is given twice in shape {text!r}")
            parameters[name] = value
    if not {"batch", "kernel"} <= parameters.keys():
        raise InvalidShapeError(
            f"shape {text!r} lacks its sizes or its kernel; write for example '1x256x96x96_k3x3_psame'"
        )
    return parameters


def _parse_token(token: str, text: str) -> dict[str, Any]:
    lowered = token.lower()
    if lowered in DTYPES:
        return {"dtype": lowered}
    if lowered.upper() in LAYOUTS:
        return {"layout": lowered.upper()}
    for operation, ending in OPERATIONS.items():
        if lowered == ending != "":
            return {"operation": operation}
    if lowered in ("psame", "pvalid"):
        return {"padding": lowered[1:].upper()}
    match = re.fullmatch(r"([kspdm]?)(\d{1,10}(?:x\d{1,10})*)", lowered, flags=re.ASCII)
    if match:
        values = tuple(int(digits) for digits in match[2].split("x"))
        if not match[1] and len(values) == len(_SIZES):
            return dict(zip(_SIZES, values, strict=True))
        name, counts = _NUMBERED.get(match[1], ("", ()))
        if len(values) in counts:
            return {name: values if len(values) > 1 else values[0]}
    raise InvalidShapeError(
        f"cannot read {token!r} in shape {text!r}; write for example '1x256x96x96_k3x3_s1x1_psame_d1x1_m1_float32_nchw'"
    )
