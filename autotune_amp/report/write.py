"""report.html of a study's folder: written again by a command, and kept up to date by every search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from autotune_amp.core.errors import AutotuneAmpError, FormatError, StudyError
from autotune_amp.core.recommendation import Recommendation, write_atomically
from autotune_amp.search.folder import StudyFolder

NAME = "report.html"
_OUTCOMES = "outcomes.jsonl"


def write_report(study: Path, out: Path | None = None) -> Path:
    """Draw a study as its report.html, or as the file `out`; returns that path.

    `study` is its folder, its recommendation.json, or the outcomes.jsonl of a search that recommended nothing, whose
    page holds what there is of it: failures, and what was measured. Where outcomes.jsonl is not beside the
    recommendation, the page says what it therefore lacks. Raises `FormatError` for a file that is missing, damaged or
    of a newer format, `StudyError` where the page cannot be written.
    """
    source = study
    if study.is_dir() or study.name == _OUTCOMES:
        source = source_in(study if study.is_dir() else study.parent)
    page = out or source.parent / NAME
    write_page(page, _unfinished(source) if source.name == _OUTCOMES else _finished(source), "search")
    return page


def source_in(folder: Path) -> Path:
    """What a study's report is drawn from: its recommendation, or its outcomes where only they are there."""
    recommendation, outcomes = folder / "recommendation.json", folder / _OUTCOMES
    return outcomes if outcomes.exists() and not recommendation.exists() else recommendation


def write_page(page: Path, text: str, kind: Literal["search", "run"]) -> None:
    """Write a page over an earlier one of its kind; raises `StudyError` where that cannot be or another file is there.

    The kinds are apart because a run log may be named report.jsonl.
    """
    from autotune_amp.report.page import shell

    try:
        with page.open("rb") as file:
            is_ours = shell.marker(kind).encode() in file.read(1000)
    except FileNotFoundError:
        is_ours = True
    except OSError as error:
        raise StudyError(f"{page} cannot be written: {error.strerror}.", _ELSEWHERE) from error
    if not is_ours:
        raise StudyError(
            f"{page} is there and is no report of a {'training run' if kind == 'run' else 'search'}: it is left alone.",
            _ELSEWHERE,
        )
    try:
        write_atomically(page, text)
    except StudyError as error:
        raise StudyError(error.message, _ELSEWHERE) from error


_ELSEWHERE = "Give `autotune-amp report` a file in a folder that can be written, with --out FILE.html."


def keep_report(folder: Path, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Write report.html where it is missing or older than what it is drawn from; `warn` is told what hinders that.

    The result of a search stands without it, so nothing is raised, not for Ctrl-C either. A search that ended before
    its first outcome has none.
    """
    report = folder / NAME
    try:
        source = source_in(folder)
        if source.exists() and (not report.exists() or report.stat().st_mtime_ns < source.stat().st_mtime_ns):
            write_report(folder)
            note(f"Report: {report.as_posix()}")
    except (Exception, KeyboardInterrupt) as error:
        warn(
            f"{report} was not written ({_why(error)}). `autotune-amp report {folder}` makes it, or another file with "
            "--out FILE.html."
        )


def _finished(source: Path) -> str:
    from autotune_amp.report.page.search import search_page  # plotly is imported only where something is drawn

    recommendation, folder = Recommendation.load(source), source.parent
    records = StudyFolder(str(folder.parent), folder.name).peek(recommendation.search.search_id)
    return search_page(recommendation, records, source.as_posix())


def _unfinished(source: Path) -> str:
    """The page of the last search among the outcomes."""
    from autotune_amp.report.page.unfinished import unfinished_page

    folder = source.parent
    records = StudyFolder(str(folder.parent), folder.name).peek()
    if not records:
        raise FormatError(
            f"{source} holds no outcome yet.", "Run `autotune-amp search`, or name another study's folder."
        )
    last = records[-1].search_id
    return unfinished_page(folder.resolve().name, [record for record in records if record.search_id == last])


def _why(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return error.message.rstrip(".") if isinstance(error, AutotuneAmpError) else f"{type(error).__name__}: {error}"
