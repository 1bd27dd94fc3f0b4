"""Calibration of fp16: the largest loss scale without overflow, and gradient sizes, over a short training run.

S* is the largest power of two that as a loss scale keeps a batch finite in fp16. It is found by bisection over whole
passes, which also works for compiled models and custom training loops.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autotune_amp.core.config import MIN_LOSS_SCALE
from autotune_amp.core.outcome import Calibration
from autotune_amp.numerics.comparison import groups_to_concatenate, significant_entries
from autotune_amp.numerics.passes import CheckInputs, Passes, PassResult, stored_values
from autotune_amp.numerics.scaler_replay import starting_scale
from autotune_amp.precision.forward_wrapper import watch_forward

_STEPS_PER_HISTOGRAM = 4  # each histogram costs an fp32 pass
MIN_OCTAVE = -149  # of fp32's least number
FIRST_LOG2_SCALE = 12.0  # where the search for log2 S* starts
# A scale below 2^-24, fp16's least number, is 0 in fp16, in which the backward pass may begin. A scale above 2^40
# makes every fp16 gradient but 0 infinite, so larger ones need no search.
MIN_LOG2_SCALE, MAX_LOG2_SCALE = round(math.log2(MIN_LOSS_SCALE)), 40


def calibrate(subject: CheckInputs, *, batch_size: int, pinned_modules: Sequence[str] = ()) -> Calibration:
    """Train in fp16 for one step on each batch of `subject`, and measure the largest safe loss scale at each step.

    The model is restored at the end. A step that is non-finite at every scale is skipped. The gradient histogram
    comes from fp32 passes, since fp16 flushes small entries. `forward_max` is the largest finite module output in
    steps with a safe scale. Raises `InvalidRequestError` for a module that cannot be pinned; exceptions of the model's
    code pass through.
    """
    started = time.perf_counter()
    initial, passes = Passes(subject), Passes(subject)
    log2_scales: list[float | None] = []
    octaves: Counter[int] = Counter()
    forward_max, guess = 0.0, FIRST_LOG2_SCALE
    try:
        with passes.pinned(pinned_modules), watch_forward(passes.model, subject.device) as read_maxima:
            optimizer = subject.make_optimizer(passes.model)
            for index in range(len(subject.batches)):
                if index % _STEPS_PER_HISTOGRAM == 0:
                    octaves += count_octaves(passes.run(index, "fp32").gradients.values())
                safe_scale = largest_safe_scale(passes, index, guess)
                maxima = read_maxima()
                log2_scales.append(safe_scale.log2_scale)
                if safe_scale.log2_scale is None:
                    continue  # the step is discarded: the next pass begins from the same state
                guess = safe_scale.log2_scale
                forward_max = max([forward_max, *filter(math.isfinite, maxima.values())])
                passes.step(optimizer, safe_scale.last.gradients)
                passes.keep()
    finally:
        initial.restore()
        passes.model.zero_grad(set_to_none=True)
    scales = [-math.inf if log2_scale is None else log2_scale for log2_scale in log2_scales]
    return Calibration(
        batch_size=batch_size,
        log2_scales=tuple(log2_scales),
        gradient_histogram=tuple(sorted(octaves.items())),
        init_scale=starting_scale(scales) if max(scales) > -math.inf else None,
        forward_max=forward_max,
        pinned_modules=tuple(pinned_modules),
        num_passes=passes.num_passes,
        seconds=time.perf_counter() - started,
    )


def count_octaves(gradients: Iterable[Tensor]) -> Counter[int]:
    """Count the gradient entries in each octave: for each k, those with floor(log2|g|) = k.

    Zeros, non-finite entries and those below `comparison.MIN_RELATIVE_MAGNITUDE` times the largest in their tensor are
    left out. fp16 flushes many of the last kind without harm, as in an output layer's gradients for improbable words.
    """
    values = [torch.view_as_real(value) if value.is_complex() else value for value in map(stored_values, gradients)]
    counts: Counter[int] = Counter()
    for group in groups_to_concatenate(dict(enumerate(values))):
        magnitudes = torch.cat([value.flatten().float() for value in group.values()]).nan_to_num(0.0, 0.0, 0.0).abs()
        is_counted = significant_entries(magnitudes, [value.numel() for value in group.values()])
        octaves = torch.frexp(magnitudes[is_counted]).exponent - 1
        totals = torch.bincount(octaves - MIN_OCTAVE).tolist()  # exact, and deterministic on CUDA as histc is not
        counts.update({octave: num for octave, num in enumerate(totals, MIN_OCTAVE) if num})
    return counts


# -- the largest safe loss scale of one batch --------------------------------------------------------------------------


class SafeScale(NamedTuple):
    """Result of the search for log2 S*: None for a batch that is non-finite at every scale.

    `last` is the pass at that scale, or without one the last pass. `is_searched` is False if time ran out: then
    `log2_scale` is the largest scale found safe so far, or None.
    """

    log2_scale: float | None
    last: PassResult
    is_searched: bool = True


def largest_safe_scale(
    passes: Passes, index: int, start: float = FIRST_LOG2_SCALE, *, deadline: float = math.inf
) -> SafeScale:
    """Return the largest power of two at which loss and gradients of batch `index` are finite.

    `start` is the expected log2 S*; if it is right, two passes suffice. After `deadline`, a time of
    `time.perf_counter`, no pass begins but the first.
    """
    safe, unsafe, stride = MIN_LOG2_SCALE - 1, MAX_LOG2_SCALE + 1, 1
    exponent = _within_limits(start)
    best: PassResult | None = None
    while True:
        result = passes.run(index, "fp16", scale=2.0**exponent)
        if result.is_finite:
            safe, best = exponent, result
        else:  # the loss itself does not depend on the scale
            unsafe = exponent if math.isfinite(result.loss) else MIN_LOG2_SCALE
        is_searched = unsafe - safe <= 1
        if is_searched or time.perf_counter() >= deadline:
            break
        if best is None:
            exponent = _within_limits(unsafe - stride)
        elif unsafe > MAX_LOG2_SCALE:
            exponent = _within_limits(safe + stride)
        else:
            exponent = (safe + unsafe) // 2
        stride *= 2
    return SafeScale(None if best is None else float(safe), best or result, is_searched)


def _within_limits(log2_scale: float) -> int:
    return min(max(math.floor(log2_scale), MIN_LOG2_SCALE), MAX_LOG2_SCALE)
