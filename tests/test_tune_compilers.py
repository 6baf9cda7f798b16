"""NVRTC in processes of its own: the same code and errors, and an end when nobody waits."""

import threading
import time

import pytest

import dwtir
from dwtir.errors import CompileError
from dwtir.nvrtc import compile_cubin
from dwtir.schedules import ChannelVector
from dwtir.search_limits import Limit, SlowCompileError, SpillError, for_search
from dwtir.tune.compilers import Compilers

SHAPE = "1x32x14x14_k7_p3_nhwc"
SPILLING = ChannelVector(7, 14, 1, 32, 1, 1, 16)


@pytest.fixture
def compilers():
    found = Compilers()
    yield found
    found.close()


def source(strategy="manual"):
    return dwtir.build(SHAPE, strategy, target="nvidia-h200").source()


def compile_on_and_on(compilers, limit):
    for _ in range(200):
        compilers.compile(limit, source(SPILLING), "sm_90", None)


def test_they_make_the_same_code(compilers):
    text = source()
    right = compile_cubin(text, "sm_90", 2)
    for _ in range(2):
        found = compilers.compile(Limit(60), text, "sm_90", 2)
        assert (found.code, found.arch, found.kernels) == (right.code, "sm_90", right.kernels)
        assert "ptxas info" in found.log
    assert compilers._idle.qsize() == 1, "the second took the first one's process"


def test_a_search_compiles_there(compilers):
    kernel = dwtir.build(SHAPE, ChannelVector(1, 2, 1, 32, 1, 1), target="nvidia-h200")
    with for_search(Limit(60, compilers.compile)):
        assert kernel.resources().spill_bytes == 0
    assert compilers._idle.qsize() == 1


def test_errors_are_the_same(compilers):
    with pytest.raises(SpillError, match=r"min_blocks=16 lets a thread spill \d+ bytes"):
        compilers.compile(Limit(60), source(SPILLING), "sm_90", SPILLING.min_blocks)
    with pytest.raises(CompileError, match="NVRTC rejected"):
        compilers.compile(Limit(60), "this is no program", "sm_90", None)
    with pytest.raises(dwtir.errors.InvalidTargetError, match="arch must look like"):
        compilers.compile(Limit(60), source(), "gfx90a", None)
    with pytest.raises(SlowCompileError, match=r"NVRTC was stopped, after 0\.01 s"):
        compilers.compile(Limit(0.01), source(SPILLING), "sm_90", None)


def test_what_nobody_waits_for_ends_at_once(compilers):
    limit = Limit(60)
    threading.Timer(0.3, limit.stop).start()
    start = time.monotonic()
    with pytest.raises(SlowCompileError):
        compile_on_and_on(compilers, limit)
    assert time.monotonic() - start < 30
    with pytest.raises(SlowCompileError):
        compilers.compile(limit, source(), "sm_90", None)
    assert compilers.compile(Limit(60), source(), "sm_90", None).kernels


def test_a_process_that_dies_is_replaced(compilers):
    compilers.compile(Limit(60), source(), "sm_90", None)
    channel = compilers._idle.queue[0]
    channel.kill()
    channel._process.wait()
    assert compilers.compile(Limit(60), source(), "sm_90", None).kernels
    (channel,) = compilers._idle.queue
    threading.Timer(0.3, channel.kill).start()
    with pytest.raises(CompileError, match="the compiler failed: the worker died: signal 9"):
        compile_on_and_on(compilers, Limit(60))


def test_threads_compile_at_the_same_time(compilers):
    text = source()
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.append(compilers.compile(Limit(60), text, "sm_90", None))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({cubin.code for cubin in found}) == 1
    assert 1 <= compilers._idle.qsize() <= 4
