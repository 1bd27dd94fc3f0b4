"""Shared parts of the commands: the app, options that several commands take, and the output of a result.

Slow modules are imported by the commands that need them, so that ``--help`` is fast.
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
    "Recommend for speed, memory (the least that is no slower than the baseline) or energy. A finished search is "
    "ranked again without new trials.",
)
TRY = typer.Option(
    "--try",
    help="Further settings to try: auto (all safe ones), none, or a comma-separated list of compile, channels_last, "
    "optimizer_impl, activation_checkpointing, allocator, cudnn_benchmark, fp8_recipe, weights.",
    metavar="NAMES",
)
Steps = Annotated[
    int | None, option("N", "Optimizer steps of the planned training run, for which fp16's loss scale is chosen.")
]
Samples = Annotated[int | None, option("N", "Length of the planned training run in samples, in place of --steps.")]
Price = Annotated[
    float | None,
    option("MONEY", "Price of one hour; with --steps or --samples, the price of the training run is shown."),
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
