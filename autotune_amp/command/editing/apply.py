"""Recommendation as a diff of a training script, which is verified by running a copy before anything is written."""

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
from autotune_amp.command.command import Command
from autotune_amp.command.editing.edit import ByHand, CommandFacts, Edit, Observed, edit
from autotune_amp.command.messages import Site, Torch
from autotune_amp.command.rank_steps import Rank
from autotune_amp.command.ranks import RunEvents
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.errors import InvalidRequestError, StudyError, WorkloadError
from autotune_amp.core.job import Deadlines
from autotune_amp.core.outcome import Failure
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.core.setting import Setting
from autotune_amp.processes.process import Watcher
from autotune_amp.processes.program import temporary_folder

NUM_STEPS = 8
_PATIENCE = Deadlines(first_step_seconds=900.0, step_seconds=300.0)


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """Result of applying a recommendation: a `diff` with paths below the working directory, the `command` to run from
    now on if it changes, and the changes left to do by hand.

    `verified` says whether an edited copy ran as `expected`, None if nothing was edited; `observed` is the copy's
    setting, `problem` the reason why it is not verified. `written` names the files that were changed; `left` are notes
    on the files that the two runs made.
    """

    format: int = 1
    diff: str
    command: tuple[str, ...] | None
    by_hand: tuple[ByHand, ...]
    today: Observed
    expected: Observed
    observed: Observed | None = None
    verified: bool | None = None
    problem: str | None = None
    written: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        """Return the notes to show beside the diff, one line each."""
        lines = []
        if self.verified:
            changes = "; ".join(_differences(self.expected, self.today, "{name} {ours} (today {theirs})"))
            lines.append(f"Verified: {NUM_STEPS} steps of an edited copy ran with {changes}.")
        elif self.verified is False:
            lines.append(f"Not verified: {self.problem}.")
        elif not self.by_hand:
            lines.append("Nothing to change: the command does all of it already.")
        lines += [f"By hand: {each.where}: {each.what}" for each in self.by_hand]
        if self.command is not None and self.verified:
            lines.append(f"Run it as: {shlex.join(self.command)}")
        lines += [f"Written: {path}" for path in self.written]
        if self.verified and self.diff and not self.written:
            lines.append("Nothing is written yet: --write does that.")
        return [*lines, *self.left]


class _Source(NamedTuple):
    """Content and encoding of a file as it was read."""

    content: bytes
    encoding: str

    @property
    def text(self) -> str:
        return self.content.decode(self.encoding)


def apply(
    recommended: Recommendation, line: CommandTemplate, *, study: Path, write: bool, phase: Callable[[str], Any]
) -> Applied:
    """Run the command to see what it does, edit a copy of its files to follow the recommendation, and run that.

    Files that the command makes in both runs are moved to the folder `study`, like those of a search's trials. With
    `write` the edits are written if the copy ran as they say; else `WorkloadError` is raised, and nothing is changed.
    `phase` is called with a text at the start of each phase. Raises `WorkloadError` too if the steps of the command
    cannot be observed, and `InvalidRequestError` if it has placeholders for a setting.
    """
    decided = sorted(line.placeholders.keys() & Setting.__struct_fields__)
    if decided:
        raise InvalidRequestError(
            f"The command has {', '.join(f'{{{name}}}' for name in decided)}: a setting is the command, filled.",
            "Run the command that `autotune-amp show` prints, or give the command without them.",
        )
    phase("Running the command, to see what it does today")
    command = Command(line)
    command.keep_in(study)
    if recommended.workload is not None:
        command.sample_dim = recommended.workload.sample_dim
    observed = _observed(command)
    if isinstance(observed, Failure):
        details = f"\n{observed.details.rstrip()}" if observed.details else ""
        for text in command.leftovers():
            phase(text)
        raise WorkloadError(
            f"The command cannot be observed: {observed.message}.{details}",
            "Fix that, or give a command that takes more steps.",
        )
    has_own_weights = recommended.workload is not None and recommended.workload.weights != "fp32"
    behaviour = partial(_behaviour, has_own_weights=has_own_weights)
    searched = recommended.command_template
    keeps = searched is not None and searched.keeps_effective_batch_size
    seen = msgspec.structs.replace(_seen(*observed, behaviour), keeps_effective_batch_size=keeps)
    sources = _read(
        {line.rpartition(":")[0] for line in (seen.step_line, *(s.line for s in seen.sites if not s.maker))}
    )
    edited = edit({path: source.text for path, source in sources.items()}, seen, recommended.config, line.arguments)
    applied = Applied(
        diff="".join(_diff(path, sources[path].text, text) for path, text in edited.texts.items()),
        command=None if edited.command == line.arguments else CommandTemplate.of(edited.command).filled({}, "")[0],
        by_hand=tuple(msgspec.structs.replace(each, where=_shown(each.where)) for each in edited.by_hand),
        today=seen.today,
        expected=edited.expected,
    )
    if applied.diff or applied.command:
        phase("Running an edited copy")
        command.line = msgspec.structs.replace(line, arguments=edited.command)
        applied = _verified(applied, command, edited, sources, behaviour)
    applied = msgspec.structs.replace(applied, left=command.leftovers())
    if write and applied.diff:
        if not applied.verified:
            for text in applied.left:
                phase(text)
            raise WorkloadError(
                f"Nothing is written, since the edited copy does not do what the diff says: {applied.problem}.",
                "See the diff without --write, and change the script by hand.",
            )
        _write(edited.texts, sources)
        applied = msgspec.structs.replace(applied, written=tuple(map(_shown, edited.texts)))
    return applied


def _observed(command: Command, overlay: Mapping[str, str] | None = None) -> tuple[RunEvents, Rank] | Failure:
    """Run a few steps of the command; return its messages and its slowest rank, or the failure."""
    ran = command.run(
        Setting(**{"precision": "fp32", "batch_size": 1, **command.line.today_values}),
        _PATIENCE,
        lambda events: events.num_steps >= NUM_STEPS and measure.slowest_rank(events) is not None,
        Watcher(),
        sites=True,
        overlay=dict(overlay or {}),
    )
    if isinstance(ran.verdict, Failure):
        return ran.verdict
    found = measure.slowest_rank(ran.events)
    if found is None:
        return Failure(kind="workload_error", message=f"it ended after {ran.events.num_steps} steps, too few to see")
    return ran.events, found[0]


def _behaviour(rank: Rank, *, has_own_weights: bool) -> Observed:
    """Return the setting that a run used. `has_own_weights`: the dtype of its weights is that which they are loaded in,
    not a result of the precision.
    """
    loader, per_step = measure.training_loader(rank), measure.samples_per_step(rank) or 1.0
    batch_size = measure.batch_size(rank)
    return Observed(
        precision=measure.todays_precision(rank) if has_own_weights else measure.precision_of(rank) or "fp32",
        batch_size=batch_size,
        accumulation_steps=max(1, round(per_step / batch_size)),
        num_workers=None if loader is None else loader.num_workers,
    )


def _seen(events: RunEvents, rank: Rank, behaviour: Callable[[Rank], Observed]) -> CommandFacts:
    pythons = events.of(Torch)
    python = next((each for each in pythons if each.pid == rank.pid), pythons[0])  # the rank may be a fork of the first
    optimizer = next(iter(rank.optimizers.values()))

    def absolute(line: str) -> str:
        path, _, number = line.rpartition(":")
        return f"{Path(python.folder, path).resolve()}:{number}" if path else line

    sites = _of_training([site for site in events.of(Site) if site.pid == rank.pid], rank.training_loaders)
    return CommandFacts(
        today=behaviour(rank),
        sites=tuple(msgspec.structs.replace(site, line=absolute(site.line)) for site in sites),
        device=optimizer.devices[0].partition(":")[0],
        step_line=absolute(optimizer.line),
        arguments=python.arguments[1:],
    )


def _of_training(sites: list[Site], training: frozenset[str]) -> list[Site]:
    """Return the sites without those of loaders that training does not fetch from.

    If a library made the loader that training uses, the sites are those of the user's loaders over the same data.
    """
    others = [site for site in sites if site.loader is None]
    loaders = [site for site in sites if site.loader is not None]
    own = [site for site in loaders if site.loader in training]
    datasets = {site.dataset for site in own}
    same = [site for site in loaders if site.dataset in datasets and not site.maker]
    found = [site for site in own if not site.maker] or same or own
    return [*others, *{(site.line, site.end): site for site in found}.values()]


def _read(paths: Iterable[str]) -> dict[str, _Source]:
    """Return the files that can be edited: those that are valid Python."""
    found = {}
    for path in sorted(paths):
        with suppress(OSError, SyntaxError, UnicodeDecodeError):
            content = Path(path).read_bytes()
            source = _Source(content, tokenize.detect_encoding(io.BytesIO(content).readline)[0])
            compile(source.text, path, "exec", dont_inherit=True)
            found[path] = source
    return found


def _verified(
    applied: Applied,
    command: Command,
    edited: Edit,
    sources: Mapping[str, _Source],
    behaviour: Callable[[Rank], Observed],
) -> Applied:
    """Run the new command with the edited copies in place of the files; return `applied` with the outcome."""
    with temporary_folder() as folder:
        overlay = {}
        for number, (path, text) in enumerate(edited.texts.items()):
            overlay[path] = str(folder / f"{number}.py")
            Path(overlay[path]).write_bytes(text.encode(sources[path].encoding))
        found = _observed(command, overlay)
    if isinstance(found, Failure):
        return msgspec.structs.replace(applied, verified=False, problem=f"of the copy, {found.message.rstrip('.')}")
    observed, expected = behaviour(found[1]), edited.expected
    problem = "; ".join(_differences(observed, expected, "the copy ran with {name} {ours}, not {theirs}"))
    return msgspec.structs.replace(applied, observed=observed, verified=not problem, problem=problem or None)


def _differences(ours: Observed, theirs: Observed, words: str) -> list[str]:
    return [
        words.format(name=name.replace("_", " "), ours=getattr(ours, name), theirs=getattr(theirs, name))
        for name in Observed.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]


def _shown(where: str) -> str:
    """Return an absolute path relative to the working directory; other text as it is."""
    return os.path.relpath(where) if Path(where).is_absolute() else where


def _diff(path: str, before: str, after: str) -> str:
    """Return a unified diff in the format of `patch -p1` and `git apply`."""
    name = _shown(path)
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
            raise InvalidRequestError(f"{_shown(path)} was changed meanwhile.", "Run the same command again.")
    for path, text in texts.items():
        temporary = Path(path).with_name(f".{Path(path).name}.{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(text.encode(sources[path].encoding))
            shutil.copymode(path, temporary)
            temporary.replace(path)
        except OSError as error:
            raise StudyError(
                f"{_shown(path)} cannot be written: {error.strerror}.",
                "Run it without --write, and apply the diff.",
            ) from error
        finally:
            with suppress(OSError):  # the file was moved, or could not be made
                temporary.unlink()
