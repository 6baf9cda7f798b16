"""`TuneDB`: the tuning records as a MetaSchedule database."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import tvm
import tvm_ffi
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.tirx import PrimFunc

from . import compute, database, traces
from .epilogue import Epilogue
from .errors import DwtirError
from .records import Record
from .shape import Shape
from .target import TargetLike, resolve

_Module: TypeAlias = tvm.IRModule
_FAILED_SECS = 1e6
"""What MetaSchedule records for candidates that failed is far above this."""


class Workload(NamedTuple):
    """What one of our functions computes."""

    shape: Shape
    epilogue: Epilogue


def unscheduled(work: Workload) -> _Module:
    """Make the module that MetaSchedule sees as the workload."""
    return tvm.IRModule({"main": compute.depthwise_conv2d(*work)})


def parse_workload(shape: str, epilogue: str) -> Workload:
    """Read the attributes of one of our functions."""
    return Workload(Shape.parse(shape), Epilogue.of(None if epilogue == "none" else epilogue))


def recognise(mod: _Module) -> Workload | None:
    """Tell what a module computes, if it is one of `compute.depthwise_conv2d` and unscheduled."""
    if len(mod.functions) != 1 or "main" not in [str(v.name_hint) for v in mod.get_global_vars()]:
        return None
    func = mod["main"]
    attributes = func.attrs if isinstance(func, PrimFunc) else None
    if not attributes or not {compute.SHAPE_ATTR, compute.EPILOGUE_ATTR} <= set(attributes.keys()):
        return None
    try:
        work = parse_workload(str(attributes[compute.SHAPE_ATTR]), str(attributes[compute.EPILOGUE_ATTR]))
    except DwtirError:
        return None
    return work if tvm_ffi.structural_equal(unscheduled(work), mod) else None


def as_tuning_record(record: Record, workload: ms.database.Workload | None = None) -> ms.database.TuningRecord:
    """Rebuild MetaSchedule's record, with a trace that our strategy makes now."""
    own = Workload(record.shape, record.epilogue)
    if workload is None:
        workload = ms.database.Workload(unscheduled(own))
    sch, _ = traces.space_trace(record.strategy, own.shape, record.target, own.epilogue)
    info = ms.arg_info.ArgInfo.from_entry_func(workload.mod, False)
    return ms.database.TuningRecord(sch.trace, workload, list(record.run_secs), record.target.tvm(), info)


@derived_object
class TuneDB(ms.database.PyDatabase):
    """Our tuning records of one device, as MetaSchedule's `Database`.

    It knows the functions of `compute.depthwise_conv2d` and no others, and gives out schedules that our strategies make
    of the recorded parameters. A function with an epilogue takes its shape's record without one, where it has none of
    its own. A query for another kind of device is a miss.

    Parameters
    ----------
    folders : path or iterable of paths, optional
        The databases to look in, in order; by default `database.folders`. What is committed goes into the first.
    target : Target, str, mapping, tvm.target.Target or None
        The device; see `target.resolve`.

    Examples
    --------
    >>> import dwtir
    >>> from dwtir.database import TuneDB
    >>> from tvm.s_tir import meta_schedule as ms
    >>> with TuneDB(target="cpu") as db:
    ...     ms.database.Database.current() is not None
    True
    """

    def __init__(self, folders: str | Path | Iterable[str | Path] | None = None, target: TargetLike = None) -> None:
        super().__init__()
        if isinstance(folders, str | Path):
            folders = [folders]
        self.folders = [Path(f) for f in (database.folders() if folders is None else folders)]
        self.device = resolve(target)
        self._workloads: dict[Workload, ms.database.Workload] = {}
        self._trials: dict[Workload, int] = {}

    def _find(self, mod: _Module) -> tuple[Workload, Record] | None:
        work = recognise(mod)
        found = work and database.find_record(work.shape, self.device, work.epilogue, within=self.folders)
        if not work or not found:
            return None
        record = found[0]
        if record.epilogue != work.epilogue:
            fitted = {"epilogue": work.epilogue, "strategy": record.strategy.with_room_for(*work, self.device)}
            record = Record(**(vars(record) | fitted))
        return work, record

    def _workload(self, work: Workload) -> ms.database.Workload:
        if work not in self._workloads:
            self._workloads[work] = ms.database.Workload(unscheduled(work))
        return self._workloads[work]

    def _tuning_record(self, work: Workload, record: Record) -> ms.database.TuningRecord:
        return as_tuning_record(record, self._workload(work))

    def _is_for(self, target: tvm.target.Target, record: Record) -> bool:
        """Tell whether a TVM target is this device, or one of its kind that can run the record."""
        try:
            asked = resolve(target)
            if (asked.kind, asked.arch) != (self.device.kind, self.device.arch):
                return False
            record.strategy.check_use(record.shape, asked, record.epilogue)
        except DwtirError:
            return False
        return True

    def has_workload(self, mod: _Module) -> bool:
        return self._find(mod) is not None

    def commit_workload(self, mod: _Module) -> ms.database.Workload:
        work = recognise(mod)
        return ms.database.Workload(mod) if work is None else self._workload(work)

    def commit_tuning_record(self, record: ms.database.TuningRecord) -> None:
        """Write a record, if one of our strategies makes its trace and none is better."""
        work = recognise(record.workload.mod)
        times = [float(seconds) for seconds in record.run_secs or []]
        if work is None or not times or max(times) >= _FAILED_SECS:
            return
        self._trials[work] = self._trials.get(work, 0) + 1
        try:
            trace = traces.without_postprocs(traces.plain(record.trace.as_json()))
            strategy = traces.recognise(trace, work.shape, self.device, work.epilogue)
            made = Record.measured(
                strategy, work.shape, self.device, times, epilogue=work.epilogue, trials=self._trials[work]
            )
            made.write(self.folders[0])
        except DwtirError as error:
            text = f"a tuning record of {work.shape} was not written: {error}"
            warnings.warn(text, database.RecordWarning, stacklevel=2)

    def get_top_k(self, workload: ms.database.Workload, top_k: int) -> list[ms.database.TuningRecord]:
        found = self._find(workload.mod)
        return [self._tuning_record(*found)] if found and top_k >= 1 else []

    def get_all_tuning_records(self) -> list[ms.database.TuningRecord]:
        return [
            self._tuning_record(Workload(record.shape, record.epilogue), record)
            for record in database.records_of(self.device, self.folders)
        ]

    def _answer(self, mod: _Module, target: tvm.target.Target) -> tuple[Workload, Record] | None:
        found = self._find(mod)
        return found if found and self._is_for(target, found[1]) else None

    def query_tuning_record(
        self, mod: _Module, target: tvm.target.Target, workload_name: str | None = None
    ) -> ms.database.TuningRecord | None:
        found = self._answer(mod, target)
        return found and self._tuning_record(*found)

    def query_schedule(
        self, mod: _Module, target: tvm.target.Target, workload_name: str | None = None
    ) -> Schedule | None:
        found = self._answer(mod, target)
        return found and traces.decided(found[1].strategy, *found[0])

    def __len__(self) -> int:
        return sum(1 for _ in database.records_of(self.device, self.folders))
