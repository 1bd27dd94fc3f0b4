"""Backend of a training command: jobs that train run the command; other jobs, such as probes, run in another
process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from autotune_amp.command import measure
from autotune_amp.command.command import Command, RunRequest
from autotune_amp.command.frozen_pair import FrozenPair, PairingProblem, pair_steps
from autotune_amp.command.known_arguments import suggested_arguments
from autotune_amp.command.messages import Diagnosed, Gradient, Refused
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.running import CompletedRun
from autotune_amp.command.settable import (
    batches_in,
    deviation,
    ignored_precision,
    is_precision_possible,
    keeps_effective_batch_size,
    missing_placeholders,
    note_on_values_set,
    probing_setting,
    raise_if_data_parallel,
    unsettable,
)
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import BudgetTooSmallError, DeviceError, WorkloadError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.job import Deadlines, Job
from autotune_amp.core.outcome import Description, Failure, Fidelity, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count
from autotune_amp.processes.local import Ability, CompletedHandle, Handle, OpenResult, Slot, WorkloadBackend
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.program import temporary_folder
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS, Check, Describe, ProbeJob, Trial, measurement_limit_seconds

# Gradients to compare in a fidelity check; skips of a GradScaler before them: from 2**16 it finds a scale of 2**8;
# entries of each gradient that are written, which bounds the files to 8 MB.
NUM_FROZEN_STEPS, MAX_SKIPS, MAX_FROZEN_ENTRIES = 6, 8, 2_000_000
# A search needs at least today's run, a run that checks the placeholders, and one trial; a search that confirms its
# choice in three rounds needs about twelve runs.
MIN_NUM_RUNS, NUM_RUNS_OF_A_CONFIRMED_SEARCH = 3, 12
# Time limit of the run in another precision: a share of the time left (a first compilation is slow), or a multiple of
# the time of today's run, if longer. bf16 on a CPU without bf16 instructions may take 100 times as long.
FOLLOWING_SHARE, FOLLOWING_TIMES = 0.5, 2.0
MIN_NUM_STEPS = NUM_WARMUP_STEPS + 2 * measure.MIN_NUM_INTERVALS
MIN_NUM_DIAGNOSED_STEPS = 12  # warm-up, one step before the profiled ones, at most seven of these, one to count FLOPs
PAUSE_SECONDS = (
    60.0  # least deadline of a step: it may include an evaluation, a checkpoint or the start of loader workers
)
NOTES = (
    "Measured on the command's first steps: time and memory of later steps, longer samples, evaluations and "
    "checkpoints are not known.",
    "Fidelity is judged by gradients at the command's first weights, not by longer training.",
)
NOTE_FP16 = "In fp16 the command's own loss scale is used."
NOTE_SHELL_SCRIPT = (
    "Files that a shell script itself writes or removes (rm, tee, >) are not observed, and existing files are not "
    "protected from it."
)
NOTE_BATCH_OF_RANK = "Batch sizes are those of each rank."
NOTE_RANKS = (
    "Each rank is assumed to train on its own samples. With tensor parallelism, where ranks share them, samples are "
    "counted once for each rank, which changes no comparison."
)
NOTE_KEPT_TOTAL = (
    "The script itself accumulates to {0} samples in an optimizer step{1}, both at batch size {2} and at {3}: every "
    "batch size keeps the effective batch size."
)
NOTE_DIVIDED_BATCH = "The ranks divide {batch_size} among them: batch sizes are those of all ranks together."
NOTE_ASSUMED_BATCH_SIZE = (
    "Today's batch size is not in the command: {0} is assumed. Write {{batch_size=N}} to name yours."
)
NOTE_SECOND_DIM = (
    "Samples are counted along the second dimension of the model's inputs, whose size is the requested batch size."
)


class CommandBackend(WorkloadBackend):
    """Backend that runs a `Command` once for each trial, with its setting. Jobs that do not train go to `local`."""

    def __init__(
        self, command: Command, local: WorkloadBackend, watcher: Watcher, environment: dict[str, str] | None = None
    ) -> None:
        self._command = command
        self._local = local
        self._watcher = watcher
        self._environment = environment
        # Runs made by `_describe`, which also serve as trials of their settings, and the command line of that time.
        self._reusable_runs: dict[Setting, tuple[CommandTemplate, CompletedRun]] = {}

    @property
    def abilities(self) -> frozenset[Ability]:
        """Return the abilities: fidelity, judged by gradients in two precisions at the same weights (`FrozenPair`)."""
        return frozenset({"fidelity"})

    @property
    def num_together(self) -> int:
        """Return how many runs can load at the same time, 1 before today's run; see `LoadingBackend`."""
        return self._command.num_together

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

    def submit(self, job: Job[Any], slot: Slot | None = None) -> Handle[Any]:  # noqa: ARG002 - there is one slot
        """Run the command if the job trains or examines training steps, else pass the job to the local backend; return
        its handle. See `Backend`.
        """
        if isinstance(job, ProbeJob):
            return CompletedHandle(self._probe(job))
        if isinstance(job, Describe):
            return CompletedHandle(self._describe(job))
        if isinstance(job, Check):
            return CompletedHandle(self._check(job))
        if isinstance(job, Trial):
            return CompletedHandle(self._measure(job))
        if job.command_work is not None:
            return CompletedHandle(self._diagnose(job))
        return self._local.submit(job)

    def load_together(self, jobs: Sequence[Trial], limit_seconds: float = math.inf) -> None:
        """Start the runs of these trials, which wait to train until they are submitted; see `LoadingBackend`.

        Nothing is started if the run of the first was made by `_describe`; the others are loaded with a later trial.
        """
        if jobs and self._reusable_run(jobs[0]) is not None:
            return
        requests = [self._request_of(trial) for trial in jobs if self._reusable_run(trial) is None]
        self._command.load_together(requests, self._watcher, limit_seconds)

    def share_build(self, job: Job[Any], deadline_seconds: float) -> str | None:  # noqa: ARG002 - Backend's signature
        """Return the reason why no build is shared; see `Backend`."""
        return "a command builds its model itself"

    def keep(self) -> None:
        """Do nothing: no process is forked for trials, so there is none to keep. See `WorkloadBackend`."""

    def close(self) -> None:
        """End the process that runs probes."""
        self._local.close()

    def _probe(self, job: ProbeJob) -> Hardware | Failure:
        """Probe the device. If it was requested by its number, all runs of the command see no other GPU. Raises
        `DeviceError` if GPUs of its kind cannot be hidden from the command, which trains on the first.
        """
        hardware = self._local.submit(job).result()
        name, _, number = job.device.partition(":")
        if isinstance(hardware, Hardware) and number:
            if name == "cuda" and hardware.identity.uuid is not None:
                self._command.environment = Slot(hardware.device, uuid=hardware.identity.uuid).environment
            elif int(number):
                raise DeviceError(
                    f"A command cannot be made to train on {job.device}: other GPUs can be hidden from it only where "
                    "CUDA names them by UUID.",
                    f"Hide them yourself, by HIP_VISIBLE_DEVICES or ZE_AFFINITY_MASK, and give --device {name}.",
                )
        return hardware

    def _describe(self, job: Describe) -> Description | Failure:
        """Run the unchanged command, then check in another run whether other values reach the training; return the
        description of the command.
        """
        command, began = self._command, time.monotonic()
        assumed = {"precision": "fp32", "batch_size": job.baseline_batch_size or 1}
        today = Setting(**{**assumed, **command.line.today_values})
        is_assumed = "batch_size" in command.line.placeholders and "batch_size" not in command.line.today_values
        first = self._observe(today, job, job.deadlines, began=began)
        if isinstance(first, Failure) and first.is_loading:
            raise WorkloadError(
                f"No optimizer step of torch was observed in the command: {first.message}.",
                "Give a command that trains with a class of torch.optim. If it only starts slowly, give a larger "
                "--budget.",
            )
        if isinstance(first, Failure):
            return first
        raise_if_data_parallel(first[0])
        rank, completed = self._choose_sample_counting(today, first, job)
        self._require_device(job.device, rank)
        loader = measure.training_loader(rank)
        least, most = measure.passes_per_step(rank) or (1.0, 1.0)
        per_step = command.num_sharing * (measure.samples_per_step(rank) or 1) if least == most else 0
        if "batch_size" not in command.line.placeholders:
            batch_size = measure.batch_size(rank)
            # Where the script's own batches vary, they are counted, not their samples.
            counts_batches = "batch_size" in command.unsettable and least == most
            num_batches = round(least) if counts_batches else batches_in(per_step, batch_size)
            today = replace(today, batch_size=batch_size, accumulation_steps=num_batches)
        elif "accumulation_steps" not in command.line.placeholders:
            today = replace(today, accumulation_steps=batches_in(per_step, today.batch_size))
        if "precision" not in command.line.placeholders:
            today = replace(today, precision=measure.todays_precision(rank))
        command.unsettable = unsettable_values = unsettable(command.line, rank)
        self._raise_if_ignored(today, rank)
        command.today, command.maker = today, None if loader is None else loader.maker
        description = measure.description(rank, command.line.name, today, completed.began, command.num_sharing)
        self._reusable_runs[today] = command.line, completed
        other = probing_setting(
            today, unsettable_values, is_batch_free=job.is_batch_free, num_sharing=command.num_sharing
        )
        failed_values: dict[str, str] = {}
        notes: list[str] = []
        if other is not None:
            failed_values, other, followed = self._check_values_reach_training(other, today, rank, job, began)
            unsettable_values |= failed_values
            notes = note_on_values_set(followed.sets)
            if measure.weights_of(followed) != measure.weights_of(rank):  # the script converts its weights
                description = replace(description, weights="fp32")
            on_each = " on each rank" if rank.world > 1 else ""
            if "accumulation_steps" in unsettable_values and keeps_effective_batch_size(today, rank, other, followed):
                notes.append(
                    NOTE_KEPT_TOTAL.format(today.effective_batch_size, on_each, other.batch_size, today.batch_size)
                )
                self._keep_effective_batch_size(other, today)
        return replace(
            description,
            keeps_effective_batch_size=command.line.keeps_effective_batch_size,
            argument_values=command.line.argument_values,
            missing_placeholders=missing_placeholders(
                command.line, today, None if loader is None else loader.num_workers, unsettable_values
            ),
            suggestions=suggested_arguments(command.line, rank.switches),
            num_workers=loader.num_workers if loader and "num_workers" in command.line.placeholders else None,
            unsettable=unsettable_values,
            notes=(
                *(
                    f"{each} is not tried: {reason.rstrip('.')}. If that can be fixed, search again."
                    for each, reason in failed_values.items()
                    if each != "batch_size"
                ),
                *notes,
                *NOTES,
                *([] if "fp16" in unsettable_values else [NOTE_FP16]),
                *(
                    [NOTE_DIVIDED_BATCH if command.num_sharing > 1 else NOTE_BATCH_OF_RANK, NOTE_RANKS]
                    if rank.world > 1
                    else []
                ),
                *([NOTE_SECOND_DIM] if command.sample_dim == 1 else []),
                *([NOTE_ASSUMED_BATCH_SIZE.format(today.batch_size)] if is_assumed else []),
                *(
                    [NOTE_SHELL_SCRIPT]
                    if any(word in ("bash", "sh", "zsh") for word in command.line.arguments[:2])
                    else []
                ),
            ),
            loader=command.maker,
            sample_dim=command.sample_dim,
            check_batch_size=today.batch_size,
        )

    def _observe(
        self, setting: Setting, job: Describe, deadlines: Deadlines, began: float | None = None
    ) -> tuple[Rank, CompletedRun] | Failure:
        """Run the command with `setting` until its steps are measured; return the slowest rank and the run, or the
        failure.

        Raises `BudgetTooSmallError` once the steps show that a search that started at `began` has too little time, and
        `WorkloadError` if the command ends after too few steps or is about to change existing files: both would happen
        with any setting.
        """
        as_trial = Trial(
            candidate=setting,
            device=job.device,
            measure_seconds=measurement_limit_seconds(job.deadline_seconds or math.inf),
        )
        run_began = time.monotonic()

        def is_enough(events: RunEvents) -> bool:
            if began is not None:
                self._require_time(job, events, run_began, began)
            return measure.is_enough(events, as_trial, run_began)

        request = RunRequest.of(setting, environment=self._environment, counts_flops=began is not None)
        completed = self._command.run(request, deadlines, is_enough, Watcher())
        if isinstance(completed.verdict, Failure) and completed.events.first(Refused) is not None:
            raise _stopped_error(completed.verdict)
        slowest, num_steps = measure.slowest_rank(completed.events), completed.events.num_steps
        has_failed = isinstance(completed.verdict, Failure) and completed.verdict.kind != "workload_error"
        as_setting = "" if began is not None else f", run as {setting},"
        if slowest is None and num_steps and completed.state.status == 0 and not has_failed:
            raise WorkloadError(
                f"The command{as_setting} ended by itself after {count(num_steps, 'optimizer step')}, too few to "
                "measure.",
                f"Use more epochs, steps or data for the search: {MIN_NUM_STEPS} optimizer steps or more.",
            )
        if isinstance(completed.verdict, Failure):
            return completed.verdict
        if slowest is None:
            return Failure(kind="workload_error", message=f"it ended after {num_steps} steps, too few to measure")
        return slowest[0], completed

    def _choose_sample_counting(
        self, today: Setting, first: tuple[Rank, CompletedRun], job: Describe
    ) -> tuple[Rank, CompletedRun]:
        """Determine how samples are counted, and set it on the command; return the rank and the run to use.

        If the observed batch size differs from the requested one, either the ranks divide it among them, or the samples
        are along the second dimension of the model's inputs, as in recurrent models; for that the command is run again.
        The case that gives the requested batch size is chosen.
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
        return deviation(
            command.line,
            setting,
            rank,
            shares,
            is_accumulation_own="accumulation_steps" in command.unsettable,
            is_batch_size_own="batch_size" in command.unsettable,
        )

    def _keep_effective_batch_size(self, other: Setting, today: Setting) -> None:
        """Record that the script itself keeps today's effective batch size at every batch size, as in the run of
        `other`.
        """
        command = self._command
        del command.unsettable["accumulation_steps"]
        line = replace(command.line, keeps_effective_batch_size=True)
        steps = batches_in(today.effective_batch_size, other.batch_size)
        runs = [
            (today, self._reusable_runs.pop(today)),
            (replace(other, accumulation_steps=steps), self._reusable_runs.pop(other)),
        ]
        self._reusable_runs |= {setting: (line, ran) for setting, (_, ran) in runs}
        command.line = line

    def _check_values_reach_training(
        self, other: Setting, today: Setting, first: Rank, job: Describe, began: float
    ) -> tuple[dict[str, str], Setting, Rank]:
        """Run the command with another batch size and precision, and check that the observed steps used both. If the
        run fails, try the other precision alone, then the other batch size alone.

        Return the reasons by precision or dimension that the command cannot run with, the setting that it used, and the
        rank of that run; `first` is the rank of today's run. Values set from outside without effect are among the
        reasons. Raises `WorkloadError` if placeholders have no effect, or if the run fails and another batch size is
        required, and `BudgetTooSmallError` if the time is up.
        """

        def seconds_left() -> float:
            return math.inf if job.deadline_seconds is None else job.deadline_seconds - (time.monotonic() - began)

        def run(setting: Setting) -> Rank | Failure:
            if setting == today:
                return first
            seconds = seconds_left()
            if setting.precision != today.precision:
                patience = max(FOLLOWING_SHARE * seconds, FOLLOWING_TIMES * (time.monotonic() - began))
                seconds = min(seconds, patience)
            result = self._observe(setting, job, Deadlines(whole_seconds=None if seconds == math.inf else seconds))
            if isinstance(result, Failure):
                return result
            self._reusable_runs[setting] = self._command.line, result[1]
            return result[0]

        def precision_problem(setting: Setting, result: Rank | Failure) -> str | None:
            if setting.precision == today.precision:
                return None
            return self._reason_without_precision(setting, result, today, first, has_time=seconds_left() > 0)

        failed_values: dict[str, str] = {}
        result = run(other)
        is_batch_size_optional = other.batch_size != today.batch_size and not job.is_batch_free
        if isinstance(result, Failure) and is_batch_size_optional and seconds_left() > 0:
            failure, has_other_precision = result, other.precision != today.precision
            precision_only = replace(other, batch_size=today.batch_size) if has_other_precision else today
            result = run(precision_only)
            if precision_problem(precision_only, result) is None:
                other, failed_values["batch_size"] = precision_only, _failure_at(other, failure)
        reason = precision_problem(other, result)
        if reason is not None:
            failed_values[other.precision] = reason
            other = replace(other, precision=today.precision)
            result = run(other)
            if isinstance(result, Failure) and is_batch_size_optional and seconds_left() > 0:
                failed_values["batch_size"] = _failure_at(other, result)
                other, result = today, first
        suspects = ["accumulation_steps", "batch_size"]
        if isinstance(result, Rank) and measure.batch_sizes(result) == measure.batch_sizes(first):
            suspects.reverse()
        for name in suspects:
            problem = None if isinstance(result, Failure) else self._deviation(other, result)
            if problem is not None and name in self._command.line.outside(other, today):
                failed_values[name] = f"it was set without a placeholder, but {problem.message}"
                other = replace(other, **{name: getattr(today, name)})
                result = run(other)
        if isinstance(result, Failure):
            if result.kind == "timeout" and job.deadline_seconds is not None:
                raise BudgetTooSmallError(
                    f"The command ran as {today}, and as {other} the {job.deadline_seconds:.0f} s of the budget were "
                    f"up: {result.message}.",
                    f"Give --budget {math.ceil(3 * job.deadline_seconds / 10) * 10} or more.",
                )
            raise WorkloadError(
                f"The command ran as {today}, and not as {other}: {result.message}.\n{result.details or ''}".rstrip(),
                "Check the arguments that the placeholders insert; --dry-run prints them.",
            )
        self._raise_if_ignored(other, result)
        ignored = ignored_precision(self._command.line, other, result, today, first)
        if ignored is not None:
            raise _ignored_value_error(ignored)
        return failed_values, other, result

    def _reason_without_precision(
        self, other: Setting, result: Rank | Failure, today: Setting, first: Rank, *, has_time: bool
    ) -> str | None:
        """Return why the precision of `other` cannot be set, from the result of a run with it. None if the run used it,
        if a placeholder requested it without effect (an error of the command), or if all time was up.
        """
        if isinstance(result, Failure) and result.kind == "timeout":
            return f"the command is too slow in it: {result.message}" if has_time else None
        if isinstance(result, Failure):
            return f"the command did not run in it: {result.message}"
        observed = measure.precision_of(result)
        if observed is None or "precision" in self._command.line.placeholders:
            return None
        is_used = is_precision_possible(other.precision, result)
        if is_used and not ignored_precision(self._command.line, other, result, today, first):
            return None
        return f"it was set without a placeholder, but the steps ran in {observed}"

    def _raise_if_ignored(self, setting: Setting, rank: Rank) -> None:
        problem = self._deviation(setting, rank)
        if problem is not None:
            raise _ignored_value_error(problem.message)

    def _require_device(self, device: str, rank: Rank) -> None:
        types = {each.partition(":")[0] for optimizer in rank.optimizers.values() for each in optimizer.devices}
        if device.partition(":")[0] not in types:
            raise WorkloadError(
                f"The command trains on {' and '.join(sorted(types))}, but the search is for {device}.",
                f"Give --device {min(types)}, or make the command use the device. FSDP2's CPUOffloadPolicy, by which "
                "all parameters stay on the CPU, is not supported.",
            )

    def _require_time(self, job: Describe, events: RunEvents, run_began: float, began: float) -> None:
        """Raise `BudgetTooSmallError` if a search would end without a result. It does nothing for jobs
        without a baseline batch size, which are no searches.
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
        completed = self._reusable_run(trial) or self._run(trial)
        self._reusable_runs.pop(trial.candidate, None)
        slowest = measure.slowest_rank(completed.events)
        is_paused = (
            isinstance(completed.verdict, Failure)
            and completed.verdict.kind == "timeout"
            and completed.events.world == 1
        )
        if isinstance(completed.verdict, Failure) and not (is_paused and slowest is not None):
            return completed.verdict
        measured = measure.measurement(completed.events, trial, completed.began, completed.state.memory_bytes)
        problem = None if slowest is None else self._deviation(trial.candidate, slowest[0])
        return measured if problem is None else problem

    def _reusable_run(self, trial: Trial) -> CompletedRun | None:
        """Return the earlier run of the trial's setting, if the trial would only repeat it; else None."""
        line, completed = self._reusable_runs.get(trial.candidate, (None, None))
        if (
            completed is None
            or trial.environment
            or trial.seed
            or trial.purpose != "search"
            or line != self._command.line
        ):
            return None
        limit_bytes = math.inf if trial.memory_limit_bytes is None else trial.memory_limit_bytes
        return completed if completed.state.memory_bytes <= limit_bytes else None

    def _run(self, trial: Trial) -> CompletedRun:
        began, deadlines = time.monotonic(), trial.deadlines
        if deadlines.step_seconds is not None:
            deadlines = replace(deadlines, step_seconds=max(PAUSE_SECONDS, deadlines.step_seconds))
        return self._command.run(
            self._request_of(trial),
            deadlines,
            lambda events: measure.is_enough(events, trial, began),
            self._watcher,
            trial.memory_limit_bytes if trial.device == "cpu" else None,
        )

    def _request_of(self, trial: Trial) -> RunRequest:
        environment = {**(self._environment or {}), **trial.environment}
        return RunRequest.of(
            trial.candidate,
            seed=trial.seed,
            environment=environment,
            round=trial.round,
            # Those of today's arguments are in the description.
            counts_flops=bool(trial.candidate.arguments) and trial.purpose != "confirm",
        )

    def _check(self, check: Check) -> Fidelity | Failure:
        """Judge the fidelity of a precision and arguments by gradients of two runs, with them and in fp32 with today's
        arguments, from the same weights and batches of today's size. Optimizer steps are replaced by recording the
        gradients.
        """
        began, losses = time.monotonic(), []
        gradients: list[list[Gradient]] = []
        today = self._command.today
        assert today is not None  # `_describe` has run before
        if check.candidate.pinned_modules:
            return check.unchecked("modules of a command cannot be pinned", "Use the setting without pinned modules.")
        if "fp32" in self._command.unsettable:
            reason = self._command.unsettable["fp32"]
            return check.unchecked(
                f"there is no fp32 run to compare it with: {reason}", "Make the command run in fp32 too."
            )
        with temporary_folder() as folder:
            requests = []
            for name, precision in (("low", check.candidate.precision), ("reference", "fp32")):
                (folder / name).mkdir()
                request = RunRequest.of(
                    replace(today, precision=precision, arguments=check.candidate.arguments if name == "low" else ()),
                    seed=check.seed,
                    environment=self._environment,
                    output=folder / name,
                    frozen={
                        "num_steps": NUM_FROZEN_STEPS + MAX_SKIPS,
                        "max_entries": MAX_FROZEN_ENTRIES,
                        "in_fp32": name == "reference",
                        "precision": check.candidate.precision,
                    },
                )
                requests.append(request)
            limit_seconds = math.inf if check.deadline_seconds is None else check.deadline_seconds
            num_recorded = NUM_FROZEN_STEPS  # how many steps a run records until it is ended
            try:
                self._command.load_together(requests, self._watcher, limit_seconds)
                for request in requests:
                    seconds_left = (
                        None if check.deadline_seconds is None else check.deadline_seconds - (time.monotonic() - began)
                    )
                    completed = self._command.run(
                        request,
                        Deadlines(whole_seconds=seconds_left),
                        lambda events, num=num_recorded: (  # type: ignore[misc]  # mypy cannot infer it
                            events.num_frozen_steps >= num or events.num_steps >= NUM_FROZEN_STEPS + MAX_SKIPS
                        ),
                        Watcher(),
                    )
                    if isinstance(completed.verdict, Failure):
                        return check.unchecked(completed.verdict)
                    recorded = completed.events.of(Gradient)
                    if not gradients:  # the reference run must reach the steps that a GradScaler did not skip
                        numbers = sorted({gradient.number for gradient in recorded})[:NUM_FROZEN_STEPS]
                        recorded = [gradient for gradient in recorded if gradient.number in numbers]
                        num_recorded = 1 + max(numbers, default=0)
                    gradients.append(recorded)
                    first = min(completed.events.ranks.values(), key=lambda rank: rank.rank)
                    requested = request.setting.precision
                    if not is_precision_possible(requested, first):
                        return check.unchecked(
                            f"the run that was to use {requested} used {measure.precision_of(first)}",
                            f"Make the command run in {requested} where that is requested.",
                        )
                    losses.append(
                        tuple(
                            _finite_or_zero(step.losses[-1])
                            for step in first.primary_steps[:NUM_FROZEN_STEPS]
                            if step.losses
                        )
                    )
            finally:
                self._command.load_together([], self._watcher)
            steps = pair_steps(*gradients, has_other_arguments=bool(check.candidate.arguments))
            if isinstance(steps, PairingProblem):
                return check.unchecked(*steps)
            judged: Fidelity | Failure = self._local.submit(
                FrozenPair(
                    device="cpu",
                    precision=check.candidate.precision,
                    label=check.candidate.labelled(["precision", "arguments"]),
                    batch_size=today.batch_size,
                    steps=steps,
                    losses=(losses[0], losses[1]),
                )
            ).result()
            return judged

    def _diagnose(self, job: Job[Any]) -> Any:
        """Run the command until rank 0 has done the job on its training steps, and return the result.

        The setting is that of the job's trial. A job without one, which compares nothing, runs with today's setting and
        its own batch size, if it has one, and without further warm-up after the first step. Return a `Failure` if the
        command fails or did not use the setting. Raises `WorkloadError` if it ends before, would change existing files,
        or if its Python cannot import this package.
        """
        trial: Trial | None = getattr(job, "trial", None)
        today: dict[str, Any] = {"precision": "fp32", "batch_size": 2, **self._command.line.today_values}
        setting = Setting(**{**today, "batch_size": getattr(job, "batch_size", None) or today["batch_size"]})
        diagnosis = {
            "kind": job.kind(),
            "fields": msgspec.to_builtins(job),
            "num_warmup_steps": 1 if trial is None else NUM_WARMUP_STEPS,
        }
        trace_file = getattr(job, "trace_file", None)  # written by the agent into its folder
        completed = self._command.run(
            RunRequest.of(
                setting if trial is None else trial.candidate,
                environment=self._environment,
                output=None if trace_file is None else Path(trace_file).with_suffix(""),
                diagnosis=diagnosis,
            ),
            job.deadlines,
            lambda events: events.first(Diagnosed) is not None,
            Watcher(),
            None if trial is None or job.device != "cpu" else trial.memory_limit_bytes,
        )
        diagnosed = completed.events.first(Diagnosed)
        if isinstance(completed.verdict, Failure):
            if completed.events.first(Refused) is not None:
                raise _stopped_error(completed.verdict)
            return completed.verdict
        if diagnosed is None:
            raise WorkloadError(
                f"The command ended by itself after {count(completed.events.num_steps, 'optimizer step')}, before its "
                "steps could be examined.",
                f"Use more epochs, steps or data: {MIN_NUM_DIAGNOSED_STEPS} optimizer steps or more.",
            )
        if diagnosed.result is None:
            raise WorkloadError(
                f"autotune_amp cannot be imported by the command's own Python, {diagnosed.python}: "
                f"{diagnosed.problem}.",
                f"Install it there too: `{diagnosed.python} -m pip install` with the folder or name that you installed "
                "here.",
            )
        rank = completed.events.ranks[diagnosed.pid]
        ignored = None if trial is None else self._deviation(trial.candidate, rank)
        return ignored or msgspec.json.decode(diagnosed.result, type=job.answer | Failure)


def _stopped_error(failure: Failure) -> WorkloadError:
    return WorkloadError(f"A trial was stopped: {failure.message}.", failure.details or "")


def _ignored_value_error(problem: str) -> WorkloadError:
    return WorkloadError(
        f"The command does not follow: {problem}.",
        "Put the placeholder where the script reads the value; --dry-run prints the command that is started.",
    )


def _failure_at(setting: Setting, failure: Failure) -> str:
    return f"at {setting.batch_size} the command failed: {failure.message}"


def _finite_or_zero(loss: float | str) -> float:
    """Return the loss, or 0 if it is not finite: the gradients are not finite then either, and are judged."""
    return loss if isinstance(loss, float) else 0.0
