"""The jobs of a search under its conditions: what every trial and check has in common, and what a trial may take."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Description, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.precision.modes import MODES
from autotune_amp.search.ledger import LOSS_SCALE, Ledger
from autotune_amp.search.run import Budget
from autotune_amp.search.space import HOPELESS
from autotune_amp.trial.jobs import Check, CheckKind, Trial

CUT_RATIO = 1.25  # median of five steps against the best: cuts equals 4 % of the time (studies/README.md)
SLOW_PRECISION_SHARE = 0.1  # of the budget, for a precision whose matrix products are hopeless
MIN_TRIAL_SECONDS = 0.5
DEADLINE_RATIO = 20.0  # a step so many times longer than the best throughput foretells is not waited for
MIN_STEP_DEADLINE_SECONDS = 2.0  # a busy machine stalls a step for hundreds of milliseconds
METERED_SECONDS, MAX_METERED_STEPS = 1.0, 1000  # an energy counter is updated every 100 ms at worst
ACCUMULATION_SHARE = 0.15  # of the budget, at most: a search without accumulation is better than none
NUM_TRIALS_FORESEEN = 16  # one trial's steps take at most this part of the search phase
WORKER_START_SECONDS = 10.0  # a worker that is not forked imports torch first


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What all jobs of one search have in common.

    `environment` are the recommended variables. A fresh process takes `ready_seconds` until it has imported the
    workload. `max_trials` are those of the whole search, None for any number. `like` is what was best for the same code
    asked for otherwise, None where nobody knows.
    """

    hardware: Hardware
    description: Description
    memory_limit_bytes: int
    torch_state: dict[str, Any] = {}
    environment: dict[str, str] = {}
    seed: int = 0
    ready_seconds: float = 0.0
    max_trials: int | None = None
    like: Setting | None = None
    min_trial_seconds: float = MIN_TRIAL_SECONDS

    @property
    def setup_seconds(self) -> float:
        """What a trial that builds its own model takes before its first step."""
        return self.description.build_seconds + self.description.context_seconds

    @property
    def start_seconds(self) -> float:
        """What a fresh process is foreseen to take before its first step."""
        return self.ready_seconds + self.setup_seconds

    @property
    def shares_processes(self) -> bool:
        """Whether the runs of a confirmation's round share a process.

        Not on a CPU, where the state of the heap is part of what is measured. On an accelerator the allocator's cache
        is emptied between them, and no variables are recommended that would set their environments apart.
        """
        return self.hardware.device != "cpu"

    @property
    def num_cpus(self) -> int:
        """The CPUs of one rank."""
        return max(1, self.hardware.identity.num_cpus // self.description.num_ranks)

    @property
    def may_add_workers(self) -> bool:
        """Whether more processes of the user's data loader can be tried."""
        num_workers = self.description.num_workers
        return num_workers is not None and num_workers < self.num_cpus

    def may_try(self, ledger: Ledger, left_seconds: float) -> bool:
        """Whether the time that is left and the number of trials allow another one."""
        if ledger.num_awaited and self.max_trials is not None:  # they are not for trying the baseline once more
            return False
        num_tried = ledger.num_awaited + sum(record.purpose == "search" for record in ledger.records)
        return left_seconds > self.min_trial_seconds and (self.max_trials is None or num_tried < self.max_trials)

    def trial(self, ledger: Ledger, setting: Setting, **fields: Any) -> Trial:
        """A trial of `setting`."""
        sizes = self.description.sample_sizes
        values: dict[str, Any] = {
            "hold_heap": bool(self.environment),
            "num_ranks": self.description.num_ranks,
            "has_unused_parameters": self.description.has_unused_parameters,
            "loss_scale": LOSS_SCALE if MODES[setting.precision].takes_scaler else None,
        }
        return Trial(
            candidate=setting,
            device=self.hardware.device,
            seed=self.seed,
            memory_limit_bytes=self.memory_limit_bytes,
            torch_state=self.torch_state,
            worst_samples=() if sizes is None else sizes.largest[: setting.batch_size],
            is_loss_sum=ledger.is_loss_sum,
            **(values | fields),
        )

    def check(self, what: CheckKind, setting: Setting, seconds: float) -> Check:
        """A check of `setting`, with its pins or for some that would heal it, within so many seconds."""
        return Check(
            what=what,
            candidate=setting,
            device=self.hardware.device,
            find_pins=not setting.pinned_modules,
            seed=self.seed,
            deadline_seconds=max(0.0, seconds),
            memory_limit_bytes=self.memory_limit_bytes,
            torch_state=self.torch_state,
            hold_heap=bool(self.environment),
        )

    def accumulation_check(self, ledger: Ledger, budget: Budget) -> Check:
        """The check of whether accumulated gradients equal those of the whole batch."""
        batch_size = min(ledger.space.check_batch_size, ledger.space.baseline.effective_batch_size)
        seconds = min(ACCUMULATION_SHARE * budget.seconds, budget.left_for_search())
        return self.check("accumulation", Setting(precision="fp32", batch_size=batch_size), seconds)

    def search_trial(self, ledger: Ledger, budget: Budget, setting: Setting, seconds: float) -> Trial:
        """A trial with its limits: what the best so far says a step may take, and the `seconds` left."""
        best = ledger.best
        if best is None:
            # Nothing is known of the step: two thirds of what is left, so that one that hangs leaves time for another.
            seconds = (2 * seconds + min(self.setup_seconds, seconds)) / 3
        elif is_hopeless(self.hardware, setting.precision):
            spent = sum(r.seconds for r in ledger.records if r.candidate.precision == setting.precision)
            seconds = min(seconds, SLOW_PRECISION_SHARE * budget.seconds - spent)
        limits: dict[str, Any] = {"measure_seconds": budget.seconds / NUM_TRIALS_FORESEEN}
        needs_energy = ledger.objective == "energy"
        if needs_energy:  # as long as a counter needs, however steady or slow the steps are
            limits["measure_seconds"] = min(METERED_SECONDS, limits["measure_seconds"])
            limits["num_steps"] = (MAX_METERED_STEPS, MAX_METERED_STEPS)
        trial = self.trial(ledger, setting, deadline_seconds=max(MIN_TRIAL_SECONDS, seconds), **limits)
        if best is None:
            return trial
        assert isinstance(best.outcome, Measurement)
        rate = best.outcome.samples_per_second / self.description.num_ranks
        first_step_seconds = best.outcome.first_step_seconds
        reported = setting.batch_size * trial.num_timed_micro_batches * trial.num_steps_per_report
        step_deadline = max(MIN_STEP_DEADLINE_SECONDS, DEADLINE_RATIO * reported / rate)
        if setting.num_workers or self.description.num_workers:  # unless they persist, every epoch starts them anew
            step_deadline += first_step_seconds + (WORKER_START_SECONDS if setting.num_workers else 0.0)
        growth = max(1.0, setting.batch_size / best.candidate.batch_size)
        return msgspec.structs.replace(
            trial,
            cut_step_seconds=None if needs_energy else CUT_RATIO * setting.effective_batch_size / rate,
            step_deadline_seconds=step_deadline,
            first_step_deadline_seconds=step_deadline + 3 * growth * first_step_seconds,
        )


def is_hopeless(hardware: Hardware, precision: Precision) -> bool:
    """Whether the probe found an emulated precision's matrix products far below fp32's."""
    capability, reference = hardware.precisions[precision], hardware.precisions.get("fp32")
    if capability.level != "emulated" or reference is None or reference.matmul_flops_per_second is None:
        return False
    return HOPELESS * (capability.matmul_flops_per_second or 0.0) < reference.matmul_flops_per_second
