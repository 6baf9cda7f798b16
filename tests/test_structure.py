"""The schedules of the two articles: their grids, threads, shared memory, and their traces."""

import re
from dataclasses import replace

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import load_json
from tvm.s_tir import SBlock, Schedule
from tvm.s_tir.schedule import Trace

import dwtir
from backends import H200, OPENCL, REPLAY, kernel_names, on_h200, replay_and_cuda
from dwtir import ARTICLE_STEPS, STRATEGIES, Epilogue, Shape, reference
from dwtir.build import schedule_for
from dwtir.images import Images
from dwtir.schedules import (
    ChannelVector,
    Ladder,
    RegisterWindow,
    RowStream,
    SharedTile,
    SplitImage,
    TapSums,
    WholeImage,
    named,
)
from dwtir.schedules.ladder import LADDER_STEPS
from dwtir.strips import Strip
from dwtir.target import resolve
from kernels import layer
from marks import layouts, parametrize, raises

ARTICLE_2025 = Shape.parse("3x4x16x32_k7_p3")
ARTICLE_2017 = Shape.parse("1x256x96x96_k3_p1")


def scopes_and_bindings(shape, step):
    sch = schedule_for(shape, Epilogue(), named(step, shape, H200))
    scopes = set()
    extents = {}

    def visit_block(block):
        scopes.update(buffer.scope() for buffer in block.alloc_buffers)

    def visit_loop(loop):
        if loop.thread_binding is not None:
            tag = str(loop.thread_binding.thread_tag)
            assert extents.setdefault(tag, int(loop.extent)) == int(loop.extent)

    tvm_ffi.structural_walk(sch.mod["main"].body, [(SBlock, visit_block), (tirx.For, visit_loop)])
    return scopes, extents


# 2025: 3x4x16x32 with a 7x7 kernel, blocks of 16x16 threads


LADDER_GRIDS = [
    ("naive", (3, 1, 1), (1, 1, 1)),
    ("v1", (3, 4, 1), (1, 1, 1)),
    ("v2", (12, 16, 1), (1, 1, 1)),
    ("v3", (12, 1, 1), (16, 16, 1)),
    ("v4", (12, 2, 1), (16, 16, 1)),
]


@parametrize(("step", "grid", "block"), LADDER_GRIDS)
def test_ladder_has_the_articles_grids(step, grid, block):
    kernel = on_h200(ARTICLE_2025, step)
    resources = kernel.resources()
    assert kernel.strategy == Ladder(step)
    assert (resources.grid, resources.block) == (grid, block)
    assert resources.shared_bytes == 0
    assert 0 < resources.registers <= 255
    scopes, _ = scopes_and_bindings(ARTICLE_2025, step)
    assert scopes == {"local"}, "the padding is inlined, the sum is in a register"


# 2017: 1x256x96x96 with a 3x3 kernel, tiles of 32x32 outputs


SHARED_GRIDS = [
    ("one_channel", (8, 8), (1, 1)),
    ("blocks_32x32", (8, 8), (1, 1)),
    ("threads_32x1", (32, 1), (1, 1)),
    ("threads_1x32", (1, 32), (1, 1)),
    ("threads_8x32", (8, 32), (1, 1)),
    ("threads_4x32", (4, 32), (1, 1)),
    ("vthreads_1x4", (8, 8), (1, 4)),
    ("vthreads_2x2", (8, 8), (2, 2)),
    ("vthreads_1x2", (8, 16), (1, 2)),
]


@parametrize(("step", "threads", "vthreads"), SHARED_GRIDS)
def test_shared_tiles_have_the_articles_grids(step, threads, vthreads):
    kernel = on_h200(ARTICLE_2017, step)
    resources = kernel.resources()
    whole = step == "one_channel"
    assert resources.grid == (256, 1 if whole else 9, 1)
    assert resources.block == (threads[1], threads[0], 1)
    assert resources.threads == threads[0] * threads[1]
    tile = 98 * 98 if whole else 34 * 34
    assert resources.shared_bytes == (tile + 3 * 3) * 4
    assert resources.registers > 0

    scopes, extents = scopes_and_bindings(ARTICLE_2017, step)
    assert scopes == {"shared", "local"}
    assert (extents["vthread.y"], extents["vthread.x"]) == vthreads
    assert "__shared__" in kernel.source()


def test_these_are_the_articles_steps():
    for article, grids in (("2025", LADDER_GRIDS), ("2017", SHARED_GRIDS)):
        assert list(ARTICLE_STEPS[article]) == [step for step, *_ in grids]
    assert LADDER_STEPS == tuple(ARTICLE_STEPS["2025"])


@parametrize(
    ("text", "tile"),
    [
        ("1x4x96x96_k3_p1", SharedTile()),
        ("1x4x96x96_k5_s2_p2_float16", SharedTile(block_h=16, block_w=24, thread_x=6)),
        ("1x4x50x50_k3_d2_p2_bfloat16", SharedTile(block_h=20, block_w=20, thread_y=7)),
        ("1x4x30x31_k3_p1", SharedTile(padding="inline")),
    ],
)
def test_tile_takes_the_shared_memory_it_counts(text, tile):
    shape = Shape.parse(text)
    resources = on_h200(shape, tile).resources()
    # The compiler aligns one buffer after the other, to at most 16 bytes.
    counted = tile._shared_bytes(shape, H200)
    assert counted <= resources.shared_bytes <= counted + 16


ODD_LAYERS = parametrize(
    ("backend", "text"),
    [(REPLAY, "1x4x17x18_k3_p1"), (OPENCL, "2x2x16x15_k5x3_s2_p0x1x3x2_m2"), (REPLAY, "1x2x20x12_k3_d3_p4_float16")],
)


@ODD_LAYERS
def test_inlined_padding_computes_the_same(backend, text):
    tile = SharedTile(block_h=8, block_w=8, thread_y=4, thread_x=4, padding="inline")
    backend.check(tile, text, "bias+relu")


# Windows: what the two better strategies keep in registers


@parametrize(
    ("text", "window"),
    [
        *[("8x64x56x56_k3_p1", "tile"), ("8x64x56x56_k7_p3", "tile"), ("8x64x56x56_k31_p15", "row")],
        *[("1x2x200x200_k3_s2_d60", "row"), ("1x2x3x3000_k1x1500", "tap")],
    ],
)
@parametrize("strategy", [RegisterWindow, ChannelVector])
def test_window_bounds_the_code(strategy, text, window):
    kernel = on_h200(f"{text}_{strategy.layouts[0]}", strategy.name)
    assert kernel.strategy.parameters["window"] == window
    assert len(kernel.source()) < 500_000


@ODD_LAYERS
@parametrize("window", ["tile", "row", "tap"])
@parametrize("strategy", [RegisterWindow, ChannelVector])
def test_every_window_computes_the_same(strategy, text, window, backend):
    shape = Shape.parse(f"{text}_{strategy.layouts[0]}")
    tile = replace(strategy.choose(shape, H200), window=window)
    if isinstance(tile, RegisterWindow) and window == "tap":
        tile = replace(tile, lanes=1)
    backend.check(tile, shape, "bias+relu")


@parametrize(
    ("images", "rows", "cols", "depth"),
    [
        *[("nchw", 5, 4, 4), ("nchw", 7, 12, 2), ("nhwc", 13, 4, 3), ("nhwc", 5, 4, 2)],
        *[("float16_nhwc", 7, 12, 3), ("float16_nhwc", 4, 2, 1)],
    ],
)
def test_rows_of_a_residual_meet_their_rows(images, rows, cols, depth):
    tile = RowStream(rows, cols, 2, 2, 1, 2, 1, depth)
    REPLAY.check(tile, f"2x4x13x12_k5_p3x2_{images}", "scale_shift+residual")


def test_gradient_may_begin_in_the_image():
    shape = Shape.parse("3x16x37x2_k1x4_p0x6x0x6_d2x1_float16_dgrad")
    assert Strip(shape, 2, 1).inside == (0, 5)
    REPLAY.check(RowStream(19, 2, 1, 8, 1, 1, 2, 1), shape)


def test_windows_beyond_shared_memory_are_not_claimed():
    shape = Shape.parse("1x1x400x400_k200")
    assert not SharedTile.claims(shape, H200)
    with raises(dwtir.InvalidScheduleError, match="shared bytes per block must be at most"):
        on_h200(shape, "shared_tile")


# Every strategy


@parametrize("target", ["cpu", "opencl", "nvidia-h200"])
@parametrize(
    "about",
    [
        *("k3_s2x1_psame_m2_nchw", "k3_s2x1_psame_m2_nhwc+bias+relu"),
        *("k5_psame_float16_nchw+scale_shift+residual", "k5_psame_nhwc+scale_shift+residual"),
    ],
)
def test_trace_makes_the_script(target, about):
    shape, epilogue = layer(f"2x6x13x18_{about}")
    names = [name for name, strategy in STRATEGIES.items() if strategy.claims(shape, resolve(target))]
    assert names
    for name in names:
        kernel = dwtir.build(shape, name, epilogue=epilogue, target=target)
        fresh = Schedule(kernel.strategy.define(shape, epilogue))
        Trace.apply_json_to_schedule(load_json(kernel.trace), fresh)
        tvm.ir.assert_structural_equal(fresh.mod, schedule_for(shape, epilogue, kernel.strategy).mod)
        assert fresh.mod["main"].script() == kernel.script()


@parametrize(
    ("name", "operation"),
    [
        (name, operation)
        for name, strategy in STRATEGIES.items()
        for operation in strategy.operations
        if strategy.on_gpu and operation != "grad_weight" and name != "banded_planes"
    ],
)
def test_gpu_schedule_is_one_kernel(name, operation):
    strategy = STRATEGIES[name]
    size = 8 if name == "whole_image" else 28
    shape = Shape.parse(f"2x8x{size}x{size}_k3_p1_{strategy.dtypes[0]}_{strategy.layouts[0]}")
    shape = replace(shape, operation=operation)
    kernel = on_h200(shape, name)
    assert kernel_names(kernel.source()) == {"main_kernel"}
    assert kernel.info.workspace == ()
    scopes, extents = scopes_and_bindings(shape, name)
    assert not scopes & {"global", ""}
    assert "local" in scopes
    assert extents["threadIdx.x"] > 1


@layouts
def test_weights_gradient_is_two_kernels(layout):
    shape = Shape.parse(f"8x32x56x56_k3_p1_{layout}_wgrad")
    kernel = on_h200(shape, "tap_sums")
    assert kernel_names(kernel.source()) == {"main_kernel", "main_kernel_1"}
    tile = kernel.strategy
    assert isinstance(tile, TapSums)
    assert kernel.info.workspace == (("float32", (tile.parts, *shape.weight_shape)),)
    threads, taps = tile.channels * tile.threads, 9 * tile.vector
    resources = kernel.resources()
    assert resources.threads == threads
    assert resources.shared_bytes == 4 * threads * taps
    assert f"float acc_rf_rf_shared_local_ptr[{taps}]" in kernel.source()


@parametrize(
    ("text", "tile"),
    [
        ("6x40x7x7_k7_p3", WholeImage(20, 4, 7)),
        ("6x40x8x8_k4x3_s2x1_p2_d2_float16", WholeImage(32, 2, 2)),
        ("6x40x6x5_k13_p6x7_dgrad", WholeImage(8, 3, 5)),
        ("6x40x7x7_k7_p3", WholeImage(32, 1, 7, 12, turns=4)),
        ("6x40x7x7_k7_p3_float16_nhwc", WholeImage(32, 1, 7, 12, turns=4)),
    ],
)
def test_whole_images_multiply_no_padding(text, tile):
    shape = Shape.parse(text)
    resources = on_h200(shape, tile).resources()
    images = Images(shape, tile.thread_x, tile.thread_y, tile.rows)
    taken = images.shared_bytes if shape.layout == "NCHW" else 0
    assert abs(resources.shared_bytes - taken) <= 16
    ones = [np.ones(extents, np.float32) for extents in shape.input_shapes.values()]
    assert images.multiply_adds * 6 * 40 == reference.depthwise_conv2d(shape, *ones).sum()


@parametrize("text", ["6x40x14x14_k7_p3_nhwc", "6x40x14x9_k4x3_p2_d2_float16_dgrad", "6x40x28x14_k5_s2_p2_dgrad"])
def test_bands_of_an_image_have_one_code(text):
    two_rows, one_row = (on_h200(text, SplitImage(16, 1, bands, 4)) for bands in (7, 14))
    images = Images(two_rows.shape, 16, 1, two_rows.shape.result_height)
    for resources in (two_rows.resources(), one_row.resources()):
        assert abs(resources.shared_bytes - images.shared_bytes) <= 16
        assert resources.stack_bytes == 0
    assert len(one_row.source()) < len(two_rows.source())
    assert two_rows.source().count("= filters_ptr[") <= np.prod(two_rows.shape.kernel)


@replay_and_cuda
@parametrize(
    ("text", "tile"),
    [
        ("3x9x14x13_k27x25_p13x12", None),
        ("3x9x14x13_k27x25_p13x12_nhwc", None),
        ("2x6x20x6_k5_p2_nhwc", SplitImage(2, 1, 1)),  # a thread copies more pixels than the source lists
        *((f"1x5x23x21_k{rest}", SplitImage(4, 1, 3, 1, 3, 3)) for rest in ("5_p2_float16", "3_p2_d2", "3_s2_p1")),
        ("2x4x26x22_k3_p1_float16", SplitImage(2, 1, 4, 1, 4, 2)),
        ("1x3x10x13_k4_p0x0x3x4_d4_bfloat16", SplitImage(2, 1, 1)),
        ("1x5x35x35_k3_p1_float16", SplitImage(4, 1, 3, 1, 3, 4)),  # bands of 2 and 3 rows
        *((f"3x5x9x9_k3_p1_{dtype}", SplitImage(x, 2, 3)) for x, dtype in ((3, "float16"), (4, "bfloat16"))),
        *((f"2x5x10x10_k5_p2{rest}", SplitImage(4, 1, 5, lanes=2)) for rest in ("", "_s2_dgrad")),
        ("1x5x69x36_k3_s2_p1_d2_bfloat16_dgrad", SplitImage(4, 1, 8, 1, 4, 4)),
    ],
)
def test_bands_of_large_kernels_and_of_pixels(backend, text, tile):
    shape = Shape.parse(text)
    steps = "residual" if shape.operation == "forward" else None
    backend.check(tile or SplitImage.choose(shape, backend.target()), shape, steps)


PIECES = [
    ("1x8x75x75_k3_p1", SplitImage(4, 1, 3, 1, 15, 7)),
    ("1x8x65x65_k3_s2_p1_dgrad", SplitImage(4, 1, 3, 1, 7, 11)),
    ("1x8x95x95_k3_p1_float16", SplitImage(4, 1, 2, 12, 8, 12)),
]


def pieces_of(text, tile):
    pieces = tile.sizes(Shape.parse(text))
    return pieces.shape, pieces.images, pieces


@parametrize(("text", "tile"), PIECES)
def test_piece_has_all_rows_that_its_bands_see(text, tile):
    shape, images, pieces = pieces_of(text, tile)
    ends = [images.first(band, pieces.all_bands) for band in range(pieces.all_bands + 1)]
    assert (ends[0], pieces.rows) == (0, max(np.diff(ends)))
    assert ends[-1] - shape.result_height in range(images.phases)
    height, width = images.source
    assert 0 < pieces.fewest <= pieces.cols
    for piece in range(tile.pieces):
        first, last = max(0, pieces.top(piece)), min(height, pieces.top(piece) + images.seen(pieces.most))
        assert (last - first) * width <= pieces.read
        for band in range(piece * tile.bands, (piece + 1) * tile.bands):
            top, seen = images.top(ends[band]), images.seen(ends[band + 1] - ends[band])
            assert {*range(max(0, top), min(height, top + seen))} <= {*range(first, last)}


@parametrize(("text", "tile"), PIECES)
def test_pieces_are_copied_in_vectors(text, tile):
    shape, _, pieces = pieces_of(text, tile)
    kernel = on_h200(shape, tile)
    resources = kernel.resources()
    assert abs(resources.shared_bytes - pieces.shared_bytes) <= 16
    assert resources.stack_bytes == 0
    vector = "float4" if shape.dtype == "float32" else "uint4"
    source = kernel.source()
    assert re.search(rf"planes_ptr[^;=]*= [^;]*{vector}[^;]*(?:data|grad_out)_ptr", source)
    assert re.search(rf"{vector}[^;=]*(?:out|grad_data)_ptr[^;=]*= ", source)


@parametrize("tile", [SplitImage(4, 1, 5), SplitImage(4, 1, 2, 1, 4, 3)])
def test_halves_of_odd_widths_move_in_pairs(tile):
    source = on_h200("1x8x15x15_k3_p1_float16", tile).source()
    assert re.search(r"= \*\(half2\*\)\(planes_ptr", source)
    assert re.search(r"\*\(half2\*\)\(planes_ptr[^;=]* = ", source)
    assert not re.search(r"\(float\)\(?planes_ptr", source)
    assert "dwtir_from(" in source


@parametrize("text", ["4x90x15x15_k3_p1_float16", "4x90x14x14_k3_p1", "4x90x15x15_k3_p1_nhwc"])
def test_no_copy_waits_under_a_test(text):
    """The last channels are loaded again; a test is left at the pixels' end."""
    source = on_h200(text, SplitImage(16, 1, 5)).source()
    assert len(re.findall(r"planes_ptr[^;=]*= [^;]*data_ptr", source)) > 6
    assert len(re.findall(r"if \([^{]*\) \{\s*[^;{]*planes_ptr[^;=]*= [^;]*data_ptr", source)) <= 1


@parametrize(("layout", "lanes"), [("nchw", 2), ("nhwc", 8)])
def test_threads_share_no_banks(layout, lanes):
    stride = SplitImage(16, 1, 14, lanes=lanes).sizes(Shape.parse(f"2x16x14x14_k7_p3_{layout}")).stride(14 * 14)
    assert len({(channel * stride + column) % 32 for channel in range(16) for column in range(2)}) == 32


def test_small_results_have_a_place_of_their_own():
    shape = Shape.parse("2x1x17x11_k5x1_d4")
    taken = on_h200(shape, SplitImage(32, 1, 1)).resources().shared_bytes
    assert 17 * 11 * 32 * 4 + 11 * 32 * 4 <= taken <= Images(shape, 32, 1, 1).shared_bytes
    with raises(dwtir.InvalidScheduleError, match="shared bytes"):
        on_h200(shape, SplitImage(32, 2, 1))


def test_all_channels_of_a_gradient_are_in_registers():
    assert on_h200("128x16x7x7_k9_p4_m3_dgrad", "register_window").resources().stack_bytes == 0


def test_strided_gradient_multiplies_no_missing_taps():
    """Every tap is tested, of the tile's own rows and columns."""
    source = on_h200("2x8x28x28_k3_s2_p1_dgrad", "register_window").source()
    tests = [line for line in source.splitlines() if "% 2) == 0" in line]
    assert tests
    assert not [line for line in tests if "Idx" in line]
