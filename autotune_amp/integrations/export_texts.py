"""The exported text of each framework that is told in Python. Pure, and without importing the framework.

Each text leaves `dataset`, `model`, `optimizer` and `compute_loss(model, batch)` to the script it is pasted into, and
`count(batch)` where the batches of a window weigh unequally.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune_amp.core.config import AmpConfig, training_arguments
from autotune_amp.core.config_source import AUTOCAST_DTYPES, LOSS, accumulates, controlled_loop, pass_loss
from autotune_amp.integrations.accelerate_config import MIXED_PRECISION, accelerate_config, beyond_plain, to_yaml
from autotune_amp.integrations.export_script import KEPT_FLAGS, Script, Setting, call, keywords, scaler_arguments

_ACCELERATOR = "autotune_amp.integrations.accelerate.AutotuneAccelerator"
_ACCELERATE_LOSS = (
    "Accelerate hands the model's outputs to the loss in fp32; measured was the loss on them as they are: "
    f"{_ACCELERATOR} trains so, inside autocast()."
)
_TRAINER_LOSS = (
    "Trainer runs the model's forward alone under autocast and hands its outputs in fp32 to a loss outside of it "
    "(compute_loss_func, compute_loss); measured was the loss under autocast too: "
    "autotune_amp.integrations.transformers.AutotuneTrainer trains so."
)


def torch(setting: Setting) -> str:
    """A loop in plain PyTorch; with the controller where plain PyTorch cannot keep what was measured."""
    script, config = Script(setting), setting.config
    if setting.is_loop:
        return _steered(script, ["for batch in loader:", "    train_step(state, batch, controller)"])
    if config.pinned_modules:
        steps_now = _steps_of_rung(config, "controller.window_size")
        loss = _loss(script, steps_now, "controller.window_share")
        return _steered(script, controlled_loop(_passes(setting, steps_now), loss))
    steps = config.accumulation_steps
    script.add_unheld("PyTorch", "autotune_amp.PrecisionController")
    script.add_flags()
    script.add_loader()
    loss = _loss(script, "1" if steps == 1 else "len(window)", "counted / sum(counts)")
    forward = [f"loss = {loss}"]
    if (dtype := AUTOCAST_DTYPES.get(config.precision)) is not None:
        script.needs("import torch")
        forward = [f'with torch.autocast("{setting.device_type}", dtype={dtype}):', f"    loss = {loss}"]
    backward, step = "loss.backward()", ["optimizer.step()"]
    if config.loss_scale is not None:
        arguments = [f'"{setting.device_type}"', *scaler_arguments(config.loss_scale)]
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


def accelerate(setting: Setting) -> str:
    """A loop with a plain Accelerator, or with ours where the plain one cannot train what was measured."""
    script, config = Script(setting), setting.config
    arguments = ["cpu=True"] if setting.device_type == "cpu" else []
    if _beyond_plain(setting):
        script.needs("from autotune_amp.integrations.accelerate import AutotuneAccelerator")
        script.add_config()
        script.lines.append(call("accelerator = AutotuneAccelerator(", ["config", *arguments]))
        steps = _steps_of_rung(config, "accelerator.gradient_accumulation_steps")
        passes = f"accelerator.windows({_passes(setting, steps)})"
    else:
        script.needs("from accelerate import Accelerator")
        _add_unheld_by_accelerate(script)
        script.add_flags()
        passes, steps = "loader", str(config.accumulation_steps)
        arguments += [f'mixed_precision="{MIXED_PRECISION[config.precision]}"', f"gradient_accumulation_steps={steps}"]
        if config.loss_scale is not None:
            script.needs("from accelerate.utils import GradScalerKwargs")
            script.lines.append(call("scaler = GradScalerKwargs(", scaler_arguments(config.loss_scale)))
            arguments.append("kwargs_handlers=[scaler]")
        script.lines.append(call("accelerator = Accelerator(", arguments))
    script.add_loader()
    if setting.is_loop:
        script.lines.append("loader = accelerator.prepare(loader)")
        return _looped(script, "for batch in loader:", ["train_step(state, batch, accelerator.controller)"])
    script.lines.append("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")
    loss = _loss(script, steps, "accelerator.controller.window_share", is_divided=True)
    body = [f"loss = {loss}"]
    if config.precision in AUTOCAST_DTYPES:
        body = ["with accelerator.autocast():", *_indented(body)]
    body += ["accelerator.backward(loss)", "optimizer.step()", "optimizer.zero_grad()"]
    return _looped(script, f"for batch in {passes}:", ["with accelerator.accumulate(model):", *_indented(body)])


def accelerate_file(setting: Setting) -> str:
    """The file that ``accelerate launch --config_file`` reads, with comments on what belongs to the script."""
    script, needs = Script(setting), needs_of_launched(setting)
    script.comments[:0] = [
        *needs,
        "accelerate launch --config_file THIS_FILE SCRIPT.py",
        "Batch size, accumulation, loss scale and TF32 flags are the script's: `autotune-amp export --to accelerate`.",
    ]
    if not needs:
        _add_unheld_by_accelerate(script)
    script.lines.append(to_yaml(accelerate_config(setting.config, setting.device_type)).rstrip())
    return script.source()


def needs_of_launched(setting: Setting) -> list[str]:
    """What a script has to use under that file, in a sentence or two; nothing where a plain Accelerator does."""
    beyond = _beyond_plain(setting)
    if not beyond:
        return []
    needs = f"The script has to make its accelerator with {_ACCELERATOR}, which sets the precision itself"
    is_off = accelerate_config(setting.config, setting.device_type)["mixed_precision"] == "no"
    plain = " With a plain Accelerator this file trains in fp32." if is_off else ""
    return [f"{needs}: {'; '.join(beyond)}.{plain}"]


def lightning(setting: Setting) -> str:
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


def transformers(setting: Setting) -> str:
    """TrainingArguments and a Trainer: ours for fp16, whose loss scale the plain one cannot hold, and for pins."""
    script, config = Script(setting), setting.config
    arguments = {"output_dir": "output", **training_arguments(config)}
    if setting.device_type == "cpu":
        arguments["use_cpu"] = True
    if config.as_found:
        script.comments.append(KEPT_FLAGS)
    script.comments += setting.divided_by("Where the loss is the script's own, Trainer")
    _add_names_of_pins(script, "`model`")
    given = ["model=model", "args=arguments", "train_dataset=dataset"]
    if config.precision == "fp16" or config.pinned_modules:
        trainer, given = "AutotuneTrainer", [*given, "amp_config=config"]
        script.needs("from autotune_amp.integrations.transformers import AutotuneTrainer")
        script.needs("from transformers import TrainingArguments")
        script.add_config()
    else:
        trainer = "Trainer"
        script.needs("from transformers import Trainer, TrainingArguments")
        script.add_unheld("Trainer", "autotune_amp.integrations.transformers.AutotuneTrainer")
        if config.precision in AUTOCAST_DTYPES:
            script.comments.append(_TRAINER_LOSS)
    script.lines.append(call("arguments = TrainingArguments(", keywords(arguments)))
    script.lines += [call(f"trainer = {trainer}(", given), "# trainer.train()"]
    return script.source()


def _beyond_plain(setting: Setting) -> list[str]:
    """What of the training a plain Accelerator cannot do, a clause each."""
    found = beyond_plain(setting.config, setting.device_type)
    if setting.is_loop:
        found.append("train_step takes its controller for amp")
    if setting.loss == "weighted" and setting.config.accumulation_steps > 1:  # no other loop sees a whole window
        found.append("Accelerate itself knows nothing of the batches that a window is yet to have, nor their weights")
    return found


def _add_unheld_by_accelerate(script: Script) -> None:
    """Say what a plain Accelerator does not hold, or does otherwise than measured."""
    script.add_unheld("Accelerate", _ACCELERATOR)
    if script.setting.config.precision in AUTOCAST_DTYPES:
        script.comments.append(_ACCELERATE_LOSS)


def _add_names_of_pins(script: Script, holder: str) -> None:
    """Say what to change where the framework trains a module around the one that was searched."""
    if pins := script.setting.config.pinned_modules:
        script.comments.append(
            f"pinned_modules has the names of the model that was searched. Where {holder} holds that model as an "
            f'attribute, self.net for one, put it before them: "net.{pins[0]}".'
        )


def _steered(script: Script, lines: Sequence[str]) -> str:
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


def _passes(setting: Setting, steps: str) -> str:
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
