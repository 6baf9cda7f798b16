"""A tracker on loopback and a server for each of some devices of this machine."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import DeviceError, ToolchainError
from .server import end_with_parent

_START_SECONDS = 120.0
_END_SECONDS = 5.0
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def local_servers(names: Sequence[str], kind: str) -> Iterator[tuple[tuple[str, int], dict[str, str]]]:
    """Start a tracker on loopback and some servers, and end them with the context.

    Of the kind ``"cuda"``, the names are GPUs as ``CUDA_VISIBLE_DEVICES`` has them. It yields the
    tracker's address, and a secret key for each name.
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
            _await(port, servers, Path(logs))
            yield ("127.0.0.1", port), keys
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


def _await(port: int, servers: Mapping[str, subprocess.Popen[bytes]], logs: Path) -> None:
    """Wait until the tracker has all servers."""
    from tvm.rpc import connect_tracker

    deadline = time.monotonic() + _START_SECONDS
    with contextlib.closing(connect_tracker("127.0.0.1", port)) as tracker:
        while True:
            there = {str(info["key"]) for info in tracker.summary()["server_info"]}
            missing = [key for key in servers if f"server:{key}" not in there]
            if not missing:
                return
            for key in missing:
                name = key.partition("-")[2]
                code, late = servers[key].poll(), time.monotonic() > deadline
                if code is not None or late:
                    words = "\n".join((logs / key).read_text(errors="replace").splitlines()[-10:])
                    how = f"ended with status {code}" if code is not None else "did not start in time"
                    raise DeviceError(f"the server of {name} {how}:\n{words}")
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
