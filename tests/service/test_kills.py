"""A service that is killed or ended in any phase leaves no process, and the next one goes on with its queue."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from real_service import is_done, real_service

pytestmark = [pytest.mark.slow, pytest.mark.real_time, pytest.mark.timeout(900)]


def test_nothing_is_lost_whenever_it_ends(tmp_path: Path) -> None:
    with real_service(tmp_path, "requests_per_minute = 60000") as service:
        first = service.search(seed=1).document["id"]
        second = service.search(seed=2).document["id"]
        assert service.end(signal.SIGKILL) == -9  # as soon as they are queued
        service.start()
        service.wait_for(first, lambda state: state["num_trials"] >= 1)
        assert service.state(second)["state"] == "queued"
        killed = service.records()
        assert service.end(signal.SIGKILL) == -9  # in a search
        service.start()
        service.wait_for(first, lambda state: state["phase"] in ("searching", "confirming in fresh processes"))
        assert service.end(signal.SIGTERM) == 143
        (saved,) = service.folder.glob("studies/*/recommendation.json")
        assert json.loads(saved.read_text())["search"]["was_interrupted"]
        ended = service.records()
        assert ended[: len(killed)] == killed
        service.start()
        done = service.wait_for(first, is_done)
        assert service.records()[: len(ended)] == ended
        assert service.end(signal.SIGKILL) == -9  # between two searches
        service.start()
        assert service.state(first) == done
        service.wait_for(second, lambda state: state["num_trials"] >= 1)
