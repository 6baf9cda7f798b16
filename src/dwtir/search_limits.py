"""What a search does not wait for: candidates that spill, or that NVRTC takes long over."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from .errors import CompileError, DwtirError


class SpillError(CompileError):
    """A candidate of a search spills with the registers that its `min_blocks` leaves."""


class SlowCompileError(CompileError):
    """NVRTC takes longer over a candidate of a search than the search waits."""


class Limit:
    """How long NVRTC may take over a candidate, and why the candidate was refused.

    After so many seconds NVRTC is told to stop; an old one goes on.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.error: DwtirError | None = None
        self.flag = ctypes.create_string_buffer(2)

    def stop(self) -> None:
        """Tell NVRTC to stop, from any thread."""
        self.flag.value = b"!"

    def refuse(self, error: DwtirError) -> DwtirError:
        """Note why the candidate is refused, for `for_search` to raise."""
        self.error = error
        return error


current: ContextVar[Limit | None] = ContextVar("current", default=None)
"""The limit of the search that a kernel is compiled for, if any."""


@contextlib.contextmanager
def for_search(limit: Limit) -> Iterator[None]:
    """Let `nvrtc.compile_cubin` refuse in this context what is not worth a search's time.

    A kernel that spills much is refused where `min_blocks` says how many registers it has: other ways to compile it are
    other candidates.

    Raises
    ------
    SpillError, SlowCompileError
        From the context, also where TVM, which knows no errors of ours, stands between.
    """
    token = current.set(limit)
    try:
        yield
    except Exception:
        if limit.error is not None:
            raise limit.error from None
        raise
    finally:
        current.reset(token)


@contextlib.contextmanager
def stopped(nvrtc: Any, program: object, limit: Limit | None) -> Iterator[None]:
    """Let NVRTC ask now and then, in this context, whether the search still waits.

    It asks a function of the C library, for ours would wait for the GIL, eight hundred times a kernel: the length of a
    text, 0 while it shall go on.
    """
    if limit is None:
        yield
        return
    length = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
    with contextlib.suppress(AttributeError, RuntimeError):  # an old NVRTC does not ask
        nvrtc.nvrtcSetFlowCallback(program, length, ctypes.addressof(limit.flag))
    timer = threading.Timer(limit.seconds, limit.stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
