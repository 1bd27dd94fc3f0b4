"""The command line: typer reads the request, `main` does the work, prints the result and sets the exit code.

Standard output carries the result and nothing else. Nothing heavy is imported before a command needs it, so that
``--help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from autotune_amp import __version__
from autotune_amp.commands.dashboard import dashboard
from autotune_amp.commands.export import export
from autotune_amp.commands.profile import profile
from autotune_amp.commands.report import report
from autotune_amp.commands.shared import Device, Folder, Json, Target, Work, recommendation_file, rendered
from autotune_amp.core.errors import AutotuneAmpError, InvalidRequestError
from autotune_amp.report.failure import error_document, error_text

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation

# typer brought its own copy of click with 0.2x; the base of every usage error is found wherever it lives.
_UsageError: type[Any] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    # typer converts a missing --help through pydantic, and importing that takes longer than all the rest of a --help.
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)
_OBJECTIVE = typer.Option(
    help="Choose for speed, memory (the least that is no slower than the baseline) or energy. A finished search is "
    "ranked again, nothing is run.",
    metavar="OBJECTIVE",
)
Steps = Annotated[
    int | None,
    typer.Option(
        help="Optimizer steps of the training to come: fp16's loss scale is chosen for them, and its hours are given.",
        metavar="N",
    ),
]
Samples = Annotated[int | None, typer.Option(help="The same in samples.", metavar="N")]
PricePerHour = Annotated[
    float | None, typer.Option(help="What an hour costs: with --steps or --samples, the price.", metavar="MONEY")
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


@app.command()
def search(
    target: Target = None,
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
        str | None,
        typer.Option(
            help="Samples per optimizer step, kept exactly: smaller batches accumulate gradients. Without it, what the "
            "DataLoader has; `free` lets the search change it.",
            metavar="N|free",
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
    objective: Annotated[str, _OBJECTIVE] = "speed",
    steps: Steps = None,
    samples: Samples = None,
    price_per_hour: PricePerHour = None,
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
        from autotune_amp.distributed.ranks import place
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
            objective=objective,
            steps=steps,
            samples=samples,
            price_per_hour=price_per_hour,
            study=study,
            out=out,
            storage=storage,
            seed=seed,
            fresh=fresh,
            quiet=quiet,
            progress=None if quiet else TerminalProgress(sys.stderr),
        )
        path = Path(out, recommendation.search.study, "recommendation.json")
        return _result(recommendation, as_json, path) if place().rank == 0 else b""

    return work


@app.command()
def probe(device: Device = "auto", as_json: Json = False) -> Work:
    """Say what this machine can do, and why not more.

    Device, driver, memory, and each precision as native, emulated or unsupported with a measured rate.
    """

    def work() -> bytes:
        import msgspec
        from rich.console import Console

        from autotune_amp.hardware import probe as probe_hardware

        with Console(stderr=True).status("Probing the device"):
            hardware = probe_hardware(device)
        if as_json:
            document = msgspec.json.encode({"format": 1, "hardware": hardware})
            return msgspec.json.format(document, indent=2) + b"\n"
        from autotune_amp.report.terminal import hardware_table

        return rendered(lambda console: hardware_table(hardware, console))

    return work


@app.command()
def show(
    folder: Folder = None,
    objective: Annotated[str | None, _OBJECTIVE] = None,
    steps: Steps = None,
    samples: Samples = None,
    price_per_hour: PricePerHour = None,
    as_json: Json = False,
) -> Work:
    """Print a finished recommendation again, ranked again where an option asks for it.

    Nothing is run and nothing is saved.
    """

    def work() -> bytes:
        from autotune_amp.core.recommendation import Recommendation

        path = recommendation_file(folder)
        recommendation = Recommendation.load(path)
        if any(given is not None for given in (objective, steps, samples, price_per_hour)):
            from autotune_amp.search.rerank import ranked_again

            recommendation = ranked_again(recommendation, path, objective, steps, samples, price_per_hour)
        return _result(recommendation, as_json, path)

    return work


app.command()(report)
app.command()(profile)
app.command()(export)
app.command()(dashboard)


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
        from autotune_amp.core.recommendation import SearchInterruptedError

        interrupted = SearchInterruptedError("Interrupted.", "Run the same command again.", (), None)
        return _fail(interrupted, as_json)
    except _UsageError as error:
        path = error.ctx.command_path if error.ctx else "autotune-amp"
        return _fail(InvalidRequestError(error.format_message(), f"See `{path} --help`."), as_json)
    return 0


def _fail(error: AutotuneAmpError, as_json: bool) -> int:
    sys.stderr.write(error_text(error))
    from autotune_amp.core.recommendation import SearchInterruptedError

    best = error.best if isinstance(error, SearchInterruptedError) else None
    if as_json:
        _write(error_document(error).encode())
    elif best is not None:
        _write(_result(best, as_json))
    return error.exit_code


def _result(recommendation: Recommendation, as_json: bool, path: Path | None = None) -> bytes:
    if as_json:
        return f"{recommendation.to_json()}\n".encode()
    from autotune_amp.report.terminal import print_recommendation

    shown = None if path is None else path.as_posix()
    return rendered(lambda console: print_recommendation(recommendation, console, shown))


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
