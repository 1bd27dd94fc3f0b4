"""AutotuneTrainers that stop, resume at another rung, or train more than one model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_samples import BATCH, Notes, StepNumbers, all_finite, arguments, fp16, halved, rows, trainer
from transformers import TrainerCallback

from autotune_amp.core.config import AmpConfig, DemotedError, FallbackPlan, LossScale
from autotune_amp.core.errors import NoRungFitsError, NotPrecisionError
from autotune_amp.integrations.transformers import AutotuneCallback, AutotuneTrainer
from autotune_amp.runtime import run_log

STOP = {"on_demotion": "checkpoint_and_stop"}
LARGE = range(3 * BATCH, 5 * BATCH)


def test_the_rung_that_was_saved_has_its_batch_size_after_resuming_too(tmp_path: Path) -> None:
    config, data = fp16(halved(fp16())), rows(8 * BATCH, large=LARGE)
    trainer(config, tmp_path, data, max_steps=6, save_strategy="steps", save_steps=6).train()
    resumed = trainer(config, tmp_path, data, max_steps=8)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.model.runs == {step: {(None, torch.float32, BATCH // 2)} for step in (6, 7)}


def test_a_rung_that_the_loop_cannot_follow_is_not_gone_on_with(tmp_path: Path) -> None:
    config = fp16(FallbackPlan(precision="fp32", batch_size=BATCH, accumulation_steps=2))
    data = rows(8 * BATCH, large=LARGE)
    run, resumed = (trainer(config, tmp_path, data, max_steps=8, controller_options=STOP) for _ in range(2))
    with pytest.raises(DemotedError, match=r"checkpoint-5 is its checkpoint.*resume_from_checkpoint='.*checkpoint-5'"):
        run.train()
    for again, checkpoint in ((resumed, True), (run, True), (run, None)):
        again.model.runs.clear()
        with pytest.raises(DemotedError, match=f"batch size {BATCH} and 2 accumulation steps") as raised:
            again.train(resume_from_checkpoint=checkpoint)
        assert (raised.value.config.accumulation_steps, again.model.runs) == (2, {})


def test_an_error_names_a_checkpoint_only_where_one_was_saved(tmp_path: Path) -> None:
    run = trainer(fp16(), tmp_path, rows(6 * BATCH, large=LARGE), max_steps=6, controller_options=STOP)
    run.remove_callback(AutotuneCallback)
    with pytest.raises(DemotedError, match=r"No checkpoint was saved.*and train\(\)"):
        run.train()


@pytest.mark.parametrize("options", [STOP, None])
def test_a_run_without_a_rung_left_saves_a_checkpoint_before_it_stops(tmp_path: Path, options: Any) -> None:
    data = rows(8 * BATCH, large=LARGE)
    run = trainer(fp16(fallback=()), tmp_path, data, max_steps=8, controller_options=options)
    with pytest.raises(NoRungFitsError, match="checkpoint-5 is its checkpoint"):
        run.train()
    assert (tmp_path / "checkpoint-5" / "scaler.pt").exists()
    assert all_finite(run.model)


@pytest.mark.parametrize("is_resumed", [True, False])
def test_a_stopped_trainer_stops_again_until_the_data_are_mended(tmp_path: Path, is_resumed: bool) -> None:
    checkpoint = str(tmp_path / "checkpoint-12") if is_resumed else None
    data = rows(4 * BATCH)
    sound = [row["inputs"] for row in data]
    for row in data:
        row["inputs"] = row["inputs"] * torch.nan
    run = trainer(AmpConfig(precision="bf16", batch_size=BATCH), tmp_path, data, max_steps=24)
    with pytest.raises(NotPrecisionError, match="checkpoint-12 is its checkpoint"):
        run.train()
    with pytest.raises(NotPrecisionError, match=f"checkpoint-{22 if is_resumed else 10} is its checkpoint"):
        run.train(resume_from_checkpoint=checkpoint)
    for row, inputs in zip(data, sound, strict=True):
        row["inputs"] = inputs
    run.train(resume_from_checkpoint=checkpoint)
    status = run.controller.status()
    assert run.state.global_step == 24
    assert (status.num_steps, status.num_skips) == ((12, 12) if is_resumed else (24, 22))
    assert all_finite(run.model)


def test_a_second_training_goes_on_with_the_pins_and_the_scale_of_the_first(tmp_path: Path) -> None:
    scale = LossScale(init_scale=1024.0, growth_interval=3)
    run = trainer(fp16(loss_scale=scale, pinned_modules=("one",)), tmp_path, rows(4 * BATCH), max_steps=4)
    for num_updates, expected in ((4, 2048.0), (8, 4096.0)):
        run.model.runs.clear()
        run.train()
        assert run.model.runs == {step: {(torch.float16, torch.float32, BATCH)} for step in range(4)}
        status = run.controller.status()
        assert (status.num_updates, status.num_steps, status.scale) == (num_updates, num_updates, expected)
        assert (status.pinned_modules, status.history) == (("one",), ())


def test_an_interrupted_training_can_be_begun_again(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    run = trainer(fp16(accumulation_steps=2), tmp_path, rows(4 * BATCH), max_steps=2)
    run.add_callback(Interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    run.remove_callback(Interrupt)
    run.train()
    assert (run.controller.status().num_steps, run.controller.status().num_skips) == (2, 0)


def test_an_overflow_in_the_first_pass_of_a_window_demotes_at_once(tmp_path: Path) -> None:
    data = rows(16 * BATCH)
    for row in (*data[8 * BATCH : 9 * BATCH], *data[10 * BATCH : 11 * BATCH]):
        row["inputs"] *= 1e6
    run = trainer(fp16(accumulation_steps=2), tmp_path, data, max_steps=8)
    run.train()
    (move,) = run.controller.status().history
    assert (move.kind, move.update, move.after) == ("demotion", 6, "bf16")
    assert all_finite(run.model)


def with_model_init(folder: Path, **options: Any) -> Any:
    recommendation: Any = SimpleNamespace(config=fp16())
    return AutotuneTrainer(
        model_init=Notes,
        args=arguments(fp16(), folder, max_steps=6, **options),
        train_dataset=rows(6 * BATCH, large=LARGE),
        eval_dataset=rows(BATCH),
        callbacks=[StepNumbers()],
        amp_config=recommendation,
    )


def test_a_second_training_of_a_new_model_begins_with_the_config(tmp_path: Path) -> None:
    run = with_model_init(tmp_path)
    run.train()
    first, model = run.controller, run.model
    run.train()
    assert run.controller is run.accelerator.scaler is not first
    assert run.model is not model
    assert run.model.runs == model.runs
    assert [entry["amp/rung"] for entry in run.state.log_history[:6]] == [0] * 4 + [1] * 2
    assert run.controller.status().num_updates == 6


def test_a_hyperparameter_search_logs_the_controller_of_each_trial(tmp_path: Path) -> None:
    run = with_model_init(tmp_path)
    run.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0.01, 0.02)},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=2,
        backend="optuna",
    )
    assert [entry["amp/rung"] for entry in run.state.log_history[:6]] == [0] * 4 + [1] * 2
    assert run.controller.status().num_updates == 6


def test_the_controllers_options_reach_it(tmp_path: Path) -> None:
    data = rows(20 * BATCH)
    for row in data[4 * BATCH :]:
        row["inputs"] = torch.full_like(row["inputs"], torch.nan)
    log = tmp_path / "run.jsonl"
    run = trainer(fp16(), tmp_path, data, max_steps=20, controller_options={"run_log": log, "halt": False})
    run.train()
    assert run.controller.status().num_skips == 16  # it goes on, where it would stop after ten
    assert run_log.read(log).begin.config == fp16()
