"""Hosts on a virtual clock: what it costs there to start a process, to build, to run a command, and what dies.

A whole search on a landscape is played on a host in milliseconds. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from closed_form import ClosedForm
from landscape import Process
from measured import MeasuredShape
from msgspec.structs import replace
from replay import Done, ReplayBudget, check_seconds, first, play, well
from search_replay import Replayed, play_search

from autotune_amp.command.together import MAX_TOGETHER
from autotune_amp.core.outcome import CheckOutcome, Failure, Fidelity, Measurement, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.processes.devices import ConfirmationBackend
from autotune_amp.processes.local import Ability, Isolation, Slot
from autotune_amp.processes.standby import MAX_PROCESSES, MIN_CORES
from autotune_amp.search.planner import JobDefaults
from autotune_amp.trial.jobs import Check, Trial, measurement_limit_seconds

FORK_SECONDS = 0.07  # studies/overheads
CONTEXT_SECONDS = 0.3  # of an accelerator, in each process: 0.16 to 0.4 s on an H200 (studies/real_card)
HAND_OVER_SECONDS = 0.05  # until a process that stood by has its first job
PROBE_SECONDS = 1.0
TORCH_SECONDS = 4.0  # to start a process that imports torch and nothing of the user's: 3.7 s warm on an H200's host
NUM_FROZEN_STEPS = 6  # of a command's run that checks (command/backend.py)
RECOMPILING_SHARE = 0.3  # of the first compilation's seconds, once the compiler's cache on disk knows the model


@dataclass(frozen=True)
class Host:
    """Costs of processes on a machine.

    A process takes `start_seconds` to start Python and import the workload, and `build_seconds` to build it the first
    time. `can_fork`: jobs are forked from a template; else they run in one process until a failure ends it, beside one
    that stands by where there are cores for it. `is_command`: every run is a process of its own. A job's process is
    killed at a random moment with the probability `death_share`. A check finds that the `harmful` precisions harm what
    the model learns.
    """

    start_seconds: float
    build_seconds: float
    can_fork: bool = False
    num_cores: int = 16
    is_command: bool = False
    death_share: float = 0.0
    harmful: tuple[Precision, ...] = ()

    @property
    def load_seconds(self) -> float:
        """Return the seconds until a fresh process has built the workload."""
        return self.start_seconds + self.build_seconds

    @property
    def num_together(self) -> int:
        """Return how many runs of a command load at the same time, each on a core."""
        return min(self.num_cores, MAX_TOGETHER) if self.is_command else 1

    @property
    def has_standby(self) -> bool:
        """Whether a process loads and stands by beside the one that runs jobs."""
        return not self.can_fork and not self.is_command and self.num_cores >= MIN_CORES


class HostedForm(ClosedForm):
    """A landscape in closed form as a search finds it on a host: described with that host's costs."""

    def __init__(self, form: ClosedForm, host: Host) -> None:
        shape = form.shape
        if host.is_command and isinstance(shape, MeasuredShape):  # its fp32 is what the script has today
            shape = dataclasses.replace(shape, strict_fp32_times=1.0)
        super().__init__(shape, form.noise, with_variants=form.with_variants and not host.is_command)
        self.host = host
        found = self.header.description
        described = replace(
            found,
            build_seconds=host.build_seconds,
            context_seconds=self.context_seconds,
            checks=("fidelity", "later", "calibration", "accumulation"),
        )
        if host.is_command:  # with a placeholder for the precision and one for the batch size
            effective = shape.effective_batch_size or shape.todays_batch_size
            described = replace(
                found,
                # All until the end of its first step, as the agent in a command sees it.
                build_seconds=host.load_seconds + shape.first_step_seconds(self._today()),
                num_workers=None,
                checks=("fidelity",),
                is_as_found_strict=True,
                accumulation_steps=max(1, effective // shape.todays_batch_size),
                unsettable={"accumulation_steps": "the command has no {accumulation_steps}"},
            )
        hardware = self.header.hardware
        identity = replace(hardware.identity, num_cpus=host.num_cores)
        memory = replace(hardware.memory, available=2 * hardware.memory.available)  # the template's model has room
        hardware = replace(hardware, identity=identity, memory=memory)
        self.header = replace(self.header, description=described, hardware=hardware)

    @property
    def context_seconds(self) -> float:
        """Return the seconds in which a process starts the accelerator."""
        return 0.0 if self.shape.device == "cpu" else CONTEXT_SECONDS

    def setup_seconds(self) -> float:
        """Return 0: the backend of a host adds what its processes take before the first step."""
        return 0.0

    def _today(self) -> Setting:
        return Setting(precision="fp32", batch_size=self.shape.todays_batch_size, as_found=True)


class Processes:
    """The fresh processes of a host, over virtual time: one stands by where there are cores for it."""

    def __init__(self, host: Host, budget: ReplayBudget, chance: random.Random) -> None:
        self.host = host
        self._budget = budget
        self._chance = chance
        self._stands_by_at: float | None = None
        self._num_loaded: int | None = None  # beside the first process of a confirmation, None before that
        self.compiled: set[Setting] = set()  # what the compiler's cache on disk knows
        self._loaded: list[tuple[Setting, dict[str, str], int | None]] = []  # runs of a command that wait to train

    def stand_by(self, after_seconds: float = 0.0) -> None:
        """Begin to load a process beside the jobs, so many seconds from now."""
        if self.host.has_standby:
            self._stands_by_at = self._budget.now + after_seconds + self.host.load_seconds

    def load_together(self, jobs: Sequence[Trial]) -> None:
        """Start the first of these runs of a command, unless the first one is loaded, and move the clock by a start."""
        wanted = [(job.candidate, job.environment, job.round) for job in jobs[: self.host.num_together]]
        if len(wanted) > 1 and wanted[0] not in self._loaded:
            self._loaded = wanted
            self._budget.now += self.host.load_seconds
        elif not wanted:
            self._loaded = []

    def take_loaded(self, job: Trial) -> bool:
        """Whether a run of the command was loaded and waited, which from now on it does not."""
        key = job.candidate, job.environment, job.round
        if key not in self._loaded:
            return False
        self._loaded.remove(key)
        return True

    def take_confirming(self) -> tuple[float, float]:
        """Return what `take` does, for a round of a confirmation: the first waits until those of all have loaded."""
        if self._num_loaded:
            self._num_loaded -= 1
            return HAND_OVER_SECONDS, 0.0
        is_first, self._num_loaded = self._num_loaded is None, MAX_PROCESSES if self._num_loaded is None else 0
        waited, building = self.take({})
        self._stands_by_at = None
        return (max(waited + building, self.host.load_seconds), 0.0) if is_first else (waited, building)

    def take(self, environment: dict[str, str]) -> tuple[float, float]:
        """Return the seconds until there is a fresh process, and those that it then takes to build.

        One that stands by has built. It started in the user's own environment, and is of no use for another.
        """
        is_dead = self._stands_by_at is not None and self._chance.random() < self.host.death_share
        if self._stands_by_at is None or is_dead or environment:
            waited, building = self.host.start_seconds, self.host.build_seconds
        else:
            waited, building = max(0.0, self._stands_by_at - self._budget.now) + HAND_OVER_SECONDS, 0.0
        if self._stands_by_at is None or not environment:
            self.stand_by(waited + building)
        return waited, building


class HostBackend:
    """A `Backend` that plays a landscape on a host: forked or kept processes, or runs of a command.

    A job's clock starts when its process has loaded and built, but for a build in a fork, which is part of the job.
    """

    def __init__(
        self,
        landscape: HostedForm,
        processes: Processes,
        budget: ReplayBudget,
        chance: random.Random,
        isolation: Isolation,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.isolation = isolation
        self.is_build_shared = False
        self.slots = (Slot(landscape.header.hardware.device),)
        self._landscape, self._host = landscape, processes.host
        self._processes = processes
        self._budget = budget
        self._chance = chance
        self._environment = environment or {}
        self._is_warm = False  # a process that ran a job is there
        self._described: dict[Setting, Any] = {}  # what the runs that describe a command measured

    @property
    def num_together(self) -> int:
        """See `LoadingBackend`."""
        return self._host.num_together

    def load_together(self, jobs: Sequence[Trial], limit_seconds: float) -> None:
        """See `LoadingBackend`: the clock moves by a start, however many they are."""
        if not jobs or jobs[0].candidate not in self._described:
            self._processes.load_together([job for job in jobs if job.candidate not in self._described])

    @property
    def abilities(self) -> frozenset[Ability]:
        """See `Backend`."""
        if self._host.is_command:
            return frozenset({"fidelity"})
        checks: frozenset[Ability] = frozenset({"fidelity", "later", "calibration", "accumulation"})
        return checks | {"share_build"} if self.isolation == "forked" else checks

    def open(self) -> None:
        """Move the clock to where the workload was loaded, the device probed and the workload described."""
        host, form = self._host, self._landscape
        if host.is_command:
            self._budget.now += min(TORCH_SECONDS, host.start_seconds) + PROBE_SECONDS
            self._describe()
        else:
            self._budget.now += host.load_seconds + form.context_seconds + PROBE_SECONDS
        self._is_warm = True
        self._processes.stand_by()

    def _describe(self) -> None:
        """Run a command as today, and once more to see whether it follows: where the effective batch is kept, at it."""
        space = self._landscape.space()
        today = space.baseline
        batch_size = today.batch_size if space.effective_batch_size else max(1, today.batch_size // 2)
        precision = "bf16" if any(c.precision == "bf16" for c in space.candidates) else today.precision
        for setting in (today, replace(today, precision=precision, batch_size=batch_size)):
            spec = Trial(
                candidate=setting,
                device=self._landscape.header.hardware.device,
                measure_seconds=measurement_limit_seconds(self._budget.seconds),
            )
            found = self.submit(spec).result()
            self._described[setting] = found

    def submit(self, job: Any, slot: Slot | None = None) -> Done:
        """Play the job; the clock moves once somebody waits for it."""
        described = self._described.pop(job.candidate, None) if isinstance(job, Trial) and not job.environment else None
        if isinstance(described, Measurement):
            return Done(described, None, self._budget, self._budget.now)
        waited, start_seconds, building = self._begin(job)
        allowed = job.loading_seconds
        if self._host.is_command and job.deadline_seconds is not None:  # whose clock starts with its process
            allowed = job.deadline_seconds
            job = replace(job, deadline_seconds=max(0.0, allowed - waited))
        if allowed is not None and waited > allowed:
            self._is_warm = False
            slow = Failure(kind="timeout", message="the workload takes longer to load", is_loading=True)
            return Done(slow, start_seconds, self._budget, self._budget.now + allowed)
        played, seconds = self._trial(job, building) if isinstance(job, Trial) else self._check(job, building)
        found: Any = played
        if self._chance.random() < self._host.death_share:
            found, seconds = Failure(kind="crash", message="its process was killed"), self._chance.random() * seconds
            found = job.after(found, None)
        if isinstance(found, Measurement) and self._host.is_command:
            # The agent in the command counts from its start to the end of the first step.
            until = self._host.load_seconds + found.first_step_seconds
            found = replace(found, build_seconds=until, context_seconds=0.0, first_step_seconds=until)
        elif isinstance(found, Measurement):
            found = replace(found, build_seconds=building, is_build_shared=self.is_build_shared)
        self._is_warm = self.isolation == "kept" and not isinstance(found, Failure) and not job.is_alone
        return Done(found, start_seconds, self._budget, self._budget.now + waited + seconds)

    def wait(self, handles: Sequence[Any]) -> Any:
        """See `Backend`."""
        return first(handles)

    def keep(self) -> None:
        """See `Backend`."""
        self.isolation, self.is_build_shared, self._is_warm = "kept", False, False

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:
        """See `Backend`; the clock moves by what building takes."""
        self._budget.now += min(self._host.build_seconds, deadline_seconds)
        self.is_build_shared = self._host.build_seconds <= deadline_seconds
        return None if self.is_build_shared else "building took too long"

    def close(self) -> None:
        """End the process."""
        self._is_warm = False

    def __enter__(self) -> HostBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, job: Any) -> tuple[float, float | None, float]:
        """Return the seconds until the job's clock starts, what its record says of them, and those of building."""
        is_trial = isinstance(job, Trial)
        if self._host.is_command:
            is_loaded = is_trial and self._processes.take_loaded(job)
            return 0.0 if is_loaded else self._host.load_seconds, None, 0.0
        if self.isolation == "forked":
            return 0.0, None, 0.0 if self.is_build_shared else self._host.build_seconds
        if self._is_warm:
            return 0.0, 0.0, 0.0
        if is_trial and job.is_confirmation and self._host.has_standby and self.slots[0].device != "cpu":
            waited, building = self._processes.take_confirming()
        else:
            waited, building = self._processes.take(self._environment)
        return waited + building, waited, building

    def _setup_seconds(self, building: float) -> float:
        """Return the seconds of a job's own clock before its first step."""
        context = 0.0 if self._is_warm else self._landscape.context_seconds
        return context + (FORK_SECONDS + building if self.isolation == "forked" else 0.0)

    def _trial(self, spec: Trial, building: float) -> tuple[Outcome, float]:
        setup = self._setup_seconds(building)
        process = self._drawn(spec.candidate)
        left = None if spec.deadline_seconds is None else spec.deadline_seconds - setup
        if left is not None and left <= 0:
            return Failure(kind="timeout", message="its time was up"), spec.deadline_seconds or 0.0
        timed = replace(spec, deadline_seconds=left)
        played = play(process, timed, self._landscape.header, self._chance, is_started=True)
        if spec.candidate.is_compiled:
            self._processes.compiled.add(spec.candidate)
        return played.outcome, setup + played.seconds

    def _drawn(self, setting: Setting) -> Process:
        """Return a process whose seconds are those of its steps alone."""
        process = self._landscape.draw(setting, self._chance)
        found = process.outcome
        if isinstance(found, Failure):
            return replace(process, seconds=self._landscape.shape.step_seconds(setting))
        first_step, *others = process.warmup_step_seconds
        if setting in self._processes.compiled:
            first_step = max(found.step_seconds, RECOMPILING_SHARE * first_step)
        warm_up = (first_step, *others)
        found = replace(found, first_step_seconds=first_step, context_seconds=self._landscape.context_seconds)
        return replace(
            process, outcome=found, warmup_step_seconds=warm_up, seconds=sum(warm_up) + sum(found.raw_step_seconds)
        )

    def _check(self, spec: Check, building: float) -> tuple[CheckOutcome, float]:
        form, size = self._landscape, spec.candidate.batch_size
        fp32_step = form.step_seconds("fp32", size)
        passing = min(check_seconds(form, spec), getattr(spec, "aim_seconds", None) or math.inf)
        seconds = self._setup_seconds(building) + passing + spec.num_steps_before * fp32_step
        if self._host.is_command:  # a run of each precision, of which one has been loaded, or both together
            steps = NUM_FROZEN_STEPS * (fp32_step + form.step_seconds(spec.candidate.precision, size))
            num_further_starts = 0 if self._host.num_together > 1 else 1
            seconds = num_further_starts * self._host.load_seconds + 2 * form.context_seconds + steps
        if spec.deadline_seconds is not None and seconds > spec.deadline_seconds:
            return Failure(kind="timeout", message="its time was up"), spec.deadline_seconds
        found = well(spec)
        if isinstance(found, Fidelity):
            found = replace(found, fp32_step_seconds=fp32_step, num_steps_before=spec.num_steps_before)
            if found.precision in self._host.harmful:
                found = replace(found, verdict="unfaithful")
        return found, seconds


def search_on(form: ClosedForm, host: Host, seed: int, budget_seconds: float) -> Replayed | None:
    """Search a landscape on a host, from the start of the first process on.

    Returns None where the budget ended before the workload was described.
    """
    landscape, budget, chance = HostedForm(form, host), ReplayBudget(budget_seconds), random.Random(seed)
    processes = Processes(host, budget, chance)

    def backend(isolation: Isolation, environment: dict[str, str] | None = None) -> HostBackend:
        return HostBackend(landscape, processes, budget, chance, isolation, environment)

    searching = backend("forked" if host.can_fork and not host.is_command else "kept")
    searching.open()
    if budget.left() <= 0:
        return None
    header = landscape.header
    job_defaults = JobDefaults(
        hardware=header.hardware,
        memory_limit_bytes=header.memory_limit_bytes,
        environment=header.environment,
        seed=seed,
        description=header.description,
        ready_seconds=0.0 if host.is_command else host.start_seconds,
        are_trials_fresh=host.is_command,
        loads_together=host.has_standby and header.hardware.device != "cpu",
        num_together=host.num_together,
    )
    fresh = ConfirmationBackend(
        partial(backend, "kept"), searching.slots[0], shares_processes=job_defaults.shares_processes
    )
    return play_search(landscape, job_defaults, budget, searching, fresh, seed)
