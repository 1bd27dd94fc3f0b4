"""Entry point of a search: answer from the cache, or search. Light to import, for an answer within 50 ms."""

from __future__ import annotations

import msgspec

from autotune_amp.core.recommendation import MAX_WARNINGS, Fingerprint, Recommendation
from autotune_amp.distributed import left_no_answer
from autotune_amp.hardware import identify
from autotune_amp.search.options import RANKING, SearchOptions
from autotune_amp.search.progress import Progress
from autotune_amp.search.source import Source
from autotune_amp.search.storage.folder import StudyFolder

# Options that do not change the measurements: where a search writes, its devices, and its ranking.
_OPTIONS_OUTSIDE_FINGERPRINT = ("study", "out", "storage", "devices", "ray", *RANKING)


def search(
    source: Source, options: SearchOptions, progress: Progress, *, is_fresh: bool, is_rerun: bool = False
) -> Recommendation:
    """Return the cached recommendation, or search; see `recommend_config`. A rerun (see `Place`) never searches."""
    folder = StudyFolder(options.out, options.study or source.name)
    fields = msgspec.to_builtins(options)
    settings = {name: fields[name] for name in fields if name not in _OPTIONS_OUTSIDE_FINGERPRINT}
    cached = folder.cached()
    # The hardware of a cluster's node is known once it is reached.
    fingerprint = None if options.ray else source.fingerprint(settings, identify(options.first_device))
    if fingerprint is not None and (is_rerun or not is_fresh):
        answer = cached_answer(cached, options, folder, progress, fingerprint)
        if answer is not None:
            return answer
    if is_rerun:
        raise left_no_answer(folder.path, cached, fingerprint)
    from autotune_amp.search.search import search_anew

    def answer_for(fingerprint: Fingerprint) -> Recommendation | None:
        """Return a known recommendation, or None. The folder is locked."""
        answer = cached_answer(cached, options, folder, progress, fingerprint)
        return answer or _shared_answer(source, options, folder, progress, fingerprint)

    return search_anew(source, options, progress, folder, settings, cached, fingerprint, answer_for, is_fresh=is_fresh)


def cached_answer(
    cached: Recommendation | None,
    options: SearchOptions,
    folder: StudyFolder,
    progress: Progress,
    fingerprint: Fingerprint,
) -> Recommendation | None:
    """Return `cached` if it is finished and holds for this fingerprint, which must be fully known and equal; else None.

    For another objective, length of training run or price it is ranked again and saved.
    """
    if cached is None or cached.search.was_interrupted:
        return None
    if fingerprint.unknown or cached.fingerprint.digest != fingerprint.digest:
        return None
    before = cached.options_as(SearchOptions)
    if all(getattr(before, name) == getattr(options, name) for name in RANKING):
        return cached
    if not folder.records(cached.search.search_id):
        return None  # answered from a storage: the records to rank again by are elsewhere
    from autotune_amp.search.answer.decide import rerank  # not needed for a plain answer, which has to take 50 ms

    answer = folder.save(rerank(cached, options, folder))
    progress.note(f"Ranked again for {options.objective} from what this search measured before; nothing was run.")
    return answer


def _shared_answer(
    source: Source, options: SearchOptions, folder: StudyFolder, progress: Progress, fingerprint: Fingerprint
) -> Recommendation | None:
    """Return the storage's recommendation from another host or folder if it holds here, and save it here."""
    if options.storage is None or fingerprint.unknown:
        return None
    from autotune_amp.search.storage import shared  # imports Optuna

    found = shared.matching_recommendation(shared.shared_recommendations(options.storage, fingerprint), fingerprint)
    if found is None:
        return None
    answer = found.recommendation
    if any(answer.options.get(name) != getattr(options, name) for name in RANKING):
        return None  # ranking again needs the records
    told = f"Answered from the storage: measured {found.origin}, on a machine of the same kind."
    progress.note(told)
    asked = msgspec.to_builtins(options)
    answer = msgspec.structs.replace(
        answer,
        options={name: asked[name] for name in answer.options if name in asked},
        command=None,
        fingerprint=fingerprint,
        target=source.target,
        command_template=source.command_template,
        warnings=(told, *answer.warnings)[:MAX_WARNINGS],
        notes=(*answer.warnings[MAX_WARNINGS - 1 :], *answer.notes),
        search=msgspec.structs.replace(answer.search, study=folder.path.name),
    )
    return folder.save(answer)
