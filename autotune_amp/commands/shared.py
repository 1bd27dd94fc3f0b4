"""What commands have in common."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from autotune_amp.core.errors import FormatError

if TYPE_CHECKING:
    from rich.console import Console

# What a command line asks for; returns what goes to standard output.
Work: TypeAlias = Callable[[], bytes]

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, of an error too.")]
Target = Annotated[
    str | None,
    typer.Argument(
        help="What to train: path/file.py:function or package.module:function, a function that returns a "
        "Workload. Without it, a small transformer that comes with the package.",
        metavar="TARGET",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps, xpu or xpu:N.", metavar="DEVICE")]
Folder = Annotated[
    Path | None,
    typer.Argument(
        help="A study's folder or its recommendation.json. Without it, the latest in ./studies.", metavar="FOLDER"
    ),
]


def rendered(show: Callable[[Console], None]) -> bytes:
    """What `show` prints to a console as wide and as colourful as standard output, as bytes for it."""
    from rich.console import Console

    console = Console(file=sys.stdout)
    with console.capture() as capture:
        show(console)
    # Rich fills each line with blanks up to the width of its table.
    return re.sub(r" +$", "", capture.get(), flags=re.MULTILINE).encode(console.encoding, "replace")


def recommendation_file(folder: Path | None) -> Path:
    """The recommendation that `folder` names; raises `FormatError` where there is none."""
    return latest(
        folder,
        "recommendation.json",
        missing="no recommendation.json: no search has finished there",
        next_step="Run `autotune-amp search`, or name the folder of a finished study.",
    )


def study_file(folder: Path | None) -> Path:
    """The recommendation that `folder` names, or the outcomes of a search that recommended nothing.

    Raises `FormatError` where there is neither.
    """
    return latest(
        folder,
        "recommendation.json",
        "outcomes.jsonl",
        missing="neither recommendation.json nor outcomes.jsonl: no search has run there",
        next_step="Run `autotune-amp search`, or name the folder of a study, or a run log (.jsonl).",
    )


def latest(folder: Path | None, *names: str, missing: str, next_step: str) -> Path:
    """`folder` where it is a file; or in the study that was written last, the first of these files that is there.

    None is ./studies. Raises `FormatError` where none is there, which says what is `missing`, or nothing can be read.
    """
    given = folder or Path("studies")
    try:
        if folder is not None and not folder.is_dir():
            return folder
        written: dict[Path, Path] = {}
        for name in names:
            for path in (*given.glob(f"*/{name}"), *given.glob(name)):
                written.setdefault(path.parent, path)
        found = max(written.values(), key=lambda path: path.stat().st_mtime, default=None)
    except OSError as error:
        raise FormatError(f"{given} cannot be read: {error.strerror}.", "Name a folder that you can read.") from error
    if found is None:
        raise FormatError(f"{given} holds {missing}.", next_step)
    return found
