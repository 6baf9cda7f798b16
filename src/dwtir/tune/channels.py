"""Ways to worker processes, which answer messages: by pipes, and by TVM's RPC."""

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ..errors import DeviceError

Message: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
"""JSON objects, to a worker and back."""


class Channel(ABC):
    """A way to one worker."""

    @abstractmethod
    def call(self, message: Message, seconds: float) -> Answer:
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._buffer = b""

    def call(self, message: Message, seconds: float) -> Answer:
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except OSError as error:
            raise DeviceError(f"the worker is gone: {self._last_words()}") from error
        answer: Answer = json.loads(self._line(seconds))
        return answer

    def _line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        pipe = self._stdout.fileno()
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
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):  # what it did not read is of no use now
                pipe.close()
        self._process.kill()
        self._process.wait()


class Lane:
    """A thread for calls that may never return."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="rpc", daemon=True).start()

    def _run(self) -> None:
        # What a call made or raised is freed here too: to free it may mean to wait for the server.
        while (item := self._calls.get()) is not None:
            work, answer = item
            try:
                answer.put((work(), ""))
            except Exception as error:
                answer.put((None, f"{type(error).__name__}: {' '.join(str(error).split())}"))
            del item, work, answer

    def do(self, work: Callable[[], Any], seconds: float) -> Any:
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((work, answer))
        try:
            value, error = answer.get(timeout=seconds)
        except queue.Empty:
            raise DeviceError(f"the server said nothing for {seconds:g} s") from None
        if error:
            raise DeviceError(error)
        return value

    def end(self, held: list[Any]) -> None:
        self._calls.put((held.clear, queue.SimpleQueue()))
        self._calls.put(None)


class RpcChannel(Channel):
    """A session with a `dwtir.tune.server`, whose calls run in a lane.

    The lane frees what is held: the session, and its function that answers. No answer may take
    longer than `longest` seconds.
    """

    def __init__(self, lane: Lane, held: list[Any], longest: float) -> None:
        self._lane, self._held, self._longest = lane, held, longest

    def call(self, message: Message, seconds: float) -> Answer:
        allowed = min(seconds, self._longest)
        answer: Answer = self._lane.do(lambda: self._answer(message, allowed), allowed)
        return answer

    def _answer(self, message: Message, seconds: float) -> Any:
        return json.loads(self._held[1](json.dumps({**message, "seconds": seconds})))

    def close(self) -> None:
        self._lane.end(self._held)


def answer_lines(handle: Callable[[Message], Answer]) -> None:
    """Be the process at the other end of a `PipeChannel`, until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=answers, flush=True)
