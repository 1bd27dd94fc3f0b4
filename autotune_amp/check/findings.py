"""Findings of a check, the report that they make, and the job that finds them. Plain data, no torch."""

from __future__ import annotations

import linecache
from typing import Any, ClassVar, NamedTuple

import msgspec

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.job import Job
from autotune_amp.precision.rules import RULES, AutocastDevice, Rule, Severity

FORMAT = 1


class Place(NamedTuple):
    """Where something was found: in which module, "" outside of all, and in which line of which file, if known."""

    module: str = ""
    file: str | None = None
    line: int | None = None

    @property
    def code(self) -> str:
        """The text of the line."""
        return "" if self.file is None or self.line is None else linecache.getline(self.file, self.line).strip()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One place that breaks or hurts under autocast.

    `rule` is the name of the rule, `precisions` are those in which it holds. `modules` are the qualified names of the
    modules that it was seen in, "" being what is outside of every module. `line` counts from 1 in `file`, whose text
    there is `code`; None and "" where the source is not known. `mend` is the line, or the sentence, that mends it.
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
    """What a check found of a workload under the autocast of a device of type `device`, what breaks first.

    `num_calls` is how many torch functions the recorded step of `batch_size` samples called, `num_modules` the modules
    that ran. `files` are the user's own that were read, `unread` the classes and functions that have no source.
    `problem` is why the recording ended early where the step alone does not, None where it did not.
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

    @property
    def will_break(self) -> bool:
        """Whether any finding does."""
        return any(finding.severity == "breaks" for finding in self.findings)

    def to_json(self) -> str:
        """As one JSON document."""
        return msgspec.json.format(msgspec.json.encode(self)).decode()


class Look(Job[CheckReport], frozen=True, kw_only=True):
    """Record one fp32 step of the workload on the CPU and read its source, for the autocast of `autocast_device`.

    Where it is not `is_recorded`, the step is only taken, which shows whether it ends its process by itself.
    """

    answer: ClassVar[Any] = CheckReport
    work: ClassVar[str] = "autotune_amp.check.child:look"

    autocast_device: AutocastDevice
    batch_size: int | None = None
    seed: int = 0
    is_recorded: bool = True


def found(
    rule: Rule,
    place: Place,
    severity: Severity | None = None,
    *,
    why: str | None = None,
    mend: str | None = None,
    precisions: tuple[Precision, ...] | None = None,
) -> Finding:
    """A finding of `rule` at a place, with what is special to it in place of what the rule says."""
    return Finding(
        rule=rule.name,
        severity=severity or rule.severity,
        precisions=precisions or rule.precisions,
        modules=(place.module,),
        file=place.file,
        line=place.line,
        code=place.code,
        why=why or rule.why,
        mend=mend or rule.mend,
        source=rule.source,
    )


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """What breaks first, then by rule and place; one finding for each place, with all modules that it was seen in."""
    merged: dict[tuple[Any, ...], Finding] = {}
    for finding in findings:
        place = finding.file, finding.line
        key = finding.rule, finding.precisions, *(place if finding.file is not None else finding.modules)
        known = merged.get(key, finding)
        modules = tuple(dict.fromkeys((*known.modules, *finding.modules)))
        severity: Severity = "breaks" if "breaks" in (known.severity, finding.severity) else "hurts"
        merged[key] = msgspec.structs.replace(known, modules=modules, severity=severity)
    names = [rule.name for rule in RULES]
    return tuple(
        sorted(
            merged.values(),
            key=lambda f: (f.severity != "breaks", names.index(f.rule), f.file or "", f.line or 0),
        )
    )
