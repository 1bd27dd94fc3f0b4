"""A service that is killed or ended in any phase leaves no process, and the next one goes on with its queue."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from real_service import is_done, real_service

pytestmark = [pytest.mark.slow, pytest.mark.real_time]


def test_nothing_is_lost_whenever_it_is_killed(tmp_path: Path) -> None:
    with real_service(tmp_path, "requests_per_minute = 60000") as service:
        first = service.search(seed=1).document["id"]
        second = service.search(seed=2).document["id"]
        assert service.end(signal.SIGKILL) == -9  # as soon as they are queued
        service.start()
        service.wait_for(first, lambda state: state["num_trials"] >= 1)
        assert service.state(second)["state"] == "queued"
        before = service.records()
        assert service.end(signal.SIGKILL) == -9  # in a search
        service.start()
        done = service.wait_for(first, is_done)
        assert service.records()[: len(before)] == before
        assert service.end(signal.SIGKILL) == -9  # between two
        service.start()
        assert service.state(first) == done
        service.wait_for(second, lambda state: state["num_trials"] >= 1)
        assert service.end(signal.SIGTERM) == 143
        (best,) = service.folder.glob(f"searches/{second}.json")
        assert '"was_interrupted": true' in best.read_text(), "saved when the service ended"
        measured = service.records()
        service.start()
        assert service.wait_for(second, is_done)["recommendation"]["search"]["num_trials"] >= 1
        assert service.records()[: len(measured)] == measured
