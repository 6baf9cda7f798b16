"""Ways to worker processes, which answer messages."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import DeviceError


class Channel(ABC):
    """A way to one worker."""

    @abstractmethod
    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a message and wait for the answer; a `DeviceError` if none comes in time."""

    @abstractmethod
    def close(self) -> None:
        """End the worker."""


class PipeChannel(Channel):
    """A worker process of this machine: a line of JSON for each line of JSON."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C is for us, who then end the worker.
        command, pipe = [sys.executable, "-m", "dwtir.tune.worker"], subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        self._buffer = b""

    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise DeviceError(f"the worker is gone: {self._last_words()}") from error
        answer: dict[str, Any] = json.loads(self._line(time.monotonic() + seconds, seconds))
        return answer

    def _line(self, deadline: float, seconds: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DeviceError(f"the worker said nothing for {seconds:.0f} s")
            data = os.read(pipe, 1 << 16)
            if not data:
                raise DeviceError(f"the worker died: {self._last_words()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return "it closed its pipes"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it did not read is of no use now
                    pipe.close()
        self._process.kill()
        self._process.wait()


def answer_lines(handle: Callable[[Mapping[str, Any]], dict[str, Any]]) -> None:
    """Be the process at the other end of a `PipeChannel`, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=answers, flush=True)
