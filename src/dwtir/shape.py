"""The description of one depthwise convolution, checked once and for all."""

import contextlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import gcd, prod
from typing import Any, SupportsIndex, TypeAlias

from .errors import InvalidShapeError
from .notation import DTYPES, LAYOUTS, OPERATIONS, parameters_of

__all__ = ["DTYPES", "LAYOUTS", "OPERATIONS", "DepthwiseConv2dShape", "Shape", "ShapeLike"]

_MAX_ELEMENTS = 2**31 - 1  # kernels index with int32

Pair: TypeAlias = tuple[int, int]
Padding: TypeAlias = tuple[int, int, int, int]
PairLike: TypeAlias = SupportsIndex | tuple[SupportsIndex, SupportsIndex]
PaddingLike: TypeAlias = str | PairLike | tuple[SupportsIndex, SupportsIndex, SupportsIndex, SupportsIndex]


@dataclass(frozen=True, init=False, kw_only=True)
class DepthwiseConv2dShape:
    """Sizes, layout and element type of a depthwise 2-D convolution.

    Output channel ``c * channel_multiplier + m`` is the convolution of input
    channel ``c`` with filter ``m`` of that channel.

    Parameters
    ----------
    batch, in_channels, height, width : int
        Size of the input, in elements, at least 1.
    kernel : int or (int, int)
        Filter height and width.
    stride, dilation : int or (int, int)
        Vertical and horizontal step of the output over the input, and of the filter taps. Default 1.
    padding : int, (int, int), (int, int, int, int), "SAME" or "VALID"
        Zeros around the input: on all sides; above-and-below and
        left-and-right; or top, left, bottom, right. ``"SAME"`` is TensorFlow's,
        which pads more at the bottom and right where the total is odd;
        ``"VALID"`` is none. Default 0.
    channel_multiplier : int
        Filters per input channel. Default 1.
    dtype : {"float32", "float16", "bfloat16"}
        Element type of data, weight and output. Sums are always float32.
    layout : {"NCHW", "NHWC"}
        NCHW takes weights as (in_channels, channel_multiplier, kh, kw), NHWC
        as (kh, kw, in_channels, channel_multiplier).
    operation : {"forward", "grad_data", "grad_weight"}
        What is computed: the convolution, or the gradient of a loss with respect to its data or its weight, given that
        with respect to its output. All other parameters are those of the convolution in any case.

    Raises
    ------
    InvalidShapeError
        If a size is not a positive integer (padding: not negative), a name is unknown, the output would be empty, or a
        tensor is too large for 32-bit indices.

    Examples
    --------
    >>> shape = DepthwiseConv2dShape(
    ...     batch=1, in_channels=256, height=96, width=96, kernel=3, padding="SAME"
    ... )
    >>> shape.out_shape
    (1, 256, 96, 96)
    >>> str(shape)
    '1x256x96x96_k3x3_s1x1_p1x1x1x1_d1x1_m1_float32_nchw'
    >>> DepthwiseConv2dShape.parse("1x256x96x96_k3_psame") == shape
    True
    """

    batch: int
    in_channels: int
    height: int
    width: int
    kernel: Pair
    stride: Pair
    padding: Padding
    dilation: Pair
    channel_multiplier: int
    dtype: str
    layout: str
    operation: str

    def __init__(
        self,
        *,
        batch: SupportsIndex,
        in_channels: SupportsIndex,
        height: SupportsIndex,
        width: SupportsIndex,
        kernel: PairLike,
        stride: PairLike = 1,
        padding: PaddingLike = 0,
        dilation: PairLike = 1,
        channel_multiplier: SupportsIndex = 1,
        dtype: str = "float32",
        layout: str = "NCHW",
        operation: str = "forward",
    ) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, size in {"batch": batch, "in_channels": in_channels, "height": height, "width": width}.items():
            put(name, _integer(name, size, 1))
        for name, pair in {"kernel": kernel, "stride": stride, "dilation": dilation}.items():
            put(name, _pair(name, pair))
        put("channel_multiplier", _integer("channel_multiplier", channel_multiplier, 1))
        put("dtype", _choice("dtype", dtype, DTYPES))
        put("layout", _choice("layout", layout, LAYOUTS))
        put("operation", _choice("operation", operation, OPERATIONS))
        put("padding", self._resolve_padding(padding))
        self._check_sizes()

    @classmethod
    def of(cls, value: "ShapeLike") -> "DepthwiseConv2dShape":
        """Take a shape as an object, as its text form, or as a mapping of the parameters."""
        if isinstance(value, DepthwiseConv2dShape):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Mapping):
            names = {field.name for field in fields(cls)}
            required = {"batch", "in_channels", "height", "width", "kernel"}
            wrong = {"unknown": sorted(set(value) - names, key=str), "missing": sorted(required - set(value))}
            for kind, found in wrong.items():
                if found:
                    raise InvalidShapeError(f"{kind} shape parameters {found}; a shape has {sorted(names)}")
            return cls(**value)
        raise InvalidShapeError(
            "a shape is a DepthwiseConv2dShape, its text form or a mapping of its parameters, "
            f"got {type(value).__name__}"
        )

    @classmethod
    def parse(cls, text: str) -> "DepthwiseConv2dShape":
        """Read the text form, in which everything but sizes and kernel may be left out.

        Parameters
        ----------
        text : str
            ``<N>x<C>x<H>x<W>_k<KH>[x<KW>][_s..][_p..][_d..][_m<M>][_<dtype>][_<layout>]`` and, for a gradient,
            ``_dgrad`` or ``_wgrad``; padding is 1, 2 or 4 numbers, ``same`` or ``valid``.
        """
        return cls(**parameters_of(text))

    def __str__(self) -> str:
        numbers = self.kernel, self.stride, self.padding, self.dilation, (self.channel_multiplier,)
        parts = ["x".join(map(str, (self.batch, self.in_channels, self.height, self.width)))]
        parts += [key + "x".join(map(str, values)) for key, values in zip("kspdm", numbers, strict=True)]
        parts += [self.dtype, self.layout.lower(), OPERATIONS[self.operation]]
        return "_".join(filter(None, parts))

    @property
    def brief(self) -> str:
        """The shortest text that `parse` reads as this shape and that names dtype and layout."""
        parts = [part for part in str(self).split("_") if part not in ("s1x1", "p0x0x0x0", "d1x1", "m1")]
        for number, part in enumerate(parts[1:], 1):
            first, *others = part[1:].split("x")
            if others and set(others) == {first}:
                parts[number] = part[0] + first
        return "_".join(parts)

    @property
    def out_channels(self) -> int:
        """Number of output channels: ``in_channels * channel_multiplier``."""
        return self.in_channels * self.channel_multiplier

    @property
    def out_height(self) -> int:
        """Number of output rows."""
        return self._out_size(0)

    @property
    def out_width(self) -> int:
        """Number of output columns."""
        return self._out_size(1)

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of the input tensor, in this layout."""
        return self._image(self.in_channels, self.height, self.width)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of the filters, in this layout."""
        channels = (self.in_channels, self.channel_multiplier)
        return channels + self.kernel if self.layout == "NCHW" else self.kernel + channels

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of the output tensor, in this layout."""
        return self._image(self.out_channels, self.out_height, self.out_width)

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the two tensors that the operation takes, by name and in their order."""
        shapes = {"data": self.data_shape, "weight": self.weight_shape, "grad_out": self.out_shape}
        names = {"forward": "data weight", "grad_data": "grad_out weight", "grad_weight": "data grad_out"}
        return {name: shapes[name] for name in names[self.operation].split()}

    @property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that the operation computes."""
        return {"forward": self.out_shape, "grad_data": self.data_shape, "grad_weight": self.weight_shape}[
            self.operation
        ]

    @property
    def result_channels(self) -> int:
        """Channels of the image that the operation computes."""
        return self.out_channels if self.operation == "forward" else self.in_channels

    @property
    def result_height(self) -> int:
        """Rows of the image that the operation computes."""
        return self.out_height if self.operation == "forward" else self.height

    @property
    def result_width(self) -> int:
        """Columns of the image that the operation computes."""
        return self.out_width if self.operation == "forward" else self.width

    @property
    def source(self) -> tuple[int, int]:
        """Rows and columns of the images that are read: the output's, for the data's gradient."""
        return (self.out_height, self.out_width) if self.operation == "grad_data" else (self.height, self.width)

    @property
    def before(self) -> tuple[int, int]:
        """Rows and columns of zeros before these, for the data's gradient with stride 1, a convolution too."""
        top, left = self.padding[:2]
        if self.operation != "grad_data":
            return top, left
        (kernel_h, kernel_w), (down, right) = self.kernel, self.dilation
        return (kernel_h - 1) * down - top, (kernel_w - 1) * right - left

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype]

    @property
    def lanes(self) -> int:
        """Elements of the widest vector, of 16 bytes."""
        return 16 // self.itemsize

    @property
    def row_lanes(self) -> int:
        """Elements of the widest vector that rows of the data are made of.

        For the data's gradient those are rows of the output's, which it reads.
        """
        return gcd(self.lanes, self.source[1])

    @property
    def flop(self) -> int:
        """Floating-point operations: a multiplication and an addition a tap and output.

        The gradients take the same: each product has a factor for a tap and an output.
        """
        return 2 * prod(self.out_shape) * prod(self.kernel)

    @property
    def least_bytes(self) -> int:
        """Bytes that must cross device memory: every tensor once."""
        return self.itemsize * sum(map(prod, (self.data_shape, self.weight_shape, self.out_shape)))

    def _image(self, channels: int, height: int, width: int) -> tuple[int, ...]:
        if self.layout == "NCHW":
            return (self.batch, channels, height, width)
        return (self.batch, height, width, channels)

    def _reach(self, axis: int) -> int:
        """Input rows (axis 0) or columns (axis 1) that one output touches."""
        return self.dilation[axis] * (self.kernel[axis] - 1) + 1

    def _padded(self, axis: int) -> int:
        return (self.height, self.width)[axis] + self.padding[axis] + self.padding[axis + 2]

    def _out_size(self, axis: int) -> int:
        return (self._padded(axis) - self._reach(axis)) // self.stride[axis] + 1

    def _resolve_padding(self, padding: object) -> Padding:
        if isinstance(padding, str):
            mode = padding.upper()
            if mode == "VALID":
                return (0, 0, 0, 0)
            if mode == "SAME":
                totals = [
                    max((-(-size // stride) - 1) * stride + self._reach(axis) - size, 0)
                    for axis, (size, stride) in enumerate(zip((self.height, self.width), self.stride, strict=True))
                ]
                before = [total // 2 for total in totals]
                return (before[0], before[1], totals[0] - before[0], totals[1] - before[1])
            raise InvalidShapeError(f"padding must be 'SAME', 'VALID' or integers, got {padding!r}")
        values = padding if isinstance(padding, tuple | list) else (padding,)
        sizes = [_integer("padding", value, 0) for value in values]
        if len(sizes) in (1, 2):
            return (sizes[0], sizes[-1], sizes[0], sizes[-1])
        if len(sizes) == 4:
            return (sizes[0], sizes[1], sizes[2], sizes[3])
        raise InvalidShapeError(
            f"padding must be one value, (vertical, horizontal) or (top, left, bottom, right), got {padding!r}"
        )

    def _check_sizes(self) -> None:
        for axis, name in enumerate(("height", "width")):
            if self._out_size(axis) < 1:
                raise InvalidShapeError(
                    f"the output is empty: the kernel reaches over {self._reach(axis)} of the "
                    f"padded {name}, which must be at least that, got {self._padded(axis)}"
                )
        padded_shape = self._image(self.in_channels, self._padded(0), self._padded(1))
        for name, shape in (("padded input", padded_shape), ("weight", self.weight_shape), ("output", self.out_shape)):
            if prod(shape) > _MAX_ELEMENTS:
                raise InvalidShapeError(
                    f"the {name} of shape {shape} has {prod(shape)} elements; "
                    f"kernels index with int32 and allow at most {_MAX_ELEMENTS}"
                )


Shape = DepthwiseConv2dShape

ShapeLike: TypeAlias = Shape | str | Mapping[str, Any]
"""What functions of dwtir take as a shape."""


def _integer(name: str, value: object, least: int) -> int:
    with contextlib.suppress(TypeError):
        number = operator.index(value)  # type: ignore[arg-type]  # the TypeError is the check
        if number >= least and not isinstance(value, bool):
            return number
    raise InvalidShapeError(f"{name} must be an integer >= {least}, got {value!r}")


def _pair(name: str, value: object) -> Pair:
    values = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(values) != 2:
        raise InvalidShapeError(f"{name} must be one value or a pair, got {value!r}")
    first, second = (_integer(name, entry, 1) for entry in values)
    return first, second


def _choice(name: str, value: object, allowed: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise InvalidShapeError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value
