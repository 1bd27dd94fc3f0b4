"""Measures the loss scale that fp16 can bear, and how small its gradients get, over a short real training stretch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autotune_amp.core.fidelity import Calibration
from autotune_amp.numerics.comparison import COUNTS
from autotune_amp.numerics.forward_max import watch_forward
from autotune_amp.numerics.passes import Passes, Subject
from autotune_amp.numerics.safe_scale import SafeScale, by_backward, by_bisection, must_bisect
from autotune_amp.numerics.scaler_replay import starting_scale

_STEPS_PER_HISTOGRAM = 4
_LOWEST_OCTAVE, _HIGHEST_OCTAVE = -149, 127  # of float32, subnormal numbers included
_FIRST_GUESS = 12.0  # log2 S*


def calibrate(subject: Subject, *, batch_size: int, pinned_modules: Sequence[str] = ()) -> Calibration:
    """Train in fp16 for one step on each batch of `subject`, at a loss scale measured for each; the model is left
    as it was.

    A step that is non-finite at every scale is not taken. S* is measured by one backward pass, at the first and the
    last step also by bisection: where the two are not in one octave the lower counts, and the steps that follow are
    bisected, as those of a compiled model and of a loop all are. The histogram is of fp32 passes, because fp16 flushes
    what it is to show; `forward_max` is of the steps that have a safe scale, and of finite outputs. Raises
    `InvalidRequestError` for a module that cannot be pinned; what the model's own code raises comes through.
    """
    started = time.perf_counter()
    first, passes = Passes(subject), Passes(subject)
    try:
        with passes.pinned(pinned_modules):
            stretch = _Stretch(passes)
            stretch.run()
    finally:
        first.restore()
        passes.model.zero_grad(set_to_none=True)
    return Calibration(
        batch_size=batch_size,
        log2_scales=tuple(stretch.log2_scales),
        bisected_log2_scales=stretch.bisected,
        gradient_histogram=histogram(stretch.octaves),
        init_scale=_init_scale(stretch.log2_scales),
        forward_max=stretch.forward_max,
        pinned_modules=tuple(pinned_modules),
        num_passes=passes.num_passes,
        seconds=time.perf_counter() - started,
    )


def count_octaves(gradients: Iterable[Tensor]) -> Tensor:
    """How many entries there are in each octave of float32, from the lowest up.

    Left out are zeros, non-finite ones and those that move nothing beside the largest of their tensor (`COUNTS`): an
    output layer's gradients for words that are all but impossible are most of what fp16 flushes, and no loss.
    """
    counts = torch.zeros(_HIGHEST_OCTAVE - _LOWEST_OCTAVE + 1, dtype=torch.int64)
    for gradient in gradients:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        values = torch.view_as_real(values) if values.is_complex() else values
        counted = values[values.isfinite() & (values != 0)].float()
        if counted.numel():
            counted = counted[counted.abs() > COUNTS * counted.abs().amax()]
        octaves = torch.frexp(counted).exponent - 1  # its mantissa lies in [1/2, 1)
        counts += torch.bincount(octaves - _LOWEST_OCTAVE, minlength=len(counts)).cpu()
    return counts


def histogram(counts: Tensor) -> tuple[tuple[int, int], ...]:
    """What `count_octaves` counted as (octave, count), in rising order and without the empty ones."""
    return tuple((octave, count) for octave, count in enumerate(counts.tolist(), _LOWEST_OCTAVE) if count)


class _Stretch:
    """The training stretch and what it finds. Its first bisection decides how the steps after it are measured."""

    def __init__(self, passes: Passes) -> None:
        self.log2_scales: list[float | None] = []
        self.bisected: dict[int, float | None] = {}
        self.octaves = count_octaves([])
        self.forward_max = 0.0
        self._passes = passes
        self._bisects = must_bisect(passes)
        self._guess = _FIRST_GUESS

    def run(self) -> None:
        """One step for each batch."""
        passes, subject = self._passes, self._passes.subject
        optimizer = subject.make_optimizer(passes.model)
        with watch_forward(passes.model, subject.device) as watch:
            for index in range(len(subject.batches)):
                if index % _STEPS_PER_HISTOGRAM == 0:
                    self.octaves += count_octaves(passes.run(index, "fp32").gradients.values())
                watch.reset()
                found = self._measure(index)
                self.log2_scales.append(found.log2_scale)
                if found.log2_scale is None:
                    passes.restore()  # a batch that is not trained on leaves no mark on BatchNorm's statistics
                    continue
                self._guess = found.log2_scale
                self.forward_max = max([self.forward_max, *filter(math.isfinite, watch.maxima().values())])
                passes.step(optimizer, found.last.gradients)
                passes.keep()

    def _measure(self, index: int) -> SafeScale:
        if self._bisects:
            found = by_bisection(self._passes, index, self._guess)
            self.bisected[index] = found.log2_scale
            return found
        found = by_backward(self._passes, index, self._guess)
        if index not in (0, len(self._passes.subject.batches) - 1):
            return found
        bisected = by_bisection(self._passes, index, self._guess if found.log2_scale is None else found.log2_scale)
        self.bisected[index] = bisected.log2_scale
        if _octave(found) == _octave(bisected):
            return found
        self._bisects = True
        return min(found, bisected, key=_octave)


def _octave(found: SafeScale) -> float:
    return -math.inf if found.log2_scale is None else math.floor(found.log2_scale)


def _init_scale(log2_scales: Sequence[float | None]) -> float | None:
    known = [-math.inf if log2_scale is None else log2_scale for log2_scale in log2_scales]
    return starting_scale(known) if max(known) > -math.inf else None
