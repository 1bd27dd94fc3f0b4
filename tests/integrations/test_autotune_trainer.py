"""AutotuneTrainer in real trainings: the precision inside the model's forward, demotion, checkpoints, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_samples import (
    BATCH,
    Notes,
    StepNumbers,
    all_finite,
    arguments,
    fp16,
    halved,
    rows,
    trainer,
)
from transformers import Trainer, TrainingArguments

from autotune_amp.core.config import AmpConfig, DemotedError, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.transformers import AutotuneTrainer

HALF = {"fp16": (torch.float16, torch.float16), "bf16": (torch.bfloat16, torch.bfloat16), "fp32": (None, torch.float32)}


def last_checkpoint(folder: Path) -> str:
    return str(max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])))


def test_an_overflow_in_the_middle_demotes_and_the_checkpoint_goes_on_at_the_rung(tmp_path: Path) -> None:
    data = rows(10 * BATCH, large=range(5 * BATCH, 7 * BATCH))
    run = trainer(fp16(), tmp_path, data, max_steps=10, save_strategy="steps", save_steps=10)
    run.train()
    model, controller = run.model, run.controller
    assert [record.kind for record in controller.status().history] == ["demotion"]
    assert controller.config.precision == "bf16"
    assert model.dtypes(0, 6) == {HALF["fp16"]}  # the second bad step demotes, and runs in others for the diagnosis
    assert model.dtypes(7, 10) == {HALF["bf16"]}
    assert all_finite(model)
    log = run.state.log_history
    assert [entry["amp/rung"] for entry in log[:10]] == [0] * 6 + [1] * 4
    assert [entry["amp/precision"] for entry in log[:10]] == ["fp16"] * 6 + ["bf16"] * 4
    assert [len(entry["amp/moves"]) for entry in log[:10]] == [0] * 6 + [1] + [0] * 3
    assert log[9]["amp/num_skips"] == 2
    resumed = trainer(fp16(), tmp_path, data, max_steps=14)
    resumed.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    assert resumed.model.dtypes(10, 14) == {HALF["bf16"]}
    assert [record.kind for record in resumed.controller.status().history] == ["demotion"]
    assert resumed.controller.status().num_updates == 14
    assert [entry["amp/moves"] for entry in resumed.state.log_history[10:14]] == [[]] * 4  # what is new


def test_checkpoint_and_stop_ends_the_training_with_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    data = rows(10 * BATCH, large=range(3 * BATCH, 5 * BATCH))
    config = fp16(halved(fp16()))
    options = {"on_demotion": "checkpoint_and_stop"}
    run = trainer(config, tmp_path, data, max_steps=10, controller_options=options)
    with pytest.raises(DemotedError, match="from fp16 to fp32") as raised:
        run.train()
    assert (run.state.global_step, Path(last_checkpoint(tmp_path)).name) == (5, "checkpoint-5")
    config = raised.value.config
    assert (config.precision, config.batch_size, config.accumulation_steps) == ("fp32", BATCH // 2, 2)
    resumed = trainer(config, tmp_path, data, max_steps=10)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.model.runs == {step: {(None, torch.float32, BATCH // 2)} for step in range(5, 10)}
    assert resumed.state.global_step == 10
    assert all_finite(resumed.model)


def test_bf16_has_the_guard(tmp_path: Path) -> None:
    data = rows(6 * BATCH)
    data[2 * BATCH]["inputs"] = torch.full_like(data[0]["inputs"], torch.nan)
    run = trainer(AmpConfig(precision="bf16", batch_size=BATCH), tmp_path, data, max_steps=6)
    run.train()
    assert run.model.dtypes(0, 6) == {HALF["bf16"]}
    assert run.controller.status().num_skips == 1
    assert all_finite(run.model)
    rates = [entry["learning_rate"] for entry in run.state.log_history[:6]]
    assert rates[3] == rates[2] != rates[1]  # the schedule counts steps that were taken


def test_in_fp32_it_trains_as_the_trainer_does(tmp_path: Path) -> None:
    config = AmpConfig(precision="fp32", batch_size=BATCH, accumulation_steps=2)
    options: dict[str, Any] = {"max_steps": 4, "max_grad_norm": 0.1, "weight_decay": 0.1}
    data = rows(7 * BATCH)  # the last window is short
    ours = trainer(config, tmp_path, data, **options)
    theirs: Any = Trainer(Notes(), arguments(config, tmp_path, **options), train_dataset=data)
    ours.train()
    theirs.train()
    assert all(map(torch.equal, ours.model.parameters(), theirs.model.parameters()))
    norms = [[entry["grad_norm"] for entry in run.state.log_history[:4]] for run in (ours, theirs)]
    assert norms[0] == norms[1]


def test_gradients_are_clipped_unscaled(tmp_path: Path) -> None:
    data = rows(4 * BATCH)
    norms = []
    for init_scale in (1.0, 1024.0):
        config = fp16(loss_scale=LossScale(init_scale=init_scale))
        run = trainer(config, tmp_path, data, max_steps=4, max_grad_norm=0.1)
        run.train()
        assert run.controller.status().num_skips == 0
        norms.append([entry["grad_norm"] for entry in run.state.log_history[:4]])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


@pytest.mark.parametrize("num_rows", [4 * BATCH, 4 * BATCH - 1])  # the last batch then splits into 2 and 1
def test_a_fallback_in_a_smaller_batch_splits_the_batches_and_learns_the_same(tmp_path: Path, num_rows: int) -> None:
    data = rows(num_rows)
    plain = AmpConfig(precision="fp32", batch_size=BATCH, accumulation_steps=2)
    config = AmpConfig(precision="bf16", batch_size=BATCH, accumulation_steps=2, fallback=[halved(plain)])
    ours = trainer(config, tmp_path, data, num_train_epochs=1)
    ours.controller.set_precision("fp32")
    theirs: Any = Trainer(
        Notes(), arguments(plain, tmp_path, num_train_epochs=1), train_dataset=data, callbacks=[StepNumbers()]
    )
    for run in (ours, theirs):
        run.train()
    assert all((None, torch.float32, BATCH // 2) in runs for runs in ours.model.runs.values())
    assert {run[2] for runs in theirs.model.runs.values() for run in runs} <= {BATCH, BATCH - 1}
    for mine, reference in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(mine, reference)
    assert [entry["loss"] for entry in ours.state.log_history[:2]] == pytest.approx(
        [entry["loss"] for entry in theirs.state.log_history[:2]]
    )


def test_a_rerun_computes_the_loss_that_the_latest_piece_had(tmp_path: Path) -> None:
    plain = AmpConfig(precision="fp32", batch_size=BATCH, accumulation_steps=2)
    config = AmpConfig(precision="bf16", batch_size=BATCH, accumulation_steps=2, fallback=[halved(plain)])
    run = trainer(config, tmp_path, rows(2 * BATCH - 1), max_steps=1, learning_rate=0.0)
    run.controller.set_precision("fp32")
    losses: list[Tensor] = []
    scale = run.controller.scale

    def noting(loss: Tensor) -> Tensor:
        losses.append(loss.detach())
        return scale(loss)  # type: ignore[no-any-return]

    run.controller.scale = noting
    run.train()
    assert len(losses) == 4
    assert torch.equal(run._rerun(), losses[-1])  # a third of a batch


def test_every_value_of_the_arguments_reads_back_after_a_step(tmp_path: Path) -> None:
    scale = LossScale(init_scale=256.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    config = fp16(accumulation_steps=2, num_workers=1, loss_scale=scale)
    passes: list[int] = []
    run = trainer(config, tmp_path, rows(2 * BATCH), max_steps=1, eval_strategy="no")
    run.model.register_forward_hook(lambda *_: passes.append(1))
    run.train()
    loader = run.callback_handler.train_dataloader
    assert (loader.total_batch_size, loader.num_workers, len(passes)) == (BATCH, 1, 2)
    assert run.model.runs == {0: {(torch.float16, torch.float16, BATCH)}}
    scaler = run.accelerator.scaler
    assert (scaler.get_scale(), scaler.get_growth_factor()) == (256.0, 4.0)
    assert (scaler.get_backoff_factor(), scaler.get_growth_interval()) == (0.25, 7)
    assert run.controller.config == config
    assert (run.args.fp16, run.args.bf16, run.args.tf32) == (True, False, False)
    run.model.runs.clear()
    found = run.predict(rows(BATCH))
    assert found.predictions.dtype == "float32"
    assert run.model.runs == {0: {(torch.float16, torch.float16, BATCH)}}


def test_the_same_arguments_serve_a_plain_trainer(tmp_path: Path) -> None:
    config = AmpConfig(precision="bf16", batch_size=BATCH, accumulation_steps=2)
    run: Any = Trainer(
        Notes(), arguments(config, tmp_path, max_steps=1), train_dataset=rows(2 * BATCH), callbacks=[StepNumbers()]
    )
    run.train()
    assert run.model.runs == {0: {(torch.bfloat16, torch.bfloat16, BATCH)}}
    assert run.accelerator.mixed_precision == "bf16"
    with pytest.raises(InvalidRequestError, match="autocast in its forward"):
        AutotuneTrainer(run.model, arguments(config, tmp_path), train_dataset=rows(BATCH), amp_config=config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda args: setattr(args, "per_device_train_batch_size", 8), "per_device_train_batch_size=8; the config"),
        (lambda args: setattr(args, "gradient_accumulation_steps", 3), "gradient_accumulation_steps=3; the config"),
        (lambda args: setattr(args, "mixed_precision", "bf16"), "asks for bf16; the config's precision is fp16"),
        (lambda args: setattr(args, "tf32", True), "tf32=True; the config says tf32=False"),
        (lambda args: setattr(args, "auto_find_batch_size", True), "auto_find_batch_size"),
        (lambda args: setattr(args, "_n_gpu", 2), "2 GPUs in one process"),
    ],
)
def test_a_contradiction_is_refused(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    args = arguments(fp16(), tmp_path)
    change(args)
    with pytest.raises(InvalidRequestError, match=message):
        AutotuneTrainer(Notes(), args, amp_config=fp16())


def test_a_fallback_that_the_loop_cannot_follow_is_refused_unless_it_stops(tmp_path: Path) -> None:
    config = fp16(FallbackPlan(precision="fp32", batch_size=BATCH, accumulation_steps=2))
    with pytest.raises(InvalidRequestError, match="the Trainer's loop keeps to one"):
        trainer(config, tmp_path, rows(BATCH))
    trainer(config, tmp_path, rows(BATCH), controller_options={"on_demotion": "checkpoint_and_stop"})


def test_the_config_decides_its_own_arguments_and_leaves_the_rest(tmp_path: Path) -> None:
    made = AmpConfig(precision="fp32", batch_size=3).to_training_arguments(output_dir=str(tmp_path), use_cpu=True)
    assert isinstance(made, TrainingArguments)
    assert (made.per_device_train_batch_size, made.dataloader_num_workers, made.mixed_precision) == (3, 0, "no")
    with pytest.raises(InvalidRequestError, match="bf16=True: the config decides that"):
        fp16().to_training_arguments(output_dir=str(tmp_path), bf16=True)
    with pytest.raises(InvalidRequestError, match="no fp8"):
        AmpConfig(precision="fp8", batch_size=1).to_training_arguments(output_dir=str(tmp_path))
