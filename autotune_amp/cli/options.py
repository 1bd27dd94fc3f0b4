"""Shared parts of the commands: the app, options that several commands take, and the output of a result.

Nothing heavy is imported before a command needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from autotune_amp import __version__
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.report.output import render_to_bytes

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    # typer converts a missing --help through pydantic, and importing that takes longer than all the rest of a --help.
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)


class CommandOutput(NamedTuple):
    """Result of a command: the bytes for standard output, and the exit code."""

    output: bytes
    exit_code: int


def register(work: Callable[..., bytes | CommandOutput]) -> None:
    """Register a function as a command; it returns the bytes for standard output.

    Typer only reads the options, and the function runs after typer has returned, since typer would mistake any broken
    pipe or end of file for that of the terminal.
    """

    @wraps(work)
    def deferred(**options: Any) -> Callable[[], bytes | CommandOutput]:
        return partial(work, **options)

    app.command(work.__name__.rstrip("_"))(deferred)


def option(metavar: str, text: str) -> Any:
    """Return an option of a command, with its help text."""
    return typer.Option(help=text, metavar=metavar)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, of an error too.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Target = Annotated[
    str | None,
    typer.Argument(
        help="What to train: path/file.py:function or package.module:function, a function that returns a "
        "Workload. Without it, a small transformer that comes with the package.",
        metavar="TARGET",
    ),
]
Folder = Annotated[
    Path | None,
    typer.Argument(help="A study's folder, or the file meant. Without it, the latest in ./studies.", metavar="FOLDER"),
]
Device = Annotated[str, option("DEVICE", "auto, cpu, cuda, cuda:N, mps, xpu or xpu:N.")]
Precision = Annotated[
    list[str] | None, option("PRECISION", "Try only this precision: fp32, tf32, bf16, fp16 or fp8. Repeatable.")
]
OBJECTIVE = option(
    "OBJECTIVE",
    "Choose for speed, memory (the least that is no slower than the baseline) or energy. A finished search is ranked "
    "again, nothing is run.",
)
TRY = typer.Option(
    "--try",
    help="What else to try: auto (what is safe), none, or some of compile, channels_last, optimizer_impl, "
    "activation_checkpointing, allocator, cudnn_benchmark, fp8_recipe, weights, with commas.",
    metavar="NAMES",
)
Steps = Annotated[
    int | None, option("N", "Optimizer steps of the training to come: fp16's loss scale is chosen for them.")
]
Samples = Annotated[int | None, option("N", "The same in samples.")]
Price = Annotated[float | None, option("MONEY", "What an hour costs: with --steps or --samples, the price.")]


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
    """Return the words of the training command after ``--``. Raises `InvalidRequestError` if there is none."""
    if not context.obj:
        raise InvalidRequestError("No command is given.", f"Give it after `--`, as in `{command} -- python train.py`.")
    training: list[str] = context.obj
    return training


def result(recommendation: Recommendation, as_json: bool, path: Path | None = None) -> bytes:
    """Return a recommendation as bytes for standard output; `path` is the file that it was saved to."""
    if as_json:
        return f"{recommendation.to_json()}\n".encode()
    from autotune_amp.report.terminal import print_recommendation

    shown = None if path is None else path.as_posix()
    return render_to_bytes(lambda console: print_recommendation(recommendation, console, shown))
