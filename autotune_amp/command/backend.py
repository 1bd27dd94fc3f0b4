"""CommandBackend: runs a training command for each job that trains; other jobs run in a process of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from autotune_amp.command import measure
from autotune_amp.command.command import Command
from autotune_amp.command.frozen_pair import FrozenPair, Unpaired, pair
from autotune_amp.command.known_arguments import with_placeholders
from autotune_amp.command.messages import Gradient, Refused
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CompletedRun
from autotune_amp.command.settable import (
    batches_in,
    deviation,
    ignored_precision,
    keeps_effective_batch_size,
    probing_setting,
    set_from_outside,
    unsettable,
)
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import BudgetTooSmallError, WorkloadError
from autotune_amp.core.job import Deadlines, Job
from autotune_amp.core.outcome import Description, Failure, Fidelity, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count
from autotune_amp.processes.local import Ability, Completed, Handle, OpenResult, Slot, WorkloadBackend
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.program import temporary_folder
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS, Check, Describe, Trial, measure_seconds

NUM_FROZEN_STEPS, MAX_SKIPS = 6, 4
MAX_FROZEN_ENTRIES = 2_000_000
# A search needs at least today's run, a run that checks the placeholders, and a trial, else there is nothing to choose
# from; three rounds confirm a choice.
MIN_NUM_RUNS, NUM_RUNS_OF_A_CONFIRMED_SEARCH = 3, 12
# Time limit of a run in another precision: a share of the time left, which a first compilation needs, or a multiple of
# the time that today's run took, if that is longer. A CPU without bf16 takes a hundred times as long.
FOLLOWING_SHARE, FOLLOWING_TIMES = 0.5, 2.0
LEAST_STEPS = NUM_WARMUP_STEPS + 2 * measure.MIN_NUM_INTERVALS
PAUSE_SECONDS = 60.0  # an evaluation, a checkpoint or the start of loader workers is no hang
NOTES = (
    "Measured on the command's first steps: what later steps, longer samples, an evaluation or a checkpoint take in "
    "time and memory is not known.",
    "Fidelity is judged by gradients of the command's first weights, not by training on.",
)
OF_FP16 = "fp16's loss scale is the command's own."
OF_SHELLS = (
    "What a shell script itself writes or removes (rm, tee, >) cannot be seen, and is not kept from changing files."
)
OF_EACH_RANK = "Batch sizes are those of each rank."
OF_RANKS = (
    "Each rank is taken to train on samples of its own: where several share them (tensor parallel), samples are "
    "counted once for each, which changes no comparison."
)
OF_TOTAL = (
    "The script itself accumulates to {0} samples an optimizer step{1}, at batch {2} as at batch {3}: every batch size "
    "keeps the effective batch size."
)
OF_SHARING = "The ranks divide {batch_size} among them: batch sizes are those of all ranks together."
OF_ASSUMED = "{{batch_size}} does not say what is run today: {0} is taken for it. {{batch_size=N}} says yours."
OF_SECOND_DIM = (
    "Samples are counted along the second dimension of what enters the model, which is the batch size asked for."
)


class CommandBackend(WorkloadBackend):
    """Backend that runs a `Command` once for each trial, filled with its setting. Jobs that need no training go to
    `local`.
    """

    def __init__(
        self, command: Command, local: WorkloadBackend, watcher: Watcher, environment: dict[str, str] | None = None
    ) -> None:
        self._command = command
        self._local = local
        self._watcher = watcher
        self._environment = environment
        # Runs that a trial of the setting need not repeat, with the command as it was then.
        self._described: dict[Setting, tuple[CommandTemplate, CompletedRun]] = {}

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return the abilities: fidelity, judged by frozen pairs (gradients in two precisions, from the same
        weights).
        """
        return frozenset({"fidelity"})

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the slots of the local backend; see `Backend`."""
        return self._local.slots

    @property
    def is_build_shared(self) -> bool:
        """Whether trials share one built workload: never, since every run of the command builds its own."""
        return False

    def load(self, deadline_seconds: float) -> dict[str, Any]:
        """Start the process that runs probes; see `WorkloadBackend`."""
        return self._local.load(deadline_seconds)

    def open(self, device: str, num_threads: int | None, deadline_seconds: float) -> OpenResult:
        """Open the device; see `WorkloadBackend`. `ready_seconds` is 0: the description of a command includes the time
        until its first step.
        """
        return self._local.open(device, num_threads, deadline_seconds)._replace(why_not_forked=None, ready_seconds=0.0)

    def submit(self, job: Job[Any], slot: Slot | None = None) -> Handle[Any]:  # noqa: ARG002 - there is one
        """Run the command if the job trains, else pass the job to the local backend; return its handle. See
        `Backend`.
        """
        if isinstance(job, Describe):
            return Completed(self._describe(job))
        if isinstance(job, Check):
            return Completed(self._check(job))
        if isinstance(job, Trial):
            return Completed(self._measure(job))
        return self._local.submit(job)

    def share_build(self, job: Job[Any], deadline_seconds: float) -> str | None:  # noqa: ARG002 - Backend's signature
        """Return the reason why no build is shared; see `Backend`."""
        return "a command builds its model itself"

    def keep(self) -> None:
        """Do nothing: no process is forked, so none can be kept instead."""

    def close(self) -> None:
        """End the process that runs probes."""
        self._local.close()

    def _describe(self, job: Describe) -> Description | Failure:
        """Run the command as it is today, then check in another run whether it follows its placeholders; return its
        description.
        """
        command, began = self._command, time.monotonic()
        assumed = {"precision": "fp32", "batch_size": job.baseline_batch_size or 1}
        today = Setting(**{**assumed, **command.line.today_values})
        is_assumed = "batch_size" in command.line.placeholders and "batch_size" not in command.line.today_values
        first = self._observe(today, job, job.deadlines, began=began)
        if isinstance(first, Failure) and first.is_loading:
            raise WorkloadError(
                f"No training step of torch was seen in the command: {first.message}.",
                "Search a command that trains by a class of torch.optim; one that only starts slowly needs a larger "
                "--budget.",
            )
        if isinstance(first, Failure):
            return first
        rank, ran = self._of_samples(today, first, job)
        self._require_device(job.device, rank)
        loader = measure.training_loader(rank)
        least, most = measure.passes_per_step(rank) or (1.0, 1.0)
        per_step = command.num_sharing * (measure.samples_per_step(rank) or 1) if least == most else 0
        if "batch_size" not in command.line.placeholders:
            seen_size = measure.batch_size(rank)
            today = replace(today, batch_size=seen_size, accumulation_steps=batches_in(per_step, seen_size))
        elif "accumulation_steps" not in command.line.placeholders:
            today = replace(today, accumulation_steps=batches_in(per_step, today.batch_size))
        if "precision" not in command.line.placeholders:
            today = replace(today, precision=measure.todays_precision(rank))
        command.line, known = with_placeholders(command.line, rank.switches)
        command.unsettable = cannot = unsettable(command.line, rank)
        self._refuse_ignored(today, rank)
        command.today, command.maker = today, None if loader is None else loader.maker
        description = measure.description(rank, command.line.name, today, ran.began)
        self._described[today] = command.line, ran
        other = probing_setting(today, cannot, is_batch_free=job.is_batch_free)
        more: dict[str, str] = {}
        if other is not None:
            more, other, followed = self._follow(other, today, rank, job, began)
            cannot |= more
            known += set_from_outside(followed.sets)
            if measure.weights_of(followed) != measure.weights_of(rank):  # their dtype follows from the precision
                description = replace(description, weights="fp32")
            on_each = " on each rank" if rank.world > 1 else ""
            if "accumulation_steps" in cannot and keeps_effective_batch_size(today, rank, other, followed):
                known.append(OF_TOTAL.format(today.effective_batch_size, on_each, other.batch_size, today.batch_size))
                self._keep_effective_batch_size(other, today)
        return replace(
            description,
            keeps_effective_batch_size=command.line.keeps_effective_batch_size,
            num_workers=loader.num_workers if loader and "num_workers" in command.line.placeholders else None,
            unsettable=cannot,
            notes=(
                *(
                    f"{each} is not tried: {why.rstrip('.')}. If that can be fixed, search again."
                    for each, why in more.items()
                    if each != "batch_size"
                ),
                *known,
                *NOTES,
                *([] if "fp16" in cannot else [OF_FP16]),
                *([OF_SHARING if command.num_sharing > 1 else OF_EACH_RANK, OF_RANKS] if rank.world > 1 else []),
                *([OF_SECOND_DIM] if command.sample_dim == 1 else []),
                *([OF_ASSUMED.format(today.batch_size)] if is_assumed else []),
                *([OF_SHELLS] if any(word in ("bash", "sh", "zsh") for word in command.line.arguments[:2]) else []),
            ),
            loader=command.maker,
            sample_dim=command.sample_dim,
            check_batch_size=today.batch_size,
        )

    def _observe(
        self, setting: Setting, job: Describe, deadlines: Deadlines, began: float | None = None
    ) -> tuple[Rank, CompletedRun] | Failure:
        """Run the command as a trial of `setting` would; return the slowest rank and the run.

        Raises `BudgetTooSmallError` as soon as the steps show that a search that started at `began` has too little
        time, and `WorkloadError` if the command ends after too few steps, or would change files that were there before,
        as it would with any setting.
        """
        as_trial = Trial(
            candidate=setting, device=job.device, measure_seconds=measure_seconds(job.deadline_seconds or math.inf)
        )
        run_began = time.monotonic()

        def is_enough(events: RunEvents) -> bool:
            if began is not None:
                self._require_time(job, events, run_began, began)
            return measure.is_enough(events, as_trial, run_began)

        ran = self._command.run(setting, deadlines, is_enough, Watcher(), environment=self._environment)
        if isinstance(ran.verdict, Failure) and ran.events.first(Refused) is not None:
            raise WorkloadError(f"A trial was stopped: {ran.verdict.message}.", ran.verdict.details or "")
        found, num_steps = measure.slowest_rank(ran.events), ran.events.num_steps
        has_failed = isinstance(ran.verdict, Failure) and ran.verdict.kind != "workload_error"
        as_setting = "" if began is not None else f", run as {setting},"
        if found is None and num_steps and ran.state.status == 0 and not has_failed:
            raise WorkloadError(
                f"The command{as_setting} ended by itself after {count(num_steps, 'optimizer step')}, too few to "
                "measure.",
                f"Use more epochs, steps or data for the search: {LEAST_STEPS} optimizer steps or more, some seconds.",
            )
        if isinstance(ran.verdict, Failure):
            return ran.verdict
        if found is None:
            return Failure(kind="workload_error", message=f"it ended after {num_steps} steps, too few to measure")
        return found[0], ran

    def _of_samples(self, today: Setting, first: tuple[Rank, CompletedRun], job: Describe) -> tuple[Rank, CompletedRun]:
        """Return the rank and the run to count samples by, and set on the command how it counts them.

        If the batch size that was asked for does not show, either the ranks divide it among them, or the model takes
        its samples along the second dimension, as recurrent models do; then the command is observed again. Nothing but
        the batch size that was asked for tells these cases apart.
        """
        command, rank = self._command, first[0]
        command.unsettable = unsettable(command.line, rank)
        if "batch_size" not in command.line.placeholders or self._deviation(today, rank) is None:
            return first
        if self._deviation(today, rank, rank.world) is None:
            command.num_sharing = rank.world
        elif measure.training_loader(rank) is None:
            command.sample_dim = 1
            again = self._observe(today, job, job.deadlines)
            if not isinstance(again, Failure) and self._deviation(today, again[0]) is None:
                return again
            command.sample_dim = 0
        return first

    def _deviation(self, setting: Setting, rank: Rank, num_sharing: int | None = None) -> Failure | None:
        command, shares = self._command, num_sharing or self._command.num_sharing
        is_own = "accumulation_steps" in command.unsettable
        return deviation(command.line, setting, rank, shares, is_accumulation_own=is_own)

    def _keep_effective_batch_size(self, other: Setting, today: Setting) -> None:
        """Mark the script as accumulating to today's total at every batch size, as it did in a run of `other`."""
        command = self._command
        del command.unsettable["accumulation_steps"]
        line = replace(command.line, keeps_effective_batch_size=True)
        steps = batches_in(today.effective_batch_size, other.batch_size)
        runs = [
            (today, self._described.pop(today)),
            (replace(other, accumulation_steps=steps), self._described.pop(other)),
        ]
        self._described |= {setting: (line, ran) for setting, (_, ran) in runs}
        command.line = line

    def _follow(
        self, other: Setting, today: Setting, first: Rank, job: Describe, began: float
    ) -> tuple[dict[str, str], Setting, Rank]:
        """Run the command with another batch size and precision, and check that both show in the observed steps. If it
        fails, run it with the other precision alone, then with the other batch size alone.

        Return the precisions and dimensions that the command cannot run with (and why), the setting that it followed,
        and the rank observed with that; `first` is the rank of today's run. Raises `WorkloadError` if today's values
        show still, or if another batch size is needed and fails, and `BudgetTooSmallError` if time is up.
        """

        def left() -> float:
            return math.inf if job.deadline_seconds is None else job.deadline_seconds - (time.monotonic() - began)

        def run(setting: Setting) -> Rank | Failure:
            if setting == today:
                return first
            seconds = left()
            if setting.precision != today.precision:
                patience = max(FOLLOWING_SHARE * seconds, FOLLOWING_TIMES * (time.monotonic() - began))
                seconds = min(seconds, patience)
            found = self._observe(setting, job, Deadlines(whole_seconds=None if seconds == math.inf else seconds))
            if isinstance(found, Failure):
                return found
            self._described[setting] = self._command.line, found[1]
            return found[0]

        def precision_problem(setting: Setting, found: Rank | Failure) -> str | None:
            if setting.precision == today.precision:
                return None
            return self._why_not(setting, found, today, first, has_time=left() > 0)

        cannot: dict[str, str] = {}
        found = run(other)
        can_do_without = other.batch_size != today.batch_size and not job.is_batch_free
        if isinstance(found, Failure) and can_do_without and left() > 0:
            failure, alone = found, replace(other, batch_size=today.batch_size)
            found = run(alone)
            if precision_problem(alone, found) is None:
                other, cannot["batch_size"] = alone, _failed_at(other, failure)
        why = precision_problem(other, found)
        if why is not None:
            cannot[other.precision] = why
            other = replace(other, precision=today.precision)
            found = run(other)
            if isinstance(found, Failure) and can_do_without and left() > 0:
                cannot["batch_size"] = _failed_at(other, found)
                other, found = today, first
        if isinstance(found, Failure):
            if found.kind == "timeout" and job.deadline_seconds is not None:
                raise BudgetTooSmallError(
                    f"The command ran as {today}, and as {other} the {job.deadline_seconds:.0f} s of the budget were "
                    f"up: {found.message}.",
                    f"Give --budget {math.ceil(3 * job.deadline_seconds / 10) * 10} or more.",
                )
            raise WorkloadError(
                f"The command ran as {today}, and not as {other}: {found.message}.\n{found.details or ''}".rstrip(),
                "See that its arguments are what the placeholders put there; --dry-run prints them.",
            )
        self._refuse_ignored(other, found)
        ignored = ignored_precision(self._command.line, other, found, today, first)
        if ignored is not None:
            raise _ignoring(ignored)
        return cannot, other, found

    def _why_not(
        self, other: Setting, found: Rank | Failure, today: Setting, first: Rank, *, has_time: bool
    ) -> str | None:
        """Return why the precision of `other` cannot be set, from a run that asked for it. None if the run was in that
        precision, if a placeholder asked for it and it did not follow, or if all time was up.
        """
        if isinstance(found, Failure) and found.kind == "timeout":
            return f"the command is too slow in it: {found.message}" if has_time else None
        if isinstance(found, Failure):
            return f"the command did not run in it: {found.message}"
        seen = measure.precision_of(found)
        if seen is None or "precision" in self._command.line.placeholders:
            return None
        if seen == other.precision and not ignored_precision(self._command.line, other, found, today, first):
            return None
        return f"it was set from outside, and the steps ran in {seen}"

    def _refuse_ignored(self, setting: Setting, rank: Rank) -> None:
        problem = self._deviation(setting, rank)
        if problem is not None:
            raise _ignoring(problem.message)

    def _require_device(self, device: str, rank: Rank) -> None:
        types = {each.partition(":")[0] for optimizer in rank.optimizers.values() for each in optimizer.devices}
        if device.partition(":")[0] not in types:
            raise WorkloadError(
                f"The command trains on {' and '.join(sorted(types))}, and {device} is what is searched.",
                f"Give --device {min(types)}, or see that the command uses the device.",
            )

    def _require_time(self, job: Describe, events: RunEvents, run_began: float, began: float) -> None:
        """Raise `BudgetTooSmallError` if a search (a job that gives a baseline batch size) would end without
        a result.
        """
        seconds = measure.predicted_measurement_seconds(events, run_began)
        if job.deadline_seconds is None or job.baseline_batch_size is None or seconds is None:
            return
        used_seconds = run_began - began
        if MIN_NUM_RUNS * seconds < job.deadline_seconds - used_seconds:
            return
        needed = NUM_RUNS_OF_A_CONFIRMED_SEARCH * seconds + used_seconds
        raise BudgetTooSmallError(
            f"A run of the command takes {seconds:.0f} s until its steps are measured, and a search starts it "
            f"{MIN_NUM_RUNS} times at least: more than the {job.deadline_seconds:.0f} s that are left.",
            f"Give --budget {math.ceil(needed / 10) * 10} or more.",
        )

    def _measure(self, trial: Trial) -> Measurement | Failure:
        ran = self._described_run(trial) or self._run(trial)
        found = measure.slowest_rank(ran.events)
        is_paused = isinstance(ran.verdict, Failure) and ran.verdict.kind == "timeout" and ran.events.world == 1
        if isinstance(ran.verdict, Failure) and not (is_paused and found is not None):
            return ran.verdict
        measured = measure.measurement(ran.events, trial, ran.began, ran.state.memory_bytes)
        problem = None if found is None else self._deviation(trial.candidate, found[0])
        return measured if problem is None else problem

    def _described_run(self, trial: Trial) -> CompletedRun | None:
        """Return the run that described the command, if the trial would repeat it and is the first to do so;
        else None.
        """
        line, ran = self._described.pop(trial.candidate, (None, None))
        if ran is None or trial.environment or trial.seed or trial.purpose != "search" or line != self._command.line:
            return None
        limit_bytes = math.inf if trial.memory_limit_bytes is None else trial.memory_limit_bytes
        return ran if ran.state.memory_bytes <= limit_bytes else None

    def _run(self, trial: Trial) -> CompletedRun:
        began, deadlines = time.monotonic(), trial.deadlines
        if deadlines.step_seconds is not None:
            deadlines = replace(deadlines, step_seconds=max(PAUSE_SECONDS, deadlines.step_seconds))
        return self._command.run(
            trial.candidate,
            deadlines,
            lambda events: measure.is_enough(events, trial, began),
            self._watcher,
            seed=trial.seed,
            environment={**(self._environment or {}), **trial.environment},
            memory_limit_bytes=trial.memory_limit_bytes if trial.device == "cpu" else None,
        )

    def _check(self, check: Check) -> Fidelity | Failure:
        """Judge the fidelity of a precision by frozen runs in it and in fp32, with the same weights and batches of
        today's size. No optimizer step is taken.
        """
        began, gradients, losses = time.monotonic(), [], []
        today = self._command.today
        assert today is not None  # a search describes before it checks
        if check.candidate.pinned_modules:
            return check.unchecked("no modules of a command can be pinned", "Leave the pins out.")
        if "fp32" in self._command.unsettable:
            why = self._command.unsettable["fp32"]
            return check.unchecked(f"there is no fp32 to hold it against: {why}", "Let the command run in fp32 too.")
        with temporary_folder() as folder:
            for name, precision in (("low", check.candidate.precision), ("reference", "fp32")):
                left = None if check.deadline_seconds is None else check.deadline_seconds - (time.monotonic() - began)
                output = folder / name
                output.mkdir()
                ran = self._command.run(
                    replace(today, precision=precision),
                    Deadlines(whole_seconds=left),
                    # The first steps of a GradScaler may be skipped, and give no gradients.
                    lambda events: max(events.num_frozen_steps, events.num_steps - MAX_SKIPS) >= NUM_FROZEN_STEPS,
                    Watcher(),
                    seed=check.seed,
                    environment=self._environment,
                    output=output,
                    frozen={
                        "num_steps": NUM_FROZEN_STEPS,
                        "max_entries": MAX_FROZEN_ENTRIES,
                        "in_fp32": name == "reference",
                    },
                )
                if isinstance(ran.verdict, Failure):
                    return check.unchecked(ran.verdict)
                gradients.append(ran.events.of(Gradient))
                first = min(ran.events.ranks.values(), key=lambda rank: rank.rank)
                losses.append(
                    tuple(_finite(step.losses[-1]) for step in first.primary_steps[:NUM_FROZEN_STEPS] if step.losses)
                )
            steps = pair(*gradients)
            if isinstance(steps, Unpaired):
                return check.unchecked(*steps)
            judged: Fidelity | Failure = self._local.submit(
                FrozenPair(
                    device="cpu",
                    precision=check.candidate.precision,
                    batch_size=today.batch_size,
                    steps=steps,
                    losses=(losses[0], losses[1]),
                )
            ).result()
            return judged


def _ignoring(problem: str) -> WorkloadError:
    return WorkloadError(
        f"The command does not follow: {problem}.",
        "Put the placeholder where the script takes the value from; --dry-run prints what is started.",
    )


def _failed_at(setting: Setting, failure: Failure) -> str:
    return f"at {setting.batch_size} the command failed: {failure.message}"


def _finite(loss: float | str) -> float:
    """Return the loss, or 0 if it is not finite; its gradients show that too."""
    return loss if isinstance(loss, float) else 0.0
