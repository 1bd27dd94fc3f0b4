"""Page of a search, with or without a recommendation. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from autotune_amp.core import pieces
from autotune_amp.core.evidence import accumulation_line, check_line
from autotune_amp.core.outcome import Accumulation, Failure, Fidelity, Record
from autotune_amp.core.recommendation import Exclusion, Recommendation
from autotune_amp.core.text import count, duration, exact, one_line, outcome_name
from autotune_amp.report import document, rows
from autotune_amp.report.charts import Drawn, course, memory, pareto, throughput
from autotune_amp.report.document import chart
from autotune_amp.report.numerics_charts import Calibrated, calibrated, fidelity, foretold, gradients
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.ranking import is_trial

_ELSEWHERE = ("config", "reason", "warning", "fidelity")  # facts that the page shows in another place
_AGAINST_BATCH_SIZE = "Throughput against batch size"

_THROUGHPUT = (
    "Large marks are the first trial of each batch size, small ones measured again; open ones were cut short as far "
    "slower than the best. Rings are medians over processes, with where a new run is expected to land."
)
_MEMORY = (
    "The peak of each trial. Crosses on the axis ran out of memory: nobody knows what they would have taken; then the "
    "line is what a trial may take."
)
_PARETO = (
    "One mark for each candidate, with its batch size (x accumulation steps). Nothing that may be recommended is above "
    "and left of the line; open marks were cut short or excluded."
)
_COURSE = (
    "Above: each trial where it ended, and the fastest so far that no check has ruled out. Below: what the time went "
    "into; confirm measures in fresh processes, plain without the environment variables."
)
_GRADIENTS = (
    "Entries of the gradient in fp32 by magnitude. The loss scale moves them to the right: out of the part that fp16 "
    "flushes to zero, yet no further than where a backward pass overflows, which is on larger numbers than these."
)
_FORETOLD = (
    "GradScaler's own rule, replayed over the length of the training on the largest safe scales that were measured, "
    "with a burst of five bad batches. Crosses are steps skipped."
)
_FIDELITY = (
    "The noise ratio: how far the precision's rounding moves the gradient, in units of how far another batch of the "
    "same data moves it; of the whole gradient, and of each module in the order of the model."
)


def search_page(recommendation: Recommendation, records: Sequence[Record], path: str) -> str:
    """Return the HTML document of a finished search; `path` is its recommendation.json, for the lines to copy."""
    checked = _fidelity(recommendation.fidelity, recommendation.checks(), records)
    charts, absent = _charts(
        {
            _AGAINST_BATCH_SIZE: [(throughput(recommendation, records), _THROUGHPUT)],
            "Memory against batch size": [(memory(recommendation, records), _MEMORY)],
            "Throughput against memory": [(pareto(recommendation), _PARETO)],
            "Fidelity to fp32": checked,
            "The loss scale of fp16": _loss_scale(recommendation, records),
            "The search as it went": [(course(recommendation, records), _COURSE)],
        }
    )
    facts = recommendation.facts()
    return document.page(
        f"{recommendation.search.study}: {'keep ' * recommendation.is_kept}{dict(facts)['config']}",
        {
            "Use it": _use(recommendation, path),
            "Warnings": recommendation.warnings_html(),
            "Evidence": pieces.facts(pair for pair in facts if pair[0] not in _ELSEWHERE),
            _AGAINST_BATCH_SIZE: charts.pop(_AGAINST_BATCH_SIZE),
        },
        {
            "Notes": recommendation.notes_html(),
            "All candidates": _candidates(recommendation),
            "Also tried": _variants(recommendation),
            **charts,
            "Failures": _failures(records),
            "Left out": _left_out(recommendation.excluded),
            "Machine and versions": recommendation.hardware.to_html() + pieces.facts(recommendation.versions.items()),
            "Not in this report": absent,
        },
        kind="search",
        lead=recommendation.answer_html(),
    )


def unfinished_page(name: str, records: Sequence[Record]) -> str:
    """Return the HTML document of a search in the study `name` that recommended nothing.

    `records` are those of the search, at least one.
    """
    ruled_out = (
        *ranking.exclusions(ranking.fidelity_verdicts(records)),
        *loss_scales.exclusions(loss_scales.calibration_results(records)),
    )
    checks = [record.outcome for record in records if isinstance(record.outcome, Fidelity)]
    trials = [record for record in records if is_trial(record)]
    num_failed = sum(isinstance(record.outcome, Failure) for record in trials)
    seconds = duration(sum(record.seconds for record in records))
    why = "none of them worked" if num_failed == len(trials) else "what ran was ruled out, or the search was cut short"
    told = f"Nothing was recommended of {count(len(trials), 'trial')}, {num_failed} failed, in {seconds}: {why}."
    charts, absent = _charts(
        {
            _AGAINST_BATCH_SIZE: [(throughput(None, records), _THROUGHPUT)],
            "Memory against batch size": [(memory(None, records), _MEMORY)],
            "The search as it went": [(course(None, records), _COURSE)],
            "Fidelity to fp32": _fidelity(checks, checks, records),
        }
    )
    return document.page(
        f"{name}: nothing was recommended",
        {
            "Failures": _failures(records),
            "Ruled out by checks": _left_out(ruled_out),
            _AGAINST_BATCH_SIZE: charts.pop(_AGAINST_BATCH_SIZE),
        },
        {**charts, "Not in this report": absent},
        kind="search",
        lead=pieces.paragraph(told, "warning"),
    )


# Parts of a section: charts with their captions, and HTML.
_Parts: TypeAlias = "Sequence[tuple[Drawn, str] | str]"


def _charts(sections: Mapping[str, _Parts]) -> tuple[dict[str, str], str]:
    """Return the sections as HTML, and a list of the missing charts, each with the reason."""
    shown, absent = {}, []
    for title, parts in sections.items():
        body = ""
        for part in parts:
            if isinstance(part, str):
                body += part
            elif isinstance(part[0], str):
                absent.append((title, part[0]))
            else:
                body += chart(*part)
        shown[title] = body
    return shown, pieces.facts(dict.fromkeys(absent)) if absent else ""


def _use(recommendation: Recommendation, path: str) -> str:
    """Return the shortest lines to copy; the whole loop and the config as JSON unfold."""
    shown = rows.shortest_use(recommendation, path)
    longer = [use for use in rows.uses(recommendation, path) if use not in shown]
    config = msgspec.json.format(recommendation.config.to_json(), indent=2)
    return "".join(
        [
            _blocks([use for use in shown if use[1]]),
            pieces.folded("The whole loop", _blocks(longer)) if longer else "",
            pieces.folded("The config as JSON", document.code("As AmpConfig.from_json reads it", config)),
        ]
    )


def _blocks(uses: Iterable[tuple[str, list[str]]]) -> str:
    return "".join(document.code(title, "\n".join(lines)) for title, lines in uses)


def _loss_scale(recommendation: Recommendation, records: Sequence[Record]) -> _Parts:
    found = calibrated(recommendation, records)
    chosen = ""
    if isinstance(found, Calibrated):
        chosen = f" This is {found.about}, from {exact(found.pair[0])} with growth interval {found.pair[1]}."
    return [(gradients(recommendation, found), _GRADIENTS), (foretold(found), _FORETOLD + chosen)]


def _fidelity(drawn: Sequence[Fidelity], told: Iterable[Fidelity], records: Sequence[Record]) -> _Parts:
    """Return the chart of the checks `drawn`, and the result of each check in `told` and of accumulation as text."""
    lines = [(found.precision, check_line(found)) for found in told]
    accumulations = [r.outcome for r in records if isinstance(r.outcome, Accumulation)]
    checks = lines + [("accumulation", f"{accumulation_line(found)}. {found.reason}") for found in accumulations]
    return [(fidelity(drawn), _FIDELITY), pieces.facts(checks) if checks else ""]


def _candidates(recommendation: Recommendation) -> str:
    recommended, baseline = rows.recommended_row(recommendation), rows.baseline_row(recommendation)
    shown, columns = [], ["precision"]
    for row, cells in rows.table(recommendation):
        columns = list(cells)
        words = filter(None, (rows.outcome_words(row, recommended, baseline), rows.reason_words(row)))
        shown.append([*cells.values(), ": ".join(words)])
    return pieces.table([*columns, "outcome"], shown, num_numeric=len(columns) - 1)


def _variants(recommendation: Recommendation) -> str:
    shown = [cells for _, cells in rows.variants(recommendation)]
    return pieces.table(rows.VARIANT_COLUMNS, shown, num_numeric=2) if shown else ""


def _left_out(excluded: Iterable[Exclusion]) -> str:
    shown = rows.exclusions(excluded)
    return pieces.table(("precision", "batch", "reason"), shown) if shown else ""


def _failures(records: Sequence[Record]) -> str:
    failed = [(r, r.outcome) for r in records if isinstance(r.outcome, Failure)]
    if not failed:
        return ""
    shown, details = [], ""
    for r, found in failed:
        kind = outcome_name(found.kind)
        shown.append((str(r.number), str(r.candidate), r.purpose, kind, one_line(found.message)))
        if found.details:
            details += pieces.folded(f"Details of trial {r.number}, {r.candidate}", document.code(kind, found.details))
    return pieces.table(("trial", "candidate", "purpose", "failure", "reason"), shown) + details
