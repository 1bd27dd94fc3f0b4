"""Fidelity check: whether training in a precision is equivalent to fp32, given equal weights, batches and dropout.

First the gradients of four to eight batches are compared, then a short training run. If they leave open whether
rounding is harmful, a longer run follows over the same batches in several orders. After a bad verdict, which is
*doubtful* or *unfaithful*, the modules that cause the error are searched for, and tried in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.experiment import MIN_NUM_BATCHES, NUM_PAIRED_STEPS, Attempt, Experiment
from autotune_amp.numerics.grading import MAX_FORWARD_SHARE
from autotune_amp.numerics.locate import OUTSIDE, first_inaccurate_module, nonfinite_modules, nonfinite_parameters
from autotune_amp.numerics.passes import CheckInputs, Passes
from autotune_amp.precision.forward_wrapper import (
    can_be_pinned,
    is_inside,
    modules_by_name,
    names_matching,
    watch_forward,
)
from autotune_amp.precision.modes import MODES

MAX_PINNED_SHARE = 0.05  # largest share of the modules that are pinned; a single module may always be
MAX_PINNING_ROUNDS = 3  # attempts with more and more modules pinned in fp32


def check(
    subject: CheckInputs,
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
    """Return the verdict on training in `precision`, with `pinned_modules` in fp32, compared with training in fp32.

    `subject` holds the model, whose weights are restored at the end, its loss function and optimizer, and at least
    eight batches of `batch_size` samples. With `find_pins` a bad verdict also has the modules that cause the error, and
    those that fix it if they are pinned, that is, kept in fp32. `on_bad_verdict` is called with a bad verdict before
    the search for these modules, which may take long or crash the process. `label` names the precision and other
    changes to the workload in the reason. `num_steps_before` is for the report: the weights of `subject` have been
    trained in fp32 for this many steps. To end within `seconds`, the check uses fewer batches or smaller ones, shortens
    the longer training run, and as a last resort does not train.

    Raises `InvalidRequestError` for a module that cannot be pinned. Exceptions of the model's code and out-of-memory
    errors pass through, except in the search for modules; non-finite numbers never raise.
    """
    passes = Passes(subject)
    # Recording outputs compiles a compiled model once more, so it is done only for a precision with a loss scaler.
    is_watched = not subject.is_compiled or MODES[precision].takes_scaler
    with watch_forward(subject.model, subject.device) if is_watched else nullcontext(dict[str, float]) as read_maxima:
        try:
            experiment = Experiment(
                passes, precision, batch_size, read_maxima, label or precision, num_steps_before, seconds
            )
            experiment.cut_samples_to_time()
            attempt = experiment.attempt(names_matching(subject.model, pinned_modules))
            # Random numbers that differ in half precision may be the only error: try again with the same ones.
            if attempt.grade.is_bad and experiment.switch_to_fp32_draws(attempt):
                attempt = experiment.attempt(attempt.pins)
            # fp32 itself fails: name the modules. In a custom training loop, modules cannot be observed.
            if not attempt.findings.is_reference_finite and subject.loop is None:
                return experiment.report(attempt, _nonfinite_modules_in_fp32(experiment, attempt))
            if not find_pins or not attempt.grade.is_bad or attempt.grade.is_due_to_low_weights:
                return experiment.report(attempt)
            if on_bad_verdict is not None:
                on_bad_verdict(experiment.report(attempt))
            if not experiment.has_time_for(2, 2, 4):  # the search runs passes in fp32 and in the precision
                return experiment.report(attempt, where="; there was no time to search for the modules that cause it")
            culprits, healing_pins = _find_culprits_and_pins(experiment, attempt)
            return experiment.report(attempt, culprits, healing_pins)
        finally:
            passes.restore()
            passes.model.zero_grad(set_to_none=True)


# -- responsible modules, and whether fp32 fixes them ------------------------------------------------------------------


def _find_culprits_and_pins(experiment: Experiment, attempt: Attempt) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules that cause the bad verdict of `attempt`, and the pins that make the precision faithful.

    Each round pins the modules where the error of the attempt before begins. If there are no new ones, the parents of
    the pinned modules are pinned in their place. At most `MAX_PINNED_SHARE` of the modules are pinned in addition to
    the pins of `attempt`. On success the first value has the added pins, and the second all pins. Otherwise the first
    has the modules where the error begins in `attempt`, and the second is ().
    """
    modules = modules_by_name(experiment.low.model)
    limit = max(1, int(MAX_PINNED_SHARE * len(modules)))
    first_pins = pins = attempt.pins
    culprits: tuple[str, ...] = ()
    for _ in range(MAX_PINNING_ROUNDS):
        try:  # the user's code is run in an unusual way and may raise anything: then there is no fix
            suspects = _suspects(experiment, attempt)
            culprits = culprits or suspects
            usable = [
                name
                for name in suspects
                if name and name in modules and can_be_pinned(modules[name]) and not is_inside(name, pins)
            ]
            parents = dict.fromkeys(filter(None, (_parent(pin) for pin in pins if pin not in first_pins)))
            pins = (*pins, *usable) if usable else (*first_pins, *parents)
            if pins in (attempt.pins, first_pins) or len(pins) - len(first_pins) > limit:
                break
            if not experiment.has_time_for(MIN_NUM_BATCHES, MIN_NUM_BATCHES + NUM_PAIRED_STEPS, 2 * MIN_NUM_BATCHES):
                break
            attempt = experiment.attempt(pins)
        except Exception:
            break
        if attempt.grade.verdict == "faithful" and attempt.training is not None:
            return tuple(pin for pin in pins if pin not in first_pins), pins
    return culprits, ()


def _suspects(experiment: Experiment, attempt: Attempt) -> tuple[str, ...]:
    """Return the names of the modules where the error begins, from the first symptom that `attempt` shows.

    The symptoms are, in this order: training that becomes non-finite, a non-finite pass, outputs near the end of the
    format's range, an inaccurate output, gradient entries that are flushed to zero. "" is the model's own forward
    outside of its submodules, `OUTSIDE` the loss function or the optimizer.
    """
    low, precision = experiment.low, experiment.precision
    with low.pinned(attempt.pins):
        if attempt.training is not None and not attempt.training.is_finite:
            if nonfinite_parameters(low.model):
                # The optimizer took a step that should have been skipped, or overflowed the weights' dtype.
                return (OUTSIDE,)
            # Repeat the failed step, from the final weights of the training run.
            return nonfinite_modules(low, attempt.training.last_index, precision, attempt.scale)
        if attempt.bad_index is not None:
            low.restore()
            return nonfinite_modules(low, attempt.bad_index, precision, attempt.scale)
        limit = MAX_FORWARD_SHARE * attempt.findings.format_max
        if too_large := [name for name, maximum in attempt.forward_maxima.items() if maximum > limit]:
            # A module that contains another of them is left out: the error begins in the inner one.
            return tuple(n for n in too_large if not any(other != n and is_inside(other, (n,)) for other in too_large))
        inaccurate = first_inaccurate_module(low, experiment.fp32, 0, precision)
        if inaccurate is not None:
            return (inaccurate,)
    flushed = attempt.findings.most_flushed
    return (OUTSIDE if flushed is None or flushed.flushed_share == 0 else _parent(flushed.name),)


def _nonfinite_modules_in_fp32(experiment: Experiment, attempt: Attempt) -> tuple[str, ...]:
    """Return the modules where a pass in fp32 becomes non-finite, with the initial weights and the batch that failed.

    () if no batch failed or if the search raised an exception.
    """
    index = attempt.bad_index
    if index is None:
        return ()
    with suppress(Exception):  # the user's code is run in an unusual way and may raise anything
        experiment.fp32.restore()
        return nonfinite_modules(experiment.fp32, index, "fp32", 1.0)
    return ()


def _parent(name: str) -> str:
    """Return the module around the module or parameter `name`, "" for the model itself."""
    return name.rpartition(".")[0]
