"""Runs of the service, over HTTP from a real server: what a training posts is shown, and hostile posts are refused."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError

import msgspec
import postgresql
import pytest
import torch
import uvicorn
from playwright.sync_api import Browser, Dialog
from sqlalchemy import create_engine, insert
from torch import nn

from autotune_amp import AmpConfig, LossScale, PrecisionController
from autotune_amp.core.documents import decode
from autotune_amp.core.errors import StudyBusyError
from autotune_amp.integrations.sinks import http
from autotune_amp.runtime import run_log
from autotune_amp.runtime.run_log import MoveLine
from autotune_amp.search.storage.database import engine_options
from autotune_amp.service import runs
from autotune_amp.service.app import create_app
from autotune_amp.service.gate import MAX_BODY_BYTES, Gate
from autotune_amp.service.jobs import ForbiddenError, Queue
from autotune_amp.service.runs import RunPost, RunStore, prometheus_text
from autotune_amp.service.searching import SearchThread
from autotune_amp.service.settings import Settings

ANN, BOB = "token-of-ann", "token-of-bob"
HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b>"


class Answer(NamedTuple):
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Served:
    """The routes of a store of its own, served on a free port."""

    def __init__(self, address: str, store: RunStore) -> None:
        self.address, self.store = address, store

    def ask(self, path: str, body: object = None, *, token: str = ANN, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Authorization": f"Bearer {token}", **headers})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as response:
                return Answer(response.status, response.read(), dict(response.headers))
        except HTTPError as error:
            with error:
                return Answer(error.code, error.read(), dict(error.headers))

    def post(self, run_id: str, *values: dict[str, Any], token: str = ANN, name: str = "train.py") -> Answer:
        return self.ask(f"/runs/{run_id}", {"name": name, "values": values}, token=token)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("service")
    queue = Queue(f"sqlite:///{folder / 'queue.db'}", "test", max_queued=1)
    store = RunStore(queue.engine, "test", max_runs=50, max_values=100)
    app = create_app(SearchThread(Settings(folder=str(folder), targets={}), queue), store)
    gate = Gate(app, {ANN: "ann", BOB: "bob"}, requests_per_minute=10**6)
    app.state.num_answers = gate.num_answers
    server = uvicorn.Server(uvicorn.Config(gate, port=0, log_config=None, lifespan="off", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Served(f"http://127.0.0.1:{port}", store)
    server.should_exit = True
    thread.join()
    queue.close()


def new_id() -> str:
    return uuid.uuid4().hex


def readings(number: int, update: int, **more: Any) -> dict[str, Any]:
    counts = {"steps": update, "skips": 0, "overflows": 0, "bad_batches": 0, "moves": 0}
    return {"number": number, "update": update, "precision": "fp16", "rung": 0, "scale": 1024.0, **counts, **more}


def move(number: int, update: int, reason: str, **more: Any) -> dict[str, Any]:
    its = {"move": "demotion", "before": "fp16", "precision": "bf16", "rung": 1, "reason": reason}
    return readings(number, update, **its, **more)


# -- what a training posts ---------------------------------------------------------------------------------------------


def test_a_training_is_shown_as_its_run_log_has_it(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    known = {run["id"] for run in served.ask("/runs").document}
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = AmpConfig(precision="fp16", batch_size=4, loss_scale=LossScale(init_scale=2.0**20), fallback=["fp32"])
    sink = http(served.address, ANN, name="a training")
    controller = PrecisionController(config, device="cpu", sinks=[sink], run_log=tmp_path / "run.jsonl")
    inputs, targets = torch.randn(4, 4), 10 * torch.randn(4, 1)
    for update in range(150):
        if update == 100:
            controller.set_precision("fp32")
        controller.train_step(lambda: nn.functional.mse_loss(model(inputs), targets), optimizer)
    controller.detach()
    logged = [msgspec.structs.replace(line, run_id="") for line in run_log.read(tmp_path / "run.jsonl").lines[1:]]

    (run,) = [run for run in served.ask("/runs").document if run["id"] not in known]
    assert list(served.store.log(run["id"]).lines) == logged
    assert (run["name"], run["is_live"]) == ("a training", True)
    shown = served.ask(f"/runs/{run['id']}").document
    newest, last = shown["newest"], logged[-1]
    for name in ("update", "scale", "precision", "step_seconds", "peak_memory_bytes", "flushed_share", "loss"):
        assert newest[name] == getattr(last, name)
    assert (newest["overflows"], newest["skips"]) == (last.num_overflows, last.num_skips)
    assert (newest["overflows"] > 0, newest["temperature_celsius"]) == (True, None)
    assert [(each["update"], each["before"], each["precision"]) for each in shown["moves"]] == [(100, "fp16", "fp32")]
    assert set(shown["seconds_by_precision"]) == {"fp16", "fp32"}
    passed = (last.elapsed_seconds or 0) - (logged[0].elapsed_seconds or 0)
    assert math.isclose(sum(shown["seconds_by_precision"].values()), passed)
    assert "owner" not in shown
    assert ANN not in json.dumps(shown)


def test_what_is_posted_twice_is_stored_once_and_repeated_updates_replace_the_first(served: Served) -> None:
    run_id = new_id()
    first = [readings(0, 64, loss=3.0), readings(1, 128, loss=2.0)]
    for values in (first, first, [first[1], readings(2, 100, loss=1.5), readings(4, 128, loss=1.0)]):
        assert served.post(run_id, *values).status == 204
    lines = [(line.update, line.loss) for line in served.store.log(run_id).lines]
    assert lines == [(64, 3.0), (100, 1.5), (128, 1.0)]


def test_a_move_has_its_modules_and_seconds_are_those_of_the_precision_before_it(served: Served) -> None:
    run_id = new_id()
    pinned = move(1, 90, "why", pinned_modules="encoder.wi, encoder.wo", elapsed_seconds=9.0)
    last = readings(2, 128, precision="bf16", elapsed_seconds=10.0)
    assert served.post(run_id, readings(0, 64, elapsed_seconds=6.0), pinned, last).status == 204
    assert served.ask(f"/runs/{run_id}").document["seconds_by_precision"] == {"fp16": 3.0, "bf16": 1.0}
    (line,) = served.store.log(run_id).moves
    assert isinstance(line, MoveLine)
    assert (line.pinned_modules, line.reason) == (("encoder.wi", "encoder.wo"), "why")


# -- hostile posts -----------------------------------------------------------------------------------------------------

GOOD = readings(0, 1)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"not JSON", 422),
        (b"[" * 20_000, 422),
        (b"\xff\xfe", 422),
        ({"name": "x", "values": []}, 422),
        ({"name": "x", "values": [GOOD] * 17}, 422),
        ({"name": "", "values": [GOOD]}, 422),
        ({"name": "a\0b", "values": [GOOD]}, 422),
        ({"name": 3, "values": [GOOD]}, 422),
        ({"name": "x" * 1001, "values": [GOOD]}, 422),
        ({"values": [GOOD]}, 422),
        ({"name": "x", "values": [GOOD], "command": "rm"}, 422),
        ({"name": "x", "values": [GOOD | {"unknown": 1}]}, 422),
        ({"name": "x", "values": [GOOD | {"autotune_amp/scale": 1}]}, 422),
        ({"name": "x", "values": [GOOD | {"scale": "1024"}]}, 422),
        ({"name": "x", "values": [GOOD | {"scale": -1}]}, 422),
        ({"name": "x", "values": [GOOD | {"update": True}]}, 422),
        ({"name": "x", "values": [GOOD | {"update": 2**70}]}, 422),
        ({"name": "x", "values": [GOOD | {"number": -1}]}, 422),
        ({"name": "x", "values": [GOOD | {"loss": math.nan}]}, 422),
        ({"name": "x", "values": [GOOD | {"loss": math.inf}]}, 422),
        ({"name": "x", "values": [GOOD | {"loss": 10**400}]}, 422),
        ({"name": "x", "values": [GOOD | {"precision": "int4"}]}, 422),
        ({"name": "x", "values": [GOOD | {"move": HOSTILE}]}, 422),
        ({"name": "x", "values": [GOOD | {"reason": "r" * 1001}]}, 422),
        ({"name": "x", "values": [GOOD | {"reason": "\n\0\n"}]}, 422),
        ({"name": "x", "values": [{"number": 0}]}, 422),
        (b'{"name":"x","values":[' + b" " * MAX_BODY_BYTES + b"]}", 413),
    ],
)
def test_a_post_that_is_no_runs_is_refused_and_nothing_is_kept(served: Served, body: object, status: int) -> None:
    run_id = new_id()
    refused = served.ask(f"/runs/{run_id}", body)
    assert refused.status == status
    assert {"kind", "message", "next_step"} == set(refused.document["error"])
    assert served.ask(f"/runs/{run_id}").status == 404


def test_numbers_at_their_limits_break_nothing(served: Served) -> None:
    run_id = new_id()
    names = ("scale", "step_seconds", "mfu", "temperature_celsius", "sm_clock_mhz", "tokens_per_second")
    large = dict.fromkeys(names, 1e30) | {"loss": 1e308, "throttling": 1}
    small = {"scale": 0.0, "loss": -1e308, "temperature_celsius": -1e30, "saved_memory_bytes": -(2**62)}
    for number, seconds in enumerate((0.0, 1e30, 0.0, 1e30)):
        more = large if number % 2 else small
        posted = served.post(run_id, readings(number, number * 2**60, elapsed_seconds=seconds) | more)
        assert posted.status == 204
    for path in ("/runs", f"/runs/{run_id}", f"/runs/{run_id}/page", "/metrics"):
        assert served.ask(path).status == 200


def test_a_body_of_many_chunks_is_refused_too(served: Served) -> None:
    """It is refused before it has ended, at the chunk that is too much: what came later could not be sent."""
    connection = HTTPConnection(served.address.removeprefix("http://"), timeout=60)
    with closing(connection):
        connection.putrequest("POST", f"/runs/{new_id()}")
        connection.putheader("Authorization", f"Bearer {ANN}")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        for _ in range(65):
            connection.send(b"400\r\n" + b"x" * 0x400 + b"\r\n")
        assert connection.getresponse().status == 413


@pytest.mark.parametrize(
    "run_id", ["x", "A" * 32, "0" * 31, "0" * 33, "..", "..%2f..%2fetc%2fpasswd", "%00" * 4, "%0a" * 32]
)
def test_an_id_is_of_32_digits_and_never_a_path(served: Served, run_id: str) -> None:
    for path in (f"/runs/{run_id}", f"/runs/{run_id}/page"):
        assert served.ask(path).status == 404
    assert served.post(run_id, GOOD).status in (404, 405, 422)


def test_a_run_belongs_to_who_began_it(served: Served) -> None:
    run_id = new_id()
    assert served.post(run_id, GOOD).status == 204
    assert served.post(run_id, readings(1, 2), token=BOB).status == 403
    assert [line.update for line in served.store.log(run_id).lines] == [1]
    assert served.ask(f"/runs/{run_id}", token=BOB).document["newest"]["update"] == 1, "all see it"
    for path in ("/runs", f"/runs/{run_id}", f"/runs/{run_id}/page"):
        assert served.ask(path, token="wrong").status == 401  # a token that nobody has
    assert served.post(run_id, readings(1, 2), token="wrong").status == 401


# -- the store ---------------------------------------------------------------------------------------------------------


def post_of(*values: dict[str, Any]) -> RunPost:
    return decode(json.dumps({"name": "run", "values": values}), RunPost)


@contextmanager
def store_at(path: Path, service: str = "here", **limits: int) -> Iterator[RunStore]:
    engine = create_engine(f"sqlite:///{path}")
    yield RunStore(engine, service, **limits)
    engine.dispose()


def test_the_newest_values_and_the_runs_heard_of_last_are_kept(tmp_path: Path) -> None:
    with store_at(tmp_path / "runs.db", max_runs=2, max_values=3) as store:
        for run_id in ("a", "b"):
            for number in range(5):
                store.append(run_id, ANN, post_of(readings(number, number)))
        store.append("a", ANN, post_of(readings(5, 5)))
        store.append("c", ANN, post_of(readings(0, 0)))
        assert [run.id for run in store.runs()] == ["c", "a"]
        assert [line.update for line in store.log("a").lines] == [3, 4, 5]
        assert store.log("b").lines == ()


def test_a_caller_of_many_runs_displaces_only_own_ones(tmp_path: Path) -> None:
    with store_at(tmp_path / "runs.db", max_runs=4) as store, store_at(tmp_path / "runs.db", "there") as other:
        for number in range(4):
            other.append(f"other {number}", BOB, post_of(GOOD))
        for run_id in ("first", "second"):
            store.append(run_id, ANN, post_of(GOOD))
        for number in range(9):
            store.append(f"bob {number}", BOB, post_of(GOOD))
        assert {run.id for run in store.runs()} == {"first", "second", "bob 7", "bob 8"}
        assert len(store.log("first").lines) == 1
        assert store.log("bob 0").lines == ()
        store.append("third", ANN, post_of(GOOD))
        assert {run.id for run in store.runs()} == {"second", "third", "bob 7", "bob 8"}
        with pytest.raises(ForbiddenError):
            store.append("second", BOB, post_of(readings(1, 1)))
        assert len(other.runs()) == 4


def test_services_that_share_a_postgresql_have_runs_of_their_own() -> None:
    with postgresql.server() as server, ExitStack() as stack:

        def store(service: str) -> RunStore:
            engine = create_engine(server.url(), **engine_options(server.url()))
            stack.callback(engine.dispose)
            return RunStore(engine, service, max_runs=1)

        here, same, there = store("here"), store("here"), store("there")
        here.append("a", ANN, post_of(readings(0, 1)))
        there.append("a", BOB, post_of(readings(0, 2)))
        there.append("a", BOB, post_of(readings(1, 3)))
        for each, owner, updates in ((here, ANN, [1]), (same, ANN, [1]), (there, BOB, [2, 3])):
            assert [(run.id, run.owner) for run in each.runs()] == [("a", owner)]
            assert [line.update for line in each.log("a").lines] == updates
        with here._engine.begin() as connection:  # another process of this name is about to begin the run
            connection.execute(insert(runs._VALUES).values(service="here", id="b", number=0, readings="{}"))
        with pytest.raises(StudyBusyError) as refused:
            same.append("b", ANN, post_of(readings(0, 1)))
        assert refused.value.next_step
        assert [run.id for run in same.runs()] == ["a"]
        same.append("c", ANN, post_of(GOOD))
        assert [[run.id for run in each.runs()] for each in (here, there)] == [["c"], ["a"]]


KILLED = """
import json, sys
from sqlalchemy import create_engine
from autotune_amp.core.documents import decode
from autotune_amp.service.runs import RunPost, RunStore
store = RunStore(create_engine("sqlite:///" + sys.argv[1]), "here")
first = json.loads(sys.argv[2])
for number in range(10**6):
    values = [first | {"number": number, "update": number}]
    store.append("a" * 32, "ann", decode(json.dumps({"name": "run", "values": values}), RunPost))
    print(number, flush=True)
"""


def test_a_killed_service_still_has_its_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "runs.db"), json.dumps(GOOD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 20:
            pass
        process.kill()
    with store_at(tmp_path / "runs.db") as store:
        (run,) = store.runs()
        assert run.newest.update >= 20
        assert [line.update for line in store.log(run.id).lines] == list(range(run.newest.update + 1))
        store.append(run.id, "ann", post_of(readings(run.newest.number + 1, 10**6)))
        assert store.runs()[0].newest.update == 10**6


def test_prometheus_reads_live_runs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = new_id()
    name = 'a "name"\\ of\ntwo lines # {x="y"} 1'
    served.post(run_id, readings(0, 64, temperature_celsius=61, throttling=0), name=name)
    text = served.ask("/metrics").body.decode()
    assert all(re.fullmatch(r"# (HELP|TYPE) \w+ .+|\w+(\{.*\})? [-+.e\d]+", line) for line in text.splitlines())
    own = [line for line in text.splitlines() if run_id in line]
    labels = rf'{{run="{run_id}",name="a \"name\"\\ of\ntwo lines # {{x=\"y\"}} 1",precision="fp16"}}'
    told = dict(line.rsplit(" ", 1) for line in own)
    assert told[f"autotune_amp_run_temperature_celsius{labels}"] == "61.0"
    assert told[f"autotune_amp_run_skips_total{labels}"] == "0"
    assert "# TYPE autotune_amp_run_skips_total counter\n" in text
    assert not any("loss{" in line for line in own), "it has none"
    now = time.time() + runs.LIVE_SECONDS + 1
    monkeypatch.setattr("autotune_amp.service.runs.time.time", lambda: now)
    assert run_id not in prometheus_text(served.store)


def test_a_database_that_fails_is_told_and_no_body_is_logged(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    def rename(before: str, after: str) -> None:
        with served.store._engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {before} RENAME TO {after}")

    rename(runs._VALUES.name, "away")
    try:
        refused = served.post(new_id(), move(0, 1, "a secret"))
    finally:
        rename("away", runs._VALUES.name)
    assert (refused.status, refused.headers["retry-after"]) == (503, "30")
    assert refused.document["error"]["next_step"]
    assert "a secret" not in caplog.text + refused.body.decode()


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.real_time
def test_the_page_follows_the_run_in_a_browser_and_foreign_text_is_text(served: Served, browser: Browser) -> None:
    run_id = new_id()
    warm = {"temperature_celsius": 61.0, "sm_clock_mhz": 1410.0, "power_watts": 300.0, "throttling": 0}
    hot = warm | {"temperature_celsius": 91.0, "throttling": 1}
    first = [readings(0, 64, loss=2.0, **warm), readings(1, 128, loss=1.0, **hot)]
    served.post(run_id, *first, name=HOSTILE)
    context = browser.new_context(extra_http_headers={"Authorization": f"Bearer {ANN}"})
    problems: list[str] = []
    asked: set[str] = set()

    def refuse(dialog: Dialog) -> None:
        problems.append(dialog.message)
        dialog.dismiss()

    try:
        page = context.new_page()
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", refuse)
        page.on("request", lambda request: asked.add(request.url))
        page.goto(f"{served.address}/runs/{run_id}/page")
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        page.wait_for_selector(".main-svg", timeout=60_000)
        assert "91 degrees C" in page.inner_text("main")
        assert page.locator(".scatterlayer").count() == 4, "scale, skips, loss, temperature"
        served.post(run_id, move(2, 150, HOSTILE, pinned_modules=HOSTILE), name=HOSTILE)
        page.wait_for_selector("text=demotion at update 150", timeout=60_000)  # it reloads
        page.wait_for_selector("html[data-drawn]", timeout=60_000)
        assert HOSTILE in page.inner_text("main")
        assert HOSTILE in page.title()
        assert page.locator("main img, main b b, main script:not([type])").count() == 0
    finally:
        context.close()
    assert problems == []
    assert asked == {f"{served.address}/runs/{run_id}/page"}


def test_a_page_that_has_not_changed_is_not_sent_again(served: Served) -> None:
    run_id = new_id()
    served.post(run_id, GOOD)
    page = served.ask(f"/runs/{run_id}/page")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    again = served.ask(f"/runs/{run_id}/page", **{"If-None-Match": page.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    served.post(run_id, readings(1, 2))
    assert served.ask(f"/runs/{run_id}/page", **{"If-None-Match": page.headers["etag"]}).status == 200
