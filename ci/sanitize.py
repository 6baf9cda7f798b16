"""Run every GPU strategy once on a small shape and check the result; for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python ci/sanitize.py

The tensors are TVM's, each of which is an allocation of its own: an access past
the end of one is an error there, and not the next tensor of a pool. With the
argument ``opencl`` the same kernels run through OpenCL, as a rehearsal.
"""

import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
import tvm

import dwtir
from dwtir import reference
from dwtir.space_to_batch import splits_of
from dwtir.target import resolve

# Odd sizes, so that tiles hang over every edge; 8 channels make a vector of 16 bytes. A large kernel, ones for tensor
# cores, whole images in registers, a dilation, a multiplier.
SIZES = (
    *("2x8x13x17_k3_psame", "1x8x19x20_k13_s2_psame", "2x4x11x14_k5_p2", "2x4x13x17_k5_s2_p2"),
    *("5x20x7x7_k5_p2", "1x4x11x14_k3_p2_d2", "1x4x11x14_k3_p1_m2"),
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


def cases(device: dwtir.Target) -> Iterator[tuple[dwtir.DepthwiseConv2dShape, str | dwtir.Strategy]]:
    """List all kernels."""
    for size, layout, dtype, ending in product(SIZES, ("nchw", "nhwc"), ("float32", "float16"), ENDINGS):
        shape = dwtir.DepthwiseConv2dShape.parse(f"{size}_{dtype}_{layout}{ending}")
        yield from ((shape, schedule) for schedule in schedules(shape, device))
    if device.kind == "cuda":
        padded = dwtir.STRATEGIES["banded_matrix"](5, 3, 2, loads="planes", turns=2)
        yield dwtir.DepthwiseConv2dShape.parse("3x2x40x20_k3_p1_float16"), padded


def schedules(shape: dwtir.DepthwiseConv2dShape, device: dwtir.Target) -> Iterator[str | dwtir.Strategy]:
    """Name the strategies for the shape, and the articles' steps where they are for it."""
    whole = dwtir.STRATEGIES["whole_image"]
    if whole.claims(shape, device) and shape.batch > 1:
        tile = whole.choose(shape, device).parameters
        yield whole(**tile | {"turns": 2, "rows": shape.result_height})
    pairs = dwtir.STRATEGIES["channel_pairs"]
    if pairs.claims(shape, device):
        tile = pairs.choose(shape, device).parameters | {"rows": 2, "ahead": 2, "min_blocks": 1}
        tile["steps"] = -(-shape.result_height // 2)  # down the image, by a ring of stages
        yield from (pairs(**tile), pairs(**tile | {"images": 1, "turns": min(2, shape.batch)}))
    banded = dwtir.STRATEGIES["banded_matrix"]
    fours = banded(2, shape.kernel[0], 1, loads="fours")
    if max(shape.stride) > 1 and banded.claims(shape, device) and fours.fits(shape, device):
        yield fours
    sums = dwtir.STRATEGIES["banded_sums"]
    wide = sums(4, 1, 1, 1, columns=16)
    if sums.claims(shape, device) and wide.fits(shape, device):
        yield wide
    split = dwtir.STRATEGIES["split_image"]
    if shape.layout == "NCHW" and split.claims(shape, device):
        divided = (split(4, 1, bands, 1, parts, pieces) for bands, parts, pieces in ((3, 3, 3), (4, 2, 2), (2, 4, 3)))
        yield from [tile for tile in divided if tile.fits(shape, device)][:1]
    for window in map(dwtir.STRATEGIES.get, ("register_window", "channel_vector")):
        if window.claims(shape, device) and "both" in splits_of(shape):
            tile = window.choose(shape, device).parameters | window.one_by_one
            yield window(**tile | {"window": "tile", "split": "both"})
    claiming = [name for name, kind in dwtir.STRATEGIES.items() if kind.claims(shape, device)]
    yield from claiming
    for steps in dwtir.ARTICLE_STEPS.values():
        for name, make in steps.items():
            if make(shape, device).name in claiming:
                yield name


def is_right(shape: dwtir.DepthwiseConv2dShape, schedule: str | dwtir.Strategy, device: dwtir.Target) -> bool:
    """Build the kernel, run it, and compare with the oracle."""
    epilogue = EPILOGUE if shape.operation == "forward" else None
    kernel = dwtir.build(shape, schedule, epilogue=epilogue, target=device)
    rng = np.random.default_rng(0)
    extents = shape.input_shapes | kernel.epilogue.operands(shape)
    arrays = {name: rng.standard_normal(extent, np.float32).astype(shape.dtype) for name, extent in extents.items()}
    out = np.full(shape.result_shape, np.nan, shape.dtype)
    if device.kind == "cuda":
        gpu = tvm.cuda(0)
        on_gpu = tvm.runtime.tensor(out, gpu)
        kernel(*(tvm.runtime.tensor(array, gpu) for array in arrays.values()), out=on_gpu)
        out = on_gpu.numpy()
    else:
        kernel(*arrays.values(), out=out)
    first, second = (arrays.pop(name) for name in shape.input_shapes)
    expected = reference.depthwise_conv2d(shape, first, second, arrays, epilogue=epilogue)
    bound = reference.error_bound(shape, first, second, arrays, epilogue=epilogue)
    return bool((np.abs(out.astype(np.float64) - expected) <= bound).all())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
