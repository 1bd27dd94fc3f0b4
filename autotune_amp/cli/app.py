"""App of the command line: run a command and print its result or error; options that several commands take.

Slow modules are imported by the commands that need them, so that ``--help`` is fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from autotune_amp import __version__
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError
from autotune_amp.interruption import interruptible
from autotune_amp.report.output import ignore_closed_reader, render_to_bytes, write_message, write_output

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation

# Commands with a training command after ``--``.
_WITH_TRAINING_COMMAND = ("search", "run", "apply", "check", "fidelity", "memory", "profile")

# click's UsageError. Some versions of typer contain their own copy of click, so it is not imported from click.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    # Without a default, typer converts --help by pydantic, whose import takes longer than the rest of --help.
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)


class CommandOutput(NamedTuple):
    """Result of a command: the bytes for standard output, and the exit code."""

    output: bytes
    exit_code: int


def register(command: Callable[..., bytes | CommandOutput]) -> None:
    """Register a function as a command. The function returns the bytes for standard output.

    Typer only parses the options; the function runs after typer has returned, since typer handles every
    BrokenPipeError and EOFError as one of the terminal.
    """

    @wraps(command)
    def defer(**options: Any) -> Callable[[], bytes | CommandOutput]:
        return partial(command, **options)

    app.command(command.__name__.rstrip("_"))(defer)


def option(metavar: str, text: str) -> Any:
    """Return an option of a command, with its help text."""
    return typer.Option(help=text, metavar=metavar)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, for errors too.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Target = Annotated[
    str | None,
    typer.Argument(
        help="Function that returns the Workload to train: path/file.py:function or package.module:function. "
        "Default: the package's small example transformer.",
        metavar="TARGET",
    ),
]
Value = Annotated[
    list[str] | None, option("PRECISION=WORD", "Word that the command after -- uses for a precision. Repeatable.")
]
File = Annotated[
    list[str] | None, option("FILE", "File with placeholders that the command reads its settings from. Repeatable.")
]
Folder = Annotated[
    Path | None,
    typer.Argument(
        help="Folder of a study, or the file in it that is read. Default: the newest study in ./studies.",
        metavar="FOLDER",
    ),
]
Device = Annotated[str, option("DEVICE", "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N.")]
Precision = Annotated[
    list[str] | None, option("PRECISION", "Try only this precision: fp32, tf32, bf16, fp16 or fp8. Repeatable.")
]
OBJECTIVE = option(
    "OBJECTIVE",
    "Recommend for speed, tokens (speed in real tokens, where lengths vary), memory (the least that is no slower than "
    "the baseline) or energy. A finished search is ranked again without new trials.",
)
TRY = typer.Option(
    "--try",
    help="Further settings to try: auto (all safe ones), none, or a comma-separated list of compile, channels_last, "
    "optimizer_impl, attention, activation_checkpointing, allocator, cudnn_benchmark, pin_memory, prefetch_factor, "
    "fp8_recipe, weights.",
    metavar="NAMES",
)
Steps = Annotated[
    int | None, option("N", "Optimizer steps of the planned training run, for which fp16's loss scale is chosen.")
]
Samples = Annotated[int | None, option("N", "Length of the planned training run in samples, in place of --steps.")]
Price = Annotated[
    float | None,
    option("MONEY", "Price of one hour: shows that of a million tokens or samples, and of the run with --steps."),
]


@app.callback(invoke_without_command=True)
def autotune_amp(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Measure which precision and batch size to train a PyTorch model with, on your own model and machine."""
    if version:
        typer.echo(f"autotune-amp {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def training_command(context: typer.Context, command: str) -> list[str]:
    """Return the arguments of the training command after ``--``. Raises `InvalidRequestError` if there are none."""
    if not context.obj:
        raise InvalidRequestError(
            "The training command is missing.", f"Add it after `--`, as in `{command} -- python train.py`."
        )
    training: list[str] = context.obj
    return training


def recommendation_output(recommendation: Recommendation, as_json: bool, path: Path | None = None) -> bytes:
    """Return a recommendation as bytes for standard output. `path` is that of its file, for the lines to copy."""
    if as_json:
        return f"{recommendation.to_json()}\n".encode()
    from autotune_amp.report.terminal import print_recommendation

    shown_path = None if path is None else path.as_posix()
    return render_to_bytes(lambda console: print_recommendation(recommendation, console, shown_path))


def serve_until_interrupted(
    server: Any, as_json: bool, note: str = "Ctrl-C stops it.", then: Callable[[], Any] = lambda: None
) -> bytes:
    """Print the address of a `server` and a `note`, call `then`, and let the server serve until Ctrl-C."""
    write_output((json.dumps({"format": 1, "url": server.url}) if as_json else server.url).encode() + b"\n")
    if not as_json:
        write_message(f"{note}\n")
    with contextlib.suppress(KeyboardInterrupt):
        then()
        server.serve_forever()
    return b""


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
