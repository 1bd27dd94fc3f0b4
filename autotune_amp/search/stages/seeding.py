"""What to try first: the baseline, every precision at a middle batch, then where the models of time and memory point,
then what lies round the best.

Seeding a sampler so cuts the mean regret at 15 trials from 14 % to 2 % (studies/README.md).
Pure and without state: the next seed follows from the outcomes so far, so a resumed search goes on where it was.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

from autotune_amp.core.outcome import Measurement, Outcome
from autotune_amp.core.recommendation import Exclusion
from autotune_amp.search.objective import PLATEAU
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


class StepTimeModel(NamedTuple):
    """Seconds of one forward and backward pass on b samples, its share of the optimizer step included: t(b) = a + c·b.

    With accumulation the optimizer's time is spread over the passes, which is linear in b too.
    """

    a: float
    c: float

    def samples_per_second(self, batch_size: int) -> float:
        """The throughput at this batch size."""
        return batch_size / (self.a + self.c * batch_size)


class MemoryModel(NamedTuple):
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


class _Known(NamedTuple):
    """Of one precision: samples per second of the batch sizes that ran, ascending, and those that may be tried."""

    rates: dict[int, float]
    untried: dict[int, Setting]


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
    known = _known(space, outcomes, memory_limit_bytes, excluded)

    def first_of(precision: Precision) -> Setting | None:
        """The first try: at the baseline's batch, where all can be compared; smaller only after OOM."""
        tried = [o for c, o in outcomes.items() if c.precision == precision and not c.as_found]
        if any(isinstance(outcome, Measurement) or outcome.kind != "oom" for outcome in tried):
            return None
        untried = known[precision].untried
        size = min(untried, key=lambda size: abs(math.log(size / space.baseline.batch_size)), default=None)
        return None if size is None else untried[size]

    def promise(precision: Precision) -> tuple[bool, float]:
        """The fastest matrix products first; the hopeless last: a step may cost more than the rest of the search."""
        return is_hopeless(hardware, precision), -(hardware.precisions[precision].matmul_flops_per_second or 0.0)

    firsts = map(first_of, sorted(dict.fromkeys(c.precision for c in space.candidates), key=promise))
    # An emulated precision may lead at small batches alone: what the device does itself climbs first.
    climbing = sorted(_best_precisions(known), key=lambda p: hardware.precisions[p].level == "emulated")
    nexts = (_next_of(known[precision]) for precision in climbing)
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
    known = _known(space, outcomes, memory_limit_bytes, excluded)
    fastest = max((rate for found in known.values() for rate in found.rates.values()), default=0.0)
    near = [p for p in _best_precisions(known) if max(known[p].rates.values()) * FAR_BEHIND >= fastest]
    return next(filter(None, (_round_the_best(known[precision]) for precision in near)), None)


def _known(
    space: Space, outcomes: Mapping[Setting, Outcome], limit: int | None, excluded: Sequence[Exclusion]
) -> dict[Precision, _Known]:
    legal = without(space.candidates, (*excluded, *excluded_by_outcomes(space, outcomes)))
    leading = without(outcomes, excluded)  # what a check rules out leads nobody any more
    found = {}
    for precision in dict.fromkeys(c.precision for c in (*outcomes, *space.candidates)):
        ours = [c for c in outcomes if c.precision == precision and not c.as_found]
        measured = {c: m for c in ours if isinstance(m := outcomes[c], Measurement)}
        model = fit_memory((c.batch_size, m.reserved_memory_bytes) for c, m in measured.items())
        rates = {c.batch_size: m.samples_per_second for c, m in measured.items() if c in leading}
        untried = {
            c.batch_size: c
            for c in legal
            if c.precision == precision
            and c not in outcomes
            and (limit is None or model is None or model.bytes_at(c.batch_size) <= MEMORY_MARGIN * limit)
        }
        found[precision] = _Known(dict(sorted(rates.items())), untried)
    return found


def _best_precisions(known: Mapping[Precision, _Known]) -> list[Precision]:
    best = {precision: max(found.rates.values()) for precision, found in known.items() if found.rates}
    return sorted(best, key=lambda precision: -best[precision])[:NUM_PRECISIONS]


def _next_of(known: _Known) -> Setting | None:
    """The next batch of a precision: up to where the step-time model has its plateau, then the best's neighbours."""
    rates, untried = known
    sizes = sorted({*rates, *untried})
    above, below = dict(itertools.pairwise(sizes)), dict(itertools.pairwise(reversed(sizes)))
    best = max(rates, key=lambda size: rates[size])
    wanted = [below.get(best), below.get(smallest_on_plateau(rates))]
    smaller = dict(itertools.pairwise(reversed(rates))).get(best)
    is_climbing = smaller is None or rates[best] >= (1 + MIN_GAIN) * rates[smaller]
    if best < max(rates) or is_climbing:
        wanted.insert(0, above.get(best))
    model = fit_step_time(rates.items())
    if model is not None and best == max(rates) and is_climbing:
        # Only upwards: what it says of smaller batches the neighbours measure sooner.
        plateau = smallest_on_plateau({size: model.samples_per_second(size) for size in sizes})
        wanted.insert(0, max(plateau, best))
    return next((untried[size] for size in wanted if size in untried), None)


def _round_the_best(known: _Known) -> Setting | None:
    """The nearest untried batch above or below the best one, on a side where not all is far behind yet."""
    rates, untried = known
    best = max(rates, key=lambda size: rates[size])
    sizes = sorted({*rates, *untried})
    for side in ([s for s in sizes if s > best], [s for s in reversed(sizes) if s < best]):
        num_far_behind = 0
        for size in side:
            if num_far_behind == NUM_FAR_BEHIND:
                break
            if size in untried:
                return untried[size]
            num_far_behind = num_far_behind + 1 if rates[size] * FAR_BEHIND < rates[best] else 0
    return None


def smallest_on_plateau(rates: Mapping[int, float]) -> int:
    """The smallest batch size within `PLATEAU` of the best samples per second."""
    return min(size for size, rate in rates.items() if rate >= (1 - PLATEAU) * max(rates.values()))
