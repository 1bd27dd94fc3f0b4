"""Comparison of one precision with fp32: single steps, then paired training runs, within a time limit.

If time is short, batches are cut to fewer samples, fewer batches are used, and then no training runs are made. Fewer
batches are used too if the host's memory is short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from autotune_amp.core.config import MIN_LOSS_SCALE
from autotune_amp.core.outcome import Fidelity, LostUpdates, after_steps
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware import host
from autotune_amp.numerics.accumulation import first_dimensions, truncate_batches
from autotune_amp.numerics.calibration import FIRST_LOG2_SCALE, count_octaves, largest_safe_scale
from autotune_amp.numerics.comparison import (
    ERROR_BYTES,
    SUM_BYTES,
    Comparison,
    GradientComparer,
    parameters_with_signal,
)
from autotune_amp.numerics.draws import Fp32RandomMode
from autotune_amp.numerics.grading import (
    NOISY,
    QUIET_COMMON_ERROR,
    SUSPICIOUS_SCATTER,
    Findings,
    Grade,
    grade,
    next_step,
    reason_to_train_longer,
)
from autotune_amp.numerics.locate import OUTSIDE
from autotune_amp.numerics.paired_runs import (
    REROUNDING,
    TrainingRun,
    lost_updates,
    noise_gap,
    perturb,
    relative_gap,
    run_finite_pass,
    shuffled_batch_order,
    train,
    training_divergence,
)
from autotune_amp.numerics.passes import CheckInputs, Passes, PassResult, are_equal, fp32_copy
from autotune_amp.numerics.scaler_replay import starting_scale
from autotune_amp.precision.forward_wrapper import (
    computes_in_half,
    half_dtypes,
    has_half_weights,
    own_class,
    parameters_by_name,
    unwrap,
)
from autotune_amp.precision.modes import MODES, mode_of_dtype

MIN_NUM_BATCHES, MAX_NUM_BATCHES = 4, 8  # batches whose gradients are compared; more than 4 only if time allows
# Shares of the check's time limit that may have passed when something begins: a batch in addition to MIN_NUM_BATCHES, a
# batch in addition to the first two, and a pass of the search for a loss scale.
EXTRA_BATCH_SHARE, BATCH_SHARE, SCALE_SHARE = 0.25, 0.5, 0.25
# Minimum number of samples in a batch that is cut to save time. With 4, 6 to 7 % of a toy model's gradient entries were
# zero in bf16 but not in fp32.
MIN_NUM_SAMPLES = 8
NUM_SCALE_PASSES = 3  # usual number of passes to find a loss scale
CLEARLY_FAITHFUL_SHARE = 0.5  # errors below this share of their limits need no more than MIN_NUM_BATCHES batches
NUM_PAIRED_STEPS = 8  # steps of the short training runs, one in the precision and one in fp32
NUM_ORDERS, LONG_STEPS = 3, (48, 24, 16)  # longer training run: orders of the batches; numbers of steps, longest first
# Fields of `Findings` that are copied to `Fidelity`.
_COPIED_FINDINGS = (
    *("loss_error", "noise_ratio", "common_error", "common_error_interval", "flushed_share"),
    *("forward_max", "format_max"),
    *("training_gap", "training_noise_gap", "has_moved"),
)


@dataclass(frozen=True)
class Attempt:
    """Measurements of a precision with the modules `pins` in fp32, and their grade.

    `scale` is the loss scale of the last single step, with which training runs begin; 1 without a loss scaler.
    `forward_maxima` are the largest output magnitudes by module name. `bad_index` is the index of the batch whose pass
    was not finite in the precision or in fp32, None if all were finite. `comparison` of the gradients is None without
    finite passes. `training` is the short training run in the precision, or the longer one if it became non-finite;
    None if none was made.
    """

    pins: tuple[str, ...]
    scale: float
    forward_maxima: dict[str, float]
    findings: Findings
    bad_index: int | None = None
    comparison: Comparison | None = None
    training: TrainingRun | None = None

    @cached_property
    def grade(self) -> Grade:
        """Return the verdict for the measurements, with its reasons."""
        return grade(self.findings)


class StepMeasurements(NamedTuple):
    """Passes over the same batches in the precision (`low`) and in fp32 (`reference`), compared by their gradients.

    The passes keep no gradients, except the last pair if one of the two is not finite. Then `bad_index` is the index of
    their batch, and `comparison` is None. `scale` is the loss scale of the passes in the precision, 1 without a loss
    scaler. `has_safe_scale` is False if the precision takes a loss scaler and a pass is not finite at any scale.
    `is_cut` is True if time ran out before a scale was found at which the first batch is finite.
    """

    low: list[PassResult]
    reference: list[PassResult]
    scale: float
    bad_index: int | None = None
    has_safe_scale: bool = True
    comparison: Comparison | None = None
    is_cut: bool = False


class ReferencePass(NamedTuple):
    """A batch in fp32: its pass, the histogram of its gradients, and the parameters that can be compared.

    `octaves` holds pairs (k, number of gradient entries with a magnitude from 2^k to below 2^(k+1)).
    `comparable_names` are the parameters whose gradient exceeds fp32's own rounding noise.
    """

    result: PassResult
    octaves: tuple[tuple[int, int], ...]
    comparable_names: set[str]


def least_host_bytes(subject: CheckInputs) -> int:
    """Return the host memory in bytes that a check takes at least.

    That is a copy of its models, and for each trained weight the errors of three batches, fewer of which give no
    interval, and the sum of their gradients.
    """
    models = dict.fromkeys((subject.model, (subject.reference or subject).model))
    values = [value for model in models for value in (*model.parameters(), *model.buffers())]
    copied_bytes = sum(value.numel() * value.element_size() for value in values)
    return copied_bytes + (3 * ERROR_BYTES + SUM_BYTES) * _num_trained(subject)


def _num_trained(subject: CheckInputs) -> int:
    """Return the number of trained weights, without those whose gradients are sparse and take little."""
    tables = (m for m in subject.model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse)
    sparse = {id(table.weight) for table in tables}
    return sum(p.numel() for p in subject.model.parameters() if p.requires_grad and id(p) not in sparse)


class Experiment:
    """Comparison of one precision with fp32. Each `attempt` pins other modules; the fp32 runs are made once for all.

    `low` runs passes over the model in `precision`, and the attribute `fp32` runs those to compare with. `read_maxima`
    returns the largest output magnitudes since its last call, by module name: NaN if an output has one, an empty dict
    if outputs are not recorded. All attempts share it, since each new recording would compile a compiled model again.
    `batch_size`, `label` (the precision in messages) and `num_steps_before` (training steps in fp32 before the check)
    are for the report. `seconds` limits the whole check, from the construction on.
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
        # Longer fp32 runs by number of steps: one from weights that are changed just enough for fp32 to round
        # differently, and one from the unchanged weights for each order of the batches.
        self._longer_runs: dict[int, tuple[TrainingRun, list[TrainingRun]]] = {}
        self._read_maxima = read_maxima
        self._subject = subject = low.subject
        reference = subject.reference or subject
        self._has_half_weights = has_half_weights(subject.model)
        # Of a model that computes in half precision by itself, the coarsest and the narrowest format stand for all.
        own_modes = [mode_of_dtype(str(dtype).removeprefix("torch.")) for dtype in half_dtypes(subject.model)]
        self._roundoff = max(mode.unit_roundoff for mode in (self._mode, *own_modes))
        self._format_max = min(mode.format_max for mode in (self._mode, *own_modes))
        self.fp32 = low if reference is subject else Passes(reference)
        if computes_in_half(reference.model):  # such a model cannot run in fp32, its fp32 copy can
            self.fp32 = Passes(reference, fp32_copy(reference.model, subject.device.type))
        self._seconds = seconds  # limit for the whole check
        self._plain_run: TrainingRun | None = None  # in fp32
        self._perturbed_run: TrainingRun | None = None  # in fp32, from weights changed by up to `_roundoff`
        self._fp32_step_seconds: float | None = None
        self._has_moved = True  # False if the fp32 training run changed no weight
        self._log2_guess = FIRST_LOG2_SCALE  # log2 of the largest safe loss scale in the previous attempt
        self._low_weights = self._lost_updates()  # None if the weights are in fp32

    def attempt(self, pins: tuple[str, ...]) -> Attempt:
        """Measure the precision with the modules `pins` in fp32: single steps, then training runs.

        Gradients are compared over the first batches. A short training run follows, unless the gradients are
        *unfaithful* already or time is short, and a longer one if the verdict is still open. The model keeps the
        weights of the last run.
        """
        self._read_maxima()  # discards the maxima of earlier passes
        with self.low.pinned(pins):
            low, reference, scale, bad_index, has_safe_scale, comparison, is_cut = self._measure_steps()
            maxima = self._updated_maxima({})
            findings = Findings(
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
                return Attempt(pins, scale, maxima, findings, bad_index=bad_index)
            difference = math.hypot(*(a.loss - b.loss for a, b in zip(low, reference, strict=True)))
            size = math.hypot(*(done.loss for done in reference))
            findings = findings._replace(
                loss_error=difference / size if size else difference,
                has_signal=bool(self._reference_pass.comparable_names),
                is_cut=not self.has_time_for(NUM_PAIRED_STEPS, NUM_PAIRED_STEPS),
                **comparison.findings(),
            )
            attempt = Attempt(pins, scale, maxima, findings, comparison=comparison)
            if attempt.grade.verdict == "unfaithful" or findings.is_cut:
                return attempt
            plain = self._train_fp32_once()
            # fp32 is not finite on this batch with the initial weights either: the batch is at fault, not training. The
            # grade then speaks of the first step, which it infers from the missing `loss_error`.
            if not plain.is_finite and not self.fp32.run(plain.last_index, "fp32").is_finite:
                findings = findings._replace(is_reference_finite=False, loss_error=None)
                return Attempt(pins, scale, maxima, findings, bad_index=plain.last_index)
            run = train(self.low, self.precision, NUM_PAIRED_STEPS, scale=scale)
            are_finite = run.is_finite and plain.is_finite
            training_noise_gap = noise_gap(run, plain) if are_finite else None
            maxima = self._updated_maxima(maxima)
            findings = findings._replace(
                is_reference_finite=findings.is_reference_finite and plain.is_finite,
                forward_max=max(maxima.values(), default=None),
                is_training_finite=run.is_finite,
                training_gap=None
                if training_noise_gap is None or training_noise_gap < SUSPICIOUS_SCATTER
                else self._relative_gap(run, plain),
                training_noise_gap=training_noise_gap,
                has_moved=self._has_moved,
            )
            if are_finite and self._has_moved and reason_to_train_longer(findings) is not None:
                findings, failed = self._train_longer(findings, scale)
                run = failed or run
                maxima = self._updated_maxima(maxima)
                findings = findings._replace(forward_max=max(maxima.values(), default=None))
        return replace(attempt, findings=findings, training=run, forward_maxima=maxima)

    def switch_to_fp32_draws(self, attempt: Attempt) -> bool:
        """Switch to random numbers drawn in fp32 if training in the precision draws them in half and fp32 does not.

        Then one seed gives different numbers in the two, which alone can cause a bad verdict. Returns whether it
        switched; if so, all later passes draw in fp32 and round. If not, and the training of `attempt` became
        non-finite, the model keeps the trained weights, in which the cause is looked for.
        """
        if self._subject.is_compiled or not self.low.has_random_draws:
            return False
        random_mode = self.low.random_mode = self.fp32.random_mode = Fp32RandomMode()
        has_failed = attempt.training is not None and not attempt.training.is_finite
        trained = Passes(self.low.subject) if has_failed else None
        draws_in_half = False
        with suppress(Exception):  # the user's code is run in an unusual way and may raise anything
            self.fp32.run(0, "fp32")
            if not random_mode.num_drawn:
                with self.low.pinned(attempt.pins):
                    self.low.run(0, self.precision)
                draws_in_half = random_mode.num_drawn > 0
        if not draws_in_half:
            self.low.random_mode = self.fp32.random_mode = None
            if trained is not None:
                trained.restore()
        return draws_in_half

    @cached_property
    def _reference_pass(self) -> ReferencePass:
        """Return the fp32 pass over the first batch with a gradient that is not zero, among `MIN_NUM_BATCHES`.

        The gradient may be zero, for instance if all labels of a batch are ignored. A second pass, with weights changed
        just enough for fp32 to round differently, shows which parameters have more than rounding noise.
        """
        indices = iter(range(MIN_NUM_BATCHES))
        index = next(indices)
        result = self.fp32.run(index, "fp32")
        while not result.has_gradient and (next_index := next(indices, None)) is not None:
            index, result = next_index, self.fp32.run(next_index, "fp32")
        self.fp32.restore()
        perturb(self.fp32.model, REROUNDING, self._subject.seed)
        perturbed = self.fp32.run(index, "fp32", restores=False)
        octaves = tuple(sorted(count_octaves(result.gradients.values()).items()))
        names = parameters_with_signal(result.gradients, perturbed.gradients)
        return ReferencePass(result if not result.is_finite else replace(result, gradients={}), octaves, names)

    def report(
        self, attempt: Attempt, culprits: tuple[str, ...] = (), healing_pins: tuple[str, ...] = (), where: str = ""
    ) -> Fidelity:
        """Return the fidelity that `attempt` shows, with the modules `culprits` as the origin of its error.

        `healing_pins` are the modules that make the precision faithful if they are pinned. Without `culprits`, `where`
        takes the place of their names in the reason: a clause that begins with a semicolon.
        """
        comparison, findings, training = attempt.comparison, attempt.findings, attempt.training
        verdict, low_weights = attempt.grade.verdict, self._low_weights
        labels = {
            OUTSIDE: "the code outside of the model, such as the loss function or the optimizer",
            "": f"the model's own forward ({own_class(unwrap(self.low.model)).__name__})",
        }
        where = f"; it begins in {', '.join(labels.get(name, name) for name in culprits)}" if culprits else where
        if self.low.random_mode is not None:
            where += "; random numbers were drawn in fp32 and rounded, since draws in half precision differ"
        is_due_to_low_weights = attempt.grade.is_due_to_low_weights or (
            low_weights is not None and culprits == (OUTSIDE,)
        )
        return Fidelity(
            precision=self.precision,
            batch_size=self._batch_size,
            verdict=verdict,
            reason=f"{self._label} is {verdict}{after_steps(self._num_steps_before)}: {attempt.grade.reason}{where}.",
            next_step=attempt.grade.next_step
            or next_step(self._label, verdict, healing_pins, is_due_to_low_weights=is_due_to_low_weights),
            pinned_modules=attempt.pins,
            **{name: getattr(findings, name) for name in _COPIED_FINDINGS},
            **{} if comparison is None else comparison.fidelity_fields(),
            loss_scale=attempt.scale if self._mode.takes_scaler else None,
            num_paired_steps=0 if training is None else len(training.losses),
            num_skips=0 if training is None else training.num_skips,
            modules=() if comparison is None else tuple(comparison.modules),
            gradient_histogram=self._reference_pass.octaves,
            culprits=culprits,
            healing_pins=healing_pins,
            low_weights=low_weights,
            num_passes=self.low.num_passes + (0 if self.fp32 is self.low else self.fp32.num_passes),
            seconds=time.perf_counter() - self._started,
            fp32_step_seconds=self._fp32_step_seconds,
            num_steps_before=self._num_steps_before,
        )

    def _lost_updates(self) -> LostUpdates | None:
        """Return the share of updates that half-precision weights would lose to rounding in an fp32 optimizer step.

        None without weights in half precision, or if the step changes none of them.
        """
        if not self._has_half_weights:
            return None
        self.fp32.restore()
        weights = {name: parameter.detach() for name, parameter in parameters_by_name(self.fp32.model).items()}
        before = {name: weight.clone() for name, weight in weights.items()}
        train(self.fp32, "fp32", 1)
        return lost_updates(self._subject.model, before, after=weights)

    def _updated_maxima(self, before: dict[str, float]) -> dict[str, float]:
        """Return the largest output magnitudes by module since the last reading, or in `before`; infinity for NaN."""
        maxima = self._read_maxima().items()
        return {name: math.inf if math.isnan(m) else max(m, before.get(name, 0.0)) for name, m in maxima}

    def _measure_steps(self) -> StepMeasurements:
        """Run distinct batches in the precision and in fp32, all at one loss scale, and compare their gradients.

        Ends at the first batch that is not finite in one of the two, after `MIN_NUM_BATCHES` if these leave no doubt,
        or for lack of time or memory. If a batch needs a lower loss scale, all batches are run again with it.
        """
        scale = 1.0
        if self._mode.takes_scaler:
            deadline = self._started + SCALE_SHARE * self._seconds
            safe_scale = largest_safe_scale(self.low, 0, self._log2_guess, deadline=max(deadline, time.perf_counter()))
            if safe_scale.log2_scale is None:
                is_cut = not safe_scale.is_searched
                return StepMeasurements(
                    [safe_scale.last],
                    [self._reference_pass.result],
                    MIN_LOSS_SCALE,
                    bad_index=None if is_cut else 0,
                    has_safe_scale=is_cut,  # a search that was cut does not show that there is none
                    is_cut=is_cut,
                )
            self._log2_guess = safe_scale.log2_scale
            scale = starting_scale([safe_scale.log2_scale])
        low: list[PassResult] = []
        reference: list[PassResult] = []
        comparer = GradientComparer(self._reference_pass.comparable_names)
        while len(low) < len(self._distinct_indices) and self._can_compare_another(len(low)):
            index = self._distinct_indices[len(low)]
            started = time.perf_counter()
            reference_pass = self.fp32.run(index, "fp32")
            self._fp32_step_seconds = time.perf_counter() - started
            low_pass, lowered_scale, _ = run_finite_pass(self.low, index, self.precision, scale, restores=True)
            if not low_pass.is_finite or not reference_pass.is_finite:
                return StepMeasurements(
                    [*low, low_pass],
                    [*reference, reference_pass],
                    lowered_scale,
                    bad_index=index,
                    has_safe_scale=not self._mode.takes_scaler or low_pass.is_finite,
                )
            if lowered_scale != scale:  # start again, so that all batches have the same scale
                low, reference, comparer, scale = (
                    [],
                    [],
                    GradientComparer(self._reference_pass.comparable_names),
                    lowered_scale,
                )
                continue
            comparer.add(low_pass.gradients, reference_pass.gradients)
            low = [*low, replace(low_pass, gradients={})]
            reference = [*reference, replace(reference_pass, gradients={})]
            del low_pass, reference_pass  # frees memory for the next
            if len(low) == MIN_NUM_BATCHES and _is_clearly_faithful(comparer.compared()):
                break
        return StepMeasurements(low, reference, scale, comparison=comparer.compared())

    @cached_property
    def _distinct_indices(self) -> list[int]:
        """Return the indices of the first `MAX_NUM_BATCHES` batches, without those equal to an earlier one.

        Equal batches have the same noise, so they would count as an error common to several batches.
        """
        batches = self._subject.batches[:MAX_NUM_BATCHES]
        return [i for i, one in enumerate(batches) if not any(are_equal(one, other) for other in batches[:i])]

    def _can_compare_another(self, num_batches: int) -> bool:
        """Return whether to compare another batch after `num_batches`: two at least, more if there is time, and more
        than three if twice the memory is free on the host that its errors take.
        """
        share = EXTRA_BATCH_SHARE if num_batches >= MIN_NUM_BATCHES else BATCH_SHARE
        has_time = self._elapsed_seconds() < share * self._seconds
        has_memory = num_batches < 3 or 2 * ERROR_BYTES * _num_trained(self._subject) <= host.free_memory_bytes()
        return num_batches < 2 or (has_time and has_memory)

    def _elapsed_seconds(self) -> float:
        return time.perf_counter() - self._started

    def has_time_for(self, num_fp32: int, num_low: int, num_restores: int = 0) -> bool:
        """Return whether the time left is enough for so many passes in fp32 and in the precision, as predicted.

        `num_restores` of them restore the first weights. Before the first pass, return whether the time limit has not
        passed.
        """
        restore_seconds = num_restores * self.low.restore_seconds
        predicted_seconds = self._predicted_seconds(num_fp32, num_low) + restore_seconds
        return self._elapsed_seconds() + predicted_seconds <= self._seconds

    def _predicted_seconds(self, num_fp32: int, num_low: int) -> float:
        """Predict the seconds of this many passes, each half as long again as the fastest so far in its precision.

        The extra half is for optimizer steps and copies. 0 before the first pass.
        """
        fp32_seconds = self.fp32.seconds_of.get("fp32", 0.0)
        return 1.5 * (num_fp32 * fp32_seconds + num_low * self.low.seconds_of.get(self.precision, fp32_seconds))

    def cut_samples_to_time(self) -> None:
        """Cut each batch to fewer samples if the check would exceed its time limit.

        Its time is predicted from a few passes, for comparing `MIN_NUM_BATCHES` batches and the short training runs.
        The number of samples is halved as often as needed, but not below `MIN_NUM_SAMPLES`.

        Batches stay whole with a custom training loop, with tensors of different first dimensions, or if the loss
        raises for a part of a batch.
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
        allowed_sizes = [
            num_samples >> k for k in range(num_samples.bit_length()) if num_samples >> k >= MIN_NUM_SAMPLES
        ]
        # A CPU's time grows with the number of samples; an accelerator's may not.
        num_tried = allowed_sizes[-1] if subject.device.type == "cpu" else num_samples
        num_fp32 = MIN_NUM_BATCHES + NUM_PAIRED_STEPS + 2  # the last two are those of `_reference_pass`
        num_low = MIN_NUM_BATCHES + NUM_PAIRED_STEPS + (NUM_SCALE_PASSES if self._mode.takes_scaler else 0)
        num_restores = num_fp32 + num_low - 2 * NUM_PAIRED_STEPS  # training steps restore nothing
        fitting: list[int] = []  # allowed sizes for which there is time, largest first
        with suppress(Exception):  # a loss may need its batch size; other exceptions recur later
            self._use_batches(truncate_batches(subject.batches, num_tried))
            for _ in range(2):  # the first pass may be slow
                self.fp32.run(0, "fp32")
                self.low.run(0, self.precision, scale=2.0**self._log2_guess if self._mode.takes_scaler else 1.0)
                left = self._seconds - self._elapsed_seconds() - num_restores * self.low.restore_seconds
                seconds_per_sample = self._predicted_seconds(num_fp32, num_low) / num_tried
                fitting = [size for size in allowed_sizes if size * seconds_per_sample <= left] or allowed_sizes[-1:]
                if fitting[0] == num_samples or left <= 0:
                    break
        if fitting and fitting[0] < num_samples:
            self._use_batches(truncate_batches(subject.batches, fitting[0]))
            self._batch_size = self._batch_size * fitting[0] // num_samples
        else:
            self._use_batches(subject.batches)

    def _use_batches(self, batches: Sequence[Any]) -> None:
        """Use these batches in all further passes, and forget the times of passes over the earlier ones."""
        self._subject = self.low.subject = replace(self.low.subject, batches=batches)
        self.fp32.subject = replace(self.fp32.subject, batches=batches)
        self.low.seconds_of.clear()
        self.fp32.seconds_of.clear()

    def _train_longer(self, findings: Findings, scale: float) -> tuple[Findings, TrainingRun | None]:
        """Add the results of longer training runs over several orders of the batches to `findings`.

        `scale` is the first loss scale. Returns `findings` unchanged if there is no time for the shortest run, or if a
        run in fp32 becomes non-finite. The second value is the run in the precision that became non-finite, or None.
        The model keeps the weights of the last run.
        """
        num_runs = NUM_ORDERS + 1, NUM_ORDERS
        possible = (n for n in LONG_STEPS if self.has_time_for(num_runs[0] * n, num_runs[1] * n, sum(num_runs)))
        num_steps = next(possible, None)
        if num_steps is None:
            return findings, None
        orders = [shuffled_batch_order(num_steps, MAX_NUM_BATCHES, order) for order in range(NUM_ORDERS)]
        if num_steps not in self._longer_runs:
            rerounded = train(
                self.fp32, "fp32", num_steps, order=orders[0], perturbation=REROUNDING, seed=self._subject.seed
            )
            self._longer_runs[num_steps] = rerounded, [train(self.fp32, "fp32", num_steps, order=o) for o in orders]
        rerounded, fp32 = self._longer_runs[num_steps]
        if not all(run.is_finite for run in (rerounded, *fp32)):
            return findings, None
        low: list[TrainingRun] = []
        for order in orders:
            low.append(train(self.low, self.precision, num_steps, scale=scale, order=order))
            if not low[-1].is_finite:
                return findings._replace(is_training_finite=False), low[-1]
        divergence = training_divergence(low, fp32, rerounded, MAX_NUM_BATCHES, self._roundoff)
        return findings._replace(divergence=divergence), None

    def _train_fp32_once(self) -> TrainingRun:
        """Return the short fp32 training run. The first call makes it, times its steps, and sets `_has_moved`."""
        if self._plain_run is None:
            started = time.perf_counter()
            self._plain_run = train(self.fp32, "fp32", NUM_PAIRED_STEPS)
            self._fp32_step_seconds = (time.perf_counter() - started) / NUM_PAIRED_STEPS
            parameters = self.fp32.model.named_parameters()
            changed = self.fp32.changed(named for named in parameters if named[1].requires_grad)
            self._has_moved = next(changed, None) is not None
        return self._plain_run

    def _relative_gap(self, run: TrainingRun, plain: TrainingRun) -> float | None:
        """Return the mean distance of the losses of `run` from those of the fp32 run `plain`, relative to a yardstick.

        The yardstick is the distance of an fp32 run whose initial weights are changed by one rounding of the precision.
        None if that run became non-finite.
        """
        if self._perturbed_run is None:
            roundoff, seed = self._roundoff, self._subject.seed
            self._perturbed_run = train(self.fp32, "fp32", NUM_PAIRED_STEPS, perturbation=roundoff, seed=seed)
        return relative_gap(run, plain, self._perturbed_run) if self._perturbed_run.is_finite else None


def _is_clearly_faithful(comparison: Comparison) -> bool:
    """Return whether every error is so far below its limit that more batches cannot change the verdict."""
    findings, whole = Findings(**comparison.findings()), comparison.whole
    max_common_error = math.inf if whole.common_error_interval is None else whole.common_error_interval[1]
    are_small = (
        max_common_error < CLEARLY_FAITHFUL_SHARE * QUIET_COMMON_ERROR
        and whole.noise_ratio < CLEARLY_FAITHFUL_SHARE * NOISY
    )
    return are_small and reason_to_train_longer(findings) is None
