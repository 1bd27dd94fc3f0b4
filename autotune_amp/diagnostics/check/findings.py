"""Findings of a workload check, its report, and the job that runs it. Plain data without torch."""

from __future__ import annotations

import linecache
from typing import Any, ClassVar, NamedTuple

import msgspec

from autotune_amp.core.job import Job
from autotune_amp.core.precisions import Precision
from autotune_amp.precision.rules import RULES, AutocastDevice, Rule, Severity

FORMAT = 1


class CodeLocation(NamedTuple):
    """Location of a finding: the qualified name of the module, "" outside all modules, and the source line.

    `file` and `line` are None if they are unknown.
    """

    module: str = ""
    file: str | None = None
    line: int | None = None

    @property
    def code(self) -> str:
        """Return the text of the line without indentation, "" if the source is unknown."""
        return "" if self.file is None or self.line is None else linecache.getline(self.file, self.line).strip()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Finding of a check: one place in the code that breaks or hurts under autocast.

    `rule` is the name of the rule, `precisions` are those in which the finding holds. `modules` are the qualified names
    of the modules in which the code ran, "" for code outside all modules. `line` counts from 1 in `file`, and `code` is
    its text; None and "" if the source is unknown. `why` is the reason, `mend` the fixed line or a sentence that says
    how to fix it, `source` the address of the documentation.
    """

    rule: str
    severity: Severity
    precisions: tuple[Precision, ...]
    modules: tuple[str, ...]
    file: str | None
    line: int | None
    code: str
    why: str
    mend: str
    source: str


class CheckReport(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="check"):
    """Report of a check: the findings under the autocast of a device of type `device`, those that break first.

    `num_calls` is the number of torch functions that the recorded step of `batch_size` samples called, `num_modules`
    that of the modules that ran. `files` are the user's files that were read, `unread` the classes and functions
    without source. `problem` is the error that ended the recording early although the step works unrecorded, or None.
    The step ran on a device of type `recorded_on`.
    """

    format: int = FORMAT
    workload: str
    device: AutocastDevice
    batch_size: int
    findings: tuple[Finding, ...]
    num_calls: int
    num_modules: int
    files: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    problem: str | None = None
    recorded_on: str = "cpu"
    notes: tuple[str, ...] = ()

    @property
    def will_break(self) -> bool:
        """Whether any finding has the severity "breaks"."""
        return any(finding.severity == "breaks" for finding in self.findings)

    def to_json(self) -> str:
        """Return the report as one JSON document."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()


class WorkloadCheckJob(Job[CheckReport], frozen=True, kw_only=True):
    """Job that records one fp32 step of a workload on the CPU and reads its source, for `autocast_device`'s autocast.

    `batch_size` is in samples, None for 2 (or up to 8 if the step fails with 2). Without `is_recorded` the step runs
    unrecorded, to show whether it is the step that crashes the process.
    """

    answer: ClassVar[Any] = CheckReport
    work: ClassVar[str] = "autotune_amp.diagnostics.check.child:check"
    command_work: ClassVar[str | None] = "autotune_amp.diagnostics.check.command_step:check_command"

    autocast_device: AutocastDevice
    batch_size: int | None = None
    seed: int = 0
    is_recorded: bool = True


def make_finding(
    rule: Rule,
    location: CodeLocation,
    severity: Severity | None = None,
    *,
    why: str | None = None,
    mend: str | None = None,
    precisions: tuple[Precision, ...] | None = None,
) -> Finding:
    """Return a finding of `rule` at a location; arguments other than None replace the values of the rule."""
    return Finding(
        rule=rule.name,
        severity=severity or rule.severity,
        precisions=precisions or rule.precisions,
        modules=(location.module,),
        file=location.file,
        line=location.line,
        code=location.code,
        why=why or rule.why,
        mend=mend or rule.fix,
        source=rule.source,
    )


def merged_and_sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the findings sorted: those that break first, then by rule, file and line.

    Findings of one rule with the same precisions and line (or modules, if the file is unknown) are merged into one,
    with the modules of all and the worst severity.
    """
    merged: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        file_and_line = finding.file, finding.line
        key = finding.rule, finding.precisions, *(file_and_line if finding.file is not None else finding.modules)
        earlier = merged.get(key, finding)
        modules = tuple(dict.fromkeys((*earlier.modules, *finding.modules)))
        severity: Severity = "breaks" if "breaks" in (earlier.severity, finding.severity) else "hurts"
        merged[key] = msgspec.structs.replace(earlier, modules=modules, severity=severity)
    names = [rule.name for rule in RULES]
    return tuple(
        sorted(
            merged.values(),
            key=lambda f: (f.severity != "breaks", names.index(f.rule), f.file or "", f.line or 0),
        )
    )
