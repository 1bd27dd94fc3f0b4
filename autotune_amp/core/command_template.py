"""CommandTemplate: a training command with placeholders that a setting fills. Only text is handled, nothing started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from autotune_amp.core.documents import cause, read_file
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.precisions import PRECISIONS
from autotune_amp.core.setting import Setting

# Placeholders that a trial fills besides those of its setting.
TRIAL_PLACEHOLDERS = ("seed", "trial_dir", "port")
EXAMPLE_VALUES = {"trial_dir": "OUTPUT_DIR", "seed": "0", "port": "29500"}  # of those placeholders, for a training run
_NUMBERS = ("batch_size", "accumulation_steps", "num_workers")
_NAMES = ("precision", *_NUMBERS, *TRIAL_PLACEHOLDERS)
# Names of further parameters in the Optuna study of a search.
_NAMES_IN_STUDY = ("init_scale", "growth_interval")
# Of these names only the precision may have choices.
_PLACEHOLDER = re.compile(
    r"\{(?P<name>(?P<precision>precision)|" + "|".join(_NAMES[1:]) + r")"
    r"(?:=(?P<today>[^{}:|]*))?(?(precision)(?::(?P<choices>[^{}=]*=[^{}]*))?)\}"
)
# A placeholder of the user's own: {name=today:value|value}, {name=today:value=arguments|...}, or the latter without
# today's value if one choice has no arguments. A format such as {x:0=5} and {x=!r:>5} of Python is none.
_ARGUMENTS = r"[^\s{}:|=]+=[^{}|]*(?:\|[^\s{}:|=]+=[^{}|]*)*"
_OWN_PLACEHOLDER = re.compile(
    rf"\{{(?P<own>(?!(?:{'|'.join(_NAMES)})\b)!?[A-Za-z_]\w*)"
    rf"(?:=(?P<own_today>[^\s!{{}}:|=][^{{}}:|=]*):(?:(?P<own_values>[^\s{{}}|=][^{{}}|=]*(?:\|[^{{}}|=]+)*)"
    rf"|(?P<own_choices>{_ARGUMENTS}))"
    rf"|:(?=[^{{}}]*\|)(?=[^{{}}]*=[|}}])(?P<own_choices_only>{_ARGUMENTS}))\}}"
)
# Text that is no placeholder: a shell's ${NAME}, which is kept, and {{NAME}}, which becomes {NAME}.
_LITERAL = re.compile(r"\$\{[^{}]*\}|\{(?P<single>\{(?P<literal>[A-Za-z_][\w-]*)(?:[=:][^{}]*)?\})\}")
_BRACES = re.compile(f"{_LITERAL.pattern}|{_PLACEHOLDER.pattern}|{_OWN_PLACEHOLDER.pattern}")
# Braces that may be a misspelt placeholder, unlike JSON, {}, {1..3} and { command; }.
_POSSIBLE_PLACEHOLDER = re.compile(r"\{(?P<name>[A-Za-z_][\w-]*)(?:(?P<rest>[=:][^{}]*)\}?|\}|$)")
_CHOICES = re.compile(r":[\w.-]+=")
_CHOICE_CHARACTERS = frozenset("=|")  # separators of choices
_MIN_SIMILARITY = 0.75  # ratio of difflib from which on a name counts as a misspelt placeholder


class Placeholder(msgspec.Struct, frozen=True, kw_only=True):
    """A placeholder in a command: ``{name=today}``, ``{name:value=arguments|value=arguments}``, or, with a name of the
    user's own, ``{name=today:value|value}``.

    The second form is replaced by the arguments of the chosen value, none or several. `today` is the present value, as
    written in the command; without one it is the choice that adds no arguments. `choices` maps each value to the text
    that replaces the placeholder. A name of the user's own that begins with ``!`` stands for an argument that does not
    affect numerics.
    """

    name: str
    today: str | None = None
    choices: dict[str, str] | None = None


class CommandTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """A training command with placeholders that a setting fills.

    Placeholders are ``batch_size``, ``precision``, ``accumulation_steps``, ``num_workers``, and those of a trial:
    ``trial_dir`` and ``port``, which differ for each, and ``seed``, which is that of the search. Any other name is one
    of the user's own. Doubled braces become single ones; a shell's ``${NAME}`` and braces that cannot be a placeholder
    are kept. `values` maps names of precisions to the command's own names, such as ``{"bf16": "bf16-mixed"}``. `files`
    maps the names of settings files with placeholders to their texts; each name occurs in an argument or in an earlier
    file, where it is changed to the path of a filled copy for each trial. With `keeps_effective_batch_size` the script
    itself accumulates so that the effective batch size does not change.
    """

    arguments: tuple[str, ...]
    values: dict[str, str] = {}
    files: dict[str, str] = {}
    keeps_effective_batch_size: bool = False

    @classmethod
    def of(
        cls, command: str | Sequence[str], *, values: Mapping[str, str] | None = None, files: Iterable[str] = ()
    ) -> CommandTemplate:
        """Parse a command line or a list of arguments. Raises `InvalidRequestError` for an invalid placeholder."""
        arguments = tuple(shlex.split(command) if isinstance(command, str) else command)
        if not arguments:
            raise InvalidRequestError("The command is empty.", "Give it after `--`, as in `search -- python train.py`.")
        texts: dict[str, str] = {}
        for file in files:
            if not any(_pattern_of_paths([file]).search(text) for text in (*arguments, *texts.values())):
                raise InvalidRequestError(
                    f"--file {file} does not occur in the command's arguments.",
                    f"Write {file!r} where the command takes its settings file; a file that another one names comes "
                    "after that.",
                )
            if (other := next((each for each in texts if Path(each).name == Path(file).name), file)) != file:
                raise InvalidRequestError(
                    f"--file {other} and --file {file} have the same name.",
                    "Rename one of them: their filled copies are put in one folder.",
                )
            try:
                texts[file] = read_file(file).decode()
            except (OSError, UnicodeDecodeError) as error:
                raise InvalidRequestError(
                    f"--file {file} cannot be read: {cause(error)}.", "Name a settings file that the command reads."
                ) from error
        template = cls(arguments=arguments, values=dict(values or {}), files=texts)
        for name in values or {}:
            if name not in PRECISIONS:
                raise InvalidRequestError(
                    f"--value names {name!r}, which is not a precision.",
                    f"Give PRECISION=WORD with one of {', '.join(PRECISIONS)}.",
                )
        for placeholder in template.placeholders.values():
            _check_placeholder(placeholder, template.values)
            if f"!{placeholder.name}" in template.placeholders:
                raise InvalidRequestError(
                    f"Both {{{placeholder.name}=…}} and {{!{placeholder.name}=…}} are given.",
                    "Write the ! in every place where the argument does not affect numerics, or in none.",
                )
        for argument in arguments:
            _raise_if_unknown_placeholder(argument, "the command", is_file=False)
        for file, text in texts.items():
            _raise_if_unknown_placeholder(text, file, is_file=True)
        return template

    @property
    def placeholders(self) -> dict[str, Placeholder]:
        """Return the placeholders by name. Raises `InvalidRequestError` if one is given twice with different values of
        today, or with choices for different values.
        """
        by_name: dict[str, Placeholder] = {}
        for text in (*self.arguments, *self.files.values()):
            for placeholder in filter(None, map(_placeholder_from_match, _BRACES.finditer(text))):
                earlier = by_name.get(placeholder.name)
                by_name[placeholder.name] = placeholder if earlier is None else _merged(earlier, placeholder)
        return by_name

    @property
    def name(self) -> str:
        """Return the default name of the study: the script's name, else that of the module after ``-m`` or of the
        program, with its subcommand, as in ``trl-sft``.
        """
        scripts = [Path(each).stem for each in self.arguments if each.endswith((".py", ".sh"))]
        module = self.arguments.index("-m") + 1 if "-m" in self.arguments[:-1] else 0
        program, *others = self.arguments[module : module + 2]
        subcommands = [word for word in others if re.fullmatch(r"[A-Za-z]\w*", word)]
        return scripts[0] if scripts else "-".join([Path(program).name, *subcommands])

    def today(self, name: str) -> str | None:
        """Return the present value of a placeholder, a precision by its name in `PRECISIONS`; None if there is none."""
        placeholder = self.placeholders.get(name)
        if placeholder is None or placeholder.today is None:
            return None
        if name != "precision":
            return placeholder.today
        return next(
            (precision for precision, word in self.values.items() if word == placeholder.today), placeholder.today
        )

    @property
    def today_values(self) -> dict[str, Any]:
        """Return the present values that the command gives for fields of a setting, by field."""
        values = {name: self.today(name) for name in ("precision", *_NUMBERS)}
        return {n: value if n == "precision" else int(value) for n, value in values.items() if value is not None}

    @property
    def argument_values(self) -> dict[str, tuple[str, ...]]:
        """Return the values of the user's own placeholders by name, today's value first; the name may begin with
        ``!``.
        """
        own = (each for each in self.placeholders.values() if each.name not in _NAMES and each.today is not None)
        return {each.name: tuple(dict.fromkeys((str(each.today), *(each.choices or {})))) for each in own}

    def files_named_by(self, words: Iterable[str]) -> tuple[str, ...]:
        """Return the settings files that these words of a command name, or that one of these files names."""
        named, texts = [], [*words]
        for file, text in self.files.items():  # a file that another one names is given after it
            if any(_pattern_of_paths([file]).search(each) for each in texts):
                named.append(file)
                texts.append(text)
        return tuple(named)

    def first_commands(self) -> list[tuple[str, ...]]:
        """Return example commands: the present one, one with another precision, one with half the batch size, and one
        for each other value of the user's own placeholders.
        """
        today = {"batch_size": 32, "precision": "fp32", **self.today_values}
        trial_values = {"seed": 0, "trial_dir": "TRIAL_DIR", "port": 29500}
        precision = self.placeholders.get("precision")
        precisions = list((precision and precision.choices) or ("bf16", "fp32"))
        others = [
            {"precision": next((p for p in precisions if p != today["precision"]), today["precision"])},
            {"batch_size": max(1, today["batch_size"] // 2)},
            *({name: value} for name, (_, *others) in self.argument_values.items() for value in others),
        ]
        commands = [self.filled({**today, **other, **trial_values}, "TRIAL_DIR")[0] for other in ({}, *others)]
        return list(dict.fromkeys(commands))

    def for_training(self) -> tuple[str, ...]:
        """Return the arguments with `EXAMPLE_VALUES` for the placeholders of a trial that have no present value. Other
        placeholders are kept.
        """

        def fill(match: re.Match[str]) -> str:
            placeholder = _placeholder_from_match(match)
            if placeholder is None or placeholder.today is not None:
                return match[0]
            return EXAMPLE_VALUES.get(placeholder.name, match[0])

        return tuple(_BRACES.sub(fill, argument) for argument in self.arguments)

    def unfilled_in_files(self) -> list[tuple[str, str]]:
        """Return the names of the placeholders of a trial without a present value that settings files have, each with
        its file: only their user can give them a value for a training run.
        """
        parts = {
            file: msgspec.structs.replace(self, arguments=(), files={file: text}) for file, text in self.files.items()
        }
        return [
            (name, file)
            for file, part in parts.items()
            for name in part.placeholders
            if name in TRIAL_PLACEHOLDERS and self.today(name) is None
        ]

    def plan_line(self) -> str:
        """Return a line for the user on what a search can set, as far as that is known without running the command."""
        own = [f"{name.lstrip('!')} {' or '.join(values)}" for name, values in self.argument_values.items()]
        names = [name.replace("_", " ") for name in ("precision", *_NUMBERS) if name in self.placeholders]
        others = [name for name in ("precision", "batch_size") if name not in self.placeholders]
        outside = f" Set from outside if the script allows it: {', '.join(others)}." * bool(others)
        return f"Placeholders: {'; '.join([*names, *own]) or 'none'}.{outside.replace('_', ' ')}"

    def outside(self, setting: Setting, today: Setting) -> dict[str, Any]:
        """Return the values of `setting` that differ from `today` and have no placeholder: hooks must set them."""
        return {
            name: getattr(setting, name)
            for name in ("precision", "batch_size", "accumulation_steps")
            if name not in self.filled_names and getattr(setting, name) != getattr(today, name)
        }

    @property
    def filled_names(self) -> frozenset[str]:
        """Return the dimensions that the command sets itself: its placeholders, and the accumulation of a script that
        keeps its effective batch size."""
        return frozenset(self.placeholders) | ({"accumulation_steps"} if self.keeps_effective_batch_size else set())

    def of_setting(
        self, setting: Setting, files_in: str, **trial_values: Any
    ) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the command for a setting, as `filled` does; `trial_values` fill the placeholders of the trial."""
        values = {name: getattr(setting, name) for name in ("precision", *_NUMBERS)} | dict(setting.arguments)
        if setting.num_workers is None:
            del values["num_workers"]
        return self.filled({**values, **trial_values}, files_in)

    def filled(self, values: Mapping[str, Any], files_in: str) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the arguments with filled placeholders, and the filled settings files by their paths in `files_in`.

        `values` are the values of a setting and of a trial; a placeholder without a value is kept.
        """
        paths = {file: str(Path(files_in, Path(file).name)) for file in self.files}

        def with_paths(text: str) -> str:
            return _pattern_of_paths(paths).sub(lambda match: paths[match[0]], text) if paths else text

        arguments: list[str] = []
        for argument in self.arguments:
            filled = self._fill(argument, values)
            whole = _BRACES.fullmatch(argument)
            has_choices = whole is not None and _choices_text(whole) is not None
            arguments += map(with_paths, shlex.split(filled) if has_choices else [filled])  # a path may have blanks
        return tuple(arguments), {
            paths[file]: with_paths(self._fill(text, values, is_file=True)) for file, text in self.files.items()
        }

    def _fill(self, text: str, values: Mapping[str, Any], *, is_file: bool = False) -> str:
        def fill(match: re.Match[str]) -> str:
            placeholder = _placeholder_from_match(match)
            if placeholder is None:
                single, name = match["single"], match["literal"]
                if single is None:
                    return match[0]
                is_placeholder = _OWN_PLACEHOLDER.fullmatch(single) or _similar_placeholder(name, _MIN_SIMILARITY)
                return match[0] if is_file and not is_placeholder else single
            value = values.get(placeholder.name, placeholder.today)
            if value is None:
                return f"{{{placeholder.name}}}"
            if placeholder.choices is not None:
                return placeholder.choices[str(value)]
            return self.values.get(value, value) if placeholder.name == "precision" else str(value)

        return _BRACES.sub(fill, text)


def _pattern_of_paths(paths: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for these paths where they are not a part of another path."""
    longest_first = sorted(paths, key=len, reverse=True)
    # A path may follow a short option at once: -cconf.yaml.
    before = r"(?:(?<![\w./-])|(?<=^-\w))"
    return re.compile(rf"{before}(?:{'|'.join(map(re.escape, longest_first))})(?![\w/-]|\.\w)")


def _choices_text(match: re.Match[str]) -> str | None:
    """Return the choices of arguments in a match of `_BRACES`, or None."""
    return match["choices"] or match["own_choices"] or match["own_choices_only"]


def _placeholder_from_match(match: re.Match[str]) -> Placeholder | None:
    """Return the placeholder that a match of `_BRACES` is, or None for other text in braces."""
    name, today, choices = match["name"] or match["own"], match["today"] or match["own_today"], None
    if name is None:
        return None
    if (text := _choices_text(match)) is not None:
        choices = dict(choice.partition("=")[::2] for choice in text.split("|"))
    elif match["own_values"] is not None:
        choices = {value: value for value in (today, *match["own_values"].split("|"))}
    if today is None and choices is not None:
        today = next((value for value, arguments in choices.items() if not arguments), None)
    return Placeholder(name=name, today=today, choices=choices)


def _merged(one: Placeholder, other: Placeholder) -> Placeholder:
    """Return the placeholder that two of one name describe together; each place keeps its own words for a value."""
    today = {one.today, other.today} - {None}
    has_other_values = one.choices and other.choices and one.choices.keys() != other.choices.keys()
    if len(today) > 1 or has_other_values:
        raise InvalidRequestError(
            f"{{{one.name}}} is given twice with different values.",
            f"Give today's value once, and write {{{one.name}}} elsewhere; choices in several places are of the same "
            "values.",
        )
    return Placeholder(name=one.name, today=next(iter(today), None), choices=one.choices or other.choices)


def _similar_placeholder(name: str, min_similarity: float) -> str | None:
    """Return the placeholder whose name is most similar to `name`, None if none is similar enough."""
    return next(iter(get_close_matches(name.lower().replace("-", "_"), _NAMES, 1, min_similarity)), None)


def _raise_if_unknown_placeholder(text: str, where: str, *, is_file: bool) -> None:
    """Raise `InvalidRequestError` for braces that look like an invalid or misspelt placeholder.

    In a settings file only braces with a name similar to a placeholder's do. A placeholder's name before a colon is a
    key of a mapping (OmegaConf, YAML) if a blank or a further key follows, and no choices.
    """
    for match in _POSSIBLE_PLACEHOLDER.finditer(_BRACES.sub("", text)):
        braces, name, rest = match[0], match["name"], match["rest"] or ""
        similar_name, has_no_end = _similar_placeholder(name, _MIN_SIMILARITY), not match[0].endswith("}")
        is_format = rest.startswith(":") and not _CHOICES.match(rest)  # {date:%Y}, {lr: 0.1}
        has_keys = rest.startswith(": ") or (rest.startswith(":") and "," in rest)
        is_mapping = name in _NAMES and has_keys and not _CHOICE_CHARACTERS.intersection(rest)
        if is_mapping or (is_format and is_file) or (similar_name is None and (is_file or is_format or has_no_end)):
            continue
        literally = "" if has_no_end else f" If the braces are plain text, double them: {{{braces}}}."
        if name in _NAMES:
            raise InvalidRequestError(
                f"{braces!r} in {where} is an invalid placeholder.",
                f"Write {{{name}=VALUE}}, in quotes, since the shell splits it at blanks and |. "
                f"Only the precision can have choices: {{precision:bf16=--bf16|fp32=}}.{literally}",
            )
        nearest = similar_name or _similar_placeholder(name, 0.6)  # 0.6: difflib's default ratio for a guess
        value = rest.replace(":", "=", 1) if is_format else rest
        today = value.strip("=").rstrip("}").partition(":")[0]
        raise InvalidRequestError(
            f"{braces!r} in {where} is not a placeholder: {name!r} is unknown.",
            (
                f"Write {{{nearest}{value}}}."
                if nearest
                else f"Use one of {', '.join(f'{{{each}}}' for each in _NAMES)}, or give the values to try of an "
                f"argument of your own, today's first: {{{name}={today or 'TODAY'}:OTHER|OTHER}}."
            )
            + literally,
        )


def _check_placeholder(placeholder: Placeholder, words: Mapping[str, str]) -> None:
    """Raise `InvalidRequestError` for an invalid value; `words` maps precisions to the command's own names."""
    if placeholder.name not in _NAMES:
        _check_own_placeholder(placeholder)
    name, used_values = placeholder.name, [*(placeholder.choices or {}), *filter(None, [placeholder.today])]
    if placeholder.today is None and (placeholder.choices is not None or name == "num_workers"):
        choices = placeholder.choices or {}
        example = "fp32" if "fp32" in choices else next(iter(choices), "2")
        if choices:
            example += ":" + "|".join(f"{value}={arguments}" for value, arguments in choices.items())
        raise InvalidRequestError(
            f"{{{name}}} has no present value.",
            f"Write it with the value that you use today, e.g. {{{name}={example}}}.",
        )
    for value in placeholder.choices or {}:
        if name == "precision" and value not in PRECISIONS:
            raise InvalidRequestError(
                f"{{precision:…}} names {value!r}, which is none of {', '.join(PRECISIONS)}.",
                "Write the precision before the =, and the command's arguments after it.",
            )
    for value in used_values:
        if name == "precision" and value not in PRECISIONS and value not in words.values():
            raise InvalidRequestError(
                f"{{precision}} has the value {value!r}, which is none of {', '.join(PRECISIONS)}.",
                f"Say which of them it stands for, e.g. --value bf16={value}.",
            )
        if name in _NUMBERS and not (value.isdecimal() and (int(value) or name == "num_workers")):
            raise InvalidRequestError(
                f"{{{name}}} has the value {value!r}, which is not a valid number.", f"Write {{{name}=8}}, for example."
            )


def _check_own_placeholder(placeholder: Placeholder) -> None:
    """Raise `InvalidRequestError` if the name of a user's own placeholder is taken, or if it has no values to try."""
    name, choices = placeholder.name.lstrip("!"), placeholder.choices or {}
    similar_name = _similar_placeholder(name, _MIN_SIMILARITY)
    if similar_name is not None or name in _NAMES_IN_STUDY:
        raise InvalidRequestError(
            f"{{{placeholder.name}=…}} is not a placeholder: {name!r} is "
            + (f"like {similar_name!r}." if similar_name else "a parameter of every study."),
            (f"Write {{{similar_name}={placeholder.today}}}, or " if similar_name else "")
            + f"use another name, as in {{my_{name}={placeholder.today}:OTHER}}.",
        )
    if placeholder.today not in choices:
        raise InvalidRequestError(
            f"{{{placeholder.name}={placeholder.today}:…}} has no arguments for today's value.",
            f"Add them, none if there are none: {{{placeholder.name}={placeholder.today}:{placeholder.today}=|"
            + "|".join(f"{value}={arguments}" for value, arguments in choices.items())
            + "}.",
        )
    if len(choices) == 1:
        raise InvalidRequestError(
            f"{{{placeholder.name}={placeholder.today}:…}} has no other value than today's.",
            f"Add the values to try: {{{placeholder.name}={placeholder.today}:OTHER|OTHER}}.",
        )


def to_command_line(template: CommandTemplate) -> list[str]:
    """Return the command-line options and arguments from which `from_command_line` makes this template."""
    value_options = [word for name, value in template.values.items() for word in ("--value", f"{name}={value}")]
    return [*value_options, *(word for file in template.files for word in ("--file", file)), "--", *template.arguments]


def from_command_line(
    command: Sequence[str] | None, target: str | None, values: Iterable[str], files: Iterable[str], *, is_dry: bool
) -> CommandTemplate | None:
    """Make a CommandTemplate from the command after ``--`` and its options; None if there is no command.

    `values` are PRECISION=WORD pairs. Raises `InvalidRequestError` if a `target` is given too, or if there is an option
    that applies to commands but no command.
    """
    if command is None:
        for option, is_given in (("--value", values), ("--file", files), ("--dry-run", is_dry)):
            if is_given:
                raise InvalidRequestError(f"{option} needs a command.", "Give the command after `--`.")
        return None
    if target is not None:
        raise InvalidRequestError(
            f"Both a workload, {target!r}, and a command after `--` are given.", "Give only one of them."
        )
    pairs = [pair.partition("=") for pair in values]
    for precision, sign, _ in pairs:
        if not sign:
            raise InvalidRequestError(f"--value is {precision!r}.", "Give PRECISION=WORD, as in bf16=bf16-mixed.")
    return CommandTemplate.of(command, values={precision: word for precision, _, word in pairs}, files=files)
