"""The lines to copy: Python that trains with a recommendation, and its export to a framework. Plain text."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from autotune_amp.core import explain
from autotune_amp.core.errors import InvalidRequestError
from autotune_amp.core.explain import names
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import one_line, rate
from autotune_amp.integrations.export import TARGETS, Target, export, setting_of

if TYPE_CHECKING:
    from autotune_amp.core.config import AmpConfig
    from autotune_amp.core.outcome import Accumulation
    from autotune_amp.core.recommendation import Recommendation
    from autotune_amp.core.setting import Precision


def python_lines(recommendation: Recommendation, path: str | None = None) -> list[str]:
    """Python that trains with the config: plain PyTorch where that says all of it, else the controller of `path`.

    They leave `dataset`, `model`, `optimizer` and `compute_loss(model, batch)` to the script. `path` is that of the
    recommendation's file; None is where a search puts it unless told otherwise.
    """
    config = recommendation.config
    path = path or f"studies/{recommendation.search.study}/recommendation.json"
    device_type = recommendation.hardware.identity.type
    loader = [explain.LOADER_COMMENT, explain.loader_line(config)]
    loaded = f'autotune_amp.PrecisionController.load({json.dumps(path)}, "{device_type}")'
    if recommendation.workload is not None and recommendation.workload.is_loop:
        return [*loader, f"amp = {loaded}", "train_step(state, batch, amp)"]
    if config.precision != "fp16" and config.accumulation_steps == 1 and not config.pinned_modules:
        return [*_flag_lines(config, device_type), *loader, *_loss_lines(config.precision, device_type)]
    kept = f"  # keeps {names(config.pinned_modules)} in fp32" if config.pinned_modules else ""
    return [
        *loader,
        f"controller = {loaded}{kept}",
        *_controlled_loop(config, recommendation.evidence.accumulation),
    ]


def _flag_lines(config: AmpConfig, device_type: str) -> list[str]:
    if config.as_found:
        return ["# the TF32 flags and autocast stay as they are"]
    return explain.strict_flag_lines(config.precision) if device_type == "cuda" else []


def _loss_lines(precision: Precision, device_type: str) -> list[str]:
    loss = f"loss = {explain.LOSS}"
    dtype = explain.AUTOCAST_DTYPES.get(precision)
    if dtype is None:
        return [f"{loss}  # no autocast"]
    return [f'with torch.autocast("{device_type}", dtype={dtype}):', f"    {loss}"]


def _controlled_loop(config: AmpConfig, found: Accumulation | None) -> list[str]:
    """The losses of a window add up to that of the whole batch."""
    if not explain.accumulates(config):
        return explain.controlled_loop("loader", explain.LOSS)
    combination = "mean" if found is None or found.verdict not in ("sum", "weighted") else found.verdict
    loss = explain.pass_loss(combination, "controller.window_size", "controller.window_share")
    if found is None or combination != "weighted":
        return explain.controlled_loop("loader", loss)
    counted = found.weighted_by or "what the loss is a mean over"
    return [
        f"# count(batch) is yours: of a batch, {counted}",
        *explain.controlled_loop("loader, weigh=count", loss),
    ]


def export_command(recommendation: Recommendation, path: str | None = None) -> tuple[str, str]:
    """What the command is for, and the command; `path` as in `python_lines`."""
    targets = [target for target in TARGETS if _takes(target, recommendation)]
    file = Path(path or f"studies/{recommendation.search.study}")
    study = file.parent if file.name == "recommendation.json" else file
    command = f"autotune-amp export {shlex.quote(study.as_posix())} --to {'torch' if 'torch' in targets else 'env'}"
    return f"In the words of a framework, --to {', '.join(targets)}", command


def _takes(target: Target, recommendation: Recommendation) -> bool:
    try:
        export(setting_of(recommendation, ""), target)
    except InvalidRequestError:
        return False
    return True


def origin_line(path: Path, recommendation: Recommendation) -> str:
    """What an export came from: which study, what that recommends, and how sure it is."""
    config, evidence = recommendation.config, recommendation.evidence
    place = path.parent if path.name == "recommendation.json" and path.parent.name else path
    doubt = "" if evidence.is_confirmed else ", unconfirmed"
    return one_line(f"{place}: {Setting.of(config)}, measured at {rate(evidence.samples_per_second)}{doubt}")
