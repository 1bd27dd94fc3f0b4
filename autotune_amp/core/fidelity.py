"""What the checks found: of a precision, the loss scale, accumulation; plain data, JSON both ways. No torch."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from autotune_amp.core.config import Precision

Verdict: TypeAlias = Literal["faithful", "doubtful", "unfaithful", "unchecked"]


class GradientDamage(msgspec.Struct, frozen=True, kw_only=True):
    """How the gradient of one parameter, or of all those of a module, fared; fields as in `Fidelity`."""

    name: str
    noise_ratio: float
    cosine: float
    norm_ratio: float
    flushed_share: float


class LowWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What rounding does to an optimizer step where trainable weights are kept in low precision.

    `lost_share`: entries whose update is not zero and that the step leaves as they were. `applied_share`: how much of
    the update, along its own direction, is left after rounding to the nearest; fp32 weights apply all of it, and so
    does stochastic rounding in the mean, at a noise of `stochastic_noise` times the update's norm.
    """

    weights: Literal["bf16", "fp16"]
    lost_share: float
    applied_share: float
    stochastic_noise: float


class Fidelity(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="fidelity"):
    """How faithful a precision's loss and gradients are to fp32, on the same weights, batches and draws.

    `noise_ratio` is |g_low - g_32| over |g_32(A) - g_32(B)|: rounding noise against the noise between two batches of
    `batch_size`. `loss_error` is relative to the fp32 loss. `gradient_cosine` and `gradient_norm_ratio` (low over
    fp32) are of the whole gradient, `flushed_share` the entries that count and are zero only in the low precision.
    `forward_max` is the largest magnitude a module put out, `format_max` the largest that the precision holds.
    `training_gap` is the mean distance between the losses of a paired training run over `num_paired_steps` steps, in
    units of that between fp32 runs whose first weights differ by one rounding of the precision, `training_noise_gap`
    the same in units of the loss's own scatter from batch to batch. `num_skips` are steps of it that overflowed.
    `has_moved` is False where fp32's training run moved no weight, so that nothing was seen of the training.

    `modules` are in the order of the model, each with the parameters of its own: larger ones, with all that is in
    them, where there would be more than a chart can show; "" holds the parameters outside of every module.

    `gradient_histogram` counts the non-zero entries of the fp32 gradient of one batch, as `Calibration` does; empty
    where an earlier version made the check.

    `culprits` are the modules responsible, "" the code outside of every module, as the loss function is.
    `healing_pins`: with these modules in fp32 the precision was found faithful; `pinned_modules` were in fp32 during
    the check. None stands where a number could not be had. `num_passes` counts forward and backward passes.
    """

    precision: Precision
    batch_size: int
    verdict: Verdict
    reason: str
    next_step: str
    pinned_modules: tuple[str, ...] = ()
    noise_ratio: float | None = None
    loss_error: float | None = None
    gradient_cosine: float | None = None
    gradient_norm_ratio: float | None = None
    flushed_share: float | None = None
    forward_max: float | None = None
    format_max: float | None = None
    loss_scale: float | None = None
    training_gap: float | None = None
    training_noise_gap: float | None = None
    num_paired_steps: int = 0
    num_skips: int = 0
    has_moved: bool = True
    worst_parameters: tuple[GradientDamage, ...] = ()
    modules: tuple[GradientDamage, ...] = ()
    gradient_histogram: tuple[tuple[int, int], ...] = ()
    culprits: tuple[str, ...] = ()
    healing_pins: tuple[str, ...] = ()
    low_weights: LowWeights | None = None
    num_passes: int = 0
    seconds: float = 0.0
    fp32_step_seconds: float | None = None


# What a check of accumulation takes at the least: two micro-batches of two, since BatchNorm cannot train on one sample.
MIN_CUT_SAMPLES = 4
AccumulationVerdict: TypeAlias = Literal["mean", "sum", "weighted", "inexact", "unchecked"]


class Accumulation(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="accumulation"):
    """Whether the gradients of micro-batches add up to that of the whole batch, found out in fp32 without dropout.

    `verdict`: their *mean* does, their *sum* does (a loss that is a sum), a *weighted* mean does (a loss that is a mean
    over something of which the micro-batches hold unequal shares, as tokens; `weighted_by` names it where it was found,
    such as "labels != -100"), or none does: *inexact*. *unchecked* could not be found out. `error` is the distance of
    the best such combination from the whole batch's gradient, relative to it; `mean_error` that of the plain mean.
    `batch_size` samples were cut into `num_micro_batches`.
    """

    verdict: AccumulationVerdict
    reason: str
    next_step: str
    batch_size: int
    num_micro_batches: int
    error: float | None = None
    mean_error: float | None = None
    weighted_by: str | None = None
    num_passes: int = 0
    seconds: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether accumulation can be offered: with the right weights it learns what the large batch learns."""
        return self.verdict in ("mean", "sum", "weighted")


class Calibration(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="calibration"):
    """The largest safe loss scale S* at each step of a short real training in fp16, and how small its gradients get.

    `log2_scales` holds log2 S*(t), None for a step that is non-finite at every scale. `gradient_histogram` counts the
    gradient's non-zero entries by floor(log2 |g|) at loss scale 1, each octave once, in rising order.
    `bisected_log2_scales` are the same steps' answers by bisection, where that was done. `init_scale` is the scale to
    start with, None where no step had a safe one. `forward_max` is the largest magnitude that a module put out.
    """

    batch_size: int
    log2_scales: tuple[float | None, ...]
    bisected_log2_scales: dict[int, float | None]
    gradient_histogram: tuple[tuple[int, int], ...]
    init_scale: float | None
    forward_max: float
    pinned_modules: tuple[str, ...] = ()
    num_passes: int = 0
    seconds: float = 0.0
