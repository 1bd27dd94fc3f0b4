"""What to try first: the baseline, every precision at a middle batch, then where the models of time and memory point,
then what lies round the best.

Seeding a sampler so cuts the mean regret at 15 trials from 14 % to 2 % (studies/README.md).
Pure and without state: the next seed follows from the outcomes so far, so a resumed search goes on where it was.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import msgspec

from autotune_amp.core.outcome import Measurement, Outcome
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.search.ranking import PLATEAU
from autotune_amp.search.space import Space, excluded_by_outcomes, without
from autotune_amp.search.stages.trials import is_hopeless

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autotune_amp.core.dimensions import Precision
    from autotune_amp.core.hardware import Hardware
    from autotune_amp.core.setting import Setting

MIN_GAIN = 0.01  # a doubled batch that gains less ends the climb (studies/README.md)
MEMORY_MARGIN = 1.1  # the memory model is within 2 to 19 % (studies/README.md), so it may skip but never exclude
NUM_PRECISIONS = 2  # precisions whose batch size is worth a search
# Beyond the best batch of a precision that is not far behind, every batch is looked at until two in a row are so much
# slower: processes differ by 8 to 23 %, and one slow one must not end a climb (studies/search_efficiency).
FAR_BEHIND = 1.25
NUM_FAR_BEHIND = 2


class StepTimeModel(msgspec.Struct, frozen=True):
    """Seconds of one forward and backward pass on b samples, its share of the optimizer step included: t(b) = a + c·b.

    With accumulation the optimizer's time is spread over the passes, which is linear in b too.
    """

    a: float
    c: float

    def samples_per_second(self, batch_size: int) -> float:
        """The throughput at this batch size."""
        return batch_size / (self.a + self.c * batch_size)


class MemoryModel(msgspec.Struct, frozen=True):
    """Bytes that count against the limit at batch size b: M(b) = max(m0, m1 + m2·b).

    The smallest batches sit on the optimizer's plateau m0 (studies/README.md).
    """

    m0: float
    m1: float
    m2: float

    def bytes_at(self, batch_size: float) -> float:
        """The memory at this batch size."""
        return max(self.m0, self.m1 + self.m2 * batch_size)


def fit_step_time(points: Iterable[tuple[int, float]]) -> StepTimeModel | None:
    """The model for (batch size, samples per second) points: least squares on the relative error, a and c >= 0.

    None with fewer than two batch sizes, which cannot tell a from c.
    """
    timed = [(size, size / rate) for size, rate in points]
    if len({size for size, _ in timed}) < 2:
        return None
    # Minimise sum((a/t + c·b/t - 1)^2): the normal equations of a regression on 1/t and b/t.
    s_uu = sum(1 / t**2 for _, t in timed)
    s_uv = sum(b / t**2 for b, t in timed)
    s_vv = sum(b**2 / t**2 for b, t in timed)
    s_u = sum(1 / t for _, t in timed)
    s_v = sum(b / t for b, t in timed)
    determinant = s_uu * s_vv - s_uv**2
    a, c = (s_u * s_vv - s_v * s_uv) / determinant, (s_v * s_uu - s_u * s_uv) / determinant
    if a < 0:
        a, c = 0.0, s_v / s_vv
    elif c < 0:
        a, c = s_u / s_uu, 0.0
    return StepTimeModel(a, c)


def fit_memory(points: Iterable[tuple[int, int]]) -> MemoryModel | None:
    """The model for (batch size, bytes) points, its line through the two largest; None with fewer than two sizes.

    The largest two, since the smaller ones may still sit on the plateau. Memory never falls with the batch size.
    """
    at = sorted(dict(points).items())
    if len(at) < 2:
        return None
    (b1, m1), (b2, m2) = at[-2:]
    slope = max(0.0, (m2 - m1) / (b2 - b1))
    return MemoryModel(min(m for _, m in at), m2 - slope * b2, slope)


def next_seed(
    hardware: Hardware,
    space: Space,
    outcomes: Mapping[Setting, Outcome],
    memory_limit_bytes: int | None,
    excluded: Sequence[Exclusion] = (),
) -> Setting | None:
    """What to try next, or None when seeding is over. Never something that has an outcome or is excluded.

    `excluded` is beyond what the outcomes rule out. Candidates that the memory model puts more than a tenth over
    `memory_limit_bytes` are skipped, not excluded.
    """
    if space.baseline not in outcomes:
        return space.baseline
    fitting, allowed = _left(space, outcomes, memory_limit_bytes, excluded)
    firsts = (_first_of(p, fitting, outcomes, space.baseline.batch_size) for p in _by_promise(hardware, space))
    # An emulated precision may lead at small batches alone: what the device does itself climbs first.
    climbing = sorted(_best_precisions(allowed), key=lambda p: hardware.precisions[p].level == "emulated")
    nexts = (_next_of(precision, fitting, allowed) for precision in climbing)
    return next(filter(None, itertools.chain(firsts, nexts)), None)


def next_look(
    space: Space,
    outcomes: Mapping[Setting, Outcome],
    memory_limit_bytes: int | None,
    excluded: Sequence[Exclusion] = (),
) -> Setting | None:
    """What to try once seeding is over: the batches round the best of each precision that is not far behind.

    None where all of them are known. The arguments are those of `next_seed`.
    """
    fitting, allowed = _left(space, outcomes, memory_limit_bytes, excluded)
    looks = (_round_the_best(precision, fitting, allowed) for precision in _best_precisions(allowed))
    return next(filter(None, looks), None)


def _left(
    space: Space, outcomes: Mapping[Setting, Outcome], limit: int | None, excluded: Sequence[Exclusion]
) -> tuple[list[Setting], dict[Setting, Outcome]]:
    """What may be tried, and the outcomes that may lead to it: what a check rules out leads nobody any more."""
    legal = without(space.candidates, (*excluded, *excluded_by_outcomes(space, outcomes)))
    fitting = [c for c in legal if c not in outcomes and _fits(c, outcomes, limit)]
    return fitting, {c: outcomes[c] for c in without(outcomes, excluded)}


def _measured(precision: Precision, outcomes: Mapping[Setting, Outcome]) -> dict[int, Measurement]:
    """Measurements of the strict candidates of a precision by batch size, ascending."""
    found = {
        c.batch_size: m
        for c, m in outcomes.items()
        if c.precision == precision and not c.as_found and isinstance(m, Measurement)
    }
    return dict(sorted(found.items()))


def _fits(candidate: Setting, outcomes: Mapping[Setting, Outcome], limit: int | None) -> bool:
    measured = _measured(candidate.precision, outcomes)
    model = fit_memory((size, m.reserved_memory_bytes) for size, m in measured.items())
    return limit is None or model is None or model.bytes_at(candidate.batch_size) <= MEMORY_MARGIN * limit


def _by_promise(hardware: Hardware, space: Space) -> list[Precision]:
    """Legal precisions, the fastest matrix products first, those with an unmeasured rate after the measured ones.

    Last come the emulated ones far below fp32's rate: a step of theirs may cost more than the rest of the search.
    """

    def promise(precision: Precision) -> tuple[bool, float]:
        return is_hopeless(hardware, precision), -(hardware.precisions[precision].matmul_flops_per_second or 0.0)

    return sorted(dict.fromkeys(c.precision for c in space.candidates), key=promise)


def _first_of(
    precision: Precision, fitting: Sequence[Setting], outcomes: Mapping[Setting, Outcome], middle: int
) -> Setting | None:
    """The first try of a precision: at the baseline's batch, where all can be compared; smaller only after OOM."""
    tried = [o for c, o in outcomes.items() if c.precision == precision and not c.as_found]
    if any(isinstance(outcome, Measurement) or outcome.kind != "oom" for outcome in tried):
        return None
    ours = [c for c in fitting if c.precision == precision]
    return min(ours, key=lambda c: abs(math.log(c.batch_size / middle)), default=None)


def _best_precisions(outcomes: Mapping[Setting, Outcome]) -> list[Precision]:
    best: dict[Precision, float] = {}
    for candidate, outcome in outcomes.items():
        if isinstance(outcome, Measurement) and not candidate.as_found:
            best[candidate.precision] = max(best.get(candidate.precision, 0.0), outcome.samples_per_second)
    return sorted(best, key=lambda precision: -best[precision])[:NUM_PRECISIONS]


def _next_of(precision: Precision, fitting: Sequence[Setting], outcomes: Mapping[Setting, Outcome]) -> Setting | None:
    """The next batch of a precision: up to where the step-time model has its plateau, then the best's neighbours."""
    untried = {c.batch_size: c for c in fitting if c.precision == precision}
    rates = {size: m.samples_per_second for size, m in _measured(precision, outcomes).items()}
    sizes = sorted({*rates, *untried})
    best = max(rates, key=lambda size: rates[size])
    wanted = [_below(best, sizes), _below(smallest_on_plateau(rates), sizes)]
    if best < max(rates) or _is_climbing(best, rates):
        wanted.insert(0, _above(best, sizes))
    model = fit_step_time(rates.items())
    if model is not None and best == max(rates) and _is_climbing(best, rates):
        # Only upwards: what it says of smaller batches the neighbours measure sooner.
        plateau = smallest_on_plateau({size: model.samples_per_second(size) for size in sizes})
        wanted = [max(plateau, best), *wanted]
    return next((untried[size] for size in wanted if size in untried), None)


def _round_the_best(
    precision: Precision, fitting: Sequence[Setting], outcomes: Mapping[Setting, Outcome]
) -> Setting | None:
    """The nearest untried batch above or below the best one, on a side where not all is far behind yet."""
    untried = {c.batch_size: c for c in fitting if c.precision == precision}
    rates = {size: m.samples_per_second for size, m in _measured(precision, outcomes).items()}
    known = [m.samples_per_second for c, m in outcomes.items() if isinstance(m, Measurement) and not c.as_found]
    best = max(rates, key=lambda size: rates[size])
    if rates[best] * FAR_BEHIND < max(known):
        return None
    sizes = sorted({*rates, *untried})
    above, below = [s for s in sizes if s > best], [s for s in reversed(sizes) if s < best]
    for side in (above, below):
        num_far_behind = 0
        for size in side:
            if size in untried and num_far_behind < NUM_FAR_BEHIND:
                return untried[size]
            is_far = rates.get(size, 0.0) * FAR_BEHIND < rates[best]
            num_far_behind = num_far_behind + 1 if is_far else 0
            if num_far_behind == NUM_FAR_BEHIND:
                break
    return None


def smallest_on_plateau(rates: Mapping[int, float]) -> int:
    """The smallest batch size within `PLATEAU` of the best samples per second."""
    return min(size for size, rate in rates.items() if rate >= (1 - PLATEAU) * max(rates.values()))


def _is_climbing(best: int, rates: Mapping[int, float]) -> bool:
    """Whether the step up to the best gained enough to be worth another."""
    below = _below(best, sorted(rates))
    return below is None or rates[best] >= (1 + MIN_GAIN) * rates[below]


def _above(size: int, sizes: Sequence[int]) -> int | None:
    return next((other for other in sizes if other > size), None)


def _below(size: int, sizes: Sequence[int]) -> int | None:
    return next((other for other in reversed(sizes) if other < size), None)
