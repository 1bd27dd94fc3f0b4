"""The gate in front of a real uvicorn: each hostile request has its clear answer, and the application sees none."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from autotune_amp.service import gate
from autotune_amp.service.gate import MAX_BODY_BYTES, Gate, RateLimit, TimedProtocol, caller_of

TOKENS = {"0123456789abcdef": "ann", "fedcba9876543210": "ben"}
ANN = "Authorization: Bearer 0123456789abcdef"
SHORT_SECONDS = 0.3  # limits of time in these tests


class Application:
    """An application that answers with the caller and the length of the body, and keeps the paths that reach it."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        body = (await receive())["body"]
        if scope["path"] == "/slow":
            await asyncio.sleep(60)
        answer = json.dumps([scope["state"].get("caller"), len(body)]).encode()
        if scope["path"] == "/large":
            answer *= 1 << 20
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/slow/events":
            await asyncio.sleep(3 * SHORT_SECONDS)
        if scope["path"] == "/open/events":
            assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": answer})


class Served:
    """A gate on a free port, and what is behind it."""

    def __init__(self, tokens: dict[str, str], per_minute: int = 60_000) -> None:
        self.application = Application()
        self.gate = Gate(self.application, tokens, per_minute)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        config = uvicorn.Config(self.gate, http=TimedProtocol, ws="none", lifespan="off", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],))
        self._thread.start()

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def send(self, *parts: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send a request as it is, in these parts, and return status, headers and body; 0 for a closed connection."""
        with socket.create_connection(self.address, timeout=30) as connection:
            answer = b""
            with contextlib.suppress(ConnectionError):  # it is closed while this still sends
                for part in parts:
                    connection.sendall(part)
            with contextlib.suppress(ConnectionError):
                while data := connection.recv(1 << 16):
                    answer += data
        if not answer:
            return 0, {}, b""
        head, _, body = answer.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        return int(status.split()[1]), {n.lower(): v for n, v in (line.split(": ", 1) for line in lines)}, body

    def ask(
        self, path: str, *headers: str, body: bytes = b"", method: str = "GET"
    ) -> tuple[int, dict[str, str], bytes]:
        if not any(header.lower().startswith("host:") for header in headers):
            headers = ("Host: 127.0.0.1", *headers)
        if body and not any("length" in header.lower() or "chunked" in header for header in headers):
            headers = (f"Content-Length: {len(body)}", *headers)
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *headers, "Connection: close", "", ""])
        return self.send(head.encode(), body)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(TOKENS)
    yield served
    served.close()


def basic(password: str) -> str:
    return f"Authorization: Basic {base64.b64encode(f'me:{password}'.encode()).decode()}"


def test_a_token_names_its_caller(served: Served) -> None:
    assert json.loads(served.ask("/x", ANN)[2]) == ["ann", 0]
    assert json.loads(served.ask("/x", basic("fedcba9876543210"))[2]) == ["ben", 0]
    assert json.loads(served.ask("/healthz")[2]) == [None, 0], "which needs none"


@pytest.mark.parametrize(
    "header",
    [
        "X: y",
        "Authorization: Bearer",
        "Authorization: Bearer 0123456789abcde",
        "Authorization: Bearer 0123456789abcdefg",
        "Authorization: 0123456789abcdef",
        "Authorization: Bearer \xe4\xf6",
        "Authorization: Basic 0123456789abcdef",
        "Authorization: Basic ????",
        basic(""),
    ],
)
def test_without_the_right_token_nothing_passes(header: str, served: Served) -> None:
    for path in ("/searches", "/docs", "/openapi.json", "/metrics", "//healthz", "/healthz/"):
        status, headers, body = served.ask(path, header)
        assert (status, headers["www-authenticate"][:5]) == (401, "Basic")
        assert json.loads(body)["error"]["next_step"]
    assert served.application.paths == []
    assert served.gate.num_answers == {401: 6}


def test_a_page_of_another_site_does_not_pass(served: Served) -> None:
    assert served.ask("/x", ANN, "Host: gpu:1", "Origin: http://evil.example")[0] == 403
    assert served.ask("/x", ANN, "Host: gpu:1", "Origin: null")[0] == 403
    assert served.ask("/x", ANN, "Host: gpu:1", "Origin: http://gpu:1")[0] == 200


def test_without_tokens_only_names_of_this_machine_pass() -> None:
    served = Served({})
    try:
        for host, status in (("localhost:80", 200), ("[::1]:80", 200), ("127.0.0.1", 200), ("evil.example:80", 403)):
            assert served.ask("/x", f"Host: {host}")[0] == status
        assert json.loads(served.ask("/x")[2]) == ["local", 0]
    finally:
        served.close()


def test_a_body_is_limited_whether_its_length_is_told_or_not(served: Served) -> None:
    largest = b"x" * MAX_BODY_BYTES
    assert json.loads(served.ask("/x", ANN, body=largest, method="POST")[2]) == ["ann", MAX_BODY_BYTES]
    served.application.paths.clear()
    assert served.ask("/x", ANN, f"Content-Length: {MAX_BODY_BYTES + 1}", method="POST")[0] == 413
    chunk = b"%x\r\n%s\r\n" % (1 << 12, b"x" * (1 << 12))
    head = f"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\n{ANN}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert served.send(head, chunk * 17)[0] == 413, "before its end"
    for length in ("-1", "many", "1e3"):
        assert served.ask("/x", ANN, f"Content-Length: {length}", method="POST")[0] in (400, 413)
    assert served.ask("/x", ANN, "X: " + "y" * (1 << 17))[0] in (0, 400)
    assert served.application.paths == []


def test_who_sends_too_slowly_is_cut_off_and_others_are_not(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = f"POST /x HTTP/1.1\r\nHost: 127.0.0.1\r\n{ANN}\r\n".encode()
    with socket.create_connection(served.address, timeout=30) as connection:
        connection.sendall(f"GET /x HTTP/1.1\r\nHost: 127.0.0.1\r\n{ANN}\r\n\r\n".encode())
        answer = b""
        while b'["ann", 0]' not in answer:
            answer += connection.recv(1 << 16)
        with monkeypatch.context() as patch:
            patch.setattr(gate, "ARRIVAL_SECONDS", SHORT_SECONDS)
            connection.sendall(b"GET /x HTTP/1.1\r\n")  # a second request on the connection
            assert connection.recv(1 << 16) == b""
            assert served.send(b"")[0] == 0, "not a byte"
            assert served.send(headers)[0] == 0, "headers without an end"
            assert served.send(headers, b"Content-Length: 5\r\n\r\n", b"abc")[0] in (0, 408)
    assert served.application.paths == ["/x"]
    assert served.ask("/x", ANN)[0] == 200


def test_a_body_that_does_not_arrive_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def give_up(read: Any, seconds: float | None) -> Any:
        if seconds == gate.ARRIVAL_SECONDS:
            read.close()
            raise asyncio.TimeoutError
        return await read

    monkeypatch.setattr(asyncio, "wait_for", give_up)
    status, _, body = served.ask("/x", ANN, "Content-Length: 5", method="POST")
    assert status == 408
    assert json.loads(body)["error"]["next_step"]


def test_an_answer_that_takes_too_long_is_given_up_but_not_a_stream(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "ANSWER_SECONDS", SHORT_SECONDS)
    assert served.ask("/slow", ANN)[0] == 504
    assert b'["ann", 0]' in served.ask("/slow/events", ANN)[2]


@pytest.mark.parametrize("rest", ["", "Connection: close\r\n"])
def test_who_does_not_read_is_cut_off(rest: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "ANSWER_SECONDS", SHORT_SECONDS)
    with socket.create_connection(served.address, timeout=30) as connection:
        connection.sendall(f"GET /large HTTP/1.1\r\nHost: 127.0.0.1\r\n{ANN}\r\n{rest}\r\n".encode())
        assert connection.recv(1)
        wait_until(lambda: not served.num_connections)


def test_each_caller_may_have_some_streams_open(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_STREAMS", 1)
    with socket.create_connection(served.address, timeout=30) as connection:
        connection.sendall(f"GET /open/events HTTP/1.1\r\nHost: 127.0.0.1\r\n{ANN}\r\n\r\n".encode())
        assert connection.recv(1), "it is open"
        status, headers, body = served.ask("/slow/events", ANN)
        assert (status, json.loads(body)["error"]["kind"]) == (429, "refused")
        assert headers["retry-after"]
        assert served.ask("/slow/events", basic("fedcba9876543210"))[0] == 200
        assert served.ask("/x", ANN)[0] == 200
    wait_until(lambda: served.ask("/slow/events", ANN)[0] == 200)


def test_each_caller_has_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    rate = RateLimit(600, lambda: now)
    assert [rate.seconds_to_wait("ann") for _ in range(60)] == [0.0] * 60
    assert rate.seconds_to_wait("ann") == pytest.approx(0.1)
    assert rate.seconds_to_wait("ben") == 0.0
    now = 0.21
    assert [rate.seconds_to_wait("ann") > 0 for _ in range(3)] == [False, False, True]
    served = Served(TOKENS, per_minute=10)
    try:
        assert served.ask("/x", ANN)[0] == 200
        status, headers, _ = served.ask("/x", ANN)
        assert (status, headers["retry-after"]) == (429, "6")
        assert [served.ask("/healthz")[0] for _ in range(3)] == [200] * 3
        assert served.ask("/x", basic("fedcba9876543210"))[0] == 200
    finally:
        served.close()


def test_a_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: compared.append(pair))
    assert caller_of("Bearer x", TOKENS) is None
    assert compared == [(token.encode(), b"x") for token in TOKENS], "with each, whatever the others say"
