"""Commands that show the results of a search: show, report, export, dashboard."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune_amp.cli.options import OBJECTIVE, Folder, Json, Price, Samples, Steps, option, result
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.report.output import emit, json_document, tell

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
    """Print a finished recommendation again, ranked again where an option asks for it.

    Nothing is run and nothing is saved.
    """
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.report.files import latest

    path = latest(folder, "recommendation.json")
    recommendation = Recommendation.load(path)
    if any(given is not None for given in (objective, steps, samples, price_per_hour)):
        from autotune_amp.search.answer.decide import rerank_with_options
        from autotune_amp.search.options import SearchOptions

        recommendation.options_as(SearchOptions)  # raises if they are damaged
        recommendation = rerank_with_options(recommendation, path, objective, steps, samples, price_per_hour)
    return result(recommendation, as_json, path)


def report(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A study's folder, or the run log (.jsonl) of a PrecisionController. Without it, the latest study.",
            metavar="FOLDER|RUN.jsonl",
        ),
    ] = None,
    out: Annotated[
        Path | None, option("FILE", "Write this file in place of the study's report.html or the log's .html.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Of a run log: draw it again as it grows, until Ctrl-C.")
    ] = False,
    as_json: Json = False,
) -> bytes:
    """Draw a search, or a training's run log, as one HTML file, and print its path.

    A search that recommended nothing is drawn too, with what failed. A page is written over an earlier one of its kind
    and over no other file.
    """
    from autotune_amp.report.files import OUTCOMES, follow_run, latest, write_report, write_run_report

    def said(written: Path) -> bytes:
        document = {"format": 1, "report": written.as_posix()}
        return json_document(document) if as_json else f"{written.as_posix()}\n".encode()

    # The log of a controller may have any name.
    log = None if path is None or path.is_dir() or path.suffix == ".json" or path.name == OUTCOMES else path
    if not follow:
        if log is not None:
            return said(write_run_report(log, out))
        return said(write_report(latest(path, "recommendation.json", OUTCOMES), out))
    if log is None:
        raise InvalidRequestError(
            f"--follow needs the run log of a training, and {path or 'the latest study'} is none.",
            'Name the file that PrecisionController(config, run_log="run.jsonl") writes, or will write.',
        )
    if not as_json:
        tell(f"Following {log}. Ctrl-C ends it.\n")
    drawn = follow_run(log, out)
    with contextlib.suppress(KeyboardInterrupt):
        emit(said(next(drawn)))
        sys.stdout.flush()
        for _ in drawn:
            pass
    return b""


def export(
    to: Annotated[
        str,
        option(
            "TARGET",
            "lightning, transformers, accelerate, deepspeed, torch, env for the shell, or slurm: two jobs, a search "
            "and the training after it.",
        ),
    ],
    folder: Folder = None,
    out: Annotated[
        Path | None,
        option("FILE", "Write it here; of accelerate, a .yaml is the file of `accelerate launch --config_file`."),
    ] = None,
    as_json: Json = False,
) -> bytes:
    """Print a recommendation as text to paste into a training script, or write it to a file and print its path.

    A file is written over an earlier export and over no other file.
    """
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.integrations.export import accelerate_file, is_exported, setting_of
    from autotune_amp.integrations.export import export as exported
    from autotune_amp.report.files import latest, write_over
    from autotune_amp.report.rows import origin_line

    path = latest(folder, "recommendation.json")
    recommendation = Recommendation.load(path)
    origin = origin_line(path, recommendation)
    setting = setting_of(recommendation, origin)
    is_launch_file = to == "accelerate" and out is not None and out.suffix in (".yaml", ".yml")
    if to == "slurm":
        made = _slurm_jobs(recommendation, path.parent if path.parent.name else path.parent.resolve(), origin)
    else:
        made = accelerate_file(setting) if is_launch_file else exported(setting, to)
    if out is not None:
        elsewhere = "Name another file with --out, or leave --out away and paste what is printed."
        write_over(out, made.text, "export of autotune-amp's", is_exported, elsewhere)
    for note in made.notes:
        tell(f"Note: {note}\n")
    if as_json:
        return json_document(made)
    return (made.text if out is None else f"{out.as_posix()}\n").encode()


def dashboard(
    folder: Folder = None,
    storage: Annotated[str | None, option("URL", "The storage that the search was given, not a folder.")] = None,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 is any free one.", min=0, max=65535, metavar="PORT")
    ] = 8080,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    as_json: Json = False,
) -> bytes:
    """Open Optuna's dashboard on a study, until Ctrl-C.

    It listens on this machine only. Needs the extra `dashboard`.
    """
    from autotune_amp.report.dashboard import has_display, serving
    from autotune_amp.report.files import latest

    with serving(storage or latest(folder, "study.db"), port) as server:
        emit((json.dumps({"format": 1, "url": server.url}) if as_json else server.url).encode() + b"\n")
        if not as_json:
            tell("Ctrl-C ends it.\n")
        if not no_browser and has_display():
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return b""
    return b""


def _slurm_jobs(recommendation: Recommendation, study: Path, origin: str) -> Export:
    import msgspec

    from autotune_amp.core.command_template import to_command_line
    from autotune_amp.integrations.slurm import slurm
    from autotune_amp.search.options import SearchOptions

    target, line = recommendation.target, recommendation.command_template
    options = recommendation.options_as(SearchOptions)
    asked = msgspec.structs.replace(options, ray=None).arguments()  # the address is not of the job's own cluster
    asked += ["--out", str(study.parent), "--study", study.name]
    what = to_command_line(line) if line is not None else target and [target]
    searching = what and [*asked, *what]
    training = None if line is None else line.arguments
    on_ray = line is None and options.can_use_ray
    return slurm(searching, training, name=study.name, study=study.as_posix(), origin=origin, can_use_ray=on_ray)
