"""Start the real training with a recommendation: the command replaces this process, and the agent sets the values that
the command does not contain.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from autotune_amp.command.running import INJECTED
from autotune_amp.command.settable import left_to_script, raise_if_fp8
from autotune_amp.command.startable import with_agent_on_path
from autotune_amp.core.command_template import TRIAL_PLACEHOLDERS, CommandTemplate
from autotune_amp.core.errors import InvalidRequestError, StudyError, WorkloadError
from autotune_amp.core.recommendation import Recommendation, write_atomically
from autotune_amp.core.setting import Setting

_ANY_TEXT = "\0"  # in place of a value that differs from trial to trial


class CommandStart(NamedTuple):
    """Arguments of the command to start, the values `outside` that the agent sets, its settings `files` to write, text
    by path, and the labels of the recommended values that are `left_out`, to the script.
    """

    arguments: tuple[str, ...]
    outside: dict[str, Any]
    files: dict[str, str]
    left_out: tuple[str, ...] = ()


def start(command: Sequence[str], path: Path) -> NoReturn:
    """Replace this process by the command, with the recommendation at `path`. Signals and exit code are the command's.

    On Windows, where `exec` starts a new process, this process ends. Raises `WorkloadError` if the command cannot be
    started, and `StudyError` if a settings file cannot be written.
    """
    recommendation = Recommendation.load(path)
    started = command_to_start(command, recommendation, path)
    arguments = started.arguments
    for file, text in started.files.items():
        _write_if_changed(Path(file), text)
    variables = environment(started, recommendation, path, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(arguments[0], arguments, variables)  # noqa: S606 - the user's own command
    except OSError as error:
        raise WorkloadError(
            f"{arguments[0]!r} cannot be started: {error}.", "Give the command as it is typed at the prompt."
        ) from error


def _write_if_changed(path: Path, text: str) -> None:
    """Write a filled settings file, unless it has this text already: the study's folder may be read-only."""
    with suppress(OSError):
        if path.read_text(encoding="utf-8", errors="backslashreplace") == text:
            return
    try:
        write_atomically(path, text)
    except StudyError as error:
        raise StudyError(error.message, "Copy the study to a folder that can be written, and name that one.") from error


def command_to_start(command: Sequence[str], recommendation: Recommendation, path: Path) -> CommandStart:
    """Return the command with its placeholders filled and the agent in each PYTHONPATH that it sets, its filled
    settings files, and the agent's values: those recommended that the command does not contain.

    Raises `InvalidRequestError` if a placeholder such as `{trial_dir}` is left, which exists only in trials, if the
    command lacks a recommended argument of its own, or if a command that was searched had to be set to fp8, and
    `WorkloadError` if a shell script replaces PYTHONPATH.
    """
    config, workload = recommendation.config, recommendation.workload
    searched = recommendation.command_template
    template = CommandTemplate.of(
        command,
        values=searched.values if searched else {},
        files=searched.files_named_by(command) if searched else (),
    )
    arguments, files = template.of_setting(config, str(path.parent))
    unfilled = [
        name for name, each in template.placeholders.items() if name in TRIAL_PLACEHOLDERS and each.today is None
    ]
    if unfilled:
        raise InvalidRequestError(
            f"The command has {{{unfilled[0]}}}, which no recommendation fills.",
            f"Write a value in place of {{{unfilled[0]}}}.",
        )
    for name, (value, text) in missing_arguments(command, recommendation, path.parent).items():
        if name not in template.placeholders:
            raise InvalidRequestError(
                f"The recommendation has {name.lstrip('!')}={value}, which this command does not contain.",
                (f"Write {text!r} where the command takes it" if text else "Remove the words of its other values")
                + ", or write the placeholder of the search.",
            )
    names_in_command = template.placeholders.keys() | contained_names(command, recommendation, path.parent)
    if searched and searched.keeps_effective_batch_size:
        names_in_command |= {"accumulation_steps"}
    today = workload.today if workload else Setting(precision="fp32", batch_size=1)
    outside = {
        name: getattr(config, name)
        for name in ("precision", "batch_size", "accumulation_steps")
        # If the searched command had a placeholder that this command lacks, the script's own value is unknown: set it.
        if name not in names_in_command
        and (getattr(config, name) != getattr(today, name) or (searched and name in searched.placeholders))
    }
    by_script = left_to_script(config, names_in_command)
    if searched is None and outside.get("precision") == "fp8":  # of a workload, whose lines the script may have
        del outside["precision"]
        by_script = ["precision", *by_script]
    raise_if_fp8(outside.get("precision"))
    if "batch_size" in outside and workload:
        outside["batch_size"] = max(1, config.batch_size // workload.num_sharing)  # the agent sets that of each rank
        if workload.loader:
            outside["maker"] = workload.loader
    left_out = tuple(config.labelled([name]).removeprefix("with ") for name in by_script)
    return CommandStart(with_agent_on_path(arguments, INJECTED, files), outside, files, left_out)


def missing_arguments(
    command: Sequence[str], recommendation: Recommendation, folder: Path
) -> dict[str, tuple[str, str]]:
    """Return the recommended values of the user's own arguments that a command does not contain, each with the words
    that stand for it, by the name of the argument. `folder` is that of the study.
    """
    searched, missing = recommendation.command_template, {}
    placeholders = searched.placeholders if searched else {}
    contained = contained_names(command, recommendation, folder)
    for name, value in recommendation.config.arguments:
        choices = placeholders[name].choices if name in placeholders else None
        text = choices[value] if choices else value
        if text:
            is_there = _is_in_text(command, text)
        else:  # a settings file is not looked into
            others = filter(None, choices.values() if choices else ())
            is_argument = searched is not None and any(f"{{{name}" in argument for argument in searched.arguments)
            is_there = is_argument and not any(_is_in_text(command, other) for other in others)
        if name not in contained and not is_there:
            missing[name] = value, text
    return missing


def contained_names(command: Sequence[str], recommendation: Recommendation, folder: Path) -> frozenset[str]:
    """Return the names of the placeholders of the searched command in whose places a command has the recommended
    values: after the same option, or in the filled copy of a settings file in the study's `folder`. Positional values
    follow the same word, or are at the same position.

    A value without words of its own is there if those of the other values are not.
    """
    searched = recommendation.command_template
    if searched is None:
        return frozenset()
    present, missing, position = set[str](), set[str](), 0
    previous, is_previous_fixed = "", True
    for argument in searched.arguments:
        files = {file: searched.files[file] for file in searched.files_named_by([argument])}
        part = msgspec.structs.replace(searched, arguments=(argument,), files=files)
        words, _ = part.of_setting(recommendation.config, str(folder), **dict.fromkeys(TRIAL_PLACEHOLDERS, _ANY_TEXT))
        if words:
            is_option = previous.startswith("-")
            names_itself = bool(files) or "=" in words[0] or not is_previous_fixed
            is_there = _contains(command, words, after=previous if is_option or not names_itself else "")
            if not is_option:
                is_there = is_there or _contains(command[position : position + len(words)], words)
            position, previous, is_previous_fixed = position + len(words), words[-1], not part.placeholders
        else:
            others = [
                shlex.split(text) for each in part.placeholders.values() for text in (each.choices or {}).values()
            ]
            is_there = not any(_contains(command, other) for other in others if other)
        (present if is_there else missing).update(part.placeholders)
    return frozenset(present - missing)


def _contains(command: Sequence[str], words: Sequence[str], *, after: str = "") -> bool:
    """Return whether a command has these words as successive arguments; a value only `after` this word, if given. Of an
    option its value may be apart, or follow as in ``--option=value``.
    """
    is_value = after and not words[0].startswith("-")
    texts = [word.split(_ANY_TEXT) for word in _apart([after, *words] if is_value else words)]
    patterns = [re.compile(".*".join(map(re.escape, parts)), re.DOTALL) for parts in texts]
    given = _apart(command)
    return any(
        all(pattern.fullmatch(word) for pattern, word in zip(patterns, given[first:], strict=False))
        for first in range(len(given) - len(patterns) + 1)
    )


def _is_in_text(command: Sequence[str], text: str) -> bool:
    """Return whether a command has the words of `text` in succession, also inside of an argument, as of ``bash -c``, or
    after any ``=``.
    """
    words, wanted = (
        [part for word in each.split() for part in word.split("=", 1)] for each in (" ".join(command), text)
    )
    is_inside = any(words[first : first + len(wanted)] == wanted for first in range(len(words)))
    return is_inside or _contains(command, shlex.split(text))


def _apart(words: Sequence[str]) -> list[str]:
    """Return words of a command with each ``--option=value`` as two."""
    return [part for word in words for part in (word.split("=", 1) if word.startswith("-") else [word])]


def environment(
    started: CommandStart, recommendation: Recommendation, path: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables for the command: inherited, recommended, and those that load the agent."""
    agent = {
        "outside": started.outside,
        "left_out": started.left_out,
        "controller": {"path": str(path.resolve()), "device": recommendation.hardware.identity.type},
    }
    return {
        **inherited,
        **recommendation.config.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), inherited.get("PYTHONPATH")])),
        "AUTOTUNE_AMP_AGENT": json.dumps(agent),
    }
