"""The command ``python -m dwtir.tune.server``: lends this machine's device to tuning sessions.

TVM's RPC server takes the connections. Each session is a process of its own in
which ``dwtir.tune.call`` passes messages on to a `dwtir.tune.worker`.
"""

import argparse
import ctypes
import errno
import ipaddress
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import DeviceError, DwtirError, InvalidTargetError
from .channels import PipeChannel

CALL = "dwtir.tune.call"
"""The function of a session that answers messages: a JSON object for a JSON object."""

WARNING = (
    "TVM's RPC assumes that users are trusted, and needs a trusted network environment and "
    "encrypted channels: it allows writing arbitrary files and gives full remote code execution "
    "to anyone who can access it"
)

_RESTART_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1


def parse_address(text: str, allow_remote: bool) -> tuple[str, int]:
    """Read a tracker's ``HOST:PORT``."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 1 << 16:
        raise InvalidTargetError(f"an address is HOST:PORT with a port from 1 to 65535, got {text!r}")
    require_loopback("the tracker's address", host, allow_remote)
    return host, int(port)


def _is_loopback(host: str) -> bool:
    """Tell whether only this machine can be there; a name other than localhost may be anywhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_loopback(what: str, host: str, allow_remote: bool) -> None:
    """Refuse an address that others can reach, unless that is allowed."""
    if not allow_remote and not _is_loopback(host):
        raise InvalidTargetError(
            f"{what} must be loopback, such as 127.0.0.1, unless --allow-remote is given, got {host!r}. {WARNING}"
        )


def main(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; return the exit status."""
    options = _parser().parse_args(arguments)
    if options.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = options.gpu
    try:
        tracker = parse_address(options.tracker, options.allow_remote)
        require_loopback("--host", options.host, options.allow_remote)
        if not (_is_loopback(tracker[0]) and _is_loopback(options.host)):
            print(f"warning: {WARNING}", file=sys.stderr, flush=True)
        _serve(options, tracker)
    except DwtirError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dwtir.tune.server",
        description="Lend this machine's device, its first GPU or its CPU, to sessions of "
        "python -m dwtir.tune --tracker HOST:PORT --key KEY.",
    )
    add = parser.add_argument
    add("--tracker", required=True, metavar="HOST:PORT")
    add("--key", required=True, help="the kind of device, for the tracker")
    add("--host", default="127.0.0.1", help="where to listen (default %(default)s)")
    add("--port", type=int, default=9090, help="the first to try")
    add("--port-end", type=int, default=9199, help="after the last to try")
    add("--custom-addr", metavar="ADDR", help="what the tracker tells clients")
    add("--gpu", metavar="N", help="serve this GPU, as CUDA_VISIBLE_DEVICES has it")
    add("--allow-remote", action="store_true", help="also listen, or go to a tracker, elsewhere")
    add("--with-parent", action="store_true", help="end with the parent process")
    return parser


def _serve(options: argparse.Namespace, tracker: tuple[str, int]) -> NoReturn:
    """Listen, and anew whenever a session's death ends TVM's listening thread."""
    try:
        socket.getaddrinfo(*tracker)
    except OSError as error:
        raise DeviceError(f"no such tracker: {tracker[0]}: {error}") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.with_parent:
        end_with_parent(signal.SIGTERM)
    # A thread's error is one line here: a session died, or the tracker is gone.
    threading.excepthook = lambda args: print(args.exc_value, file=sys.stderr, flush=True)
    multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=_become_session)
    _register()
    home = os.getcwd()
    try:
        while True:
            state = _listen(options, tracker)
            state.thread.join()
            state.sock.close()
            os.chdir(home)  # TVM leaves it in the session's folder
            time.sleep(_RESTART_SECONDS)
    except KeyboardInterrupt:
        _end()


def _listen(options: argparse.Namespace, tracker: tuple[str, int]) -> Any:
    from tvm.rpc.server import PopenRPCServerState

    while True:
        try:
            where = options.host, options.port, options.port_end
            return PopenRPCServerState(*where, tracker_addr=tracker, key=options.key, custom_addr=options.custom_addr)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # else another server was faster, so the next port
                raise DeviceError(f"cannot listen at {options.host}: {error}") from error
        except ValueError as error:
            raise DeviceError(f"{error} of {options.host}") from error


def _register() -> None:
    """Give TVM the function that answers, in the session's process, by a worker.

    That is a new process: in a fork of ours CUDA would not start.
    """
    import tvm_ffi

    workers: list[PipeChannel] = []

    def call(text: str) -> str:
        message = json.loads(text)
        if not workers:
            workers.append(PipeChannel())
        try:
            return json.dumps(workers[0].call(message, message["seconds"]))
        except DeviceError:
            workers.pop().close()
            raise

    tvm_ffi.register_global_func(CALL, call)


def _become_session() -> None:
    """End with the server, and by the signals that end it."""
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_parent(number: int) -> None:
    """Let Linux send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _end() -> NoReturn:
    """End the process in spite of TVM's listening thread."""
    from tvm.support.utils import TempDirectory

    for child in multiprocessing.active_children():
        child.kill()
    TempDirectory.remove_tempdirs()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
