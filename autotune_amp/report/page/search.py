"""The page of a finished search, put together from its recommendation and its records. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from autotune_amp.core.config_source import export_lines
from autotune_amp.core.text import count, duration, exact, number, one_line, size, times
from autotune_amp.report import summary
from autotune_amp.report.frameworks import export_command
from autotune_amp.report.page import shell, tables
from autotune_amp.report.page.course import course
from autotune_amp.report.page.faithful import fidelity
from autotune_amp.report.page.loss_scale import Calibrated, calibrated, foretold, gradients
from autotune_amp.report.page.memory import caption, memory
from autotune_amp.report.page.shell import Section, chart
from autotune_amp.report.page.speed import pareto, throughput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.outcome import Record
    from autotune_amp.core.recommendation import Recommendation

_ELSEWHERE = ("config", "reason", "warning", "fidelity")  # facts that have a place of their own


def search_page(recommendation: Recommendation, records: Sequence[Record], path: str) -> str:
    """The HTML document; `path` is that of recommendation.json, for the lines to copy."""
    told = dict(recommendation.facts())
    return shell.page(
        f"{recommendation.search.study}: {told['config']}",
        [
            Section("Use it", _use(recommendation, path)),
            Section("Throughput against batch size", chart(throughput(recommendation, records), _THROUGHPUT)),
            Section(
                "Memory against batch size", chart(memory(recommendation, records), caption(recommendation, records))
            ),
            Section("Throughput against memory", chart(pareto(recommendation), _PARETO)),
            Section("The search as it went", chart(course(recommendation, records), _COURSE)),
            Section("The loss scale of fp16", _loss_scale(recommendation, records)),
            Section("Fidelity to fp32", _fidelity(recommendation, records)),
            Section("Evidence", shell.facts(pair for pair in recommendation.facts() if pair[0] not in _ELSEWHERE)),
            Section("All candidates", tables.candidates(recommendation)),
            Section("Left out", tables.left_out(recommendation.excluded)),
            Section("Failures", tables.failures(records)),
            Section("Machine and versions", tables.machine(recommendation.hardware, recommendation.versions)),
        ],
        kind="search",
        lead=_lead(recommendation),
    )


MARKS = (
    "Large marks are the first trial of each batch size, with the 95 % interval of its step time in that process (one "
    "over few steps may run out of the chart); small ones are the trials that measured again: confirmations in fresh "
    "processes, other loader workers, pinned modules. Open marks were cut short as far slower than the best."
)
_THROUGHPUT = f"{MARKS} The rings are medians over processes, with where a new run is expected to land."
_PARETO = (
    "One mark for each candidate; those on the line, the baseline and the recommended one are labelled with their "
    "batch size (x accumulation steps) where there is room. Nothing that may be recommended is above and left of the "
    "line; open marks were cut short or excluded."
)
_COURSE = (
    "Above: each trial where it ended, and the fastest so far that no check has ruled out. Below: what the time went "
    "into; confirm measures the recommended one and the baseline again in fresh processes, plain the recommended one "
    "without its environment variables, fallback what the training steps down to. Loading and probing come before, and "
    "are not counted."
)
_GRADIENTS = (
    "Entries of the gradient in fp32 by magnitude. The loss scale moves them to the right: out of the part that fp16 "
    "flushes to zero, yet no further than where a backward pass overflows, which is on larger numbers than these. The "
    "bars are the range of each format, hatched where fp16 has fewer digits."
)
_FORETOLD = (
    "GradScaler's own rule, replayed over the length of the training on the largest safe scales that were measured. "
    "Crosses are steps skipped. A burst of five bad batches is put in: without one a slow recovery would cost nothing."
)
FIDELITY = (
    "The noise ratio: how far the precision's rounding moves the gradient, in units of how far another batch of the "
    "same data moves it; of the whole gradient, of each module in the order of the model (where they are many, of the "
    "larger ones that hold them), and, small, of the five parameters where that is most."
)


def _lead(recommendation: Recommendation) -> str:
    evidence, search = recommendation.evidence, recommendation.search
    baseline, available = evidence.baseline, recommendation.hardware.memory.available
    over = f"over the baseline, {baseline.config.precision} batch {baseline.config.batch_size}"
    interval = evidence.speedup_interval
    low, high = evidence.samples_per_second_interval
    speedup = "unknown" if evidence.speedup is None else times(evidence.speedup)
    between = "" if interval is None else f"{times(interval[0])} to {times(interval[1])} "
    parts = [
        shell.tiles(
            [
                ("speed-up", speedup, between + over),
                (
                    "samples/s",
                    number(evidence.samples_per_second),
                    f"a new run: {number(low)} to {number(high)}; {duration(evidence.step_seconds)} a step",
                ),
                ("peak memory", size(evidence.peak_memory_bytes), f"of {size(available)} available"),
            ]
        ),
        shell.paragraph(one_line(recommendation.reason), "reason"),
    ]
    if search.was_interrupted:
        parts.append(shell.paragraph("The search was interrupted: this is the best so far.", "warning"))
    parts += [shell.paragraph(one_line(warning), "warning") for warning in recommendation.warnings]
    device = f"{recommendation.hardware.device} ({one_line(recommendation.hardware.identity.name)})"
    counted = f"{count(search.num_trials, 'trial')}, {search.num_failures} failed, {duration(search.seconds)}"
    return "".join([*parts, shell.paragraph(f"{counted} on {device}.", "absent")])


def _use(recommendation: Recommendation, path: str) -> str:
    exports = export_lines(recommendation.config)
    config = msgspec.json.format(recommendation.config.to_json(), indent=2)
    return (
        (shell.code("In the shell, before Python starts", "\n".join(exports)) if exports else "")
        + shell.code("In Python", "\n".join(summary.python_lines(recommendation, path)))
        + shell.code(*export_command(recommendation, path))
        + shell.folded("The config as JSON", shell.code("As AmpConfig.from_json reads it", config))
    )


def _loss_scale(recommendation: Recommendation, records: Sequence[Record]) -> str:
    found = calibrated(recommendation, records)
    about = f" This is {found.about}." if isinstance(found, Calibrated) else ""
    histogram, forecast = gradients(recommendation, found), foretold(found)
    if isinstance(histogram, str) and isinstance(found, str):
        return chart(f"No gradient histogram and no forecast of the loss scale: {found}.")
    chosen = (
        f" Chosen: from {exact(found.pair[0])}, growth interval {found.pair[1]}."
        if isinstance(found, Calibrated)
        else ""
    )
    return chart(histogram, _GRADIENTS + about) + chart(forecast, _FORETOLD + chosen)


def _fidelity(recommendation: Recommendation, records: Sequence[Record]) -> str:
    return chart(fidelity(recommendation.fidelity), FIDELITY) + tables.checks(recommendation.checks(), records)
