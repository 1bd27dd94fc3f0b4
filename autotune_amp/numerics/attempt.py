"""One precision with one set of modules in fp32, held against what fp32 did."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from autotune_amp.core.config import FP16_MAX, MIN_LOSS_SCALE, Precision
from autotune_amp.core.fidelity import LowWeights
from autotune_amp.numerics.comparison import Comparison, compare, signals
from autotune_amp.numerics.forward_max import ForwardWatch
from autotune_amp.numerics.low_weights import lost_updates
from autotune_amp.numerics.paired import UNIT_ROUNDOFF, Gap, Run, gap, perturb, train
from autotune_amp.numerics.passes import Pass, Passes
from autotune_amp.numerics.safe_scale import largest_safe_scale
from autotune_amp.numerics.scaler_replay import starting_scale
from autotune_amp.numerics.verdict import Findings
from autotune_amp.precision.mode import has_half_weights, override

NUM_BATCHES = 3  # held against each other in one step
NUM_PAIRED_STEPS = 8
REROUNDING = 2.0**-20  # moves weights enough for fp32 to round otherwise, and no more
_FORMAT_MAX: dict[Precision, float] = {"fp16": FP16_MAX}
_FLOAT32_MAX = 3.4e38  # of tf32 and bf16 too, nearly


@dataclass(frozen=True)
class Attempt:
    """What was measured of a precision with `pins` in fp32.

    `forward_maxima` are the largest magnitudes that modules put out in the precision, by module. `bad_index` is the
    batch of a pass that was not finite, None where all were; `scale` the loss scale of the last. `has_safe_scale` is
    False where fp16 was not finite at any.
    """

    pins: tuple[str, ...]
    low: tuple[Pass, ...]
    scale: float
    has_safe_scale: bool
    bad_index: int | None = None
    comparison: Comparison | None = None
    loss_error: float | None = None
    forward_maxima: dict[str, float] = field(default_factory=dict)
    training: Run | None = None
    gap: Gap | None = None


class Bench:
    """What fp32 does, measured once and when it is needed, and attempts at the precision.

    `watch` watches the subject's model: one for all, so that a compiled model is compiled once for each precision.
    """

    def __init__(self, low: Passes, precision: Precision, watch: ForwardWatch) -> None:
        self.subject = subject = low.subject
        self._watch = watch
        self.precision = precision
        self.low = low
        self._fp32 = Passes(subject, in_fp32(subject.model, subject.device.type)) if self.has_low_weights else self.low
        self.reference = [self._fp32.run(index, "fp32") for index in range(NUM_BATCHES)]
        self.fp32_step_seconds: float | None = None
        self.has_moved = True  # False once fp32's own training run has moved no weight
        self._signals: set[str] | None = None
        self._runs: list[Run] = []

    @property
    def has_low_weights(self) -> bool:
        """Whether weights are kept in half precision, so that fp32 is a copy of the model."""
        return has_half_weights(self.subject.model)

    @property
    def num_passes(self) -> int:
        """So far."""
        return self.low.num_passes + (0 if self._fp32 is self.low else self._fp32.num_passes)

    @property
    def format_max(self) -> float:
        """The largest number that the precision holds."""
        is_fp16 = any(p.dtype == torch.float16 for p in self.subject.model.parameters())
        return _FORMAT_MAX["fp16"] if is_fp16 else _FORMAT_MAX.get(self.precision, _FLOAT32_MAX)

    def signals(self) -> set[str]:
        """The parameters whose gradient is more than rounding noise in fp32 itself."""
        if self._signals is None:
            self._fp32.restore()
            perturb(self._fp32.model, REROUNDING, self.subject.seed)
            self._signals = signals(self.reference[0].gradients, self._fp32.go_on(0, "fp32").gradients)
        return self._signals

    def one_step(self, pins: Sequence[str], num_batches: int = NUM_BATCHES) -> Attempt:
        """Loss and gradients of the first batches at the first weights."""
        self._watch.reset()
        with self.low.pinned(pins):
            low, scale, has_safe_scale = self._low_passes(num_batches)
        forward_maxima = self._low_maxima()
        bad_index = next((index for index, done in enumerate(low) if not done.is_finite), None)
        if bad_index is not None:
            return Attempt(tuple(pins), tuple(low), scale, has_safe_scale, bad_index, forward_maxima=forward_maxima)
        difference = math.hypot(*(a.loss - b.loss for a, b in zip(low, self.reference, strict=False)))
        size = math.hypot(*(done.loss for done in self.reference[:num_batches]))
        return Attempt(
            tuple(pins),
            tuple(low),
            scale,
            has_safe_scale,
            comparison=compare(
                [done.gradients for done in low], [done.gradients for done in self.reference], self.signals()
            ),
            loss_error=difference / size if size else difference,
            forward_maxima=forward_maxima,
        )

    def train(self, attempt: Attempt) -> Attempt:
        """The same with a paired training run; the model is left where that ended."""
        runs = self._reference_runs()
        self._watch.reset()
        with self.low.pinned(attempt.pins):
            run = train(self.low, self.precision, NUM_PAIRED_STEPS, scale=attempt.scale)
        reference, *perturbed = runs
        distance = gap(run, reference, perturbed) if run.is_finite and all(r.is_finite for r in runs) else None
        maxima = {
            name: max(maximum, attempt.forward_maxima.get(name, 0.0)) for name, maximum in self._low_maxima().items()
        }
        return replace(attempt, training=run, gap=distance, forward_maxima=maxima)

    def findings(self, attempt: Attempt, low_weights: LowWeights | None) -> Findings:
        """What the verdict rests on."""
        sums = attempt.comparison
        return Findings(
            is_finite=attempt.bad_index is None,
            is_reference_finite=all(done.is_finite for done in self.reference)
            and (not self._runs or self._runs[0].is_finite),
            has_safe_scale=attempt.has_safe_scale,
            noise_ratio=None if sums is None else sums.whole.noise_ratio,
            flushed_share=None if sums is None else sums.whole.flushed_share,
            most_flushed=None if sums is None else sums.most_flushed(),
            noisiest=None if sums is None else next(iter(sums.worst(1)), None),
            forward_max=max(attempt.forward_maxima.values(), default=None),
            format_max=self.format_max,
            is_training_finite=attempt.training is None or attempt.training.is_finite,
            training_gap=None if attempt.gap is None else attempt.gap.over_perturbed,
            training_noise_gap=None if attempt.gap is None else attempt.gap.over_scatter,
            has_moved=self.has_moved,
            lost_share=None if low_weights is None else low_weights.lost_share,
        )

    def lost_updates(self) -> LowWeights | None:
        """What rounding leaves of the first step, where weights are kept in half precision."""
        if not self.has_low_weights:
            return None
        self._fp32.restore()
        weights = {name: parameter.detach() for name, parameter in self._fp32.model.named_parameters()}
        before = {name: weight.clone() for name, weight in weights.items()}
        train(self._fp32, "fp32", 1)
        return lost_updates(self.subject.model, before, after=weights)

    def _low_maxima(self) -> dict[str, float]:
        return {name: math.inf if math.isnan(m) else m for name, m in self._watch.maxima().items()}

    def _low_passes(self, num_batches: int) -> tuple[list[Pass], float, bool]:
        scale = 1.0
        if self.precision == "fp16":
            safe = largest_safe_scale(self.low, 0)
            if safe.log2_scale is None:
                return [safe.last], safe.last_scale, False
            scale = starting_scale([safe.log2_scale])
        low: list[Pass] = []
        while len(low) < num_batches:
            done = self.low.run(len(low), self.precision, scale=scale)
            can_lower = self.precision == "fp16" and math.isfinite(done.loss) and scale > MIN_LOSS_SCALE
            if not done.is_finite and can_lower:
                scale, low = scale / 2, []  # all at one scale, as a training step has them
                continue
            low.append(done)
            if not done.is_finite:
                break
        return low, scale, self.precision != "fp16" or low[-1].is_finite

    def _reference_runs(self) -> list[Run]:
        if not self._runs:
            ours = UNIT_ROUNDOFF["bf16" if self.has_low_weights else self.precision]
            started = time.perf_counter()
            reference = train(self._fp32, "fp32", NUM_PAIRED_STEPS)
            self.has_moved = self._fp32.has_moved()
            perturbed = train(self._fp32, "fp32", NUM_PAIRED_STEPS, perturbation=ours, seed=self.subject.seed)
            self._runs = [reference, perturbed]
            self.fp32_step_seconds = (time.perf_counter() - started) / (2 * NUM_PAIRED_STEPS)
        return self._runs


def is_inside(name: str, pins: Sequence[str]) -> bool:
    """Whether the module of this name is one of `pins` or inside one; "" is the model itself."""
    return any(not pin or name == pin or name.startswith(pin + ".") for pin in pins)


def in_fp32(model: nn.Module, device_type: str) -> nn.Module:
    """A copy with its weights in fp32, and run in it."""
    reference = copy.deepcopy(model).float()
    override(reference, "fp32", device_type)  # casts its inputs up
    return reference
