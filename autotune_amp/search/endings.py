"""How a search ends without a recommendation: the errors for a budget that is too small and for nothing that works."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autotune_amp.core.errors import BudgetTooSmallError
from autotune_amp.core.outcome import Failure, Record
from autotune_amp.core.recommendation import Exclusion, NothingWorksError, SearchInterruptedError
from autotune_amp.core.setting import Setting
from autotune_amp.search.evidence import is_trial
from autotune_amp.search.explore import CHECK_SHARE
from autotune_amp.search.session import Clock


def nothing_to_choose(
    records: Sequence[Record],
    excluded: tuple[Exclusion, ...],
    clock: Clock,
    last_step_seconds: float | None,
    out: Mapping[Setting, str],
    *,
    was_interrupted: bool,
) -> NothingWorksError | BudgetTooSmallError | SearchInterruptedError:
    """Why there is nothing to recommend.

    `last_step_seconds` is the last step that any trial finished, if one did; `out` is what was measured and must not be
    recommended, with the reason.
    """
    if was_interrupted:
        return SearchInterruptedError(
            "Interrupted before anything was measured.", "Run the same command again.", excluded, None
        )
    trials = [r for r in records if is_trial(r)]
    if out:
        reasons = dict.fromkeys(f"{candidate.precision}: {reason}" for candidate, reason in out.items())
        return NothingWorksError(
            f"Whatever ran is ruled out: {'; '.join(reasons)}.",
            "Allow --precision fp32 as well, or mend what the reasons name.",
            excluded,
        )
    failures = [r.outcome for r in trials if isinstance(r.outcome, Failure)]
    is_only_slow = all(f.kind == "timeout" for f in failures)
    if is_only_slow and (not failures or last_step_seconds is not None):
        return too_small(clock, last_step_seconds)
    first = next((f for f in failures if f.kind == "workload_error"), failures[0])
    candidate = next(r.candidate for r in trials if r.outcome is first)
    details = f"\n{first.details.rstrip()}" if first.details else ""
    return NothingWorksError(
        f"None of {len(trials)} trials worked; {candidate}: {first.message}.{details}",
        "Mend what the reasons name; a workload that trains one step on its own will be measured."
        + (" If steps are only slow, give a larger --budget." if is_only_slow else ""),
        excluded,
    )


def too_small(clock: Clock, last_step_seconds: float | None) -> BudgetTooSmallError:
    """Twice the shortest trial there is, with what came before it, must fit in the search's share."""
    used_seconds, step_seconds = clock.elapsed(), last_step_seconds or 0.0
    share = 1 - clock.confirm_seconds / clock.budget_seconds - CHECK_SHARE
    needed = (2 * used_seconds + 12 * step_seconds) / share
    return BudgetTooSmallError(
        f"The budget of {clock.budget_seconds:g} s ended before anything was measured; "
        f"{used_seconds:.0f} s had gone into loading, probing and building the workload and its first trials.",
        f"Give --budget {math.ceil(needed / 10) * 10} or more.",
    )
