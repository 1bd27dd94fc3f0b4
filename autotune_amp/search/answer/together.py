"""Evidence about jobs that ran at the same time: trials on several slots, and the ranks of one trial. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from autotune_amp.core.evidence import RanksEvidence, SlotsEvidence
from autotune_amp.core.outcome import Description, Measurement, Record
from autotune_amp.search import ranking
from autotune_amp.search.ranking import best_runs


def ranks(records: Sequence[Record], description: Description | None) -> RanksEvidence | None:
    """Return the evidence on how throughput scales with the ranks; None if the search trains each trial on one rank."""
    if description is None or not description.is_ranked:
        return None
    num_ranks, alone = description.num_ranks, next((r for r in records if r.purpose == "one_rank"), None)
    if alone is None or not isinstance(alone.outcome, Measurement):
        return RanksEvidence(num_ranks=num_ranks)
    one, together = alone.outcome.samples_per_second, best_runs(records, alone.candidate, alone.environment).speed
    return RanksEvidence(
        num_ranks=num_ranks,
        setting=str(alone.candidate),
        one_rank_samples_per_second=one,
        efficiency=together / (num_ranks * one),
    )


def slots(records: Sequence[Record]) -> SlotsEvidence | None:
    """Return the evidence on the slots that ran trials at the same time, with the slowdown; None for a single slot."""
    names = tuple(dict.fromkeys(sorted(r.slot for r in records if r.slot is not None)))
    if len(names) < 2:
        return None
    found = ranking.beside(records)
    if found is None:
        return SlotsEvidence(names=names)
    return SlotsEvidence(
        names=names, slowdown=found.slowdown, chance=found.chance, is_confirmed_beside=not found.is_different
    )
