"""NHWC halves on tensor cores: who gets them, what they take, who is refused."""

from dataclasses import replace

import pytest

import dwtir
from backends import H200
from dwtir import InvalidScheduleError, Shape, schedules
from dwtir.schedules import BandedChannels

parametrize = pytest.mark.parametrize


@parametrize(
    ("about", "epilogue"),
    [
        ("8x96x56x56_k7_p3_float16_nhwc", ""),
        ("8x80x28x27_k9_p4_bfloat16_nhwc_dgrad", ""),
        ("32x384x14x14_k7_p3_bfloat16_nhwc", "scale_shift+residual+relu"),
    ],
)
def test_products_and_shared_memory_are_what_the_tile_says(about, epilogue):
    shape = Shape.parse(about)
    tile = BandedChannels.choose(shape, H200)
    panels = tile.panels(shape)
    kernel = dwtir.build(shape, tile, epilogue=epilogue, target="nvidia-h200")
    products = tile.rows * shape.kernel[0] * panels.depth_steps * tile.channels
    assert kernel.source().count("mma.sync.aligned.m16n8k16") == products
    resources = kernel.resources()
    assert resources.threads == 32 * tile.warps
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.shared_bytes == panels.shared_bytes("residual" in epilogue)
    assert resources.registers * resources.threads * min(2, tile.min_blocks) <= 65536


THEIRS = """
    8x96x56x56_k7_p3_float16_nhwc 32x384x14x14_k7_p3_bfloat16_nhwc_dgrad 8x192x28x28_k9_p4_float16_nhwc
    8x96x56x56_k6_p3_float16_nhwc
"""
OTHERS = """
    128x96x56x56_k7_p3_float16_nhwc 1x384x14x14_k7_p3_float16_nhwc 128x768x7x7_k7_p3_float16_nhwc
    128x90x56x56_k7_p3_float16_nhwc 128x96x56x56_k7_p3_nhwc 128x96x56x56_k7_p3_float16_nchw
    128x96x56x56_k13_p6_float16_nhwc
"""


@parametrize("about", [*THEIRS.split(), *OTHERS.split()])
def test_who_gets_them(about):
    shape = Shape.parse(about)
    assert isinstance(schedules.choose(shape, H200), BandedChannels) == (about in THEIRS.split())


@parametrize(
    ("changes", "message"),
    [
        ({"rows": 57}, "rows must be at most 56"),
        ({"down": 15}, "down must be at most 14"),
        ({"across": 8}, "across must be at most 7"),
        ({"down": 4}, "tiles of an image must be at most 16"),
        ({"channels": 8}, "channels must be one of"),
        ({"warps": 3}, "channels of a block must be a multiple of 8"),
        ({"rows": 56, "down": 1}, "unrolled products must be at most 1024"),
        ({"warps": 32}, "shared bytes per block must be at most 101376"),
        ({"min_blocks": 17}, "min_blocks must be at most"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(changes, message):
    shape = Shape.parse("8x96x56x56_k7_p3_float16_nhwc")
    tile = BandedChannels(4, 2, 7, 4, 4, 3)
    tile.check_use(shape, H200)
    with pytest.raises(InvalidScheduleError, match=message):
        replace(tile, **changes).check_use(shape, H200)
