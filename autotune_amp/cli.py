"""The command line: typer reads the request, `main` does the work, prints the result and sets the exit code.

Standard output carries the result and nothing else. Nothing heavy is imported before a command needs it, so that
``--help`` answers at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, TypeAlias

import typer

from autotune_amp import __version__
from autotune_amp.errors import AutotuneAmpError, FormatError, InvalidRequestError, SearchInterruptedError
from autotune_amp.report.failure import error_document, error_text, exit_code

if TYPE_CHECKING:
    from rich.console import Console

    from autotune_amp.recommendation import Recommendation

# What a command line asks for; returns what goes to standard output.
Work: TypeAlias = Callable[[], bytes]

# typer brought its own copy of click with 0.2x; the base of every usage error is found wherever it lives.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    # typer converts a missing --help through pydantic, and importing that takes longer than all the rest of a --help.
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, of an error too.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps, xpu or xpu:N.", metavar="DEVICE")]


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


@app.command()
def search(
    target: Annotated[
        str | None,
        typer.Argument(
            help="What to train: path/file.py:function or package.module:function, a function that returns a "
            "Workload. Without it, a small transformer that comes with the package.",
            metavar="TARGET",
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds the whole search may take.", metavar="SECONDS")] = 110.0,
    trials: Annotated[int | None, typer.Option(help="At most this many trials.", metavar="N")] = None,
    device: Device = "auto",
    precision: Annotated[
        list[str] | None,
        typer.Option(help="Try only this precision: fp32, tf32, bf16, fp16 or fp8. Repeatable.", metavar="PRECISION"),
    ] = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Try only batch sizes in this range, such as 8:256.", metavar="LOW:HIGH")
    ] = None,
    effective_batch_size: Annotated[
        int | None,
        typer.Option(
            help="Samples per optimizer step, kept exactly: smaller batches accumulate gradients.", metavar="N"
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="What to compare with, such as fp32:32. Without it, what the workload runs today.",
            metavar="PRECISION:BATCH",
        ),
    ] = None,
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the available memory that a trial may take.", metavar="SHARE")
    ] = 0.9,
    steps: Annotated[
        int,
        typer.Option(
            help="Optimizer steps of the training to come: fp16's loss scale is chosen for them.", metavar="N"
        ),
    ] = 10_000,
    study: Annotated[
        str | None, typer.Option(help="Name of the study; the same name goes on where it stopped.", metavar="NAME")
    ] = None,
    out: Annotated[str, typer.Option(help="Folder that holds the studies.", metavar="FOLDER")] = "studies",
    storage: Annotated[
        str | None, typer.Option(help="Optuna storage to use instead of SQLite in the study's folder.", metavar="URL")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampler and of the trials.", metavar="N")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever is known from earlier.")] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> Work:
    """Find the fastest precision and batch size to train with.

    The result is printed and saved in a study folder; the same command again goes on where it stopped.
    """

    def work() -> bytes:
        from autotune_amp.api import recommend_config
        from autotune_amp.report.progress import TerminalProgress

        recommendation = recommend_config(
            target,
            budget=budget,
            trials=trials,
            device=device,
            precision=precision,
            batch_size=batch_size,
            effective_batch_size=effective_batch_size,
            baseline=baseline,
            memory_fraction=memory_fraction,
            steps=steps,
            study=study,
            out=out,
            storage=storage,
            seed=seed,
            fresh=fresh,
            quiet=quiet,
            progress=None if quiet else TerminalProgress(sys.stderr),
        )
        return _result(recommendation, as_json)

    return work


@app.command()
def probe(device: Device = "auto", as_json: Json = False) -> Work:
    """Say what this machine can do, and why not more.

    Device, driver, memory, and each precision as native, emulated or unsupported with a measured rate.
    """

    def work() -> bytes:
        import msgspec

        from autotune_amp.hardware import probe as probe_hardware

        hardware = probe_hardware(device)
        if as_json:
            document = msgspec.json.encode({"format": 1, "hardware": hardware})
            return msgspec.json.format(document, indent=2) + b"\n"
        from autotune_amp.report.terminal import hardware_table

        return _rendered(lambda console: hardware_table(hardware, console))

    return work


@app.command()
def show(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A study's folder or its recommendation.json. Without it, the latest in ./studies.", metavar="FOLDER"
        ),
    ] = None,
    as_json: Json = False,
) -> Work:
    """Print a finished recommendation again."""

    def work() -> bytes:
        from autotune_amp.recommendation import Recommendation

        return _result(Recommendation.load(_recommendation_file(folder)), as_json)

    return work


def main() -> None:
    """The entry point: the only place that prints or exits."""
    # Closed by the caller (``>&-``): without this the next file that is opened would become standard output.
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115 - open until the process ends
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Do what the command line asks for; returns the exit code."""
    as_json = "--json" in arguments
    command = typer.main.get_command(app)
    try:
        # The work is done after typer has returned: it would take any broken pipe or end of file for the terminal's.
        work = command.main(arguments, prog_name="autotune-amp", standalone_mode=False)
        if callable(work):
            _write(work())
    except AutotuneAmpError as error:
        return _fail(error, as_json)
    except KeyboardInterrupt:
        interrupted = SearchInterruptedError("Interrupted.", "Run the same command again.", (), None)
        return _fail(interrupted, as_json)
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx else "autotune-amp"
        return _fail(InvalidRequestError(error.format_message(), f"See `{path} --help`."), as_json)
    return 0


def _fail(error: AutotuneAmpError, as_json: bool) -> int:
    sys.stderr.write(error_text(error))
    best = error.best if isinstance(error, SearchInterruptedError) else None
    if as_json:
        _write(error_document(error).encode())
    elif best is not None:
        _write(_result(best, as_json))
    return exit_code(error)


def _result(recommendation: Recommendation, as_json: bool) -> bytes:
    if as_json:
        return f"{recommendation.to_json()}\n".encode()
    from autotune_amp.report.terminal import print_recommendation

    return _rendered(lambda console: print_recommendation(recommendation, console))


def _rendered(show: Callable[[Console], None]) -> bytes:
    from rich.console import Console

    console = Console(file=sys.stdout)
    with console.capture() as capture:
        show(console)
    # Rich fills each line with blanks up to the width of its table.
    return re.sub(r" +$", "", capture.get(), flags=re.MULTILINE).encode(console.encoding, "replace")


def _recommendation_file(folder: Path | None) -> Path:
    given = folder or Path("studies")
    try:
        if folder is not None and not folder.is_dir():
            return folder
        found = [*given.glob("*/recommendation.json"), *given.glob("recommendation.json")]
        if found:
            return max(found, key=lambda path: path.stat().st_mtime)
    except OSError as error:
        raise FormatError(f"{given} cannot be read: {error.strerror}.", "Name a folder that you can read.") from error
    raise FormatError(
        f"{given} holds no recommendation.json: no search has finished there.",
        "Run `autotune-amp search`, or name the folder of a finished study.",
    )


def _write(result: bytes) -> None:
    try:
        sys.stdout.buffer.write(result)
    except BrokenPipeError:
        _let_go(sys.stdout)


def _flush(stream: TextIO) -> None:
    try:
        stream.flush()
    except BrokenPipeError:
        _let_go(stream)


def _let_go(stream: TextIO) -> None:
    # The reader went away (``| head -1``): no error of ours, and the interpreter must not flush in vain at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
