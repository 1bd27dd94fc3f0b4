"""Real training run with a recommendation: its command replaces this process, and the agent sets its values from
outside.
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
    """Replace this process by the command, with the recommendation at `path`; signals and exit code are the command's
    own.

    On Windows, which cannot replace a process, the command is started and this process ends. Raises `WorkloadError` if
    the command cannot be started.
    """
    recommendation = Recommendation.load(path)
    arguments, outside = to_start(command, recommendation, path)
    variables = environment(outside, recommendation, path, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(arguments[0], arguments, variables)  # noqa: S606 - the user's own command
    except OSError as error:
        raise WorkloadError(
            f"{arguments[0]!r} cannot be started: {error}.", "Give the command as it is typed at the prompt."
        ) from error


def to_start(
    command: Sequence[str], recommendation: Recommendation, path: Path
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the command with its placeholders filled, and the recommended values that it does not contain itself.

    Raises `InvalidRequestError` if a placeholder is left that no recommendation fills.
    """
    config, found = recommendation.config, recommendation.workload
    searched = recommendation.command_template
    files = [file for file in (searched.files if searched else ()) if any(file in argument for argument in command)]
    given = CommandTemplate.of(command, values=searched.values if searched else {}, files=files)
    arguments, _ = given.of_setting(config, str(path.parent))
    left = [name for name, each in given.placeholders.items() if name in TRIAL_PLACEHOLDERS and each.today is None]
    if left:
        raise InvalidRequestError(
            f"The command has {{{left[0]}}}, which no recommendation fills.",
            f"Write a value in place of {{{left[0]}}}.",
        )
    answered = None if searched is None else searched.of_setting(config, str(path.parent))[0]
    says_itself = {*given.placeholders, *(searched.filled_names if searched and arguments == answered else ())}
    today = found.today if found else Setting(precision="fp32", batch_size=1)
    outside = {
        name: getattr(config, name)
        for name in ("precision", "batch_size", "accumulation_steps")
        # Without a placeholder that the search had, the script may not run with the value that this had today.
        if name not in says_itself
        and (getattr(config, name) != getattr(today, name) or (searched and name in searched.placeholders))
    }
    if "batch_size" in outside and found and found.loader:
        outside["maker"] = found.loader
    return arguments, outside


def environment(
    outside: Mapping[str, Any], recommendation: Recommendation, path: Path, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables to start the command with: inherited, the recommended ones, and those of the
    agent.
    """
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
