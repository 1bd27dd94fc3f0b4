"""What a trial makes of what was timed, and what it does to its process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotune_amp import Workload
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.precision import torch_state
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.timing import Timing


@pytest.mark.parametrize("hold_heap", [True, False])
def test_the_heap_is_held_only_where_that_is_asked_for_and_the_rate_is_of_the_mean_step(
    hold_heap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confirming process starts with the variables, or is meant to run without them."""
    held: list[bool] = []
    timed = Timing(
        first_step_seconds=1.0,
        raw_step_seconds=(1.0, 1.0, 1.0, 5.0),  # a long run meets its slow steps too
        num_steps_together=1,
        data_seconds=0.0,
        update_seconds=None,
        num_skips=0,
        last_loss=0.0,
        was_cut=False,
        num_compiling_steps=0,
    )
    monkeypatch.setattr(worker, "hold_heap", lambda: held.append(True))
    monkeypatch.setattr(worker, "time_steps", lambda *_: timed)
    spec = Trial(
        candidate=Setting(precision="fp32", batch_size=8, accumulation_steps=2),
        device="cpu",
        hold_heap=hold_heap,
        torch_state=torch_state.capture(),
    )
    workload = Workload(nn.Linear(4, 1), lambda model, batch: model(batch).mean(), lambda size: torch.ones(size, 4))
    found = worker.run(Context(workload, is_kept=False), spec, lambda event: None)
    assert isinstance(found, Measurement)
    assert (found.step_seconds, found.samples_per_second) == (2.0, 8.0)
    assert held == [True] * hold_heap
