"""Calibration of fp16: the largest loss scale without overflow, and gradient sizes, over a short real training run.

S* is the largest loss scale at which a batch stays finite in fp16, found to the octave by bisection: that covers
compiled graphs and training loops of the user's own too, and scales change by whole octaves.
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
from autotune_amp.numerics.comparison import counting, side_by_side
from autotune_amp.numerics.passes import CheckInputs, Pass, Passes, stored
from autotune_amp.numerics.scaler_replay import starting_scale
from autotune_amp.precision.forward_wrapper import watch_forward

_STEPS_PER_HISTOGRAM = 4
MIN_OCTAVE, MAX_OCTAVE = -150, 129  # range of fp32's octaves
MAX_COUNT = 2**24  # largest exact count in fp32, the type in which torch counts
FIRST_GUESS = 12.0  # log2 S*
# A scale under 2^-24 is 0 in fp16, in which the backward pass begins. Scales above 2^40 need no search: no fp16 number
# times such a scale stays finite, so that all gradients would have to be in fp32.
MIN_LOG2_SCALE, MAX_LOG2_SCALE = round(math.log2(MIN_LOSS_SCALE)), 40


def calibrate(subject: CheckInputs, *, batch_size: int, pinned_modules: Sequence[str] = ()) -> Calibration:
    """Train in fp16 for one step on each batch of `subject`, and measure the largest safe loss scale at each step.

    The model is restored at the end. A step that is non-finite at every scale is not taken. The gradient histogram
    comes from fp32 passes, because fp16 flushes the entries that it is meant to show; `forward_max` covers finite
    outputs in steps with a safe scale. Raises `InvalidRequestError` for a module that cannot be pinned; exceptions of
    the model's own code pass through.
    """
    started = time.perf_counter()
    first, passes = Passes(subject), Passes(subject)
    log2_scales: list[float | None] = []
    octaves: Counter[int] = Counter()
    forward_max, guess = 0.0, FIRST_GUESS
    try:
        with passes.pinned(pinned_modules), watch_forward(passes.model, subject.device) as read_maxima:
            optimizer = subject.make_optimizer(passes.model)
            for index in range(len(subject.batches)):
                if index % _STEPS_PER_HISTOGRAM == 0:
                    octaves += count_octaves(passes.run(index, "fp32").gradients.values())
                found = largest_safe_scale(passes, index, guess)
                maxima = read_maxima()
                log2_scales.append(found.log2_scale)
                if found.log2_scale is None:
                    continue  # the step is discarded: the next pass begins from the same state
                guess = found.log2_scale
                forward_max = max([forward_max, *filter(math.isfinite, maxima.values())])
                passes.step(optimizer, found.last.gradients)
                passes.keep()
    finally:
        first.restore()
        passes.model.zero_grad(set_to_none=True)
    known = [-math.inf if log2_scale is None else log2_scale for log2_scale in log2_scales]
    return Calibration(
        batch_size=batch_size,
        log2_scales=tuple(log2_scales),
        gradient_histogram=tuple(sorted(octaves.items())),
        init_scale=starting_scale(known) if max(known) > -math.inf else None,
        forward_max=forward_max,
        pinned_modules=tuple(pinned_modules),
        num_passes=passes.num_passes,
        seconds=time.perf_counter() - started,
    )


def count_octaves(gradients: Iterable[Tensor]) -> Counter[int]:
    """Count the gradients' entries in each octave of float32.

    Zeros are left out, and so are non-finite entries and those far below the largest of their tensor (`COUNTS`): an
    output layer's gradients for very improbable words are most of what fp16 flushes, without harm.
    """
    values = [torch.view_as_real(value) if value.is_complex() else value for value in map(stored, gradients)]
    found: Counter[int] = Counter()
    for group in side_by_side(dict(enumerate(values))):
        magnitudes = torch.cat([value.flatten().float() for value in group.values()]).nan_to_num(0.0, 0.0, 0.0).abs()
        is_counted = counting(magnitudes, [value.numel() for value in group.values()])
        octaves = (torch.frexp(magnitudes).exponent - 1).where(is_counted, MAX_OCTAVE + 1).float()
        parts = torch.split(octaves, MAX_COUNT)
        numbers = [torch.histc(part, MAX_OCTAVE - MIN_OCTAVE, MIN_OCTAVE, MAX_OCTAVE).long() for part in parts]
        counted = torch.stack(numbers).sum(0).tolist()
        found.update({octave: num for octave, num in enumerate(counted, MIN_OCTAVE) if num})
    return found


# -- the largest safe loss scale of one batch --------------------------------------------------------------------------


class SafeScale(NamedTuple):
    """Result of the search for log2 S*, with `last`, a pass at that scale; None for a batch non-finite at every scale.

    If the search was cut (`is_searched` false), the largest scale known to be safe, None if none is known.
    """

    log2_scale: float | None
    last: Pass
    is_searched: bool = True


def largest_safe_scale(
    passes: Passes, index: int, start: float = FIRST_GUESS, *, deadline: float = math.inf
) -> SafeScale:
    """Return the largest power of two at which loss and gradients of batch `index` are finite.

    `start` is the expected log2 S*; if it is right, two passes suffice. No pass but the first begins after `deadline`,
    in seconds of `time.perf_counter`.
    """
    safe, unsafe, stride = MIN_LOG2_SCALE - 1, MAX_LOG2_SCALE + 1, 1
    exponent = _within_limits(start)
    best: Pass | None = None
    while True:
        done = passes.run(index, "fp16", scale=2.0**exponent)
        if done.is_finite:
            safe, best = exponent, done
        else:  # the loss itself does not depend on the scale
            unsafe = exponent if math.isfinite(done.loss) else MIN_LOG2_SCALE
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
    return SafeScale(None if best is None else float(safe), best or done, is_searched)


def _within_limits(log2_scale: float) -> int:
    return min(max(math.floor(log2_scale), MIN_LOG2_SCALE), MAX_LOG2_SCALE)
