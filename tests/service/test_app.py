"""Streams of a search's events, as a client follows them that loses its connection and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune_amp.service.app import _events
from autotune_amp.service.jobs import Queue, Search
from autotune_amp.service.searching import SearchEvents, SearchThread
from autotune_amp.service.settings import Settings

ID = "0" * 32
TRIAL = '{"event": "trial"}\n'


@pytest.fixture
def searches(tmp_path: Path) -> Iterator[SearchThread]:
    """The thread of a search that is over, and was done once."""
    queue = Queue(f"sqlite:///{tmp_path / 'queue.db'}", "test", max_queued=1)
    queue.submit(Search(id=ID, target="mlp", options={}, callers=("ann",)))
    queue.change(ID, state="ended", ended=1.0, repetition=1)
    yield SearchThread(Settings(folder=str(tmp_path), targets={}), queue)
    queue.close()


def follow(searches: SearchThread, repetition: int, first: int) -> list[str]:
    """The first line of each event, from a number of a repetition on."""

    async def take() -> list[str]:
        text = b"".join([part async for part in _events(searches, ID, repetition, first)]).decode()
        return [event.splitlines()[0] for event in text.split("\n\n") if event]

    return asyncio.run(take())


def test_a_client_that_comes_back_misses_no_event(searches: SearchThread, tmp_path: Path) -> None:
    file = tmp_path / f"searches/{ID}.1.events.jsonl"
    file.write_text(2 * TRIAL)
    assert follow(searches, 0, 0) == ["id: 1-0", "id: 1-1", "event: end"], "so that the last one it has is 1"
    file.write_text(4 * TRIAL)
    assert follow(searches, 1, 2) == ["id: 1-2", "id: 1-3", "event: end"]
    file.rename(tmp_path / f"searches/{ID}.2.events.jsonl")
    assert follow(searches, 1, 3)[0] == "id: 2-0", "all events of the search that was begun again"
    assert follow(searches, 3, 1) == ["event: end"], "whose repetition, which made no trial, the client has seen"


def test_events_that_come_while_others_are_sent_are_not_lost(searches: SearchThread, tmp_path: Path) -> None:
    running = SearchEvents(tmp_path / "events.jsonl", 1)
    searches._events[ID] = running
    running.path.write_text(TRIAL)
    running.read()

    async def take() -> list[bytes]:
        stream = _events(searches, ID, 0, 0)
        searches.queue.change(ID, state="running")
        parts = [await anext(stream)]
        running.path.write_text(2 * TRIAL)
        running.read()
        return [*parts, await anext(stream)]

    first, second = asyncio.run(take())
    assert (first[:7], second[:7]) == (b"id: 1-0", b"id: 1-1")
