"""Files of studies: the one that is meant, what may be written over, and report.html, kept up to date."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune_amp.core.documents import cause, read_file
from autotune_amp.core.errors import AutotuneAmpError, FormatError, StudyError
from autotune_amp.core.recommendation import Recommendation, write_atomically
from autotune_amp.search.storage.folder import StudyFolder

NAME, OUTCOMES = "report.html", "outcomes.jsonl"
RELOAD_SECONDS = 5  # of a page that follows a run
_ELSEWHERE = "Give `autotune-amp report` a file in a folder that can be written, with --out FILE.html."


def latest(folder: Path | None, *names: str) -> Path:
    """`folder` where it is a file; or in the study that was written last, the first of these files that is there.

    None is ./studies. Raises `FormatError` where none is there or nothing can be read.
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
        raise FormatError(
            f"{given} holds no {' and no '.join(names)}: no search has left it there.",
            "Run `autotune-amp search`, or name a study's folder; --help says what else is taken.",
        )
    return found


def write_over(path: Path, text: str, what: str, is_ours: Callable[[str], bool], elsewhere: str) -> None:
    """Write a file, over another only where that `is_ours`: `what` names such a one, `elsewhere` is the way out.

    Raises `StudyError` where it cannot be written or another file is there.
    """
    try:
        is_free = is_ours(read_file(path).decode(errors="replace"))
    except FileNotFoundError:
        is_free = True
    except OSError as error:
        raise StudyError(f"{path} cannot be written: {cause(error)}.", elsewhere) from error
    if not is_free:
        raise StudyError(f"{path} is there and is no {what}: it is left alone.", elsewhere)
    try:
        write_atomically(path, text)
    except StudyError as error:
        raise StudyError(error.message, elsewhere) from error


def write_report(study: Path, out: Path | None = None) -> Path:
    """Draw a study as its report.html, or as the file `out`; returns that path.

    `study` is its folder, its recommendation.json, or the outcomes.jsonl of a search that recommended nothing, whose
    page holds what there is of it: failures, and what was measured. Where outcomes.jsonl is not beside the
    recommendation, the page says what it therefore lacks. Raises `FormatError` for a file that is missing, damaged or
    of a newer format, `StudyError` where the page cannot be written.
    """
    source = study
    if study.is_dir() or study.name == OUTCOMES:
        source = _source_in(study if study.is_dir() else study.parent)
    return _write_page(out or source.parent / NAME, _drawn(source), "search", "report of a search")


def write_run_report(log: Path, out: Path | None = None, reload_seconds: int | None = None) -> Path:
    """Draw the last run in a controller's log as the file `out`, or beside it with a name that ends in .html.

    Returns the page's path; a browser loads it again every `reload_seconds`. Raises `FormatError` for what is no run
    log, damaged or of a newer format, `StudyError` where the page cannot be written.
    """
    from autotune_amp.report.run_page import run_page
    from autotune_amp.runtime.run_log import read

    page = run_page(read(log), log.name, reload_seconds)
    return _write_page(out or log.with_suffix(".html"), page, "run", "report of a training run")


def follow_run(log: Path, out: Path | None = None, pause: Callable[[float], object] = time.sleep) -> Iterator[Path]:
    """`write_run_report` once the log holds a run and whenever it has grown, each time with the page's path; once more
    at the end, as a page that stays."""
    drawn = 0
    try:
        while True:
            size = log.stat().st_size if log.exists() else 0
            if size not in (0, drawn) or (log.exists() and not log.is_file()):  # which is said
                drawn = size
                yield write_run_report(log, out, RELOAD_SECONDS)
            pause(RELOAD_SECONDS)
    finally:
        if drawn and log.exists():
            write_run_report(log, out)


def keep_report(folder: Path, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Write report.html where it is missing or older than what it is drawn from; `warn` is told what hinders that.

    The result of a search stands without it, so nothing is raised, not for Ctrl-C either. A search that ended before
    its first outcome has none.
    """
    report = folder / NAME
    try:
        source = _source_in(folder)
        if source.exists() and (not report.exists() or report.stat().st_mtime_ns < source.stat().st_mtime_ns):
            write_report(folder)
            note(f"Report: {report.as_posix()}")
    except (Exception, KeyboardInterrupt) as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        if isinstance(error, AutotuneAmpError):
            why = error.message.rstrip(".")
        warn(
            f"{report} was not written ({why}). `autotune-amp report {folder}` makes it, or another file with "
            "--out FILE.html."
        )


def _source_in(folder: Path) -> Path:
    """What a study's report is drawn from."""
    recommendation, outcomes = folder / "recommendation.json", folder / OUTCOMES
    return outcomes if outcomes.exists() and not recommendation.exists() else recommendation


def _write_page(page: Path, text: str, kind: str, what: str) -> Path:
    """Over an earlier page of its kind: they are apart because a run log may be named report.jsonl."""
    from autotune_amp.report.document import marker

    write_over(page, text, what, lambda found: marker(kind) in found[:1000], _ELSEWHERE)
    return page


def _drawn(source: Path) -> str:
    """The page of a recommendation, or of the last search among outcomes without one."""
    from autotune_amp.report.search_page import search_page, unfinished_page  # plotly is imported only for these

    folder = StudyFolder(str(source.parent.parent), source.parent.name)
    if source.name != OUTCOMES:
        recommendation = Recommendation.load(source)
        return search_page(recommendation, folder.records(recommendation.search.search_id), source.as_posix())
    records = folder.records()
    if not records:
        raise FormatError(f"{source} holds no outcome yet.", "Run `autotune-amp search`, or name another study.")
    last = [record for record in records if record.search_id == records[-1].search_id]
    return unfinished_page(source.parent.resolve().name, last)
