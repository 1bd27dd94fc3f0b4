"""A recommendation in words: what to use, on what evidence, and the lines to copy. Plain text, for every renderer."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from autotune_amp.core import config_source
from autotune_amp.core.recommendation import MIN_PROCESSES
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration, number, one_line, outcome_name, rate, size, times
from autotune_amp.report.conditions import load_line, loader_line, memory_line, pauses_line
from autotune_amp.report.job import job_lines
from autotune_amp.report.numerics import accumulation_line, check_line, loss_scale_line, names

if TYPE_CHECKING:
    from autotune_amp.core.config import AmpConfig, FallbackPlan, Precision
    from autotune_amp.core.fidelity import Accumulation, Fidelity
    from autotune_amp.core.recommendation import CandidateRow, Recommendation


def explain(recommendation: Recommendation) -> str:
    """The recommended config, the evidence, the reason and the warnings as a few lines of plain text."""
    lines = [f"{label}: {text}" for label, text in facts(recommendation)]
    lines += [f"before Python starts: {line}" for line in export_lines(recommendation)]
    return "\n".join(lines)


def facts(recommendation: Recommendation) -> list[tuple[str, str]]:
    """Label and text of everything to know about the recommended config."""
    config, evidence = recommendation.config, recommendation.evidence
    plan = f"{config.precision}, batch size {config.batch_size}"
    if config.accumulation_steps > 1:
        plan += (
            f", {config.accumulation_steps} accumulation steps "
            f"(effective batch size {config.batch_size * config.accumulation_steps})"
        )
    if config.num_workers is not None:
        plan += f", {count(config.num_workers, 'loader worker')}"
    lines = [
        ("config", plan),
        ("speed", _speed(recommendation)),
        ("speed-up", _speedup(recommendation)),
        *_plain_environment(recommendation),
        ("memory", memory_line(evidence, recommendation.hardware.identity.type)),
        *job_lines(recommendation),
        ("reason", one_line(recommendation.reason)),
    ]
    if evidence.loader is not None:
        lines.append(("loader", loader_line(evidence.loader)))
    if (load := load_line(evidence.load)) is not None:
        lines.append(("machine", load))
    if (pauses := pauses_line(evidence)) is not None:
        lines.append(("pauses", pauses))
    if config.loss_scale is not None:
        lines.append(("loss scale", loss_scale_line(config.loss_scale, evidence.loss_scale)))
    if config.accumulation_steps > 1 and evidence.accumulation is not None:
        lines.append(("accumulation", accumulation_line(evidence.accumulation)))
    if config.pinned_modules:
        lines.append(("pinned", f"{names(config.pinned_modules)} in fp32"))
    lines += [("fidelity", check_line(found)) for found in checks(recommendation)]
    for fallback in config.plans:
        speed, memory = fallback.samples_per_second, fallback.peak_memory_bytes
        measured = ([rate(speed)] if speed is not None else []) + ([size(memory)] if memory is not None else [])
        lines.append(("fallback", ", ".join([_name(fallback), *measured])))
    return lines + [("warning", one_line(warning)) for warning in recommendation.warnings]


def checks(recommendation: Recommendation) -> list[Fidelity]:
    """The checks that were made, and that of the config's own precision where it was not."""
    own, made = recommendation.evidence.fidelity, list(recommendation.fidelity)
    return made if own is None or own in made else [own, *made]


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


def export_lines(recommendation: Recommendation) -> list[str]:
    """The shell line that sets the environment the config was measured in; empty where there is nothing to set."""
    environment = recommendation.config.environment
    if not environment:
        return []
    return ["export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())]


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


def _speed(recommendation: Recommendation) -> str:
    evidence = recommendation.evidence
    low, high = evidence.samples_per_second_interval
    text = f"{rate(evidence.samples_per_second)} (a new run: {number(low)} to {number(high)})"
    text += f", {duration(evidence.step_seconds)} a step"
    shares = [(evidence.data_share, "waiting for data"), (evidence.update_share or 0.0, "in the optimizer")]
    of_it = " of it"
    for share, where in shares:
        if share >= 0.01:
            text += f", {100 * share:.0f} %{of_it} {where}"
            of_it = ""
    if evidence.is_build_shared and evidence.num_processes > 1:
        text += "; its processes shared one built model"
    if evidence.are_processes_shared:
        text += f"; from {count(evidence.num_processes, 'fresh process', 'fresh processes')} that ran all in turn"
    if evidence.num_processes < MIN_PROCESSES:
        text += f"; unconfirmed, measured in {count(evidence.num_processes, 'process', 'processes')} only"
    return text


def _speedup(recommendation: Recommendation) -> str:
    evidence, baseline = recommendation.evidence, recommendation.evidence.baseline
    if evidence.speedup is None:
        reason = one_line(baseline.reason or "it was not measured")
        return f"unknown; the baseline is {_name(baseline.config)}: {reason}"
    text = times(evidence.speedup)
    if evidence.speedup_interval is not None:
        low, high = evidence.speedup_interval
        text += f" ({times(low)} to {times(high)})"
    text += f" over the baseline, {_name(baseline.config)}"
    if baseline.samples_per_second is not None:
        text += f" at {rate(baseline.samples_per_second)}"
    if not evidence.is_confirmed and evidence.num_processes >= MIN_PROCESSES:
        text += f"; unconfirmed, fewer than {MIN_PROCESSES} processes measured the baseline"
    return text


def _plain_environment(recommendation: Recommendation) -> list[tuple[str, str]]:
    plain = recommendation.evidence.plain_environment
    if plain is None or plain.samples_per_second is None:
        return []
    speedup = "" if plain.speedup is None else f" ({times(plain.speedup)})"
    return [("plain", f"{rate(plain.samples_per_second)}{speedup} without the environment variables")]


def _name(plan: AmpConfig | FallbackPlan) -> str:
    return str(
        Setting(precision=plan.precision, batch_size=plan.batch_size, accumulation_steps=plan.accumulation_steps)
    )
