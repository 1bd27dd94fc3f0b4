"""`--events`: what a search does as lines of JSON, which other programs follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from autotune_amp.core.documents import decode
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.outcome import Failure, Measurement, Record
from autotune_amp.report.events import EventLog

OUTCOMES = Path(__file__).parents[1] / "golden/study/outcomes.jsonl"


def test_each_phase_trial_best_and_note_is_a_line(tmp_path: Path) -> None:
    records = [decode(line, Record) for line in OUTCOMES.read_text().splitlines()]
    measured = next(record for record in records if isinstance(record.outcome, Measurement))
    failed = replace(measured, number=99, outcome=Failure(kind="oom", message="no\nroom"))
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "before"}\n')
    with EventLog(path) as log:
        log.phase("searching")
        log.trial_ended(measured, measured)
        log.trial_ended(failed, measured)
        log.note("two\nlines")
        lines = [json.loads(line) for line in path.read_text().splitlines()]  # at once, for those who follow it
    assert [line["event"] for line in lines] == ["before", "phase", "trial", "best", "trial", "note"]
    _, phase, trial, best, failure, note = lines
    assert (phase["text"], note["text"]) == ("searching", "two lines")
    assert isinstance(measured.outcome, Measurement)
    assert best["setting"] == trial["setting"] == str(measured.candidate)
    assert best["samples_per_second"] == trial["samples_per_second"] == measured.outcome.samples_per_second
    assert (failure["number"], "samples_per_second" in failure) == (99, False)
    assert "no room" in failure["outcome"]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none/events.jsonl"):
        with pytest.raises(InvalidRequestError, match="--events"):
            EventLog(path)
