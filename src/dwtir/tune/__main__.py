"""The command ``python -m dwtir.tune``."""

import argparse
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .. import database
from ..errors import DwtirError, InvalidScheduleError, InvalidTargetError
from ..notation import DTYPES, LAYOUTS, OPERATIONS
from ..target import Target
from . import tasks as layers
from .display import open_display
from .fleet import Fleet
from .outcome import Task
from .plot import plot, require_matplotlib
from .remote import gpus_fleet, tracker_fleet
from .run import local_fleet, present_target, tune_all
from .search import SEARCHES
from .session import Settings

_EPILOG = """\
Each layer begins with the manual schedule. Trials of earlier sessions count, and are not
repeated. Ctrl-C ends the session and keeps what was measured.

examples:
  python -m dwtir.tune 1x256x96x96_k3_psame 32x96x56x56_k7_psame_float16_nhwc
  python -m dwtir.tune --network mobilenet_v2 --batch 1,32 --dtype float16 --layout NHWC
  python -m dwtir.tune --suite seeds --trials 64 --plot best.png
"""


def main(arguments: Sequence[str]) -> int:
    """Tune the layers that are named; return the exit status."""
    options = _parser().parse_args(arguments)
    stop = threading.Event()
    try:
        if options.plot is not None:
            require_matplotlib()
        tasks = _tasks(options)
        how = {name: getattr(options, name) for name in ("search", "trials", "budget", "patience", "seed")}
        settings = Settings(**how, resume=not options.force)
        with _stopped_by_signals(stop), _logged(options.log) as log, open_display(json=options.json) as display:
            with _devices(options, display.note) as (target, fleet):
                outcomes, failed = tune_all(
                    tasks, target, fleet, settings, folder=options.db, display=display, stop=stop
                )
            extra = {"log": str(options.log)} if log.stream is not None else {}
            if options.plot is not None and outcomes:
                plot(outcomes, options.plot)
                extra["plot"] = str(options.plot)
            display.close(outcomes, extra)
    except (DwtirError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if stop.is_set():
        return 130
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dwtir.tune",
        description="Search for the fastest schedule of layers, and record it for dwtir.build(..., schedule='tuned').",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("layers").add_argument
    add("shapes", nargs="*", metavar="SHAPE", help="such as 1x256x96x96_k3_psame")
    add("--suite", choices=("seeds", "all"), help="the articles' rows, or all")
    add("--network", action="append", default=[], metavar="NAME")
    add("--file", action="append", default=[], type=Path, metavar="LAYERS.JSON")
    add("--epilogue", help="fused steps, such as bias+relu")
    for name, kind, allowed, default in (
        ("batch", int, None, "1"),
        ("dtype", str, tuple(DTYPES), "float32"),
        ("layout", str.upper, LAYOUTS, "NCHW"),
        ("operation", str, tuple(OPERATIONS), "forward"),
    ):
        usage = f"of networks and the suite (default {default})"
        add(f"--{name}", type=_list_of(kind, allowed), default=default, metavar="A,B", help=usage)
    add = parser.add_argument_group("search").add_argument
    add("--search", choices=SEARCHES, default="evolutionary")
    add("--trials", type=int, default=128, help="for each layer (default 128)")
    add("--budget", type=float, metavar="SECONDS", help="for each layer")
    add("--patience", type=int, metavar="TRIALS", help="without a better one")
    add("--seed", type=int, default=0)
    add("--resume", action="store_true", default=True, help="count earlier trials (the default)")
    add("--force", action="store_true", help="forget earlier trials and replace the record")
    add = parser.add_argument_group("device").add_argument
    add("--target", help="cuda or cpu; the GPU if there is one")
    add("--gpus", metavar="0,1", help="spread candidates over these GPUs")
    add("--tracker", metavar="HOST:PORT", help="or over a TVM tracker's servers")
    add("--key", help="of the servers at the tracker")
    add("--allow-remote", action="store_true", help="let the tracker and servers be elsewhere")
    add = parser.add_argument_group("output").add_argument
    add("--db", type=Path, help="folder for the records (default $DWTIR_TUNE_DB or the user's own)")
    add("--json", action="store_true", help="JSON lines on standard output")
    add("--plot", type=Path, metavar="PNG", help="best so far against trials")
    log = database.user_folder().parent / "tune.log"
    add("--log", type=Path, default=log, help="where failures are written in full (default %(default)s)")
    return parser


def _list_of(kind: Callable[[str], object], allowed: Sequence[object] | None) -> Callable[[str], list[object]]:
    def read(text: str) -> list[object]:
        values = [kind(part.strip()) for part in text.split(",")]
        for value in values:
            if allowed is not None and value not in allowed:
                raise argparse.ArgumentTypeError(f"must be among {', '.join(map(str, allowed))}, got {value}")
        return values

    return read


def _tasks(options: argparse.Namespace) -> list[Task]:
    forms = layers.Forms(options.batch, options.dtype, options.layout)
    found = layers.from_shapes(options.shapes, options.epilogue)
    networks = layers.from_suite(options.suite, forms, options.epilogue) if options.suite else []
    for name in options.network:
        networks += layers.by_use(layers.from_network(name, forms, options.epilogue))
    found += layers.for_operations(networks, options.operation)
    for path in options.file:
        found += layers.from_file(path, options.epilogue)
    if not found:
        raise InvalidScheduleError("nothing to tune; name layers by SHAPE, --suite, --network or --file")
    return list({str(task): task for task in found}.values())


@contextlib.contextmanager
def _devices(options: argparse.Namespace, note: Callable[[str], object]) -> Iterator[tuple[Target, Fleet]]:
    if (options.tracker is None) != (options.key is None):
        raise InvalidTargetError("--tracker and --key go together, got one of them")
    if options.gpus is not None and options.tracker is not None:
        raise InvalidTargetError("--gpus starts a tracker of its own, got --tracker as well")
    if options.gpus is not None and options.target == "cpu":
        raise InvalidTargetError("--gpus are no CPU, got --target cpu as well")
    if options.gpus is not None:
        with gpus_fleet(options.gpus.split(","), options.target, note) as found:
            yield found
        return
    if options.tracker is not None:
        address, remote = options.tracker, options.allow_remote
        found = tracker_fleet(address, options.key, options.target, allow_remote=remote, note=note)
    else:
        target = present_target(options.target)
        found = target, local_fleet(target, note)
    with contextlib.closing(found[1]):
        yield found


@contextlib.contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """End the session at the first Ctrl-C or SIGTERM, at once at the second."""

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _logged(path: Path) -> Iterator[logging.FileHandler]:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("dwtir.tune")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        handler.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
