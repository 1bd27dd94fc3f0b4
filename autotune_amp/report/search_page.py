"""HTML page of a search, with or without a recommendation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec

from autotune_amp.core import markup
from autotune_amp.core.evidence import accumulation_line, check_line, config_line
from autotune_amp.core.outcome import Accumulation, Failure, Fidelity, Record
from autotune_amp.core.recommendation import Exclusion, Recommendation
from autotune_amp.core.text import count, duration, exact, in_python, one_line, outcome_name
from autotune_amp.report import document, rows
from autotune_amp.report.charts import FigureOrReason, course, memory, pareto, throughput
from autotune_amp.report.document import chart
from autotune_amp.report.numerics_charts import (
    ChosenCalibration,
    chosen_calibration,
    fidelity,
    gradients,
    predicted_loss_scale,
)
from autotune_amp.search import loss_scales, ranking
from autotune_amp.search.ranking import is_trial

_SHOWN_ELSEWHERE = ("set", "sure", "why", "fidelity")  # facts with their own place on the page
_AGAINST_BATCH_SIZE = "Throughput against batch size"

_THROUGHPUT = (
    "Large marks are the first trial of each batch size, small ones repeat it; open marks were cut short, far slower "
    "than the best. Rings are medians over processes; their whiskers show where a new run is expected."
)
_MEMORY = (
    "The peak of each trial. Crosses on the axis ran out of memory, so their peak is unknown; the line is then the "
    "memory limit of a trial."
)
_PARETO = (
    "One mark for each candidate, with its batch size (x accumulation steps). No candidate that can be recommended is "
    "above and left of the line; open marks were cut short or excluded."
)
_COURSE = (
    "Above: each trial at its end, and the fastest so far that no check has excluded. Below: the time of each trial "
    "and check; confirm measures in new processes, plain without the environment variables."
)
_GRADIENTS = (
    "Entries of the fp32 gradient by magnitude. The loss scale shifts them to the right, out of the range that fp16 "
    "flushes to zero. It is limited by overflows in the backward pass, whose numbers are larger than these."
)
_FORETOLD = (
    "GradScaler's rule, simulated over the whole training with the largest safe scales that were measured and a "
    "burst of five bad batches. Crosses are skipped steps."
)
_FIDELITY = (
    "The noise ratio: how far the precision's rounding moves the gradient, in units of how far another batch of the "
    "same data moves it; of the whole gradient, and of each module in the order of the model."
)


def search_page(recommendation: Recommendation, records: Sequence[Record], path: str) -> str:
    """Return the HTML document of a finished search; `path` is its recommendation.json, for the lines to copy."""
    fidelity_parts = _fidelity(recommendation.fidelity, recommendation.checks(), records)
    charts, absent = _charts(
        {
            _AGAINST_BATCH_SIZE: [(throughput(recommendation, records), _THROUGHPUT)],
            "Memory against batch size": [(memory(recommendation, records), _MEMORY)],
            "Throughput against memory": [(pareto(recommendation), _PARETO)],
            "Fidelity to fp32": fidelity_parts,
            "The loss scale of fp16": _loss_scale(recommendation, records),
            "The search over time": [(course(recommendation, records), _COURSE)],
        }
    )
    config = config_line(recommendation.config, recommendation.num_batches)
    evidence = [fact for fact in recommendation.facts() if fact[0] not in _SHOWN_ELSEWHERE]
    # A workload without a name on the command line, which is no command either, was searched from Python.
    is_from_python = recommendation.target is None and recommendation.command_template is None
    in_words: Callable[[str], str] = in_python if is_from_python else str
    return document.page(
        f"{recommendation.search.study}: {'keep ' * recommendation.is_kept}{config}",
        {
            "Use it": _use(recommendation, path),
            "Warnings": in_words(recommendation.warnings_html()),
            "Evidence": in_words(markup.definition_list(evidence)),
            _AGAINST_BATCH_SIZE: charts.pop(_AGAINST_BATCH_SIZE),
        },
        {
            "Notes": in_words(recommendation.notes_html()),
            "All candidates": in_words(_candidates(recommendation)),
            "Also tried": in_words(_variants(recommendation)),
            **charts,
            "Failures": _failures(records),
            "Left out": in_words(_left_out(recommendation.excluded)),
            "Machine and versions": recommendation.hardware.to_html()
            + markup.definition_list(recommendation.versions.items()),
            "Not in this report": in_words(absent),
        },
        kind="search",
        lead=in_words(recommendation.answer_html()),
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
    reason = (
        "none of them worked" if num_failed == len(trials) else "the others were excluded, or the search ended early"
    )
    summary = f"No recommendation after {count(len(trials), 'trial')}, {num_failed} failed, in {seconds}: {reason}."
    charts, absent = _charts(
        {
            _AGAINST_BATCH_SIZE: [(throughput(None, records), _THROUGHPUT)],
            "Memory against batch size": [(memory(None, records), _MEMORY)],
            "The search over time": [(course(None, records), _COURSE)],
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
        lead=markup.paragraph(summary, "warning"),
    )


# Parts of a section: charts with their captions, and HTML.
_Parts: TypeAlias = "Sequence[tuple[FigureOrReason, str] | str]"


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
    return shown, markup.definition_list(dict.fromkeys(absent)) if absent else ""


def _use(recommendation: Recommendation, path: str) -> str:
    """Return the shortest lines to copy, and folded sections with the whole loop and the config as JSON."""
    shown = rows.short_usage_lines(recommendation, path)
    longer = [use for use in rows.usage_lines(recommendation, path) if use not in shown]
    config = msgspec.json.format(recommendation.config.to_json(), indent=2)
    return "".join(
        [
            _blocks([use for use in shown if use[1]]),
            markup.collapsible("The whole loop", _blocks(longer)) if longer else "",
            markup.collapsible("The config as JSON", document.code("For AmpConfig.from_json", config)),
        ]
    )


def _blocks(uses: Iterable[tuple[str, list[str]]]) -> str:
    return "".join(document.code(title, "\n".join(lines)) for title, lines in uses)


def _loss_scale(recommendation: Recommendation, records: Sequence[Record]) -> _Parts:
    calibration = chosen_calibration(recommendation, records)
    chosen_text = ""
    if isinstance(calibration, ChosenCalibration):
        scale, growth_interval = calibration.pair
        chosen_text = f" This is {calibration.about}, from {exact(scale)} with growth interval {growth_interval}."
    return [
        (gradients(recommendation, calibration), _GRADIENTS),
        (predicted_loss_scale(calibration), _FORETOLD + chosen_text),
    ]


def _fidelity(charted: Sequence[Fidelity], listed: Iterable[Fidelity], records: Sequence[Record]) -> _Parts:
    """Return the chart of the checks `charted`, and as text the results of `listed` and of accumulation."""
    lines = [(check.precision, check_line(check)) for check in listed]
    accumulations = [r.outcome for r in records if isinstance(r.outcome, Accumulation)]
    checks = lines + [
        ("accumulation", f"{accumulation_line(accumulation)}. {accumulation.reason}") for accumulation in accumulations
    ]
    return [(fidelity(charted), _FIDELITY), markup.definition_list(checks) if checks else ""]


def _candidates(recommendation: Recommendation) -> str:
    recommended, baseline = rows.recommended_row(recommendation), rows.baseline_row(recommendation)
    table_rows, columns = [], ["precision"]
    for row, cells in rows.table(recommendation):
        columns = list(cells)
        words = filter(None, (rows.outcome_words(row, recommended, baseline), rows.reason_words(row)))
        table_rows.append([*cells.values(), ": ".join(words)])
    return markup.table([*columns, "outcome"], table_rows, num_numeric=len(columns) - 1)


def _variants(recommendation: Recommendation) -> str:
    table_rows = [cells for _, cells in rows.variants(recommendation)]
    return markup.table(rows.VARIANT_COLUMNS, table_rows, num_numeric=2) if table_rows else ""


def _left_out(excluded: Iterable[Exclusion]) -> str:
    table_rows = rows.exclusions(excluded)
    return markup.table(("precision", "batch", "reason"), table_rows) if table_rows else ""


def _failures(records: Sequence[Record]) -> str:
    failed = [(r, r.outcome) for r in records if isinstance(r.outcome, Failure)]
    if not failed:
        return ""
    table_rows, details = [], ""
    for r, failure in failed:
        kind = outcome_name(failure.kind)
        table_rows.append((str(r.number), str(r.candidate), r.purpose, kind, one_line(failure.message)))
        if failure.details:
            details += markup.collapsible(
                f"Details of trial {r.number}, {r.candidate}", document.code(kind, failure.details)
            )
    return markup.table(("trial", "candidate", "purpose", "failure", "reason"), table_rows) + details
