"""Of a recommendation the rows that stand out of its table, and the lines of Python to copy. Plain text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from autotune_amp.core import config_source
from autotune_amp.core.explain import names
from autotune_amp.core.text import outcome_name

if TYPE_CHECKING:
    from autotune_amp.core.config import AmpConfig, Precision
    from autotune_amp.core.fidelity import Accumulation
    from autotune_amp.core.recommendation import CandidateRow, Recommendation


def recommended_row(recommendation: Recommendation) -> CandidateRow | None:
    """The candidate that the config stands for, as found or strict; the other one where only that has a row."""
    config = recommendation.config
    wanted = (config.precision, config.batch_size, config.accumulation_steps, config.pinned_modules, config.num_workers)
    rows = [
        row
        for row in recommendation.candidates
        if (row.precision, row.batch_size, row.accumulation_steps, row.pinned_modules, row.num_workers) == wanted
        and row.step_seconds is not None
    ]
    wanted_state = config.as_found, bool(config.environment)
    return min(
        rows,
        key=lambda row: (row.as_found != wanted_state[0], row.has_environment != wanted_state[1]),
        default=None,
    )


def baseline_row(recommendation: Recommendation) -> CandidateRow | None:
    """The candidate that is what the user runs today: the one as found, where it differs from the strict one."""
    config = recommendation.evidence.baseline.config
    wanted = (config.precision, config.batch_size, config.accumulation_steps)
    rows = [
        row
        for row in recommendation.candidates
        if (row.precision, row.batch_size, row.accumulation_steps) == wanted
        and not row.pinned_modules
        and row.num_workers is None
        and not row.has_environment
    ]
    return max(rows, key=lambda row: row.as_found, default=None)


def outcome_words(row: CandidateRow) -> str:
    """What became of a candidate: ``confirmed, with the variables``."""
    return outcome_name(row.status) + ", with the variables" * row.has_environment


def python_lines(recommendation: Recommendation, path: str | None = None) -> list[str]:
    """Python that trains with the config: plain PyTorch where that says all of it, else the controller of `path`.

    They leave `dataset`, `model`, `optimizer` and `compute_loss(model, batch)` to the script. `path` is that of the
    recommendation's file; None is where a search puts it unless told otherwise.
    """
    config = recommendation.config
    path = path or f"studies/{recommendation.search.study}/recommendation.json"
    device_type = recommendation.hardware.identity.type
    loader = [config_source.LOADER_COMMENT, config_source.loader_line(config)]
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
    return config_source.strict_flag_lines(config.precision) if device_type == "cuda" else []


def _loss_lines(precision: Precision, device_type: str) -> list[str]:
    loss = f"loss = {config_source.LOSS}"
    dtype = config_source.AUTOCAST_DTYPES.get(precision)
    if dtype is None:
        return [f"{loss}  # no autocast"]
    return [f'with torch.autocast("{device_type}", dtype={dtype}):', f"    {loss}"]


def _controlled_loop(config: AmpConfig, found: Accumulation | None) -> list[str]:
    """The losses of a window add up to that of the whole batch."""
    if not config_source.accumulates(config):
        return config_source.controlled_loop("loader", config_source.LOSS)
    combination = "mean" if found is None or found.verdict not in ("sum", "weighted") else found.verdict
    loss = config_source.pass_loss(combination, "controller.window_size", "controller.window_share")
    if found is None or combination != "weighted":
        return config_source.controlled_loop("loader", loss)
    counted = found.weighted_by or "what the loss is a mean over"
    return [
        f"# count(batch) is yours: of a batch, {counted}",
        *config_source.controlled_loop("loader, weigh=count", loss),
    ]
