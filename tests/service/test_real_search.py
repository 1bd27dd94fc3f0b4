"""Real searches on a real service: requested, joined, followed, ended, and answered from what was measured."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from real_service import ANN, BEN, OPTIONS, Answer, RealService, is_done, real_service

from autotune_amp import recommend_config
from autotune_amp.core.errors import InvalidRequestError

pytestmark = [pytest.mark.slow, pytest.mark.real_time, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    with real_service(tmp_path_factory.mktemp("team"), "max_queued = 1\nrequests_per_minute = 60000") as service:
        yield service
    assert ANN not in service.log


class Followed:
    """Events of a search, read in a thread until the stream ends."""

    def __init__(self, service: RealService, id_: str) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        request = urllib.request.Request(f"{service.url}/searches/{id_}/events")
        request.add_header("Authorization", f"Bearer {ANN}")
        self._request = request
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=300) as stream:
            kind = ""
            for line in stream:
                name, _, value = line.decode().strip().partition(": ")
                if name == "event":
                    kind = value
                elif name == "data":
                    self.events.append((kind, json.loads(value)))

    def kinds(self) -> list[str]:
        self._thread.join()
        return [kind for kind, _ in self.events]


class Requests:
    """What was asked for at first, and what came of it."""

    def __init__(self, service: RealService) -> None:
        self.first: Answer = service.search()
        self.id: str = self.first.document["id"]
        self.followed = Followed(service, self.id)
        service.wait_for(self.id, lambda state: state["state"] == "running")
        self.joined = service.search(BEN)
        self.queued = service.search(seed=1)
        self.refused = service.search(BEN, seed=2)
        service.search(seed=1, request_id="a" * 32)
        self.second_end = service.ask("DELETE", f"/searches/{self.queued.document['id']}", request_id="a" * 32)
        self.others_end = service.ask("DELETE", f"/searches/{self.queued.document['id']}", token=BEN)
        self.own_end = service.ask("DELETE", f"/searches/{self.queued.document['id']}")
        self.running = service.wait_for(self.id, lambda state: state["best"] is not None)
        self.done = service.wait_for(self.id, is_done)
        self.study: str = self.done["recommendation"]["search"]["study"]
        self.records = service.records(self.study)


@pytest.fixture(scope="module")
def requests(service: RealService) -> Requests:
    return Requests(service)


def test_a_request_is_accepted_joined_queued_and_refused(requests: Requests) -> None:
    assert (requests.first.status, requests.first.document["state"]) == (202, "queued")
    assert requests.first.headers["location"] == f"/searches/{requests.id}"
    assert (requests.joined.document["id"], requests.joined.document["callers"]) == (requests.id, ["ann", "ben"])
    assert (requests.queued.document["state"], requests.queued.document["position"]) == ("queued", 0)
    assert (requests.refused.status, requests.refused.headers["retry-after"]) == (429, "30")
    assert (requests.second_end.document["state"], requests.second_end.document["callers"]) == ("queued", ["ann"])
    assert requests.others_end.status == 403
    assert requests.own_end.document["state"] == "ended"


def test_its_events_and_its_state_follow_it(requests: Requests) -> None:
    kinds = requests.followed.kinds()
    assert {"phase", "trial", "best"} <= set(kinds)
    assert requests.followed.events[-1] == ("end", {"state": "done"})
    assert kinds.count("trial") == requests.done["num_trials"] == len(requests.records)
    best = [event for kind, event in requests.followed.events if kind == "best"][-1]
    assert best["setting"] == requests.done["best"]["setting"]
    assert requests.running["best"]["samples_per_second"] > 0
    assert requests.done["recommendation"]["config"]["precision"] == "fp32"


def test_what_was_measured_answers_again_without_running(service: RealService, requests: Requests) -> None:
    answer = service.ask("GET", "/recommendations/plain?precision_allowed=fp32&memory_limit=24GiB&objective=memory")
    assert (answer.status, answer.document["mixed_precision"], answer.document["search"]) == (200, False, requests.id)
    assert answer.document["recommendation"]["objective"] == "memory"
    assert answer.document["answer"]["why"]
    assert service.ask("GET", "/recommendations/plain?precision_allowed=bf16").status == 422
    assert service.ask("GET", "/recommendations/plain?memory_limit=1KiB").status == 422
    assert service.ask("GET", "/recommendations/plain?memory_limit=much").refusal == (422, "memory_limit")
    assert service.ask("GET", "/recommendations/plain?precision_allowed=fp9").refusal == (422, "precision_allowed")
    assert service.ask("GET", "/recommendations/plain?path=/etc").refusal == (422, "path")
    assert service.records(requests.study) == requests.records


def test_the_same_request_is_answered_from_the_cache_also_in_python(
    service: RealService, requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"try_" if name == "try" else name: value for name, value in OPTIONS.items()}
    with pytest.raises(InvalidRequestError, match="token"):
        recommend_config("plain", server=service.url, quiet=True, **options)
    monkeypatch.setenv("AUTOTUNE_AMP_TOKEN", BEN)
    found = recommend_config("plain", server=service.url, quiet=True, **options)
    assert json.loads(found.to_json()) == requests.done["recommendation"]
    assert service.state(requests.id)["callers"] == ["ben"]
    assert service.records(requests.study) == requests.records
    with pytest.raises(InvalidRequestError, match="budget"):
        recommend_config("plain", server=service.url, budget=10_000)
    with pytest.raises(InvalidRequestError, match="storage"):
        recommend_config("plain", server=service.url, storage="sqlite://")


def test_a_search_that_is_ended_keeps_its_best(service: RealService, requests: Requests) -> None:
    id_ = service.search(seed=3, trials=None).document["id"]
    service.wait_for(id_, lambda state: state["best"] is not None)
    assert service.ask("DELETE", f"/searches/{id_}").status == 202
    ended = service.wait_for(id_, lambda state: state["state"] != "running")
    assert ended["state"] == "ended"
    assert ended["recommendation"]["search"]["was_interrupted"]
    assert service.state(requests.id)["state"] == "done"


def test_hardware_and_counters(service: RealService, requests: Requests) -> None:
    while (answer := service.ask("GET", "/hardware")).status == 503:
        assert answer.headers["retry-after"]
        threading.Event().wait(0.2)
    assert answer.document["hardware"]["cpu"]["precisions"]["fp32"]["level"] == "native"
    text = service.ask("GET", "/metrics").body.decode()
    assert 'autotune_amp_searches{state="done"} 1' in text
    trials = int(text.split("\nautotune_amp_trials_total ")[1])
    assert trials >= len(requests.records)
