"""Where a study is kept: the file's own connection, its URL for others, and what is said when it cannot be used."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path
from urllib.parse import quote

import sqlalchemy
from sqlalchemy.exc import ArgumentError

from autotune_amp.core.errors import StudyError


def sqlite_url(path: Path) -> str:
    """The storage URL by which others open a study's file; quoted, since '?' ends the path of a URL."""
    return f"sqlite:///{quote(str(path.resolve()))}"


def open_file(path: Path) -> sqlite3.Connection:
    """A connection that does not wait for the disk: a trial's dozen commits took 330 ms, and take 75 (measured).

    A killed process harms nothing so. Only a power failure may, and then the records make the file again.
    """
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        connection.execute("PRAGMA synchronous = OFF")
    except BaseException:
        connection.close()
        raise
    return connection


def study_error(storage: str | Path, error: BaseException) -> StudyError:
    """What went wrong with the storage in our words, its password left out."""
    what = str(getattr(error, "orig", None) or error).strip().split("\n")[0].rstrip(".") or type(error).__name__
    if isinstance(storage, Path):
        return StudyError(
            f"The study's file {storage} cannot be used: {what}.",
            "Check that its folder can be written and has space; a damaged file can be moved away, "
            "the search makes it again.",
        )
    try:
        url = sqlalchemy.make_url(storage)
    except ArgumentError:
        shown = re.sub(r"(?<=:)[^/:@][^:@]*(?=@)", "***", storage)
    else:
        shown = url.render_as_string(hide_password=True)
        what = what.replace(str(url.password), "***") if url.password else what
    return StudyError(
        f"The storage {shown} cannot be used: {what}.",
        "Check that it is there and can be written, or leave --storage out to use a file in the study's folder.",
    )
