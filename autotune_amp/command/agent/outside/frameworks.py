"""Hooks into training frameworks that report today's arguments of the training and set others."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

from .. import where
from ..imports import after_import
from .deepspeed_engine import hook_config

_TRAINING_ARGUMENTS = {
    "batch_size": "per_device_train_batch_size",
    "accumulation_steps": "gradient_accumulation_steps",
}
# Names of a DeepSpeed config by the field of a setting that decides their values.
_DEEPSPEED_NAMES = {
    "batch_size": ("train_micro_batch_size_per_gpu", "train_batch_size"),
    "accumulation_steps": ("gradient_accumulation_steps", "train_batch_size"),
    "precision": ("bf16.enabled", "fp16.enabled"),
}
_LIGHTNING_PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


class FrameworkHooks:
    """Hooks that set the frameworks' arguments to the values of `hooks` (`SettingHooks`), and report as `Switch` which
    arguments each framework in use takes.
    """

    def __init__(self, hooks: Any) -> None:
        self._hooks = hooks
        self._values: dict[str, Any] = hooks.values
        self._reported: set[str] = set()
        # Line and parser that made each TrainingArguments object, by the identity of the object.
        self._origins: dict[int, tuple[str, str]] = {}

    def install(self) -> None:
        """Hook into each framework once it is imported."""
        after_import("transformers.training_args", self._hook_post_init)
        after_import("transformers.trainer", self._hook_transformers_trainer)
        after_import("transformers.integrations.deepspeed", self._hook_deepspeed_values)
        after_import("accelerate.utils.dataclasses", self._hook_deepspeed_plugin)
        after_import("accelerate.accelerator", self._hook_accelerator)
        after_import("lightning.pytorch.trainer.trainer", self._hook_lightning_trainer)
        after_import("pytorch_lightning.trainer.trainer", self._hook_lightning_trainer)
        hook_config(self._hooks, self._values, self._report_switch)

    def _report_switch(self, owner: str, arguments: dict[str, str], today: dict[str, Any], parser: str = "") -> None:
        if owner not in self._reported:
            self._reported.add(owner)
            self._hooks.channel.add(
                "switch",
                owner=owner,
                arguments=arguments,
                today=today,
                parser=parser,
                script=sys.argv[0] if sys.argv else "",
            )

    def _hook_post_init(self, module: Any) -> None:
        """Remember the line and parser that create each TrainingArguments object, until a Trainer receives it, and set
        those of the command line at once: subclasses, as TRL's, and scripts derive further values from them.
        """
        owner = module.TrainingArguments
        original = owner.__post_init__

        @functools.wraps(original)
        def __post_init__(arguments: Any, *args: Any, **kwargs: Any) -> None:
            parser = _parser_of_arguments()
            self._origins[id(arguments)] = where.user_line(), parser
            original(arguments, *args, **kwargs)
            if parser and self._values:
                with _environment("ACCELERATE_MIXED_PRECISION"):
                    self._change_training_arguments(arguments, original)

        owner.__post_init__ = __post_init__

    def _hook_transformers_trainer(self, module: Any) -> None:
        """Set the TrainingArguments that a Trainer receives. Others are unchanged, since libraries compare with
        defaults.
        """
        owner, kind = module.Trainer, module.TrainingArguments
        original = owner.__init__

        @functools.wraps(original)
        def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:
            arguments = next((each for each in (*args, *kwargs.values()) if isinstance(each, kind)), None)
            if arguments is None:
                arguments = kind("tmp_trainer")  # as Trainer itself does
                if len(args) > 1:
                    args = (args[0], arguments, *args[2:])
                else:
                    kwargs["args"] = arguments
            today = _values_of(arguments)
            with _environment("ACCELERATE_MIXED_PRECISION"):  # Transformers 4 sets it
                if self._values:
                    self._change_training_arguments(arguments, kind.__post_init__.__wrapped__)
                    self._hooks.is_batch_size_in_framework = True  # the Trainer makes its loader from the arguments
                    self._hooks.is_in_framework = "precision" in self._values
                original(trainer, *args, **kwargs)
            today["n_gpu"] = arguments.n_gpu  # the Trainer counts one for a model that has a device map
            attention = getattr(getattr(trainer.model, "config", None), "_attn_implementation", None)
            if isinstance(attention, str):
                today["attn_implementation"] = attention
            _, parser = self._origins.get(id(arguments), ("", ""))
            self._report_switch("TrainingArguments", {**_TRAINING_ARGUMENTS, "precision": "bf16"}, today, parser)

        owner.__init__ = __init__

    def _change_training_arguments(self, arguments: Any, post_init: Any) -> None:
        """Set the values in TrainingArguments, and call `post_init` again for the fields derived from them."""
        values, line = self._values, self._origins.get(id(arguments), ("", ""))[0]
        for name, argument in _TRAINING_ARGUMENTS.items():
            if name in values:
                was, what = getattr(arguments, argument), f"TrainingArguments' {argument}"
                self._hooks.report_set(name, what, was, values[name], line)
                setattr(arguments, argument, values[name])
        precision = values.get("precision")
        if precision is not None:
            self._hooks.report_set("precision", "TrainingArguments", _precision_of(arguments), precision, line)
            arguments.bf16, arguments.fp16 = precision == "bf16", precision == "fp16"
            if arguments.device.type == "cpu":
                arguments.use_cpu = True  # without a GPU, bf16 is refused unless a CPU is asked for
            if arguments.tf32 is not None and precision in ("fp32", "tf32"):
                arguments.tf32 = precision == "tf32"
            os.environ["ACCELERATE_MIXED_PRECISION"] = precision if precision in ("bf16", "fp16") else "no"
        post_init(arguments)

    def _hook_deepspeed_values(self, module: Any) -> None:
        """Let TrainingArguments fill in the values of a Trainer's DeepSpeed config that are set here: a Trainer refuses
        a config whose own numbers differ from its arguments.
        """
        owner = module.HfTrainerDeepSpeedConfig
        original = owner.fill_match
        names = {name for value in self._values for name in _DEEPSPEED_NAMES.get(value, ())}

        @functools.wraps(original)
        def fill_match(config: Any, name: str, *args: Any, **kwargs: Any) -> None:
            section, key = config.find_config_node(name)
            if name in names and section is not None and key in section:
                section[key] = "auto"
            original(config, name, *args, **kwargs)

        owner.fill_match = fill_match

    def _hook_deepspeed_plugin(self, module: Any) -> None:
        """Let Accelerate fill in the precision of its DeepSpeed config if it is set here: it keeps the config's own, or
        refuses another.
        """
        owner = module.DeepSpeedPlugin
        original = owner.set_mixed_precision

        @functools.wraps(original)
        def set_mixed_precision(plugin: Any, *args: Any, **kwargs: Any) -> None:
            for name in ("fp16", "bf16"):
                if "precision" in self._values and name in plugin.deepspeed_config:
                    plugin.deepspeed_config[name]["enabled"] = "auto"
            original(plugin, *args, **kwargs)

        owner.set_mixed_precision = set_mixed_precision

    def _hook_accelerator(self, module: Any) -> None:
        owner = module.Accelerator
        original, accumulate = owner.__init__, owner.accumulate

        @functools.wraps(original)
        def __init__(accelerator: Any, *args: Any, **kwargs: Any) -> None:
            if where.is_called_by("transformers"):
                original(accelerator, *args, **kwargs)  # Transformers' Trainer made it, from TrainingArguments
                return
            own_precision, precision = kwargs.get("mixed_precision"), self._values.get("precision")
            steps = self._values.get("accumulation_steps")
            if precision is not None:
                self._hooks.is_in_framework = True
                kwargs["mixed_precision"] = precision if precision in ("bf16", "fp16") else "no"
            original(accelerator, *args, **kwargs)
            if precision is not None:
                self._hooks.report_set("precision", "Accelerator's mixed_precision", own_precision, precision)
            if steps is not None:
                was = accelerator.gradient_accumulation_steps
                self._hooks.report_set("accumulation_steps", "Accelerator", was, steps)
                accelerator.gradient_accumulation_steps = steps
                if accelerator.state.deepspeed_plugin is not None:  # a number there would replace it
                    settings = accelerator.state.deepspeed_plugin.deepspeed_config
                    settings["gradient_accumulation_steps"] = steps
                    if "train_micro_batch_size_per_gpu" in settings:
                        settings.pop("train_batch_size", None)  # DeepSpeed computes the product
            today = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
            self._report_switch("Accelerator", {"precision": "mixed_precision"}, {"precision": today})

        @functools.wraps(accumulate)
        def accumulate_(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
            # Only scripts that call `accumulate` use the argument.
            steps = accelerator.gradient_accumulation_steps
            arguments = {"accumulation_steps": "gradient_accumulation_steps"}
            self._report_switch("Accelerator.accumulate", arguments, {"accumulation_steps": steps})
            return accumulate(accelerator, *args, **kwargs)

        owner.__init__, owner.accumulate = __init__, accumulate_

    def _hook_lightning_trainer(self, module: Any) -> None:
        owner = module.Trainer
        original, fit = owner.__init__, owner.fit

        @functools.wraps(original)
        def __init__(trainer: Any, *args: Any, **kwargs: Any) -> None:
            precision, steps = self._values.get("precision"), self._values.get("accumulation_steps")
            if precision is not None:
                self._hooks.is_in_framework = True
                self._hooks.report_set("precision", "Trainer's precision", kwargs.get("precision"), precision)
                kwargs["precision"] = _LIGHTNING_PRECISIONS[precision]
            if steps is not None:
                was = kwargs.get("accumulate_grad_batches", 1)
                self._hooks.report_set("accumulation_steps", "Trainer's accumulate_grad_batches", was, steps)
                kwargs["accumulate_grad_batches"] = steps
            original(trainer, *args, **kwargs)

        @functools.wraps(fit)
        def fit_(trainer: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            today = {"accumulation_steps": trainer.accumulate_grad_batches}
            if trainer.precision in _LIGHTNING_PRECISIONS.values():
                today["precision"] = next(
                    name for name, value in _LIGHTNING_PRECISIONS.items() if value == trainer.precision
                )
            arguments = {"precision": "precision", "accumulation_steps": "accumulate_grad_batches"}
            if not getattr(model, "automatic_optimization", True):
                del arguments["accumulation_steps"], today["accumulation_steps"]
            self._report_switch("Trainer", arguments, today)
            return fit(trainer, model, *args, **kwargs)

        owner.__init__, owner.fit = __init__, fit_


def _values_of(arguments: Any) -> dict[str, Any]:
    """Return the values that TrainingArguments have today, by the names of a setting or their own."""
    return {
        **{name: getattr(arguments, argument) for name, argument in _TRAINING_ARGUMENTS.items()},
        "precision": _precision_of(arguments),
        "optim": str(getattr(arguments.optim, "value", arguments.optim)),
        "gradient_checkpointing": str(arguments.gradient_checkpointing),
    }


def _precision_of(arguments: Any) -> str:
    """Return the precision set in TrainingArguments, else that given to ``accelerate launch``."""
    if arguments.bf16 or arguments.fp16:
        return "bf16" if arguments.bf16 else "fp16"
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return launched if launched in ("bf16", "fp16") else "fp32"


@contextlib.contextmanager
def _environment(name: str) -> Iterator[None]:
    """Context that restores an environment variable at its end."""
    before = os.environ.get(name)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _parser_of_arguments() -> str:
    """Return ``HfArgumentParser`` if it is on the call stack, parsing the command line; else ""."""
    typed = sys.argv[1:]
    # A subclass of the parser, as TRL's, may read the file of --config before.
    at = next((index for index, word in enumerate(typed) if word.partition("=")[0] == "--config"), len(typed))
    num_words = 2 if typed[at : at + 1] == ["--config"] else 1  # --config FILE or --config=FILE
    without_config = typed[:at] + typed[at + num_words :]
    for frame in where.frames():
        if frame.f_code.co_name == "parse_args_into_dataclasses":
            parsed = frame.f_locals.get("args")
            is_command_line = parsed is None or any(
                list(parsed)[max(0, len(parsed) - len(words)) :] == words for words in (typed, without_config)
            )
            return "HfArgumentParser" if is_command_line else ""
    return ""
