"""Apply a recommendation to a training script as a diff, verified by running an edited copy before it is written."""

from __future__ import annotations

import difflib
import io
import os
import shlex
import shutil
import tokenize
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autotune_amp.command import measure
from autotune_amp.command.command import Command, RunRequest
from autotune_amp.command.editing.edit import CommandFacts, Edit, ManualChange, RunSetting, edit
from autotune_amp.command.messages import Site, Torch
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.ranks import RunEvents
from autotune_amp.command.run import missing_arguments
from autotune_amp.command.settable import raise_if_fp8
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import InvalidRequestError, StudyError, WorkloadError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.core.setting import Setting
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.program import temporary_folder

NUM_STEPS = 8  # least number of optimizer steps that are observed
_DEADLINES = Deadlines(whole_seconds=3600.0, first_step_seconds=900.0, step_seconds=300.0)


class ApplyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of applying a recommendation: a `diff` with paths relative to the working directory, the new `command` if
    it changes, and the changes left to the user (`by_hand`).

    `verified` says whether an edited copy ran as `expected`, None if nothing was edited; `observed` is the copy's
    setting, `problem` the reason if it is not verified. `written` names the changed files; `left` are notes on files
    that the two runs created.
    """

    format: int = 1
    diff: str
    command: tuple[str, ...] | None
    by_hand: tuple[ManualChange, ...]
    today: RunSetting
    expected: RunSetting
    observed: RunSetting | None = None
    verified: bool | None = None
    problem: str | None = None
    written: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """Return the lines to show with the diff: whether it is verified, and what is left to do."""
        lines = []
        if self.verified:
            changes = "; ".join(_differences(self.expected, self.today, "{name} {first} (today {second})"))
            lines.append(f"Verified: {NUM_STEPS} steps of an edited copy ran with {changes or 'the command below'}.")
        elif self.verified is False:
            lines.append(f"Not verified: {self.problem}.")
        elif not self.by_hand:
            lines.append("Nothing to change: the command already uses the recommended values.")
        lines += [f"By hand: {each.where}: {each.what}" for each in self.by_hand]
        if self.command is not None and self.verified:
            lines.append(f"Run it as: {shlex.join(self.command)}")
        lines += [f"Written: {path}" for path in self.written]
        if self.verified and self.diff and not self.written:
            lines.append("Nothing is written yet. To write the edits, add --write.")
        return [*lines, *self.left]


class _Source(NamedTuple):
    """Content and encoding of a source file when it was read."""

    content: bytes
    encoding: str

    @property
    def text(self) -> str:
        return self.content.decode(self.encoding)


def apply(
    recommended: Recommendation, line: CommandTemplate, *, study: Path, write: bool, phase: Callable[[str], Any]
) -> ApplyReport:
    """Run the command to observe its setting, edit a copy of its files as recommended, and run the copy.

    Files that the command creates in both runs are moved to the folder `study`, like those of trials. With `write` the
    edits are written to the files if the copy ran with the recommended values. `phase` is called with a text at the
    start of each phase.

    Raises `WorkloadError` if the steps cannot be observed, or with `write` if the copy did not run as expected;
    `InvalidRequestError` if the command has placeholders for a setting, or if fp8 is recommended.
    """
    raise_if_fp8(recommended.config.precision)
    placeholders = sorted(line.placeholders.keys() & Setting.__struct_fields__ - line.argument_values.keys())
    if placeholders:
        raise InvalidRequestError(
            f"The command has {', '.join(f'{{{name}}}' for name in placeholders)}: `apply` needs one without them.",
            "Run the command that `autotune-amp show` prints, or replace the placeholders by today's values.",
        )
    phase("Running the command to observe today's values")
    command = Command(line)
    command.keep_in(study)
    if recommended.workload is not None:
        command.sample_dim = recommended.workload.sample_dim
    observed_run = _observe_run(command)
    if isinstance(observed_run, Failure):
        details = [observed_run.details.rstrip()] if observed_run.details else []
        raise WorkloadError(
            "\n".join([f"The command cannot be observed: {observed_run.message}.", *details, *command.leftovers()]),
            "Fix the error, or give a command that takes more steps.",
        )
    workload, world = recommended.workload, observed_run[1].world
    has_own_weights = workload is not None and workload.weights != "fp32"
    num_sharing = workload.num_sharing if workload is not None and workload.num_ranks == world else 1
    setting_of_rank = partial(_setting_of_rank, has_own_weights=has_own_weights, num_sharing=num_sharing)
    template = recommended.command_template
    keeps_total = template is not None and template.keeps_effective_batch_size
    facts = msgspec.structs.replace(
        _facts_of_run(*observed_run, setting_of_rank), keeps_effective_batch_size=keeps_total, num_sharing=num_sharing
    )
    sources = _read_sources(
        {line.rpartition(":")[0] for line in (facts.step_line, *(s.line for s in facts.sites if not s.maker))}
    )
    words = line.filled(dict(recommended.config.arguments), "")[0] if line.argument_values else line.arguments
    edited = edit({path: source.text for path, source in sources.items()}, facts, recommended.config, words)
    missing = missing_arguments(line.arguments, recommended, study)
    report = ApplyReport(
        diff="".join(_diff(path, sources[path].text, text) for path, text in edited.texts.items()),
        command=None if edited.command == line.arguments else CommandTemplate.of(edited.command).filled({}, "")[0],
        by_hand=(
            *(msgspec.structs.replace(each, where=_relative_path(each.where)) for each in edited.by_hand),
            *(
                ManualChange(where="the command", what=f"set {name.lstrip('!')} to {value}")
                for name, (value, _) in missing.items()
                if name not in line.argument_values
            ),
        ),
        today=facts.today,
        expected=edited.expected,
    )
    if report.diff or report.command:
        phase("Running an edited copy")
        command.line = msgspec.structs.replace(line, arguments=edited.command)
        report = _verify_copy(report, command, edited, sources, setting_of_rank)
    report = msgspec.structs.replace(report, left=command.leftovers())
    if write and report.diff:
        if not report.verified:
            problem = f"Nothing is written, since the edited copy does not do what the diff says: {report.problem}."
            raise WorkloadError(
                "\n".join([problem, *report.left]),
                "See the diff without --write, and change the script by hand.",
            )
        _write(edited.texts, sources)
        report = msgspec.structs.replace(report, written=tuple(map(_relative_path, edited.texts)))
    return report


def _observe_run(command: Command, overlay: Mapping[str, str] | None = None) -> tuple[RunEvents, Rank] | Failure:
    """Run `NUM_STEPS` steps of the command, with edited copies in `overlay` (see `agent.overlay`); return the events of
    the run and its slowest rank, or the failure.
    """
    setting = Setting(**{"precision": "fp32", "batch_size": 1, **command.line.today_values})
    completed = command.run(
        RunRequest.of(setting, sites=True, overlay=dict(overlay or {})),
        _DEADLINES,
        lambda events: events.num_steps >= NUM_STEPS and measure.slowest_rank(events) is not None,
        Watcher(),
    )
    if isinstance(completed.verdict, Failure):
        return completed.verdict
    slowest = measure.slowest_rank(completed.events)
    if slowest is None:
        return Failure(
            kind="workload_error", message=f"it ended after {completed.events.num_steps} steps, too few to observe"
        )
    return completed.events, slowest[0]


def _setting_of_rank(rank: Rank, *, has_own_weights: bool, num_sharing: int) -> RunSetting:
    """Return the setting that a run used. `has_own_weights`: the script loads its weights in a lower precision, so that
    their dtype does not show the precision. `num_sharing` ranks divide a batch among them.
    """
    loader, per_step = measure.training_loader(rank), measure.samples_per_step(rank) or 1.0
    batch_size = measure.batch_size(rank)
    return RunSetting(
        precision=measure.todays_precision(rank) if has_own_weights else measure.precision_of(rank) or "fp32",
        batch_size=batch_size * num_sharing,
        accumulation_steps=max(1, round(per_step / batch_size)),
        num_workers=None if loader is None else loader.num_workers,
    )


def _facts_of_run(events: RunEvents, rank: Rank, setting_of_rank: Callable[[Rank], RunSetting]) -> CommandFacts:
    pythons = events.of(Torch)
    # A forked rank sends no `Torch` message: it has the arguments of the first process.
    python = next((each for each in pythons if each.pid == rank.pid), pythons[0])
    optimizer = next(iter(rank.optimizers.values()))

    def absolute(line: str) -> str:
        path, _, number = line.rpartition(":")
        return f"{Path(python.folder, path).resolve()}:{number}" if path else line

    sites = _sites_of_training([site for site in events.of(Site) if site.pid == rank.pid], rank.training_loaders)
    return CommandFacts(
        today=setting_of_rank(rank),
        sites=tuple(msgspec.structs.replace(site, line=absolute(site.line)) for site in sites),
        device=optimizer.devices[0].partition(":")[0],
        step_line=absolute(optimizer.line),
        arguments=python.arguments[1:],
    )


def _sites_of_training(sites: list[Site], training: frozenset[str]) -> list[Site]:
    """Return the sites without those of loaders that are not used in training.

    If a library created the training loader, return the user's loaders of the same dataset instead.
    """
    others = [site for site in sites if site.loader is None]
    loaders = [site for site in sites if site.loader is not None]
    training_sites = [site for site in loaders if site.loader in training]
    datasets = {site.dataset for site in training_sites}
    same_data = [site for site in loaders if site.dataset in datasets and not site.maker]
    kept_sites = [site for site in training_sites if not site.maker] or same_data or training_sites
    return [*others, *{(site.line, site.end): site for site in kept_sites}.values()]


def _read_sources(paths: Iterable[str]) -> dict[str, _Source]:
    """Return the sources by path; files that are not readable or not valid Python are left out."""
    sources = {}
    for path in sorted(paths):
        with suppress(OSError, SyntaxError, UnicodeDecodeError):
            content = Path(path).read_bytes()
            source = _Source(content, tokenize.detect_encoding(io.BytesIO(content).readline)[0])
            compile(source.text, path, "exec", dont_inherit=True)
            sources[path] = source
    return sources


def _verify_copy(
    report: ApplyReport,
    command: Command,
    edited: Edit,
    sources: Mapping[str, _Source],
    setting_of_rank: Callable[[Rank], RunSetting],
) -> ApplyReport:
    """Run the new command with the edited copies in place of the files; return `report` with the result."""
    with temporary_folder() as folder:
        overlay = {}
        for number, (path, text) in enumerate(edited.texts.items()):
            overlay[path] = str(folder / f"{number}.py")
            Path(overlay[path]).write_bytes(text.encode(sources[path].encoding))
        observed_run = _observe_run(command, overlay)
    if isinstance(observed_run, Failure):
        return msgspec.structs.replace(
            report, verified=False, problem=f"the edited copy failed: {observed_run.message.rstrip('.')}"
        )
    observed, expected = setting_of_rank(observed_run[1]), edited.expected
    problem = "; ".join(_differences(observed, expected, "the copy ran with {name} {first}, not {second}"))
    return msgspec.structs.replace(report, observed=observed, verified=not problem, problem=problem or None)


def _differences(first: RunSetting, second: RunSetting, template: str) -> list[str]:
    return [
        template.format(name=name.replace("_", " "), first=getattr(first, name), second=getattr(second, name))
        for name in RunSetting.__struct_fields__
        if getattr(first, name) != getattr(second, name)
    ]


def _relative_path(where: str) -> str:
    """Return an absolute path relative to the working directory; other text unchanged."""
    return os.path.relpath(where) if Path(where).is_absolute() else where


def _diff(path: str, before: str, after: str) -> str:
    """Return a unified diff in the format of `patch -p1` and `git apply`."""
    name = _relative_path(path)
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    return io.StringIO(text, newline="\n").readlines()


def _write(texts: Mapping[str, str], sources: Mapping[str, _Source]) -> None:
    """Replace each file atomically, keeping its mode.

    Raises `InvalidRequestError`, before any file is written, if one was changed since it was read, and `StudyError` if
    writing fails.
    """
    for path in texts:
        if Path(path).read_bytes() != sources[path].content:
            raise InvalidRequestError(
                f"{_relative_path(path)} was changed while the edited copy ran.", "Run the same command again."
            )
    for path, text in texts.items():
        temporary = Path(path).with_name(f".{Path(path).name}.{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(text.encode(sources[path].encoding))
            shutil.copymode(path, temporary)
            temporary.replace(path)
        except OSError as error:
            raise StudyError(
                f"{_relative_path(path)} cannot be written: {error.strerror}.",
                "Run it without --write, and apply the diff.",
            ) from error
        finally:
            with suppress(OSError):  # it was renamed, or could not be created
                temporary.unlink()
