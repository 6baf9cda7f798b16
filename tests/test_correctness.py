"""Every strategy on every backend computes what the float64 oracle says, and writes nothing else."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, note
from tvm.s_tir import Schedule

from backends import CPU, CUDA, H200, OPENCL, REPLAY, cells, replay, run_guarded
from dwtir import STRATEGIES, Epilogue, InvalidScheduleError, Shape, reference
from dwtir.schedules import choose
from marks import needs_gpu, parametrize, raises
from strategies import (
    EXACT_STEPS,
    adapted,
    epilogues,
    error_bound,
    integer_tensors,
    named_shapes,
    oracle,
    real_tensors,
    seeds,
    shapes,
    tiles,
)

CELL = ("backend", "strategy", "operation", "layout", "dtype")
GPU_STRATEGIES = [strategy for strategy in STRATEGIES.values() if strategy.on_gpu]


def check_integers(shape, epilogue, run, seed):
    tensors = integer_tensors(shape, epilogue, seed)
    expected = oracle(shape, epilogue, tensors)
    rounded = expected.astype(np.float32).astype(reference.numpy_dtype(shape.dtype))
    assert np.array_equal(rounded.astype(np.float64), expected), "the test's data is not exact"
    (got,) = run_guarded(run, shape, [tensors])
    note(f"{np.count_nonzero(got != expected)} of {got.size} values are wrong")
    np.testing.assert_array_equal(got, expected)


def check_reals(shape, epilogue, run, seed):
    tensors = real_tensors(shape, epilogue, seed)
    expected = oracle(shape, epilogue, tensors)
    (got,) = run_guarded(run, shape, [tensors])
    ratio = np.abs(got - expected) / error_bound(shape, epilogue, tensors)  # NaN where the output was not written
    note(f"the largest error is {np.max(ratio)} of the bound")
    assert (ratio <= 1).all()


def check(shape, epilogue, strategy, run, seed):
    note(f"{shape} {epilogue} {strategy}")
    if set(epilogue.steps) <= set(EXACT_STEPS):
        check_integers(shape, epilogue, run, seed)
    check_reals(shape, epilogue, run, seed)


@parametrize(CELL, cells(turn=0))
@given(shape=shapes(layouts=("NCHW",), dtypes=("float32",)), epilogue=epilogues(), seed=seeds)
@named_shapes(epilogue=Epilogue(("scale_shift", "relu6", "residual")), seed=0)
def test_chosen_tile(backend, strategy, operation, layout, dtype, shape, epilogue, seed):
    target = backend.target()
    shape = adapted(shape, strategy, target, operation=operation, layout=layout, dtype=dtype)
    epilogue = epilogue if operation == "forward" else Epilogue()
    tile = strategy.choose(shape, target)
    tile.check_use(shape, target)
    check(shape, epilogue, tile, backend.compile(tile, shape, epilogue), seed)


@parametrize("step", ["relu", "relu6", "hardswish", "silu", "gelu"])
@parametrize("dtype", ["float32", "float16"])
@parametrize("backend", [CPU, REPLAY, OPENCL, needs_gpu(CUDA)])
def test_activations_keep_nan(backend, dtype, step):
    shape, epilogue = Shape.parse(f"1x3x5x9_k3_p1_{dtype}"), Epilogue.of(step)
    tensors = real_tensors(shape, epilogue, 0)
    tensors["data"][:, 1] = np.nan
    (got,) = backend.run(choose(shape, backend.target()), shape, epilogue, tensors)
    assert np.isnan(got[:, 1]).all()
    assert np.isfinite(got[:, ::2]).all()


@parametrize(CELL, cells(turn=1))
@given(data=st.data(), shape=shapes(layouts=("NCHW",), dtypes=("float32",), kernel=7), seed=seeds)
def test_any_tile_that_passes_its_check(backend, strategy, operation, layout, dtype, data, shape, seed):
    target = backend.target()
    shape = adapted(shape, strategy, target, operation=operation, layout=layout, dtype=dtype)
    tile = data.draw(tiles(strategy, shape, target, structures=True))
    epilogue = data.draw(epilogues(steps=EXACT_STEPS)) if operation == "forward" else Epilogue()
    if tile.dynamic_bytes(shape, epilogue) > target.most_shared_bytes:
        with raises(InvalidScheduleError, match="shared bytes per block with epilogue"):
            tile.check_use(shape, target, epilogue)
        epilogue = Epilogue()
    check(shape, epilogue, tile, backend.compile(tile, shape, epilogue), seed)


@parametrize("place", ["before out", "after out", "an input", "nowhere"])
def test_kernel_that_errs_by_one_byte_is_caught(place):
    shape = Shape.parse("1x2x5x5_k1_float16")
    tensors = real_tensors(shape, Epilogue(), 0)

    def run(given):
        data, _, out = given
        out.array[...] = 1
        if place == "before out":
            out.memory[out.place.start - 1] ^= 1
        elif place == "after out":
            out.memory[out.place.stop] ^= 1
        elif place == "an input":
            data.memory[data.place.stop - 1] ^= 1

    if place == "nowhere":
        (got,) = run_guarded(run, shape, [tensors])
        assert (got == 1).all()
        (unwritten,) = run_guarded(lambda given: None, shape, [tensors])
        assert np.isnan(unwritten).all()
    else:
        with raises(AssertionError, match="was written"):
            run_guarded(run, shape, [tensors])


@parametrize("strategy", GPU_STRATEGIES)
@given(data=st.data(), seed=seeds)
def test_tile_of_random_variables(strategy, data, seed):
    operation = data.draw(st.sampled_from(strategy.operations))
    drawn = data.draw(shapes(layouts=strategy.layouts, dtypes=strategy.dtypes, kernel=7))
    shape = adapted(drawn, strategy, H200, operation=operation)
    tile = data.draw(tiles(strategy, shape, H200))
    epilogue = data.draw(epilogues(steps=EXACT_STEPS)) if operation == "forward" else Epilogue()
    sch = Schedule(tile.define(shape, epilogue))
    decisions = {name: tile.parameters[name] for name in strategy.space(shape, H200)}
    variables, values = strategy.draw(sch, shape, H200, decisions)
    assert values == tile
    variables.apply(sch, shape)
    check(shape, epilogue, tile, replay(tile, sch, shape, epilogue), seed)
