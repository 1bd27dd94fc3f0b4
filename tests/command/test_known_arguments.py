"""Arguments of Transformers' parser that are suggested for a search to try."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune_amp.command.known_arguments import suggested_arguments
from autotune_amp.command.messages import Switch
from autotune_amp.core.command_template import CommandTemplate

FOUND = Switch(
    pid=1, time=0.0, owner="TrainingArguments", arguments={}, parser="HfArgumentParser", script="/home/me/train.py",
    today={"attn_implementation": "eager", "optim": "adamw_torch", "gradient_checkpointing": "True"},
)  # fmt: skip
TRL = replace(FOUND, script="/lib/trl/scripts/sft.py")


@pytest.mark.parametrize(
    "command", ["python train.py --lr 1", "python -m torch.distributed.run -m train", "trl sft --config own.yaml"]
)
def test_arguments_to_try_are_suggested_with_todays_value_unless_the_command_has_them(command: str) -> None:
    suggested = suggested_arguments(CommandTemplate.of(command), [FOUND, TRL])
    assert suggested == (
        "--attn_implementation '{attn=eager:sdpa|flash_attention_2}'",
        "--optim '{optim=adamw_torch:adamw_torch_fused}'",
        "--gradient_checkpointing '{ckpt=True:False}'",
    )
    line = CommandTemplate.of(f"{command} {' '.join(suggested).replace('_impl', '-impl')}")
    assert line.argument_values, "as they are, they can be searched"
    assert suggested_arguments(line, [FOUND, TRL]) == ()


def test_an_argument_whose_value_today_is_not_known_is_not_suggested() -> None:
    found = replace(FOUND, today={"attn_implementation": "kernels-community/flash-attn", "optim": "adafactor"})
    assert suggested_arguments(CommandTemplate.of("python train.py --attn_implementation sdpa"), [found]) == ()
    assert suggested_arguments(CommandTemplate.of("python train.py"), [replace(FOUND, parser="")]) == ()


@pytest.mark.parametrize(
    "command", ["bash train.sh", "bash -c 'cd out && python /home/me/train.py'", "python other.py", "trl dpo"]
)
def test_a_command_whose_arguments_go_elsewhere_has_none(command: str) -> None:
    assert suggested_arguments(CommandTemplate.of(command), [FOUND, TRL]) == ()
