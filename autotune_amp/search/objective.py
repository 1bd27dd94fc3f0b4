"""How candidates rank for speed, memory or energy, and what is worth a change from what the user runs today. Pure.

Speed: within 3 % of the fastest the precision with the least to go wrong at run time, then the smallest batch. Memory:
the least peak of what is no slower than the baseline; peaks within 2 % are alike, and speed decides. Energy: the least
joules per sample, and within 3 % the precision with the least to go wrong, then the smallest batch.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.precision.modes import MODES
from autotune_amp.search.space import SAME_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from autotune_amp.core.evidence import Objective
    from autotune_amp.core.outcome import Measurement
    from autotune_amp.core.setting import Setting

PLATEAU = 0.03  # closer than this, other things decide: processes differ by as much (studies/README.md, Timing)


class Merit(NamedTuple):
    """What a candidate is ranked by; `joules_per_sample` is None where nothing says what the device draws."""

    samples_per_second: float
    peak_memory_bytes: int
    joules_per_sample: float | None


def merit(measurements: Sequence[Measurement], applied_share: float = 1.0) -> Merit:
    """The merit of one candidate's processes; only what reaches the optimizer counts as a sample."""
    joules = joules_per_sample(measurements)
    return Merit(
        samples_per_second=median(m.samples_per_second for m in measurements) * applied_share,
        peak_memory_bytes=max(m.peak_memory_bytes for m in measurements),
        joules_per_sample=joules / applied_share if joules is not None and applied_share > 0 else None,
    )


def joules_per_sample(measurements: Iterable[Measurement]) -> float | None:
    """The median over the processes that read a counter, None where none did."""
    known = [m.joules_per_sample for m in measurements if m.joules_per_sample is not None]
    return median(known) if known else None


def rank(measured: Mapping[Setting, float], tiers: Mapping[Setting, int] | None = None) -> list[Setting]:
    """Candidates by speed, from their samples per second: the winner, then the winner without it, and so on.

    Lower tiers come first, 0 where `tiers` does not say; in each, candidates as found come last, since a config cannot
    express them.
    """
    return rank_for("speed", {c: Merit(speed, 0, None) for c, speed in measured.items()}, tiers=tiers)


def rank_for(
    objective: Objective,
    merits: Mapping[Setting, Merit],
    *,
    least_speed: float = 0.0,
    tiers: Mapping[Setting, int] | None = None,
) -> list[Setting]:
    """The same for any objective.

    For memory what reaches less than `least_speed` samples per second comes after the others of its tier, and for
    energy what has no joules; both by speed.
    """

    def winner(left: Sequence[Setting]) -> Setting:
        speeds = {c: merits[c].samples_per_second for c in left}
        if objective == "memory":
            peaks = {c: merits[c].peak_memory_bytes for c in left if speeds[c] >= least_speed}
            alike = [c for c, peak in peaks.items() if SAME_MEMORY * peak <= min(peaks.values())]
            return _fastest({c: speeds[c] for c in alike} or speeds)
        if objective == "energy":
            joules = {c: j for c in left if (j := merits[c].joules_per_sample) is not None}
            close = [c for c, j in joules.items() if (1 - PLATEAU) * j <= min(joules.values())]
            return min(close, key=lambda c: c.risks) if close else _fastest(speeds)
        return _fastest(speeds)

    groups: dict[tuple[int, bool], list[Setting]] = {}
    for candidate in merits:
        groups.setdefault(((tiers or {}).get(candidate, 0), candidate.as_found), []).append(candidate)
    ranking: list[Setting] = []
    for _, left in sorted(groups.items(), key=lambda item: item[0]):
        while left:
            ranking.append(winner(left))
            left.remove(ranking[-1])
    return ranking


def least_speed(objective: Objective, baseline: Merit | None) -> float:
    """Samples per second that a choice must reach: for memory those of the baseline within 3 %, else none."""
    return (1 - PLATEAU) * baseline.samples_per_second if objective == "memory" and baseline is not None else 0.0


def keeps_baseline(
    objective: Objective, candidate: Setting, found: Merit, baseline: Setting, today: Merit | None
) -> bool:
    """Whether the choice is not worth a change from what the user runs today: a gain below 3 %.

    For speed and energy a choice with less to go wrong is worth it even where it loses less than that. For memory a
    choice with the baseline's peak is worth it where it is 3 % faster, and one that is slower than the baseline never.
    """
    if today is None:
        return False
    if candidate.as_found:
        return True
    is_safer = MODES[candidate.precision].risk < MODES[baseline.precision].risk
    if objective == "memory":
        if found.samples_per_second < least_speed(objective, today):
            return True
        is_faster = found.samples_per_second >= (1 + PLATEAU) * today.samples_per_second
        is_no_larger = SAME_MEMORY * found.peak_memory_bytes <= today.peak_memory_bytes
        return found.peak_memory_bytes > (1 - PLATEAU) * today.peak_memory_bytes and not (is_faster and is_no_larger)
    if objective == "energy":
        if found.joules_per_sample is None or today.joules_per_sample is None:
            return found.joules_per_sample is None
        return found.joules_per_sample > today.joules_per_sample * (1 + PLATEAU if is_safer else 1 - PLATEAU)
    return found.samples_per_second < today.samples_per_second * (1 - PLATEAU if is_safer else 1 + PLATEAU)


def check_measured(objective: Objective, merits: Iterable[Merit]) -> None:
    """Raise `InvalidRequestError` where nothing was measured that the objective asks for."""
    if objective == "energy" and all(m.joules_per_sample is None for m in merits):
        raise InvalidRequestError(
            "--objective is 'energy', but no trial of this search has read what the device draws: it has no counter "
            "that this user may read, or the trials were too short for it.",
            "Search with --objective energy --fresh: that says what is missing, and measures long enough.",
        )


def _fastest(speeds: Mapping[Setting, float]) -> Setting:
    close = [c for c, speed in speeds.items() if speed >= (1 - PLATEAU) * max(speeds.values())]
    return min(close, key=lambda c: c.risks)
