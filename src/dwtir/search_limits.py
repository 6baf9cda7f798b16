"""What a search does not wait for: candidates that spill, or that NVRTC takes long over."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from .errors import CompileError

__all__ = ["SlowCompileError", "SpillError", "current", "for_search", "stopped"]


class SpillError(CompileError):
    """A candidate of a search spills with the registers that its `min_blocks` leaves."""


class SlowCompileError(CompileError):
    """NVRTC takes longer over a candidate of a search than the search waits."""


class _Search:
    """How long NVRTC may take over a candidate, and why the candidate was refused."""

    def __init__(self, seconds: float, is_given_up: Callable[[], bool]) -> None:
        self.seconds = seconds
        self.is_given_up = is_given_up
        self.error: CompileError | None = None

    def spills(self, min_blocks: int, spilled: int) -> CompileError:
        self.error = SpillError(f"min_blocks={min_blocks} lets a thread spill {spilled} bytes")
        return self.error

    def takes_too_long(self) -> CompileError:
        why = "given up" if self.is_given_up() else f"stopped after {self.seconds:g} s"
        self.error = SlowCompileError(f"NVRTC was {why}")
        return self.error


current: ContextVar[_Search | None] = ContextVar("current", default=None)
"""The search that a kernel is compiled for, if any."""


@contextlib.contextmanager
def for_search(seconds: float, is_given_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Let `nvrtc.compile_cubin` refuse in this context what is not worth a search's time.

    A kernel that spills is refused where `min_blocks` says how many registers it has: to
    compile it in the other ways takes three times as long, up to minutes, and they are other
    candidates, with another `min_blocks`. What is not refused is what the same call makes
    outside.

    Parameters
    ----------
    seconds : float
        After which NVRTC is told to stop; an old one goes on.
    is_given_up : callable
        Says from another thread that nobody waits any more; NVRTC is told to stop as well.

    Raises
    ------
    SpillError, SlowCompileError
        From the context, also where TVM, which knows no errors of ours, stands between.
    """
    search = _Search(seconds, is_given_up)
    token = current.set(search)
    try:
        yield
    except Exception:
        if search.error is not None:
            raise search.error from None
        raise
    finally:
        current.reset(token)


@contextlib.contextmanager
def stopped(nvrtc: Any, program: object, search: _Search | None) -> Iterator[None]:
    """Let NVRTC ask now and then, in this context, whether the search still waits."""
    if search is None:
        yield
        return
    deadline = time.monotonic() + search.seconds
    is_over = _FLOW_CALLBACK(
        lambda payload, reserved: time.monotonic() > deadline or search.is_given_up()
    )
    address = ctypes.cast(is_over, ctypes.c_void_p).value
    with contextlib.suppress(AttributeError, RuntimeError):  # an old NVRTC does not ask
        nvrtc.nvrtcSetFlowCallback(program, address, 0)
    yield  # and `is_over` lives


_FLOW_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
