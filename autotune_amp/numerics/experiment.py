"""Measurements of one precision against fp32: single steps, then paired training runs, as far as time allows.

If time is short, fewer batches are used, then fewer samples of each, and then no training runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from autotune_amp.core.config import FP16_MAX, MIN_LOSS_SCALE
from autotune_amp.core.outcome import Fidelity, LostUpdates, after_steps
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.accumulation import cut_all, first_dimensions
from autotune_amp.numerics.calibration import FIRST_GUESS, count_octaves, largest_safe_scale
from autotune_amp.numerics.comparison import Comparison, GradientComparer, signals
from autotune_amp.numerics.draws import DrawnInFp32
from autotune_amp.numerics.grading import (
    NOISY,
    QUIET_COMMON_ERROR,
    SUSPICIOUS_SCATTER,
    Findings,
    Grade,
    grade,
    next_step,
    suspicion,
)
from autotune_amp.numerics.locate import OUTSIDE
from autotune_amp.numerics.paired_runs import (
    REROUNDING,
    TrainingRun,
    finite_pass,
    gap,
    lost_updates,
    noise_gap,
    perturb,
    shuffled,
    train,
    training_divergence,
)
from autotune_amp.numerics.passes import Pass, Passes, are_equal, in_fp32
from autotune_amp.numerics.scaler_replay import starting_scale
from autotune_amp.precision.forward_wrapper import has_half_weights, own_class, parameters_by_name, unwrap
from autotune_amp.precision.modes import MODES

MIN_NUM_BATCHES, MAX_NUM_BATCHES = 4, 8  # compared in one step, as time allows
# Shares of the check's seconds after which only the minimum number of batches is used, then two, and after which the
# search for a loss scale ends.
STEP_SHARE, SHORT_SHARE, SCALE_SHARE = 0.25, 0.5, 0.25
MIN_NUM_SAMPLES = 8  # of a batch cut for lack of time; with 4, one toy flushed 6 to 7 % in bf16, with 8 up to 2 %
NUM_SCALE_PASSES = 3  # usual number of passes to find a loss scale
SURE_SHARE = 0.5  # share of the limits below which the minimum number of batches suffices
NUM_PAIRED_STEPS = 8
NUM_ORDERS, LONG_STEPS = 3, (48, 24, 16)  # longer training run: orders of the batches; steps, as time allows
_NUM_WORST = 5
# The findings that `Fidelity` contains unchanged.
_SAID = (
    *("loss_error", "noise_ratio", "common_error", "common_error_interval", "flushed_share"),
    *("forward_max", "format_max"),
    *("training_gap", "training_noise_gap", "has_moved"),
)


@dataclass(frozen=True)
class Attempt:
    """Measurements of a precision with the modules `pins` in fp32, and their grade.

    `forward_maxima` are the largest output magnitudes by module. `bad_index` is the batch of the pass that was not
    finite, None if all were; `scale` the last loss scale.
    """

    pins: tuple[str, ...]
    scale: float
    forward_maxima: dict[str, float]
    found: Findings
    bad_index: int | None = None
    comparison: Comparison | None = None
    training: TrainingRun | None = None

    @cached_property
    def grade(self) -> Grade:
        """Return the verdict for the measurements, with its reasons."""
        return grade(self.found)


class Steps(NamedTuple):
    """Passes over batches in the precision and in fp32, without their gradients, and the `comparison` of these.

    If a pass is not finite, it is the last, with gradients, `bad_index` is its batch and `comparison` None. `is_cut`:
    time ran out before a loss scale was found at which the first pass is finite.
    """

    low: list[Pass]
    reference: list[Pass]
    scale: float
    bad_index: int | None = None
    is_safe: bool = True
    comparison: Comparison | None = None
    is_cut: bool = False


class ReferencePass(NamedTuple):
    """A batch in fp32: its pass, its gradients by octave, and the parameters whose gradient exceeds rounding noise."""

    first: Pass
    octaves: tuple[tuple[int, int], ...]
    signals: set[str]


class Experiment:
    """Comparison of one precision with fp32: the fp32 runs, made once and on demand, and attempts in the precision.

    `read_maxima` is the function that `watch_forward` yields for the subject's model: one for all attempts, so that a
    compiled model is compiled once per precision.
    """

    def __init__(
        self,
        low: Passes,
        precision: Precision,
        batch_size: int,
        read_maxima: Callable[[], dict[str, float]],
        label: str,
        num_steps_before: int,
        seconds: float,
    ) -> None:
        self._started = time.perf_counter()
        self._batch_size = batch_size
        self._label = label
        self._num_steps_before = num_steps_before
        self.low = low
        self.precision = precision
        self._mode = MODES[precision]
        self._longer_runs: dict[
            int, tuple[TrainingRun, list[TrainingRun]]
        ] = {}  # fp32, by number of steps: rerounded, and by order
        self._read_maxima = read_maxima
        self._subject = subject = low.subject
        reference = subject.reference or subject
        self._has_half_weights = has_half_weights(subject.model)
        self._roundoff = MODES["bf16" if self._has_half_weights else precision].unit_roundoff
        is_fp16 = any(parameter.dtype == torch.float16 for parameter in subject.model.parameters())
        self._format_max = FP16_MAX if is_fp16 else self._mode.format_max
        self.fp32 = low if reference is subject else Passes(reference)
        if has_half_weights(reference.model):  # fp32 runs use a copy of the model
            self.fp32 = Passes(reference, in_fp32(reference.model, subject.device.type))
        self._seconds = seconds  # limit for the whole check
        self._plain_run: TrainingRun | None = None  # in fp32
        self._perturbed_run: TrainingRun | None = None  # in fp32, from weights changed by the precision's rounding
        self._fp32_step_seconds: float | None = None
        self._has_moved = True  # False if fp32's own training run changed no weight
        self._log2_guess = FIRST_GUESS  # log2 of the largest safe loss scale in the attempt before
        self._low_weights = self._lost_updates()

    def attempt(self, pins: tuple[str, ...]) -> Attempt:
        """Measure the precision with the modules `pins` in fp32: one step, then training runs.

        The step covers the first batches; if it is not bad, a short training run follows, and a longer one if a
        question remains. The model is left at the end of the last run.
        """
        self._read_maxima()  # discards those of earlier passes
        with self.low.pinned(pins):
            low, reference, scale, bad_index, has_safe_scale, comparison, is_cut = self._steps()
            maxima = self._low_maxima({})
            found = Findings(
                is_finite=low[-1].is_finite or is_cut,
                is_reference_finite=all(done.is_finite for done in reference),
                has_safe_scale=has_safe_scale,
                forward_max=max(maxima.values(), default=None),
                format_max=self._format_max,
                lost_share=None if self._low_weights is None else self._low_weights.lost_share,
                num_steps_per_call=self.low.num_steps_per_call,
                reuses_casts=self.low.reuses_casts,
                is_cut=is_cut,
            )
            if comparison is None:
                return Attempt(pins, scale, maxima, found, bad_index=bad_index)
            difference = math.hypot(*(a.loss - b.loss for a, b in zip(low, reference, strict=True)))
            size = math.hypot(*(done.loss for done in reference))
            found = found._replace(
                loss_error=difference / size if size else difference,
                has_signal=bool(self._look.signals),
                is_cut=not self.has_time_for(NUM_PAIRED_STEPS, NUM_PAIRED_STEPS),
                **comparison.findings(),
            )
            attempt = Attempt(pins, scale, maxima, found, comparison=comparison)
            if attempt.grade.verdict == "unfaithful" or found.is_cut:
                return attempt
            plain = self._plain()
            if not plain.is_finite and not self.fp32.run(plain.last_index, "fp32").is_finite:  # nor before training
                found = found._replace(is_reference_finite=False, loss_error=None)
                return Attempt(pins, scale, maxima, found, bad_index=plain.last_index)
            run = train(self.low, self.precision, NUM_PAIRED_STEPS, scale=scale)
            are_finite = run.is_finite and plain.is_finite
            scatter = noise_gap(run, plain) if are_finite else None
            maxima = self._low_maxima(maxima)
            found = found._replace(
                is_reference_finite=found.is_reference_finite and plain.is_finite,
                forward_max=max(maxima.values(), default=None),
                is_training_finite=run.is_finite,
                training_gap=None if scatter is None or scatter < SUSPICIOUS_SCATTER else self._gap(run, plain),
                training_noise_gap=scatter,
                has_moved=self._has_moved,
            )
            if are_finite and self._has_moved and suspicion(found) is not None:
                found, failed = self._trained_longer(found, scale)
                run = failed or run
                maxima = self._low_maxima(maxima)
                found = found._replace(forward_max=max(maxima.values(), default=None))
        return replace(attempt, found=found, training=run, forward_maxima=maxima)

    def takes_like_draws(self, pins: tuple[str, ...]) -> bool:
        """Return whether the precision draws other random numbers than fp32, in half precision, and make it draw
        fp32's.

        From then on it uses fp32's numbers, rounded, since different ones alone can cause a bad verdict.
        """
        if self._subject.is_compiled or not self.low.has_drawn:
            return False
        drawn = self.low.drawn = self.fp32.drawn = DrawnInFp32()
        are_unlike = False
        with suppress(Exception):  # the user's code is run in an unusual way and may raise anything
            self.fp32.run(0, "fp32")
            if not drawn.num_drawn:
                with self.low.pinned(pins):
                    self.low.run(0, self.precision)
                are_unlike = drawn.num_drawn > 0
        if not are_unlike:
            self.low.drawn = self.fp32.drawn = None
        return are_unlike

    @cached_property
    def _look(self) -> ReferencePass:
        """Run the first batch that has a gradient in fp32, and again with other rounding.

        A batch without a gradient, as without labels, says nothing about the others.
        """
        indices = iter(range(MIN_NUM_BATCHES))
        index = next(indices)
        first = self.fp32.run(index, "fp32")
        while not first.has_gradient and (following := next(indices, None)) is not None:
            index, first = following, self.fp32.run(following, "fp32")
        self.fp32.restore()
        perturb(self.fp32.model, REROUNDING, self._subject.seed)
        moved = self.fp32.run(index, "fp32", restores=False)
        octaves = tuple(sorted(count_octaves(first.gradients.values()).items()))
        names = signals(first.gradients, moved.gradients)
        return ReferencePass(first if not first.is_finite else replace(first, gradients={}), octaves, names)

    def report(
        self, attempt: Attempt, culprits: tuple[str, ...] = (), healing: tuple[str, ...] = (), where: str = ""
    ) -> Fidelity:
        """Return the result so far. `where`, a clause on where the error begins, is used without `culprits`."""
        sums, found, training = attempt.comparison, attempt.found, attempt.training
        parameters = [] if sums is None else sums.parameters
        verdict, low_weights = attempt.grade.verdict, self._low_weights
        places = {
            OUTSIDE: "the code outside of the model, as the loss function or the optimizer",
            "": f"the model's own forward ({own_class(unwrap(self.low.model)).__name__})",
        }
        where = f"; it begins in {', '.join(places.get(name, name) for name in culprits)}" if culprits else where
        if self.low.drawn is not None:
            where += "; its random numbers were fp32's, rounded, since in half precision it draws others"
        is_of_weights = attempt.grade.is_of_weights or (low_weights is not None and culprits == (OUTSIDE,))
        return Fidelity(
            precision=self.precision,
            batch_size=self._batch_size,
            verdict=verdict,
            reason=f"{self._label} is {verdict}{after_steps(self._num_steps_before)}: {attempt.grade.reason}{where}.",
            next_step=attempt.grade.next_step or next_step(self._label, verdict, healing, is_of_weights=is_of_weights),
            pinned_modules=attempt.pins,
            **{name: getattr(found, name) for name in _SAID},
            gradient_cosine=None if sums is None else sums.whole.cosine,
            gradient_norm_ratio=None if sums is None else sums.whole.norm_ratio,
            loss_scale=attempt.scale if self._mode.takes_scaler else None,
            num_paired_steps=0 if training is None else len(training.losses),
            num_skips=0 if training is None else training.num_skips,
            worst_parameters=tuple(sorted(parameters, key=attrgetter("noise_ratio"), reverse=True)[:_NUM_WORST]),
            modules=() if sums is None else tuple(sums.modules),
            gradient_histogram=self._look.octaves,
            culprits=culprits,
            healing_pins=healing,
            low_weights=low_weights,
            num_passes=self.low.num_passes + (0 if self.fp32 is self.low else self.fp32.num_passes),
            seconds=time.perf_counter() - self._started,
            fp32_step_seconds=self._fp32_step_seconds,
            num_steps_before=self._num_steps_before,
        )

    def _lost_updates(self) -> LostUpdates | None:
        """Return the share of the first step's updates lost to rounding; None without weights in half precision."""
        if not self._has_half_weights:
            return None
        self.fp32.restore()
        weights = {name: parameter.detach() for name, parameter in parameters_by_name(self.fp32.model).items()}
        before = {name: weight.clone() for name, weight in weights.items()}
        train(self.fp32, "fp32", 1)
        return lost_updates(self._subject.model, before, after=weights)

    def _low_maxima(self, before: dict[str, float]) -> dict[str, float]:
        maxima = self._read_maxima().items()
        return {name: math.inf if math.isnan(m) else max(m, before.get(name, 0.0)) for name, m in maxima}

    def _steps(self) -> Steps:
        """Run different batches in the precision, at one loss scale as in a training step, and in fp32.

        Ends at the first pass that is not finite.
        """
        scale = 1.0
        if self._mode.takes_scaler:
            deadline = self._started + SCALE_SHARE * self._seconds
            safe = largest_safe_scale(self.low, 0, self._log2_guess, deadline=max(deadline, time.perf_counter()))
            if safe.log2_scale is None:
                is_cut = not safe.is_searched
                bad_index = None if is_cut else 0
                return Steps([safe.last], [self._look.first], MIN_LOSS_SCALE, bad_index, is_safe=is_cut, is_cut=is_cut)
            self._log2_guess = safe.log2_scale
            scale = starting_scale([safe.log2_scale])
        low: list[Pass] = []
        reference: list[Pass] = []
        comparer = GradientComparer(self._look.signals)
        while len(low) < len(self._distinct) and self._has_time_for_batch(len(low)):
            index = self._distinct[len(low)]
            started = time.perf_counter()
            fp32 = self.fp32.run(index, "fp32")
            self._fp32_step_seconds = time.perf_counter() - started
            done, lower, _ = finite_pass(self.low, index, self.precision, scale, restores=True)
            if not done.is_finite or not fp32.is_finite:
                is_safe = not self._mode.takes_scaler or done.is_finite
                return Steps([*low, done], [*reference, fp32], lower, bad_index=index, is_safe=is_safe)
            if lower != scale:  # start again
                low, reference, comparer, scale = [], [], GradientComparer(self._look.signals), lower
                continue
            comparer.add(done.gradients, fp32.gradients)
            low, reference = [*low, replace(done, gradients={})], [*reference, replace(fp32, gradients={})]
            del done, fp32  # frees memory for the next
            if len(low) == MIN_NUM_BATCHES and _is_sure(comparer.compared()):
                break
        return Steps(low, reference, scale, comparison=comparer.compared())

    @cached_property
    def _distinct(self) -> list[int]:
        """Return the indices of distinct batches: equal batches have the same noise."""
        batches = self._subject.batches[:MAX_NUM_BATCHES]
        return [i for i, one in enumerate(batches) if not any(are_equal(one, other) for other in batches[:i])]

    def _has_time_for_batch(self, num_batches: int) -> bool:
        share = STEP_SHARE if num_batches >= MIN_NUM_BATCHES else SHORT_SHARE
        return num_batches < 2 or self._spent() < share * self._seconds

    def _spent(self) -> float:
        return time.perf_counter() - self._started

    def has_time_for(self, num_fp32: int, num_low: int) -> bool:
        """Return whether this many further passes fit, each as fast as the fastest so far, plus half for other work."""
        return self._spent() + self._foreseen(num_fp32, num_low) <= self._seconds

    def _foreseen(self, num_fp32: int, num_low: int) -> float:
        fp32_seconds = self.fp32.seconds_of.get("fp32", 0.0)
        return 1.5 * (num_fp32 * fp32_seconds + num_low * self.low.seconds_of.get(self.precision, fp32_seconds))

    def fit_samples(self) -> None:
        """Reduce the samples per batch if the minimum of batches and a training run would take too long.

        Batches stay whole if they cannot be cut, as for a training loop of the user's own, or if the loss does not
        accept parts.
        """
        subject, sizes = self._subject, first_dimensions(self._subject.batches)
        num_samples = min(sizes, default=0)
        if (
            self._seconds == math.inf
            or subject.loop is not None
            or len(sizes) != 1
            or num_samples < 2 * MIN_NUM_SAMPLES
        ):
            return
        halves = [num_samples >> k for k in range(num_samples.bit_length()) if num_samples >> k >= MIN_NUM_SAMPLES]
        # A CPU's time grows with the number of samples; an accelerator's may not.
        num_tried = halves[-1] if subject.device.type == "cpu" else num_samples
        num_fp32 = MIN_NUM_BATCHES + NUM_PAIRED_STEPS + 2  # and two that separate signals from noise
        num_low = MIN_NUM_BATCHES + NUM_PAIRED_STEPS + (NUM_SCALE_PASSES if self._mode.takes_scaler else 0)
        fitting: list[int] = []
        with suppress(Exception):  # the user's code may need one batch size; other exceptions will recur later
            self._look_at(cut_all(subject.batches, num_tried))
            for _ in range(2):  # the first may be slow
                self.fp32.run(0, "fp32")
                self.low.run(0, self.precision, scale=2.0**self._log2_guess if self._mode.takes_scaler else 1.0)
                left, seconds = self._seconds - self._spent(), self._foreseen(num_fp32, num_low) / num_tried
                fitting = [num for num in halves if num * seconds <= left] or halves[-1:]
                if fitting[0] == num_samples or left <= 0:
                    break
        if fitting and fitting[0] < num_samples:
            self._look_at(cut_all(subject.batches, fitting[0]))
            self._batch_size = self._batch_size * fitting[0] // num_samples
        else:
            self._look_at(subject.batches)

    def _look_at(self, batches: Sequence[Any]) -> None:
        """Use these batches in all further passes."""
        self._subject = self.low.subject = replace(self.low.subject, batches=batches)
        self.fp32.subject = replace(self.fp32.subject, batches=batches)
        self.low.seconds_of.clear()
        self.fp32.seconds_of.clear()

    def _trained_longer(self, found: Findings, scale: float) -> tuple[Findings, TrainingRun | None]:
        """Add the results of longer training runs over several orders of the batches to `found`.

        `found` is returned unchanged if there is no time for the shortest; the second value is the run that did not
        stay finite, None without one. The model is left at the end of the last run.
        """
        num_steps = next((n for n in LONG_STEPS if self.has_time_for((NUM_ORDERS + 1) * n, NUM_ORDERS * n)), None)
        if num_steps is None:
            return found, None
        orders = [shuffled(num_steps, MAX_NUM_BATCHES, order) for order in range(NUM_ORDERS)]
        if num_steps not in self._longer_runs:
            rerounded = train(
                self.fp32, "fp32", num_steps, order=orders[0], perturbation=REROUNDING, seed=self._subject.seed
            )
            self._longer_runs[num_steps] = rerounded, [train(self.fp32, "fp32", num_steps, order=o) for o in orders]
        rerounded, fp32 = self._longer_runs[num_steps]
        if not all(run.is_finite for run in (rerounded, *fp32)):
            return found, None
        low: list[TrainingRun] = []
        for order in orders:
            low.append(train(self.low, self.precision, num_steps, scale=scale, order=order))
            if not low[-1].is_finite:
                return found._replace(is_training_finite=False), low[-1]
        divergence = training_divergence(low, fp32, rerounded, MAX_NUM_BATCHES, self._roundoff)
        return found._replace(divergence=divergence), None

    def _plain(self) -> TrainingRun:
        if self._plain_run is None:
            started = time.perf_counter()
            self._plain_run = train(self.fp32, "fp32", NUM_PAIRED_STEPS)
            self._fp32_step_seconds = (time.perf_counter() - started) / NUM_PAIRED_STEPS
            parameters = self.fp32.model.named_parameters()
            changed = self.fp32.changed(named for named in parameters if named[1].requires_grad)
            self._has_moved = next(changed, None) is not None
        return self._plain_run

    def _gap(self, run: TrainingRun, plain: TrainingRun) -> float | None:
        if self._perturbed_run is None:
            roundoff, seed = self._roundoff, self._subject.seed
            self._perturbed_run = train(self.fp32, "fp32", NUM_PAIRED_STEPS, perturbation=roundoff, seed=seed)
        return gap(run, plain, self._perturbed_run) if self._perturbed_run.is_finite else None


def _is_sure(comparison: Comparison) -> bool:
    """Return whether further batches cannot change the result: every number is far below its limit."""
    found, whole = Findings(**comparison.findings()), comparison.whole
    most = math.inf if whole.common_error_interval is None else whole.common_error_interval[1]
    are_small = most < SURE_SHARE * QUIET_COMMON_ERROR and whole.noise_ratio < SURE_SHARE * NOISY
    return are_small and suspicion(found) is None
