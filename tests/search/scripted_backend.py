"""A backend that answers from a script on a clock of its own: whole searches without a process or a wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec.structs import replace
from replay import Done, ReplayBudget, first

from autotune_amp.core.evidence import Objective
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.outcome import (
    Accumulation,
    AccumulationVerdict,
    Calibration,
    CheckOutcome,
    Description,
    Failure,
    Fidelity,
    Measurement,
    Outcome,
    Record,
    Verdict,
)
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import Decision, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.processes.local import Ability, Slot
from autotune_amp.search.answer.decide import decide
from autotune_amp.search.ledger import Ledger, Shortlist
from autotune_amp.search.loss_scales import AllScales
from autotune_amp.search.planner import JobDefaults, Planner
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher, Runner, run_stages
from autotune_amp.search.space import Space
from autotune_amp.search.stages import Stage
from autotune_amp.search.stages.checks import Checks, LossScales
from autotune_amp.search.stages.confirm import ConfirmationRounds
from autotune_amp.search.stages.explore import exploration_stages, share_building
from autotune_amp.search.stages.fallbacks import Fallbacks
from autotune_amp.search.storage.folder import StudyFolder
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Check, Trial

SETUP_SECONDS = 0.5
CHECK_SECONDS = 1.0
SUMMARY = SearchSummary(study="scripted", num_trials=0, num_failures=0, seconds=1.0)


class ScriptedBackend:
    """`answer` says what becomes of a spec; measuring moves the clock by what it would have taken.

    `check_answer` does so for checks, each of which takes a second; by default all is well.
    """

    def __init__(
        self,
        answer: Callable[[Trial], Outcome],
        budget: ReplayBudget,
        check_answer: Callable[[Check], CheckOutcome] | None = None,
    ) -> None:
        self._answer = answer
        self._check_answer = check_answer or all_well
        self.checks: list[Check] = []
        self._budget = budget
        self.is_forking = True
        self.is_build_shared = False
        self.start_seconds: float | None = SETUP_SECONDS
        self.why_not_shared: str | None = None
        self.specs: list[Trial] = []

    @property
    def abilities(self) -> frozenset[Ability]:
        checks: frozenset[Ability] = frozenset({"fidelity", "calibration", "accumulation"})
        return checks | {"share_build"} if self.is_forking else checks

    @property
    def slots(self) -> Sequence[Slot]:
        return (Slot("cpu"),)

    def submit(self, job: Any, slot: Slot | None = None) -> Done:
        found = self.run(job) if isinstance(job, Trial) else self.check(job)
        return Done(found, self.start_seconds, self._budget, self._budget.now)

    def wait(self, handles: Sequence[Any]) -> Any:
        return first(handles)

    def run(self, spec: Trial) -> Outcome:
        self.specs.append(spec)
        outcome = self._answer(spec)
        if isinstance(outcome, Measurement):
            measuring = min(8 * outcome.step_seconds, (spec.measure_seconds or math.inf) + outcome.step_seconds)
            self._budget.now += SETUP_SECONDS + 3 * outcome.step_seconds + measuring
        else:
            self._budget.now += spec.deadline_seconds or 0.0 if outcome.kind == "timeout" else SETUP_SECONDS
        return outcome

    def check(self, spec: Check) -> CheckOutcome:
        self.checks.append(spec)
        self._budget.now += CHECK_SECONDS
        return self._check_answer(spec)

    def keep(self) -> None:
        self.is_forking, self.is_build_shared = False, False

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:
        self.is_build_shared = self.why_not_shared is None
        return self.why_not_shared

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> ScriptedBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def fidelity(
    precision: Precision,
    verdict: Verdict = "faithful",
    pins: tuple[str, ...] = (),
    healing: tuple[str, ...] = (),
    batch_size: int = 16,
    **fields: Any,
) -> Fidelity:
    """A verdict with a reason that names it."""
    return Fidelity(
        precision=precision,
        batch_size=batch_size,
        verdict=verdict,
        reason=f"{precision} is {verdict}: so it was written.",
        next_step="Look at the numbers",
        pinned_modules=pins,
        healing_pins=healing,
        **{"noise_ratio": 0.01, **fields},
    )


def calibration(
    log2_scale: float | None = 14.5,
    histogram: dict[int, int] | None = None,
    batch_size: int = 16,
    pins: tuple[str, ...] = (),
) -> Calibration:
    """Twelve steps with one largest safe scale; the gradient's entries lie around 2^-10 unless told otherwise."""
    return Calibration(
        batch_size=batch_size,
        log2_scales=(log2_scale,) * 12,
        gradient_histogram=tuple(sorted((histogram or {-10: 1000, -11: 500}).items())),
        init_scale=None if log2_scale is None else 2.0 ** (log2_scale // 1 - 1),
        forward_max=3.0,
        pinned_modules=pins,
    )


def accumulation(verdict: AccumulationVerdict = "mean", batch_size: int = 16) -> Accumulation:
    """A finding with a reason that names its verdict."""
    return Accumulation(
        verdict=verdict,
        reason=f"The micro-batches are {verdict}.",
        next_step=f"Do as {verdict} asks.",
        batch_size=batch_size,
        num_micro_batches=4,
    )


def all_well(spec: Check) -> CheckOutcome:
    """Every precision is faithful, every loss scale up to 2^14.5 safe, and gradients accumulate."""
    if spec.what == "accumulation":
        return accumulation(batch_size=spec.candidate.batch_size)
    if spec.what == "calibration":
        return calibration(batch_size=spec.candidate.batch_size, pins=spec.candidate.pinned_modules)
    return fidelity(spec.candidate.precision, pins=spec.candidate.pinned_modules, batch_size=spec.candidate.batch_size)


def measurement(speed: float, memory: int = 1000, **fields: Any) -> Measurement:
    """A steady measurement of `speed` samples per second, in steps of a hundred samples unless told otherwise."""
    step = fields.pop("step_seconds", 100 / speed)
    known: dict[str, Any] = {
        "step_seconds": step,
        "step_seconds_interval": (step, step),
        "samples_per_second": speed,
        "data_seconds": 0.0,
        "peak_memory_bytes": memory,
        "reserved_memory_bytes": memory,
        "raw_step_seconds": (step,),
        "build_seconds": 0.1,
        "context_seconds": 0.0,
        "first_step_seconds": 1.0,
    }
    return Measurement(**known | fields)


def measured(
    spec: Trial, rate: float, memory: int = 2**28, build_seconds: float = 0.01, data_share: float = 0.0
) -> Measurement:
    """What `spec` measures at `rate` samples per second, `data_share` of each step a wait for data."""
    step = spec.candidate.effective_batch_size / rate
    return measurement(
        rate,
        memory,
        step_seconds=step,
        data_seconds=data_share * step,
        raw_step_seconds=(step,) * 8,
        build_seconds=build_seconds,
        first_step_seconds=2 * step,
    )


def out_of_memory() -> Failure:
    return Failure(kind="oom", message="it took too much")


def hardware(rates: dict[Precision, float | None]) -> Hardware:
    """A device with these matrix-product rates; None is unsupported, below a fifth of fp32's is emulated."""
    return Hardware(
        device="cpu",
        identity=DeviceIdentity(type="cpu", name="scripted", num_cpus=2, total_memory_bytes=2**34),
        memory=DeviceMemory(total=2**34, free=2**34, available=2**34),
        precisions={
            precision: Capability(
                level="unsupported" if rate is None else "native" if rate >= 0.2 else "emulated",
                reason="scripted",
                matmul_flops_per_second=None if rate is None else rate * 1e11,
            )
            for precision, rate in rates.items()
        },
    )


class _Given(Stage):
    """A stage of jobs that are known beforehand."""

    def __init__(self, jobs: Sequence[Trial]) -> None:
        self._jobs = list(jobs)

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        return self._jobs.pop(0) if self._jobs else None


class ScriptedSearch:
    """A search on a scripted backend, stage by stage; in a `folder` it goes on with what is there."""

    def __init__(
        self,
        space: Space,
        answer: Callable[[Trial], Outcome],
        budget_seconds: float = 200.0,
        *,
        check_answer: Callable[[Check], CheckOutcome] | None = None,
        device: Hardware | None = None,
        description: Description | None = None,
        objective: Objective = "speed",
        progress: Progress | None = None,
        meter: LoadMeter | None = None,
        folder: Path | None = None,
    ) -> None:
        self.budget = ReplayBudget(budget_seconds)
        self.backend = ScriptedBackend(answer, self.budget, check_answer=check_answer)
        study_folder = None if folder is None else StudyFolder(str(folder), "scripted")
        if study_folder is not None:
            study_folder.path.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger(
            space,
            [] if study_folder is None else study_folder.records("scripted-1"),
            objective=objective,
            search_id="scripted-1",
            write=(lambda _: None) if study_folder is None else study_folder.append,
        )
        self.job_defaults = JobDefaults(
            hardware=device or hardware({"fp32": 1.0, "tf32": None, "bf16": 3.0, "fp16": 0.01, "fp8": None}),
            memory_limit_bytes=2**33,
            description=description or described(num_workers=None),
        )
        self.watcher = ProgressWatcher(progress or Progress(), self.budget, meter)
        self.storage: str | Path = "sqlite://" if folder is None else folder / "study.db"

    def run(self, stage: Stage, backend: Any = None) -> None:
        for _ in run_stages([stage], self.runner(backend)):
            pass

    @property
    def planner(self) -> Planner:
        return Planner(self.job_defaults, self.budget)

    def runner(self, backend: Any = None) -> Runner:
        return Runner(backend or self.backend, self.ledger, self.planner, self.watcher)

    def measure(self, *settings: Setting) -> None:
        """A trial of each, without limits."""
        self.run(_Given([self.job_defaults.trial(self.ledger, setting) for setting in settings]))

    def explore(self, max_trials: int | None = None, *, is_checked: bool = False) -> None:
        """With the sharing of what is built between trials, as a real search has it."""
        with Study.open(self.storage, "scripted", self.ledger) as study:
            self.job_defaults = replace(self.job_defaults, max_trials=max_trials)
            stages: list[Stage] = [*exploration_stages(), Checks(), LossScales(study)]
            if not is_checked:
                stages = [stage for stage in stages if not isinstance(stage, (Checks, LossScales))]
            for _ in run_stages(stages, self.runner()):
                study.catch_up(self.ledger)
                self.share_building()

    def share_building(self) -> None:
        share_building(self.backend, self.planner, self.ledger, self.watcher.progress)

    def measure_fallbacks(self) -> None:
        self.run(Fallbacks())

    def set_start(self, environment: dict[str, str], start_seconds: float) -> None:
        """From now on these variables are recommended, and a process takes so long to its first step."""
        ready_seconds = start_seconds - self.job_defaults.setup_seconds
        self.job_defaults = replace(self.job_defaults, environment=environment, ready_seconds=ready_seconds)

    def confirm(self, chosen: Shortlist, environment: dict[str, str], start_seconds: float = 1.0) -> None:
        self.set_start(environment, start_seconds)
        self.run(ConfirmationRounds(chosen, environment))

    def decide(self, environment: Mapping[str, str]) -> Decision:
        return decide(self.ledger, environment=environment, search=SUMMARY, description=self.job_defaults.description)

    @property
    def records(self) -> Sequence[Record]:
        return self.ledger.records


def ledger_of(
    records: Sequence[Record], space: Space, scales: AllScales | None = None, objective: Objective = "speed"
) -> Ledger:
    """The ledger of these records; `scales` with the loss scales that were asked for."""
    made = Ledger(space, records, objective=objective)
    if scales is not None:
        made.scales = dict(scales)
    return made


def described(**fields: Any) -> Description:
    """A workload with a DataLoader of batch size 32 that has no worker processes."""
    values: dict[str, Any] = {
        "name": "scripted",
        "batch_size": 32,
        "num_samples": 10_000,
        "data": "DataLoader, 0 workers",
        "num_parameters": 1000,
        "num_trainable_parameters": 1000,
        "weights": "fp32",
        "as_found_precision": "fp32",
        "is_as_found_strict": True,
        "build_seconds": 0.01,
        "context_seconds": 0.0,
        "num_workers": 0,
        "checks": ("fidelity", "later", "calibration", "accumulation"),
    }
    return Description(**(values | fields))


def candidate(precision: Precision, batch_size: int, accumulation_steps: int = 1) -> Setting:
    return Setting(precision=precision, batch_size=batch_size, accumulation_steps=accumulation_steps)


def shortlist(
    records: Sequence[Record], baseline: Setting, scales: AllScales | None = None, objective: Objective = "speed"
) -> Shortlist | None:
    """What would be checked next, and then confirmed."""
    return ledger_of(records, Space(candidates=(), baseline=baseline), scales, objective).shortlist
