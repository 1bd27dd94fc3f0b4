"""Why a choice was made for memory or energy, in a sentence or two; for speed `explain` says it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_amp.core.text import rate
from autotune_amp.search.objective import least_speed
from autotune_amp.search.space import SAME_MEMORY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autotune_amp.core.evidence import Objective
    from autotune_amp.core.setting import Setting
    from autotune_amp.search.objective import Merit

_WHOLE_DEVICE = "The joules are those of the whole device: what else ran on it while a trial was measured counts too."


def reason(
    objective: Objective,
    chosen: Setting,
    baseline: Setting,
    found: Merit,
    today: Merit | None,
    *,
    is_kept: bool,
    searched: Mapping[Setting, Merit],
    behind: Mapping[Setting, str],
) -> str:
    """What the choice takes beside the baseline, and why nothing that takes less was chosen.

    `found` and `today` are the merits that the choice and the baseline were compared by, `searched` those of the
    search's own trials, by which the others are compared; `behind` says why some of them are no choice.
    """
    said = [_kept(objective, baseline, found) if is_kept else _taken(objective, chosen, baseline, found, today)]
    ours, todays = searched.get(chosen), searched.get(baseline)
    if ours is not None:
        less = {c: m for c, m in searched.items() if _share(objective, m, ours) < 1 and c != chosen}
        is_fast_enough = {c: m.samples_per_second >= least_speed(objective, todays) for c, m in less.items()}
        left_out = {c: m for c, m in less.items() if is_fast_enough[c] and c in behind}
        slower = {c: m for c, m in less.items() if not is_fast_enough[c] and c not in behind}
        riskier = {c: m for c, m in less.items() if objective == "energy" and c not in behind}
        what = "draws" if objective == "energy" else "takes"
        for c, m in _fastest(slower):
            said.append(f"{c} {what} {_share(objective, m, ours):.2f} of that but is slower than the baseline.")
        for c, m in _fastest(riskier):
            drawback = "has more to go wrong" if c.precision != chosen.precision else "takes a larger batch"
            said.append(f"{c} {what} {_share(objective, m, ours):.2f} of that and {drawback}.")
        for c, m in _fastest(left_out):
            why = behind[c].rstrip(".")
            said.append(f"{c} {what} {_share(objective, m, ours):.2f} of that and is left out: {why}.")
    return " ".join(said)


def warnings(objective: Objective) -> tuple[str, ...]:
    """What the reader has to know of the objective's numbers."""
    return (_WHOLE_DEVICE,) if objective == "energy" else ()


def _kept(objective: Objective, baseline: Setting, found: Merit) -> str:
    what = "draws less" if objective == "energy" else "that is as fast takes less"
    return f"Keep what you have: {baseline}, {_amount(objective, found)}; nothing measured {what} by 3 % or more."


def _taken(objective: Objective, chosen: Setting, baseline: Setting, found: Merit, today: Merit | None) -> str:
    name = f"{chosen} in the recommended environment" if chosen == baseline else str(chosen)
    what = "draws the least" if objective == "energy" else "has the least memory"
    if today is None:
        return (
            f"{name} {what}: {_amount(objective, found)}, at {rate(found.samples_per_second)}; "
            f"the baseline, {baseline}, has no measurement to compare with."
        )
    ratio = found.samples_per_second / today.samples_per_second
    beside = f"{_amount(objective, found)}, {_beside(objective, found, today)}at {ratio:.2f} of the speed"
    beside += f" of the baseline, {baseline}."
    if found.samples_per_second < least_speed(objective, today):
        return f"Nothing that may be recommended is as fast as the baseline; {name} comes nearest: {beside}"
    return f"{name} {what}{' of what is no slower than the baseline' * (objective == 'memory')}: {beside}"


def _beside(objective: Objective, found: Merit, today: Merit) -> str:
    if objective == "energy" and (found.joules_per_sample is None or today.joules_per_sample is None):
        return ""
    return f"{_share(objective, found, today):.2f} of the {_amount(objective, today)} that it is today, "


def _amount(objective: Objective, found: Merit) -> str:
    """``612 MiB``, ``1.20 GiB`` or ``0.35 J a sample``."""
    if objective == "energy":
        joules = found.joules_per_sample
        return "an unknown energy" if joules is None else f"{joules:.3g} J a sample"
    num_bytes = found.peak_memory_bytes
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def _share(objective: Objective, other: Merit, ours: Merit) -> float:
    """What one takes as a share of what the other takes; 1 where they are alike or that is not known."""
    if objective == "memory":
        share = other.peak_memory_bytes / ours.peak_memory_bytes
        return share if share < SAME_MEMORY else max(share, 1.0)
    if other.joules_per_sample is None or ours.joules_per_sample is None:
        return 1.0
    return other.joules_per_sample / ours.joules_per_sample


def _fastest(merits: Mapping[Setting, Merit]) -> list[tuple[Setting, Merit]]:
    """The one that is worth a sentence, if there is one."""
    return sorted(merits.items(), key=lambda item: -item[1].samples_per_second)[:1]
