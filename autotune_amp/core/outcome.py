"""What came back from a trial or a check: what it found, or a failure; plain data, JSON both ways."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from autotune_amp.core.config import LossScale, Precision
from autotune_amp.core.fidelity import Accumulation, Calibration, Fidelity
from autotune_amp.core.hardware import MachineLoad
from autotune_amp.core.setting import Setting

# search: a candidate tried; fallback: a plan for a lower rung; confirm: again in a fresh process in the recommended
# environment (the baseline: in the user's own); plain: the winner once in the user's own environment. The others are no
# trials but checks: of what a precision or accumulation does to the gradient.
Purpose: TypeAlias = Literal[
    "search", "fallback", "confirm", "plain", "outlook", "fidelity", "calibration", "accumulation"
]
FailureKind: TypeAlias = Literal["oom", "timeout", "nonfinite", "unsupported", "crash", "workload_error"]


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="measurement"):
    """A candidate that ran.

    `step_seconds` is one optimizer step (all its accumulation steps) with the wait for its data, which
    `data_seconds` holds apart. `raw_step_seconds` are as timed, each the mean of `num_steps_together` steps, and
    `step_seconds_interval` is the trimmed 95 % interval over them. `was_cut`: stopped early as clearly slower than the
    best.
    `peak_memory_bytes` is the peak resident memory of the process on a CPU, the peak allocated on an accelerator;
    `reserved_memory_bytes` is what counts against the limit. `num_skips`: measured steps that the loss scaler
    skipped. `build_seconds` is model, data and optimizer; `context_seconds` starting the accelerator;
    `first_step_seconds` the first training step, with its compilation. `update_seconds` is the optimizer's part of a
    step, None where it was not timed apart. `num_compiling_steps` were timed anew because a compiler ran in them.
    `is_build_shared`: the model was built once and shared with other trials. `evaluation_seconds` and
    `checkpoint_seconds` are those of the workload's own, None where it has none or they did not run to their end;
    `ending_seconds` is what was spent on both, None where they were not to be run, and `ending_problem` why one of them
    did not end.
    `joules_per_sample` is what the device drew over the measured steps, None where nothing says so.
    `num_steps_taken` are all the optimizer steps behind `peak_memory_bytes`, 0 where an earlier version did not count
    them.
    """

    step_seconds: float
    step_seconds_interval: tuple[float, float]
    samples_per_second: float
    data_seconds: float
    peak_memory_bytes: int
    reserved_memory_bytes: int
    raw_step_seconds: tuple[float, ...]
    num_steps_together: int = 1
    build_seconds: float
    context_seconds: float
    first_step_seconds: float
    num_skips: int = 0
    last_loss: float | None = None
    was_cut: bool = False
    update_seconds: float | None = None
    num_compiling_steps: int = 0
    is_build_shared: bool = False
    evaluation_seconds: float | None = None
    checkpoint_seconds: float | None = None
    ending_seconds: float | None = None
    ending_problem: str | None = None
    joules_per_sample: float | None = None
    num_steps_taken: int = 0

    @property
    def num_steps(self) -> int:
        """The measured optimizer steps."""
        return len(self.raw_step_seconds) * self.num_steps_together


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="failure"):
    """A candidate that did not run; `message` is one sentence, `details` a traceback or the end of its output."""

    kind: FailureKind
    message: str
    details: str | None = None


Outcome: TypeAlias = Measurement | Failure
CheckOutcome: TypeAlias = Fidelity | Calibration | Accumulation | Failure


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of outcomes.jsonl: a trial or a check, and its outcome.

    `search_id` tells the searches in one folder apart; only lines of the running search are resumed. `seconds` is
    what the trial cost, process start and set-up included. `round` numbers the confirmation rounds from 0. `loss_scale`
    is what fp16 ran with, `load` what others did on the machine meanwhile; both are None where an earlier version did
    not log them, `load` of a check too. `start_seconds` is what its process took to start, 0.0 in one that was kept
    from an earlier trial, None in a forked one, of a check, and where an earlier version did not log it.
    """

    format: int = 1
    search_id: str
    number: int
    candidate: Setting
    purpose: Purpose
    outcome: Measurement | Failure | Fidelity | Calibration | Accumulation
    seconds: float
    round: int | None = None
    environment: dict[str, str] = {}
    loss_scale: LossScale | None = None
    load: MachineLoad | None = None
    start_seconds: float | None = None


class SampleSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How large single samples are, in numbers that their tensors and sequences hold, from a scan cut off by the clock.

    `num_seen` samples of `num_samples` were looked at, in random order. `largest` are indices into the dataset, the
    largest first; as many as the largest batch may need. `smallest` are a few of the others, the smallest first.
    """

    num_seen: int
    num_samples: int
    smallest_size: int
    median_size: int
    largest_size: int
    largest: tuple[int, ...]
    smallest: tuple[int, ...] = ()


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload is, found out in a child before the first trial.

    `batch_size` is that of the user's own loader, None where the data has none. `num_samples` is the dataset's
    length, None where it has none. `as_found_precision` is what the caller's own autocast and TF32 flags amount to;
    `is_as_found_strict` says that they equal the strict flags of that precision, so that the baseline is an ordinary
    candidate. `build_seconds` is one building of model, data and optimizer. `num_workers` are the worker processes of
    its loader, None where it has no loader whose number could be changed. `sample_sizes` is None where the samples are
    alike, cannot be scanned, or the workload names its worst batch (`has_worst_batch`). `batch_sizes_seen` are the
    least and the largest size of batches drawn from data that cannot be scanned, None where they were alike.
    `scan_problem` is the error, in one line, that ended either look, None without one. `has_ending`: it has an
    evaluation or a checkpoint of its own. `is_loop`: it takes its training steps itself (`Workload.train_step`).
    `accumulation_steps` are the passes behind an optimizer step today; with `weighs_passes` the training weighs them.
    """

    name: str
    batch_size: int | None
    num_samples: int | None
    data: str
    num_parameters: int
    num_trainable_parameters: int
    weights: Literal["fp32", "bf16", "fp16", "frozen_low"]
    as_found_precision: Precision
    is_as_found_strict: bool
    build_seconds: float
    context_seconds: float
    num_workers: int | None = None
    sample_sizes: SampleSizes | None = None
    batch_sizes_seen: tuple[int, int] | None = None
    scan_problem: str | None = None
    has_worst_batch: bool = False
    has_ending: bool = False
    is_loop: bool = False
    accumulation_steps: int = 1
    weighs_passes: bool = False
