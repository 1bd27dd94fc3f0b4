"""The same records give the same choice, and files that users have stay readable; see golden.py."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from golden import LANDSCAPES, REPLAYS, STUDY, played, ranked

from autotune_amp.core.outcome import Record
from autotune_amp.core.recommendation import Recommendation

PROSE = ("reason", "warnings", "notes", "message", "next_step", "worst_case")
SAVED = json.loads((STUDY / "recommendation.json").read_text())


def same(found: Any, saved: Any) -> None:
    """Alike in all but wording, what an older version did not write yet, and what another CPU rounds otherwise."""
    if isinstance(saved, dict):
        assert saved.keys() <= found.keys()
        for key in saved:
            if key not in PROSE:
                same(found[key], saved[key])
    elif isinstance(saved, list):
        assert len(found) == len(saved), (found, saved)
        for one, other in zip(found, saved, strict=True):
            same(one, other)
    else:
        assert found == (pytest.approx(saved, rel=1e-6) if isinstance(saved, float) else saved)


def test_a_recommendation_is_read_and_written_as_it_was() -> None:
    assert json.loads(Recommendation.load(STUDY / "recommendation.json").to_json()) == SAVED


def test_records_are_read_and_written_as_they_were() -> None:
    for line in (STUDY / "outcomes.jsonl").read_bytes().splitlines():
        same(json.loads(msgspec.json.encode(msgspec.json.decode(line, type=Record))), json.loads(line))


def test_the_records_of_a_real_search_are_ranked_alike() -> None:
    same(json.loads(ranked().to_json()), SAVED)


@pytest.mark.parametrize("name", LANDSCAPES)
def test_a_replayed_search_takes_the_same_course(name: str) -> None:
    same(json.loads(json.dumps(played(name))), json.loads(REPLAYS.read_text())[name])
