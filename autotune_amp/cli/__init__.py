"""Command line: typer parses the options, the command runs, its result is printed, the exit code is set.

Standard output has only the result; progress, notes and errors go to standard error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer

from autotune_amp.cli.judging import check, fidelity, memory, probe, profile
from autotune_amp.cli.options import CommandOutput, app, recommendation_output, register
from autotune_amp.cli.results import dashboard, export, report, show
from autotune_amp.cli.training import apply, run_, search
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError
from autotune_amp.interruption import interruptible
from autotune_amp.report.output import ignore_closed_reader, write_message, write_output

_WITH_TRAINING_COMMAND = ("search", "run", "apply")  # commands with a training command after ``--``

# click's UsageError. Some versions of typer contain their own copy of click, so it is not imported from click.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

for function in (search, check, probe, show, report, profile, fidelity, memory, export, run_, apply, dashboard):
    register(function)


def main() -> None:
    """Run the command line of this process, and exit with its exit code."""
    # If the caller has closed standard output (``>&-``), the next file to be opened would become standard output.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    with interruptible():
        code = run(sys.argv[1:])
        for stream in (sys.stdout, sys.stderr):
            try:
                with ignore_closed_reader(stream):
                    stream.flush()
            except InvalidRequestError as error:
                code = code if stream is sys.stderr else _report_error(error, as_json=False)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command with these arguments, print its result or error, and return the exit code."""
    own_arguments, training_arguments = arguments, None
    if "--" in arguments and arguments[0] in _WITH_TRAINING_COMMAND:
        own_arguments, training_arguments = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    as_json = "--json" in own_arguments
    command = typer.main.get_command(app)
    try:
        command_call = None
        with ignore_closed_reader(sys.stdout):  # to which --help prints
            command_call = command.main(
                own_arguments, prog_name="autotune-amp", standalone_mode=False, obj=training_arguments
            )
        if callable(command_call):
            command_result = command_call()
            output, exit_code = command_result if isinstance(command_result, CommandOutput) else (command_result, 0)
            write_output(output)
            return exit_code
    except AutotuneAmpError as error:
        return _report_error(error, as_json)
    except KeyboardInterrupt:
        from autotune_amp.core.recommendation import SearchInterruptedError

        interrupted = SearchInterruptedError("Interrupted.", "Run the same command again.", (), None)
        return _report_error(interrupted, as_json)
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx else "autotune-amp"
        corrected = _with_separator(arguments, command)
        next_step = f"See `{path} --help`." if corrected is None else f"Put `--` before your command: `{corrected}`."
        return _report_error(InvalidRequestError(error.format_message(), next_step), as_json)
    return 0


def _with_separator(arguments: list[str], app_command: Any) -> str | None:
    """Return the command line with ``--`` inserted before its training command, or None if it seems to have none."""
    if not arguments or arguments[0] not in _WITH_TRAINING_COMMAND or "--" in arguments:
        return None
    options = {name: option for option in app_command.commands[arguments[0]].params for name in option.opts}
    from autotune_amp.command.startable import likely_command
    from autotune_amp.core.text import shell_line

    index = 1
    while index < len(arguments):
        name, equals_sign, _ = arguments[index].partition("=")
        command_words = None if name.startswith("-") else likely_command(arguments[index:])
        if command_words is not None:
            return shell_line(["autotune-amp", *arguments[:index], "--", *command_words])
        if name.startswith("-") and name not in options:
            return None
        index += 2 if name.startswith("-") and not (equals_sign or options[name].is_flag) else 1
    return None


def _report_error(error: AutotuneAmpError, as_json: bool) -> int:
    from autotune_amp.core.recommendation import SearchInterruptedError
    from autotune_amp.report.errors import error_document, error_text

    write_message(error_text(error))
    if as_json:
        write_output(error_document(error).encode())
    elif isinstance(error, SearchInterruptedError) and error.best is not None:
        write_output(recommendation_output(error.best, as_json))
    return error.exit_code
