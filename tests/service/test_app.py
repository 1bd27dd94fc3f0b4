"""Streams of a search's events, as a client follows them that loses its connection and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune_amp.service.app import _events
from autotune_amp.service.jobs import Queue, Search
from autotune_amp.service.searching import SearchThread
from autotune_amp.service.settings import Settings

ID = "0" * 32
Follow = Callable[[int], list[str]]


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Follow]:
    """The first line of each event of an ended search, from a number on."""
    queue = Queue(f"sqlite:///{tmp_path / 'queue.db'}", "test", max_queued=1)
    searches = SearchThread(Settings(folder=str(tmp_path), targets={}), queue)
    queue.submit(Search(id=ID, target="mlp", options={}, callers=("ann",)))
    queue.change(ID, state="ended", ended=1.0)

    async def take(first: int) -> list[str]:
        text = b"".join([part async for part in _events(searches, ID, first)]).decode()
        return [event.splitlines()[0] for event in text.split("\n\n") if event]

    yield lambda first: asyncio.run(take(first))
    queue.close()


def test_a_client_that_comes_back_misses_no_event(follow: Follow, tmp_path: Path) -> None:
    file = tmp_path / f"searches/{ID}.events.jsonl"
    file.write_text('{"event": "trial"}\n' * 2)
    assert follow(0) == ["id: 0", "id: 1", "event: end"], "so that the last one it has is 1"
    file.write_text('{"event": "trial"}\n' * 4)
    assert follow(2) == ["id: 2", "id: 3", "event: end"]
    file.write_text('{"event": "trial"}\n')
    assert follow(4) == ["id: 0", "event: end"], "of the search that was begun again"
