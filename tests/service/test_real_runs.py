"""A training that posts to a service in a real process, which shows it, and goes on with it after it was killed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_service import ANN, BEN, RealService, real_service
from torch import nn

from autotune_amp import AmpConfig, PrecisionController
from autotune_amp.integrations.sinks import http

pytestmark = [pytest.mark.slow, pytest.mark.real_time, pytest.mark.timeout(600)]


def newest_once(service: RealService, is_there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The only run of the service once its newest metrics are as wanted."""
    deadline = time.monotonic() + 120
    while True:
        listed = json.loads(service.ask("GET", "/runs").body)
        if len(listed) == 1 and is_there(listed[0]["newest"]):
            run: dict[str, Any] = listed[0]
            return run
        assert time.monotonic() < deadline, listed
        time.sleep(0.05)


def test_a_run_is_shown_and_outlives_a_killed_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with real_service(tmp_path) as service:
        settings = tmp_path / "serve.toml"
        settings.write_text(settings.read_text().replace("port = 0", f"port = {service.url.rpartition(':')[2]}"))
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        inputs, targets = torch.randn(4, 4), torch.randn(4, 1)
        config = AmpConfig(precision="bf16", batch_size=4, fallback=["fp32"])
        controller = PrecisionController(config, device="cpu", sinks=[http(service.url, ANN, name="a training")])

        def train(num_updates: int) -> None:
            for _ in range(num_updates):
                controller.train_step(lambda: nn.functional.mse_loss(model(inputs), targets), optimizer)

        train(100)
        controller.set_precision("fp32")
        train(100)
        run = newest_once(service, lambda newest: newest["update"] >= 192)
        path = f"/runs/{run['id']}"
        assert (run["name"], run["newest"]["precision"], run["is_live"]) == ("a training", "fp32", True)
        (move,) = service.ask("GET", path).document["moves"]
        assert (move["before"], move["after"], move["update"]) == ("bf16", "fp32", 100)
        assert b"a training" in service.ask("GET", f"{path}/page").body
        assert f'autotune_amp_run_update{{run="{run["id"]}"' in service.ask("GET", "/metrics").body.decode()

        readings = {name: value for name, value in run["newest"].items() if value is not None}
        foreign = {"name": "x", "values": [{**readings, "number": 10**6}]}
        assert service.ask("POST", path, foreign, token=BEN).status == 403
        assert service.ask("GET", path, token="c" * 20).status == 401

        assert service.end(signal.SIGKILL) == -9
        train(100)
        service.start()
        kept = service.ask("GET", path).document
        assert (kept["moves"], kept["newest"]["update"] >= 192) == ([move], True)
        train(100)
        controller.detach()
        again = newest_once(service, lambda newest: newest["update"] >= 384)
        assert (again["id"], again["began"]) == (run["id"], run["began"])
        assert service.ask("POST", path, foreign, token=BEN).status == 403
