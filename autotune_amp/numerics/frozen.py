"""Fidelity of a precision from gradients that a training command produced itself, on the same weights and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.comparison import compare
from autotune_amp.numerics.grading import Findings, grade, next_step
from autotune_amp.numerics.passes import Gradients

_NUM_WORST = 5


def judge_frozen(
    low: Sequence[Gradients],
    reference: Sequence[Gradients],
    losses: tuple[Sequence[float], Sequence[float]],
    precision: Precision,
    batch_size: int,
) -> Fidelity:
    """Return the fidelity from gradients of the same batches in `precision` and in fp32.

    `losses` are those in the precision and in fp32. Activations and training beyond the first weights are not checked.
    """
    are_finite, are_reference_finite = (
        all(bool(tensor.isfinite().all()) for each in gradients for tensor in each.values())
        for gradients in (low, reference)
    )
    has_signal = any(bool(tensor.any()) for each in reference for tensor in each.values())
    found = Findings(is_finite=are_finite, is_reference_finite=are_reference_finite, has_signal=has_signal)
    sums = None
    if are_finite and are_reference_finite:
        sums = compare(low, reference, set().union(*reference))
        size = math.hypot(*losses[1])
        difference = math.hypot(*(a - b for a, b in zip(*losses, strict=False)))
        found = found._replace(
            loss_error=difference / size if size else difference,
            **sums.findings(),
        )
    graded = grade(found)
    return Fidelity(
        precision=precision,
        batch_size=batch_size,
        verdict=graded.verdict,
        reason=f"{precision} is {graded.verdict}: {graded.reason}; that is of the command's first weights.",
        next_step=graded.next_step or next_step(precision, graded.verdict, ()),
        noise_ratio=found.noise_ratio,
        common_error=found.common_error,
        common_error_interval=found.common_error_interval,
        loss_error=found.loss_error,
        flushed_share=found.flushed_share,
        gradient_cosine=None if sums is None else sums.whole.cosine,
        gradient_norm_ratio=None if sums is None else sums.whole.norm_ratio,
        worst_parameters=()
        if sums is None
        else tuple(sorted(sums.parameters, key=attrgetter("noise_ratio"), reverse=True)[:_NUM_WORST]),
        num_passes=len(low) + len(reference),
    )
