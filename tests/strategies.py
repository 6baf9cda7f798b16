"""What tests are made of: Hypothesis strategies for shapes, epilogues and tiles, and tensors.

A drawn shape compiles and runs in well under a second, and yet has what kernels get wrong: odd and prime sizes, kernels
as large as the padded input, strides that skip inputs, padding on one side.
"""

from dataclasses import replace
from itertools import product
from math import isqrt, prod
from typing import Any, TypeAlias

import hypothesis.strategies as st
import numpy as np
from hypothesis import example
from numpy.typing import NDArray

from dwtir import Epilogue, InvalidScheduleError, Shape, reference
from dwtir.epilogue import STEPS
from dwtir.reference import numpy_dtype
from dwtir.schedules.ladder import LADDER_STEPS
from dwtir.shape import DTYPES, LAYOUTS
from dwtir.space_to_batch import SPLITS

Array: TypeAlias = NDArray[Any]

NAMED_SHAPES = {
    "one channel": "1x1x9x14_k3_p1",
    "prime sizes": "1x5x31x37_k3_s2_psame",
    "kernel = padded input": "1x3x5x4_k7x6_p1",
    "stride above kernel": "1x4x23x19_k2x3_s3x5_p0x1",
    "1x1": "1x6x13x8_k1",
    "1x11": "1x2x6x29_k1x11_p0x5",
    "multiplier 3": "1x5x11x12_k3_p1_m3",
    "dilation 4": "1x2x19x18_k3x2_p4x2_d4",
    "batch 3": "3x3x10x10_k5x3_s1x2_p2x0x1x3",
}
"""What every kernel is tried on, whatever else Hypothesis draws."""


def named_shapes(**others):
    """Run a test of `shape` on all of `NAMED_SHAPES`, with `others` as its other arguments."""

    def decorate(test):
        for name, text in NAMED_SHAPES.items():
            test = example(shape=Shape.parse(text), **others).via(name)(test)
        return test

    return decorate


# Shapes

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _pairs(most):
    """Equal values more often than chance, and lines."""
    number = st.integers(1, most)
    return st.one_of(
        number.map(lambda n: (n, n)),
        st.tuples(number, number),
        number.map(lambda n: (1, n)),
        number.map(lambda n: (n, 1)),
    )


_PAD = st.integers(0, 6)
_PADDINGS = st.one_of(st.just("VALID"), st.just("SAME"), _PAD, st.tuples(*[_PAD] * 2), st.tuples(*[_PAD] * 4))


@st.composite
def shapes(
    draw,
    *,
    layouts=LAYOUTS,
    dtypes=tuple(DTYPES),
    batch=3,
    channels=17,
    size=40,
    kernel=11,
    stride=5,
    dilation=4,
    multiplier=4,
    flop=2_000_000,
):
    """Draw a shape; every argument but the first two is the largest value of its kind.

    `flop` bounds the work: of a large image there are few channels and batch items.
    """
    kernels, strides, dilations = draw(_pairs(kernel)), draw(_pairs(stride)), draw(_pairs(dilation))
    padding = draw(_PADDINGS)
    sizes = []
    for axis in range(2):
        least = max(1, (kernels[axis] - 1) * dilations[axis] + 1 - _total(padding, axis))
        most = max(size, least)
        primes = [n for n in _PRIMES if least <= n <= most] or [least]
        sizes.append(draw(st.one_of(st.integers(least, most), st.just(least), st.sampled_from(primes))))

    about = {"kernel": kernels, "stride": strides, "padding": padding, "dilation": dilations}
    one = Shape(batch=1, in_channels=1, height=sizes[0], width=sizes[1], **about)
    affordable = max(1, flop // one.flop)
    filters = draw(st.integers(1, min(multiplier, affordable)))
    inputs = draw(st.integers(1, min(channels, max(1, affordable // filters))))
    items = draw(st.integers(1, min(batch, max(1, affordable // (filters * inputs)))))
    many = {"batch": items, "in_channels": inputs, "channel_multiplier": filters}
    return replace(one, **many, dtype=draw(st.sampled_from(dtypes)), layout=draw(st.sampled_from(layouts)))


def _total(padding, axis):
    """Padding on both sides; that of "SAME" suffices for any size."""
    if padding == "SAME":
        return 1 << 20
    if padding == "VALID":
        return 0
    sides = (padding,) if isinstance(padding, int) else padding
    return int((sides * 4)[axis] + (sides * 4)[axis + 2])


_NOT_A_SIZE = st.one_of(
    *(st.integers(max_value=0), st.floats(), st.booleans(), st.none(), st.text(max_size=3)),
    st.sampled_from([np.bool_(True), np.float32(2)]),
)
_NEGATIVE = st.integers(max_value=-1)


def _with_one(wrong, length):
    """Draw as many ones as wanted, of which one is something wrong instead."""
    places = st.integers(0, length - 1)
    return st.builds(lambda place, value: (*[1] * place, value, *[1] * (length - place - 1)), places, wrong)


def _lengths_but(*allowed):
    return st.integers(0, 6).filter(lambda n: n not in allowed).map(lambda n: (1,) * n)


_NOT_A_PAIR = st.one_of(_NOT_A_SIZE, _with_one(_NOT_A_SIZE, 2), _with_one(_NOT_A_SIZE, 2).map(list), _lengths_but(2))
_WRONG: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(["batch", "in_channels", "height", "width", "channel_multiplier"], _NOT_A_SIZE),
    **dict.fromkeys(["kernel", "stride", "dilation"], _NOT_A_PAIR),
    "padding": st.one_of(
        *(_NEGATIVE, _with_one(_NEGATIVE, 4), _lengths_but(1, 2, 4)),
        st.sampled_from(["", "FULL", "SAME ", "1", None, 1.0, True, (1, False)]),
    ),
    **dict.fromkeys(
        ["dtype", "layout"],
        st.sampled_from(["", "float64", "int8", "fp32", "NCHW4c", "nchw", "HWC", None, 32, ("NCHW",)]),
    ),
}
_TOO_LARGE = [
    ("input", {"batch": 2**20, "in_channels": 2**11, "height": 1, "width": 9, "kernel": 1}),
    ("input", {"padding": 2**15}),
    ("weight", {"in_channels": 2**16, "channel_multiplier": 2**13}),
    ("output", {"channel_multiplier": 2**26, "kernel": 1}),
]


@st.composite
def invalid_shapes(draw):
    """Draw the parameters of a shape of which one is wrong, and its name in the error."""
    kind = draw(st.sampled_from([*_WRONG, "empty", "large"]))
    wrong: dict[str, Any]
    name = kind
    if kind == "empty":
        name, kernel = draw(st.sampled_from([("height", (30, 1)), ("width", (1, 30))]))
        wrong = {name: draw(st.integers(1, 29)), "kernel": kernel}
    elif kind == "large":
        name, wrong = draw(st.sampled_from(_TOO_LARGE))
    else:
        wrong = {name: draw(_WRONG[name])}
    return {"batch": 1, "in_channels": 4, "height": 9, "width": 9, "kernel": 3} | wrong, name


# Epilogues

EXACT_STEPS = ("bias", "scale_shift", "residual", "relu", "relu6")
"""Steps whose result on small integers is an integer."""


@st.composite
def epilogues(draw, *, steps=tuple(STEPS)):
    """Draw up to four steps in any order; those that take tensors at most once."""
    drawn = draw(st.lists(st.sampled_from(steps), max_size=4))
    return Epilogue(tuple(step for i, step in enumerate(drawn) if not STEPS[step] or step not in drawn[:i]))


# Tiles

STRUCTURES = {
    "window": ("tile", "row"),
    "split": SPLITS,
    "padding": ("staged", "inline"),
    "step": LADDER_STEPS,
    "loads": ("pairs", "fours", "planes"),
}
"""The values of the strategies' string fields, which `Strategy.space` does not list."""


_WRITTEN_OUT = 300
"""Products that a test lets `whole_image` write out."""


def adapted(shape, strategy, target, **about):
    layout = shape.layout if shape.layout in strategy.layouts else strategy.layouts[0]
    dtype = shape.dtype if shape.dtype in strategy.dtypes else strategy.dtypes[0]
    shape = replace(shape, **({"layout": layout, "dtype": dtype} | about))
    height, width = shape.kernel
    inside = tuple(min(pad, size - 1) for pad, size in zip(shape.padding, (height, width, height, width), strict=True))
    even: dict[str, Any] = {"stride": (1, 1), "channel_multiplier": 1}
    whole = tuple(n * step for n, step in zip(inside, 2 * shape.dilation, strict=True))
    streamed = even | {"padding": whole}
    plain = even | {"dilation": (1, 1), "padding": inside}
    small = even | {"padding": "SAME"}
    small |= {side: max(2, min(getattr(shape, side), 5)) for side in ("height", "width")}
    least = small | {"dilation": (1, 1)}
    vectors = {"in_channels": -(-shape.in_channels // 8) * 8}
    all_changes = ({}, {"stride": (1, 1)}, even, streamed, plain, small, least)
    for others, changes in product(({}, vectors), all_changes):
        found = replace(shape, **changes, **others)
        try:
            strategy.choose(found, target).check_use(found, target)
            # Code without loops takes LLVM and PoCL as long as it is.
            products = prod(found.kernel) * found.out_height * found.out_width
            if strategy.name != "whole_image" or products <= _WRITTEN_OUT or changes is small:
                break
        except InvalidScheduleError:
            continue
    return found


@st.composite
def tiles(draw, strategy, shape, target, *, structures=False):
    """Draw a tile from a strategy's space, and its structure too if wanted.

    What does not pass `Strategy.check` is not thrown away: field after field
    goes back to the chosen tile, which passes, until the check does.
    """
    chosen = strategy.choose(shape, target).parameters
    candidates: dict[str, tuple[Any, ...]] = dict(strategy.space(shape, target))
    assert set(candidates) == {name for name, value in chosen.items() if isinstance(value, int)}
    if structures:
        if strategy.name == "split_image":  # whose space divides but large images
            candidates |= {"parts": (1, 2, 3), "pieces": (1, 2, 3)}
        for name, value in chosen.items():
            if isinstance(value, str):
                candidates[name] = STRUCTURES[name]
    drawn = {name: draw(st.sampled_from(values)) for name, values in candidates.items()}
    for name in draw(st.permutations(list(drawn))):
        tile = strategy(**(chosen | drawn))
        if tile.fits(shape, target):
            return tile
        drawn[name] = chosen[name]
    return strategy(**chosen)


# Tensors

seeds = st.integers(0, 2**32 - 1)

_LARGEST_INTEGER = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
"""Up to here a dtype has all the integers."""


def integer_tensors(shape, epilogue, seed):
    """Make small integers, of which every sum and result is exact in the shape's dtype."""
    assert set(epilogue.steps) <= set(EXACT_STEPS)
    rng = np.random.default_rng(seed)
    # The epilogue at most doubles the sum, and bias, residual and shift add 2 each.
    sums = (_LARGEST_INTEGER[shape.dtype] - 10) // 2
    terms, axes = _summed(shape)
    product = min(max(1, sums // terms), 64 * 64)
    sizes = (product // isqrt(product), isqrt(product))
    values = {
        name: _integers(rng, extents, largest)
        for (name, extents), largest in zip(shape.input_shapes.items(), sizes, strict=True)
    }
    if terms > sums:  # Of many products in bfloat16, only so many can be other than 0.
        name, extents = list(shape.input_shapes.items())[1]
        values[name] *= rng.random(extents) < 0.5 * sums / terms
        assert np.count_nonzero(values[name], axis=axes).max() <= sums
    for name, extents in epilogue.operands(shape).items():
        values[name] = _integers(rng, extents, 2)
        if name == "scale":
            values[name][values[name] == 0] = 2
    return _rounded(values, shape)


def _summed(shape):
    """Count the products of a result, and name the axes of the second input that it sums over."""
    nchw = shape.layout == "NCHW"
    if shape.operation == "grad_weight":
        axes = (0, 2, 3) if nchw else (0, 1, 2)
        return prod(shape.out_shape[axis] for axis in axes), axes
    axes = (2, 3) if nchw else (0, 1)
    if shape.operation == "grad_data":
        axes = (*axes, 1 if nchw else 3)
    return prod(shape.weight_shape[axis] for axis in axes), axes


def real_tensors(shape, epilogue, seed):
    """Make normally distributed values, of which no sum or product is exact."""
    rng = np.random.default_rng(seed)
    extents = shape.input_shapes | epilogue.operands(shape)
    return _rounded({name: rng.standard_normal(of) for name, of in extents.items()}, shape)


def oracle(shape, epilogue, tensors):
    first, second, *_ = tensors.values()
    return reference.depthwise_conv2d(shape, first, second, tensors, epilogue=epilogue)


def error_bound(shape, epilogue, tensors):
    """Bound how far from the oracle sums in float32 may be."""
    first, second, *_ = tensors.values()
    return reference.error_bound(shape, first, second, tensors, epilogue=epilogue)


def _integers(rng, extents, largest):
    return rng.integers(-largest, largest, extents, endpoint=True).astype(np.float64)


def _rounded(values, shape):
    dtype = numpy_dtype(shape.dtype)
    return {name: np.asarray(array, np.float32).astype(dtype) for name, array in values.items()}
