"""What is true of every convolution: no oracle is needed for most of it."""

from dataclasses import replace
from itertools import product

import hypothesis.strategies as st
import numpy as np
import tvm
from hypothesis import given, note, settings

from backends import CPU, CUDA, H200, REPLAY, llvm, parameters, run_guarded
from dwtir import ARTICLE_STEPS, STRATEGIES, Epilogue, Shape, reference
from dwtir import compute as tir
from dwtir.notation import OPERATIONS
from dwtir.schedules import ChannelPairs
from marks import layouts, parametrize
from strategies import EXACT_STEPS, adapted, epilogues, integer_tensors, named_shapes, oracle, seeds, shapes

EXAMPLES = settings.default.max_examples if settings.default else 100


computers = parametrize(
    ("backend", "strategy"),
    [
        parameters(backend, strategy)
        for backend, strategy in product((REPLAY, CPU, CUDA), STRATEGIES.values())
        if strategy.on_gpu == backend.on_gpu and "forward" in strategy.operations
    ],
)
fewer = settings(max_examples=max(4, EXAMPLES // 3))  # one example compiles a kernel or more
small_shapes = shapes(channels=5, size=24, kernel=7, flop=500_000)


def prepared(backend, strategy, shape, seed):
    shape = adapted(shape, strategy, backend.target())
    tile = strategy.choose(shape, backend.target())
    note(f"{shape} {tile}")
    return shape, tile, integer_tensors(shape, Epilogue(), seed)


def as_nchw(shape, image):
    return image if shape.layout == "NCHW" else image.transpose(0, 3, 1, 2)


def everybody(shape):
    found = [
        (name, backend, strategy.choose(shape, backend.target()))
        for backend, (name, strategy) in product((REPLAY, CPU), STRATEGIES.items())
        if strategy.claims(shape, backend.target())
    ]
    found += [(step, REPLAY, make(shape, H200)) for ladder in ARTICLE_STEPS.values() for step, make in ladder.items()]
    return [
        (name, backend, tile)
        for name, backend, tile in found
        if tile.claims(shape, backend.target()) and tile.fits(shape, backend.target())
    ]


def unscheduled(shape, epilogue, tensors):
    mod = tvm.IRModule({"main": tir.depthwise_conv2d(shape, epilogue)})
    (out,) = run_guarded(llvm(mod, shape, epilogue), shape, [tensors])
    return out


def check_all_agree(shape, epilogue, seed):
    tensors = integer_tensors(shape, epilogue, seed)
    plain = unscheduled(shape, epilogue, tensors)
    np.testing.assert_array_equal(plain, oracle(shape, epilogue, tensors), err_msg="unscheduled")
    computers = everybody(shape)
    for name, backend, tile in computers:
        (got,) = backend.run(tile, shape, epilogue, tensors)
        np.testing.assert_array_equal(got, plain, err_msg=f"{name} {tile}")
    return len(computers)


@settings(max_examples=max(2, EXAMPLES // 6))
@given(
    shape=shapes(batch=2, channels=3, size=12, kernel=5, multiplier=2, flop=20_000),
    epilogue=epilogues(steps=EXACT_STEPS),
    seed=seeds,
)
def test_scheduled_and_unscheduled_agree(shape, epilogue, seed):
    note(f"{shape} {epilogue}")
    assert check_all_agree(shape, epilogue, seed) >= 2


@layouts
def test_every_step_of_the_articles_agrees(layout):
    shape = Shape.parse(f"2x3x37x41_k3_psame_{layout}")
    epilogue = Epilogue(("scale_shift", "relu"))
    steps = sum(map(len, ARTICLE_STEPS.values()))
    assert check_all_agree(shape, epilogue, 0) == (6 + steps if layout == "nchw" else 4)


@computers
@fewer
@given(shape=small_shapes, seed=seeds)
def test_other_layout_and_padding_change_nothing(backend, strategy, shape, seed):
    shape, tile, tensors = prepared(backend, strategy, shape, seed)
    (got,) = backend.run(tile, shape, Epilogue(), dict(tensors))
    top, left, bottom, right = shape.padding
    unpadded = replace(shape, height=shape.height + top + bottom, width=shape.width + left + right, padding=0)
    around, nhwc = [(0, 0), (0, 0), (top, bottom), (left, right)], shape.layout == "NHWC"
    if nhwc:
        around.append(around.pop(1))
    padded = tensors | {"data": np.pad(tensors["data"], around)}
    np.testing.assert_array_equal(got, unscheduled(unpadded, Epilogue(), padded))
    other = replace(shape, layout="NCHW" if nhwc else "NHWC")
    # The weight's turn is its own inverse.
    turns = {"data": (0, 3, 1, 2) if nhwc else (0, 2, 3, 1), "weight": (2, 3, 0, 1)}
    turned = {name: np.ascontiguousarray(tensors[name].transpose(turn)) for name, turn in turns.items()}
    np.testing.assert_array_equal(as_nchw(shape, got), as_nchw(other, unscheduled(other, Epilogue(), turned)))


def near(shape, bad, strategy):
    """Tell which results see a bad input, or one beside it that tensor cores multiply along.

    They multiply what lies beside an output's inputs by zero, `ChannelPairs` the other channel too.
    """
    sizes = (shape.out_height, shape.out_width)
    first = [
        np.arange(size)[:, None] * stride - padding
        for size, stride, padding in zip(sizes, shape.stride, shape.padding[:2], strict=True)
    ]
    last = [at + (k - 1) * d for at, k, d in zip(first, shape.kernel, shape.dilation, strict=True)]
    beside = 7 * shape.stride[1] + 15
    y, x = np.arange(shape.height), np.arange(shape.width)
    rows = (first[0] <= y) & (y <= last[0])
    columns = (first[1] - beside <= x) & (x <= last[1] + beside)
    bad = as_nchw(shape, bad)
    if strategy is ChannelPairs:
        last_channel = shape.in_channels - 1
        bad = bad | bad[:, np.minimum(np.arange(shape.in_channels) ^ 1, last_channel)]
    seen = rows.astype(int) @ bad @ columns.T.astype(int) > 0
    seen = seen.repeat(shape.channel_multiplier, axis=1)
    return seen if shape.layout == "NCHW" else seen.transpose(0, 2, 3, 1)


@computers
@fewer
@given(shape=small_shapes, seed=seeds, data=st.data())
def test_nan_stays_where_it_is_seen(backend, strategy, shape, seed, data):
    """A whole image of NaN, one pixel of infinity, and the filters of one channel.

    An output that lies wholly in the padding sees no input. Its sum of zeros times
    a NaN weight may be NaN, or 0 where the compiler knows all of it to be padding.
    """
    shape, tile, tensors = prepared(backend, strategy, shape, seed)
    sizes = {"n": shape.batch, "c": shape.in_channels, "h": shape.height, "w": shape.width}
    n, c, h, w = (data.draw(st.integers(0, size - 1), label=label) for label, size in sizes.items())
    image, pixel = tensors["data"].copy(), tensors["data"].copy()
    as_nchw(shape, image)[n, c] = np.nan
    as_nchw(shape, pixel)[n, c, h, w] = np.inf
    weight = tensors["weight"].copy()
    (weight if shape.layout == "NCHW" else weight.transpose(2, 3, 0, 1))[c] = np.nan
    cases = [{"data": image}, {"data": pixel}, {"weight": weight}]
    results = backend.run(tile, shape, Epilogue(), *[tensors | case for case in cases])
    sees_input = reference.depthwise_conv2d(shape, np.ones(shape.data_shape), np.ones(shape.weight_shape)) > 0
    with np.errstate(invalid="ignore"):
        for case, got in zip(cases, results, strict=True):
            inputs = tensors | case
            expected = reference.depthwise_conv2d(shape, inputs["data"], inputs["weight"])
            spread = np.isnan(got) & near(shape, ~np.isfinite(inputs["data"]), strategy) & strategy.needs_mma
            held = sees_input & ~spread
            np.testing.assert_array_equal(got[held], expected[held])
            in_padding = np.asarray(got)[~sees_input & ~spread]
            assert np.all((in_padding == 0) | (np.isnan(in_padding) & ("weight" in case)))


@given(shape=shapes(channels=4000, size=400, kernel=40, batch=200, flop=2**26))
@named_shapes()
@settings(max_examples=10 * EXAMPLES)
def test_chosen_tile_passes_its_check(shape):
    """On every device that we know, without compiling anything."""
    for backend, operation in product((REPLAY, CPU), OPERATIONS):
        target = backend.target()
        shape = replace(shape, operation=operation)
        for strategy in STRATEGIES.values():
            if strategy.claims(shape, target):
                tile = strategy.choose(shape, target)
                note(f"{shape} {tile}")
                tile.check_use(shape, target)
                assert strategy.from_parameters(tile.parameters) == tile
                for name, values in strategy.space(shape, target).items():
                    assert values, name
                    assert all(type(value) is int and value > 0 for value in values), name
                    assert list(values) == sorted(set(values)), name
