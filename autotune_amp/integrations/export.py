"""A recommendation as a training framework takes it: text to paste, a file to launch with, lines for the shell.

Pure, and without importing the framework. Each Python text leaves `dataset`, `model`, `optimizer` and
`compute_loss(model, batch)` to the script it is pasted into, and `count(batch)` where the batches of a window weigh
unequally. What of a config a text does not say itself stands in a comment: a field that is new, too.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from autotune_amp.core.config import AmpConfig, LossScale, training_arguments
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.explain import (
    AUTOCAST_DTYPES,
    LOADER_COMMENT,
    LOSS,
    accumulates,
    controlled_loop,
    loader_line,
    pass_loss,
    strict_flag_lines,
)
from autotune_amp.integrations.export_settings import (
    accelerate_config,
    beyond_plain,
    deepspeed_config,
    deepspeed_roundings,
    to_yaml,
)

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation

Target: TypeAlias = Literal["lightning", "transformers", "accelerate", "deepspeed", "torch", "env"]
TARGETS: tuple[Target, ...] = ("lightning", "transformers", "accelerate", "deepspeed", "torch", "env")
_MARK = "autotune-amp export of"  # begins a text's first line, which says where it comes from
_STEPPING = ("lightning", "transformers", "deepspeed")  # their trainers and engines take the training steps


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """The text for one target, as a JSON document with `format`.

    `notes` say where the config comes from, and what it holds that the text has no room for; a text that can hold
    comments has it there. A launch file that needs more than a plain Accelerator says so in both.
    """

    format: int = 1
    to: Target
    text: str
    notes: tuple[str, ...] = ()


def setting_of(recommendation: Recommendation, origin: str) -> Exportable:
    """What of a recommendation a text is made from; `origin` is a line that says where it comes from."""
    evidence, workload = recommendation.evidence, recommendation.workload
    accumulation = evidence.accumulation
    verdict = None if accumulation is None else accumulation.verdict
    counted = None if accumulation is None else accumulation.weighted_by
    return Exportable(
        recommendation.config,
        recommendation.hardware.identity.type,
        loss="sum" if verdict == "sum" else "weighted" if verdict == "weighted" else "mean",
        share="what the loss is a mean over" if counted is None else f"({counted})",
        is_loop=workload is not None and workload.is_loop,
        origin=origin,
    )


def export(setting: Exportable, to: str) -> Export:
    """The text for the target named `to`.

    Raises `InvalidRequestError` for a name that is none of `TARGETS`, and for what the framework cannot train at all.
    """
    target = next((name for name in TARGETS if name == to), None)
    if target is None:
        raise InvalidRequestError(f"There is no export to {to!r}.", f"Name one of {', '.join(TARGETS)}.")
    if target == "env":
        return Export(to=target, text=_headed(setting, shell(setting)))
    if setting.config.precision == "fp8":
        raise InvalidRequestError("There is no export of fp8.", "Export a config in bf16, fp16, tf32 or fp32.")
    if setting.is_loop and target in _STEPPING:
        raise InvalidRequestError(
            f"There is no export to {target} of a training with a train_step of its own: {target} takes the steps.",
            "Export it with --to torch or --to accelerate, which call train_step(state, batch, amp).",
        )
    if target == "deepspeed":
        document = json.dumps(deepspeed_config(setting.config), indent=2)
        return Export(to=target, text=f"{document}\n", notes=tuple(beside_deepspeed(setting)))
    return Export(to=target, text=_headed(setting, _TEXTS[target](setting)))


def accelerate_file(setting: Exportable) -> Export:
    """The file that ``accelerate launch --config_file`` reads; its comments say what belongs to the script.

    `notes` say what a plain Accelerator does not train of it. Raises `InvalidRequestError` for fp8.
    """
    written = accelerate_config(setting.config, setting.device_type)
    notes: tuple[str, ...] = ()
    if beyond := beyond_plain(setting.config, setting.device_type):
        notes = (f"{'; '.join(beyond).capitalize()}: with a plain Accelerator this file trains in fp32.",)
    script = Script(setting, "This file", "the script that `autotune-amp export --to accelerate` prints")
    if not notes:
        script.says("precision")
    script.comments[:0] = [
        f"The script has to make its accelerator with {_ACCELERATOR}, which sets the precision itself.",
        *notes,
        "accelerate launch --config_file THIS_FILE SCRIPT.py",
    ]
    script.lines.append(to_yaml(written).rstrip())
    return Export(to="accelerate", text=_headed(setting, script.source()), notes=notes)


def is_exported(text: str) -> bool:
    """Whether a file with this text was written by an export: its first line says so.

    DeepSpeed's JSON has no room for that line; it is one where it holds the exported keys and no others.
    """
    if text.startswith(f"# {_MARK}"):
        return True
    try:
        document = json.loads(text)
    except ValueError:
        return False
    keys = deepspeed_config(AmpConfig(precision="fp32", batch_size=1)).keys()
    return isinstance(document, dict) and document.keys() == keys


def _headed(setting: Exportable, text: str) -> str:
    origin = wrapped(f"{_MARK} {setting.origin}") if setting.origin else []
    return "".join(f"{line}\n" for line in origin) + text


WIDTH = 100  # of a line, where it can be broken
KEPT_FLAGS = "Measured with the script's own TF32 flags and autocast: they stay as they are."
SCALER_ARGUMENTS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


@dataclass(frozen=True)
class Exportable:
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
    """Source as it grows: comments, imports, lines. What of the config nobody `says` becomes a comment.

    holder, way_out: who has no place for that, and what has.
    """

    def __init__(self, setting: Exportable, holder: str = "", way_out: str = "") -> None:
        self.setting = setting
        self.comments: list[str] = []
        self.lines: list[str] = []
        self._holder, self._way_out = holder, way_out
        self._imports: set[str] = set()
        self._said = {"environment"}
        self._unsaid: list[str] = []
        if setting.config.environment:
            self.comments.append("Before Python starts, in the shell:")
            self.comments += [f"  {line}" for line in environment_lines(setting.config.environment)]

    def source(self) -> str:
        """The whole text."""
        if unsaid := [*self._unsaid, *unsaid_of(self.setting.config, self._said)]:
            self.comments.append(f"{self._holder} has no place for {'; '.join(unsaid)}: {self._way_out} has.")
        imports = sorted(self._imports, key=lambda line: (line.startswith("from "), line))
        comments = [line for comment in self.comments for line in wrapped(comment)]
        parts = ["\n".join(comments), "\n".join(imports), "\n".join(self.lines)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def needs(self, *imports: str) -> None:
        """Import these."""
        self._imports.update(imports)

    def says(self, *names: str) -> None:
        """Note that the text holds these fields of the config."""
        self._said.update(names)

    def add_config(self) -> None:
        """``config = AmpConfig(...)``."""
        self.says(*self.setting.config.__struct_fields__)
        classes: set[str] = set()
        self.lines.append(f"config = {_source(self.setting.config, classes)}")
        self.needs(f"from autotune_amp.core.config import {', '.join(sorted(classes))}")

    def add_flags(self) -> None:
        """The TF32 flags, which matter on CUDA alone."""
        self.says("precision", "as_found")
        if self.setting.config.as_found:
            self.comments.append(KEPT_FLAGS)
        elif self.setting.device_type == "cuda":
            self.needs("import torch")
            self.lines += strict_flag_lines(self.setting.config.precision)

    def add_loader(self) -> None:
        """``loader = DataLoader(...)``."""
        self.says("batch_size", "num_workers")
        self.needs("from torch.utils.data import DataLoader")
        self.lines += [LOADER_COMMENT, loader_line(self.setting.config)]

    def scaler_arguments(self, scale: LossScale) -> list[str]:
        """What GradScaler takes of a loss scale, as source: it has no hysteresis and no bounds."""
        self.says("loss_scale")
        self._unsaid += [] if scale.hysteresis == 1 else [f"hysteresis={scale.hysteresis}"]
        self._unsaid += [f"min_scale={scale.floor!r}", f"max_scale={scale.max_scale!r}"]
        return keywords({name: getattr(scale, name) for name in SCALER_ARGUMENTS})


def unsaid_of(config: AmpConfig, said: Collection[str]) -> list[str]:
    """The config's other fields in a few words each, those at their default left out."""
    found = []
    for one in msgspec.structs.fields(config):
        value = getattr(config, one.name)
        if one.name not in said and (one.required or value not in (one.default, (), {})):
            plans = ", ".join(plan.precision for plan in config.plans)
            source = f"{one.name}={' '.join(_source(value, set()).split())}"
            found.append(f"the fallback to {plans}" if one.name == "fallback" else source)
    return found


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


_ACCELERATOR = "autotune_amp.integrations.accelerate.AutotuneAccelerator"


def torch(setting: Exportable) -> str:
    """A loop in plain PyTorch; with the controller where plain PyTorch cannot keep what was measured."""
    script, config = Script(setting, "PyTorch", "autotune_amp.PrecisionController"), setting.config
    if setting.is_loop:
        return _controlled(script, ["for batch in loader:", "    train_step(state, batch, controller)"])
    if config.pinned_modules:
        steps_now = _steps_of_rung(config, "controller.window_size")
        loss = _loss(script, steps_now, "controller.window_share")
        return _controlled(script, controlled_loop(_passes(setting, steps_now), loss))
    steps = config.accumulation_steps
    script.says("accumulation_steps")
    script.add_flags()
    script.add_loader()
    loss = _loss(script, "1" if steps == 1 else "len(window)", "counted / sum(counts)")
    forward = [f"loss = {loss}"]
    if (dtype := AUTOCAST_DTYPES.get(config.precision)) is not None:
        script.needs("import torch")
        forward = [f'with torch.autocast("{setting.device_type}", dtype={dtype}):', f"    loss = {loss}"]
    backward, step = "loss.backward()", ["optimizer.step()"]
    if config.loss_scale is not None:
        arguments = [f'"{setting.device_type}"', *script.scaler_arguments(config.loss_scale)]
        script.lines.append(call("scaler = torch.amp.GradScaler(", arguments))
        backward, step = "scaler.scale(loss).backward()", ["scaler.step(optimizer)", "scaler.update()"]
    step = [*step, "optimizer.zero_grad()"]
    if steps == 1:
        return _looped(script, "for batch in loader:", [*forward, backward, *step])
    script.needs("from itertools import islice")
    script.lines.append("batches = iter(loader)")
    passes = ["for batch in window:", *_indented([*forward, backward])]
    if setting.loss == "weighted":
        passes[:1] = ["counts = [count(batch) for batch in window]", "for batch, counted in zip(window, counts):"]
    return _looped(script, f"while window := list(islice(batches, {steps})):", [*passes, *step])


def accelerate(setting: Exportable) -> str:
    """A loop with our Accelerator, which trains what was measured: loss under autocast, pins, fallbacks."""
    script, config = Script(setting), setting.config
    script.needs("from autotune_amp.integrations.accelerate import AutotuneAccelerator")
    script.add_config()
    arguments = ["cpu=True"] if setting.device_type == "cpu" else []
    script.lines.append(call("accelerator = AutotuneAccelerator(", ["config", *arguments]))
    script.add_loader()
    if setting.is_loop:
        script.lines.append("loader = accelerator.prepare(loader)")
        return _looped(script, "for batch in loader:", ["train_step(state, batch, accelerator.controller)"])
    script.lines.append("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")
    steps = _steps_of_rung(config, "accelerator.gradient_accumulation_steps")
    body = [f"loss = {_loss(script, steps, 'accelerator.controller.window_share', is_divided=True)}"]
    if config.precision in AUTOCAST_DTYPES:
        body = ["with accelerator.autocast():", *_indented(body)]
    body += ["accelerator.backward(loss)", "optimizer.step()", "optimizer.zero_grad()"]
    head = f"for batch in accelerator.windows({_passes(setting, steps)}):"
    return _looped(script, head, ["with accelerator.accumulate(model):", *_indented(body)])


def lightning(setting: Exportable) -> str:
    """A Trainer with our precision plugin, which holds all of the config but batch size and workers."""
    script = Script(setting)
    script.needs("from autotune_amp.integrations.lightning import trainer_arguments")
    script.needs("from lightning.pytorch import Trainer")
    script.comments += setting.divided_by("Lightning")
    _add_names_of_pins(script, "the LightningModule")
    script.add_config()
    script.add_loader()
    script.lines += [
        "# trainer_arguments(config, max_epochs=...) takes the Trainer's other arguments.",
        "trainer = Trainer(**trainer_arguments(config))",
        "# trainer.fit(module, loader)",
    ]
    return script.source()


def transformers(setting: Exportable) -> str:
    """TrainingArguments, and our Trainer, which keeps to the loss scale, the fallbacks and the pinned modules."""
    script = Script(setting)
    script.needs("from autotune_amp.integrations.transformers import AutotuneTrainer")
    script.needs("from transformers import TrainingArguments")
    script.comments += setting.divided_by("Where the loss is the script's own, Trainer")
    _add_names_of_pins(script, "`model`")
    script.add_config()
    device: dict[str, Any] = {"use_cpu": True} if setting.device_type == "cpu" else {}
    arguments = {"output_dir": "output", **training_arguments(setting.config), **device}
    script.lines.append(call("arguments = TrainingArguments(", keywords(arguments)))
    given = ["model=model", "args=arguments", "train_dataset=dataset", "amp_config=config"]
    script.lines += [call("trainer = AutotuneTrainer(", given), "# trainer.train()"]
    return script.source()


def shell(setting: Exportable) -> str:
    """Lines for the shell that starts the training, and a comment on what is not the shell's."""
    script = Script(setting, "The shell", "the script that another --to prints")
    script.comments.clear()
    script.lines = environment_lines(setting.config.environment) or ["# The config sets no environment variables."]
    return script.source()


def beside_deepspeed(setting: Exportable) -> list[str]:
    """Where DeepSpeed's JSON comes from and what of the config it has no place for, a sentence each."""
    config, found = setting.config, [f"{setting.origin}."] if setting.origin else []
    if config.precision in AUTOCAST_DTYPES:
        found.append(
            f"DeepSpeed's {config.precision} keeps the weights in {config.precision} with an fp32 copy; measured was "
            "autocast over fp32 weights."
        )
    if config.as_found:
        found.append(KEPT_FLAGS)
    elif config.precision == "tf32":
        found.append('TF32 has no key: call torch.set_float32_matmul_precision("high") in the script.')
    if config.loss_scale is not None:
        found += deepspeed_roundings(config.loss_scale)
    if config.pinned_modules:
        found.append(
            f"Nothing keeps {', '.join(config.pinned_modules)} in fp32, and {config.precision} is faithful only with "
            "that: train with another framework."
        )
    if config.plans:
        found.append(f"Nothing falls back to {', '.join(plan.precision for plan in config.plans)}.")
    said = ("precision", "batch_size", "accumulation_steps", "loss_scale", "fallback", "pinned_modules", "as_found")
    if unsaid := unsaid_of(config, said):
        found.append(
            f"The JSON has no place for {'; '.join(unsaid)}: they are the script's, or the shell's (--to env)."
        )
    return [*found, *setting.divided_by("DeepSpeed")]


_TEXTS: dict[str, Callable[[Exportable], str]] = {
    "accelerate": accelerate,
    "lightning": lightning,
    "torch": torch,
    "transformers": transformers,
}


def _add_names_of_pins(script: Script, holder: str) -> None:
    """Say what to change where the framework trains a module around the one that was searched."""
    if pins := script.setting.config.pinned_modules:
        script.comments.append(
            f"pinned_modules has the names of the model that was searched. Where {holder} holds that model as an "
            f'attribute, self.net for one, put it before them: "net.{pins[0]}".'
        )


def _controlled(script: Script, lines: Sequence[str]) -> str:
    """A loop with the PrecisionController, which sets the TF32 flags itself."""
    script.needs("from autotune_amp import PrecisionController")
    script.add_config()
    script.add_loader()
    script.lines += [f'controller = PrecisionController(config, "{script.setting.device_type}")', *lines]
    return script.source()


def _looped(script: Script, head: str, body: Sequence[str]) -> str:
    script.lines += [head, *_indented(body)]
    return script.source()


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _passes(setting: Exportable, steps: str) -> str:
    """The arguments of `windows`."""
    return "loader, weigh=count" if setting.loss == "weighted" and steps != "1" else "loader"


def _loss(script: Script, steps: str, share: str, *, is_divided: bool = False) -> str:
    """The expression to run backward from, `steps` and `share` the source of the accumulation steps and of a batch's
    part of what counts in its window.

    `is_divided`: the framework divides it by the steps.
    """
    setting = script.setting
    if steps == "1":
        return LOSS
    if setting.loss == "weighted":
        script.comments.append(f"count(batch) is yours, of a batch: {setting.share.strip('()')}.")
    if not is_divided:
        return pass_loss(setting.loss, steps, share)
    return LOSS if setting.loss == "mean" else f"{pass_loss(setting.loss, steps, share)} * {steps}"


def _steps_of_rung(config: AmpConfig, steps: str) -> str:
    """`steps`, the source of the current rung's accumulation steps, unless no rung accumulates."""
    return steps if accumulates(config) else "1"
