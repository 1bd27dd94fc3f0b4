"""Charts of fidelity and of fp16's loss scale: rounding noise, gradients in fp16's range, the scale over time. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from plotly.graph_objects import Bar, Figure

from autotune_amp.core.outcome import Fidelity, Record
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.core.text import count, exact, one_line, percent
from autotune_amp.dimensions import numerics_of
from autotune_amp.numerics.grading import NOISY
from autotune_amp.report.charts import (
    PRECISION_STYLES,
    FigureOrReason,
    apply_layout,
    hover_label,
    line_trace,
    marker_trace,
)
from autotune_amp.search import loss_scales
from autotune_amp.search.loss_scales import DEFAULT_PAIR, MissingCalibration, Pair, Scales
from autotune_amp.search.options import DEFAULT_NUM_STEPS

_WHOLE, _MODEL = "whole gradient", "the model itself"
_MIN_DRAWN = 1e-6  # position of a ratio of 0 on a logarithmic axis
_MAX_NAME = 22  # characters of a module's name; its end is kept, since that is what distinguishes modules
_POWERS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>"}
# Powers of two. fp16 rounds numbers below 2^-25, half of its least number, to zero, and overflows from 2^16 on.
_FP16_FLUSHED, _FP16_END = -25, 16


def fidelity(checks: Sequence[Fidelity]) -> FigureOrReason:
    """Draw the ratio of rounding noise to batch noise, for the whole gradient and for each module."""
    measured = [check for check in checks if check.noise_ratio is not None]
    if not measured:
        why = "; ".join(check.reason.rstrip(".") for check in checks)
        return f"No chart of fidelity: {why or 'no precision below fp32 was checked'}."
    figure, rows = Figure(), [_WHOLE]
    for check in measured:
        style = PRECISION_STYLES[check.precision]
        pinned = f" with {len(check.pinned_modules)} pinned" if check.pinned_modules else ""
        whole = f"{check.precision} batch {check.batch_size}: {check.verdict}, noise ratio {check.noise_ratio:.2g}"
        points = [(_WHOLE, check.noise_ratio or 0.0, hover_label(whole))]
        for damage in check.modules:
            name, noise = damage.name or _MODEL, damage.noise_ratio
            of_norm = f"cosine {damage.cosine:.4f}, {damage.norm_ratio:.3f} of its norm"
            flushed = f"{percent(damage.flushed_share)} flushed to zero"
            points.append(
                (name, noise, hover_label(f"{check.precision}: {name}", f"noise ratio {noise:.2g}", of_norm, flushed))
            )
        finite_points = [mark for mark in points if math.isfinite(mark[1])]
        rows += dict.fromkeys(row for row, _, _ in finite_points if row not in rows)
        figure.add_trace(
            marker_trace(
                f"{check.precision}{pinned}: {check.verdict}",
                [max(_MIN_DRAWN, ratio) for _, ratio, _ in finite_points],
                [rows.index(row) for row, _, _ in finite_points],
                [hover for _, _, hover in finite_points],
                marker={"color": style.color, "size": 10, "symbol": style.symbol + "-open" * bool(pinned)},
            )
        )
    figure.add_trace(line_trace("whole: as a smaller batch from here", [NOISY] * 2, (-0.4, 0.4), dash="dash"))
    apply_layout(figure, 230 + 24 * len(rows))
    figure.update_xaxes(type="log", title_text="noise ratio", exponentformat="power")
    labels = list(map(module_label, rows))
    figure.update_yaxes(tickvals=list(range(len(rows))), ticktext=labels, range=[len(rows) - 0.4, -0.6])
    return figure


def module_label(name: str) -> str:
    """Return a module's name for an axis: escaped, and without its beginning if it is long."""
    name = one_line(name)
    return hover_label(name if len(name) <= _MAX_NAME else f"\N{HORIZONTAL ELLIPSIS}{name[1 - _MAX_NAME :]}")


class ChosenCalibration(NamedTuple):
    """Safe loss scales of the setting named `about`; `pair` is the chosen (init_scale, growth_interval)."""

    scales: Scales
    pair: Pair
    about: str

    @property
    def log2_scale(self) -> float:
        """Return the base-2 logarithm of the factor that the chosen scale applies to the gradient of one pass."""
        return math.log2(self.pair[0]) - self.scales.log2_divisor


def chosen_calibration(recommendation: Recommendation, records: Sequence[Record]) -> ChosenCalibration | str:
    """Return the calibration of the recommended config, else the last one, else a clause with the reason for none."""
    config, evidence = recommendation.config, recommendation.evidence.loss_scale
    calibrations = loss_scales.calibration_results(
        records, DEFAULT_NUM_STEPS if evidence is None else evidence.num_steps
    )
    config_key = numerics_of(config)
    for key in (*filter(config_key.__eq__, calibrations), *reversed(calibrations)):
        calibration = calibrations[key]
        if isinstance(calibration, Scales):
            scale = config.loss_scale if key == config_key else None
            parameters = calibration.best if scale is None else (scale.init_scale, scale.growth_interval)
            return ChosenCalibration(calibration, parameters, f"fp16 batch {key.batch_size}")
    for key, answer in calibrations.items():
        reason = answer.reason if isinstance(answer, MissingCalibration) else answer.refusal
        return f"fp16 batch {key.batch_size} has no loss scale: {reason}"
    reasons = [e.reason for e in recommendation.excluded if e.precision == "fp16" and e.batch_size is None]
    reason = reasons[0].rstrip(".") if reasons else "no fp16 setting was calibrated"
    return f"fp16 was not calibrated: {reason}"


def gradients(recommendation: Recommendation, calibration: ChosenCalibration | str) -> FigureOrReason:
    """Draw the histogram of the gradient as computed and at the chosen loss scale, with the limits of fp16."""
    checks = [check.gradient_histogram for check in recommendation.fidelity if check.gradient_histogram]
    if isinstance(calibration, ChosenCalibration):
        histogram = calibration.scales.calibration.gradient_histogram
        shifts = {"as computed": 0.0, f"at a loss scale of {exact(calibration.pair[0])}": calibration.log2_scale}
    elif checks:
        histogram, shifts = checks[-1], {"as computed": 0.0}
    else:
        return f"No gradient histogram: {calibration}."
    if not histogram:
        return "No gradient histogram: every gradient in the calibration was zero."
    total = sum(number for _, number in histogram)
    shares = [100 * number / total for _, number in histogram]
    figure = Figure()
    for name, shift in shifts.items():
        bars = Bar(
            x=[octave + shift + 0.5 for octave, _ in histogram],
            y=shares,
            width=1,
            name=name,
            opacity=0.8,
            hovertemplate=f"{name}: %{{y:.2g}} % of the entries, around 2<sup>%{{x}}</sup><extra></extra>",
            marker={"color": "var(--muted)" if name == "as computed" else PRECISION_STYLES["fp16"].color},
        )
        figure.add_trace(bars)
    for name, end, dash in (
        ("flushed to zero in fp16 below", _FP16_FLUSHED, "dot"),
        ("fp16 overflows above", _FP16_END, "dash"),
    ):
        figure.add_trace(line_trace(f"{name} 2<sup>{end}</sup>", [end, end], [0, max(shares)], dash=dash))
    xaxis = {"title_text": "magnitude of an entry of the gradient", **_POWERS}
    return apply_layout(figure, 340, barmode="overlay", bargap=0, xaxis=xaxis, yaxis={"title_text": "% of entries"})


def predicted_loss_scale(calibration: ChosenCalibration | str) -> FigureOrReason:
    """Draw the predicted loss scale over a training run, with skipped steps, for the chosen loss scale and for
    GradScaler's defaults."""
    if isinstance(calibration, str):
        return f"No forecast of the loss scale: {calibration}."
    figure, end = Figure(), calibration.scales.num_steps
    pairs = {"chosen": calibration.pair} | (
        {} if calibration.pair == DEFAULT_PAIR else {"GradScaler's defaults": DEFAULT_PAIR}
    )
    for name, pair in pairs.items():
        is_chosen = name == "chosen"
        scale_stretches = calibration.scales.scale_stretches(pair, is_bounded=is_chosen)
        skipped = [stretch for stretch in scale_stretches if stretch.skip is not None]
        color, dash = (PRECISION_STYLES["fp16"].color, "solid") if is_chosen else ("var(--muted)", "dash")
        x, y = (
            [stretch.first_step for stretch in scale_stretches],
            [_log2(stretch.scale) for stretch in scale_stretches],
        )
        scale = line_trace(
            f"{name}: {count(len(skipped), 'skip')}",
            [*x, end],
            [*y, y[-1]],
            color=color,
            dash=dash,
            width=2,
            shape="hv",
        )
        scale.update(legendgroup=name, hovertemplate="step %{x:,}: 2<sup>%{y}</sup><extra></extra>")
        skips = marker_trace(
            f"{name}: skipped",
            [stretch.skip for stretch in skipped],
            [_log2(stretch.scale) for stretch in skipped],
            [f"step {stretch.skip:,} skipped at {exact(stretch.scale)}" for stretch in skipped],
            legendgroup=name,
            showlegend=False,
            marker={"symbol": "x" if is_chosen else "x-open", "size": 8, "color": "var(--bad)"},
        )
        figure.add_traces([scale, skips])
    least = min(calibration.scales.finite_log2_scales)
    hover = f"2<sup>{least:.1f}</sup> was safe in every pass"
    figure.add_trace(
        line_trace("least safe scale measured", [0, end], [least] * 2, hover, color="var(--warn)", dash="dot")
    )
    xaxis = {"title_text": "optimizer step", "tickformat": ",d"}
    return apply_layout(figure, 380, xaxis=xaxis, yaxis={"title_text": "loss scale", **_POWERS})


def _log2(scale: float) -> float | None:
    """Return the base-2 logarithm, or None for a scale that backed off to 0."""
    return math.log2(scale) if scale > 0 else None
