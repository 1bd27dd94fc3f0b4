"""Export of a recommendation for training frameworks: text to paste, a file to launch with, or lines for the shell.

Pure, and without importing the framework. The script into which a Python text is pasted has to define `dataset`,
`model`, `optimizer` and `compute_loss(model, batch)`, and `count(batch)` if the batches of a window have unequal
weights. Values that a framework cannot express are named in comments, for DeepSpeed on standard error.

A file is only written over an earlier export. A training with its own `train_step` can only be exported to `torch` and
`accelerate`.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import msgspec

from autotune_amp.core.config import SCALER_ARGUMENTS, AmpConfig, FallbackPlan, LossScale, training_arguments
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.evidence import (
    AUTOCAST_DTYPES,
    LOADER_COMMENT,
    LOSS,
    controlled_loop,
    export_lines,
    has_accumulation,
    loader_line,
    pass_loss,
    strict_flag_lines,
)
from autotune_amp.core.setting import LOADER_ARGUMENTS, VARIANT_VALUES, Setting
from autotune_amp.core.text import one_line
from autotune_amp.dimensions import DIMENSIONS
from autotune_amp.integrations.documents import accelerate_config, deepspeed_config

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Recommendation

Target: TypeAlias = Literal["lightning", "transformers", "accelerate", "deepspeed", "torch", "env"]
TARGETS: tuple[Target, ...] = get_args(Target)
_MARK = "autotune-amp export of"  # start of the first line of every exported text
_WITHOUT_OWN_LOOP = ("lightning", "transformers", "deepspeed")  # their trainers and engines run the steps themselves


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """Text for one target, as a JSON document with `format`.

    `notes` name parts of the config that a text without comments cannot express, and for a launch file the differences
    of a plain Accelerator.
    """

    format: int = 1
    to: Target | Literal["slurm"]
    text: str
    notes: tuple[str, ...] = ()


def export_source(recommendation: Recommendation, origin: str) -> ExportSource:
    """Return the parts of a recommendation that are exported. `origin` is a line with its study, setting and speed."""
    evidence, workload = recommendation.evidence, recommendation.workload
    check = evidence.accumulation
    return ExportSource(
        _config_of_rank(recommendation.training_config, 1 if workload is None else workload.num_sharing),
        recommendation.hardware.identity.type,
        has_own_scaler=recommendation.command_template is not None,
        loss=check.verdict if check is not None and check.verdict in ("sum", "weighted") else "mean",
        share=f"({check.weighted_by})" if check is not None and check.weighted_by else "the items of the loss's mean",
        is_loop=workload is not None and workload.is_loop,
        origin=origin,
        num_ranks=recommendation.num_ranks,
    )


def _config_of_rank(config: AmpConfig, num_sharing: int) -> AmpConfig:
    """Return the config with the batch sizes of one of the `num_sharing` ranks that divide each batch."""
    size = max(1, config.batch_size // num_sharing)
    plans = [
        msgspec.structs.replace(plan, batch_size=max(1, plan.batch_size // num_sharing))
        if isinstance(plan, FallbackPlan)
        else plan
        for plan in config.fallback
    ]
    return msgspec.structs.replace(config, batch_size=size, fallback=plans)


def export(setting: ExportSource, to: str) -> Export:
    """Return the text for the target named `to`.

    Raises `InvalidRequestError` for a name not in `TARGETS`, and for a training that the framework cannot run.
    """
    target = next((name for name in TARGETS if name == to), None)
    if target is None:
        raise InvalidRequestError(f"There is no export to {to!r}.", f"Use one of {', '.join(TARGETS)} or slurm.")
    if setting.is_loop and target in _WITHOUT_OWN_LOOP:
        raise InvalidRequestError(
            f"A training with its own train_step cannot be exported to {target}, which runs the steps itself.",
            "Export it with --to torch or --to accelerate, which call train_step(state, batch, amp).",
        )
    if target == "deepspeed":
        document = json.dumps(deepspeed_config(setting.config), indent=2)
        return Export(to=target, text=f"{document}\n", notes=tuple(deepspeed_notes(setting)))
    return Export(to=target, text=_TEXTS[target](setting))


def accelerate_file(setting: ExportSource) -> Export:
    """Return the file for ``accelerate launch --config_file``, with comments for the parts that belong to the script.

    `notes` name a precision that a plain Accelerator cannot train in.
    """
    launch_config = accelerate_config(setting.config, setting.device_type, setting.num_ranks)
    script = ExportedScript(setting, "", "This file", "the script that `autotune-amp export --to accelerate` prints")
    notes: tuple[str, ...] = ()
    if setting.config.precision in AUTOCAST_DTYPES and launch_config["mixed_precision"] == "no":
        pinned = "".join(f", with {name} in fp32" for name in setting.config.pinned_modules)
        combination = f"{setting.config.precision} on {setting.device_type}{pinned}"
        notes = (f"A plain Accelerator cannot train {combination}: with this file it trains in fp32.",)
    elif setting.config.precision != "fp8":  # whose layers the script sets up
        script.handled.add("precision")
    script.comments[:0] = [
        f"The script has to make its accelerator with {_ACCELERATOR}, which sets the precision itself.",
        *notes,
        f"torchrun --nproc_per_node {setting.num_ranks} SCRIPT.py; on a CPU `accelerate launch` starts one process"
        if setting.needs_torchrun
        else "accelerate launch --config_file THIS_FILE SCRIPT.py",
    ]
    # JSON values are YAML values too; without quotes, YAML reads ``NO`` as false.
    script.lines += [f"{name}: {json.dumps(value)}" for name, value in launch_config.items()]
    return Export(to="accelerate", text=script.source(), notes=notes)


def is_exported(text: str) -> bool:
    """Whether a text was written by an export, by its first line, or by the keys of DeepSpeed's JSON."""
    if text.removeprefix(SHEBANG).startswith(f"# {_MARK}"):
        return True
    try:
        document = json.loads(text)
    except ValueError:
        return False
    keys = deepspeed_config(AmpConfig(precision="fp32", batch_size=1)).keys()
    return isinstance(document, dict) and document.keys() == keys


SHEBANG = "#!/usr/bin/env bash\n"
WIDTH = 100  # characters of a line, if it can be broken
UNCHANGED_FLAGS = "Measured with the script's own TF32 flags: they are kept."
_STARTS_OF_RANKS = {
    "torch": ": torchrun --nproc_per_node {}, with DistributedDataParallel(model) and a DistributedSampler",
    "transformers": ": torchrun --nproc_per_node {}",
    "accelerate": ": accelerate launch --num_processes {}",
    "lightning": ": Trainer(devices={})",
}
_OWN_SCALER = "Measured with the script's own GradScaler: give the loss scale the arguments of that one."


@dataclass(frozen=True)
class ExportSource:
    """Parts of a recommendation that are exported: its config, device and loop.

    loss: how the losses of an accumulation window add up to that of the whole batch.
    share: if `loss` is "weighted", the items in words that weigh a batch, such as ``(labels != -100)``.
    is_loop: the training has its own ``train_step(state, batch, amp)``.
    origin: a line with the study, setting and speed.
    has_own_scaler: fp16 was measured with the script's own GradScaler, and not with the config's loss scale.
    num_ranks: number of processes that trained together, each with batches of the config's size.
    """

    config: AmpConfig
    device_type: str = "cuda"
    loss: Literal["mean", "sum", "weighted"] = "mean"
    share: str = ""
    is_loop: bool = False
    origin: str = ""
    has_own_scaler: bool = False
    num_ranks: int = 1

    @property
    def needs_torchrun(self) -> bool:
        """Whether ``accelerate launch`` would start one process in place of several, as it does on a CPU."""
        return self.num_ranks > 1 and self.device_type == "cpu"

    def rank_comments(self, target: str) -> list[str]:
        """Return a comment on the number of processes that trained together and how to start them, if there are
        several.
        """
        if self.num_ranks == 1:
            return []
        launched = "transformers" if target == "accelerate" and self.needs_torchrun else target
        start = _STARTS_OF_RANKS.get(launched, "").format(self.num_ranks)
        return [f"Measured on {self.num_ranks} processes, each with batches of this size{start}."]

    def loss_division_comments(self, framework: str) -> list[str]:
        """Return a comment on how to scale the loss, if dividing it by the accumulation steps is not correct."""
        steps = self.config.accumulation_steps
        if steps == 1 or self.loss == "mean":
            return []
        instruction = f"this loss is a sum: multiply it by {steps}"
        if self.loss == "weighted":
            instruction = f"multiply it by {steps} and by the batch's share of all {self.share} in them"
        return [f"{framework} divides the loss by the {steps} batches of a step; {instruction}."]


class ExportedScript:
    """Source text under construction: comments, imports, lines. A comment names the config's fields not in `handled`.

    target_label, alternative: subjects of that comment: the text that lacks the fields, and one that has them.
    """

    def __init__(self, setting: ExportSource, target: str, target_label: str = "", alternative: str = "") -> None:
        self.setting = setting
        self.comments: list[str] = []
        self.lines: list[str] = []
        self.imports: set[str] = set()
        self.handled = {"environment", "arguments", "as_found"}  # names of fields that need no comment
        self.missing: list[str] = []
        self._target_label, self._alternative = target_label, alternative
        for dimension in DIMENSIONS:
            lines = dimension.export(getattr(setting.config, dimension.name), target)
            if lines is not None:
                self.handled.add(dimension.name)
                self.lines += lines
                if any("torch." in line.partition("#")[0] for line in lines):
                    self.imports.add("import torch")
        self.comments += measured_comments(setting.config)
        self.comments += setting.rank_comments(target)
        if setting.has_own_scaler and setting.config.loss_scale is not None:
            self.comments.append(_OWN_SCALER)
        if exports := export_lines(setting.config):
            self.comments += ["Before Python starts, in the shell:", *(f"  {line}" for line in exports)]

    def source(self) -> str:
        """Return the text: origin, comments, imports, lines."""
        if missing := [*self.missing, *unexpressed_fields(self.setting.config, self.handled)]:
            self.comments.append(f"{self._target_label} cannot express {'; '.join(missing)}: {self._alternative} can.")
        imports = sorted(self.imports, key=lambda line: (line.startswith("from "), line))
        comments = [line for comment in self.comments for line in comment_lines(comment)]
        parts = ["\n".join(comments), "\n".join(imports), "\n".join(self.lines)]
        origin = origin_comment(self.setting.origin) if self.setting.origin else []
        return "\n".join([*origin, "\n\n".join(filter(None, parts)), ""])

    def add_prepared(self, config: str) -> None:
        """Add ``prepare(...)`` for the config's changes to model and optimizer; `config` is its source."""
        if self.setting.config.active_variants:
            self._import_classes(config)
            self.handled |= VARIANT_VALUES.keys() - set(LOADER_ARGUMENTS)
            self.imports.add("from autotune_amp import prepare")
            self.lines.append(f"model, optimizer = prepare({config}, model, optimizer)  # on their device")

    def add_config(self) -> None:
        """Add ``config = AmpConfig(...)``."""
        self.handled.update(self.setting.config.__struct_fields__)
        source = f"config = {_source(self.setting.config)}"
        self.lines.append(source)
        self._import_classes(source)

    def _import_classes(self, source: str) -> None:
        """Import the classes of the package that `source` names."""
        classes = [kind.__name__ for kind in (AmpConfig, FallbackPlan, LossScale) if f"{kind.__name__}(" in source]
        if classes:
            self.imports.add(f"from autotune_amp.core.config import {', '.join(classes)}")

    def add_loader(self) -> None:
        """Add ``loader = DataLoader(...)``."""
        self.handled |= {"batch_size", "num_workers", *LOADER_ARGUMENTS}
        self.imports.add("from torch.utils.data import DataLoader")
        self.lines += [LOADER_COMMENT, loader_line(self.setting.config)]


def measured_comments(config: AmpConfig) -> list[str]:
    """Return comments on the arguments of the training command and the TF32 flags that the config was measured with, as
    far as they are the user's own.
    """
    arguments = f"Measured with these arguments of the command: {config.labelled(['arguments'])}."
    return [*[arguments] * bool(config.arguments), *[UNCHANGED_FLAGS] * config.as_found]


def unexpressed_fields(config: AmpConfig, handled: Collection[str]) -> list[str]:
    """Return short texts for the config's fields that are not in `handled` and differ from their default."""
    fields = {name: value for name, value in _changed_fields(config) if name not in handled}
    plans = ", ".join(plan.precision for plan in config.plans)
    return [f"the fallback to {plans}" if n == "fallback" else f"{n}={_source_in_line(v)}" for n, v in fields.items()]


def _changed_fields(value: msgspec.Struct) -> list[tuple[str, object]]:
    """Return the names and values of the fields that have no default or differ from it."""
    fields = ((field, getattr(value, field.name)) for field in msgspec.structs.fields(value))
    return [(field.name, item) for field, item in fields if field.required or item not in (field.default, (), {})]


def keyword_sources(arguments: Iterable[tuple[str, object]], indent: str = "") -> list[str]:
    """Return keyword arguments as source, from names and values."""
    return [f"{name}={_source(value, indent)}" for name, value in arguments]


def call_source(head: str, arguments: Sequence[str], tail: str = ")", indent: str = "") -> str:
    """Return ``head``, the arguments and ``tail`` on one line if they fit, else each argument on its own line."""
    line = f"{head}{', '.join(arguments)}{tail}"
    if len(indent) + len(line) <= WIDTH and "\n" not in line:
        return line
    return "\n".join([head, *(f"{indent}    {argument}," for argument in arguments), f"{indent}{tail}"])


def comment_lines(comment: str) -> list[str]:
    """Return the comment as lines that begin with ``#``, for Python, YAML or the shell."""
    if comment.startswith(" "):
        return [f"# {comment}"]  # a line to copy
    wrapper = textwrap.TextWrapper(
        WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(one_line(comment))


def origin_comment(origin: str) -> list[str]:
    """Return the first lines of a text, by which `is_exported` recognizes it."""
    return comment_lines(f"{_MARK} {origin}")


def _source(value: object, indent: str = "") -> str:
    """Return a value as source, without fields at their default."""
    inner = f"{indent}    "
    if isinstance(value, msgspec.Struct):
        return call_source(f"{type(value).__name__}(", keyword_sources(_changed_fields(value), inner), indent=indent)
    if isinstance(value, tuple):
        return call_source("[", [_source(part, inner) for part in value], "]", indent)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_source(key)}: {_source(item)}' for key, item in value.items())}}}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _source_in_line(value: object) -> str:
    return " ".join(_source(value).split())


_ATTACH = "attach(model)  # the model of the state that has fp8 layers"
_ACCELERATOR = "autotune_amp.integrations.accelerate.AutotuneAccelerator"


def torch(setting: ExportSource) -> str:
    """Return a training loop in plain PyTorch, or with the controller if plain PyTorch cannot train as measured."""
    script, config = ExportedScript(setting, "torch", "PyTorch", "autotune_amp.PrecisionController"), setting.config
    if setting.is_loop:
        attached = [f"controller.{_ATTACH}"] * (config.precision == "fp8")
        return _controlled(script, [*attached, "for batch in loader:", "    train_step(state, batch, controller)"])
    if config.pinned_modules or (setting.loss == "weighted" and has_accumulation(config)):
        loss = _loss(script, "controller.window_size", "controller.window_share")
        return _controlled(script, controlled_loop(_windows(setting), loss))
    if missing := {name: value for name, value in config.active_variants.items() if name not in script.handled}:
        bare = AmpConfig.of(
            Setting(precision=config.precision, batch_size=config.batch_size), loss_scale=config.loss_scale
        )
        script.add_prepared(_source(msgspec.structs.replace(bare, **missing)))
    steps = config.accumulation_steps
    script.handled |= {"precision", "accumulation_steps", "loss_scale"}
    dtype = AUTOCAST_DTYPES.get(config.precision)
    if dtype is not None or (setting.device_type == "cuda" and not config.as_found):
        script.imports.add("import torch")
    if setting.device_type == "cuda" and not config.as_found:  # TF32 flags matter only there
        script.lines += strict_flag_lines(config.precision)
    script.add_loader()
    forward = [f"loss = {LOSS if steps == 1 else pass_loss(setting.loss, 'len(window)', '')}"]
    if dtype is not None:
        forward = _block(f'with torch.autocast("{setting.device_type}", dtype={dtype}):', forward)
    backward, step = "loss.backward()", ["optimizer.step()"]
    if (scale := config.loss_scale) is not None:
        arguments = [f'"{setting.device_type}"']
        if not setting.has_own_scaler:
            bounds = {"hysteresis": scale.hysteresis, "min_scale": scale.floor, "max_scale": scale.max_scale}
            bounds = {name: value for name, value in bounds.items() if (name, value) != ("hysteresis", 1)}
            script.missing = [f"{name}={value!r}" for name, value in bounds.items()]
            arguments += keyword_sources((name, getattr(scale, name)) for name in SCALER_ARGUMENTS)
        script.lines.append(call_source("scaler = torch.amp.GradScaler(", arguments))
        backward, step = "scaler.scale(loss).backward()", ["scaler.step(optimizer)", "scaler.update()"]
    step = [*step, "optimizer.zero_grad()"]
    if steps == 1:
        script.lines += _block("for batch in loader:", [*forward, backward, *step])
        return script.source()
    script.imports.add("from itertools import islice")
    passes = _block("for batch in window:", [*forward, backward])
    window = f"while window := list(islice(batches, {steps})):"
    script.lines += ["batches = iter(loader)", *_block(window, [*passes, *step])]
    return script.source()


def accelerate(setting: ExportSource) -> str:
    """Return a loop with `AutotuneAccelerator`: the loss under autocast, pinned modules and fallbacks as measured."""
    script = ExportedScript(setting, "accelerate")
    script.imports.add("from autotune_amp.integrations.accelerate import AutotuneAccelerator")
    script.add_config()
    arguments = ["cpu=True"] if setting.device_type == "cpu" else []
    script.lines.append(call_source("accelerator = AutotuneAccelerator(", ["config", *arguments]))
    if setting.config.active_variants:
        script.lines.append("model = model.to(accelerator.device)")
    script.add_prepared("config")
    script.add_loader()
    if setting.is_loop:
        script.lines.append("loader = accelerator.prepare(loader)")
        script.lines += [f"accelerator.controller.{_ATTACH}"] * (setting.config.precision == "fp8")
        script.lines += _block("for batch in loader:", ["train_step(state, batch, accelerator.controller)"])
        return script.source()
    script.lines.append("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")
    steps, share = "accelerator.gradient_accumulation_steps", "accelerator.controller.window_share"
    body = [f"loss = {_loss(script, steps, share, is_divided=True)}"]
    if setting.config.precision in AUTOCAST_DTYPES:
        body = _block("with accelerator.autocast():", body)
    body += ["accelerator.backward(loss)", "optimizer.step()", "optimizer.zero_grad()"]
    accumulated = _block("with accelerator.accumulate(model):", body)
    script.lines += _block(f"for batch in accelerator.windows({_windows(setting)}):", accumulated)
    return script.source()


def lightning(setting: ExportSource) -> str:
    """Return a Trainer with `AutotunePrecision`, and a DataLoader with the config's batch size and workers."""
    script = ExportedScript(setting, "lightning")
    script.imports.add("from autotune_amp.integrations.lightning import trainer_arguments")
    script.imports.add("from lightning.pytorch import Trainer")
    script.comments += setting.loss_division_comments("Lightning")
    script.add_config()
    script.add_loader()
    script.lines += [
        "# trainer_arguments(config, max_epochs=...) takes the Trainer's other arguments.",
        "trainer = Trainer(**trainer_arguments(config))",
        "# trainer.fit(module, loader)",
    ]
    return script.source()


def transformers(setting: ExportSource) -> str:
    """Return TrainingArguments and an `AutotuneTrainer`, which adds loss scale, fallbacks and pinned modules."""
    script = ExportedScript(setting, "transformers")
    script.imports.add("from autotune_amp.integrations.transformers import AutotuneTrainer")
    script.imports.add("from transformers import TrainingArguments")
    script.comments += setting.loss_division_comments("Where the loss is the script's own, Trainer")
    script.add_config()
    arguments = {"output_dir": "output", **training_arguments(setting.config)}
    if setting.device_type == "cpu":
        arguments["use_cpu"] = True
    script.lines.append(call_source("arguments = TrainingArguments(", keyword_sources(arguments.items())))
    trainer_arguments = ["model=model", "args=arguments", "train_dataset=dataset", "amp_config=config"]
    script.lines += [call_source("trainer = AutotuneTrainer(", trainer_arguments), "# trainer.train()"]
    return script.source()


def env(setting: ExportSource) -> str:
    """Return ``export`` lines for the shell that starts the training run, with a comment on the other settings."""
    script = ExportedScript(setting, "env", "The shell", "the script that another --to prints")
    script.comments[:] = measured_comments(setting.config)
    script.lines = export_lines(setting.config) or ["# The config sets no environment variables."]
    return script.source()


def deepspeed_notes(setting: ExportSource) -> list[str]:
    """Return sentences on the origin of DeepSpeed's JSON, and on settings that it cannot express."""
    config, notes = setting.config, [f"{setting.origin}."] if setting.origin else []
    if config.precision in AUTOCAST_DTYPES:
        name = config.autocast_precision
        storage = f"DeepSpeed's {name} keeps the weights in {name} with an fp32 copy"
        notes.append(f"{storage}; the search measured autocast over fp32 weights.")
    if config.precision == "tf32" and not config.as_found:
        notes.append('TF32 has no key: call torch.set_float32_matmul_precision("high") in the script.')
    if config.loss_scale is not None:
        measured = f"DeepSpeed rounds the measured {_source_in_line(config.loss_scale)}, and has no upper bound."
        notes.append(_OWN_SCALER if setting.has_own_scaler else measured)
    notes += measured_comments(config)
    handled = {"batch_size", "accumulation_steps", "loss_scale", "as_found", "arguments"}
    if config.precision != "fp8":
        handled.add("precision")
    if missing := unexpressed_fields(config, handled):
        notes.append(f"The JSON cannot express {'; '.join(missing)}: another --to can.")
    return [*notes, *setting.rank_comments("deepspeed"), *setting.loss_division_comments("DeepSpeed")]


_TEXTS: dict[str, Callable[[ExportSource], str]] = {
    text.__name__: text for text in (accelerate, lightning, torch, transformers, env)
}


def _controlled(script: ExportedScript, lines: Sequence[str]) -> str:
    """Return a script with a PrecisionController and these lines. The controller sets the TF32 flags."""
    script.imports.add("from autotune_amp import PrecisionController")
    script.add_config()
    script.add_loader()
    script.add_prepared("config")
    script.lines += [f'controller = PrecisionController(config, "{script.setting.device_type}")', *lines]
    return script.source()


def _block(head: str, body: Sequence[str]) -> list[str]:
    return [head, *(f"    {line}" for line in body)]


def _windows(setting: ExportSource) -> str:
    """Return the source of the arguments of `windows`."""
    return "loader, weigh=count" if setting.loss == "weighted" and has_accumulation(setting.config) else "loader"


def _loss(script: ExportedScript, steps: str, share: str, *, is_divided: bool = False) -> str:
    """Return the source of the expression for the loss to run backward from.

    `steps` is the source of the accumulation steps, `share` that of a batch's share of its window.
    `is_divided`: the framework divides the loss by the steps.
    """
    setting = script.setting
    if not has_accumulation(setting.config):
        return LOSS
    if setting.loss == "weighted":
        script.comments.append(f"Define count(batch) for a batch: {setting.share.strip('()')}.")
    if is_divided:
        return LOSS if setting.loss == "mean" else f"{pass_loss(setting.loss, steps, share)} * {steps}"
    return pass_loss(setting.loss, steps, share)
