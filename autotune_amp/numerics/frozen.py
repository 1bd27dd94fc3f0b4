"""Fidelity of a precision from gradients that a training command recorded in it and in fp32, from the same weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.comparison import GradientComparer
from autotune_amp.numerics.grading import Findings, grade, next_step
from autotune_amp.numerics.passes import Gradients
from autotune_amp.precision.modes import MODES


def fidelity_from_gradients(
    low: Sequence[Gradients],
    reference: Sequence[Gradients],
    losses: tuple[Sequence[float], Sequence[float]],
    precision: Precision,
    batch_size: int,
    *,
    label: str,
) -> Fidelity:
    """Return the fidelity from gradients and `losses` of the same batches in `precision`, called `label`, and in fp32.

    Only the first weights are checked, without activations and training runs.
    """
    are_finite, are_reference_finite = (
        all(bool(tensor.isfinite().all()) for each in gradients for tensor in each.values())
        for gradients in (low, reference)
    )
    has_signal = any(bool(tensor.any()) for each in reference for tensor in each.values())
    findings = Findings(
        is_finite=are_finite,
        is_reference_finite=are_reference_finite,
        has_signal=has_signal,
        format_max=MODES[precision].format_max,
    )
    comparison = None
    if are_finite and are_reference_finite:
        comparer = GradientComparer(set().union(*reference))
        for low_gradients, reference_gradients in zip(low, reference, strict=True):
            comparer.add(low_gradients, reference_gradients)
        comparison = comparer.compared()
        size = math.hypot(*losses[1])
        difference = math.hypot(*(a - b for a, b in zip(*losses, strict=False)))
        findings = findings._replace(
            loss_error=difference / size if size else difference,
            **comparison.findings(),
        )
    result = grade(findings)
    return Fidelity(
        precision=precision,
        batch_size=batch_size,
        verdict=result.verdict,
        reason=f"{label} is {result.verdict}: {result.reason}; this holds for the command's first weights.",
        next_step=result.next_step or next_step(label, result.verdict, ()),
        noise_ratio=findings.noise_ratio,
        common_error=findings.common_error,
        common_error_interval=findings.common_error_interval,
        loss_error=findings.loss_error,
        flushed_share=findings.flushed_share,
        num_passes=len(low) + len(reference),
        **{} if comparison is None else comparison.fidelity_fields(),
    )
