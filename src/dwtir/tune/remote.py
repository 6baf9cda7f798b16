"""Devices behind TVM's RPC: servers of a tracker, and a server for each GPU that is here.

Every wait has a deadline: calls run in threads that are left behind with a
server that does not answer.
"""

import contextlib
import functools
import math
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import DeviceError, DwtirError, InvalidTargetError
from ..target import Target, TargetLike, resolve
from .channels import Channel
from .devices import Device
from .fleet import Fleet
from .local_servers import local_servers
from .rpc import Lane, RpcChannel
from .run import WINDOW, builder_threads, require_clock
from .server import CALL, WARNING, parse_address, require_loopback
from .stock import StockChannel


@dataclass(frozen=True)
class _Tracker:
    """A tracker and how its servers are used; see `tracker_fleet`."""

    address: tuple[str, int]
    allow_remote: bool
    target: TargetLike
    wait: float
    longest: float

    def ask(self, *message: Any) -> Any:
        """Send a message of TVM's protocol and wait for the answer."""
        from tvm.rpc import base

        where = f"the tracker at {self.address[0]}:{self.address[1]}"
        try:
            with socket.create_connection(self.address, timeout=self.wait) as connection:
                connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                (magic,) = struct.unpack("<i", base.recvall(connection, 4))
                if magic != base.RPC_TRACKER_MAGIC:
                    raise DeviceError(f"{where} is something else")
                base.sendjson(connection, message)
                return base.recvjson(connection)[1]
        except TimeoutError:
            missing = f"no free server of key {message[1]!r}" if message[1:] else "no answer"
            raise DeviceError(f"{where}: {missing} in {self.wait:g} s") from None
        except (OSError, ValueError) as error:
            raise DeviceError(f"{where}: {error}") from error

    def keys(self) -> list[str]:
        """List the keys of the servers that are there, busy ones included."""
        from tvm.rpc.base import TrackerCode

        servers = self.ask(TrackerCode.SUMMARY)["server_info"]
        return sorted(str(server["key"]).removeprefix("server:") for server in servers)

    def connect(self, key: str) -> RpcChannel:
        """Open a session with the next server of a key that is free."""
        from tvm.rpc.base import TrackerCode

        host, port, matchkey = self.ask(TrackerCode.REQUEST, key, "", 1)
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
        Which device they should have; by default what the first one has. TVM's
        own servers, which cannot say what they have, need it.
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
    wait: float = 20.0,
    longest: float = math.inf,
) -> Iterator[tuple[Target, Fleet]]:
    """Start a tracker and a server for each GPU of this machine, and end them with the context.

    GPUs are as ``CUDA_VISIBLE_DEVICES`` has them; with kind ``"cpu"`` they are names of servers of the
    CPU. The other parameters are as for `tracker_fleet`.
    """
    if not gpus or len(set(gpus)) < len(gpus) or not all(gpus):
        raise InvalidTargetError(f"GPUs are named once each, such as 0,1, got {','.join(gpus)!r}")
    with local_servers(gpus, kind) as (address, keys):
        tracker = _Tracker(address, False, target or kind, wait, longest)
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
    """Ask a server for its device, which must be the one that is meant."""
    wanted = None if target in (None, "cpu", "cuda") else resolve(target)
    kind = target if wanted is None else wanted.kind
    answer = channel.call({"op": "device", "kind": kind}, seconds)
    if answer.get("cause"):
        raise DeviceError(f"the server has no such device: {answer['error']}")
    found = Target.from_json(answer["target"])
    if wanted is not None and wanted.name != found.name:
        raise InvalidTargetError(f"tuning needs {wanted.name}, and the server has {found.name}")
    return found
