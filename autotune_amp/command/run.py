"""Start the real training with a recommendation: the command replaces this process, and the agent sets the values that
the command does not contain.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autotune_amp.command.running import INJECTED
from autotune_amp.command.startable import with_agent_on_path
from autotune_amp.core.command_template import TRIAL_PLACEHOLDERS, CommandTemplate
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.core.setting import Setting


def start(command: Sequence[str], path: Path) -> NoReturn:
    """Replace this process by the command, with the recommendation at `path`. Signals and exit code are the command's.

    On Windows, where `exec` starts a new process, this process ends. Raises `WorkloadError` if the command cannot be
    started.
    """
    recommendation = Recommendation.load(path)
    arguments, outside = command_to_start(command, recommendation, path)
    variables = environment(outside, recommendation, path, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(arguments[0], arguments, variables)  # noqa: S606 - the user's own command
    except OSError as error:
        raise WorkloadError(
            f"{arguments[0]!r} cannot be started: {error}.", "Give the command as it is typed at the prompt."
        ) from error


def _contains(arguments: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether a command has these words as successive arguments, or one word as in ``--option=WORD``."""
    successive = (list(arguments[first : first + len(words)]) for first in range(len(arguments)))
    is_value = len(words) == 1 and any(argument.endswith(f"={words[0]}") for argument in arguments)
    return bool(words) and (is_value or list(words) in successive)


def command_to_start(
    command: Sequence[str], recommendation: Recommendation, path: Path
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the command with its placeholders filled and the agent in each PYTHONPATH that it sets, and the agent's
    values: those recommended that the command does not contain.

    Raises `InvalidRequestError` if a placeholder such as `{trial_dir}` is left, which exists only in trials, or if the
    command lacks a recommended argument of its own, and `WorkloadError` if a shell script replaces PYTHONPATH.
    """
    config, workload = recommendation.config, recommendation.workload
    searched = recommendation.command_template
    searched_files = searched.files if searched else {}
    searched_arguments = None if searched is None else searched.of_setting(config, str(path.parent))[0]
    is_filled = tuple(command) == searched_arguments  # as the recommendation prints it
    files: list[str] = []
    for file, _ in [] if is_filled else searched_files.items():  # a file is named by the command or by an earlier one
        if any(file in text for text in (*command, *(searched_files[each] for each in files))):
            files.append(file)
    template = CommandTemplate.of(command, values=searched.values if searched else {}, files=files)
    arguments, _ = template.of_setting(config, str(path.parent))
    unfilled = [
        name for name, each in template.placeholders.items() if name in TRIAL_PLACEHOLDERS and each.today is None
    ]
    if unfilled:
        raise InvalidRequestError(
            f"The command has {{{unfilled[0]}}}, which no recommendation fills.",
            f"Write a value in place of {{{unfilled[0]}}}.",
        )
    for name, value in () if is_filled else config.arguments:
        choices = searched.placeholders[name].choices if searched and name in searched.placeholders else None
        texts = choices or {value: value}
        text = texts[value]
        words = shlex.split(text)
        others = [shlex.split(other) for other in texts.values() if other != text]
        # Without words of its own, the value shows by the absence of those of the others.
        is_there = _contains(arguments, words) if words else not any(_contains(arguments, other) for other in others)
        if name not in template.placeholders and not is_there:
            raise InvalidRequestError(
                f"The recommendation has {name.lstrip('!')}={value}, which this command does not contain.",
                (f"Write {text!r} where the command takes it" if text else "Remove the words of its other values")
                + ", or write the placeholder of the search.",
            )
    names_in_command = {
        *template.placeholders,
        *(searched.filled_names if searched and arguments == searched_arguments else ()),
    }
    today = workload.today if workload else Setting(precision="fp32", batch_size=1)
    outside = {
        name: getattr(config, name)
        for name in ("precision", "batch_size", "accumulation_steps")
        # If the searched command had a placeholder that this command lacks, the script's own value is unknown: set it.
        if name not in names_in_command
        and (getattr(config, name) != getattr(today, name) or (searched and name in searched.placeholders))
    }
    if "batch_size" in outside and workload and workload.loader:
        outside["maker"] = workload.loader
    return with_agent_on_path(arguments, INJECTED), outside


def environment(
    outside: Mapping[str, Any], recommendation: Recommendation, path: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables for the command: inherited, recommended, and those that load the agent."""
    agent = {
        "outside": outside,
        "controller": {"path": str(path.resolve()), "device": recommendation.hardware.identity.type},
    }
    return {
        **inherited,
        **recommendation.config.environment,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTED), inherited.get("PYTHONPATH")])),
        "AUTOTUNE_AMP_AGENT": json.dumps(agent),
    }
