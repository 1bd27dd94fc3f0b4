"""A runner that answers from a script on a clock of its own: whole searches without a process or a wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

from autotune_amp.core.config import LossScale, Precision
from autotune_amp.core.fidelity import Accumulation, AccumulationVerdict, Calibration, Fidelity, Verdict
from autotune_amp.core.hardware import Capability, DeviceIdentity, DeviceMemory, Hardware
from autotune_amp.core.outcome import CheckOutcome, Description, Failure, Measurement, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.isolation.backend import Ability, Backend
from autotune_amp.isolation.local import Isolation
from autotune_amp.search.folder import StudyFolder
from autotune_amp.search.progress import Progress
from autotune_amp.search.session import Clock, Session
from autotune_amp.trial.jobs import Check, Trial

SETUP_SECONDS = 0.5
CHECK_SECONDS = 1.0


class ScriptedClock(Clock):
    """Moves only when told to."""

    def __init__(self, budget_seconds: float) -> None:
        super().__init__(budget_seconds)
        self.now = 0.0

    def elapsed(self) -> float:
        return self.now


class Done(NamedTuple):
    """A job that ended when it was submitted."""

    found: Any
    start_seconds: float | None

    def result(self) -> Any:
        return self.found


class ScriptedRunner:
    """`answer` says what becomes of a spec; measuring moves the clock by what it would have taken.

    `check_answer` does so for checks, each of which takes a second; by default all is well.
    """

    def __init__(
        self,
        answer: Callable[[Trial], Outcome],
        clock: ScriptedClock,
        environment: dict[str, str] | None = None,
        check_answer: Callable[[Check], CheckOutcome] | None = None,
    ) -> None:
        self._answer = answer
        self._check_answer = check_answer or all_well
        self.checks: list[Check] = []
        self._clock = clock
        self.environment = environment or {}
        self.isolation: Isolation = "forked"
        self.is_build_shared = False
        self.start_seconds: float | None = SETUP_SECONDS
        self.why_not_shared: str | None = None
        self.specs: list[Trial] = []

    @property
    def abilities(self) -> frozenset[Ability]:
        both: frozenset[Ability] = frozenset({"check"})
        return both | {"share_build"} if self.isolation == "forked" else both

    def submit(self, job: Trial | Check) -> Done:
        found = self.run(job) if isinstance(job, Trial) else self.check(job)
        return Done(found, self.start_seconds)

    def run(self, spec: Trial) -> Outcome:
        self.specs.append(spec)
        outcome = self._answer(spec)
        if isinstance(outcome, Measurement):
            self._clock.now += SETUP_SECONDS + 11 * outcome.step_seconds
        else:
            self._clock.now += spec.deadline_seconds or 0.0 if outcome.kind == "timeout" else SETUP_SECONDS
        return outcome

    def check(self, spec: Check) -> CheckOutcome:
        self.checks.append(spec)
        self._clock.now += CHECK_SECONDS
        return self._check_answer(spec)

    def keep(self) -> None:
        self.isolation, self.is_build_shared = "kept", False

    def share_build(self, spec: Trial, deadline_seconds: float) -> str | None:
        self.is_build_shared = self.why_not_shared is None
        return self.why_not_shared

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> ScriptedRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def as_runner(self) -> Backend:
        return cast("Backend", self)


def fidelity(
    precision: Precision,
    verdict: Verdict = "faithful",
    pins: tuple[str, ...] = (),
    healing: tuple[str, ...] = (),
    batch_size: int = 16,
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
        noise_ratio=0.01,
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
        bisected_log2_scales={},
        gradient_histogram=tuple(sorted((histogram or {-10: 1000, -11: 500}).items())),
        init_scale=None if log2_scale is None else 2.0 ** (log2_scale // 1 - 1),
        forward_max=3.0,
        pinned_modules=pins,
    )


def accumulation(
    verdict: AccumulationVerdict = "mean", weighted_by: str | None = None, batch_size: int = 16
) -> Accumulation:
    """A finding with a reason that names its verdict."""
    return Accumulation(
        verdict=verdict,
        reason=f"The micro-batches are {verdict}.",
        next_step=f"Do as {verdict} asks.",
        batch_size=batch_size,
        num_micro_batches=4,
        weighted_by=weighted_by,
    )


def all_well(spec: Check) -> CheckOutcome:
    """Every precision is faithful, every loss scale up to 2^14.5 safe, and gradients accumulate."""
    if spec.what == "accumulation":
        return accumulation(batch_size=spec.batch_size)
    if spec.what == "calibration":
        return calibration(batch_size=spec.batch_size, pins=spec.pinned_modules)
    return fidelity(spec.precision, pins=spec.pinned_modules, batch_size=spec.batch_size)


def measured(
    spec: Trial, rate: float, memory: int = 2**28, build_seconds: float = 0.01, data_share: float = 0.0
) -> Measurement:
    """A steady measurement of `rate` samples per second, `data_share` of each step a wait for data."""
    step = spec.candidate.effective_batch_size / rate
    return Measurement(
        step_seconds=step,
        step_seconds_interval=(step, step),
        samples_per_second=rate,
        data_seconds=data_share * step,
        peak_memory_bytes=memory,
        reserved_memory_bytes=memory,
        raw_step_seconds=(step,) * 8,
        build_seconds=build_seconds,
        context_seconds=0.0,
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


def session(
    folder: Path,
    clock: Clock,
    device: Hardware,
    progress: Progress | None = None,
    description: Description | None = None,
    meter: LoadMeter | None = None,
) -> Session:
    """A session in a folder of its own."""
    study_folder = StudyFolder(str(folder), "scripted")
    study_folder.path.mkdir(parents=True, exist_ok=True)
    return Session(
        folder=study_folder,
        search_id="scripted-1",
        clock=clock,
        progress=progress or Progress(),
        hardware=device,
        torch_state={},
        memory_limit_bytes=2**33,
        loss_scale=LossScale(),
        holds_heap=True,
        seed=0,
        description=description,
        meter=meter,
    )


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
    }
    return Description(**(values | fields))


def candidate(precision: Precision, batch_size: int, accumulation_steps: int = 1) -> Setting:
    return Setting(precision=precision, batch_size=batch_size, accumulation_steps=accumulation_steps)
