"""Commands that search, and that train with the result: search, run, apply."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune_amp.cli.options import (
    OBJECTIVE,
    TRY,
    Device,
    Folder,
    Json,
    Precision,
    Price,
    Quiet,
    Samples,
    Steps,
    Target,
    option,
    result,
    training_command,
)
from autotune_amp.core.text import shell_line
from autotune_amp.report.output import ignore_closed_reader, json_document, write_message, write_output

_OF_THE_COMMAND_LINE = ("context", "value", "file", "dry_run", "as_json")  # no options of recommend_config()


def search(
    context: typer.Context,
    workload: Target = None,
    budget: Annotated[float, option("SECONDS", "Seconds at most; it ends once decided and confirmed.")] = 600.0,
    trials: Annotated[int | None, option("N", "Settings to try at most; confirming the best is not counted.")] = None,
    device: Device = "auto",
    devices: Annotated[str | None, option("all|N,N", "NVIDIA GPUs to search on at the same time.")] = None,
    ray: Annotated[str | None, option("ADDRESS", "Search on the nodes of a Ray cluster: auto or HOST:PORT.")] = None,
    ranks: Annotated[int, option("N", "Train each trial on so many processes together, under DDP.")] = 1,
    precision: Precision = None,
    batch_size: Annotated[str | None, option("LOW:HIGH", "Try only batch sizes in this range, such as 8:256.")] = None,
    effective_batch_size: Annotated[
        str | None,
        option(
            "N|free",
            "Samples per optimizer step, kept exactly: smaller batches accumulate gradients. Without it, what the "
            "DataLoader has; `free` lets the search change it.",
        ),
    ] = None,
    baseline: Annotated[
        str | None, option("PRECISION:BATCH", "What to compare with, such as fp32:32. Without it, what runs today.")
    ] = None,
    try_: Annotated[str, TRY] = "auto",
    memory_fraction: Annotated[float, option("SHARE", "Share of the available memory that a trial may take.")] = 0.9,
    memory_limit: Annotated[
        str | None, option("SIZE", "What a trial may take in any case, as 16GiB: for a smaller device than this one.")
    ] = None,
    objective: Annotated[str, OBJECTIVE] = "speed",
    steps: Steps = None,
    samples: Samples = None,
    price_per_hour: Price = None,
    study: Annotated[str | None, option("NAME", "The study; the same name goes on where it stopped.")] = None,
    out: Annotated[str, option("FOLDER", "Folder that holds the studies.")] = "studies",
    storage: Annotated[str | None, option("URL", "Optuna storage in place of SQLite in the study's folder.")] = None,
    seed: Annotated[int, option("N", "Seed of the trials and of Optuna.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, whatever is known from earlier.")] = False,
    value: Annotated[
        list[str] | None, option("PRECISION=WORD", "What the command after -- calls a precision. Repeatable.")
    ] = None,
    file: Annotated[
        list[str] | None, option("FILE", "A settings file with placeholders that the command names. Repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what of a command would be started first.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Find the fastest precision and batch size to train with.

    What is trained is a TARGET, or any training command: search -- python train.py --bs {batch_size=32} --amp
    {precision=fp32}. The result is printed and saved in a study folder; the same command again goes on where it
    stopped.
    """
    # Every option is passed to recommend_config(), where it has the same name and the same default.
    asked = {name: given for name, given in locals().items() if name not in _OF_THE_COMMAND_LINE}
    from autotune_amp.core.command_template import from_command_line

    line = from_command_line(context.obj, workload, value or [], file or [], is_dry=dry_run)
    if line is not None and dry_run:
        started = [shell_line(arguments) for arguments in line.first_commands()]
        return (
            json_document({"format": 1, "commands": started})
            if as_json
            else "".join(f"{s}\n" for s in started).encode()
        )
    asked["workload"] = line or workload
    from autotune_amp.api import recommend_config
    from autotune_amp.distributed import place
    from autotune_amp.report.progress import TerminalProgress

    recommendation = recommend_config(**asked, progress=None if quiet else TerminalProgress(sys.stderr))
    path = Path(out, recommendation.search.study, "recommendation.json")
    return result(recommendation, as_json, path) if place().rank == 0 else b""


def run_(
    context: typer.Context,
    study: Annotated[
        Path | None,
        typer.Argument(help="A study's folder, or its file. Without it, the latest in ./studies.", metavar="STUDY"),
    ] = None,
) -> bytes:
    """Run the real training with a recommendation: run STUDY -- python train.py.

    What its command does not say is set from outside; one line says what and where. A GradScaler of the script's own
    becomes a PrecisionController. Signals and exit code are the command's.
    """
    from autotune_amp.command.run import start
    from autotune_amp.report.files import find_study_file

    start(training_command(context, "run"), find_study_file(study, "recommendation.json"))


def apply(
    context: typer.Context,
    folder: Folder = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the edits, once a copy has done what they say.")
    ] = False,
    as_json: Json = False,
) -> bytes:
    """Print a recommendation as a diff of your script: apply -- python train.py.

    The command is run for a few steps, to see which calls are to be edited, and an edited copy, to see what that does.
    What no edit can be trusted with is said with its line.
    """
    training = training_command(context, "apply")
    from rich.console import Console

    from autotune_amp.command.editing.apply import apply as applied_to
    from autotune_amp.core.command_template import CommandTemplate
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.report.files import find_study_file

    found = find_study_file(folder, "recommendation.json")
    recommended = Recommendation.load(found)
    with Console(stderr=True).status("") as status:
        applied = applied_to(
            recommended, CommandTemplate.of(training), study=found.parent, write=write, phase=status.update
        )
    write_output(json_document(applied) if as_json else applied.diff.encode())
    with ignore_closed_reader(sys.stdout):
        sys.stdout.flush()
    for note in applied.notes():  # below the diff, where a long diff does not hide them
        write_message(f"{note}\n")
    return b""
