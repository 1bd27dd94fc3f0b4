"""Saved recommendations that answer a request without a search: the folder's own, and a shared storage's.

The module imports little, so that a cached recommendation takes less than 50 ms.
"""

from __future__ import annotations

import msgspec

from autotune_amp.core.recommendation import MAX_WARNINGS, Fingerprint, Recommendation
from autotune_amp.search.options import RANKING, SearchOptions
from autotune_amp.search.progress import Progress
from autotune_amp.search.source import Source
from autotune_amp.search.storage.folder import StudyFolder


def cached_recommendation(
    cached: Recommendation | None,
    options: SearchOptions,
    folder: StudyFolder,
    progress: Progress,
    fingerprint: Fingerprint,
) -> Recommendation | None:
    """Return `cached` if its search is finished and has an equal fingerprint without unknown parts, else None.

    None also if a search with that fingerprint was begun after it: that one goes on.

    For another objective, length of training run or price it is ranked again and saved.
    """
    if cached is None or cached.search.was_interrupted:
        return None
    if fingerprint.unknown or cached.fingerprint.digest != fingerprint.digest or folder.has_later_search(cached):
        return None
    saved_options = cached.options_as(SearchOptions)
    if all(getattr(saved_options, name) == getattr(options, name) for name in RANKING):
        return cached
    if not folder.records(cached.search.search_id):
        return None  # it is from a shared storage: the records for ranking it again are elsewhere
    from autotune_amp.search.answer.decide import rerank  # late: a cached recommendation must take less than 50 ms

    recommendation = folder.save(rerank(cached, options, folder))
    progress.note(f"Ranked again for {options.objective} from the saved measurements; no trial was run.")
    return recommendation


def shared_recommendation(
    source: Source, options: SearchOptions, folder: StudyFolder, progress: Progress, fingerprint: Fingerprint
) -> Recommendation | None:
    """Return the shared storage's recommendation for an equal request, saved in `folder`; None without one."""
    if options.storage is None or fingerprint.unknown:
        return None
    from autotune_amp.search.storage import shared  # imports Optuna

    shared_recommendation = shared.matching_recommendation(
        shared.shared_recommendations(options.storage, fingerprint), fingerprint
    )
    if shared_recommendation is None:
        return None
    recommendation = shared_recommendation.recommendation
    if any(recommendation.options.get(name) != getattr(options, name) for name in RANKING):
        return None  # ranking again needs the records
    note = f"Answered from the storage: measured {shared_recommendation.origin}, on a machine of the same kind."
    progress.note(note)
    fields = msgspec.to_builtins(options)
    recommendation = msgspec.structs.replace(
        recommendation,
        options={name: fields[name] for name in recommendation.options if name in fields},
        command=None,
        fingerprint=fingerprint,
        target=source.target,
        command_template=source.command_template,
        warnings=(note, *recommendation.warnings)[:MAX_WARNINGS],
        notes=(*recommendation.warnings[MAX_WARNINGS - 1 :], *recommendation.notes),
        search=msgspec.structs.replace(recommendation.search, study=folder.path.name),
    )
    return folder.save(recommendation)
