"""Devices behind TVM's RPC: servers of a tracker, and a server for each GPU that is here.

Every wait has a deadline: calls run in threads that are left behind with a
server that does not answer.
"""

import contextlib
import functools
import math
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import target_json
from ..errors import DeviceError, DwtirError, InvalidTargetError, ToolchainError
from ..target import Target, TargetLike, resolve
from ..traces import brief
from .channels import Channel, Lane, RpcChannel
from .devices import Device
from .fleet import Fleet
from .run import WINDOW, builder_threads, require_clock
from .server import CALL, WARNING, end_with_parent, parse_address, require_loopback
from .stock import StockChannel

_START_SECONDS = 120.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class _Tracker:
    """A tracker and how its servers are used; see `tracker_fleet`."""

    address: tuple[str, int]
    allow_remote: bool
    target: TargetLike
    wait: float = 20.0
    longest: float = math.inf

    def ask(self, operation: str, *details: Any) -> Any:
        from tvm.rpc import base

        where = f"the tracker at {self.address[0]}:{self.address[1]}"
        try:
            with socket.create_connection(self.address, timeout=self.wait) as connection:
                connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                (magic,) = struct.unpack("<i", base.recvall(connection, 4))
                if magic != base.RPC_TRACKER_MAGIC:
                    raise DeviceError(f"{where} is something else")
                base.sendjson(connection, (getattr(base.TrackerCode, operation), *details))
                return base.recvjson(connection)[1]
        except TimeoutError:
            missing = f"no free server of key {details[0]!r}" if details else "no answer"
            raise DeviceError(f"{where}: {missing} in {self.wait:g} s") from None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DeviceError(f"{where}: {error}") from error

    def keys(self) -> list[str]:
        answer = self.ask("SUMMARY")
        try:
            return sorted(str(server["key"]).removeprefix("server:") for server in answer["server_info"])
        except (LookupError, TypeError):
            raise DeviceError(f"the tracker answered {brief(answer)}") from None

    def connect(self, key: str) -> RpcChannel:
        try:
            host, port, matchkey = self.ask("REQUEST", key, "", 1)
        except (TypeError, ValueError):
            raise DeviceError("the tracker named no server") from None
        require_loopback("a server's address", host, self.allow_remote)
        lane = Lane()
        held: list[Any] = []
        try:
            held = lane.do(lambda: _open_session(host, port, matchkey), self.wait)
            if held[1] is None:
                return StockChannel(lane, held, self.longest, self.target)
            return RpcChannel(lane, held, self.longest)
        except DwtirError:
            lane.end(held)
            raise


def _open_session(host: str, port: int, matchkey: str) -> list[Any]:
    from tvm import rpc

    session = rpc.connect(host, port, matchkey)
    try:
        return [session, session.get_function(CALL)]
    except AttributeError:  # it is TVM's own server
        return [session, None]


def tracker_fleet(
    address: str,
    key: str,
    target: TargetLike = None,
    *,
    allow_remote: bool = False,
    note: Callable[[str], object] = lambda text: None,
    wait: float = 20.0,
    longest: float = math.inf,
) -> tuple[Target, Fleet]:
    """Make a fleet of all servers that a tracker has for a key.

    Parameters
    ----------
    target : str, Target or None
        Which device they should have, which TVM's own servers cannot say; by default what the first one has.
    note : callable
        Told of sessions that died, and of what it means to allow remote ones.
    wait : float
        Seconds to wait for a tracker, or for a free server.
    longest : float
        Seconds that an answer may take, besides the limits of `Device`.

    Returns
    -------
    (Target, Fleet)
        The device of the servers, and a fleet with a session for each.
    """
    where = parse_address(address, allow_remote)
    if allow_remote:
        note(f"warning: {WARNING}")
    tracker = _Tracker(where, allow_remote, target, wait, longest)
    keys = tracker.keys()
    if key not in keys:
        known = ", ".join(sorted(set(keys))) or "none"
        raise DeviceError(f"the tracker at {address} has no server of key {key!r}; it has {known}")
    return _fleet(tracker, [(f"{key} {number}", key) for number in range(keys.count(key))], target, note)


@contextlib.contextmanager
def gpus_fleet(
    gpus: Sequence[str],
    target: TargetLike = None,
    note: Callable[[str], object] = lambda text: None,
    *,
    kind: str = "cuda",
) -> Iterator[tuple[Target, Fleet]]:
    """Start a tracker and a server for each GPU of this machine, and end them with the context.

    GPUs are as ``CUDA_VISIBLE_DEVICES`` has them; with kind ``"cpu"`` they are names of servers of the
    CPU. The other parameters are as for `tracker_fleet`.
    """
    if not gpus or len(set(gpus)) < len(gpus) or not all(gpus):
        raise InvalidTargetError(f"GPUs are named once each, such as 0,1, got {','.join(gpus)!r}")
    with local_servers(gpus, kind) as (tracker, keys):
        places = [("gpu " * (kind == "cuda") + gpu, key) for gpu, key in keys.items()]
        device, fleet = _fleet(tracker, places, target or kind, note)
        with contextlib.closing(fleet):
            yield device, fleet


def _fleet(
    tracker: _Tracker, places: Sequence[tuple[str, str]], target: TargetLike, note: Callable[[str], object]
) -> tuple[Target, Fleet]:
    """Make a device for each name and key; the first is asked what it is."""
    with contextlib.closing(tracker.connect(places[0][1])) as channel:
        device = channel.target if isinstance(channel, StockChannel) else _target_there(channel, target, tracker.wait)
    require_clock(device)
    settled = replace(tracker, target=device)
    threads = builder_threads(len(places))
    devices = [Device(name, functools.partial(settled.connect, key), threads, note) for name, key in places]
    return device, Fleet(devices, window=WINDOW * len(devices))


def _target_there(channel: Channel, target: TargetLike, seconds: float) -> Target:
    wanted = None if target in (None, "cpu", "cuda") else resolve(target)
    answer = channel.call({"op": "device", "kind": target if wanted is None else wanted.kind}, seconds)
    if not isinstance(answer, dict) or not isinstance(about := answer.get("target"), dict):
        said = answer["error"] if isinstance(answer, dict) and "error" in answer else brief(answer)
        raise DeviceError(f"the server has no such device: {said}")
    found = target_json.read(target_json.text("device", about.pop("name", None)), about)
    if wanted is not None and wanted.name != found.name:
        raise InvalidTargetError(f"tuning needs {wanted.name}, and the server has {found.name}")
    return found


@contextlib.contextmanager
def local_servers(names: Sequence[str], kind: str) -> Iterator[tuple[_Tracker, dict[str, str]]]:
    """Start a tracker on loopback and some servers, and end them with the context.

    Of the kind ``"cuda"``, the names are GPUs as ``CUDA_VISIBLE_DEVICES`` has them. It yields the
    tracker, and a secret key for each name.
    """
    secret = secrets.token_hex(16)
    keys = {name: f"{secret}-{name}" for name in names}
    servers: dict[str, subprocess.Popen[bytes]] = {}
    with _local_tracker() as port, tempfile.TemporaryDirectory() as logs:
        try:
            for name, key in keys.items():
                command = [sys.executable, "-m", "dwtir.tune.server", "--key", key]
                command += ["--tracker", f"127.0.0.1:{port}", "--with-parent"]
                command += ["--gpu", name] if kind == "cuda" else []
                with Path(logs, key).open("wb") as log:
                    servers[key] = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
            tracker = _Tracker(("127.0.0.1", port), False, kind)
            _await(tracker, servers, Path(logs))
            yield tracker, keys
        finally:
            _end_servers(servers.values())


@contextlib.contextmanager
def _local_tracker() -> Iterator[int]:
    try:
        from tvm.rpc.tracker import Tracker
    except ImportError as error:
        raise ToolchainError(f"{error}; pip install dwtir[tune]") from error
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # The tracker inherits the mask: Ctrl-C is for us, who then end it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        tracker = Tracker("127.0.0.1", port, port + 1, silent=True)
        tracker.proc.send(end_with_parent, [int(signal.SIGKILL)])
        tracker.proc.recv()
    except (OSError, ValueError) as error:
        raise DeviceError(f"the tracker did not start: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield tracker.port
    finally:
        tracker.terminate()


def _await(tracker: _Tracker, servers: Mapping[str, subprocess.Popen[bytes]], logs: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while missing := servers.keys() - tracker.keys():
        for key in missing:
            code, late = servers[key].poll(), time.monotonic() > deadline
            if code is not None or late:
                words = "\n".join((logs / key).read_text(errors="replace").splitlines()[-10:])
                how = f"ended with status {code}" if code is not None else "did not start in time"
                raise DeviceError(f"the server of {key.partition('-')[2]} {how}:\n{words}")
        time.sleep(_POLL_SECONDS)


def _end_servers(servers: Collection[subprocess.Popen[bytes]]) -> None:
    for server in servers:
        server.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for server in servers:
        try:
            server.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
