"""``python -m dwtir.db``: look at tuning records, verify them, and exchange them with TVM."""

import json
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import database
from .errors import DwtirError, RecordError
from .records import Record
from .tables import aligned, number
from .target import resolve


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 1 where a record is bad or something failed."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (DwtirError, OSError) as error:
        print(f"dwtir.db: {error}", file=sys.stderr)
        return 1


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m dwtir.db", description="Look after the tuning records of dwtir.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    common = ArgumentParser(add_help=False)
    usage = "the database; by default all that are looked in: $DWTIR_TUNE_DB, the user's, and the shipped one"
    common.add_argument("--db", type=Path, metavar="DIR", help=usage)

    def add(name: str, run: Callable[[Namespace], int], text: str) -> Callable[..., Action]:
        command = commands.add_parser(name, parents=[common], help=text)
        command.set_defaults(run=run)
        return command.add_argument

    option = add("list", _list, "list the records")
    option("--json", action="store_true", help="as one JSON array")

    option = add("show", _show, "show the records of a shape")
    option("record", help="a file, or the text of a shape")
    option("--trace", action="store_true", help="with the whole trace, as JSON")

    add("verify", _verify, "build every record, and run those of a present device")

    option = add("export", _export, "write records as a MetaSchedule JSONDatabase")
    option("folder", type=Path, help="where its two files go; they must not be there")
    option("--device", help="only the records of this device")

    option = add("import", _import, "take records from a MetaSchedule JSONDatabase")
    option("folder", type=Path, help="where its two files are")
    option("--target", help="the device they are of; by default the present one")
    option("--force", action="store_true", help="replace better records too")

    option = add("prune", _prune, "remove files that are no records")
    option("--yes", action="store_true", help="remove; otherwise only say what")
    return parser


def _folders(options: Namespace) -> list[Path]:
    folder: Path | None = options.db
    if folder is None:
        return list(database.folders())
    if not folder.is_dir():
        raise RecordError(f"--db must be a folder, got {folder}")
    return [folder]


def _read_all(options: Namespace) -> Iterator[tuple[Path, Record | RecordError]]:
    for folder in _folders(options):
        for path in database.record_paths(folder):
            try:
                yield path, Record.read(path)
            except RecordError as error:
                yield path, error


def _good(options: Namespace) -> Iterator[tuple[Path, Record]]:
    for path, record in _read_all(options):
        if isinstance(record, Record):
            yield path, record
        else:
            print(f"not used: {record}", file=sys.stderr)


def _list(options: Namespace) -> int:
    found = list(_good(options))
    if options.json:
        rows = [record.as_json() | {"path": str(path)} for path, record in found]
        for row in rows:
            del row["trace"]
        print(json.dumps(rows, indent=2))
        return 0
    table: list[tuple[str, ...]] = [("device", "shape", "epilogue", "strategy", "best us", "manual us", "gain", "path")]
    for path, record in found:
        what = record.device, str(record.shape), str(record.epilogue), record.strategy.name
        times = (number(seconds, scale=1e6) for seconds in (record.median_secs, record.manual_median_secs))
        table.append((*what, *times, number(record.gain, "x"), str(path)))
    print("\n".join(aligned(table)))
    return 0


def _show(options: Namespace) -> int:
    file = Path(options.record)
    if file.is_file():
        found = [(file, Record.read(file.resolve()))]
    else:
        from .shape import Shape

        shape = Shape.parse(options.record)
        found = [(path, record) for path, record in _good(options) if record.shape == shape]
        if not found:
            raise RecordError(f"no record of {shape} in {', '.join(map(str, _folders(options)))}")
    for path, record in found:
        values = record.as_json()
        try:
            instructions, decisions = values["trace"]
            summary = f"{len(instructions)} instructions, decisions {decisions}"
        except (TypeError, ValueError):  # other versions may have any
            summary = "unknown"
        values["trace"] = json.dumps(record.trace) if options.trace else summary
        values["gain"] = number(record.gain, digits=3)
        print(path)
        for name, value in values.items():
            if isinstance(value, dict):
                value = ", ".join(f"{key}={entry}" for key, entry in value.items())
            print(f"  {name:<20}{value}")
    return 0


def _verify(options: Namespace) -> int:
    from .verify import verify_record

    good = bad = 0
    for path, record in _read_all(options):
        try:
            if isinstance(record, RecordError):
                raise record
            print(f"good: {path}: {verify_record(record)}", flush=True)
            good += 1
        except DwtirError as error:
            bad += 1
            reason = str(error) if str(path) in str(error) else f"{path}: {error}"
            print(f"BAD:  {reason}", flush=True)
    print(f"{good} good, {bad} bad")
    return 1 if bad else 0


def _export(options: Namespace) -> int:
    from .exchange import export_records

    wanted: dict[str, Record] = {}
    for path, record in _good(options):
        if options.device in (None, record.device):
            wanted.setdefault(f"{path.parent.name}/{path.name}", record)
    export_records(wanted.values(), options.folder)
    print(f"{len(wanted)} records written to {options.folder}")
    return 0


def _import(options: Namespace) -> int:
    from .exchange import import_records

    into = options.db or next(database.folders())
    records, problems = import_records(options.folder, resolve(options.target))
    written = sum(record.write(into, force=options.force) for record in records)
    for problem in problems:
        print(f"not imported: {problem}", file=sys.stderr)
    print(f"{written} records written to {into}, {len(records) - written} not better, {len(problems)} refused")
    return 1 if problems else 0


def _prune(options: Namespace) -> int:
    invalid = [record for record in _read_all(options) if isinstance(record[1], RecordError)]
    for path, error in invalid:
        print(f"{'removed' if options.yes else 'would be removed'}: {error}")
        if options.yes:
            path.unlink(missing_ok=True)
    if invalid and not options.yes:
        print(f"{len(invalid)} files; run again with --yes to remove them")
        return 1
    if not invalid:
        print("nothing to remove")
    return 0


if __name__ == "__main__":
    sys.exit(main())
