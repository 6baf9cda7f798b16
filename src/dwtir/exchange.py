"""Tuning records in the two files of a MetaSchedule `JSONDatabase`.

Reading them is ours: TVM's reader crashes on files that are damaged, and
believes what they say. Only the shape's text is taken from a workload, and
from a record the trace, which has to be one of our strategies'.
"""

import base64
import binascii
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from . import compute, files, traces
from .errors import DwtirError, RecordError
from .records import Record
from .target import Target
from .tvm_database import Workload, as_tuning_record, parse_workload, unscheduled

_WORKLOADS, _RECORDS = "database_workload.json", "database_tuning_record.json"
_MAX_BYTES = 256 << 20
_MAX_LINE = 4 << 20


def export_records(records: Iterable[Record], folder: Path) -> None:
    """Write records for MetaSchedule, to files that are not there yet."""
    from tvm.s_tir import meta_schedule as ms

    for name in (_WORKLOADS, _RECORDS):
        if (folder / name).exists():
            raise RecordError(f"{folder / name} is there already; export to another folder")
    folder.mkdir(parents=True, exist_ok=True)
    into = ms.database.JSONDatabase(str(folder / _WORKLOADS), str(folder / _RECORDS))
    for record in records:
        work = into.commit_workload(unscheduled(Workload(record.shape, record.epilogue)))
        into.commit_tuning_record(as_tuning_record(record, work))


def import_records(folder: Path, target: Target) -> tuple[list[Record], list[str]]:
    """Read what `export_records` or MetaSchedule wrote for our functions.

    Parameters
    ----------
    target : Target
        The device, which MetaSchedule's files do not name.

    Returns
    -------
    (list of Record, list of str)
        For each workload the best record, and what is wrong with the lines that are not used.
    """
    problems: list[str] = []
    workloads: list[Workload | None] = []
    for number, line in enumerate(_lines(folder / _WORKLOADS), 1):
        try:
            workloads.append(_workload(files.parse_json(line, depth=16)))
        except DwtirError as error:
            workloads.append(None)
            problems.append(f"{folder / _WORKLOADS}, line {number}: {error}")
    best: dict[Workload, Record] = {}
    counts: dict[Workload, int] = {}
    for number, line in enumerate(_lines(folder / _RECORDS), 1):
        try:
            work, trace, times = _tuning_record(files.parse_json(line, depth=16), workloads, target)
            counts[work] = counts.get(work, 0) + 1
            strategy = traces.recognise(trace, work.shape, target, work.epilogue)
            record = Record.measured(strategy, work.shape, target, times, epilogue=work.epilogue, trials=counts[work])
            if work not in best or record.median_secs < best[work].median_secs:
                best[work] = record
        except DwtirError as error:
            problems.append(f"{folder / _RECORDS}, line {number}: {error}")
    return list(best.values()), problems


def _lines(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise RecordError(f"{path}: larger than {_MAX_BYTES} bytes")
    lines = data.split(b"\n")
    return lines[:-1] if not lines[-1] else lines


def _workload(value: object) -> Workload:
    """Find the attributes of our function in a workload, ``[hash, base64 of its graph]``."""
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value)):
        raise RecordError(f"a workload must be [hash, module], got {traces.brief(value)}")
    if len(value[1]) > _MAX_LINE:
        raise RecordError(f"a workload may have {_MAX_LINE} characters, got {len(value[1])}")
    try:
        # Eight bytes of length come before the text.
        graph: Any = files.parse_json(base64.b64decode(value[1], validate=True)[8:], depth=16)
        nodes = graph["nodes"]
        texts = [n["data"] if n.get("type") == "ffi.String" else None for n in nodes]
        attributes = {}
        for node in nodes:
            if node.get("type") == "ffi.Map":
                entries = node["data"]
                for key, entry in zip(entries[::2], entries[1::2], strict=True):
                    if texts[key] in (compute.SHAPE_ATTR, compute.EPILOGUE_ATTR):
                        attributes[texts[key]] = texts[entry]
        shape, steps = attributes[compute.SHAPE_ATTR], attributes[compute.EPILOGUE_ATTR]
    except (binascii.Error, LookupError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"a workload must be a function of dwtir, got another: {error}") from error
    if not isinstance(shape, str) or not isinstance(steps, str):
        raise RecordError(f"a workload must be a function of dwtir, got {traces.brief(shape)}")
    return parse_workload(shape, steps)


def _tuning_record(
    value: object, workloads: list[Workload | None], target: Target
) -> tuple[Workload, traces.TraceJson, list[float]]:
    """Take a line apart: ``[workload, [trace, run_secs, target, args_info]]``."""
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], list) and len(value[1]) == 4):
        raise RecordError(
            f"a tuning record must be [workload, [trace, run_secs, target, arguments]], got {traces.brief(value)}"
        )
    index, (trace, times, device, _) = value
    if type(index) is not int or not 0 <= index < len(workloads):
        raise RecordError(f"the workload must be 0 to {len(workloads) - 1}, got {traces.brief(index)}")
    work = workloads[index]
    if work is None:
        raise RecordError(f"its workload, {index}, is not used")
    own = {"kind": "llvm" if target.kind == "cpu" else target.kind}
    own["mcpu" if target.kind == "cpu" else "arch"] = target.arch
    if not isinstance(device, dict) or any(device.get(key) != own[key] for key in own):
        raise RecordError(f"the target must have {own}, got {traces.brief(device)}")
    if (
        not isinstance(times, list)
        or not times
        or not all(type(seconds) in (int, float) and 0 < seconds < 1e6 for seconds in times)
    ):
        raise RecordError(f"run_secs must be a list of seconds, got {traces.brief(times)}")
    return work, traces.without_postprocs(trace), times
