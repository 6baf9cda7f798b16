"""The command ``python -m dwtir.bench``."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ArgumentError, DwtirError
from ..shape import OPERATIONS
from ..target import resolve
from ..tune.tasks import Forms
from . import layers, readme
from .plots import check_path, plot
from .report import markdown, text
from .results import Results, write_csv
from .rounds import add_measuring
from .session import Session, Settings

_EPILOG = """\
report FILE.json ...   prints, plots and converts results of earlier runs (report --help)
readme [README.md]     writes README's block, and the picture of the GPU with the most rows,
                       of bench/results/bench-*.json.xz beside it
network NAME ... --end-to-end
                       whole networks of timm or torchvision, and their training (with --help)

examples:
  python -m dwtir.bench 64x256x56x56_k3_psame 128x96x56x56_k7_p3_nhwc
  python -m dwtir.bench network mobilenet_v2 --layout NCHW NHWC --json rows.json --plot plots
  python -m dwtir.bench suite --layout NHWC --operation grad_data grad_weight
  python -m dwtir.bench network mobilenet_v2 --end-to-end --layout NCHW NHWC
  python -m dwtir.bench seeds
"""


def main(arguments: Sequence[str]) -> int:
    """Measure the layers that are named, or report; return the exit status."""
    try:
        if arguments[:1] == ["report"]:
            return _report(arguments[1:])
        if arguments[:1] == ["readme"]:
            return _readme(arguments[1:])
        if "--end-to-end" in arguments:
            from . import end_to_end  # needs torch

            return end_to_end.main(arguments)
        return _measure(arguments)
    except (DwtirError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _measure(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.plot is not None:
        check_path(options.plot)
    for name, least in (("rounds", 1), ("again", 0)):
        if getattr(options, name) < least:
            raise ArgumentError(f"--{name} must be >= {least}, got {getattr(options, name)}")
    if options.resume and options.json is None:
        raise ArgumentError("--resume needs --json with the file to go on with, got none")
    forms = Forms(options.batch, options.dtype, options.layout)
    wanted = layers.named(options.what, forms, operations=options.operation, epilogue=options.epilogue)
    how = {name: getattr(options, name) for name in ("schedule", "rounds", "again", "patience")}
    settings = Settings(**how, cold=not options.warm, baselines=options.baselines == "torch")
    session = Session(resolve(options.target), settings, _command(options), options.json)
    if options.resume:
        session.resume()
    session.measure(wanted)
    results = replace(session.results(), cases=session.measure_articles() if options.what == ["seeds"] else {})
    print("\n".join(text(results)))
    if options.csv is not None:
        write_csv(results.rows, options.csv)
    if options.json is not None:
        results.write(options.json)
    if options.plot is not None:
        print("\n".join(plot(results, options.plot)), file=sys.stderr)
    return 0


def _command(options: argparse.Namespace) -> str:
    parts = ["python -m dwtir.bench", *options.what]
    for name in ("dtype", "layout", "batch"):
        parts += [f"--{name}", *map(str, getattr(options, name))]
    if options.operation != ["forward"]:
        parts += ["--operation", *options.operation]
    parts += ["--epilogue", options.epilogue] if options.epilogue else []
    parts += [f"--schedule {options.schedule} --baselines {options.baselines}"]
    parts += ["--warm"] if options.warm else []
    return " ".join([*parts, f"--rounds {options.rounds}"])


def _report(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dwtir.bench report", description="Print the results of earlier runs."
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE.json")
    add("--markdown", type=Path, metavar="FILE", help="write them as a page")
    add("--csv", type=Path, metavar="FILE", help="write all rows there")
    add("--plot", type=Path, metavar="FOLDER", help="draw them there; or a file")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        check_path(options.plot)
        if options.plot.suffix and len(options.files) > 1:
            raise ArgumentError(f"plots of {len(options.files)} results go to a folder, got {options.plot}")
    found = {path: Results.read(path) for path in options.files}
    print("\n\n".join("\n".join(text(results)) for results in found.values()))
    if options.markdown is not None:
        page = "\n\n".join("\n".join(markdown(results)) for results in found.values())
        options.markdown.write_text(f"{page}\n", encoding="utf-8")
    if options.csv is not None:
        write_csv([row for results in found.values() for row in results.rows], options.csv)
    for path, results in found.items() if options.plot is not None else ():
        print("\n".join(plot(results, options.plot, prefix=f"{path.stem}-")), file=sys.stderr)
    return 0


def _readme(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dwtir.bench readme", description="Write what is generated from bench/results/bench-*.json.xz."
    )
    parser.add_argument("readme", nargs="?", type=Path, default=Path("README.md"))
    print("\n".join(readme.rewrite(parser.parse_args(arguments).readme)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dwtir.bench",
        description="Time layers by dwtir and by PyTorch, in turns, after a check of the results.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "what",
        nargs="+",
        metavar="WHAT",
        help="shapes; suite; network NAME ..., of the suite, timm or torchvision; "
        "or seeds, the articles' rows, and on a GPU their tables beside the published ones",
    )
    add("--operation", nargs="+", choices=tuple(OPERATIONS), default=["forward"], help="of networks")
    add("--epilogue", help="fused steps, such as bias+relu")
    add("--schedule", default="manual", help="ours: manual, tuned, or a step")
    add("--baselines", choices=("torch", "none"), default="torch")
    add("--warm", action="store_true", help="data that stays in the caches")
    add_measuring(parser, "layer")
    add("--again", type=int, default=0, help="how often to repeat layers that are flagged")
    add("--csv", type=Path, metavar="FILE", help="write the rows there")
    add("--json", type=Path, metavar="FILE", help="write all there, packed as .json.xz; report makes the rest of it")
    add("--resume", action="store_true", help="keep the rows that FILE of --json has already")
    add("--plot", type=Path, metavar="FILE|FOLDER", help="draw all in a file, or each in a folder")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
