"""Events of a running search as a file of JSON lines, which other programs follow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from autotune_amp.core.documents import cause, open_regular
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import Measurement, Record
from autotune_amp.core.text import one_line
from autotune_amp.report.rows import outcome_line
from autotune_amp.search.progress import Progress


class EventLog(Progress):
    """Progress that appends a line to a file for each phase, trial, best so far, and note.

    Every line is an object with `event` (its kind), `time` (seconds since 1970) and the fields of that kind. Use it as
    a context manager, which closes the file. Raises `InvalidRequestError` if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = open(path, "ab", buffering=0, opener=open_regular)  # noqa: SIM115 - closed by the context
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"--events {path} cannot be written: {cause(error)}.", "Name a new file in a folder that exists."
            ) from error
        self._best: Record | None = None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def phase(self, text: str) -> None:
        """Append the phase."""
        self._append("phase", {"text": text})

    def note(self, text: str) -> None:
        """Append the note."""
        self._append("note", {"text": one_line(text)})

    def trial_ended(self, record: Record, best: Record | None) -> None:
        """Append the outcome of a trial or check, and the fastest trial if it is another one than before."""
        self._append("trial", {"number": record.number, "purpose": record.purpose, **_outcome(record)})
        if best is not None and best != self._best:
            self._best = best
            self._append("best", _outcome(best))

    def _append(self, event: str, fields: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the search goes on when the disk is full
            self._file.write(msgspec.json.encode({"event": event, "time": time.time(), **fields}) + b"\n")


def _outcome(record: Record) -> dict[str, Any]:
    """Return the setting, the numbers of a measurement, and the outcome in words."""
    outcome = record.outcome
    numbers = {}
    if isinstance(outcome, Measurement):
        numbers = {
            "samples_per_second": outcome.samples_per_second,
            "step_seconds": outcome.step_seconds,
            "peak_memory_bytes": outcome.peak_memory_bytes,
        }
    return {"setting": str(record.candidate), **numbers, "outcome": outcome_line(outcome)}
