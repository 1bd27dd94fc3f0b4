"""`autotune-amp report`: a search, or a training's run log, as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune_amp.commands.shared import Json, Work, study_file


def report(
    path: Annotated[
        Path | None,
        typer.Argument(
            help="A study's folder, or the run log (.jsonl) of a PrecisionController. Without it, the latest study in "
            "./studies.",
            metavar="FOLDER|RUN.jsonl",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write this file instead of the study's report.html, or of the log's name with .html.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Json = False,
) -> Work:
    """Draw a search, or a training's run log, as one HTML file, and print its path.

    A search that recommended nothing is drawn too, with what failed. A page is written over an earlier one of its kind
    and over no other file.
    """

    def work() -> bytes:
        if path is not None and _is_run_log(path):
            from autotune_amp.report.page.run_log import write_run_report

            written = write_run_report(path, out)
        else:
            from autotune_amp.report.write import write_report

            written = write_report(study_file(path), out)
        if as_json:
            import msgspec

            return msgspec.json.encode({"format": 1, "report": written.as_posix()}) + b"\n"
        return f"{written.as_posix()}\n".encode()

    return work


def _is_run_log(path: Path) -> bool:
    """Any file that is not one of a study's: the controller writes its log to whatever name it is given."""
    is_of_a_study = path.suffix == ".json" or path.name == "outcomes.jsonl"
    return not is_of_a_study and (path.is_file() or (path.suffix == ".jsonl" and not path.is_dir()))
