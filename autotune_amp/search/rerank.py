"""Records -> recommendation, at the end of a search and again for another objective: nothing is run for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import InvalidRequestError, StudyError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Description, Record
from autotune_amp.core.recommendation import Fingerprint, Recommendation, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.search import loss_scales
from autotune_amp.search.accumulate import judged
from autotune_amp.search.choose import decide
from autotune_amp.search.folder import StudyFolder
from autotune_amp.search.job import job
from autotune_amp.search.loss_scales import AllScales
from autotune_amp.search.options import RANKING, SearchOptions
from autotune_amp.search.session import exclusions
from autotune_amp.search.space import Space, build_space
from autotune_amp.trial.heap import recommended_environment

LOSS_SCALE = LossScale()  # what fp16 is tried with before its own is known

# Where a study lies is for whoever asks to say, and a storage's URL may hold a password.
_OPTIONS_NOT_KEPT = ("study", "out", "storage")


def recommend(
    records: Sequence[Record],
    space: Space,
    *,
    options: SearchOptions,
    scales: AllScales,
    environment: Mapping[str, str],
    hardware: Hardware,
    workload: Description,
    search: SearchSummary,
    fingerprint: Fingerprint,
    versions: dict[str, str],
) -> Recommendation:
    """The recommendation for the objective and the length of training in `options`; see `choose.decide`.

    `environment` is the one that the contenders were confirmed in. Raises what `decide` raises.
    """
    decision = decide(
        records,
        space,
        environment=environment,
        loss_scale=LOSS_SCALE,
        exclusions=exclusions(records, scales, space),
        is_budget_spent=search.is_budget_spent,
        scales=scales,
        objective=options.objective,
        description=workload,
    )
    fields = msgspec.to_builtins(options)
    return Recommendation(
        config=decision.config,
        evidence=decision.evidence,
        reason=decision.reason,
        warnings=(*decision.warnings, *search.warnings),
        excluded=decision.excluded,
        candidates=decision.candidates,
        search=search,
        hardware=hardware,
        versions=versions,
        fingerprint=fingerprint,
        fidelity=decision.fidelity,
        workload=workload,
        options={name: fields[name] for name in fields if name not in _OPTIONS_NOT_KEPT},
        objective=options.objective,
        job=job(decision.config, decision.evidence, options),
    )


def rerank(known: Recommendation, options: SearchOptions, folder: StudyFolder) -> Recommendation:
    """`known` for the objective, the length of training and the price in `options`, from the records in its folder.

    Reads only. Raises `StudyError` where the folder lacks the records, and `InvalidRequestError` where nothing was
    measured that the objective asks for.
    """
    records = folder.peek(known.search.search_id) if known.search.search_id else []
    if not records or known.workload is None:
        raise StudyError(
            f"{folder.path} cannot be ranked again: its outcomes.jsonl lacks the trials behind recommendation.json.",
            "Search again with --fresh, or put the outcomes.jsonl of this search beside it.",
        )
    before = msgspec.convert(known.options, SearchOptions)
    asked = msgspec.structs.replace(before, **{name: getattr(options, name) for name in RANKING})
    space = judged(build_space(known.hardware, known.workload, asked), records)
    return recommend(
        records,
        space,
        options=asked,
        scales=_scales(known, records, asked.horizon_steps(space.baseline.effective_batch_size)),
        environment=_environment(known, records),
        hardware=known.hardware,
        workload=known.workload,
        search=known.search,
        fingerprint=known.fingerprint,
        versions=known.versions,
    )


def ranked_again(
    known: Recommendation,
    path: Path,
    objective: str | None,
    steps: int | None,
    samples: int | None,
    price_per_hour: float | None,
) -> Recommendation:
    """`rerank` of the recommendation at `path` for what a user asks; None is what it has.

    Raises `InvalidRequestError` for a wrong option and for a search that was interrupted, and what `rerank` raises.
    """
    if known.search.was_interrupted:
        raise InvalidRequestError(
            f"{path} is the best of a search that was interrupted, which is not ranked again.",
            "Run its `autotune-amp search` command again with these options: it goes on, and ranks by them.",
        )
    before = msgspec.convert(known.options, SearchOptions)
    is_length_given = steps is not None or samples is not None
    options = SearchOptions.from_user(
        objective=before.objective if objective is None else objective,
        steps=steps if is_length_given else before.num_steps,
        samples=samples if is_length_given else before.num_samples,
        price_per_hour=before.price_per_hour if price_per_hour is None else price_per_hour,
    )
    return rerank(known, options, StudyFolder(str(path.parent.parent), path.parent.name))


def _scales(known: Recommendation, records: Sequence[Record], num_steps: int) -> AllScales:
    """The calibrations over this horizon, with the pairs that the search chose: what else it asked for is not kept."""
    scales = loss_scales.calibrated(records, num_steps)
    chosen = (Setting.of(known.config), known.config.loss_scale)
    for candidate, scale in [chosen, *((r.candidate, r.loss_scale) for r in _confirming(records))]:
        found = loss_scales.scales_of(scales, candidate)
        if found is not None and scale is not None:
            found.replay((scale.init_scale, scale.growth_interval))
    return scales


def _environment(known: Recommendation, records: Sequence[Record]) -> dict[str, str]:
    """What the contenders were confirmed in: this may be another machine than the one that searched."""
    tried = [r.environment for r in _confirming(records)] + [known.config.environment]
    return next(filter(None, tried), recommended_environment(known.hardware.device))


def _confirming(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r.purpose == "confirm"]
