"""Arguments of Transformers' parser that a search could try if the user wrote them with placeholders. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import PurePath

from autotune_amp.command.messages import Switch
from autotune_amp.core.command_template import CommandTemplate

# Name of a placeholder and values of an argument to suggest.
_VALUES_TO_TRY = {
    "attn_implementation": ("attn", ("sdpa", "eager", "flash_attention_2")),
    "optim": ("optim", ("adamw_torch_fused", "adamw_torch")),
    "gradient_checkpointing": ("ckpt", ("False", "True")),
}


def suggested_arguments(line: CommandTemplate, switches: Iterable[Switch]) -> tuple[str, ...]:
    """Return arguments of HfArgumentParser with placeholders that the user may write in the command, where it has none,
    in place of its own arguments of the same name.

    Flags of the model's own arguments are known only to the script, so that they are not added without being asked.
    """
    arguments = [*line.arguments]
    today = next((s.today for s in switches if s.parser == "HfArgumentParser" and _names_script(arguments, s)), {})
    suggestions, text = [], " ".join(arguments)
    for argument, (name, values) in _VALUES_TO_TRY.items():
        in_use = today.get(argument)
        spellings = f"--{argument}|--{argument.replace('_', '-')}"
        if in_use in values and not re.search(rf"({spellings})[ =]\{{|\{{[^}}]*({spellings})", text):
            others = "|".join(each for each in values if each != in_use)
            suggestions.append(f"--{argument} '{{{name}={in_use}:{others}}}'")
    return tuple(suggestions)


def _names_script(arguments: list[str], switch: Switch) -> bool:
    """Whether the command itself starts the script of `switch`, so that arguments can be added to it."""
    script = PurePath(switch.script)
    if PurePath(arguments[0]).name == script.parent.parent.name == "trl":  # trl sft runs trl/scripts/sft.py
        return arguments[1:2] == [script.stem]
    if any(PurePath(argument).name == script.name and " " not in argument for argument in arguments):
        return True
    return any(flag == "-m" and module.rpartition(".")[2] == script.stem for flag, module in pairwise(arguments))
