"""Files of studies: find the newest one, write reports without overwriting other files, and keep them up to date."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune_amp.core.documents import cause, read_file
from autotune_amp.core.errors import AutotuneAmpError, FormatError, StudyError
from autotune_amp.core.recommendation import Recommendation, write_atomically
from autotune_amp.search.storage.folder import StudyFolder

REPORT, OUTCOMES = "report.html", "outcomes.jsonl"
RELOAD_SECONDS = 5  # between two reads of a training run's log, and two reloads of its page
_OTHER_FOLDER = "Name a file that can be written: `autotune-amp report --out FILE.html`."


def find_study_file(folder: Path | None, *names: str) -> Path:
    """Return the newest study's file: of each study the first of `names` that exists. Return `folder` if it is a file.

    `folder` is a study or a folder of studies; None is ./studies. Raises `FormatError` if there is no such file or
    the folder cannot be read.
    """
    searched_folder = folder or Path("studies")
    try:
        if folder is not None and not folder.is_dir():
            return folder
        candidates: dict[Path, Path] = {}
        for name in names:
            for path in (*searched_folder.glob(f"*/{name}"), *searched_folder.glob(name)):
                candidates.setdefault(path.parent, path)
        newest = max(candidates.values(), key=lambda path: path.stat().st_mtime, default=None)
    except OSError as error:
        raise FormatError(
            f"{searched_folder} cannot be read: {error.strerror}.", "Name a folder that you can read."
        ) from error
    if newest is None:
        raise FormatError(
            f"{searched_folder} holds no {' and no '.join(names)}: no search has written one.",
            "Run `autotune-amp search`, or name a study's folder; see --help.",
        )
    return newest


def write_if_replaceable(
    path: Path, text: str, expected: str, is_replaceable: Callable[[str], bool], elsewhere: str
) -> None:
    """Write a file; overwrite an existing one only if `is_replaceable` accepts its text.

    Raises `StudyError` if the file cannot be written or must not be overwritten. `expected` is the error's name for
    files that may be overwritten, `elsewhere` its next step.
    """
    try:
        can_write = is_replaceable(read_file(path).decode(errors="replace"))
    except FileNotFoundError:
        can_write = True
    except OSError as error:
        raise StudyError(f"{path} cannot be written: {cause(error)}.", elsewhere) from error
    if not can_write:
        raise StudyError(f"{path} exists and is no {expected}: it was not overwritten.", elsewhere)
    try:
        write_atomically(path, text)
    except StudyError as error:
        raise StudyError(error.message, elsewhere) from error


def write_report(study: Path, out: Path | None = None) -> Path:
    """Draw a study as its report.html, or as the file `out`; return the path of that file.

    `study` is the study's folder, its recommendation.json, or the outcomes.jsonl of a search that recommended nothing,
    whose page shows its failures and measurements. Without an outcomes.jsonl beside the recommendation, the page lists
    the charts that it lacks.

    Raises `FormatError` for a file that is missing, damaged or of a newer format, `StudyError` if the page cannot be
    written.
    """
    source = study
    if study.is_dir() or study.name == OUTCOMES:
        source = _report_source(study if study.is_dir() else study.parent)
    return _write_page(out or source.parent / REPORT, _search_page_html(source), "search", "report of a search")


def write_run_report(log: Path, out: Path | None = None, reload_seconds: int | None = None) -> Path:
    """Draw the last run in a controller's log as the file `out`, or beside the log with the suffix .html.

    Returns the path of the page, which a browser reloads every `reload_seconds`. Raises `FormatError` if `log` is no
    run log, is damaged or of a newer format, `StudyError` if the page cannot be written.
    """
    from autotune_amp.report.run_page import run_page
    from autotune_amp.runtime.run_log import read

    page = run_page(read(log), log.name, reload_seconds)
    return _write_page(out or log.with_suffix(".html"), page, "run", "report of a training run")


def follow_run(log: Path, out: Path | None = None, pause: Callable[[float], object] = time.sleep) -> Iterator[Path]:
    """Call `write_run_report` once the log has contents and each time it has grown; yield the page's path each time.

    At the end the page is written once more, without reloading.
    """
    drawn_bytes = 0
    try:
        while True:
            log_bytes = log.stat().st_size if log.exists() else 0
            is_no_file = log.exists() and not log.is_file()  # for which write_run_report raises
            if log_bytes not in (0, drawn_bytes) or is_no_file:
                drawn_bytes = log_bytes
                yield write_run_report(log, out, RELOAD_SECONDS)
            pause(RELOAD_SECONDS)
    finally:
        if drawn_bytes and log.exists():
            write_run_report(log, out)


def update_report(folder: Path, note: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Write report.html if it is missing or older than its source file; pass the reason to `warn` if that fails.

    Nothing is raised, not even at Ctrl-C, since the result of a search is complete without a report. A search that
    ended before its first outcome gets no report.
    """
    report = folder / REPORT
    try:
        source = _report_source(folder)
        if source.exists() and (not report.exists() or report.stat().st_mtime_ns < source.stat().st_mtime_ns):
            write_report(folder)
            note(f"Report: {report.as_posix()}")
    except (Exception, KeyboardInterrupt) as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
        if isinstance(error, AutotuneAmpError):
            why = error.message.rstrip(".")
        warn(f"{report} was not written ({why}). Run `autotune-amp report {folder}`, or add --out FILE.html.")


def _report_source(folder: Path) -> Path:
    """Return the source of a study's report: its recommendation.json, or outcomes.jsonl if only that exists."""
    recommendation, outcomes = folder / "recommendation.json", folder / OUTCOMES
    return outcomes if outcomes.exists() and not recommendation.exists() else recommendation


def _write_page(page: Path, text: str, kind: str, expected: str) -> Path:
    """Write a page, over an existing file only if that is a page of the same kind.

    A run log named report.jsonl has a report.html too, which must not replace that of a search.
    """
    from autotune_amp.report.document import marker

    write_if_replaceable(page, text, expected, lambda existing: marker(kind) in existing[:1000], _OTHER_FOLDER)
    return page


def _search_page_html(source: Path) -> str:
    """Return the HTML of a recommendation.json, or of the last search in an outcomes.jsonl."""
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
