"""Measures the loss scale that fp16 can bear, and how small its gradients get, over a short real training stretch.

S* is the largest loss scale at which a batch stays finite in fp16, found by one backward pass or by bisection.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autotune_amp.core.config import FP16_MAX, MIN_LOSS_SCALE
from autotune_amp.core.fidelity import Calibration
from autotune_amp.numerics.comparison import COUNTS
from autotune_amp.numerics.modules import is_compiled, watch_forward
from autotune_amp.numerics.passes import Pass, Passes, Subject
from autotune_amp.numerics.scaler_replay import starting_scale
from autotune_amp.precision.modes import MODES

_STEPS_PER_HISTOGRAM = 4
_LOWEST_OCTAVE, _HIGHEST_OCTAVE = -149, 127  # of float32, subnormal numbers included
_FIRST_GUESS = 12.0  # log2 S*
LOG2_FP16_MAX = math.log2(FP16_MAX)
# A scale under 2^-24 is 0 in fp16, where the backward pass begins with it. Above 2^40 nobody needs to look: no fp16
# number times that stays finite, so that all gradients would have to be in fp32.
MIN_LOG2_SCALE, MAX_LOG2_SCALE = round(math.log2(MIN_LOSS_SCALE)), 40
_LARGEST_FLUSHED = MODES["fp16"].min_subnormal / 2  # rounds to 0
_MARGIN_OCTAVES = 2  # octaves under the expected answer where a pass is likely to be safe
# How far above a pass its answer may lie. Further up the gradients of that pass have partly been flushed, and what
# does not grow with the scale (weights, dropout's masks, 2x in the gradient of x²) may be the largest in it.
_REACH_OCTAVES = 6


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


# -- the largest safe loss scale of one batch --------------------------------------------------------------------------


class SafeScale(NamedTuple):
    """`log2_scale` is log2 S*, None where the batch is non-finite at every scale; `last` the last pass made for it.

    `last` is at `last_scale`, which is a safe one unless there is none.
    """

    log2_scale: float | None
    last: Pass
    last_scale: float


class _LargestFp16(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch does not type it
    """The largest magnitude in any fp16 tensor that an operation of the backward pass writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not type it
        self._largest: dict[torch.device, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # With grad mode on it is a checkpoint that recomputes its forward pass.
        if not torch.is_grad_enabled() and _writes(func):
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.dtype == torch.float16 and leaf.numel():
                    self._note(leaf._values() if leaf.is_sparse else leaf)
        return output

    def _note(self, values: Tensor) -> None:
        low, high = torch.aminmax(values)
        largest = torch.maximum(high, -low)
        known = self._largest.get(values.device)
        self._largest[values.device] = largest if known is None else torch.maximum(known, largest)

    def read(self) -> float:
        """inf where one held a NaN, 0 where nothing was written; waits for the device."""
        return max((math.inf if math.isnan(v) else v for v in map(float, self._largest.values())), default=0.0)


def _writes(operation: Any) -> bool:
    """Whether its outputs are new numbers: not where they are views or memory still to be filled."""
    return not operation.is_view and "empty" not in operation.overloadpacket.__name__


def by_backward(passes: Passes, index: int, start: float = 12.0) -> SafeScale:
    """S* = 65504 S / A: A is the largest magnitude in any fp16 tensor written during a backward pass at scale S.

    Leaf gradients alone miss it by up to 17 octaves (measured). `start` is log2 S* as expected; one
    pass will do where that is about right. What cannot be answered so is bisected: a model where an overflow reaches
    no gradient, or where A is not in proportion to S. Inside a compiled graph tensors are not seen: bisect there.
    """
    exponent, lowest_unsafe = _within_limits(start - _MARGIN_OCTAVES), math.inf
    while True:
        watch = _LargestFp16()
        done = passes.run(index, "fp16", scale=2.0**exponent, around_backward=watch)
        if done.is_finite:
            found = exponent + LOG2_FP16_MAX - math.log2(max(watch.read(), _LARGEST_FLUSHED))
            if math.isinf(found) or found >= lowest_unsafe:
                return by_bisection(passes, index, exponent)
            found = min(found, MAX_LOG2_SCALE)
            if found - exponent <= _REACH_OCTAVES:
                return SafeScale(found, done, 2.0**exponent)
            exponent = _within_limits(found - _MARGIN_OCTAVES)
        elif not math.isfinite(done.loss) or exponent == MIN_LOG2_SCALE:
            return SafeScale(None, done, 2.0**exponent)
        else:  # which says nothing of how far it is above the answer
            lowest_unsafe = exponent
            exponent = _within_limits(exponent - _REACH_OCTAVES)


def by_bisection(passes: Passes, index: int, start: float = 12.0) -> SafeScale:
    """The largest power of two at which loss and gradients are finite: S* to the octave, on the model as it is.

    `start` is log2 S* as expected; two passes will do where that is right.
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
        if unsafe - safe <= 1:
            break
        if best is None:
            exponent = _within_limits(unsafe - stride)
        elif unsafe > MAX_LOG2_SCALE:
            exponent = _within_limits(safe + stride)
        else:
            exponent = (safe + unsafe) // 2
        stride *= 2
    return SafeScale(None, done, 2.0**exponent) if best is None else SafeScale(float(safe), best, 2.0**safe)


def largest_safe_scale(passes: Passes, index: int, start: float = 12.0) -> SafeScale:
    """By one backward pass, or by bisection where none can be watched."""
    return (by_bisection if must_bisect(passes) else by_backward)(passes, index, start)


def must_bisect(passes: Passes) -> bool:
    """Whether backward passes cannot be watched: compiled graphs hide their tensors, and a loop runs its own."""
    return passes.subject.loop is not None or is_compiled(passes.model)


def _within_limits(log2_scale: float) -> int:
    return min(max(math.floor(log2_scale), MIN_LOG2_SCALE), MAX_LOG2_SCALE)
