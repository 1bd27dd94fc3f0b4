"""The queue: equal requests are one search, and what is queued outlives the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import postgresql
import pytest
from msgspec.structs import replace
from sqlalchemy.exc import OperationalError

from autotune_amp.core.errors import StudyError
from autotune_amp.search.options import SearchOptions
from autotune_amp.service import jobs
from autotune_amp.service.jobs import ForbiddenError, Queue, QueueFullError, Search, search_id, study_name
from autotune_amp.service.server import open_service
from autotune_amp.service.settings import Settings, Target

Open = Callable[..., Queue]
MLP = Target(workload="train.py:mlp")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    queues = []

    def open_queue(service: str = "here", max_queued: int = 3) -> Queue:
        queues.append(Queue(f"sqlite:///{tmp_path / 'queue.db'}", service, max_queued))
        return queues[-1]

    yield open_queue
    for queue in queues:
        queue.close()


def asked(number: int, *callers: str, created: float | None = None) -> Search:
    return Search(
        id=f"{number:032x}", target="mlp", options={"seed": number}, callers=callers, created=created or number
    )


def test_equal_requests_have_one_id_and_equal_measurements_one_study() -> None:
    plain, other, ranked = (SearchOptions.from_user(**o) for o in ({}, {"seed": 1}, {"objective": "memory"}))
    assert search_id(MLP, plain) == search_id(MLP, SearchOptions.from_user(budget=600))
    ids = [
        search_id(MLP, plain),
        search_id(MLP, other),
        search_id(MLP, ranked),
        search_id(replace(MLP, budget=9), plain),
    ]
    assert len(set(ids)) == 4
    assert {len(id_) for id_ in ids} == {32}
    assert study_name("mlp", MLP, plain) == study_name("mlp", MLP, ranked) != study_name("mlp", MLP, other)
    assert study_name("mlp", MLP, plain).startswith("mlp-")


def test_an_equal_request_joins_and_one_that_is_done_is_queued_again(opened: Open) -> None:
    queue = opened(max_queued=2)
    queue.submit(asked(1, "ann"))
    queue.submit(asked(2, "ann"))
    assert queue.submit(asked(1, "ben")).callers == ("ann", "ben")
    done = queue.change(asked(1).id, state="done", ended=9.0, measured=9.0)
    queue.submit(asked(3, "ann"))
    with pytest.raises(QueueFullError):
        queue.submit(asked(1, "cid", created=20))
    assert queue.searches[done.id] == done
    queue.change(asked(3).id, state="failed", ended=10.0)
    again = queue.submit(asked(1, "cid", created=20))
    assert (again.state, again.callers, again.created, again.measured) == ("queued", ("cid",), 1, 9.0)
    assert queue.submit(replace(asked(1, "cid"), is_fresh=True)).is_fresh
    assert [search.id for search in queue.waiting()] == [asked(1).id, asked(2).id]
    assert queue.withdraw(again, "cid").state == "done", "as before"


def test_what_is_queued_outlives_the_service_and_each_has_its_own(opened: Open) -> None:
    first = opened()
    for number in (2, 1):
        first.submit(asked(number, "ann"))
    first.change(asked(2).id, state="running", started=3.0)
    opened("there").submit(asked(3, "ben"))
    assert list(opened().searches.values()) == [asked(1, "ann"), replace(asked(2, "ann"), state="running", started=3.0)]
    assert list(opened("there").searches) == [asked(3).id]


def test_a_service_with_a_name_finds_its_queue_on_any_host(opened: Open, tmp_path: Path) -> None:
    queue = opened("lab")
    queue.submit(asked(1, "ann"))
    queue.change(asked(1).id, state="done", ended=9.0)
    for name, found in (("lab", [asked(1).id]), (None, [])):
        settings = Settings(targets={}, port=0, folder=str(tmp_path), name=name)
        with open_service(settings, {}) as service:
            assert list(service._searches.queue.searches) == found


def test_the_queue_is_limited_but_joining_is_not(opened: Open) -> None:
    queue = opened(max_queued=1)
    queue.submit(asked(1, "ann"))
    with pytest.raises(QueueFullError):
        queue.submit(asked(2, "ann"))
    queue.submit(asked(1, "ben"))
    queue.change(asked(1).id, state="running")
    queue.submit(asked(2, "ann"))
    assert list(opened().searches) == [asked(1).id, asked(2).id]


def test_a_search_ends_when_all_who_asked_have_withdrawn(opened: Open) -> None:
    queue = opened()
    search = queue.submit(asked(1, "ann"))
    queue.submit(asked(1, "ben"))
    with pytest.raises(ForbiddenError, match="eve"):
        queue.withdraw(search, "eve")
    assert queue.withdraw(search, "ann").state == "queued"
    assert queue.withdraw(search, "ben").state == "ended"
    assert queue.withdraw(search, "ben").state == "ended", "and stays so"
    running = queue.submit(asked(2, "ann"))
    queue.change(running.id, state="running")
    assert queue.withdraw(running, "ann") == replace(running, state="running", callers=()), (
        "its process is still to end"
    )


def test_those_who_share_a_name_withdraw_their_own_request_or_all_of_the_name(opened: Open) -> None:
    queue = opened()
    search = queue.submit(asked(1, "team a1"))
    queue.submit(asked(1, "team b2"))
    assert queue.submit(asked(1, "team a1")).callers == ("team a1", "team b2"), "sent again"
    with pytest.raises(ForbiddenError, match="team did"):
        queue.withdraw(search, "team c3")
    assert queue.withdraw(search, "team a1").callers == ("team b2",)
    assert queue.submit(asked(1, "teammate", "team")).callers == ("team b2", "teammate", "team")
    assert queue.withdraw(search, "team").callers == ("teammate",)


def test_a_database_that_is_away_refuses_new_requests_and_saves_changes_later(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = opened()
    queue.submit(asked(1, "ann"))
    with monkeypatch.context() as patch:

        def fail(_: str) -> None:
            raise OperationalError("insert", {}, OSError("away"))

        patch.setattr(queue, "_save", fail)
        with pytest.raises(StudyError, match="away"):
            queue.submit(asked(2, "ann"))
        with pytest.raises(StudyError, match="away"):
            queue.submit(asked(1, "ben"))
        queue.change(asked(1).id, state="running")
        queue.save_later_changes()
    assert list(queue.searches.values()) == [replace(asked(1, "ann"), state="running")]
    assert opened().searches[asked(1).id].state == "queued"
    queue.save_later_changes()
    assert opened().searches == queue.searches


def test_the_oldest_finished_searches_are_forgotten(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_MAX_FINISHED", 1)
    queue = opened()
    for number in (1, 2, 3):
        queue.submit(asked(number, "ann"))
    for number in (1, 2):
        queue.change(asked(number).id, state="done", ended=10.0 - number)
    assert queue.save_later_changes() == [asked(2).id]
    assert list(queue.searches) == list(opened().searches) == [asked(1).id, asked(3).id]


def test_a_database_that_cannot_be_used_is_refused_without_its_password() -> None:
    with pytest.raises(StudyError, match="nowhere") as refused:
        Queue("sqlite:////nowhere/at/all.db", "here", 1)
    assert refused.value.next_step
    with pytest.raises(StudyError) as refused:
        Queue("mysql://amp:hunter2@host/db", "here", 1)
    assert "hunter2" not in str(refused.value)


def test_a_queue_in_postgresql_outlives_the_service_and_a_restart_of_the_server() -> None:
    with postgresql.server() as server:
        queue = Queue(server.url(), "here", 3)
        queue.submit(asked(1, "ann"))
        server.stop()
        with pytest.raises(StudyError) as refused:
            queue.submit(asked(2, "ann"))
        assert postgresql.PASSWORD not in str(refused.value)
        queue.change(asked(1).id, state="running")
        server.start()
        queue.save_later_changes()
        queue.submit(asked(3, "ann"))
        again = Queue(server.url(), "here", 3)
        assert again.searches == queue.searches
        assert [search.state for search in again.searches.values()] == ["running", "queued"]
        for each in (queue, again):
            each.close()
