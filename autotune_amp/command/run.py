"""Start the real training with a recommendation: the command replaces this process, and the agent sets the values that
the command does not contain.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autotune_amp.command.running import INJECTED
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


def command_to_start(
    command: Sequence[str], recommendation: Recommendation, path: Path
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the command with its placeholders filled, and the agent's values: those recommended that the command does
    not contain.

    Raises `InvalidRequestError` if a placeholder such as `{trial_dir}` is left, which exists only in trials, or if the
    command lacks a recommended argument of its own.
    """
    config, workload = recommendation.config, recommendation.workload
    searched = recommendation.command_template
    searched_files = searched.files if searched else {}
    files = [file for file in searched_files if any(file in text for text in (*command, *searched_files.values()))]
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
    for name, value in config.arguments:
        choices = searched.placeholders[name].choices if searched and name in searched.placeholders else None
        text = (choices or {}).get(value, value)
        if name not in template.placeholders and text not in " ".join(arguments):
            raise InvalidRequestError(
                f"The recommendation has {name.lstrip('!')}={value}, which this command does not contain.",
                f"Write {text!r} where the command takes it, or the placeholder of the search.",
            )
    searched_arguments = None if searched is None else searched.of_setting(config, str(path.parent))[0]
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
    return arguments, outside


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
