"""What a trial is asked to do: plain data, JSON both ways."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from autotune_amp.core.config import LossScale, Precision
from autotune_amp.core.fidelity import Fidelity
from autotune_amp.core.outcome import Failure, FailureKind, Purpose
from autotune_amp.core.setting import Setting

CheckKind: TypeAlias = Literal["fidelity", "calibration", "accumulation"]

# Micro-batches timed for a longer accumulation window; the window's time is composed from them, since windows of
# hundreds of passes would cost more than the search has (measurement.md, Timing).
MAX_TIMED_MICRO_BATCHES = 4
# An accelerator runs ahead of the host, so steps between two synchronisations are timed together.
STEPS_PER_SYNC = 4
NUM_WARMUP_STEPS = 3


class TrialSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One isolated run of one candidate.

    `num_steps` [low, high] bounds the measured optimizer steps: measuring stops between them once the trimmed
    95 % interval of the step time is within `interval_share` of it, or after `measure_seconds`. An accelerator that
    takes them all in less than `stopping.LEAST_ACCELERATOR_SECONDS` goes on until then. After five steps
    a median above `cut_step_seconds` ends the trial early. `first_step_seconds` and `step_seconds` are deadlines
    that the parent enforces by killing the process: for a first step with its compilation, and for any other.
    `torch_state` is the caller's global torch state as `torch_state.capture` gave it. `worst_samples` are the dataset's
    largest samples that were found, the largest first; empty where the samples are alike or the workload names its
    worst batch itself. `is_loss_sum`: the loss is a sum over its samples, so that it is not divided by the
    accumulation steps. `ending_seconds` is what the workload's evaluation and checkpoint may take after the measuring,
    with the parent's deadline; None: they are not run.
    """

    candidate: Setting
    device: str
    purpose: Purpose = "search"
    loss_scale: LossScale | None = None
    seed: int = 0
    num_warmup_steps: int = NUM_WARMUP_STEPS
    num_steps: tuple[int, int] = (8, 40)
    interval_share: float = 0.05
    measure_seconds: float | None = None
    cut_step_seconds: float | None = None
    first_step_deadline_seconds: float | None = None
    step_deadline_seconds: float | None = None
    deadline_seconds: float | None = None
    memory_limit_bytes: int | None = None
    torch_state: dict[str, Any] = {}
    hold_heap: bool = False
    worst_samples: tuple[int, ...] = ()
    is_loss_sum: bool = False
    ending_seconds: float | None = None

    @property
    def is_miniature(self) -> bool:
        """Whether it is a miniature of the job: whole accumulation windows, the worst batch first and last."""
        return self.purpose in ("confirm", "plain")

    @property
    def num_worst_batches(self) -> int:
        """Steps taken on the worst batch: the first, one after the warm-up, a miniature's last."""
        return 3 if self.is_miniature else 2

    @property
    def num_timed_micro_batches(self) -> int:
        """Forward and backward passes run for one timed step: a whole window only where it is confirmed."""
        window = self.candidate.accumulation_steps
        return window if self.is_miniature else min(window, MAX_TIMED_MICRO_BATCHES)

    @property
    def num_steps_per_report(self) -> int:
        """Steps timed, and reported, together."""
        return 1 if self.device == "cpu" else STEPS_PER_SYNC


class CheckSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One check in a process of its own: of `precision` against fp32, of the loss scales that are safe, or of whether
    accumulated gradients equal those of the whole batch (in fp32).

    `num_batches` different batches of `batch_size` samples are used, fewer samples where they do not fit into memory.
    `find_pins`: look for modules that make the precision faithful when they run in fp32. `pinned_modules` do so during
    the check. `deadline_seconds` is for all of it; the parent enforces it by killing the process. `torch_state` is the
    caller's global torch state as `torch_state.capture` gave it.
    """

    what: CheckKind
    precision: Precision
    batch_size: int
    device: str
    pinned_modules: tuple[str, ...] = ()
    find_pins: bool = True
    seed: int = 0
    num_batches: int = 12
    deadline_seconds: float | None = None
    memory_limit_bytes: int | None = None
    torch_state: dict[str, Any] = {}
    hold_heap: bool = False


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
