"""Sessions of TVM's RPC as channels to a worker; no call waits longer than it may."""

import json
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import DeviceError
from .channels import Channel


class Lane:
    """A thread for calls that may never return."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]] | None]
        self._calls = queue.SimpleQueue()
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

    def call(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        allowed = min(seconds, self._longest)
        answer: dict[str, Any] = self._lane.do(lambda: self._answer(message, allowed), allowed)
        return answer

    def _answer(self, message: Mapping[str, Any], seconds: float) -> Any:
        return json.loads(self._held[1](json.dumps({**message, "seconds": seconds})))

    def close(self) -> None:
        self._lane.end(self._held)
