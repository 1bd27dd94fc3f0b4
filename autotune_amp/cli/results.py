"""Commands that show the results of a search: show, report, export, dashboard."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune_amp.cli.app import (
    OBJECTIVE,
    Folder,
    Json,
    Price,
    Samples,
    Steps,
    option,
    recommendation_output,
    serve_until_interrupted,
)
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.report.output import json_document, write_message, write_output

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.integrations.export import Export


def show(
    folder: Folder = None,
    objective: Annotated[str | None, OBJECTIVE] = None,
    steps: Steps = None,
    samples: Samples = None,
    price_per_hour: Price = None,
    as_json: Json = False,
) -> bytes:
    """Print a saved recommendation, or rank its search again with other options.

    Runs no trial and saves nothing.
    """
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.report.files import find_study_file

    path = find_study_file(folder, "recommendation.json")
    recommendation = Recommendation.load(path)
    if any(option_value is not None for option_value in (objective, steps, samples, price_per_hour)):
        from autotune_amp.search.answer.decide import rerank_with_options

        recommendation = rerank_with_options(
            recommendation, path, objective=objective, steps=steps, samples=samples, price_per_hour=price_per_hour
        )
    return recommendation_output(recommendation, as_json, path)


def report(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a study, or the run log (.jsonl) of a PrecisionController. Default: the newest study.",
            metavar="FOLDER|RUN.jsonl",
        ),
    ] = None,
    out: Annotated[
        Path | None, option("FILE", "File to write. Default: report.html in the study, or the log's name with .html.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Update the page of a run log as the log grows, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> bytes:
    """Write a search, or the run log of a training run, as one HTML file, and print its path.

    The page of a search without a recommendation shows its failures. Only an earlier page of the same kind is
    overwritten.
    """
    from autotune_amp.report.files import OUTCOMES, find_study_file, follow_run, write_report, write_run_report

    def path_output(written: Path) -> bytes:
        document = {"format": 1, "report": written.as_posix()}
        return json_document(document) if as_json else f"{written.as_posix()}\n".encode()

    # Every other file is taken as a run log, which may have any name.
    log = None if path is None or path.is_dir() or path.suffix == ".json" or path.name == OUTCOMES else path
    if not follow:
        if log is not None:
            return path_output(write_run_report(log, out))
        return path_output(write_report(find_study_file(path, "recommendation.json", OUTCOMES), out))
    if log is None:
        raise InvalidRequestError(
            f"--follow needs a run log, which {path or 'the newest study'} is not.",
            'Pass the file that PrecisionController(config, run_log="run.jsonl") writes; it need not exist yet.',
        )
    if not as_json:
        write_message(f"Following {log}. Ctrl-C stops it.\n")
    written_paths = follow_run(log, out)
    with contextlib.suppress(KeyboardInterrupt):
        write_output(path_output(next(written_paths)))
        sys.stdout.flush()
        for _ in written_paths:
            pass
    return b""


def export(
    to: Annotated[
        str,
        option(
            "TARGET",
            "lightning, transformers, accelerate, deepspeed, torch, env (for the shell), or slurm (a search job and a "
            "training job).",
        ),
    ],
    folder: Folder = None,
    out: Annotated[
        Path | None,
        option(
            "FILE", "File to write; for accelerate, a .yaml becomes the file for `accelerate launch --config_file`."
        ),
    ] = None,
    as_json: Json = False,
) -> bytes:
    """Print a recommendation as text to paste into a training script, or write it to a file and print its path.

    Only an earlier export is overwritten.
    """
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.integrations.export import accelerate_file, export_source, is_exported
    from autotune_amp.integrations.export import export as export_to_framework
    from autotune_amp.report.files import find_study_file, write_if_replaceable
    from autotune_amp.report.rows import origin_line

    path = find_study_file(folder, "recommendation.json")
    recommendation = Recommendation.load(path)
    origin = origin_line(path, recommendation)
    setting = export_source(recommendation, origin)
    is_launch_file = to == "accelerate" and out is not None and out.suffix in (".yaml", ".yml")
    if to == "slurm":
        exported_text = _slurm_jobs(recommendation, path.parent if path.parent.name else path.parent.resolve(), origin)
    else:
        exported_text = accelerate_file(setting) if is_launch_file else export_to_framework(setting, to)
    if out is not None:
        next_step = "Name another file with --out, or omit --out and paste the printed text."
        write_if_replaceable(out, exported_text.text, "export of autotune-amp's", is_exported, next_step)
    for note in exported_text.notes:
        write_message(f"Note: {note}\n")
    if as_json:
        return json_document(exported_text)
    return (exported_text.text if out is None else f"{out.as_posix()}\n").encode()


def dashboard(
    folder: Folder = None,
    storage: Annotated[
        str | None, option("URL", "Storage URL that was passed to the search, in place of a folder.")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 is any free one.", min=0, max=65535, metavar="PORT")
    ] = 8080,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    as_json: Json = False,
) -> bytes:
    """Open Optuna's dashboard of a study, until Ctrl-C.

    Only this machine can connect. Needs the extra `dashboard`.
    """
    from autotune_amp.report.dashboard import has_display, open_dashboard
    from autotune_amp.report.files import find_study_file

    with open_dashboard(storage or find_study_file(folder, "study.db"), port) as server:

        def open_browser() -> None:
            if not no_browser and has_display():
                import webbrowser

                webbrowser.open(server.url)

        return serve_until_interrupted(server, as_json, then=open_browser)


def _slurm_jobs(recommendation: Recommendation, study: Path, origin: str) -> Export:
    import msgspec

    from autotune_amp.core.command_template import to_command_line
    from autotune_amp.integrations.slurm import slurm
    from autotune_amp.search.options import SearchOptions

    target, template = recommendation.target, recommendation.command_template
    options = recommendation.options_as(SearchOptions)
    arguments = msgspec.structs.replace(options, ray=None).arguments()  # the job starts its own cluster
    arguments += ["--out", str(study.parent), "--study", study.name]
    trained = to_command_line(template) if template is not None else target and [target]
    searching = trained and [*arguments, *trained]
    training = None if template is None else template.for_training()
    on_ray = template is None and options.can_use_ray
    unfilled = () if template is None else template.unfilled_in_files()
    return slurm(
        searching,
        training,
        name=study.name,
        study=study.as_posix(),
        origin=origin,
        unfilled_in_files=unfilled,
        can_use_ray=on_ray,
    )
