"""Folder of a search: its lock, its log of records, its recommendation. Files are read as data, never executed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from autotune_amp.core.documents import Integer, cause, decode, open_regular, read_file
from autotune_amp.core.errors import FormatError, StudyBusyError, StudyError
from autotune_amp.core.outcome import Record
from autotune_amp.core.recommendation import Fingerprint, Recommendation, write_atomically

if TYPE_CHECKING:
    import filelock

RECORD_FORMAT = 1
_LOCK = ".lock"


class _Format(msgspec.Struct):
    """Format number of a line, read before anything else in case the format is newer."""

    format: Integer = RECORD_FORMAT


class StudyFolder:
    """Folder `out`/`name`, created if missing and locked while it is used as a context manager.

    Raises `StudyError` if the folder cannot be created, written or locked, `StudyBusyError` if another search holds it,
    and `FormatError` for a damaged or newer file.
    """

    def __init__(self, out: str, name: str) -> None:
        self.path = Path(out) / name
        self.recommendation_path = self.path / "recommendation.json"
        self._outcomes_path = self.path / "outcomes.jsonl"
        self._lock: filelock.BaseFileLock | None = None
        self._is_new = False

    def cached(self) -> Recommendation | None:
        """Return the recommendation in this folder, or None. Raises `StudyError` if the folder may not be entered."""
        try:
            exists = self.recommendation_path.exists()
        except OSError as error:
            raise self._unusable(error) from error
        return Recommendation.load(self.recommendation_path) if exists else None

    def _unusable(self, error: OSError | ValueError) -> StudyError:
        return StudyError(
            f"The study folder {self.path} cannot be used: {getattr(error, 'filename', None) or self.path}: "
            f"{cause(error)}.",
            "Fix its permissions, or search in another with --out.",
        )

    def __enter__(self) -> StudyFolder:
        import filelock  # imported late: a cached recommendation must take less than 50 ms

        try:
            self._is_new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.path).close()
            self._lock = filelock.FileLock(self.path / _LOCK)
            self._lock.acquire(blocking=False)
            for half_written in (*self.path.glob(".recommendation.json.*"), *self.path.glob(".report.html.*")):
                half_written.unlink()  # left by a process killed before renaming it; the lock excludes other writers
            if self._outcomes_path.exists():
                whole, newline, _ = read_file(self._outcomes_path).rpartition(b"\n")
                # Remove a last line that a killed process left incomplete.
                os.truncate(self._outcomes_path, len(whole + newline))
        except filelock.Timeout as error:
            raise StudyBusyError(
                f"Another search is running in {self.path}.",
                "Wait until it ends, or search under another name with --study.",
            ) from error
        except (OSError, ValueError) as error:  # the latter for a NUL in the path
            raise self._unusable(error) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        with suppress(OSError):  # somebody may have deleted the folder
            # Leave no new folder behind if nothing was saved, for instance for a misspelt name.
            if self._is_new and [path.name for path in self.path.iterdir()] == [_LOCK]:
                shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self._lock.release()

    def search_id(self, fingerprint: Fingerprint, *, is_fresh: bool) -> str:
        """Return the ID of the last search with this fingerprint, to resume it, or a new ID if `is_fresh`.

        It is also new if that search has ended and parts are unknown, since these may have changed.
        """
        prefix, numbers = self._searches_of(fingerprint)
        last = f"{prefix}{max(numbers, default=1)}"
        cached = self.cached() if fingerprint.unknown else None
        has_ended = cached is not None and cached.search.search_id == last and not cached.search.was_interrupted
        return f"{prefix}{max(numbers, default=0) + 1}" if is_fresh or has_ended else last

    def has_later_search(self, cached: Recommendation) -> bool:
        """Return whether a search with the fingerprint of `cached` was begun after it, which `--fresh` does."""
        prefix, numbers = self._searches_of(cached.fingerprint)
        number = cached.search.search_id.removeprefix(prefix)
        return number.isdecimal() and max(numbers, default=0) > int(number)

    def _searches_of(self, fingerprint: Fingerprint) -> tuple[str, list[int]]:
        """Return what the IDs of searches with this fingerprint begin with, and the number in each record's ID."""
        prefix = f"{fingerprint.digest[:12]}-"
        # By their text alone, so that a damaged record does not hide a recommendation.
        id_pattern = rf'"search_id":\s*"{re.escape(prefix)}([0-9]{{1,9}})"'
        return prefix, [int(number) for number in re.findall(id_pattern.encode(), self._read_outcomes())]

    def records(self, search_id: str | None = None) -> list[Record]:
        """Return the records of one search, or of all if `search_id` is None, without an incomplete last line."""
        lines = self._read_outcomes().splitlines()
        records = [self._record(line, number) for number, line in enumerate(lines, start=1)]
        return [r for r in records if search_id is None or r.search_id == search_id]

    def _read_outcomes(self) -> bytes:
        """Return the text of outcomes.jsonl without an incomplete last line; empty without that file."""
        try:
            return read_file(self._outcomes_path).rpartition(b"\n")[0]
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise FormatError(
                f"{self._outcomes_path} cannot be read: {cause(error)}.",
                "Move it away, or give this search another name with --study.",
            ) from error

    def _record(self, line: bytes, number: int) -> Record:
        location = f"{self._outcomes_path} line {number}"
        try:
            line_format = decode(line, _Format).format
            if line_format > RECORD_FORMAT:
                raise FormatError(
                    f"{location} has format {line_format}; this version reads up to {RECORD_FORMAT}.",
                    "Upgrade autotune_amp, or give this search another name with --study.",
                )
            return decode(line, Record)
        except msgspec.MsgspecError as error:
            raise FormatError(
                f"{location} is damaged: {error}.", "Remove that line, or give this search another name with --study."
            ) from error

    def append(self, record: Record) -> None:
        """Append a record and wait for the disk, so that a kill loses at most the running trial."""
        try:
            with open(self._outcomes_path, "ab", opener=open_regular) as file:
                file.write(msgspec.json.encode(record) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StudyError(
                f"{self._outcomes_path} cannot be written: {cause(error)}.",
                "Free some space, or choose another folder with --out; the existing records stay valid.",
            ) from error

    def save(self, recommendation: Recommendation) -> Recommendation:
        """Write recommendation.json atomically, and a command's settings files. Return the saved recommendation."""
        if recommendation.command_template is not None:
            _, command = recommendation.recommended_command(self.path)
            _, files = recommendation.filled_command(self.path)
            recommendation = msgspec.structs.replace(recommendation, command=command)
            for path, text in files.items():
                write_atomically(Path(path), text)
        fingerprint = msgspec.structs.replace(recommendation.fingerprint, files={})
        recommendation = msgspec.structs.replace(recommendation, fingerprint=fingerprint)
        recommendation.save(self.recommendation_path)
        return recommendation
