"""Placeholders that commands of frameworks get by themselves."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from autotune_amp.command.known_arguments import suggested_arguments, with_placeholders
from autotune_amp.command.messages import Switch
from autotune_amp.core.command_template import CommandTemplate
from autotune_amp.core.setting import Setting

LOW = Setting(precision="bf16", batch_size=4, accumulation_steps=2)


def switch(parser: str, owner: str = "", **today: Any) -> Switch:
    return Switch(
        pid=1, time=0.0, owner=owner, arguments={}, today=today, parser=parser, script="/home/me/train.py", line=""
    )


TRANSFORMERS = switch("HfArgumentParser", batch_size=8, accumulation_steps=1, precision="fp32")
TRL = switch("HfArgumentParser", batch_size=8, accumulation_steps=1, precision="bf16")
TRL = replace(TRL, script="/lib/trl/scripts/sft.py")
IN_BF16 = switch("HfArgumentParser", batch_size=16, accumulation_steps=1, precision="bf16")
LAUNCHED = switch("accelerate launch", "Accelerator", precision="fp32")
NUMBERS = "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"


@pytest.mark.parametrize(
    ("command", "found", "filled"),
    [
        ("python train.py --lr 1", TRANSFORMERS, f"python train.py --lr 1 {NUMBERS} --bf16 True"),
        (
            "python -m torch.distributed.run -m train --lr 1",
            TRANSFORMERS,
            f"python -m torch.distributed.run -m train --lr 1 {NUMBERS} --bf16 True",
        ),
        (
            "torchrun train.py --fp16 True --per-device-train-batch-size=8 --lr 1",
            TRANSFORMERS,
            "torchrun train.py --bf16 True --per-device-train-batch-size=4 --lr 1 --gradient_accumulation_steps 2",
        ),
        ("trl sft --config own.yaml", TRL, f"trl sft --config own.yaml {NUMBERS} --bf16 True"),
        ("accelerate launch train.py --lr 1", LAUNCHED, "accelerate launch --mixed_precision=bf16 train.py --lr 1"),
        (
            "python train.py --mixed_precision no --lr 1",
            switch("", "Accelerator", precision="fp32"),
            "python train.py --mixed_precision=bf16 --lr 1",
        ),
        (
            "python train.py fit --trainer.precision 32-true --lr 1",
            switch("LightningCLI", precision="fp32", accumulation_steps=1),
            "python train.py fit --trainer.precision=bf16-mixed --lr 1 --trainer.accumulate_grad_batches 2",
        ),
    ],
)
def test_known_flags_are_set(command: str, found: Switch, filled: str) -> None:
    line, notes = with_placeholders(CommandTemplate.of(command), [found])
    assert shlex.join(line.of_setting(LOW, "")[0]) == filled
    assert len(notes) == 1


def test_today_is_what_was_seen() -> None:
    line, _ = with_placeholders(CommandTemplate.of("python train.py --bf16"), [IN_BF16])
    assert line.today_values == {"batch_size": 16, "accumulation_steps": 1, "precision": "bf16"}
    arguments, _ = line.of_setting(Setting(precision="fp32", batch_size=1), "")
    assert arguments[2:4] == ("--bf16", "False"), "by default some take bf16"


@pytest.mark.parametrize(
    "command", ["bash train.sh", "bash -c 'cd out && python /home/me/train.py'", "python other.py", "trl dpo"]
)
def test_a_command_whose_arguments_go_elsewhere_is_left_alone(command: str) -> None:
    line = CommandTemplate.of(command)
    assert with_placeholders(line, [TRANSFORMERS, TRL]) == (line, [])


def test_placeholders_that_are_there_stay() -> None:
    line = CommandTemplate.of(
        "python train.py --per_device_train_batch_size {batch_size=8} {precision:fp32=|bf16=--half}"
    )
    extended, _ = with_placeholders(line, [TRANSFORMERS])
    assert extended.arguments == (*line.arguments, "--gradient_accumulation_steps", "{accumulation_steps=1}")


def test_arguments_to_try_are_suggested_with_todays_value_unless_the_command_has_them() -> None:
    found = switch("HfArgumentParser", optim="adamw_torch_fused", gradient_checkpointing="True")
    suggested = suggested_arguments(CommandTemplate.of("python train.py --lr 1"), [found])
    assert "--optim '{optim=adamw_torch_fused:adamw_torch}'" in suggested
    assert "--gradient_checkpointing '{ckpt=True:False}'" in suggested
    assert any("--attn_implementation" in each for each in suggested)
    for each in suggested:  # as they are, they can be searched
        assert CommandTemplate.of(f"python train.py {each}").argument_values
    given = "--attn-implementation eager --optim=adamw_torch --gradient_checkpointing --lr 1"
    found = switch("HfArgumentParser", optim="adamw_torch", gradient_checkpointing="True")
    suggested = suggested_arguments(CommandTemplate.of(f"python train.py {given}"), [found])
    assert {"{attn=eager:sdpa|flash_attention_2}", "{optim=adamw_torch:adamw_torch_fused}", "{ckpt=True:False}"} == {
        each.split("'")[1] for each in suggested
    }, "the values of its own arguments are those in use"
    line = CommandTemplate.of(f"python train.py {' '.join(suggested).replace('_impl', '-impl')}")
    assert suggested_arguments(line, [found]) == ()
    assert suggested_arguments(CommandTemplate.of("python train.py"), [switch("", optim="adamw_torch")]) == ()


def test_placeholders_of_a_file_stay_too(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("bf16: {precision=bf16:bf16=true|fp32=false}\nper_device_train_batch_size: {batch_size=8}\n")
    line = CommandTemplate.of(f"trl sft --config {own}", files=[str(own)])
    extended, _ = with_placeholders(line, [TRL])
    assert extended.arguments == (*line.arguments, "--gradient_accumulation_steps", "{accumulation_steps=1}")
