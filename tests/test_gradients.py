"""The gradients: adjoints, kernels like any other, and tiles of the weight's."""

import re
from dataclasses import replace
from math import ceil

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given

import dwtir
from backends import CPU, CUDA, H200, OPENCL, REPLAY, on_h200
from dwtir import Epilogue, InvalidEpilogueError, InvalidScheduleError, Shape, reference, schedules
from dwtir.bands import COLUMNS, TILES
from dwtir.diagonals import INPUTS, Diagonals
from dwtir.notation import OPERATIONS
from dwtir.nvrtc import _with_min_blocks
from dwtir.schedules import BandedSums, TapSums, UnitSums, choose
from dwtir.schedules.tap_cost import Tiles, allocated_bytes, estimate, other_blocks, tiles_of_channel
from dwtir.schedules.tap_tiles import ranked
from dwtir.units import LANES, Units
from kernels import merged_bytes
from marks import devices, gpu, halves, layouts, needs_gpu, parametrize, raises
from strategies import integer_tensors, named_shapes, real_tensors, seeds, shapes
from streams import captured


def all_tensors(shape, seed):
    wanted = (replace(shape, operation=operation) for operation in OPERATIONS)
    return {name: array for one in wanted for name, array in real_tensors(one, Epilogue(), seed).items()}


@given(shape=shapes(flop=200_000), seed=seeds)
@named_shapes(seed=0)
def test_oracle_is_its_own_adjoint(shape, seed):
    """A convolution is linear in data and in weight: <g, y> = <dx, x> = <dw, w>.

    As dx does not know x, nor dw w, this makes them the derivatives.
    """
    tensors = {name: array.astype(np.float64) for name, array in all_tensors(shape, seed).items()}
    results = {}
    for operation in OPERATIONS:
        one = replace(shape, operation=operation)
        results[operation] = reference.depthwise_conv2d(one, *(tensors[name] for name in one.input_shapes))
    pairs = {"forward": "grad_out", "grad_data": "data", "grad_weight": "weight"}
    products = [np.vdot(tensors[name], results[operation]) for operation, name in pairs.items()]
    size = np.linalg.norm(tensors["grad_out"]) * np.linalg.norm(results["forward"])
    np.testing.assert_allclose(products, products[0], rtol=0, atol=1e-12 * max(size, 1))


@parametrize("backend", [CPU, OPENCL, needs_gpu(CUDA)])
@layouts
def test_weights_gradient_is_reproducible(backend, layout):
    shape = Shape.parse(f"3x40x29x31_k3_s2_p1_{layout}_wgrad")
    tile = schedules.choose(shape, backend.target())
    if backend.on_gpu:
        tile = replace(tile, threads=tile.threads // 2, parts=2, part_threads=2)
    first, *others = backend.run(tile, shape, Epilogue(), *[real_tensors(shape, Epilogue(), 0)] * 4)
    assert {other.tobytes() for other in others} == {first.tobytes()}


@parametrize("operation", ["grad_data", "grad_weight"])
def test_gradient_has_no_epilogue(operation):
    shape = replace(Shape.parse("1x4x9x9_k3_p1"), operation=operation)
    with raises(InvalidEpilogueError, match=f"got bias.* for {operation}"):
        dwtir.build(shape, epilogue="bias", target="cpu")


@parametrize("target", ["cpu", "opencl", needs_gpu("cuda")])
@layouts
@parametrize("ending", ["dgrad", "wgrad"])
def test_gradient_is_called_like_a_convolution(target, layout, ending):
    shape = Shape.parse(f"2x24x17x15_k5_s2x1_p2_m2_{layout}_{ending}")
    kernel = dwtir.build(shape, target=target)
    tensors = list(integer_tensors(shape, Epilogue(), 0).values())
    expected = reference.depthwise_conv2d(shape, *tensors)
    if target == "cuda":
        tensors = [torch.from_numpy(array).cuda() for array in tensors]
    out = kernel(*tensors)
    np.testing.assert_array_equal(out.cpu().numpy() if target == "cuda" else out, expected)
    assert (kernel.info.workspace != ()) == (getattr(kernel.strategy, "parts", 1) > 1)
    first, second = shape.input_shapes
    with raises(dwtir.ArgumentError, match=f"{second} must have shape"):
        kernel(tensors[0], tensors[0])
    with raises(dwtir.ArgumentError, match=f"takes 2 tensors \\({first}, {second}\\)"):
        kernel(tensors[0])


@devices
def test_saved_gradient_is_loaded(device, tmp_path):
    kernel, file = dwtir.build("2x24x17x15_k3_p1_nhwc_wgrad", target=device), tmp_path / "kernel.so"
    kernel.export(file)
    again = dwtir.load(file)
    assert again.info == replace(kernel.info, resources=again.info.resources)


@gpu
def test_workspace_lives_as_long_as_a_graph():
    """torch's tensors and TVM's."""
    shape = Shape.parse("4x64x30x30_k3_p1_wgrad")
    kernel = dwtir.build(shape, target="cuda")
    extents = shape.data_shape, shape.out_shape, shape.weight_shape
    data, grad, out = (torch.randn(one, device="cuda") for one in extents)
    kernel(data, grad, out=out)
    graph, _ = captured(lambda: kernel(data, grad, out=out))
    data.copy_(torch.randn_like(data))
    rubbish = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
    graph.replay()
    assert torch.equal(out, kernel(data, grad))
    assert len(rubbish) == 8


# The weight's gradient by tensor cores


OF_LAYOUT = {"NCHW": BandedSums, "NHWC": UnitSums}
LAYERS = """
    32x96x56x56_k5_p2_nchw 32x96x56x56_k7_p3_nchw 32x96x28x28_k9_p4_nchw 128x192x28x28_k5_p2_nhwc
    128x384x14x14_k9_p4_nhwc 128x480x14x14_k5_s2_p2_nchw
"""


@halves
@parametrize("about", LAYERS.split())
def test_each_product_is_one_instruction(about, dtype):
    shape = replace(Shape.parse(f"{about}_wgrad"), dtype=dtype)
    kernel = on_h200(shape)
    tile, source, resources = kernel.strategy, kernel.source(), kernel.resources()
    assert isinstance(tile, OF_LAYOUT[shape.layout])
    sizes = tile.sizes(shape)
    rows = shape.kernel[0] * sizes.spans
    if isinstance(tile, BandedSums):
        rows *= sizes.beside
        partial, products = shape.weight_shape, tile.rows * rows
        assert re.search(r"half2\*|nv_bfloat162\*", source)
        assert resources.shared_bytes == tile.shared_bytes(shape)
    else:
        taps = tile.channels * shape.kernel[0] * shape.kernel[1]
        partial = (shape.in_channels // tile.channels, taps)
        products = sizes.ring * sizes.own * sizes.groups * rows
        assert resources.shared_bytes == sizes.shared_bytes
    assert kernel.info.workspace == (("float32", (tile.parts, *partial)),) * (tile.parts > 1)
    assert source.rpartition("#else")[2].count("mma.sync.aligned.m16n8k16") == products
    assert (resources.threads, resources.stack_bytes) == (32 * tile.warps, 0)
    assert tile.min_blocks * resources.threads * resources.registers <= 65536


@parametrize("about", ["2x8x13x17_k3_p1", "32x96x28x28_k7_p3"])
def test_barriers_stand_between_the_phases(about):
    shape = Shape.parse(f"{about}_float16_nhwc_wgrad")
    tile = replace(UnitSums.choose(shape, H200), ahead=2)
    source = on_h200(shape, tile).source()
    source = source[source.rindex("main_kernel(") :]
    zeros, first, steps, sums, *_ = source.split("__syncthreads();")
    assert "(uint4*)" in zeros
    assert "cp_async" not in zeros
    assert first.index("commit_group") < first.index("wait_group_2")
    order = re.findall(r"dwtir_await|commit_group(?=\()|wait_group_\d(?=\()|mbarrier_arrive", steps)
    of_step = ["dwtir_await", "commit_group", "wait_group_2", "mbarrier_arrive"]
    assert order == [*of_step * tile.sizes(shape).ring, "wait_group_0"]
    assert steps.rindex("mma.sync") < steps.index("wait_group_0")
    assert "float2*)(((float*)buf_dyn_shmem_ptr" in sums


ANY_TILE = {
    "2x2x14x16_k5_p2_float16": BandedSums(2, 2, 1, 1),
    "3x3x13x24_k7_p3_bfloat16": BandedSums(3, 2, 2, 2),
    "6x3x14x14_k5_s2_p2_float16": BandedSums(2, 1, 2, 1),
    "5x2x11x12_k3x4_p1x2x0x1_d2_m2_float16": BandedSums(2, 2, 1, 1),
    # Odd widths: one by one, and in pairs.
    "13x4x9x13_k5_p1x3x2x0_bfloat16": BandedSums(4, 2, 2, 2),
    "21x3x8x7_k5_p2_m2_float16": BandedSums(8, 2, 1, 1),
    "1x6x3x5_k1_float16": BandedSums(4, 1, 1, 1),
    # Columns by 16: of several tiles, with a stride, with uneven padding.
    "3x2x9x56_k3_p1_bfloat16": BandedSums(4, 2, 2, 2, 1, 16),
    "2x3x28x28_k5_s2_p2_float16": BandedSums(7, 1, 1, 1, 1, 16),
    "2x2x12x40_k3x7_p1x4x0x2_m2_float16": BandedSums(3, 1, 1, 1, 1, 16),
    "3x16x9x11_k3_p1_float16_nhwc": UnitSums(16, 2, 2, 2, 3, 3),
    "2x8x7x7_k3_p2_bfloat16_nhwc": UnitSums(8, 1, 4, 1, 1, 1),
    "3x8x11x13_k5_s2_p2_float16_nhwc": UnitSums(8, 4, 4, 2, 2, 1, 2),
    "2x16x10x12_k3x4_p1x2x0x1_d2_float16_nhwc": UnitSums(16, 8, 2, 1, 2, 2, 2),
    "2x8x9x112_k1_s2_p0_float16_nhwc": UnitSums(8, 2, 2, 2, 3, 3),
}


@parametrize(("about", "tile"), ANY_TILE.items())
def test_any_tile_is_right(about, tile):
    shape = Shape.parse(f"{about}_wgrad")
    REPLAY.check(tile, shape)
    if isinstance(tile, UnitSums):
        assert merged_bytes(shape, Epilogue(), tile) == tile.dynamic_bytes(shape, Epilogue())


@given(
    shape=shapes(layouts=("NCHW",), dtypes=("float16",)),
    rows=st.integers(1, 20),
    place=st.tuples(*[st.integers(0, 9)] * 3),
)
def test_tiles_cover_outputs_and_windows_inputs(shape, rows, place):
    sizes = Diagonals(replace(shape, operation="grad_weight"), rows, 2, 3)
    tiles = shape.batch * sizes.down * sizes.across
    assert 0 <= TILES * sizes.groups - tiles < TILES
    assert 0 <= 6 * sizes.turns - sizes.groups < 6
    assert len({sizes.place(tile) for tile in range(tiles)}) == tiles
    assert sizes.place(tiles - 1) == (shape.batch - 1, sizes.down - 1, sizes.across - 1)
    assert sizes.down * rows >= shape.out_height
    assert sizes.across * COLUMNS >= shape.out_width
    plane, down, row = place
    shift = sizes.shift(plane % shape.in_channels, row)
    last = (sizes.alternates or shift) + (COLUMNS - 1) * shape.stride[1]
    last += (shape.kernel[1] - 1) * shape.dilation[1]
    assert 0 <= sizes.spans * INPUTS - 1 - last < INPUTS
    row += down * rows * shape.stride[0] + plane * shape.height - shape.padding[0]
    assert (row * shape.width * sizes.alternates - shape.padding[1] - shift) % 2 == 0


@given(
    shape=shapes(layouts=("NHWC",), dtypes=("float16",)),
    channels=st.sampled_from([8, 16, 24, 48]),
    together=st.sampled_from([1, 2, 4, 8]),
    pairs=st.integers(1, 4),
    parts=st.integers(1, 9),
)
def test_windows_see_all_inputs(shape, channels, together, pairs, parts):
    shape = replace(shape, operation="grad_weight")
    sizes = Units(shape, channels, together, 2 * pairs, 1, parts, 1)
    units, right = pairs * sizes.across, (shape.kernel[1] - 1) * shape.dilation[1]
    assert 0 <= LANES * sizes.groups - units < LANES
    assert sizes.across * sizes.columns >= shape.out_width
    assert (sizes.columns - 1) * shape.stride[1] + right == sizes.window - 1
    assert 0 <= 2 * sizes.columns * sizes.spans - sizes.window < 2 * sizes.columns
    for unit in range(units):
        pair, column = divmod(unit, sizes.across)
        first = column * sizes.columns * shape.stride[1]
        for i in range(sizes.window):
            place = sizes.place(unit) + sizes.input_column(i)
            assert place == pair * sizes.pitch + sizes.input_column(first + i)
            assert 0 <= place + sizes.vectors - 1 - pair * sizes.pitch < sizes.pitch
    columns = {sizes.input_column(column) for column in range(shape.padding[1] + shape.width)}
    assert len(columns) == shape.padding[1] + shape.width
    assert max(columns) + sizes.vectors <= sizes.pitch
    if sizes.swaps:  # sectors stay whole
        assert not any(place % 2 for place in (*columns, sizes.grad_column(1), sizes.pitch, sizes.apart[1]))
        assert sizes.swapped(0, 1) // 2 == sizes.swapped(1, 1) // 2
    assert sizes.grad_column(shape.out_width - 1) + sizes.vectors <= sizes.across * sizes.apart[1]
    seen = shape.padding[0] + shape.height - 1
    assert sizes.steps > seen // shape.stride[0]
    assert sizes.parts * sizes.part_steps >= sizes.all_steps
    assert sizes.turns * sizes.ring >= sizes.part_steps + sizes.ring - 1
    even = sizes.even_parts(parts)
    assert 1 <= even <= parts
    assert replace(sizes, parts=even).part_steps == sizes.part_steps


@parametrize("layout", OF_LAYOUT)
@given(shape=shapes(dtypes=("bfloat16",), channels=900, batch=130, flop=2**26))
def test_chosen_tile_is_worth_trying(layout, shape):
    shape, kind = replace(shape, operation="grad_weight", layout=layout), OF_LAYOUT[layout]
    if kind is UnitSums:  # which wants whole vectors
        shape = replace(shape, channel_multiplier=1, in_channels=LANES * shape.in_channels)
    if kind.claims(shape, H200):
        guesses, space = kind.guesses(shape, H200), kind.space(shape, H200)
        assert guesses[0] == kind.choose(shape, H200)
        for tile in guesses:
            tile.check_use(shape, H200)
            assert tile.is_promising(shape)
            assert all(value in space[field] for field, value in tile.parameters.items())


# By taps


NCHW = Shape.parse("8x32x56x56_k3_p1_float32_nchw_wgrad")
NHWC = Shape.parse("8x32x56x56_k3_p1_float16_nhwc_wgrad")
IN_NCHW = TapSums(4, 4, 3, 3, 1, 1, 64, 4, 4, 1, 4, 4, 1)
IN_NHWC = TapSums(4, 4, 3, 3, 2, 16, 4, 8, 8, 1, 1, 1, 1)

# Layers with enough work for every multiprocessor, in both layouts and types.
LARGE = """
    64x256x56x56_k3_p1 128x96x56x56_k7_p3 128x240x28x28_k5_s2_p2
    128x384x14x14_k7_p3 32x960x7x7_k3_p1 32x128x56x56_k31_p15
"""


@parametrize(
    ("about", "tile"),
    [
        ("3x40x32x32_k21_p0x10x0x10_m3_float32_nhwc", TapSums(3, 16, 1, 21, 1, 40, 2, 6, 6, 3)),
        ("8x960x96x96_k1_s3_p0x0x1x1_bfloat16_nhwc", TapSums(1, 1, 1, 1, 8, 8, 24, 52, 26)),
        ("2x16x32x2_k27_s2_p26_d2_m3_float16_nhwc", TapSums(1, 1, 1, 9, 1, 16, 10, 2, 2)),
        ("1x256x56x56_k1_float16_nchw", TapSums(4, 8, 1, 1, 1, 1, 20, 5, 5, 1, 8, 8)),
        ("8x32x56x56_k3_p1_float32_nchw", IN_NCHW),
    ],
)
def test_shared_memory_is_what_is_allocated(about, tile):
    shape = Shape.parse(f"{about}_wgrad")
    assert allocated_bytes(tile, shape) == on_h200(shape, tile).resources().shared_bytes
    choose(shape, H200).check(shape, H200)


@layouts
def test_threads_like_rows_are_refused(layout):
    """TVM cannot lower such a tile: it does not see how high the window is."""
    shape = Shape.parse(f"3x6x23x1_k8_d3x1_p10x3x11x4_{layout}_wgrad")
    tile = TapSums(12, 1, 4, 4, 1, 6 if layout == "nhwc" else 1, 2, 3, 3, kernel_threads=2)
    mixed_up = ({}, {"threads": 1}, {"parts": 1, "part_threads": 1})
    check_tiles(shape, tile, mixed_up, fine=({"kernel_threads": 1}, {"rows": 11}))


def test_threads_like_taps_are_refused():
    """Nor does it see how wide it is."""
    shape = Shape.parse("1x1x3x9_k1x2_s2_d1x4_p0_wgrad")
    tile = TapSums(1, 2, 1, 1, 1, 1, threads=2, parts=1, part_threads=1)
    check_tiles(shape, tile, [{}], fine=({"threads": 1}, {"threads": 4}, {"cols": 1}))


def check_tiles(shape, tile, mixed_up, fine):
    for change in mixed_up:
        with raises(InvalidScheduleError, match="threads must be more or less"):
            replace(tile, **change).check(shape, H200)
    for change in fine:
        on_h200(shape, replace(tile, **change))


@parametrize("shape", [NCHW, NHWC], ids=str)
def test_min_blocks_bounds_the_first_kernel(shape):
    """The second has other threads, of which so many blocks may not fit."""
    tile = replace(IN_NCHW if shape == NCHW else IN_NHWC, min_blocks=6)
    kernel = on_h200(shape, tile)
    bounded = _with_min_blocks(kernel.source(), tile.min_blocks)
    bounds = dict(re.findall(r"__launch_bounds__\(([\d, ]+)\) (\w+)\(", bounded))
    assert {"64, 6": "main_kernel"}.items() <= bounds.items()
    assert all("," not in bound for bound, name in bounds.items() if name == "main_kernel_1")
    assert kernel.resources().registers <= 65536 // (6 * 64)


ODD = """
    1x1x1x1_k1 1x7x200x200_k112_p56 1x3x9x1030_k1x1021 1x3x9x1030_k1x1030_nhwc 4x64x112x112_k113_p60_nhwc
    128x1x997x997_k3_p1 1x997x31x31_k3_p1_float16_nhwc 8x30x31x37_k7_s3_p5_d2_m3_bfloat16_nhwc 1x64x512x512_k64_p31
"""


@parametrize("text", ODD.split())
def test_no_shape_is_too_odd(text):
    shape = Shape.parse(f"{text}_wgrad")
    tile = TapSums.choose(shape, H200)
    tile.check(shape, H200)
    assert tile.is_promising(shape)


@layouts
@parametrize("dtype", ["float32", "float16"])
@parametrize("layer", LARGE.split())
def test_large_layers_keep_the_device_busy(layer, dtype, layout):
    """The choice is the least estimate; no column, thread or multiprocessor idles for long."""
    shape = Shape.parse(f"{layer}_{dtype}_{layout}_wgrad")
    tile = TapSums.choose(shape, H200)
    assert shape.out_width % tile.cols == 0, "a column too many is a branch for each output"
    turns = float(tiles_of_channel(tile, shape)) / (tile.threads * tile.parts)
    assert turns > 0.8 * ceil(turns), "threads idle in the last turn"
    rounds = tile.parts * float(other_blocks(tile, shape)) / (H200.units * tile.min_blocks)
    assert tile.parts == 1 or rounds > 0.7 * ceil(rounds), "the last round of blocks is nearly empty"
    best = ranked(shape, H200)
    estimates = estimate(Tiles(*np.array(best, dtype=np.float64).T), shape, H200)
    assert np.isfinite(estimates).all()
    assert (np.diff(estimates) >= 0).all()
    assert tuple(tile.parameters.values()) == best[0]


def test_kernels_of_31_rows_share_loads():
    tile = TapSums.choose(Shape.parse("32x128x56x56_k31_p15_float32_nchw_wgrad"), H200)
    assert tile.kernel_rows * tile.kernel_cols * tile.vector <= 128
    assert tile.kernel_threads > 1
