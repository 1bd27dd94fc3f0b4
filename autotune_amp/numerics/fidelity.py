"""Fidelity check: whether training in a precision is equivalent to fp32 on the same weights, batches and draws.

First one step over four to eight batches; then a short training run, and a longer one over the same batches in several
orders if the step leaves open whether rounding is harmful. After a bad verdict the responsible modules are searched
for, and tried in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

from autotune_amp.core.outcome import Fidelity
from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.experiment import MIN_NUM_BATCHES, NUM_PAIRED_STEPS, Attempt, Experiment
from autotune_amp.numerics.grading import MAX_FORWARD_SHARE
from autotune_amp.numerics.locate import OUTSIDE, bad_parameters, blown_up, first_wrong
from autotune_amp.numerics.passes import CheckInputs, Passes
from autotune_amp.precision.forward_wrapper import can_be_pinned, is_inside, modules_by_name, watch_forward
from autotune_amp.precision.modes import MODES

MAX_PINNED_SHARE = 0.05  # largest share of the modules that is pinned; one always may be
MAX_ROUNDS = 3


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
    """Compare `precision`, with `pinned_modules` in fp32, with fp32 on `subject`; the model is restored.

    `subject.batches` are at least eight, of `batch_size` samples. With `find_pins` a bad verdict names the modules
    responsible, and whether pinning them fixes it. Exceptions of the model's own code pass through, as do out-of-memory
    errors and the `InvalidRequestError` for a module that cannot be pinned; non-finite numbers never raise. `label`
    names the precision and other changes to the workload in the reason; the weights were trained in fp32 for
    `num_steps_before`. `on_bad_verdict` is called with a bad verdict before the search for modules, which may take long
    or crash the process. If `seconds` are too short, fewer batches are used, then fewer training steps, then none.
    """
    passes = Passes(subject)
    is_watched = not subject.is_compiled or MODES[precision].takes_scaler
    with watch_forward(subject.model, subject.device) if is_watched else nullcontext(_no_maxima) as read_maxima:
        try:
            experiment = Experiment(
                passes, precision, batch_size, read_maxima, label or precision, num_steps_before, seconds
            )
            experiment.fit_samples()
            attempt = experiment.attempt(tuple(pinned_modules))
            if attempt.grade.is_bad and experiment.takes_like_draws(attempt.pins):
                attempt = experiment.attempt(attempt.pins)
            if not attempt.found.is_reference_finite and subject.loop is None:
                return experiment.report(attempt, _not_finite_in_fp32(experiment, attempt))
            if not find_pins or not attempt.grade.is_bad or attempt.grade.is_of_weights:
                return experiment.report(attempt)
            if on_bad_verdict is not None:
                on_bad_verdict(experiment.report(attempt))
            if not experiment.has_time_for(2, 2):
                return experiment.report(attempt, where="; there was no time to look for the modules that it begins in")
            culprits, healing = _locate(experiment, attempt)
            return experiment.report(attempt, culprits, healing)
        finally:
            passes.restore()
            passes.model.zero_grad(set_to_none=True)


def _no_maxima() -> dict[str, float]:
    return {}


# -- responsible modules, and whether fp32 fixes them
# -------------------------------------------------------------------


def _locate(experiment: Experiment, attempt: Attempt) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the modules responsible, and the modules that fix the precision in fp32, () if too many or without effect.

    Suspects are pinned in rounds, each found with the former ones already in fp32; if there is no new one, the modules
    around the pinned ones replace them.
    """
    modules = modules_by_name(experiment.low.model)
    limit = max(1, int(MAX_PINNED_SHARE * len(modules)))
    given = pins = attempt.pins
    culprits: tuple[str, ...] = ()
    for _ in range(MAX_ROUNDS):
        try:  # the user's code is run in an unusual way and may raise anything: then there is no fix
            found = _suspects(experiment, attempt)
            culprits = culprits or found
            usable = [n for n in found if n and n in modules and can_be_pinned(modules[n]) and not is_inside(n, pins)]
            wider = dict.fromkeys(filter(None, (_parent(pin) for pin in pins if pin not in given)))
            pins = (*pins, *usable) if usable else (*given, *wider)
            if pins in (attempt.pins, given) or len(pins) - len(given) > limit:
                break
            if not experiment.has_time_for(MIN_NUM_BATCHES, MIN_NUM_BATCHES + NUM_PAIRED_STEPS):
                break
            attempt = experiment.attempt(pins)
        except Exception:
            break
        if attempt.grade.verdict == "faithful" and attempt.training is not None:
            return tuple(pin for pin in pins if pin not in given), pins
    return culprits, ()


def _suspects(experiment: Experiment, attempt: Attempt) -> tuple[str, ...]:
    """Return the modules where the error begins: "" is the model's own forward, `OUTSIDE` the loss or the optimizer."""
    low, precision = experiment.low, experiment.precision
    with low.pinned(attempt.pins):
        if attempt.training is not None and not attempt.training.is_finite:
            if bad_parameters(low.model):
                return (OUTSIDE,)  # a step that should have been skipped, or that overflows the weights' own dtype
            # From the final weights of the training run, in the step that failed.
            return blown_up(low, attempt.training.last_index, precision, attempt.scale)
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
    """Return the modules where the first fp32 step becomes non-finite; () if it is finite or the search failed."""
    index = attempt.bad_index
    if index is None:
        return ()
    with suppress(Exception):  # the user's code is run in an unusual way and may raise anything
        experiment.fp32.restore()
        return blown_up(experiment.fp32, index, "fp32", 1.0)
    return ()


def _parent(name: str) -> str:
    """Return the module around the module or parameter `name`, "" for the model itself."""
    return name.rpartition(".")[0]
