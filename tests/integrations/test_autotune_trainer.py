"""AutotuneTrainer in real trainings: precision in the model's forward, demotion, stops, checkpoints, arguments."""

from __future__ import annotations

import copy
import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from framework_samples import BATCH, are_finite, fp16, same

from autotune_amp.core.config import AmpConfig, DemotedError, FallbackPlan, LossScale
from autotune_amp.core.errors import InvalidRequestError, NoRungFitsError, NotPrecisionError

if TYPE_CHECKING:
    from transformers import Seq2SeqTrainingArguments


HALF = {"fp16": (torch.float16, torch.float16), "bf16": (torch.bfloat16, torch.bfloat16), "fp32": (None, torch.float32)}


def last_checkpoint(folder: Path) -> str:
    return str(max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1])))


def test_an_overflow_in_the_middle_demotes_and_the_checkpoint_goes_on_at_the_rung(tmp_path: Path) -> None:
    from trainer_samples import rows, trainer

    data = rows(10 * BATCH, large=range(5 * BATCH, 7 * BATCH))
    run = trainer(fp16(), tmp_path, data, max_steps=10, save_strategy="steps", save_steps=10)
    run.train()
    model, controller = run.model, run.controller
    assert [record.kind for record in controller.status().history] == ["demotion"]
    assert "first in module" in controller.status().history[0].reason, "the batch was not run again"
    assert controller.config.precision == "bf16"
    assert model.dtypes(0, 6) == {HALF["fp16"]}  # the second bad step demotes, and runs in others for the diagnosis
    assert model.dtypes(7, 10) == {HALF["bf16"]}
    assert are_finite(model)
    log = run.state.log_history
    assert [entry["autotune_amp/rung"] for entry in log[:10]] == [0] * 6 + [1] * 4
    assert [entry["autotune_amp/precision"] for entry in log[:10]] == ["fp16"] * 6 + ["bf16"] * 4
    assert (log[9]["autotune_amp/moves"], log[9]["autotune_amp/skips"]) == (1, 2)
    rates = [entry["learning_rate"] for entry in log[:10]]
    assert rates[6] == rates[5] != rates[4], "the schedule counts steps that were taken"
    resumed = trainer(fp16(), tmp_path, data, max_steps=14)
    resumed.train(resume_from_checkpoint=last_checkpoint(tmp_path))
    assert resumed.model.dtypes(10, 14) == {HALF["bf16"]}
    assert [record.kind for record in resumed.controller.status().history] == ["demotion"]
    assert resumed.controller.status().num_updates == 14


def test_a_diagnosis_leaves_the_counters_and_the_prepared_inputs_of_another_trainer_alone(tmp_path: Path) -> None:
    from trainer_samples import AutotuneBuffered, rows, trainer

    data = rows(6 * BATCH, large=range(2 * BATCH, 4 * BATCH))
    run = trainer(fp16(), tmp_path, data, max_steps=6, kind=AutotuneBuffered)
    run.train()
    (move,) = run.controller.status().history
    assert (move.kind, "first in module" in move.reason) == ("demotion", True)
    assert (run.step, run.num_prepared) == (6, 6)


@pytest.mark.parametrize("batch_size", [BATCH, BATCH // 2])
def test_a_run_that_has_to_stop_ends_with_a_checkpoint_to_go_on_from(tmp_path: Path, batch_size: int) -> None:
    """Where every demotion is to stop it, and where a fallback takes another batch size."""
    from trainer_samples import rows, trainer

    data = rows(10 * BATCH, large=range(3 * BATCH, 5 * BATCH))
    options = {"on_demotion": "checkpoint_and_stop"} if batch_size == BATCH else {}
    plan = FallbackPlan(precision="fp32", batch_size=batch_size, accumulation_steps=BATCH // batch_size)
    run = trainer(fp16(plan), tmp_path, data, max_steps=10, controller_options=options)
    with pytest.raises(DemotedError, match="from fp16 to fp32") as raised:
        run.train()
    assert (run.state.global_step, Path(last_checkpoint(tmp_path)).name) == (5, "checkpoint-5")
    config = raised.value.config
    assert (config.precision, config.batch_size) == ("fp32", batch_size)
    resumed = trainer(config, tmp_path, data, max_steps=10)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.model.runs == {step: {(None, torch.float32, batch_size)} for step in range(5, 10)}
    assert are_finite(resumed.model)


def test_in_fp32_it_trains_as_the_trainer_does(tmp_path: Path) -> None:
    from trainer_samples import Notes, arguments, rows, trainer
    from transformers import Trainer

    config = AmpConfig(precision="fp32", batch_size=BATCH, accumulation_steps=2)
    options: dict[str, Any] = {"max_steps": 4, "max_grad_norm": 0.1, "weight_decay": 0.1}
    data = rows(7 * BATCH)  # the last window is short
    ours = trainer(config, tmp_path, data, **options)
    theirs: Any = Trainer(Notes(), arguments(config, tmp_path, **options), train_dataset=data)
    ours.train()
    theirs.train()
    assert same(ours.model, theirs.model)
    norms = [[entry["grad_norm"] for entry in run.state.log_history[:4]] for run in (ours, theirs)]
    assert norms[0] == norms[1]


def test_the_same_arguments_serve_a_plain_trainer(tmp_path: Path) -> None:
    from trainer_samples import Notes, StepNumbers, arguments, rows
    from transformers import Trainer

    from autotune_amp.integrations.transformers import AutotuneTrainer

    config = AmpConfig(precision="bf16", batch_size=BATCH, accumulation_steps=2)
    run: Any = Trainer(
        Notes(), arguments(config, tmp_path, max_steps=1), train_dataset=rows(2 * BATCH), callbacks=[StepNumbers()]
    )
    run.train()
    assert run.model.runs == {0: {(torch.bfloat16, torch.bfloat16, BATCH)}}
    assert run.accelerator.mixed_precision == "bf16"
    with pytest.raises(InvalidRequestError, match="wrapped the forward of"):
        AutotuneTrainer(run.model, arguments(config, tmp_path), train_dataset=rows(BATCH), amp_config=config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda args: setattr(args, "per_device_train_batch_size", 8), "per_device_train_batch_size=8, not 4"),
        (lambda args: setattr(args, "mixed_precision", "bf16"), "mixed_precision='bf16', not 'fp16'"),
        (lambda args: setattr(args, "tf32", True), "tf32=True, not False"),
        (lambda args: setattr(args, "auto_find_batch_size", True), "auto_find_batch_size"),
        (lambda args: setattr(args, "_n_gpu", 2), "2 GPUs in one process"),
    ],
)
def test_a_contradiction_is_refused(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    from trainer_samples import Notes, arguments

    from autotune_amp.integrations.transformers import AutotuneTrainer

    args = arguments(fp16(), tmp_path)
    change(args)
    with pytest.raises(InvalidRequestError, match=message):
        AutotuneTrainer(Notes(), args, amp_config=fp16())
    if "tf32" in message:  # which a config that keeps the flags as found does not decide
        assert AutotuneTrainer(Notes(), args, amp_config=fp16(as_found=True)).args.tf32


LARGE = range(3 * BATCH, 5 * BATCH)


@pytest.mark.parametrize(
    ("factor", "error", "num_steps"), [(1.0, NoRungFitsError, 5), (torch.nan, NotPrecisionError, 12)]
)
def test_a_run_that_must_not_go_on_saves_a_checkpoint_before_it_stops(
    tmp_path: Path, factor: float, error: type[Exception], num_steps: int
) -> None:
    from trainer_samples import rows, trainer

    data = rows(8 * BATCH, large=LARGE)
    for row in data:
        row["inputs"] = row["inputs"] * factor
    run = trainer(fp16(fallback=()), tmp_path, data, max_steps=24)
    with pytest.raises(error, match=f"checkpoint-{num_steps} is its checkpoint"):
        run.train()
    assert (tmp_path / f"checkpoint-{num_steps}" / "scaler.pt").exists()
    assert are_finite(run.model)


def test_a_second_training_goes_on_with_the_pins_and_the_scale_of_the_first(tmp_path: Path) -> None:
    from trainer_samples import rows, trainer

    scale = LossScale(init_scale=1024.0, growth_interval=3)
    run = trainer(fp16(loss_scale=scale, pinned_modules=("one",)), tmp_path, rows(4 * BATCH), max_steps=4)
    for num_updates, expected in ((4, 2048.0), (8, 4096.0)):
        run.model.runs.clear()
        run.train()
        assert run.model.runs == {step: {(torch.float16, torch.float32, BATCH)} for step in range(4)}
        status = run.controller.status()
        assert (status.num_updates, status.num_steps, status.scale) == (num_updates, num_updates, expected)
        assert (status.pinned_modules, status.history) == (("one",), ())


def test_a_signal_is_heard_during_each_training_and_left_alone_outside(tmp_path: Path) -> None:
    from trainer_samples import rows, trainer
    from transformers import TrainerCallback

    class Ending(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            signal.raise_signal(signal.SIGTERM)

    heard: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
    try:
        options = {"on_signal": lambda: heard.append("saved")}
        run = trainer(fp16(), tmp_path, rows(BATCH), max_steps=1, controller_options=options)
        run.model_init = lambda: type(run.model)()  # a new model for each training, and so a new controller
        run.add_callback(Ending)
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
            run.train()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["own", "saved", "own", "saved", "own"]


CONFIG = AmpConfig(precision="bf16", batch_size=BATCH, accumulation_steps=2, num_workers=0)


def seq2seq(folder: Path, **options: Any) -> Seq2SeqTrainingArguments:
    """Today's arguments: in fp16, with settings that are to survive."""
    from transformers import Seq2SeqTrainingArguments

    plain: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    today: dict[str, Any] = {"fp16": True, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 5}
    kept: dict[str, Any] = {"learning_rate": 0.003, "optim": "adafactor", "lr_scheduler_type": "cosine"}
    kept |= {"warmup_steps": 2, "weight_decay": 0.1, "predict_with_generate": True, "generation_max_length": 6}
    return Seq2SeqTrainingArguments(str(folder), **plain, **today, **kept, **options)


def test_only_what_the_config_decides_and_what_is_named_changes(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainingArguments

    workers = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}
    today = seq2seq(tmp_path, **workers)
    before = copy.copy(vars(today))
    made = CONFIG.to_training_arguments(like=today, max_steps=3)
    assert type(made) is Seq2SeqTrainingArguments
    assert vars(today) == before
    fields = [field.name for field in dataclasses.fields(made)]
    changed = {name: getattr(made, name) for name in fields if getattr(made, name) != getattr(today, name)}
    assert changed == {
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "fp16": False,
        "bf16": True,
        "tf32": False,
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,  # neither goes with 0 workers
        "dataloader_persistent_workers": False,
        "max_steps": 3,
    }
    assert (today.mixed_precision, made.mixed_precision) == ("fp16", "bf16")


def test_what_the_config_decides_and_other_things_are_refused(tmp_path: Path) -> None:
    from trainer_samples import Notes, rows
    from transformers import Trainer

    from autotune_amp.integrations.transformers import AutotuneTrainer

    today = seq2seq(tmp_path)
    with pytest.raises(InvalidRequestError, match="bf16=False: the config decides that"):
        CONFIG.to_training_arguments(like=today, bf16=False)
    trainer: Any = Trainer(Notes(), today)
    with pytest.raises(InvalidRequestError, match=r"like=\.\.\.\) got a Trainer; it must be") as raised:
        CONFIG.to_training_arguments(like=trainer)
    assert "like=trainer.args" in raised.value.next_step
    with pytest.raises(InvalidRequestError, match="per_device_train_batch_size=32") as raised:
        AutotuneTrainer(Notes(), today, train_dataset=rows(BATCH), amp_config=CONFIG)
    assert "to_training_arguments(like=args)" in raised.value.next_step


def test_a_seq2seq_trainer_trains_and_generates_with_todays_arguments(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainer, T5Config, T5ForConditionalGeneration

    from autotune_amp.integrations.transformers import AutotuneTrainer

    class Translator(AutotuneTrainer, Seq2SeqTrainer):
        pass

    config = fp16(num_workers=0)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    sizes |= {"vocab_size": 32, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(2, 32, (4 * BATCH, 5))]
    args = config.to_training_arguments(like=seq2seq(tmp_path), max_steps=3)
    trainer: Any = Translator(model, args, train_dataset=data, eval_dataset=data[:BATCH], amp_config=config)
    dtypes, before = set(), copy.deepcopy(model)
    model.lm_head.register_forward_hook(lambda module, _, output: dtypes.add((module.training, output.dtype)))
    trainer.train()
    assert (trainer.state.global_step, trainer.controller.status().num_steps) == (3, 3)
    assert are_finite(model)
    assert not same(before, model)
    assert trainer.predict(data[:BATCH]).predictions.dtype == "int64"  # tokens: it has generated
    assert dtypes == {(True, torch.float16), (False, torch.float16)}


def test_what_decides_the_speed_is_said_in_arguments_and_the_rest_is_set_up(tmp_path: Path) -> None:
    from trainer_samples import Notes, arguments, rows, trainer

    from autotune_amp.integrations.transformers import AutotuneTrainer

    config = AmpConfig(
        precision="fp32",
        batch_size=BATCH,
        compile="reduce-overhead",
        activation_checkpointing="blocks",
        optimizer_impl="fused",
    )
    made = config.to_training_arguments(output_dir=str(tmp_path), use_cpu=True)
    assert (made.torch_compile, made.torch_compile_mode, made.optim) == (True, "reduce-overhead", "adamw_torch_fused")
    assert (made.activation_checkpointing, made.activation_checkpointing_kwargs) == (True, {"use_reentrant": False})
    kept = config.to_training_arguments(like=seq2seq(tmp_path))
    assert kept.optim == "adafactor", "another optimizer is not replaced"
    assert config.to_training_arguments(like=dataclasses.replace(made, optim="adamw_torch")).optim == made.optim
    with pytest.raises(InvalidRequestError, match="torch_compile"):
        AutotuneTrainer(
            Notes(),
            arguments(AmpConfig(precision="fp32", batch_size=BATCH), tmp_path),
            train_dataset=rows(BATCH),
            amp_config=AmpConfig(precision="fp32", batch_size=BATCH, compile="default"),
        )
    foreach = AmpConfig(precision="fp32", batch_size=BATCH, optimizer_impl="foreach")
    run = trainer(foreach, tmp_path, rows(2 * BATCH), max_steps=2)
    run.train()
    assert {(group["foreach"], group["fused"]) for group in run.optimizer.param_groups} == {(True, False)}
    assert are_finite(run.model)
