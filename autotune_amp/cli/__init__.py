"""Command line: typer reads the request, the command does the work, the result is printed, the exit code is set.

Standard output carries the result and nothing else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer

from autotune_amp.cli.judging import check, fidelity, memory, probe, profile
from autotune_amp.cli.options import CommandOutput, app, register, result
from autotune_amp.cli.results import dashboard, export, report, show
from autotune_amp.cli.training import apply, run_, search
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError
from autotune_amp.interruption import interruptible
from autotune_amp.report.output import ignore_closed_reader, write_message, write_output

_TAKE_COMMANDS = ("search", "run", "apply")  # these take a training command after ``--``

# typer brought its own copy of click with 0.2x; the base of every usage error is found wherever it lives.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

for work in (search, check, probe, show, report, profile, fidelity, memory, export, run_, apply, dashboard):
    register(work)


def main() -> None:
    """Run the command line of this process and exit: the only place that prints or exits."""
    # If the caller has closed standard output (``>&-``), the next file to be opened would otherwise become it.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    with interruptible():
        code = run(sys.argv[1:])
        for stream in (sys.stdout, sys.stderr):
            try:
                with ignore_closed_reader(stream):
                    stream.flush()
            except InvalidRequestError as error:
                code = code if stream is sys.stderr else _fail(error, as_json=False)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command, given the arguments of the command line; return the exit code."""
    own, training = arguments, None
    if "--" in arguments and arguments[0] in _TAKE_COMMANDS:
        own, training = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    as_json = "--json" in own
    command = typer.main.get_command(app)
    try:
        work = None
        with ignore_closed_reader(sys.stdout):  # to which --help prints
            work = command.main(own, prog_name="autotune-amp", standalone_mode=False, obj=training)
        if callable(work):
            answer = work()
            output, exit_code = answer if isinstance(answer, CommandOutput) else (answer, 0)
            write_output(output)
            return exit_code
    except AutotuneAmpError as error:
        return _fail(error, as_json)
    except KeyboardInterrupt:
        from autotune_amp.core.recommendation import SearchInterruptedError

        interrupted = SearchInterruptedError("Interrupted.", "Run the same command again.", (), None)
        return _fail(interrupted, as_json)
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx else "autotune-amp"
        meant = _with_command(arguments, command)
        next_step = f"See `{path} --help`." if meant is None else f"Put `--` before your command: `{meant}`."
        return _fail(InvalidRequestError(error.format_message(), next_step), as_json)
    return 0


def _with_command(arguments: list[str], app_command: Any) -> str | None:
    """Return the command line with ``--`` added before its training command, None if it does not seem to hold one."""
    if not arguments or arguments[0] not in _TAKE_COMMANDS or "--" in arguments:
        return None
    known = {name: each for each in app_command.commands[arguments[0]].params for name in each.opts}
    from autotune_amp.command.startable import likely_command
    from autotune_amp.core.text import shell_line

    at = 1
    while at < len(arguments):
        name, sign, _ = arguments[at].partition("=")
        words = None if name.startswith("-") else likely_command(arguments[at:])
        if words is not None:
            return shell_line(["autotune-amp", *arguments[:at], "--", *words])
        if name.startswith("-") and name not in known:
            return None
        at += 2 if name.startswith("-") and not (sign or known[name].is_flag) else 1
    return None


def _fail(error: AutotuneAmpError, as_json: bool) -> int:
    from autotune_amp.core.recommendation import SearchInterruptedError
    from autotune_amp.report.errors import error_document, error_text

    write_message(error_text(error))
    if as_json:
        write_output(error_document(error).encode())
    elif isinstance(error, SearchInterruptedError) and error.best is not None:
        write_output(result(error.best, as_json))
    return error.exit_code
