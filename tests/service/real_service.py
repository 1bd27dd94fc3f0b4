"""A service in a real process on a free port, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import CommandLine, command_line

ANN, BEN = "a" * 20, "b" * 20
TARGETS = """
[targets.plain]
workload = "train.py:plain"
folder = "project"
device = "cpu"
budget = 200
memory_limit = "16GiB"
"""
WORKLOAD = """
import time, torch
from torch import nn
from autotune_amp import Workload

def plain():
    def loss(model, batch):
        time.sleep(0.01)
        return (model(batch[0]) - batch[1]).square().mean()
    def batch(size):
        return torch.randn(size, 8), torch.randn(size, 1)
    return Workload(lambda: nn.Linear(8, 1), loss, batch, lambda p: torch.optim.SGD(p, lr=0.01))
"""
# Few trials, and a budget for a busy machine.
OPTIONS: dict[str, Any] = {
    "budget": 150,
    "trials": 2,
    "precision": "fp32",
    "batch_size": "4:8",
    "effective_batch_size": "free",
    "try": "none",
}


@dataclass
class Answer:
    """An answer of the service."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def refusal(self) -> tuple[int, str | None]:
        """Its status and the field that is wrong, of an error with a next step."""
        assert self.document["error"]["next_step"]
        return self.status, self.document["field"]


class RealService:
    """A service in `folder` that can be killed and started again; `log` is what it has written to standard error."""

    def __init__(self, cli: CommandLine, settings: str = "") -> None:
        self.cli, self.log = cli, ""
        self.folder = cli.folder / "service"
        (cli.folder / "project").mkdir()
        (cli.folder / "project/train.py").write_text(WORKLOAD)
        (cli.folder / "tokens").touch(0o600)
        (cli.folder / "tokens").write_text(f"ann {ANN}\nben {BEN}\n")
        (cli.folder / "serve.toml").write_text(f'port = 0\ntoken_file = "tokens"\n{settings}\n{TARGETS}')
        self.start()

    def start(self) -> None:
        self.process = self.cli.start("serve", "--config", "serve.toml", "--json")
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.url: str = json.loads(line)["url"]

    def end(self, how: signal.Signals) -> int:
        """End it by a signal, wait until nothing of it is left, and return its exit code."""
        self.process.send_signal(how)
        _, log = self.process.communicate(timeout=120)
        self.log += log
        assert self.cli.wait_until_alone() == []
        return self.process.returncode

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = ANN,
        data: bytes | None = None,
        request_id: str | None = None,
    ) -> Answer:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        headers |= {"Autotune-Amp-Request": request_id} if request_id else {}
        data = json.dumps(body).encode() if body is not None else data
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Answer(answer.status, {n.lower(): v for n, v in answer.headers.items()}, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, {n.lower(): v for n, v in error.headers.items()}, error.read())

    def search(self, token: str = ANN, request_id: str | None = None, **options: Any) -> Answer:
        body = {"target": "plain", "options": {**OPTIONS, **options}}
        return self.ask("POST", "/searches", body, token=token, request_id=request_id)

    def state(self, id_: str) -> dict[str, Any]:
        return self.ask("GET", f"/searches/{id_}").document

    def wait_for(self, id_: str, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The state of a search once `is_there`, which a busy machine may take minutes for."""
        deadline = time.monotonic() + 240
        while not is_there(state := self.state(id_)):
            assert time.monotonic() < deadline, state
            assert state["state"] in ("queued", "running"), state
            time.sleep(0.05)
        return state

    def records(self, study: str = "*") -> list[str]:
        """The lines of a study's outcomes, or of all."""
        paths = sorted(self.folder.glob(f"studies/{study}/outcomes.jsonl"))
        return [line for path in paths for line in path.read_text().splitlines()]


def is_done(state: dict[str, Any]) -> bool:
    return bool(state["state"] == "done")


@contextlib.contextmanager
def real_service(folder: Path, settings: str = "") -> Iterator[RealService]:
    with command_line(folder) as cli:
        service = RealService(cli, settings)
        try:
            yield service
        finally:
            if service.process.poll() is None:
                service.end(signal.SIGTERM)
