"""What is promised of a LightningModule is measured in a Trainer's own fit(), with what the user's Trainer has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from framework_samples import QUIET
from torch import Tensor, nn

from autotune_amp import LossScale, Workload
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import make_workload
from autotune_amp.precision import torch_state
from autotune_amp.processes.packing import pack, unpack
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context, make_model
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.training import Training, make_training

pytestmark = [*QUIET, pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")]
NUM_STEPS = 6


def confirmation(**candidate: Any) -> Trial:
    setting = Setting(**{"precision": "fp32", "batch_size": 4, **candidate})
    return Trial(
        candidate=setting,
        device="cpu",
        purpose="confirm",
        num_steps=(NUM_STEPS, NUM_STEPS),
        torch_state=torch_state.capture(),
        loss_scale=LossScale(init_scale=256.0) if setting.precision == "fp16" else None,
    )


def outcome(workload: Workload, **candidate: Any) -> Measurement:
    there = make_workload(unpack(pack(workload)), "a test")
    found = worker.run(Context(there, is_kept=False), confirmation(**candidate), lambda event: None)
    assert isinstance(found, Measurement), found
    return found


@pytest.mark.parametrize(
    ("precision", "as_lightning_calls_it"), [("fp32", "32-true"), ("bf16", "bf16-mixed"), ("fp16", "16-mixed")]
)
def test_a_confirmation_is_a_fit_with_the_users_callbacks_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any, as_lightning_calls_it: str
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_samples import Data, Heard, Watched, trainer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Heard, "seen", [])
    callbacks = [Heard(), ModelCheckpoint(every_n_train_steps=1)]
    live, module = trainer(tmp_path, callbacks=callbacks, gradient_clip_val=0.5, accumulate_grad_batches=3), Watched()
    workload = Workload.from_lightning(module, Data(), live)
    found = outcome(workload, precision=precision, batch_size=2, accumulation_steps=2)
    assert workload.accumulation_steps == 3
    assert (found.is_own_loop, found.why_not_own_loop) == (True, None)
    assert found.step_seconds >= 0.1  # two batches
    assert set(Heard.seen) == {(2, as_lightning_calls_it, 0.5)}
    assert list(tmp_path.iterdir()) == []
    assert module._trainer is None
    assert live.global_step == 0


def test_what_the_module_logs_is_logged_and_its_data_may_come_without_a_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning_samples import Logging

    monkeypatch.setattr(Logging, "arrived", set())

    def batches(size: int) -> tuple[Tensor, Tensor]:
        return torch.ones(size, 8), torch.ones(size, 1)

    found = outcome(Workload.from_lightning(Logging(), batches))
    assert found.is_own_loop
    assert Logging.arrived == {True}


def test_its_clipping_and_its_schedule_are_in_a_trials_step(tmp_path: Path) -> None:
    from lightning_samples import Peaked, loader, trainer

    live = trainer(tmp_path, gradient_clip_val=0.01)
    workload = make_workload(unpack(pack(Workload.from_lightning(Peaked(), loader(), live))), "a test")
    training = make_training(workload, make_model(workload), confirmation())
    assert isinstance(training, Training)
    norms, rates = [], []

    def note(*_: Any) -> None:
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(gradients)))

    training.optimizer.register_step_pre_hook(note)
    for _ in range(8):
        rates.append(training.optimizer.param_groups[0]["lr"])
        training.forward_backward(training.next_batch())
        training.update()
    training.close()
    assert norms == pytest.approx([0.01] * 8, rel=0.01)
    assert len(set(rates[:4])) == 4
    assert len(set(rates[4:])) == 1
    assert outcome(Workload.from_lightning(Peaked(), loader(), live)).is_own_loop


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_confirmation_steps_with_the_settings_implementation_and_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Any
) -> None:
    from lightning_samples import Clipped, loader, trainer

    monkeypatch.setattr(Clipped, "fused", [])
    workload = Workload.from_lightning(Clipped(), loader(), trainer(tmp_path, gradient_clip_val=0.5))
    found = outcome(workload, precision=precision, optimizer_impl="fused")
    assert (found.is_own_loop, found.why_not_own_loop) == (True, None)
    assert set(Clipped.fused) == {True}
