"""Check of a training command in its own process: records one of its steps and reads the files of its program."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from autotune_amp.diagnostics.check import reading
from autotune_amp.diagnostics.check.child import weight_findings
from autotune_amp.diagnostics.check.findings import CheckReport, WorkloadCheckJob, make_finding, merged_and_sorted
from autotune_amp.diagnostics.check.judging import AUTOCAST_DTYPE
from autotune_amp.diagnostics.check.recording import StepRecorder, location_of_error
from autotune_amp.precision import rules
from autotune_amp.trial import failures
from autotune_amp.trial.observed_steps import ObservedTraining, StepEvent

NOTE_OWN_REGIONS = "Autocast was assumed in the script's own autocast regions."
NOTE_FORWARD = (
    "Autocast was assumed from the first forward pass to the backward pass: the script has no autocast regions today."
)
NOTE_FIRST_RANK = "The step of rank 0 of {0} was recorded."


def check_command(training: ObservedTraining, job: WorkloadCheckJob) -> Generator[StepEvent, None, CheckReport]:
    """Record the next step of the script without taking it, read the program's source files, and return the report.

    Weights in half precision are cast to fp32 in place.
    """
    sources = reading.parse_program()
    findings = [finding for source in sources for finding in reading.source_findings(source)]
    findings += weight_findings(training.model, job.autocast_device, sources, ())
    has_regions = any(not region.endswith(":off") for region in training.regions)
    recorder = _CommandRecorder(training, job, has_regions=has_regions)
    sizes: list[int] = []

    def before_forward(batch: Sequence[Tensor]) -> None:
        sizes.append(training.num_samples(batch))
        recorder.enter_assumed_autocast()

    def before_backward(loss: Tensor) -> None:
        recorder.check_loss(loss)
        recorder.leave_assumed_autocast()

    problem = None
    try:
        with (
            recorder.recording(),
            training.calling(before_forward=before_forward, before_backward=before_backward),
        ):
            yield "before step"
    except Exception as error:  # a step before this one worked without recording
        problem = failures.failure_from_exception(error).message
        if (rule := rules.rule_of(problem)) is not None:
            findings.append(make_finding(rule, location_of_error(error)))
    notes = [NOTE_OWN_REGIONS if recorder.uses_own_regions else NOTE_FORWARD]
    if training.num_ranks > 1:
        notes.append(NOTE_FIRST_RANK.format(training.num_ranks))
    return CheckReport(
        workload="",  # the parent knows its name
        device=job.autocast_device,
        batch_size=max(sizes, default=0),
        findings=merged_and_sorted([*findings, *recorder.findings]),
        num_calls=recorder.num_calls,
        num_modules=len(recorder.modules_run),
        files=tuple(source.file for source in sources),
        problem=problem,
        recorded_on=training.device.type,
        notes=tuple(notes),
    )


class _CommandRecorder(StepRecorder):
    """Recorder of a command's step, which assumes that its autocast is on.

    If the script enters enabled autocast regions today (`has_regions`), these decide where autocast is on. If it enters
    only disabled ones outside of its modules, as with a flag for mixed precision, these do, as if enabled. Otherwise it
    is on from the first forward pass to the backward pass. `uses_own_regions` tells whether regions of the script have
    decided.
    """

    def __init__(self, training: ObservedTraining, job: WorkloadCheckJob, *, has_regions: bool) -> None:
        super().__init__(training.model, job.autocast_device)
        self.uses_own_regions = self._has_regions = has_regions
        self._assumed = ExitStack()

    def enter_assumed_autocast(self) -> None:
        """Assume that autocast is on, unless the script has regions of its own or it is on already."""
        if not self._has_regions and len(self._autocast_dtypes) == 1:
            self._assumed.enter_context(self.autocast())

    def leave_assumed_autocast(self) -> None:
        """End the assumed autocast."""
        self._assumed.close()

    def _region_dtype(self, context: Any) -> torch.dtype | None:
        dtype = super()._region_dtype(context)
        if len(self._autocast_dtypes) > 1:
            return dtype
        is_flag = dtype is None and not self._has_regions and not self._module_stack
        self.uses_own_regions |= is_flag
        return AUTOCAST_DTYPE if dtype is not None or is_flag else None
