"""to_training_arguments(like=today): of today's class and with its values, but for what the config decides."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_samples import BATCH, Notes, all_finite, fp16, rows
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from autotune_amp.core.config import AmpConfig
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.integrations.transformers import AutotuneTrainer

CONFIG = AmpConfig(precision="bf16", batch_size=BATCH, accumulation_steps=2, num_workers=0)


def seq2seq(folder: Path, **options: Any) -> Seq2SeqTrainingArguments:
    """Today's arguments: in fp16, with settings that are to survive."""
    plain: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    today: dict[str, Any] = {"fp16": True, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 5}
    kept: dict[str, Any] = {"learning_rate": 0.003, "optim": "adafactor", "lr_scheduler_type": "cosine"}
    kept |= {"warmup_steps": 2, "weight_decay": 0.1, "predict_with_generate": True, "generation_max_length": 6}
    return Seq2SeqTrainingArguments(str(folder), **plain, **today, **kept, **options)


def values(args: TrainingArguments) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def test_only_what_the_config_decides_and_what_is_named_changes(tmp_path: Path) -> None:
    workers = {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4, "dataloader_persistent_workers": True}
    today = seq2seq(tmp_path, **workers)
    before = copy.copy(vars(today))
    made = CONFIG.to_training_arguments(like=today, max_steps=3)
    assert type(made) is Seq2SeqTrainingArguments
    assert vars(today) == before
    old, new = values(today), values(made)
    assert {name: value for name, value in new.items() if value != old[name]} == {
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


def test_what_the_config_leaves_open_is_todays(tmp_path: Path) -> None:
    today = seq2seq(tmp_path, dataloader_num_workers=2, tf32=False)
    found = AmpConfig(precision="fp32", batch_size=BATCH, as_found=True).to_training_arguments(like=today)
    assert (found.dataloader_num_workers, found.tf32, found.mixed_precision) == (2, False, "no")


def test_arguments_by_a_former_name_are_kept_without_another_warning(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="gradient_checkpointing"):
        today = seq2seq(tmp_path, gradient_checkpointing=True)
    assert CONFIG.to_training_arguments(like=today).activation_checkpointing


def test_what_the_config_decides_and_other_things_are_refused(tmp_path: Path) -> None:
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


class Translator(AutotuneTrainer, Seq2SeqTrainer):
    pass


@pytest.mark.parametrize("config", [CONFIG, fp16(num_workers=0)], ids=["bf16", "fp16"])
def test_a_seq2seq_trainer_trains_and_generates_with_todays_arguments(tmp_path: Path, config: AmpConfig) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    sizes |= {"vocab_size": 32, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(2, 32, (4 * BATCH, 5))]
    args = config.to_training_arguments(like=seq2seq(tmp_path), max_steps=3)
    trainer: Any = Translator(model, args, train_dataset=data, eval_dataset=data[:BATCH], amp_config=config)
    dtypes, before = set(), [weight.detach().clone() for weight in model.parameters()]
    model.lm_head.register_forward_hook(lambda module, _, output: dtypes.add(output.dtype) if module.training else None)
    trainer.train()
    assert (trainer.state.global_step, trainer.controller.status().num_steps) == (3, 3)
    assert dtypes == {torch.bfloat16 if config.precision == "bf16" else torch.float16}
    assert type(trainer.optimizer.optimizer).__name__ == "Adafactor"
    assert trainer.lr_scheduler.base_lrs[0] == 0.003
    assert all_finite(model)
    assert not all(map(torch.equal, before, model.parameters()))
    assert trainer.predict(data[:BATCH]).predictions.dtype == "int64"  # tokens: it has generated
