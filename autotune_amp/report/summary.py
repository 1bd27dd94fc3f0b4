"""A recommendation in words: what to use, on what evidence, and the lines to copy. Plain text, for every renderer."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from autotune_amp.core.recommendation import MIN_PROCESSES
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration, number, one_line, rate, size, times
from autotune_amp.report.conditions import load_line, loader_line, memory_line, pauses_line
from autotune_amp.report.job import job_lines
from autotune_amp.report.numerics import accumulation_line, check_line, loss_scale_line, names

if TYPE_CHECKING:
    from autotune_amp.core.config import AmpConfig, FallbackPlan
    from autotune_amp.core.fidelity import Fidelity
    from autotune_amp.core.recommendation import Recommendation


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


def export_lines(recommendation: Recommendation) -> list[str]:
    """The shell line that sets the environment the config was measured in; empty where there is nothing to set."""
    environment = recommendation.config.environment
    if not environment:
        return []
    return ["export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())]


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
