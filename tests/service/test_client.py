"""The client against a scripted server: refusals, a server that is away or busy for a while, and what is no service."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autotune_amp import recommend_config
from autotune_amp.core.errors import FormatError, InvalidRequestError, RunnerError
from autotune_amp.core.recommendation import Recommendation, SearchInterruptedError
from autotune_amp.integrations.service_address import REQUEST_ID_HEADER
from autotune_amp.search.progress import Progress
from autotune_amp.service import client
from autotune_amp.service.app import Options
from autotune_amp.service.client import recommendation_from

SAVED = Path(__file__).parents[1] / "golden/study/recommendation.json"
FOUND = json.loads(SAVED.read_text())


class Script(BaseHTTPRequestHandler):
    """Gives the answers of `answers` in turn, and keeps the requests. An answer of status 0 is sent as it is."""

    answers: ClassVar[list[tuple[int, Any]]] = []
    asked: ClassVar[list[tuple[str, str, Any, str | None]]] = []
    request_ids: ClassVar[list[str | None]] = []

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        content = json.loads(body) if body else None
        self.asked.append((self.command, self.path, content, self.headers.get("Authorization")))
        self.request_ids.append(self.headers.get(REQUEST_ID_HEADER))
        status, document = self.answers.pop(0)
        if status == 0:  # no HTTP
            self.wfile.write(document)
            return
        self.send_response(status)
        self.send_header("Retry-After", "0")
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        self.wfile.write(document if isinstance(document, bytes) else json.dumps(document).encode())

    do_GET = do_POST = do_DELETE = handle_request  # noqa: N815 - names of the base class

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Phases(Progress):
    """Keeps the phases."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def phase(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(client, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(Script, "answers", [])
    monkeypatch.setattr(Script, "asked", [])
    monkeypatch.setattr(Script, "request_ids", [])
    with HTTPServer(("127.0.0.1", 0), Script) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/"
        http.shutdown()
        thread.join()


def search(state: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    return 200, {"id": "a/b", "state": state, "phase": None, "position": 0, "recommendation": None, **fields}


def test_it_follows_a_search_to_its_end(server: str) -> None:
    Script.answers += [
        search("queued"),
        (503, {}),
        search("running", phase="searching"),
        search("done", recommendation=FOUND),
    ]
    progress = Phases()
    options = {"try_": "none", "batch_size": (8, 16)}
    found = recommendation_from(server, "mlp", options, progress, token="t" * 16)
    assert found == Recommendation.load(SAVED)
    assert progress.texts[-1] == "searching"
    assert [ask[:2] for ask in Script.asked] == [("POST", "/searches"), *[("GET", "/searches/a%2Fb")] * 3]
    assert Script.asked[0][2:] == (
        {"target": "mlp", "options": {"try": "none", "batch_size": "8:16"}},
        f"Bearer {'t' * 16}",
    )


def test_a_place_in_the_queue_counts_from_one_and_one_that_starts_has_none(server: str) -> None:
    Script.answers += [search("queued"), search("running", position=None), search("done", recommendation=FOUND)]
    progress = Phases()
    recommendation_from(server, "mlp", {}, progress)
    first, starting = progress.texts
    assert "place 1 " in first
    assert "None" not in starting
    assert "place" not in starting


def test_the_client_and_the_service_take_the_same_options_of_a_search() -> None:
    assert set(client.OPTIONS) == Options.model_fields.keys()
    of_the_service = {"workload", "server", "device", "devices", "ray", "ranks", "study", "out", "storage"}
    of_this_machine = {"baseline", "quiet", "progress"}
    assert signature(recommend_config).parameters.keys() - of_the_service - of_this_machine == set(client.OPTIONS)


def test_only_changed_options_are_sent(server: str) -> None:
    Script.answers += [search("done", recommendation=FOUND)]
    recommend_config("mlp", server=server, trials=3, quiet=True)
    assert Script.asked[0][2] == {"target": "mlp", "options": {"trials": 3}}
    with pytest.raises(InvalidRequestError, match="name"):
        recommend_config(lambda: None, server=server)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("answers", "error", "word"),
    [
        ([(422, {"error": {"message": "target is 'x'.", "next_step": "Name mlp."}})], InvalidRequestError, "Name mlp"),
        ([(404, b"<html>")], RunnerError, "404"),
        ([(404, {"error": None})], RunnerError, "404"),
        ([(302, {}), search("done", recommendation=FOUND)], RunnerError, "302"),
        ([search("failed", error={"message": "No room.", "next_step": "Buy some."})], RunnerError, "Buy some"),
        ([search("ended", recommendation=FOUND)], SearchInterruptedError, "ended"),
        ([search("done", recommendation={"config": 1})], FormatError, "version"),
    ],
)
def test_what_is_no_recommendation_is_an_error(
    answers: list[tuple[int, Any]], error: type[Exception], word: str, server: str
) -> None:
    Script.answers += answers
    with pytest.raises(error, match=word):
        recommendation_from(server, "mlp", {}, Progress())


def test_a_service_that_stays_away_is_given_up(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PATIENCE_SECONDS", 0.0)
    Script.answers += [(200, b"no json"), (0, b"SSH-2.0-host\r\n")]
    with pytest.raises(RunnerError, match="does not answer"):
        recommendation_from(server, "mlp", {}, Progress())
    with pytest.raises(RunnerError, match="does not answer"):
        recommendation_from(server, "mlp", {}, Progress())
    with pytest.raises(RunnerError, match="does not answer"):
        recommendation_from("http://127.0.0.1:1", "mlp", {}, Progress())
    with pytest.raises(InvalidRequestError, match="http"):
        recommendation_from("file:///etc/passwd", "mlp", {}, Progress())


@pytest.mark.parametrize(
    ("address", "token"),
    [("http://me:a-secret-word@127.0.0.1:1", ""), *(("http://127.0.0.1:1", f"a-secret-word{end}") for end in "\r\n")],
)
def test_a_secret_that_cannot_be_sent_safely_is_refused_and_not_shown(address: str, token: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        recommendation_from(address, "mlp", {}, Progress(), token)
    assert "a-secret" not in str(refused.value)


def test_an_address_that_is_none_is_not_asked_for_a_minute() -> None:
    with pytest.raises(RunnerError, match="Check the address"):
        recommendation_from("http://127.0.0.1:port", "mlp", {}, Progress())


def test_a_limit_of_requests_is_waited_out_while_a_search_runs(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr("autotune_amp.service.client.time.sleep", lambda _: None)
    Script.answers += [search("queued"), (429, {}), search("running"), (429, {}), search("done", recommendation=FOUND)]
    assert recommendation_from(server, "mlp", {}, Progress()) == Recommendation.load(SAVED)
    Script.answers += [(429, {})]
    with pytest.raises(RunnerError, match="429"):  # the queue is full
        recommendation_from(server, "mlp", {}, Progress())


def test_ctrl_c_withdraws_the_request_and_no_other_one_of_that_name(server: str) -> None:
    class Interrupted(Progress):
        def phase(self, text: str) -> None:
            raise KeyboardInterrupt

    Script.answers += [search("queued"), search("ended")] * 2
    for _ in range(2):
        with pytest.raises(SearchInterruptedError):
            recommendation_from(server, "mlp", {}, Interrupted())
        assert Script.asked[-1][:2] == ("DELETE", "/searches/a%2Fb")
    first, first_end, second, second_end = Script.request_ids
    assert first == first_end != second == second_end
