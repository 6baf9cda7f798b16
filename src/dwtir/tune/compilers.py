"""NVRTC in processes of their own, for candidates of a search.

In one process, threads that compile may have to wait for each other, in no order: a candidate
whose turn does not come holds up all that are measured after it. A process can also be ended,
whatever it does. It is `python -m dwtir.tune.compilers`, and knows nothing of TVM.
"""

from __future__ import annotations

import base64
import queue
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from .. import errors, search_limits
from ..errors import DeviceError, DwtirError
from ..nvrtc import Cubin, KernelResources, compile_cubin
from ..search_limits import Limit, for_search
from .channels import PipeChannel, answer_lines

__all__ = ["Compilers"]

_GRACE_SECONDS = 10.0
"""For a process to start, and for NVRTC to notice that it was stopped."""


class Compilers:
    """As many processes as compile at a time; each is kept for the next candidate."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[PipeChannel] = queue.LifoQueue()

    def compile(self, limit: Limit, source: str, arch: str, min_blocks: int | None) -> Cubin:
        """Do what `nvrtc.compile_cubin` does within a limit.

        Raises
        ------
        DwtirError
            What that raises, `SlowCompileError` also where the process had to be ended.
        """
        message = {
            "source": source,
            "arch": arch,
            "min_blocks": min_blocks,
            "seconds": limit.seconds,
        }
        channel = self._take()
        limit.on_stop = channel.kill
        try:
            if limit.is_stopped:
                raise limit.takes_too_long()
            answer = channel.call(message, limit.seconds + _GRACE_SECONDS)
        except DeviceError as error:
            if limit.is_stopped or channel.is_alive:
                raise limit.takes_too_long() from error
            raise limit.refuse(errors.CompileError(f"the compiler failed: {error}")) from error
        finally:
            limit.on_stop = None
            if limit.is_stopped or limit.error is not None:
                channel.close()
            else:
                self._idle.put(channel)
        if "error" in answer:
            raise limit.refuse(_error(answer))
        kernels = tuple(KernelResources(**kernel) for kernel in answer["kernels"])
        return Cubin(base64.b64decode(answer["code"]), arch, kernels, answer["log"])

    def _take(self) -> PipeChannel:
        """Take an idle process, or start one."""
        while True:
            try:
                channel = self._idle.get_nowait()
            except queue.Empty:
                return PipeChannel("dwtir.tune.compilers")
            if channel.is_alive:
                return channel
            channel.close()

    def close(self) -> None:
        """End the processes that are idle."""
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return


def _error(answer: Mapping[str, Any]) -> DwtirError:
    for module in (search_limits, errors):
        kind = getattr(module, answer["kind"], None)
        if isinstance(kind, type) and issubclass(kind, DwtirError):
            return kind(answer["error"])
    return errors.CompileError(f"{answer['kind']}: {answer['error']}")


def _handle(message: Mapping[str, Any]) -> dict[str, Any]:
    """Compile, in the process itself."""
    try:
        with for_search(Limit(message["seconds"])):
            cubin = compile_cubin(message["source"], message["arch"], message["min_blocks"])
    except Exception as error:  # the process at the other end must hear of all
        return {"kind": type(error).__name__, "error": str(error)}
    kernels = [asdict(kernel) for kernel in cubin.kernels]
    return {"code": base64.b64encode(cubin.code).decode(), "kernels": kernels, "log": cubin.log}


if __name__ == "__main__":
    answer_lines(_handle)
