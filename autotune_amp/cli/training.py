"""Commands that search, and that train with the result: search, run, apply."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune_amp.cli.app import (
    OBJECTIVE,
    TRY,
    Device,
    File,
    Folder,
    Json,
    Precision,
    Price,
    Quiet,
    Samples,
    Steps,
    Target,
    Value,
    option,
    recommendation_output,
    training_command,
)
from autotune_amp.core.text import shell_line
from autotune_amp.report.output import ignore_closed_reader, json_document, write_message, write_output

_COMMAND_LINE_OPTIONS = ("context", "events", "value", "file", "dry_run", "as_json")  # not passed to recommend_config()


def search(
    context: typer.Context,
    workload: Target = None,
    budget: Annotated[
        float,
        option("SECONDS", "Longest duration of the search in seconds; it ends earlier once decided and confirmed."),
    ] = 600.0,
    trials: Annotated[
        int | None, option("N", "Largest number of settings to try; trials that confirm the best are not counted.")
    ] = None,
    device: Device = "auto",
    devices: Annotated[str | None, option("all|N,N", "NVIDIA GPUs to search on at the same time.")] = None,
    ray: Annotated[str | None, option("ADDRESS", "Search on the nodes of a Ray cluster: auto or HOST:PORT.")] = None,
    ranks: Annotated[int, option("N", "Processes that run each trial together, under DistributedDataParallel.")] = 1,
    precision: Precision = None,
    batch_size: Annotated[str | None, option("LOW:HIGH", "Try only batch sizes in this range, such as 8:256.")] = None,
    effective_batch_size: Annotated[
        str | None,
        option(
            "N|free",
            "Samples per optimizer step; smaller batches accumulate gradients to reach it exactly. Default: the "
            "DataLoader's batch size; `free` lets the search change it.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        option("PRECISION:BATCH", "Setting to compare with, such as fp32:32. Default: the setting in use today."),
    ] = None,
    try_: Annotated[str, TRY] = "auto",
    memory_fraction: Annotated[
        float, option("SHARE", "Largest share of the available memory that a trial may use.")
    ] = 0.9,
    memory_limit: Annotated[
        str | None, option("SIZE", "Most memory that a trial may use, such as 16GiB, to search for a smaller device.")
    ] = None,
    objective: Annotated[str, OBJECTIVE] = "speed",
    steps: Steps = None,
    samples: Samples = None,
    price_per_hour: Price = None,
    study: Annotated[str | None, option("NAME", "Name of the study; a study of this name is resumed.")] = None,
    out: Annotated[str, option("FOLDER", "Folder that holds the studies.")] = "studies",
    storage: Annotated[str | None, option("URL", "Optuna storage in place of SQLite in the study's folder.")] = None,
    seed: Annotated[int, option("N", "Seed of the trials and of Optuna.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, without using earlier results.")] = False,
    server: Annotated[
        str | None, option("URL", "Ask this service (`autotune-amp serve`) about its target TARGET, searching there.")
    ] = None,
    events: Annotated[
        Path | None, option("FILE", "Append each phase, trial and best so far to this file as JSON, and show nothing.")
    ] = None,
    value: Value = None,
    file: File = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the first commands that would be started, and exit.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> bytes:
    """Find the fastest precision and batch size to train with.

    Searches for a TARGET, or for any training command: search -- python train.py --bs {batch_size=32} --amp
    {precision=fp32}. The result is printed and saved in the study's folder. Run the same command again to resume.
    """
    # Every option is passed to recommend_config(), where it has the same name and the same default.
    options = {name: option_value for name, option_value in locals().items() if name not in _COMMAND_LINE_OPTIONS}
    from autotune_amp.core.command_template import from_command_line

    command_template = from_command_line(context.obj, workload, value or [], file or [], is_dry=dry_run)
    if command_template is not None and dry_run:
        commands = [shell_line(arguments) for arguments in command_template.first_commands()]
        if not as_json and not quiet:
            sys.stderr.write(f"{command_template.plan_line()}\n")
        return (
            json_document({"format": 1, "commands": commands})
            if as_json
            else "".join(f"{command}\n" for command in commands).encode()
        )
    options["workload"] = command_template or workload
    from autotune_amp.api import recommend_config
    from autotune_amp.distributed import place
    from autotune_amp.report.progress import TerminalProgress

    if events is None:
        recommendation = recommend_config(**options, progress=None if quiet else TerminalProgress(sys.stderr))
    else:
        from autotune_amp.report.events import EventLog

        with EventLog(events) as log:
            recommendation = recommend_config(**options, progress=log)
    path = None if server else Path(out, recommendation.search.study, "recommendation.json")
    return recommendation_output(recommendation, as_json, path) if place().rank == 0 else b""


def run_(
    context: typer.Context,
    study: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a study, or its recommendation.json. Default: the newest study in ./studies.",
            metavar="STUDY",
        ),
    ] = None,
) -> bytes:
    """Train with a recommendation: run STUDY -- python train.py.

    Settings that the command has no option for are set from outside the script, and listed in one line. The script's
    GradScaler becomes a PrecisionController. Signals are passed on, and the exit code is the command's.
    """
    from autotune_amp.command.run import start
    from autotune_amp.report.files import find_study_file

    start(training_command(context, "run"), find_study_file(study, "recommendation.json"))


def apply(
    context: typer.Context,
    folder: Folder = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write the edits to your files, after a test run of an edited copy.")
    ] = False,
    as_json: Json = False,
) -> bytes:
    """Print a recommendation as a diff of your script: apply -- python train.py.

    The command runs for a few steps to find the calls to edit; then an edited copy runs to test the edits. Settings
    that cannot be edited safely are listed with their line.
    """
    training = training_command(context, "apply")
    from rich.console import Console
    from rich.text import Text

    from autotune_amp.command.editing.apply import apply as apply_recommendation
    from autotune_amp.core.command_template import CommandTemplate
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.report.files import find_study_file
    from autotune_amp.search.storage.folder import StudyFolder

    path = find_study_file(folder, "recommendation.json")
    recommendation = Recommendation.load(path)
    with StudyFolder(str(path.parent), ""), Console(stderr=True).status("") as status:
        edits = apply_recommendation(
            recommendation,
            CommandTemplate.of(training),
            study=path.parent,
            write=write,
            phase=lambda text: status.update(Text(text)),  # which may name files with square brackets
        )
    write_output(json_document(edits) if as_json else edits.diff.encode())
    with ignore_closed_reader(sys.stdout):
        sys.stdout.flush()
    for note in edits.notes():  # after the diff, so that a long one does not scroll them away
        write_message(f"{note}\n")
    return b""
