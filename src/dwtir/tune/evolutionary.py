"""MetaSchedule's evolutionary search over the parameters of our strategies.

Each strategy that claims the layer is one design, its parameters random variables of the trace. MetaSchedule replays
some hundred traces for each batch that it proposes, so these only draw the parameters and write them on a block. A
mutation moves one parameter. The cost model is MetaSchedule's XGBoost model, fed with the parameters.
"""

import contextlib
import logging
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from math import log2
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from .. import compute, schedules
from ..errors import ToolchainError
from ..schedules import Strategy, sample
from ..target import Target
from ..tvm_database import Workload, unscheduled
from .outcome import Task
from .search import Search, is_worth_a_trial, searched_strategies

_BATCH = 16
_GUESSES = 24
_NEIGHBOURS = 8
_POPULATION = 128
_GENERATIONS = 4
_WARMUP = 16
_FAILED_SECONDS = 1e3
_MAX_TRIALS = 2**30  # the session counts


@contextlib.contextmanager
def _without_intrinsics() -> Iterator[None]:
    """Keep `TuneContext` from parsing all of TVM's tensor intrinsics, 10 s for schedule rules, of which we use none.

    Whoever imports them afterwards gets them.
    """
    name = "tvm.s_tir.tensor_intrin"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = ModuleType(name)
    try:
        yield
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    """Seed NumPy's global generator, from which the model draws, and restore it."""
    before = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002


class _Designs:
    """The strategies of a layer as designs, and what a trace means in them."""

    def __init__(self, task: Task, target: Target) -> None:
        self._task, self._target = task, target
        self._place = task.shape, target
        chosen = [
            kind.choose(*self._place).with_room_for(task.shape, task.epilogue, target)
            for kind in searched_strategies(*self._place)
        ]
        self._designs = {strategy.name: (strategy, strategy.space(*self._place)) for strategy in chosen}

    def schedules(self) -> list[Schedule]:
        """Make the designs, with the values that strategies choose by hand."""
        return [self.schedule(strategy) for strategy, _ in self._designs.values()]

    def guesses(self) -> list[Strategy]:
        found = [
            tile.with_room_for(self._task.shape, self._task.epilogue, self._target)
            for chosen, _ in self._designs.values()
            for tile in chosen.guesses(*self._place)
        ]
        found.sort(key=lambda tile: tile.expected_seconds(*self._place) or 0.0)
        return found[:_GUESSES]

    def neighbours(self) -> list[Strategy]:
        """List what differs from the choice by hand by one step of one parameter."""
        chosen = schedules.choose(*self._place, self._task.epilogue)
        own = chosen.parameters
        found = []
        for field, values in chosen.space(*self._place).items():
            at = values.index(own[field])
            for value in values[max(0, at - 1) : at] + values[at + 1 : at + 2]:
                found.append(chosen.from_parameters(own | {field: value}))
        return found

    def schedule(self, strategy: Strategy) -> Schedule:
        """Draw a strategy's parameters, as they are, and write them on a block."""
        sch = Schedule(compute.depthwise_conv2d(self._task.shape, self._task.epilogue))
        block = sch.get_sblock("depthwise_conv2d")
        sch.annotate(block, "dwtir.strategy", strategy.name)
        own = strategy.parameters
        for field, values in strategy.space(*self._place).items():
            sch.annotate(block, f"dwtir.{field}", sample(sch, values, values.index(own[field])))
        return sch

    def _design(self, trace: Trace) -> tuple[Strategy, dict[str, tuple[Any, ...]]]:
        """Return the design and space of a trace: its second instruction says which, see `schedule`."""
        return self._designs[str(trace.insts[1].inputs[1])]

    def draws(self, trace: Trace) -> list[tuple[Any, tuple[int, ...], int]]:
        """List the random variables of a trace: instruction, values, decision.

        The values are the space's, for to read them off the trace takes a call each.
        """
        (_, space), insts, decisions = self._design(trace), trace.insts, trace.decisions
        drawn = ((insts[2 + 2 * i], values) for i, values in enumerate(space.values()))
        return [(inst, values, int(decisions[inst])) for inst, values in drawn]

    def read(self, trace: Trace) -> Strategy:
        chosen, space = self._design(trace)
        drawn = [values[decision] for _, values, decision in self.draws(trace)]
        return chosen.from_parameters(chosen.parameters | dict(zip(space, drawn, strict=True)))

    def holds(self, strategy: Strategy) -> bool:
        if strategy.name not in self._designs:
            return False
        chosen, space = self._designs[strategy.name]
        own = strategy.parameters
        return all(own[field] in space.get(field, (value,)) for field, value in chosen.parameters.items())

    def is_valid(self, trace: Trace) -> bool:
        return is_worth_a_trial(self.read(trace), *self._place)

    def features(self, strategy: Strategy) -> list[float]:
        """Describe a strategy by numbers: which it is, and the logarithms of its parameters."""
        own = strategy.parameters
        return [float(name == strategy.name) for name in self._designs] + [
            log2(own[field]) if name == strategy.name else -1.0
            for name, (_, space) in self._designs.items()
            for field in space
        ]


@derived_object
class _IsValid(ms.postproc.PyPostproc):
    def __init__(self, designs: _Designs) -> None:
        super().__init__()
        self._designs = designs

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, sch: Schedule) -> bool:
        return self._designs.is_valid(sch.trace)

    def clone(self) -> "_IsValid":
        return _IsValid(self._designs)


@derived_object
class _MoveParameter(ms.mutator.PyMutator):
    """Moves one parameter, to a neighbouring value more often than to a distant one."""

    _TRIES = 20

    def __init__(self, designs: _Designs, seed: int) -> None:
        super().__init__()
        self._designs, self._seed, self._rng = designs, seed, random.Random(seed)

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        pass

    def apply(self, trace: Trace, _: Any) -> Trace | None:
        draws = [draw for draw in self._designs.draws(trace) if len(draw[1]) > 1]
        for _attempt in range(self._TRIES if draws else 0):
            inst, values, decision = self._rng.choice(draws)
            if self._rng.random() < 0.5:
                moved = decision + self._rng.choice((-1, 1))
            else:
                moved = self._rng.randrange(len(values))
            if moved != decision and 0 <= moved < len(values):
                mutant = trace.with_decision(inst, moved, remove_postproc=True)
                if self._designs.is_valid(mutant):
                    return mutant
        return None

    def clone(self) -> "_MoveParameter":
        return _MoveParameter(self._designs, self._seed)


@derived_object
class _Parameters(ms.feature_extractor.PyFeatureExtractor):
    def __init__(self, designs: _Designs) -> None:
        super().__init__()
        self._designs = designs

    def extract_from(self, context: ms.TuneContext, candidates: Sequence[ms.MeasureCandidate]) -> list[Any]:
        rows = [self._designs.features(self._designs.read(c.sch.trace)) for c in candidates]
        return [tvm.runtime.tensor(np.array([row], "float32")) for row in rows]


class EvolutionarySearch(Search):
    """Breeds candidates from the best that were measured, and picks by the cost model."""

    def __init__(self, task: Task, target: Target, seed: int) -> None:
        super().__init__(task, target, seed)
        try:
            import xgboost  # noqa: F401
        except ImportError as error:
            raise ToolchainError(
                f"the evolutionary search needs {error.name}. To fix it: pip install 'dwtir[tune]'"
            ) from error
        self._designs = _Designs(task, target)
        self._ready: deque[Strategy] = deque()
        self._told: set[Strategy] = set()
        state = self._rng.randrange(1, 2**31 - 1)
        quiet = logging.getLogger("dwtir.tune.metaschedule")
        quiet.setLevel(logging.ERROR)
        mod = unscheduled(Workload(task.shape, task.epilogue))
        with _without_intrinsics():
            space = ms.space_generator.ScheduleFn(
                lambda sch: self._designs.schedules(),
                sch_rules=[],
                postprocs=[_IsValid(self._designs)],
                mutator_probs={_MoveParameter(self._designs, state): 1.0},
            )
            sizes = {"population_size": _POPULATION, "init_min_unmeasured": _BATCH, "genetic_num_iters": _GENERATIONS}
            self._context = ms.TuneContext(
                mod,
                target=target.tvm(),
                space_generator=space,
                search_strategy=ms.search_strategy.EvolutionarySearch(**sizes),
                rand_state=state,
                num_threads=1,  # the designs are Python; the cores are for the builders
                logger=quiet,
            )
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(mod)
        self._model = ms.cost_model.XGBModel(
            extractor=_Parameters(self._designs), num_warmup_samples=_WARMUP, num_tuning_cores=1
        )
        self._context.pre_tuning(
            _MAX_TRIALS, num_trials_per_iter=_BATCH, database=self._database, cost_model=self._model
        )
        self._learnt: list[tuple[Strategy, float | None]] = []
        self._begun = False

    def tell(self, strategy: Strategy, seconds: float | None) -> None:
        super().tell(strategy, seconds)
        if strategy not in self._told and self._designs.holds(strategy):
            self._told.add(strategy)
            self._learnt.append((strategy, seconds))

    def propose(self, count: int) -> list[Strategy]:
        if not self._begun:
            # While the model knows nothing: the strategies' guesses, and what is close to the choice by hand.
            self._begun = True
            near = self._designs.neighbours()
            self._rng.shuffle(near)
            self._ready.extend(filter(self.is_new, self._designs.guesses() + near[:_NEIGHBOURS]))
        if len(self._ready) < count:
            self._learn()
            with _numpy_seeded(self._rng.randrange(2**32)):
                candidates = self._context.generate_measure_candidates()
            drawn = (self._designs.read(candidate.sch.trace) for candidate in candidates or [])
            self._ready.extend(filter(self.is_new, drawn))
        return [self._ready.popleft() for _ in range(min(count, len(self._ready)))]

    def _learn(self) -> None:
        if not self._learnt:
            return
        info = ms.arg_info.ArgInfo.from_entry_func(self._workload.mod, False)
        target = self.target.tvm()
        candidates, results = [], []
        for strategy, seconds in self._learnt:
            sch = self._designs.schedule(strategy)
            secs = [_FAILED_SECONDS if seconds is None else seconds]
            candidates.append(ms.MeasureCandidate(sch, info))
            results.append(ms.runner.RunnerResult(secs, None))
            self._database.commit_tuning_record(ms.database.TuningRecord(sch.trace, self._workload, secs, target, info))
        self._learnt.clear()
        self._model.update(self._context, candidates, results)
        self._context.notify_runner_results(candidates, results)
