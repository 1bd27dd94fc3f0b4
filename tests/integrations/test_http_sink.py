"""The sink that posts to a service: what arrives, and that no server, however it fails, is felt by the training."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune_amp import AmpConfig, LossScale, PrecisionController
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.sinks import MAX_POSTED, MAX_TEXT, http
from autotune_amp.runtime import run_log, sinks
from autotune_amp.runtime.sinks import BatchSink, MetricValues, Sink, SinkThread
from autotune_amp.runtime.status import metric_values

SECRET = "a-secret-of-the-team"
NUM_UPDATES = 200


class FakeServer(ThreadingHTTPServer):
    """Keeps what is posted; `answer` gives the status of each answer, and may take its time."""

    daemon_threads = True

    def __init__(self, answer: Callable[[], int] = lambda: 204) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.posts: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.address = f"http://127.0.0.1:{self.server_port}"

    @property
    def values(self) -> list[dict[str, Any]]:
        return [values for _, _, body in self.posts for values in body["values"]]

    def handle_error(self, request: object, client_address: object) -> None:
        """The client has gone meanwhile."""


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = self.server.answer()
        if status < 300:
            self.server.posts.append((self.path, dict(self.headers), body))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", self.server.address + "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        """As urllib follows a redirection of a post."""
        self.server.posts.append((self.path, dict(self.headers), {}))
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def serving(answer: Callable[[], int] = lambda: 204) -> Iterator[FakeServer]:
    server = FakeServer(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 60
    while any(thread.name == "autotune_amp sink" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_AMP_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "*")


def train(
    sink: Sink | None, *, run_log: Path | None = None, at: Callable[[int], object] = lambda update: None
) -> tuple[list[float], PrecisionController]:
    """Losses of a run with an overflow at its first update and a move by hand at 100."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = AmpConfig(precision="fp16", batch_size=4, loss_scale=LossScale(init_scale=2.0**20), fallback=["fp32"])
    controller = PrecisionController(config, device="cpu", sinks=[] if sink is None else [sink], run_log=run_log)
    inputs, targets = torch.randn(4, 4), 10 * torch.randn(4, 1)
    losses = []
    for update in range(NUM_UPDATES):
        if update == 100:
            controller.set_precision("fp32")
        at(update)
        stepped = controller.train_step(lambda: nn.functional.mse_loss(model(inputs), targets), optimizer)
        losses.append(float(stepped.loss if stepped.loss is not None else "nan"))
    return losses, controller


def test_what_arrives_is_what_the_run_log_holds_in_few_posts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py"])
    with serving() as server:
        sink = http(server.address + "/", SECRET)
        _, controller = train(sink, run_log=tmp_path / "run.jsonl")
        controller.detach()
    lines = run_log.read(tmp_path / "run.jsonl").lines[1:]
    texts = ("number", "move", "before", "reason", "pinned_modules")
    told = [{name: value for name, value in values.items() if name not in texts} for values in server.values]
    assert told == [
        {name.removeprefix("autotune_amp/"): value for name, value in metric_values(line).items()} for line in lines
    ]
    (move,) = [values for values in server.values if "move" in values]
    assert (move["update"], move["move"], move["before"], move["precision"]) == (100, "by_hand", "fp16", "fp32")
    assert [values["number"] for values in server.values] == list(range(len(lines)))
    (path,) = {path for path, _, _ in server.posts}
    assert {body["name"].split()[0] for _, _, body in server.posts} == {"train.py"}
    assert {headers["Authorization"] for _, headers, _ in server.posts} == {f"Bearer {SECRET}"}
    assert caplog.text.count(f"{server.address}{path}/page") == 1
    assert SECRET not in caplog.text + repr(sink)


def test_what_piled_up_is_posted_together_in_posts_of_bounded_size() -> None:
    is_first, may_go_on = threading.Event(), threading.Event()

    def answer() -> int:
        is_first.set()
        may_go_on.wait()
        return 204

    with serving(answer) as server:
        sink_thread = SinkThread(http(server.address, name="n" * 5000))
        sink_thread.send({"autotune_amp/update": 0})
        is_first.wait()
        for update in range(1, 3 * MAX_POSTED):
            sink_thread.send({"autotune_amp/update": update, "autotune_amp/reason": "r" * 5000})
        may_go_on.set()
        sink_thread.close()
    assert [len(body["values"]) for _, _, body in server.posts] == [1, MAX_POSTED, MAX_POSTED, MAX_POSTED - 1]
    assert [values["update"] for values in server.values] == list(range(3 * MAX_POSTED))
    assert {len(values.get("reason", "")) for values in server.values} == {0, MAX_TEXT}
    assert len(server.posts[0][2]["name"]) == MAX_TEXT


def test_what_could_not_be_posted_is_posted_later_but_not_what_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    statuses = [500, 204, 422, 429, 204]
    with serving(lambda: statuses.pop(0)) as server:
        sink = http(server.address, SECRET)
        for update in range(5):
            deliver(sink, {"autotune_amp/update": update})
    assert [values["update"] for values in server.values] == [0, 1, 3, 4]
    assert [values["number"] for values in server.values] == [0, 1, 3, 4]
    assert SECRET not in caplog.text


def deliver(sink: Sink, values: MetricValues) -> None:
    sink_thread = SinkThread(sink)
    sink_thread.send(values)
    sink_thread.close()


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_token_is_sent_to_no_other_server_and_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOTUNE_AMP_TOKEN", SECRET)
    with serving() as server:
        http(server.address)({"autotune_amp/update": 1})
        assert server.posts[0][1]["Authorization"] == f"Bearer {SECRET}"
        http(server.address, "")({"autotune_amp/update": 1})
        assert "Authorization" not in server.posts[1][1]
    with serving(lambda: 302) as server:
        deliver(http(server.address), {"autotune_amp/update": 1})
    assert server.posts == []
    assert "302" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "server", ["gpu-host:8000", "file:///etc/passwd", "ftp://host", "http://", f"http://me:{SECRET}@host", "http://a b"]
)
def test_another_address_is_refused_and_not_shown(server: str) -> None:
    with pytest.raises(InvalidRequestError, match="http://") as raised:
        http(server)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("token", [f"{SECRET}\n", f"two {SECRET}", f"{SECRET}\u00e9", f"{SECRET}\r\nX-Evil: 1"])
def test_a_token_that_no_header_can_hold_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        http("http://host", token)
    assert SECRET not in str(raised.value)


def test_other_ranks_than_the_first_make_nothing_to_post_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not isinstance(http("http://127.0.0.1:9"), BatchSink)


# -- servers that fail: the losses are those of a run without a sink ---------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return train(None)[0]


def warnings_of(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.levelno == logging.WARNING and "sink" in record.getMessage() for record in caplog.records)


def test_a_server_that_is_absent(alone: list[float], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # it does not listen
        losses, controller = train(http(f"http://127.0.0.1:{free.getsockname()[1]}"), run_log=tmp_path / "run.jsonl")
        controller.detach()
    assert losses == alone
    assert warnings_of(caplog) == 1
    assert run_log.read(tmp_path / "run.jsonl").lines[-1].update == NUM_UPDATES


def test_a_server_that_hangs_or_fails_slowly(
    alone: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "_END_SECONDS", 0.1)
    may_answer = threading.Event()

    def answer() -> int:
        may_answer.wait()
        return 500

    with serving(answer) as server:
        losses, controller = train(http(server.address))
        controller.detach()
        assert not may_answer.is_set(), "the run has ended before the first answer"
        assert losses == alone
        may_answer.set()
        until(lambda: not any(thread.name == "autotune_amp sink" for thread in threading.enumerate()))
    assert warnings_of(caplog) == 1
    assert server.posts == []


def test_a_server_that_accepts_and_says_nothing(alone: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_END_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        losses, controller = train(http(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        controller.detach()
        assert losses == alone


def test_a_server_that_dies_in_mid_run(alone: list[float], caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:

        def at(update: int) -> None:
            if update == 100:
                until(lambda: len(server.posts) > 0)
                server.shutdown()
                server.socket.close()

        losses, controller = train(http(server.address), at=at)
        controller.detach()
    assert losses == alone
    assert warnings_of(caplog) == 1
    assert {values["update"] for values in server.values} <= set(range(1, 101))
