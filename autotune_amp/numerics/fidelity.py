"""Whether a precision learns what fp32 learns: the same weights, batches and draws in both, then a verdict.

One step first, over three batches; then a short training run, over eight. Where the verdict is bad, the modules to
blame are looked for, and tried in fp32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from autotune_amp.core.config import Precision
from autotune_amp.core.fidelity import Fidelity, LowWeights
from autotune_amp.numerics.attempt import Attempt, Bench, is_inside
from autotune_amp.numerics.blame import bad_parameters, modules_by_name
from autotune_amp.numerics.calibration import count_octaves, histogram
from autotune_amp.numerics.forward_max import watch_forward
from autotune_amp.numerics.locate import OUTSIDE, blown_up, local_errors
from autotune_amp.numerics.passes import Passes, Subject
from autotune_amp.numerics.verdict import MAX_FORWARD_SHARE, Judgement, judge, next_step
from autotune_amp.precision.mode import can_be_pinned

MAX_PINNED_SHARE = 0.05  # of the modules; one may always be pinned
MAX_ROUNDS = 3
# A module whose output is off by less of what its samples differ by is not what makes a gradient wrong.
MIN_LOCAL_ERROR = 0.05
_NUM_WORST = 5
_MAX_MODULES = 40  # rows of a chart


def check(
    subject: Subject,
    precision: Precision,
    *,
    batch_size: int,
    pinned_modules: Sequence[str] = (),
    find_pins: bool = True,
    judged: Callable[[Fidelity], None] | None = None,
) -> Fidelity:
    """Hold `precision`, with `pinned_modules` in fp32, against fp32 on `subject`, whose model is left as it was.

    `subject.batches` are eight at least, of `batch_size` samples. With `find_pins` a bad verdict says which modules are
    to blame, and whether pinning them heals it. What the model's own code raises comes through, as do out-of-memory
    errors and the `InvalidRequestError` for a module that cannot be pinned; numbers that are not finite never raise.
    `judged` is given a bad verdict before that search, which may take long, or take the process with it.
    """
    started = time.perf_counter()
    passes = Passes(subject)

    def complete(found: Fidelity) -> Fidelity:
        return msgspec.structs.replace(found, batch_size=batch_size, seconds=time.perf_counter() - started)

    def tell(found: Fidelity) -> None:
        if judged is not None:
            judged(complete(found))

    with watch_forward(subject.model, subject.device) as watch:
        try:
            bench = Bench(passes, precision, watch)
            return complete(_checked(bench, tuple(pinned_modules), tell, find_pins=find_pins))
        finally:
            passes.restore()
            passes.model.zero_grad(set_to_none=True)


def _checked(bench: Bench, pins: tuple[str, ...], tell: Callable[[Fidelity], None], *, find_pins: bool) -> Fidelity:
    weights = bench.lost_updates()
    attempt, judgement = _tried(bench, pins, weights)
    culprits: tuple[str, ...] = ()
    healing: tuple[str, ...] = ()
    if find_pins and judgement.verdict in ("doubtful", "unfaithful") and not judgement.is_of_weights:
        tell(_report(bench, attempt, judgement, weights, (), ()))
        culprits, healing = _blame(bench, attempt, weights)
    return _report(bench, attempt, judgement, weights, culprits, healing)


def _tried(bench: Bench, pins: tuple[str, ...], weights: LowWeights | None) -> tuple[Attempt, Judgement]:
    """One step, and where that is not bad already, a training run."""
    attempt = bench.one_step(pins)
    judgement = judge(bench.findings(attempt, weights))
    if judgement.verdict in ("faithful", "doubtful"):
        attempt = bench.train(attempt)
        judgement = judge(bench.findings(attempt, weights))
    return attempt, judgement


def _blame(bench: Bench, attempt: Attempt, weights: LowWeights | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The modules responsible, and those that heal it in fp32, () where that takes too many or does not help.

    Suspects are pinned one round after another, each found with those before in fp32 already; where there is no new
    one, the modules around those pinned are taken in their place.
    """
    modules = modules_by_name(bench.subject.model)
    limit = max(1, int(MAX_PINNED_SHARE * len(modules)))
    given = pins = attempt.pins
    culprits: tuple[str, ...] = ()
    for _ in range(MAX_ROUNDS):
        try:
            found = _suspects(bench, attempt)
        except Exception:  # the user's code, run another way than it was written for, may raise anything
            break
        culprits = culprits or found
        usable = [name for name in found if name and can_be_pinned(modules[name]) and not is_inside(name, pins)]
        added = [pin for pin in pins if pin not in given]
        wider = (*given, *filter(None, map(_parent, added)))
        wanted = (*pins, *usable) if usable else tuple(dict.fromkeys(wider))
        if wanted in (attempt.pins, given) or len(wanted) - len(given) > limit:
            break
        pins = wanted
        try:
            attempt, judgement = _tried_with(bench, attempt, pins, weights)
        except Exception:  # fp32 in its midst, or the memory for it, is more than it can take: no cure
            break
        if judgement.verdict == "faithful":
            return tuple(pin for pin in pins if pin not in given), pins
    return culprits, ()


def _tried_with(
    bench: Bench, before: Attempt, pins: tuple[str, ...], weights: LowWeights | None
) -> tuple[Attempt, Judgement]:
    """`_tried`, but one batch first where one batch showed that it is bad."""
    if before.training is None:
        attempt = bench.one_step(pins, num_batches=1)
        judgement = judge(bench.findings(attempt, weights))
        if judgement.verdict != "faithful":
            return attempt, judgement
    return _tried(bench, pins, weights)


def _suspects(bench: Bench, attempt: Attempt) -> tuple[str, ...]:
    """Modules to blame, `OUTSIDE` for the code around them: the loss function, or the optimizer."""
    with bench.low.pinned(attempt.pins):
        if attempt.training is not None and not attempt.training.is_finite:
            if bad_parameters(bench.low.model):
                return (OUTSIDE,)  # a step that was not to be taken, or one that the weights' own precision cannot hold
            # From the weights that training was left at, in the step that failed.
            return blown_up(bench.low, len(attempt.training.losses) - 1, bench.precision, attempt.scale)
        if attempt.bad_index is not None:
            bench.low.restore()
            return blown_up(bench.low, attempt.bad_index, bench.precision, attempt.scale)
        if too_large := [n for n, m in attempt.forward_maxima.items() if m > MAX_FORWARD_SHARE * bench.format_max]:
            return tuple(n for n in too_large if not any(other != n and is_inside(other, (n,)) for other in too_large))
        errors = local_errors(bench.low, 0, bench.precision).own()
    worst = max(errors, key=lambda name: errors[name], default=None)
    if worst is not None and errors[worst] >= MIN_LOCAL_ERROR:
        return (worst,)
    return _flushed_owners(attempt) or (OUTSIDE,)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _flushed_owners(attempt: Attempt) -> tuple[str, ...]:
    flushed = None if attempt.comparison is None else attempt.comparison.most_flushed()
    if flushed is None or flushed.flushed_share == 0.0:
        return ()
    owner = _parent(flushed.name)
    return (owner,) if owner else ()


def _where(culprits: tuple[str, ...]) -> str:
    if not culprits:
        return ""
    names = ", ".join(
        culprit or "the code outside of the modules, as the loss and the optimizer" for culprit in culprits
    )
    return f"; it begins in {names}"


def _report(
    bench: Bench,
    attempt: Attempt,
    judgement: Judgement,
    weights: LowWeights | None,
    culprits: tuple[str, ...],
    healing: tuple[str, ...],
) -> Fidelity:
    sums = attempt.comparison
    is_of_weights = judgement.is_of_weights or (weights is not None and culprits == (OUTSIDE,))
    return Fidelity(
        precision=bench.precision,
        batch_size=0,
        verdict=judgement.verdict,
        reason=f"{bench.precision} is {judgement.verdict}: {judgement.reason}{_where(culprits)}.",
        next_step=next_step(bench.precision, judgement.verdict, healing, is_of_weights=is_of_weights),
        pinned_modules=attempt.pins,
        noise_ratio=None if sums is None else sums.whole.noise_ratio,
        loss_error=attempt.loss_error,
        gradient_cosine=None if sums is None else sums.whole.cosine,
        gradient_norm_ratio=None if sums is None else sums.whole.norm_ratio,
        flushed_share=None if sums is None else sums.whole.flushed_share,
        forward_max=max(attempt.forward_maxima.values(), default=None),
        format_max=bench.format_max,
        loss_scale=attempt.scale if bench.precision == "fp16" else None,
        training_gap=None if attempt.gap is None else attempt.gap.over_perturbed,
        training_noise_gap=None if attempt.gap is None else attempt.gap.over_scatter,
        num_paired_steps=0 if attempt.training is None else len(attempt.training.losses),
        num_skips=0 if attempt.training is None else attempt.training.num_skips,
        has_moved=bench.has_moved,
        worst_parameters=() if sums is None else sums.worst(_NUM_WORST),
        modules=() if sums is None else sums.modules(_MAX_MODULES),
        gradient_histogram=histogram(count_octaves(bench.reference[0].gradients.values())),
        culprits=culprits,
        healing_pins=healing,
        low_weights=weights,
        num_passes=bench.num_passes,
        fp32_step_seconds=bench.fp32_step_seconds,
    )
