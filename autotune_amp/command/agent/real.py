"""Agent of the real training run: sets the recommended values and prints one line on what was set and where."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from . import where
from .imports import after_import
from .outside import deepspeed_engine
from .outside.hooks import SettingHooks
from .passes import NUM_FULLY_WATCHED, PassRecorder

_FIELD_NAMES = {"batch_size": "batch size", "accumulation_steps": "accumulation"}


def install(settings: dict[str, Any]) -> None:
    """Install the hooks that set values from outside; torch has just been imported.

    `settings` has ``outside``, the values to set; ``left_out``, if given, labels of values that only the script can
    set; and ``controller``: ``path`` of the recommendation from which the PrecisionController in GradScaler's place is
    made, and ``device``, its type.
    """
    report = _SettingReport(settings["outside"])
    for label in settings.get("left_out", ()):
        report.add_problem(f"left to the script: {label}")
    passes = PassRecorder(report)  # type: ignore[arg-type]
    setting_hooks = SettingHooks(
        report, passes, settings["outside"], functools.partial(_convert_to_controller, report, **settings["controller"])
    )
    passes.on_outermost.append(lambda _: passes.pop_record())  # nobody reads it here
    setting_hooks.install()
    deepspeed_engine.tell_skips(report.shield)
    if "precision" in setting_hooks.values:
        passes.watch_first_steps()

    def count_step(optimizer: Any, *_: Any) -> None:
        passes.count_step(optimizer)
        if passes.num_steps == NUM_FULLY_WATCHED:
            report.print_once()

    hooks = [register_optimizer_step_post_hook(count_step)]

    def exclude_hook_from_graphs(dynamo: Any) -> None:  # else a compiled `optimizer.step` would trace the hook
        hooks.pop().remove()
        hooks.append(register_optimizer_step_post_hook(dynamo.disable(count_step)))

    after_import("torch._dynamo", exclude_hook_from_graphs)
    atexit.register(report.print_once, at_exit=True)


class _SettingReport:
    """Report of the values that were set. It replaces the `Channel` of a trial and is printed to stderr."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.controller: Any = None  # the latest PrecisionController in a GradScaler's place
        self._settings = settings
        self._values_set: list[dict[str, Any]] = []
        self._problems: list[str] = []
        self._is_printed = False
        self._pid = os.getpid()

    def add(self, event: str, **fields: Any) -> None:
        """Keep a `set` event, and the problem in a `switch` event; ignore others."""
        if event == "set":
            self._values_set.append(fields)
        elif event == "switch" and fields["today"].get("n_gpu", 0) > 1:
            num_gpus = fields["today"]["n_gpu"]
            self.add_problem(
                f"the Trainer multiplies its batch size by the {num_gpus} GPUs that it sees: set "
                f"CUDA_VISIBLE_DEVICES=0, or start it with torchrun --nproc_per_node {num_gpus}"
            )

    def add_problem(self, text: str) -> None:
        """Add a problem to the report."""
        self._problems.append(text)

    def shield(self, action: Callable[..., Any]) -> Callable[..., Any]:
        """Return `action` wrapped so that it raises nothing into the user's program: its errors are printed."""

        @functools.wraps(action)
        def shielded(*args: Any, **kwargs: Any) -> Any:
            try:
                return action(*args, **kwargs)
            except Exception:
                traceback.print_exc()

        return shielded

    def print_once(self, *, at_exit: bool = False) -> None:
        """Print the report once, in the first rank; at exit only if a value was set."""
        is_due = os.getpid() == self._pid and where.rank()["rank"] == 0 and not self._is_printed
        if not is_due or (at_exit and not self._values_set):
            return
        self._is_printed = True
        parts = [*map(_description, self._values_set), *self._missing(), *self._problems]
        ending = " (the run ended without an optimizer step of torch)" if at_exit else ""
        text = "; ".join(parts) or "no value had to be set"
        sys.stderr.write(f"autotune-amp: {text}{ending}\n")

    def _missing(self) -> list[str]:
        names_set = {fields["name"] for fields in self._values_set}
        maker, missing = self._settings.get("maker"), []
        for name, reason in (
            (
                "batch_size",
                f"no DataLoader was created at {maker}" if maker else "no shuffling DataLoader was created",
            ),
            ("accumulation_steps", "no framework that accumulates was used"),
            (
                "precision",
                "no GradScaler was seen" if self._settings.get("precision") == "fp16" else "no module was seen",
            ),
        ):
            value = self._settings.get(name)
            is_default = name == "precision" and value in ("fp32", "tf32")  # nothing had to be changed for it
            if value is not None and name not in names_set and not is_default:
                missing.append(f"NOT set: {_FIELD_NAMES.get(name, name)} {value}, since {reason}")
        return missing


def _description(fields: dict[str, Any]) -> str:
    name, was = fields["name"], fields["was"]
    before = "" if was is None or was == fields["value"] else f" (was {was})"
    word = f"{_FIELD_NAMES[name]} " if name in _FIELD_NAMES else ""
    path, _, line = fields["line"].rpartition(":")
    at = f" at {os.path.relpath(path)}:{line}" if path else ""
    return f"{word}{fields['value']}{before} in {fields['what']}{at}"


def _convert_to_controller(report: _SettingReport, scaler: Any, *, path: str, device: str) -> Any:
    """Convert the script's GradScaler in place to a PrecisionController and return it; None if that fails, or if the
    latest one has not trained yet: the two then train together, and the controller guards the first.
    """
    if report.controller is not None and not report.controller.status().num_updates:
        report.add_problem("a second GradScaler stays beside the controller")
        return None
    original_class, attributes = type(scaler), dict(scaler.__dict__)
    try:
        import msgspec

        from autotune_amp import PrecisionController, Recommendation
        from autotune_amp.core.config import SCALER_ARGUMENTS, LossScale

        recommendation = Recommendation.load(path)
        config = recommendation.config
        if recommendation.command_template is not None:  # with flags and loss scale of the script, as in the trials
            loss_scale = config.loss_scale
            if loss_scale is not None and scaler.is_enabled():
                own = {name: attributes[f"_{name}"] for name in SCALER_ARGUMENTS}
                own["growth_interval"] = int(own["growth_interval"])
                loss_scale = LossScale(**own, max_scale=max(LossScale().max_scale, own["init_scale"]))
            config = msgspec.structs.replace(config, as_found=True, loss_scale=loss_scale)
        scaler.__dict__.clear()
        scaler.__class__ = PrecisionController
        PrecisionController.__init__(scaler, config, device)
    except Exception as error:
        scaler.__class__ = original_class
        scaler.__dict__.clear()
        scaler.__dict__.update(attributes)
        report.add_problem(f"GradScaler stays, since it cannot become a controller: {error}")
        return None
    report.controller = scaler
    return scaler
