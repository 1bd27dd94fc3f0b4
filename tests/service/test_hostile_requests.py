"""A real service and requests that no good client sends: each has its clear answer, and nothing is executed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from real_service import ANN, BEN, RealService, real_service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """A service that has searched nothing when all tests are over, and whose log holds no secret and no body."""
    with real_service(tmp_path_factory.mktemp("hostile"), "requests_per_minute = 5000") as service:
        yield service
        assert not service.folder.joinpath("studies").exists()
        assert list(service.folder.joinpath("searches").iterdir()) == []
        assert sorted(path.name for path in service.cli.folder.iterdir()) == [
            "project",
            "serve.toml",
            "service",
            "tokens",
        ]
    assert service.log == ""


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"budget": "60"}, "options.budget"),
        ({"budget": -1}, "budget"),
        ({"budget": 1e999}, "budget"),
        ({"budget": 201}, "budget"),
        ({"memory_limit": "17GiB"}, "memory_limit"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"memory_limit": 1.5}, "options.memory_limit"),
        ({"memory_fraction": 2}, "memory_fraction"),
        ({"trials": True}, "options.trials"),
        ({"trials": 0}, "trials"),
        ({"precision": ["fp32", "fp7"]}, "precision"),
        ({"precision": {"fp32": 1}}, "options.precision"),
        ({"batch_size": "8"}, "batch_size"),
        ({"batch_size": [8, 16]}, "options.batch_size"),
        ({"effective_batch_size": "some"}, "effective_batch_size"),
        ({"try": "rm -rf /"}, "try"),
        ({"objective": "fame"}, "objective"),
        ({"seed": 2**70}, "seed"),
        ({"seed": None, "steps": 1, "samples": 1}, "options"),
        ({"out": "/etc"}, "options.out"),
        ({"study": "../../up"}, "options.study"),
        ({"storage": "sqlite:////etc/x.db"}, "options.storage"),
        ({"device": "cuda:0"}, "options.device"),
        ({"command": "touch here"}, "options.command"),
        ([], "options"),
    ],
)
def test_a_wrong_option_is_named(options: Any, field: str, service: RealService) -> None:
    assert service.ask("POST", "/searches", {"target": "plain", "options": options}).refusal == (422, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"target": "train.py:plain"}, "target"),
        ({"target": "../project/train.py:plain"}, "target"),
        ({"target": "os:abort"}, "target"),
        ({"target": ["plain"]}, "target"),
        ({}, "target"),
        ({"target": "plain", "folder": "/"}, "folder"),
        ([], "body"),
        (7, "body"),
    ],
)
def test_only_a_target_of_the_file_can_be_named(body: Any, field: str, service: RealService) -> None:
    assert service.ask("POST", "/searches", body).refusal == (422, field)


@pytest.mark.parametrize(
    "data", [b"{", b"\xff\xfe", b"", b"[" * 60_000, b'{"target": "plain", "options": {"seed": NaN}}']
)
def test_what_is_no_json_is_refused(data: bytes, service: RealService) -> None:
    answer = service.ask("POST", "/searches", data=data)
    assert answer.status in (400, 422)
    assert answer.document["error"]["next_step"]


@pytest.mark.parametrize(
    "id_",
    ["0" * 32, "x", "..%2f..%2fserve.toml", "%2e%2e", "%00", "a" * 5000, "'; DROP TABLE autotune_amp_searches; --"],
)
@pytest.mark.parametrize("rest", ["", "/events"])
def test_an_id_is_no_path(id_: str, rest: str, service: RealService) -> None:
    path = f"/searches/{id_.replace(' ', '%20')}{rest}"
    assert service.ask("GET", path).status == 404
    assert service.ask("DELETE", path).status in (404, 405)
    assert service.ask("GET", f"/recommendations/{id_.replace(' ', '%20')}").status == 404


@pytest.mark.parametrize("query", ["precision_allowed=bf16", "memory_limit=24GiB", ""])
def test_nothing_is_recommended_before_something_was_measured(query: str, service: RealService) -> None:
    assert service.ask("GET", f"/recommendations/plain?{query}").refusal == (404, None)
    assert service.ask("GET", f"/recommendations/other?{query}").refusal == (404, None)


def test_without_a_token_there_is_nothing_but_the_health(service: RealService) -> None:
    for path in (
        "/docs",
        "/openapi.json",
        "/metrics",
        "/hardware",
        "/recommendations/plain",
        "/searches/x",
        "/nothing",
    ):
        for token in (None, "c" * 20, ANN.upper()):
            assert service.ask("GET", path, token=token).refusal == (401, None)
    assert service.ask("POST", "/searches", {"target": "plain"}, token=None).status == 401
    assert service.ask("GET", "/healthz", token=None).document == {"status": "ok"}
    assert service.ask("GET", "/docs", token=BEN).status == 200


def test_a_body_has_a_limit(service: RealService) -> None:
    padding = "x" * (64 * 1024)
    assert service.ask("POST", "/searches", {"target": "plain", "options": {"try": padding}}).status == 413


async def status_of(service: RealService, token: str, is_open: asyncio.Event) -> str:
    """The status and, for 429, whether it says when to come again; all connections are open before any is used."""
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await is_open.wait()
    body = json.dumps({"target": "nobody"})
    head = (
        f"POST /searches HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer.split()[1] + (" later" if "retry-after: " in answer else "")


def test_a_thousand_requests_at_once_are_each_answered(service: RealService) -> None:
    async def ask_all() -> Counter[str]:
        is_open = asyncio.Event()
        asked = [asyncio.ensure_future(status_of(service, BEN, is_open)) for _ in range(1000)]
        await asyncio.sleep(0.1)
        is_open.set()
        return Counter(await asyncio.gather(*asked))

    statuses = asyncio.run(ask_all())
    assert set(statuses) == {"422", "429 later"}
    assert statuses.total() == 1000
    assert service.ask("GET", "/metrics").status == 200, "others have a rate of their own"
