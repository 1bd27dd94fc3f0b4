"""A recommendation in words: what to use, on what evidence, and the lines to copy. Plain text, for every renderer."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from autotune_amp.report.format import count, duration, number, one_line, rate, size, times
from autotune_amp.report.numerics import check_line, loss_scale_line, names
from autotune_amp.trial.spec import Candidate

if TYPE_CHECKING:
    from autotune_amp.config import AmpConfig, FallbackPlan
    from autotune_amp.numerics.results import Fidelity
    from autotune_amp.recommendation import CandidateRow, Recommendation

_AUTOCAST = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


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
    lines = [
        ("config", plan),
        ("speed", _speed(recommendation)),
        ("speed-up", _speedup(recommendation)),
        *_plain_environment(recommendation),
        ("memory", f"{size(evidence.peak_memory_bytes)} at the peak"),
        ("reason", one_line(recommendation.reason)),
    ]
    if config.loss_scale is not None:
        lines.append(("loss scale", loss_scale_line(config.loss_scale, evidence.loss_scale)))
    if config.pinned_modules:
        lines.append(("pinned", f"{names(config.pinned_modules)} in fp32"))
    lines += [("fidelity", check_line(found)) for found in _checks(recommendation)]
    for fallback in config.plans:
        speed, memory = fallback.samples_per_second, fallback.peak_memory_bytes
        measured = ([rate(speed)] if speed is not None else []) + ([size(memory)] if memory is not None else [])
        lines.append(("fallback", ", ".join([_name(fallback), *measured])))
    return lines + [("warning", one_line(warning)) for warning in recommendation.warnings]


def _checks(recommendation: Recommendation) -> list[Fidelity]:
    """The checks that were made, and that of the config's own precision where it was not."""
    own, made = recommendation.evidence.fidelity, list(recommendation.fidelity)
    return made if own is None or own in made else [own, *made]


def recommended_row(recommendation: Recommendation) -> CandidateRow | None:
    """The candidate that the config stands for, as found or strict; the other one where only that has a row."""
    config = recommendation.config
    wanted = (config.precision, config.batch_size, config.accumulation_steps, config.pinned_modules)
    rows = [
        row
        for row in recommendation.candidates
        if (row.precision, row.batch_size, row.accumulation_steps, row.pinned_modules) == wanted
        and row.step_seconds is not None
    ]
    is_as_found = recommendation.evidence.is_as_found
    return min(rows, key=lambda row: row.as_found != is_as_found, default=None)


def baseline_row(recommendation: Recommendation) -> CandidateRow | None:
    """The candidate that is what the user runs today: the one as found, where it differs from the strict one."""
    config = recommendation.evidence.baseline.config
    wanted = (config.precision, config.batch_size, config.accumulation_steps)
    rows = [
        row
        for row in recommendation.candidates
        if (row.precision, row.batch_size, row.accumulation_steps) == wanted and not row.pinned_modules
    ]
    return max(rows, key=lambda row: row.as_found, default=None)


def export_lines(recommendation: Recommendation) -> list[str]:
    """The shell line that sets the environment the config was measured in; empty where there is nothing to set."""
    environment = recommendation.config.environment
    if not environment:
        return []
    return ["export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())]


def python_lines(recommendation: Recommendation) -> list[str]:
    """Plain PyTorch that trains with the config."""
    config = recommendation.config
    device_type = recommendation.hardware.identity.type
    lines = []
    if recommendation.evidence.is_as_found:
        lines.append("# the TF32 flags and autocast stay as they are")
    elif device_type == "cuda":
        is_tf32 = config.precision == "tf32"
        lines.append(f'torch.set_float32_matmul_precision("{"high" if is_tf32 else "highest"}")')
        lines.append(f"torch.backends.cudnn.allow_tf32 = {is_tf32}")
    steps = config.accumulation_steps
    lines.append(
        f"loader = DataLoader(dataset, batch_size={config.batch_size})"
        + (f"  # {steps} batches to one optimizer step" if steps > 1 else "")
    )
    if config.loss_scale is not None:
        scale = config.loss_scale
        lines.append(
            f'scaler = torch.amp.GradScaler("{device_type}", init_scale={scale.init_scale:g}, '
            f"growth_interval={scale.growth_interval})"
        )
    if config.pinned_modules:
        lines.append("# autotune_amp.PrecisionController keeps modules in fp32; without it, wrap their forward in")
        lines.append(f'# torch.autocast("{device_type}", enabled=False): {names(config.pinned_modules)}')
    if config.precision in _AUTOCAST:
        lines.append(f'with torch.autocast("{device_type}", dtype={_AUTOCAST[config.precision]}):')
        lines.append("    loss = compute_loss(model, batch)")
    else:
        lines.append("loss = compute_loss(model, batch)  # no autocast")
    return lines


def _speed(recommendation: Recommendation) -> str:
    evidence = recommendation.evidence
    low, high = evidence.samples_per_second_interval
    text = f"{rate(evidence.samples_per_second)} (a new run: {number(low)} to {number(high)})"
    text += f", {duration(evidence.step_seconds)} a step"
    if evidence.data_share >= 0.01:
        text += f", {100 * evidence.data_share:.0f} % of it waiting for data"
    if not evidence.is_confirmed:
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
    return text


def _plain_environment(recommendation: Recommendation) -> list[tuple[str, str]]:
    plain = recommendation.evidence.plain_environment
    if plain is None or plain.samples_per_second is None:
        return []
    speedup = "" if plain.speedup is None else f" ({times(plain.speedup)})"
    return [("plain", f"{rate(plain.samples_per_second)}{speedup} without the environment variables below")]


def _name(plan: AmpConfig | FallbackPlan) -> str:
    return str(
        Candidate(precision=plan.precision, batch_size=plan.batch_size, accumulation_steps=plan.accumulation_steps)
    )
