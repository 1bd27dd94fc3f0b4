"""What the exported texts have in common: a setting, and Python source as it grows. Pure."""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from autotune_amp.core.config import AmpConfig, LossScale
from autotune_amp.core.config_source import LOADER_COMMENT, loader_line, strict_flag_lines

WIDTH = 100  # of a line, where it can be broken
KEPT_FLAGS = "Measured with the script's own TF32 flags and autocast: they stay as they are."
SCALER_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


@dataclass(frozen=True)
class Setting:
    """A config and what else of a recommendation belongs to it.

    loss: how the losses of an accumulation window add up to that of the whole batch.
    share: in words, what a batch's weight is a share of, where `loss` is "weighted".
    is_loop: the training has a ``train_step(state, batch, amp)`` of its own.
    origin: a line that says where the config comes from.
    """

    config: AmpConfig
    device_type: str = "cuda"
    loss: Literal["mean", "sum", "weighted"] = "mean"
    share: str = ""
    is_loop: bool = False
    origin: str = ""

    def divided_by(self, framework: str) -> list[str]:
        """What to know of the loss where the framework divides it by the accumulation steps, and that is not all."""
        steps = self.config.accumulation_steps
        if steps == 1 or self.loss == "mean":
            return []
        if self.loss == "sum":
            return [
                f"{framework} divides the loss by the {steps} batches of a step; it is a sum: multiply it by {steps}."
            ]
        return [
            f"{framework} divides the loss by the {steps} batches of a step; multiply it by {steps} and by the batch's "
            f"share of all {self.share} in them."
        ]


class Script:
    """Python source: comments, imports, lines."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.comments: list[str] = []
        self.lines: list[str] = []
        self._imports: set[str] = set()
        if setting.config.environment:
            self.comments.append("Before Python starts, in the shell:")
            self.comments += [f"  {line}" for line in environment_lines(setting.config.environment)]

    def source(self) -> str:
        """The whole text."""
        imports = sorted(self._imports, key=lambda line: (line.startswith("from "), line))
        comments = [line for comment in self.comments for line in wrapped(comment)]
        parts = ["\n".join(comments), "\n".join(imports), "\n".join(self.lines)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def needs(self, *imports: str) -> None:
        """Import these."""
        self._imports.update(imports)

    def add_config(self) -> None:
        """``config = AmpConfig(...)``."""
        classes: set[str] = set()
        self.lines.append(f"config = {_source(self.setting.config, classes)}")
        self.needs(f"from autotune_amp.core.config import {', '.join(sorted(classes))}")

    def add_flags(self) -> None:
        """The TF32 flags, which matter on CUDA alone."""
        if self.setting.config.as_found:
            self.comments.append(KEPT_FLAGS)
        elif self.setting.device_type == "cuda":
            self.needs("import torch")
            self.lines += strict_flag_lines(self.setting.config.precision)

    def add_loader(self) -> None:
        """``loader = DataLoader(...)``."""
        self.needs("from torch.utils.data import DataLoader")
        self.lines += [LOADER_COMMENT, loader_line(self.setting.config)]

    def add_unheld(self, framework: str, way_out: str) -> None:
        """Say what of the config the framework has no place for beside GradScaler's own arguments."""
        config = self.setting.config
        found = _beyond_grad_scaler(config.loss_scale)
        if config.plans:
            found.append(f"the fallback to {', '.join(plan.precision for plan in config.plans)}")
        if found:
            self.comments.append(f"{framework} has no place for {'; '.join(found)}: {way_out} has.")


def scaler_arguments(scale: LossScale) -> list[str]:
    """What ``torch.amp.GradScaler`` takes of a loss scale, as source."""
    return keywords({name: getattr(scale, name) for name in SCALER_ARGUMENTS})


def keywords(arguments: Mapping[str, object]) -> list[str]:
    """Keyword arguments as source, of names and values."""
    return [f"{name}={_source(value, set())}" for name, value in arguments.items()]


def call(head: str, arguments: Sequence[str], tail: str = ")", indent: str = "") -> str:
    """``head``, the arguments and ``tail``: on one line where they fit, else each on its own."""
    line = f"{head}{', '.join(arguments)}{tail}"
    if len(indent) + len(line) <= WIDTH and "\n" not in line:
        return line
    return "\n".join([head, *(f"{indent}    {argument}," for argument in arguments), f"{indent}{tail}"])


def wrapped(comment: str) -> list[str]:
    """A comment's lines, in Python, YAML or the shell."""
    if comment.startswith(" "):
        return [f"# {comment}"]  # a line to copy
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(comment)


def environment_lines(variables: Mapping[str, str]) -> list[str]:
    """A shell line for each variable."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def _beyond_grad_scaler(scale: LossScale | None) -> list[str]:
    """What of a loss scale GradScaler does otherwise: it backs off at every overflow, and its scale has no bounds."""
    if scale is None:
        return []
    hysteresis = [] if scale.hysteresis == 1 else [f"hysteresis={scale.hysteresis}"]
    return [*hysteresis, f"min_scale={scale.floor!r}", f"max_scale={scale.max_scale!r}"]


def _source(value: object, classes: set[str], indent: str = "") -> str:
    """`value` as source, fields at their default left out; adds the classes that it takes to `classes`."""
    inner = f"{indent}    "
    if isinstance(value, msgspec.Struct):
        classes.add(type(value).__name__)
        arguments = [
            f"{one.name}={_source(getattr(value, one.name), classes, inner)}"
            for one in msgspec.structs.fields(value)
            if one.required or getattr(value, one.name) not in (one.default, (), {})
        ]
        return call(f"{type(value).__name__}(", arguments, indent=indent)
    if isinstance(value, tuple):
        return call("[", [_source(part, classes, inner) for part in value], "]", indent)
    return json.dumps(value) if isinstance(value, str | dict) else repr(value)
