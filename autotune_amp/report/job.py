"""What the recommendation was chosen for, what it draws, and its training in hours and money. Plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_amp.core.recommendation import Job, Recommendation


def job_lines(recommendation: Recommendation) -> list[tuple[str, str]]:
    """Label and text; empty for a search for speed of which no more is known."""
    lines: list[tuple[str, str]] = []
    if recommendation.objective != "speed":
        lines.append(("objective", recommendation.objective))
    joules = recommendation.evidence.joules_per_sample
    if joules is not None:
        lines.append(("energy", f"{joules:.3g} J a sample"))
    if recommendation.job is not None:
        lines.append(("job", job_line(recommendation.job)))
    return lines


def job_line(job: Job) -> str:
    """``0.84 h (0.71 to 1.13) for 10,000 steps, 2.52 (2.13 to 3.39) at 3 an hour; 1.7 h as it runs today``."""
    low, high = job.hours_interval
    steps = "1 step" if job.num_steps == 1 else f"{job.num_steps:,} steps"
    text = f"{_figure(job.hours)} h ({_figure(low)} to {_figure(high)}) for {steps}"
    if job.price is not None and job.price_interval is not None:
        low, high = job.price_interval
        text += f", {job.price:,.2f} ({low:,.2f} to {high:,.2f}) at {job.price_per_hour:g} an hour"
    return text if job.baseline_hours is None else f"{text}; {_figure(job.baseline_hours)} h as it runs today"


def _figure(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 else f"{hours:.2g}" if hours < 1 else f"{hours:.3g}"
