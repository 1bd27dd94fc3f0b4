"""The peak memory of a trial is that of a training in a process of its own."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import Isolation, LocalBackend, Payload, can_fork
from autotune_amp.isolation.process import Watcher
from autotune_amp.precision import torch_state
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import make_training

WORKLOAD = """
import torch
from torch import nn
from autotune_amp import Workload

def workload():
    model = lambda: nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 1))
    return Workload(model, lambda model, batch: model(batch).square().mean(), lambda n: torch.ones(n, 64))
"""


def spec(**fields: Any) -> Trial:
    candidate = Setting(precision="fp32", batch_size=256)
    return Trial(candidate=candidate, device="cpu", torch_state=torch_state.capture(), **fields)


def test_a_step_leaves_its_batch_and_its_graph_to_the_next_as_a_loop_does() -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[list[bool]] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        alive.append([there() is not None for there in made])
        result: torch.Tensor = model(batch).square().mean()
        made[:] = [weakref.ref(result)]
        return result

    model = nn.Linear(4, 1)
    training = make_training(Workload(model, loss, lambda n: torch.ones(n, 4)), model, spec())
    training.start_loading()
    for _ in range(2):
        training.forward_backward(training.next_batch())
        training.update()
    last = weakref.ref(training.next_batch())
    assert last() is not None
    training.next_batch()
    assert last() is None
    assert alive == [[], [True]]


@pytest.mark.skipif(not can_fork(), reason="trials are not forked here")
def test_a_fork_reports_what_a_process_of_its_own_takes(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(WORKLOAD)
    payload = Payload(target="tiny:workload", path=(str(tmp_path), *sys.path))

    def measured(isolation: Isolation) -> Measurement:
        with LocalBackend(payload, isolation, Watcher()) as runner:
            outcome = runner.submit(spec(num_steps=(4, 4))).result()
        assert isinstance(outcome, Measurement), outcome
        return outcome

    alone, forked = measured("fresh"), measured("forked")
    assert forked.num_steps_taken == alone.num_steps_taken == 3 + 4
    assert forked.peak_memory_bytes == pytest.approx(alone.peak_memory_bytes, rel=0.1)
