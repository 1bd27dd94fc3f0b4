"""LaunchLine: a training command with places in it that a setting fills. Pure text; nothing is started here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.setting import DIMENSIONS, Setting

# What a trial fills in beside the values of its setting.
OF_TRIAL = ("seed", "trial_dir", "port")
_NAMES = (*(dimension.name for dimension in DIMENSIONS), "batch_size", "accumulation_steps", *OF_TRIAL)
_PLACEHOLDER = re.compile(
    r"\{(?P<name>" + "|".join(dict.fromkeys(_NAMES)) + r")(?:=(?P<today>[^{}:|]*))?(?::(?P<choices>[^{}]*))?\}"
)


class Placeholder(msgspec.Struct, frozen=True, kw_only=True):
    """``{name=today}``, or ``{name:value=arguments|value=arguments}``, which puts none or several arguments there.

    `today` is what the user runs, in the words of the command: of choices the one that adds nothing, where none is named.
    """

    name: str
    today: str | None = None
    choices: dict[str, str] | None = None


class LaunchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A training command whose placeholders a setting fills: ``batch_size``, ``precision``, ``accumulation_steps``,
    ``num_workers``, and ``seed``, ``trial_dir``, ``port`` of each trial; other braces stay as they are.

    `values` are the command's own words for ours, such as ``{"bf16": "bf16-mixed"}``. `files` are named by an argument
    each; a trial gets a filled copy of every one, and the argument names the copy.
    """

    arguments: tuple[str, ...]
    values: dict[str, str] = {}
    files: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        command: str | list[str] | tuple[str, ...],
        *,
        values: Mapping[str, str] | None = None,
        files: tuple[str, ...] = (),
    ) -> LaunchLine:
        """Of a command as it is typed, or of its arguments. Raises `InvalidRequestError` for one that cannot be meant."""
        arguments = tuple(shlex.split(command) if isinstance(command, str) else command)
        if not arguments:
            raise InvalidRequestError("The command is empty.", "Give it after `--`, as in `search -- python train.py`.")
        for file in files:
            if file not in arguments:
                raise InvalidRequestError(
                    f"--file {file} is none of the command's arguments.", f"Name it in the command as {file!r}."
                )
            if not Path(file).is_file():
                raise InvalidRequestError(
                    f"--file {file} is not there.", "Name a settings file that the command reads."
                )
        line = cls(arguments=arguments, values=dict(values or {}), files=tuple(files))
        line.placeholders()
        return line

    def placeholders(self) -> dict[str, Placeholder]:
        """By name. Raises `InvalidRequestError` where one is given twice in different ways."""
        found: dict[str, Placeholder] = {}
        for text in (*self.arguments, *(Path(file).read_text() for file in self.files)):
            for placeholder in _placeholders(text):
                known = found.setdefault(placeholder.name, placeholder)
                if placeholder != known and placeholder != Placeholder(name=known.name):
                    if known != Placeholder(name=known.name):
                        raise InvalidRequestError(
                            f"{{{known.name}}} is given twice in different ways.",
                            f"Give today's value once, and write {{{known.name}}} elsewhere.",
                        )
                    found[known.name] = placeholder
        return found

    @property
    def name(self) -> str:
        """What its study is called unless told otherwise: the script's name."""
        scripts = [Path(each).stem for each in self.arguments if each.endswith((".py", ".sh"))]
        module = self.arguments.index("-m") + 1 if "-m" in self.arguments else 0
        return scripts[0] if scripts else self.arguments[module].rpartition("/")[2]

    @property
    def today_setting(self) -> Setting:
        """What the command runs today, as far as it says so."""
        found = {name: self.today(name) for name in ("precision", "batch_size", "accumulation_steps", "num_workers")}
        words = {name: word if name == "precision" else int(word) for name, word in found.items() if word is not None}
        return Setting(**{"precision": "fp32", "batch_size": 1, "as_found": "precision" not in words, **words})

    def word(self, value: Any) -> str:
        """A value of ours in the command's words."""
        return self.values.get(str(value), str(value))

    def today(self, name: str) -> str | None:
        """The value that the user runs, in our words; None where the command does not say."""
        placeholder = self.placeholders().get(name)
        if placeholder is None or placeholder.today is None:
            return None
        return next((ours for ours, theirs in self.values.items() if theirs == placeholder.today), placeholder.today)

    def filled(self, setting: Setting, of_trial: Mapping[str, Any], folder: Path | None = None) -> list[str]:
        """The arguments with every placeholder filled; copies of the settings files go to `folder`.

        Without a folder the files stay as they are named: the command as a user would type it.
        """
        values = {**msgspec.structs.asdict(setting), **of_trial}
        filled: list[str] = []
        for argument in self.arguments:
            if argument in self.files and folder is not None:
                copy = folder / Path(argument).name
                copy.write_text(self._in(Path(argument).read_text(), values))
                filled.append(str(copy))
                continue
            whole = _PLACEHOLDER.fullmatch(argument)
            if whole is not None and whole["choices"] is not None:
                filled += shlex.split(self._in(argument, values))
            else:
                filled.append(self._in(argument, values))
        return filled

    def _in(self, text: str, values: Mapping[str, Any]) -> str:
        def fill(match: re.Match[str]) -> str:
            placeholder = _of(match)
            value = values[placeholder.name]
            if placeholder.choices is not None:
                return placeholder.choices[str(value)]
            return (placeholder.today or "") if value is None else self.word(value)

        return _PLACEHOLDER.sub(fill, text)


def _placeholders(text: str) -> Iterator[Placeholder]:
    return map(_of, _PLACEHOLDER.finditer(text))


def _of(match: re.Match[str]) -> Placeholder:
    choices = None
    if match["choices"] is not None:
        choices = dict(choice.partition("=")[::2] for choice in match["choices"].split("|"))
    today = match["today"]
    if today is None and choices is not None:
        today = next((value for value, arguments in choices.items() if not arguments), None)
    return Placeholder(name=match["name"], today=today, choices=choices)
