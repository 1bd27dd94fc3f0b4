"""Insert placeholders for the arguments of frameworks' parsers, so that the user need not write them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import PurePath

import msgspec

from autotune_amp.command.messages import Switch
from autotune_amp.core.command_template import CommandTemplate


class _ParserArguments(msgspec.Struct, frozen=True):
    """Arguments of a parser: `numbers` maps fields of a setting to flags; `precision_flags` are replaced by the
    arguments in `precision` for each value.
    """

    numbers: dict[str, str]
    precision_flags: tuple[str, ...]
    precision: dict[str, str]


_ARGUMENTS_BY_PARSER = {
    "HfArgumentParser": _ParserArguments(
        {"batch_size": "--per_device_train_batch_size", "accumulation_steps": "--gradient_accumulation_steps"},
        ("--bf16", "--fp16", "--tf32"),
        # Every flag has a value, since TRL's arguments are bf16 by default and take no flag without one.
        {
            "fp32": "--bf16 False",
            "tf32": "--bf16 False --tf32 True",
            "bf16": "--bf16 True",
            "fp16": "--bf16 False --fp16 True",
        },
    ),
    "LightningCLI": _ParserArguments(
        {"accumulation_steps": "--trainer.accumulate_grad_batches"},
        ("--trainer.precision",),
        {
            "fp32": "--trainer.precision=32-true",
            "bf16": "--trainer.precision=bf16-mixed",
            "fp16": "--trainer.precision=16-mixed",
        },
    ),
    "accelerate launch": _ParserArguments(
        {},
        ("--mixed_precision",),
        {"fp32": "--mixed_precision=no", "bf16": "--mixed_precision=bf16", "fp16": "--mixed_precision=fp16"},
    ),
}
_PRECISION_VALUE = re.compile(r"(?i)true|false|no|bf16|fp16|fp8|\w+-(mixed|true)|16|32|64")
# Flags of Transformers' examples, which scripts with other parsers use too.
_COMMON_FLAGS = {"batch_size": "--per_device_train_batch_size", "accumulation_steps": "--gradient_accumulation_steps"}

# Name of a placeholder and values of an argument to suggest, the usual one first.
_VALUES_TO_TRY = {
    "--attn_implementation": ("attn", ("sdpa", "eager", "flash_attention_2")),
    "--optim": ("optim", ("adamw_torch_fused", "adamw_torch")),
    "--gradient_checkpointing": ("ckpt", ("False", "True")),
}


def with_placeholders(line: CommandTemplate, switches: Iterable[Switch]) -> tuple[CommandTemplate, list[str]]:
    """Return `line` with placeholders for the arguments of the parsers in `switches`, where it has none, and a note
    that lists these arguments.

    Arguments in the command keep their places; new ones come last, or right after ``accelerate launch``.
    """
    arguments, flags = list(line.arguments), dict[str, None]()
    for name, flag in _COMMON_FLAGS.items():
        if name not in line.placeholders and _number_of_flag(arguments, flag) is not None:
            arguments = _with_number(arguments, name, flag, 1)
            flags[flag] = None
    for switch in switches:
        is_accelerate_flag = switch.owner == "Accelerator" and any(a.startswith("--mixed_precision") for a in arguments)
        parser = _ARGUMENTS_BY_PARSER.get("accelerate launch" if is_accelerate_flag else switch.parser)
        if parser is None or not (is_accelerate_flag or _names_script(arguments, switch)):
            continue
        at = arguments.index("launch") + 1 if switch.parser == "accelerate launch" else None
        for name, flag in parser.numbers.items():
            today = switch.today.get(name)
            if f"{{{name}" not in " ".join((*arguments, *line.files.values())) and isinstance(today, int):
                arguments = _with_number(arguments, name, flag, today)
                flags[flag] = None
        today = switch.today.get("precision")
        if "{precision" not in " ".join((*arguments, *line.files.values())) and today in parser.precision:
            arguments = _with_precision(arguments, at, parser, str(today))
            flags |= dict.fromkeys(parser.precision_flags)
    extended = msgspec.structs.replace(line, arguments=tuple(arguments))
    note = f"These arguments of the script's parser were set: {', '.join(flags)}."
    return extended, [note] if flags else []


def suggested_arguments(line: CommandTemplate, switches: Iterable[Switch]) -> tuple[str, ...]:
    """Return arguments of HfArgumentParser with placeholders that the user may write in the command, where it has none,
    in place of its own arguments of the same name.

    Flags of the model's own arguments are known only to the script, so that they are not added without being asked.
    """
    arguments = [*line.arguments]
    today = next((s.today for s in switches if s.parser == "HfArgumentParser" and _names_script(arguments, s)), None)
    if today is None:
        return ()
    suggestions, text = [], " ".join(arguments)
    for flag, (name, values) in _VALUES_TO_TRY.items():
        _, given = _value_of_flag(arguments, flag) or (0, values[0])
        in_use = str(today.get(flag.lstrip("-"), given))
        spellings = "|".join(_spellings(flag))
        if in_use in values and not re.search(rf"({spellings})[ =]\{{|\{{[^}}]*({spellings})", text):
            others = "|".join(each for each in values if each != in_use)
            suggestions.append(f"{flag} '{{{name}={in_use}:{others}}}'")
    return tuple(suggestions)


def _names_script(arguments: list[str], switch: Switch) -> bool:
    """Whether the command itself starts the script of `switch`, so that arguments can be added to it."""
    if switch.parser == "accelerate launch":
        return len(arguments) > 1 and PurePath(arguments[0]).name == "accelerate" and arguments[1] == "launch"
    script = PurePath(switch.script)
    if PurePath(arguments[0]).name == script.parent.parent.name == "trl":  # trl sft runs trl/scripts/sft.py
        return arguments[1:2] == [script.stem]
    if any(PurePath(argument).name == script.name and " " not in argument for argument in arguments):
        return True
    return any(flag == "-m" and module.rpartition(".")[2] == script.stem for flag, module in pairwise(arguments))


def _spellings(flag: str) -> tuple[str, str]:
    return flag, flag[:2] + flag[2:].replace("_", "-")


def _value_of_flag(arguments: list[str], flag: str) -> tuple[int, str] | None:
    """Return the position and the value of a flag, from ``--flag 8`` or ``--flag=8``; None without the flag."""
    for index, argument in enumerate(arguments):
        name, sign, value = argument.partition("=")
        if name in _spellings(flag):
            following = arguments[index + 1] if index + 1 < len(arguments) else ""
            return index, value if sign else following
    return None


def _number_of_flag(arguments: list[str], flag: str) -> tuple[int, str] | None:
    """Return the position and the number of a flag, None without a number."""
    position_and_value = _value_of_flag(arguments, flag)
    return position_and_value if position_and_value is not None and position_and_value[1].isdecimal() else None


def _with_number(arguments: list[str], name: str, flag: str, today: int) -> list[str]:
    position_and_value = _number_of_flag(arguments, flag)
    if position_and_value is None:
        return [*arguments, flag, f"{{{name}={today}}}"]
    index, value = position_and_value
    spelling, sign, _ = arguments[index].partition("=")
    placeholder = f"{{{name}={value}}}"
    if sign:
        return [*arguments[:index], f"{spelling}={placeholder}", *arguments[index + 1 :]]
    return [*arguments[: index + 1], placeholder, *arguments[index + 2 :]]


def _with_precision(arguments: list[str], at: int | None, parser: _ParserArguments, today: str) -> list[str]:
    choices = "|".join(f"{precision}={flags}" for precision, flags in parser.precision.items())
    placeholder = f"{{precision={today}:{choices}}}"
    spelled = {each for flag in parser.precision_flags for each in _spellings(flag)}
    kept: list[str] = []
    previous = ""
    for argument in arguments:
        is_value = previous in spelled and _PRECISION_VALUE.fullmatch(argument) is not None
        previous = argument
        if is_value or argument.partition("=")[0] in spelled:
            at = len(kept) if at is None or len(kept) < at else at
        else:
            kept.append(argument)
    at = len(kept) if at is None else at
    return [*kept[:at], placeholder, *kept[at:]]
