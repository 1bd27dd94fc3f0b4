"""`autotune-amp dashboard`: Optuna's own dashboard on a study."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune_amp.commands.shared import Json, Work, latest


def dashboard(
    folder: Annotated[
        Path | None,
        typer.Argument(help="A study's folder or its study.db. Without it, the latest in ./studies.", metavar="FOLDER"),
    ] = None,
    storage: Annotated[
        str | None, typer.Option(help="The storage that the search was given, instead of a folder.", metavar="URL")
    ] = None,
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 is any free one.", min=0, max=65535, metavar="PORT")
    ] = 8080,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
    as_json: Json = False,
) -> Work:
    """Open Optuna's dashboard on a study, until Ctrl-C.

    It listens on this machine only. Needs the extra `dashboard`.
    """

    def work() -> bytes:
        from autotune_amp.report.dashboard import dashboard as served

        with served(storage or study_database(folder), port) as server:
            typer.echo(f'{{"format": 1, "url": "{server.url}"}}' if as_json else server.url)
            if not as_json:
                typer.echo("Ctrl-C ends it.", err=True)
            if not no_browser and has_display():
                import webbrowser

                webbrowser.open(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                return b""
        return b""

    return work


def study_database(folder: Path | None) -> Path:
    """The study.db that `folder` names; raises `FormatError` where there is none."""
    return latest(
        folder,
        "study.db",
        missing="no study.db",
        next_step="Run `autotune-amp search`, name a study's folder, or give the --storage that the search was given.",
    )


def has_display() -> bool:
    """Whether a browser would open a window: in a terminal alone it would take the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))
