"""What came back from a trial or a check: what it found, or a failure; plain data, JSON both ways."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from autotune_amp.config import Precision
from autotune_amp.numerics.results import Calibration, Fidelity
from autotune_amp.trial.spec import Candidate, CheckSpec, Purpose

FailureKind: TypeAlias = Literal["oom", "timeout", "nonfinite", "unsupported", "crash", "workload_error"]


class Measurement(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="measurement"):
    """A candidate that ran.

    `step_seconds` is one optimizer step (all its accumulation steps) with the wait for its data, which
    `data_seconds` holds apart. `step_seconds_interval` is the trimmed 95 % interval within this process.
    `raw_step_seconds` are the single steps as timed. `was_cut`: stopped early as clearly slower than the best.
    `peak_memory_bytes` is the peak resident memory of the process on a CPU, the peak allocated on an accelerator;
    `reserved_memory_bytes` is what counts against the limit. `num_skips`: measured steps that the loss scaler
    skipped. `build_seconds` is model, data and optimizer; `context_seconds` starting the accelerator;
    `first_step_seconds` the first training step, with its compilation.
    """

    step_seconds: float
    step_seconds_interval: tuple[float, float]
    samples_per_second: float
    data_seconds: float
    peak_memory_bytes: int
    reserved_memory_bytes: int
    raw_step_seconds: tuple[float, ...]
    build_seconds: float
    context_seconds: float
    first_step_seconds: float
    num_skips: int = 0
    last_loss: float | None = None
    was_cut: bool = False


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="failure"):
    """A candidate that did not run; `message` is one sentence, `details` a traceback or the end of its output."""

    kind: FailureKind
    message: str
    details: str | None = None


Outcome: TypeAlias = Measurement | Failure
CheckOutcome: TypeAlias = Fidelity | Calibration | Failure

_NEXT_STEPS: dict[FailureKind, str] = {
    "oom": "Free memory or use a device with more of it; until then compare a training run of your own with fp32.",
    "timeout": "Give a larger budget.",
    "nonfinite": "Use another precision.",
    "unsupported": "Use another precision.",
    "crash": "Run a few training steps in this precision on their own, to see how they end.",
    "workload_error": "Mend what the reason names.",
}


def unchecked(spec: CheckSpec, failure: Failure) -> Fidelity:
    """What a check that could not be made says of its precision: nothing, with the reason."""
    return Fidelity(
        precision=spec.precision,
        batch_size=spec.batch_size,
        verdict="unchecked",
        reason=f"{spec.precision} is unchecked ({failure.kind}): {failure.message.rstrip('.')}.",
        next_step=_NEXT_STEPS[failure.kind],
        pinned_modules=spec.pinned_modules,
    )


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of outcomes.jsonl: a trial or a check, and its outcome.

    `search_id` tells the searches in one folder apart; only lines of the running search are resumed. `seconds` is
    what the trial cost, process start and set-up included. `round` numbers the confirmation rounds from 0.
    """

    format: int = 1
    search_id: str
    number: int
    candidate: Candidate
    purpose: Purpose
    outcome: Measurement | Failure | Fidelity | Calibration
    seconds: float
    round: int | None = None
    environment: dict[str, str] = {}


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What the workload is, found out in a child before the first trial.

    `batch_size` is that of the user's own loader, None where the data has none. `num_samples` is the dataset's
    length, None where it has none. `as_found_precision` is what the caller's own autocast and TF32 flags amount to;
    `is_as_found_strict` says that they equal the strict flags of that precision, so that the baseline is an ordinary
    candidate. `build_seconds` is one building of model, data and optimizer.
    """

    name: str
    batch_size: int | None
    num_samples: int | None
    data: str
    num_parameters: int
    num_trainable_parameters: int
    weights: Literal["fp32", "bf16", "frozen_low"]
    as_found_precision: Precision
    is_as_found_strict: bool
    build_seconds: float
    context_seconds: float
