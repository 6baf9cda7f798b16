"""Small layers, one as a kernel: its tensors, and what must come out."""

import re

import numpy as np
import tvm
from tvm.ir.instrument import pass_instrument
from tvm.ir.transform import PassContext

from backends import H200
from dwtir import Epilogue, Shape
from dwtir.build import schedule_for
from dwtir.schedules import Cpu
from dwtir.target import resolve
from marks import raises
from strategies import integer_tensors, oracle

LAYER = "1x8x15x17_k3_psame"
SHAPE = Shape.parse("2x6x9x11_k3_s2x1_psame_m2")
EPILOGUE = Epilogue(("bias", "relu"))
CPU, TILE = resolve("cpu"), Cpu(rows=3, cols=1, lanes=2)


def layer(text):
    shape, _, steps = text.partition("+")
    return Shape.parse(shape), Epilogue.of(steps)


def listed(lines):
    """List layers; each line has a form, as `float16_nhwc`, and then the layers of that form."""
    return [f"{form}_{text}" for form, *texts in map(str.split, lines.strip().splitlines()) for text in texts]


def tensors_of(kernel, seed=0):
    return list(integer_tensors(kernel.shape, kernel.epilogue, seed).values())


def expected_of(kernel, seed=0):
    return oracle(kernel.shape, kernel.epilogue, integer_tensors(kernel.shape, kernel.epilogue, seed))


def check(kernel):
    got = kernel(*tensors_of(kernel))
    np.testing.assert_array_equal(np.asarray(got, np.float64), expected_of(kernel))


def merged_bytes(shape, epilogue, tile):
    """Find the bytes of shared memory that TVM merges all of a block's into."""
    allocated = []

    @pass_instrument
    class AfterMerging:
        def run_after_pass(self, mod, info):
            if info.name == "s_tir.MergeSharedMemoryAllocations":
                allocated.extend(re.findall(r'alloc_buffer\(\((\d+),\), "uint8", scope="shared.dyn"', mod.script()))
                raise RuntimeError("merged")

    mod = schedule_for(shape, epilogue, tile).mod
    with raises(RuntimeError, match="merged"), PassContext(instruments=[AfterMerging()]):
        tvm.compile(mod, target=H200.tvm(), tir_pipeline="s_tir")
    (found,) = allocated
    return int(found)
