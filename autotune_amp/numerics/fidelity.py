"""Whether a precision learns what fp32 learns: the same weights, batches and draws in both, then a verdict.

One step first, over four to eight batches; then a short training run, and a longer one, over the same batches in
several orders, where the step leaves open whether rounding harms. Where the verdict is bad, the modules responsible are
looked for, and tried in fp32.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import torch

from autotune_amp.core.config import FP16_MAX, MIN_LOSS_SCALE
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.outcome import Fidelity, LowWeights, after_steps
from autotune_amp.numerics.calibration import FIRST_GUESS, count_octaves, largest_safe_scale
from autotune_amp.numerics.comparison import (
    Comparison,
    Gathered,
    Run,
    finite_pass,
    gap,
    lost_updates,
    parting,
    perturb,
    shuffled,
    signals,
    train,
)
from autotune_amp.numerics.draws import DrawnInFp32
from autotune_amp.numerics.grading import (
    MAX_FORWARD_SHARE,
    Findings,
    Grade,
    grade,
    next_step,
    suspicion,
)
from autotune_amp.numerics.locate import OUTSIDE, bad_parameters, blown_up, first_wrong
from autotune_amp.numerics.passes import Pass, Passes, Subject, are_equal, in_fp32
from autotune_amp.numerics.scaler_replay import starting_scale
from autotune_amp.precision.forward_wrapper import (
    can_be_pinned,
    has_half_weights,
    is_inside,
    modules_by_name,
    own_class,
    parameters_by_name,
    unwrap,
    watch_forward,
)
from autotune_amp.precision.modes import MODES

MIN_NUM_BATCHES, MAX_NUM_BATCHES = 4, 8  # held against each other in one step, as the time allows
# Of the check's seconds, after which no more than the fewest batches are looked at, and than two.
STEP_SHARE, SHORT_SHARE = 0.25, 0.5
NUM_PAIRED_STEPS = 8
NUM_ORDERS, LONG_STEPS = 3, (48, 24, 16)  # of the longer training: orders of the batches; steps, as the time allows
REROUNDING = 2.0**-20  # moves weights enough for fp32 to round otherwise, and no more
MAX_PINNED_SHARE = 0.05  # of the modules; one may always be pinned
MAX_ROUNDS = 3
_NUM_WORST = 5
# Of the findings, what `Fidelity` says as it is.
_SAID = (
    *("loss_error", "noise_ratio", "common_error", "common_error_interval", "flushed_share"),
    *("forward_max", "format_max"),
    *("training_gap", "training_noise_gap", "has_moved"),
)


def check(
    subject: Subject,
    precision: Precision,
    *,
    batch_size: int,
    pinned_modules: Sequence[str] = (),
    find_pins: bool = True,
    on_bad_verdict: Callable[[Fidelity], None] | None = None,
    label: str | None = None,
    num_steps_before: int = 0,
    seconds: float = math.inf,
) -> Fidelity:
    """Hold `precision`, with `pinned_modules` in fp32, against fp32 on `subject`, whose model is left as it was.

    `subject.batches` are eight at least, of `batch_size` samples. With `find_pins` a bad verdict says which modules are
    responsible, and whether pinning them heals it. What the model's own code raises comes through, as do out-of-memory
    errors and the `InvalidRequestError` for a module that cannot be pinned; numbers that are not finite never raise.
    `label` is what the reason calls the precision with what else was set up; the weights were trained in fp32 for
    `num_steps_before`.
    `on_bad_verdict` is given a bad verdict before that search, which may take long, or take the process with it.
    In fewer `seconds` than all takes fewer batches are looked at, then fewer steps trained, then none.
    """
    passes = Passes(subject)
    is_watched = not subject.is_compiled or MODES[precision].takes_scaler
    with watch_forward(subject.model, subject.device) if is_watched else nullcontext(_no_maxima) as read_maxima:
        try:
            experiment = Experiment(
                passes, precision, batch_size, read_maxima, label or precision, num_steps_before, seconds
            )
            attempt = experiment.attempt(tuple(pinned_modules))
            if attempt.grade.is_bad and experiment.takes_like_draws(attempt.pins):
                attempt = experiment.attempt(attempt.pins)
            if not attempt.found.is_reference_finite and subject.loop is None:
                return experiment.report(attempt, _not_finite_in_fp32(experiment, attempt))
            if not find_pins or not attempt.grade.is_bad or attempt.grade.is_of_weights:
                return experiment.report(attempt)
            if on_bad_verdict is not None:
                on_bad_verdict(experiment.report(attempt))
            culprits, healing = _locate(experiment, attempt)
            return experiment.report(attempt, culprits, healing)
        finally:
            passes.restore()
            passes.model.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Attempt:
    """What was measured of a precision with `pins` in fp32, and its grade.

    `forward_maxima` are the largest magnitudes that modules put out in the precision, by module. `bad_index` is the
    batch of a pass that was not finite, None where all were; `scale` the loss scale of the last.
    """

    pins: tuple[str, ...]
    scale: float
    forward_maxima: dict[str, float]
    found: Findings
    bad_index: int | None = None
    comparison: Comparison | None = None
    training: Run | None = None

    @cached_property
    def grade(self) -> Grade:
        """What was measured is worth."""
        return grade(self.found)


class Steps(NamedTuple):
    """Passes over batches in the precision and in fp32, their gradients left out but for the last that was not finite,
    whose batch is `bad_index`; `comparison` is what the gradients say where all are."""

    low: list[Pass]
    reference: list[Pass]
    scale: float
    bad_index: int | None = None
    is_safe: bool = True
    comparison: Comparison | None = None


class Look(NamedTuple):
    """What one batch says in fp32: its pass, how many entries of its gradients lie in which octave, and the parameters
    whose gradient is more than rounding noise."""

    first: Pass
    octaves: tuple[tuple[int, int], ...]
    signals: set[str]


class Experiment:
    """What fp32 does, measured once and when it is needed, and attempts at the precision.

    `read_maxima` is what `watch_forward` gives for the subject's model: one for all attempts, so that a compiled model
    is compiled once for each precision.
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
        self._longer_runs: dict[int, tuple[Run, list[Run]]] = {}  # in fp32, by their steps: rerounded, and by order
        self._read_maxima = read_maxima
        self._subject = subject = low.subject
        reference = subject.reference or subject
        self._has_half_weights = has_half_weights(subject.model)
        self._roundoff = MODES["bf16" if self._has_half_weights else precision].unit_roundoff
        is_fp16 = any(parameter.dtype == torch.float16 for parameter in subject.model.parameters())
        self._format_max = FP16_MAX if is_fp16 else self._mode.format_max
        self.fp32 = low if reference is subject else Passes(reference)
        if has_half_weights(reference.model):  # fp32 is a copy of the model
            self.fp32 = Passes(reference, in_fp32(reference.model, subject.device.type))
        self._seconds = seconds  # that all of it may take
        self._reference_runs: list[Run] = []  # plain, and from weights that are rounded otherwise
        self._fp32_step_seconds: float | None = None
        self._has_moved = True  # False once fp32's own training run has moved no weight
        self._log2_guess = FIRST_GUESS  # of the largest safe loss scale: what the attempt before found
        self._low_weights = self._lost_updates()

    def attempt(self, pins: tuple[str, ...]) -> Attempt:
        """One step, over the first batches; where that is not bad, a training run, and a longer one where that leaves
        something open. The model is left where the first training ended."""
        self._read_maxima()  # of passes before
        with self.low.pinned(pins):
            low, reference, scale, bad_index, has_safe_scale, comparison = self._steps()
            maxima = self._low_maxima({})
            found = Findings(
                is_finite=low[-1].is_finite,
                is_reference_finite=all(done.is_finite for done in reference),
                has_safe_scale=has_safe_scale,
                forward_max=max(maxima.values(), default=None),
                format_max=self._format_max,
                lost_share=None if self._low_weights is None else self._low_weights.lost_share,
                num_steps_per_call=self.low.num_steps_per_call,
                reuses_casts=self.low.reuses_casts,
            )
            if comparison is None:
                return Attempt(pins, scale, maxima, found, bad_index=bad_index)
            difference = math.hypot(*(a.loss - b.loss for a, b in zip(low, reference, strict=True)))
            size = math.hypot(*(done.loss for done in reference))
            found = found._replace(
                loss_error=difference / size if size else difference,
                has_signal=bool(self._look.signals),
                is_cut=not self._has_time_for(3 * NUM_PAIRED_STEPS),
                **comparison.findings(),
            )
            attempt = Attempt(pins, scale, maxima, found, comparison=comparison)
            if attempt.grade.verdict == "unfaithful" or found.is_cut:
                return attempt
            plain, perturbed = runs = self._fp32_runs()
            run = train(self.low, self.precision, NUM_PAIRED_STEPS, scale=scale)
            are_finite = all(each.is_finite for each in (run, *runs))
            training_gap, noise_gap = gap(run, plain, perturbed) if are_finite else (None, None)
            maxima = self._low_maxima(maxima)
            found = found._replace(
                is_reference_finite=found.is_reference_finite and plain.is_finite,
                forward_max=max(maxima.values(), default=None),
                is_training_finite=run.is_finite,
                training_gap=training_gap,
                training_noise_gap=noise_gap,
                has_moved=self._has_moved,
            )
            if are_finite and self._has_moved and suspicion(found) is not None:
                found = self._trained_longer(found, scale)
                maxima = self._low_maxima(maxima)
                found = found._replace(forward_max=max(maxima.values(), default=None))
        return replace(attempt, found=found, training=run, forward_maxima=maxima)

    def takes_like_draws(self, pins: tuple[str, ...]) -> bool:
        """Whether the precision draws in half precision what fp32 does not: then from now on it takes fp32's numbers,
        rounded, since others alone make a verdict bad."""
        if self._subject.is_compiled:
            return False
        drawn = self.low.drawn = self.fp32.drawn = DrawnInFp32()
        are_unlike = False
        with suppress(Exception):  # the user's code, run another way than it was written for, may raise anything
            self.fp32.run(0, "fp32")
            if not drawn.num_drawn:
                with self.low.pinned(pins):
                    self.low.run(0, self.precision)
                are_unlike = drawn.num_drawn > 0
        if not are_unlike:
            self.low.drawn = self.fp32.drawn = None
        return are_unlike

    @cached_property
    def _look(self) -> Look:
        """Look at the first batch with a gradient, since one without labels tells of no other, in fp32 and in fp32
        rounded otherwise."""
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
        return Look(first if not first.is_finite else replace(first, gradients={}), octaves, names)

    def report(self, attempt: Attempt, culprits: tuple[str, ...] = (), healing: tuple[str, ...] = ()) -> Fidelity:
        """What was found so far."""
        sums, found, training = attempt.comparison, attempt.found, attempt.training
        parameters = [] if sums is None else sums.parameters
        verdict, low_weights = attempt.grade.verdict, self._low_weights
        places = {
            OUTSIDE: "the code outside of the model, as the loss function or the optimizer",
            "": f"the model's own forward ({own_class(unwrap(self.low.model)).__name__})",
        }
        where = f"; it begins in {', '.join(places.get(name, name) for name in culprits)}" if culprits else ""
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

    def _lost_updates(self) -> LowWeights | None:
        """What rounding leaves of the first step, where weights are kept in half precision."""
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
        """Go over batches that differ, in the precision at one loss scale, as a training step has them, and in fp32;
        the first that is not finite ends it."""
        scale = 1.0
        if self._mode.takes_scaler:
            safe = largest_safe_scale(self.low, 0, self._log2_guess)
            if safe.log2_scale is None:
                return Steps([safe.last], [self._look.first], MIN_LOSS_SCALE, bad_index=0, is_safe=False)
            self._log2_guess = safe.log2_scale
            scale = starting_scale([safe.log2_scale])
        low: list[Pass] = []
        reference: list[Pass] = []
        gathered = Gathered(self._look.signals)
        while len(low) < len(self._distinct) and self._has_time_for_batch(len(low)):
            index = self._distinct[len(low)]
            started = time.perf_counter()
            fp32 = self.fp32.run(index, "fp32")
            self._fp32_step_seconds = time.perf_counter() - started
            done, lower, _ = finite_pass(self.low, index, self.precision, scale, restores=True)
            if not done.is_finite or not fp32.is_finite:
                is_safe = not self._mode.takes_scaler or done.is_finite
                return Steps([*low, done], [*reference, fp32], lower, bad_index=index, is_safe=is_safe)
            if lower != scale:  # all over again
                low, reference, gathered, scale = [], [], Gathered(self._look.signals), lower
                continue
            gathered.add(done.gradients, fp32.gradients)
            low, reference = [*low, replace(done, gradients={})], [*reference, replace(fp32, gradients={})]
            del done, fp32  # their memory is wanted for the next
        return Steps(low, reference, scale, comparison=gathered.compared())

    @cached_property
    def _distinct(self) -> list[int]:
        """The first batches that differ from all before: noise is the same in two that are alike."""
        batches = self._subject.batches[:MAX_NUM_BATCHES]
        return [i for i, one in enumerate(batches) if not any(are_equal(one, other) for other in batches[:i])]

    def _has_time_for_batch(self, num_batches: int) -> bool:
        share = STEP_SHARE if num_batches >= MIN_NUM_BATCHES else SHORT_SHARE
        return num_batches < 2 or self._spent() < share * self._seconds

    def _spent(self) -> float:
        return time.perf_counter() - self._started

    def _has_time_for(self, num_steps: int) -> bool:
        """Whether so many more passes fit, each as long as those so far, and half for what else is done."""
        num_passes = self.low.num_passes + (0 if self.fp32 is self.low else self.fp32.num_passes)
        return self._spent() * (1 + 1.5 * num_steps / num_passes) <= self._seconds

    def _trained_longer(self, found: Findings, scale: float) -> Findings:
        """Add to `found` what longer training runs show, over the batches in several orders; return it as it is where
        the time allows not even the shortest."""
        num_steps = next((num for num in LONG_STEPS if self._has_time_for((2 * NUM_ORDERS + 1) * num)), None)
        if num_steps is None:
            return found
        orders = [shuffled(num_steps, MAX_NUM_BATCHES, order) for order in range(NUM_ORDERS)]
        if num_steps not in self._longer_runs:
            rerounded = train(
                self.fp32, "fp32", num_steps, order=orders[0], perturbation=REROUNDING, seed=self._subject.seed
            )
            self._longer_runs[num_steps] = rerounded, [train(self.fp32, "fp32", num_steps, order=o) for o in orders]
        rerounded, fp32 = self._longer_runs[num_steps]
        if not all(run.is_finite for run in (rerounded, *fp32)):
            return found
        low = [train(self.low, self.precision, num_steps, scale=scale, order=order) for order in orders]
        if not all(run.is_finite for run in low):
            return found._replace(is_training_finite=False)
        return found._replace(parting=parting(low, fp32, rerounded, MAX_NUM_BATCHES, self._roundoff))

    def _fp32_runs(self) -> list[Run]:
        if not self._reference_runs:
            started = time.perf_counter()
            reference = train(self.fp32, "fp32", NUM_PAIRED_STEPS)
            parameters = self.fp32.model.named_parameters()
            self._has_moved = bool(self.fp32.changed(named for named in parameters if named[1].requires_grad))
            perturbed = train(self.fp32, "fp32", NUM_PAIRED_STEPS, perturbation=self._roundoff, seed=self._subject.seed)
            self._reference_runs = [reference, perturbed]
            self._fp32_step_seconds = (time.perf_counter() - started) / (2 * NUM_PAIRED_STEPS)
        return self._reference_runs


def _no_maxima() -> dict[str, float]:
    return {}


# -- which modules it begins in, and whether fp32 there heals it -------------------------------------------------------


def _locate(experiment: Experiment, attempt: Attempt) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules responsible, and those that heal it in fp32, () where that takes too many or does not help.

    Suspects are pinned one round after another, each found with those before in fp32 already; where there is no new
    one, the modules around those pinned are taken in their place.
    """
    modules = modules_by_name(experiment.low.model)
    limit = max(1, int(MAX_PINNED_SHARE * len(modules)))
    given = pins = attempt.pins
    culprits: tuple[str, ...] = ()
    for _ in range(MAX_ROUNDS):
        try:  # the user's code, run another way than it was written for, may raise anything: no cure
            found = _suspects(experiment, attempt)
            culprits = culprits or found
            usable = [n for n in found if n and n in modules and can_be_pinned(modules[n]) and not is_inside(n, pins)]
            wider = dict.fromkeys(filter(None, (_parent(pin) for pin in pins if pin not in given)))
            pins = (*pins, *usable) if usable else (*given, *wider)
            if pins in (attempt.pins, given) or len(pins) - len(given) > limit:
                break
            attempt = experiment.attempt(pins)
        except Exception:
            break
        if attempt.grade.verdict == "faithful" and attempt.training is not None:
            return tuple(pin for pin in pins if pin not in given), pins
    return culprits, ()


def _suspects(experiment: Experiment, attempt: Attempt) -> tuple[str, ...]:
    """The modules it begins in, "" for the model's own forward, `OUTSIDE` for the loss function or the optimizer."""
    low, precision = experiment.low, experiment.precision
    with low.pinned(attempt.pins):
        if attempt.training is not None and not attempt.training.is_finite:
            if bad_parameters(low.model):
                return (OUTSIDE,)  # a step that was not to be taken, or one that the weights' own precision cannot hold
            # From the weights that training was left at, in the step that failed.
            return blown_up(low, len(attempt.training.losses) - 1, precision, attempt.scale)
        if attempt.bad_index is not None:
            low.restore()
            return blown_up(low, attempt.bad_index, precision, attempt.scale)
        limit = MAX_FORWARD_SHARE * attempt.found.format_max
        if too_large := [name for name, maximum in attempt.forward_maxima.items() if maximum > limit]:
            return tuple(n for n in too_large if not any(other != n and is_inside(other, (n,)) for other in too_large))
        wrong = first_wrong(low, experiment.fp32, 0, precision)
        if wrong is not None:
            return (wrong,)
    flushed = attempt.found.most_flushed
    return (OUTSIDE if flushed is None or flushed.flushed_share == 0 else _parent(flushed.name),)


def _not_finite_in_fp32(experiment: Experiment, attempt: Attempt) -> tuple[str, ...]:
    """The modules where the first step in fp32 is not finite; () where it is, or where that cannot be found out."""
    index = attempt.bad_index
    if index is None:
        return ()
    with suppress(Exception):  # the user's code, run another way than it was written for, may raise anything
        experiment.fp32.restore()
        return blown_up(experiment.fp32, index, "fp32", 1.0)
    return ()


def _parent(name: str) -> str:
    """The module around the module or parameter of this name, "" for those of the model itself."""
    return name.rpartition(".")[0]
