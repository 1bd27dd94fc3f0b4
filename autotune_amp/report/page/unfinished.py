"""The page of a search that recommended nothing, from its records alone. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune_amp.core.fidelity import Fidelity
from autotune_amp.core.outcome import Failure
from autotune_amp.core.text import count, duration
from autotune_amp.report.page import shell, tables
from autotune_amp.report.page.course import course
from autotune_amp.report.page.faithful import fidelity
from autotune_amp.report.page.memory import caption, memory
from autotune_amp.report.page.search import FIDELITY, MARKS
from autotune_amp.report.page.shell import Section, chart
from autotune_amp.report.page.speed import throughput
from autotune_amp.search import loss_scales, verdicts
from autotune_amp.search.evidence import is_trial

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.outcome import Record

_NOTHING_RULED_OUT = shell.paragraph("No check ruled anything out.", "absent")
_COURSE = "Above: each trial where it ended. Below: what the time went into."


def unfinished_page(name: str, records: Sequence[Record]) -> str:
    """The HTML document of the study `name`; `records` are of one search, and at least one."""
    ruled_out = (
        *verdicts.exclusions(verdicts.verdicts(records)),
        *loss_scales.exclusions(loss_scales.calibrated(records)),
    )
    checks = [record.outcome for record in records if isinstance(record.outcome, Fidelity)]
    return shell.page(
        f"{name}: nothing was recommended",
        [
            Section("Failures", tables.failures(records)),
            Section("Ruled out by checks", tables.left_out(ruled_out) if ruled_out else _NOTHING_RULED_OUT),
            Section("Throughput against batch size", chart(throughput(None, records), MARKS)),
            Section("Memory against batch size", chart(memory(None, records), caption(None, records))),
            Section("The search as it went", chart(course(None, records), _COURSE)),
            Section("Fidelity to fp32", chart(fidelity(checks), FIDELITY) + tables.checks(checks, records)),
        ],
        kind="search",
        lead=_lead(records),
    )


def _lead(records: Sequence[Record]) -> str:
    trials = [record for record in records if is_trial(record)]
    num_failed = sum(isinstance(record.outcome, Failure) for record in trials)
    if num_failed < len(trials):
        why = "what ran was ruled out, or the search did not come to choose"
    elif trials:
        why = f"none of {count(len(trials), 'trial')} worked"
    else:
        why = "no trial has ended"
    seconds = duration(sum(record.seconds for record in records))
    counted = f"{count(len(trials), 'trial')}, {num_failed} failed, {seconds} of measuring."
    return shell.paragraph(f"Nothing was recommended: {why}.", "warning") + shell.paragraph(counted, "absent")
