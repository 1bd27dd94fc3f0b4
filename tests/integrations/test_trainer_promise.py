"""What is promised of a Trainer is measured in its own train(), and its clipping and schedule are in every trial."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_trainer_workload import BATCH, another_process, padded, sentences, trainer, trial
from torch import nn

from autotune_amp import LossScale, Workload
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import make_workload
from autotune_amp.precision import torch_state
from autotune_amp.processes.packing import pack, unpack
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import Trial

if TYPE_CHECKING:
    from transformers import Trainer

NUM_STEPS = 6


def outcome(live: Trainer, purpose: Any = "confirm", **candidate: Any) -> Measurement:
    """What a process finds of it, on the copy that travels there."""
    setting = Setting(**{"precision": "fp32", "batch_size": BATCH, **candidate})
    spec = Trial(
        candidate=setting,
        device="cpu",
        purpose=purpose,
        num_steps=(NUM_STEPS, NUM_STEPS),
        torch_state=torch_state.capture(),
        loss_scale=LossScale(init_scale=256.0) if setting.precision == "fp16" else None,
    )
    with another_process():
        there = make_workload(unpack(pack(Workload.from_trainer(live))), "a test")
        found = worker.run(Context(there, is_kept=False), spec, lambda event: None)
    assert isinstance(found, Measurement), found
    return found


def test_a_confirmation_is_a_run_of_the_trainer_with_its_callbacks_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer_samples import Heard, Tracked
    from transformers import EarlyStoppingCallback

    out = tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Heard, "events", [])
    live = trainer(out, logging_steps=2)
    for callback in (Heard(), Tracked(), EarlyStoppingCallback()):
        live.add_callback(callback)
    before, state = sorted(tmp_path.rglob("*")), live.state
    found = outcome(live)
    assert (found.is_own_loop, found.why_not_own_loop) == (True, None)
    assert found.step_seconds >= 0.05
    assert len(found.raw_step_seconds) == NUM_STEPS
    assert set(Heard.events) == {"log"}
    assert sorted(tmp_path.rglob("*")) == before
    assert live.state is state
    assert live.state.global_step == 0
    searched = outcome(live, purpose="search")
    assert not searched.is_own_loop
    for measured in (found, searched):  # sentences have 4 to 16 tokens, those of a batch are padded to the longest
        assert measured.tokens_per_second is not None
        assert 4 <= measured.tokens_per_second / measured.samples_per_second <= 16
        assert measured.padded_share is not None
        assert 0 < measured.padded_share < 1


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_it_trains_as_the_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, dtype: torch.dtype
) -> None:
    from trainer_samples import Noting

    monkeypatch.setattr(Noting, "seen", set())
    found = outcome(trainer(tmp_path, Noting), precision=precision, batch_size=2, accumulation_steps=3)
    assert (found.is_own_loop, found.why_not_own_loop) == (True, None)
    assert Noting.seen == {(2, 3, dtype)}


def test_its_clipping_and_its_schedule_are_in_a_trials_step(tmp_path: Path) -> None:
    live = trainer(tmp_path, max_grad_norm=0.01, learning_rate=0.1, warmup_steps=10)
    with another_process():
        training = trial(Workload.from_trainer(live))
        norms: list[float] = []

        def note(*_: Any) -> None:
            gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
            norms.append(float(nn.utils.get_total_norm(gradients)))

        training.optimizer.register_step_pre_hook(note)
        rates = []
        for _ in range(3):
            rates.append(training.optimizer.param_groups[0]["lr"])
            training.forward_backward(padded(sentences()[:BATCH]))
            training.update()
    assert norms == pytest.approx([0.01] * 3, rel=0.01)
    assert rates == pytest.approx([0.0, 0.01, 0.02])
