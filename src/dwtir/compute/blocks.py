"""Blocks that several operations begin and end with."""

from typing import Any

from tvm.script import tirx as T

from . import script


@script.inline
def pad_nchw(padded, image, top, left):
    """Lay images of NCHW in zeros, from row `top` and column `left` on."""
    for n, c, ih, iw in T.grid(*padded.shape):
        with T.sblock("pad"):
            vn, vc, vih, viw = T.axis.remap("SSSS", [n, c, ih, iw])
            padded[vn, vc, vih, viw] = T.if_then_else(
                # Not(viw < left), for TVM proves that of a vector and not left <= viw.
                top <= vih and vih < top + image.shape[2] and T.Not(viw < left) and viw < left + image.shape[3],
                image[vn, vc, vih - top, viw - left],
                T.cast(0, image.dtype),
            )


@script.inline
def pad_nhwc(padded, image, top, left):
    """Lay images of NHWC in zeros, from row `top` and column `left` on."""
    for n, ih, iw, c in T.grid(*padded.shape):
        with T.sblock("pad"):
            vn, vih, viw, vc = T.axis.remap("SSSS", [n, ih, iw, c])
            padded[vn, vih, viw, vc] = T.if_then_else(
                top <= vih and vih < top + image.shape[1] and left <= viw and viw < left + image.shape[2],
                image[vn, vih - top, viw - left, vc],
                T.cast(0, image.dtype),
            )


def product(first: Any, second: Any) -> Any:
    """Multiply as all sums are taken, in float32."""
    return T.cast(first, "float32") * T.cast(second, "float32")


@script.inline
def round_sums(out, sums):
    """Round the sums of a gradient to its type."""
    for a, b, c, d in T.grid(*out.shape):
        with T.sblock("epilogue"):
            va, vb, vc, vd = T.axis.remap("SSSS", [a, b, c, d])
            out[va, vb, vc, vd] = T.cast(sums[va, vb, vc, vd], out.dtype)
