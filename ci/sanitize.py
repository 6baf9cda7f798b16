"""Run every GPU strategy once on a small shape and check the result; for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python ci/sanitize.py

The tensors are TVM's, each an allocation of its own, whose end is no other tensor. With the argument ``opencl`` the
same kernels run through OpenCL.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import dwtir
from dwtir.schedules import (
    BandedMatrix,
    BandedSums,
    ChannelPairs,
    ChannelVector,
    RegisterWindow,
    SplitImage,
    WholeImage,
)
from dwtir.space_to_batch import splits_of
from dwtir.target import resolve
from dwtir.verify import verify_kernel

# Odd sizes, so that tiles hang over every edge; 8 channels make a vector. A large kernel, odd channels, a dilation.
SIZES = (
    *("2x8x13x17_k3_psame", "1x8x19x20_k13_s2_psame", "2x4x11x14_k5_p2", "2x4x13x17_k5_s2_p2"),
    *("5x20x7x7_k5_p2", "3x5x9x11_k7_p3", "1x4x11x14_k3_p2_d2", "1x4x11x14_k3_p1_m2"),
)
ENDINGS = ("", "_dgrad", "_wgrad")
EPILOGUE = "scale_shift+residual+relu"


def main(target: str) -> int:
    """Run all kernels; return the exit status."""
    device = resolve(target)
    wrong = 0
    for shape, schedule in cases(device):
        right = is_right(shape, schedule, device)
        wrong += not right
        print(f"{'ok   ' if right else 'WRONG'} {schedule!s:16} {shape}", flush=True)
    return 1 if wrong else 0


def cases(device: dwtir.Target) -> Iterator[tuple[dwtir.Shape, str | dwtir.Strategy]]:
    """List all kernels."""
    for size, layout, dtype, ending in product(SIZES, ("nchw", "nhwc"), ("float32", "float16"), ENDINGS):
        shape = dwtir.Shape.parse(f"{size}_{dtype}_{layout}{ending}")
        yield from ((shape, schedule) for schedule in schedules(shape, device))
    if device.kind == "cuda":
        yield dwtir.Shape.parse("3x2x40x20_k3_p1_float16"), BandedMatrix(5, 3, 2, loads="planes", turns=2)


def schedules(shape: dwtir.Shape, device: dwtir.Target) -> Iterator[str | dwtir.Strategy]:
    """Name the strategies for the shape, and the articles' steps where they are for it."""
    if WholeImage.claims(shape, device) and shape.batch > 1:
        yield replace(WholeImage.choose(shape, device), turns=2, rows=shape.result_height)
    if ChannelPairs.claims(shape, device):  # down the image, by a ring of stages
        steps = -(-shape.result_height // 2)
        tile = replace(ChannelPairs.choose(shape, device), rows=2, steps=steps, ahead=2, min_blocks=1)
        yield from (tile, replace(tile, images=1, turns=min(2, shape.batch)))
    fours = BandedMatrix(2, shape.kernel[0], 1, loads="fours")
    if max(shape.stride) > 1 and BandedMatrix.claims(shape, device) and fours.fits(shape, device):
        yield fours
    wide = BandedSums(4, 1, 1, 1, columns=16)
    if BandedSums.claims(shape, device) and wide.fits(shape, device):
        yield wide
    if shape.layout == "NCHW" and SplitImage.claims(shape, device):
        divided = (SplitImage(4, 1, *parts) for parts in ((3, 1, 3, 3), (4, 1, 2, 2), (2, 1, 4, 3)))
        yield from [tile for tile in divided if tile.fits(shape, device)][:1]
    for window in (RegisterWindow, ChannelVector):
        if window.claims(shape, device) and "both" in splits_of(shape):
            yield replace(window.choose(shape, device), **window.one_by_one, window="tile", split="both")
    claiming = [name for name, kind in dwtir.STRATEGIES.items() if kind.claims(shape, device)]
    yield from claiming
    for steps in dwtir.ARTICLE_STEPS.values():
        for name, make in steps.items():
            if make(shape, device).name in claiming:
                yield name


def is_right(shape: dwtir.Shape, schedule: str | dwtir.Strategy, device: dwtir.Target) -> bool:
    """Build the kernel, run it, and compare with the oracle."""
    epilogue = EPILOGUE if shape.operation == "forward" else None
    try:
        verify_kernel(dwtir.build(shape, schedule, epilogue=epilogue, target=device))
    except dwtir.RecordError as error:
        print(error)
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
