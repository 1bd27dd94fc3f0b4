"""Charts of fidelity and of fp16's loss scale: rounding noise, gradients against formats, the scale's course. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from plotly.graph_objects import Bar, Figure
from plotly.subplots import make_subplots

from autotune_amp.core.text import count, exact
from autotune_amp.numerics.grading import FAITHFUL_NOISE, MAX_PARAMETER_NOISE, UNFAITHFUL_NOISE
from autotune_amp.report.page.marks import LOOKS, Drawn, framed, hatched, label, marks, rule, said
from autotune_amp.search import loss_scales
from autotune_amp.search.loss_scales import DEFAULT_PAIR, Pair, Scales, Uncalibrated
from autotune_amp.search.options import DEFAULT_NUM_STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.dimensions import Precision
    from autotune_amp.core.outcome import Fidelity, GradientDamage, Record
    from autotune_amp.core.recommendation import Recommendation


_WHOLE, _OUTSIDE = "whole gradient", "outside of modules"
_LEAST_DRAWN = 1e-6  # no noise at all, on an axis of ratios


def fidelity(checks: Sequence[Fidelity]) -> Drawn:
    """Rounding noise over batch noise: of the whole gradient, of each module, and of the parameters where it is
    largest, in the rows of their modules."""
    made = [check for check in checks if check.noise_ratio is not None]
    if not made:
        why = "; ".join(check.reason.rstrip(".") for check in checks)
        return f"No chart of fidelity: {why or 'no precision below fp32 was worth a check'}."
    figure, rows = Figure(), [_WHOLE]
    for check in made:
        look = LOOKS[check.precision]
        pinned = f" with {len(check.pinned_modules)} pinned" if check.pinned_modules else ""
        # The row of each mark, "" that of parameters outside of every module; its noise ratio; what it says.
        modules = [(_WHOLE, check.noise_ratio or 0.0, _whole_hover(check))]
        modules += [(damage.name, damage.noise_ratio, _hover(check, damage)) for damage in check.modules]
        parameters = [
            (_row(damage.name, check.modules), damage.noise_ratio, _hover(check, damage))
            for damage in check.worst_parameters
        ]
        for found, size, said_of in ((modules, 10, check.verdict), (parameters, 5, "its noisiest parameters")):
            drawn = [mark for mark in found if math.isfinite(mark[1])]
            rows += dict.fromkeys(row for row, _, _ in drawn if row not in rows)
            figure.add_trace(
                marks(
                    f"{check.precision}{pinned}: {said_of}",
                    [max(_LEAST_DRAWN, ratio) for _, ratio, _ in drawn],
                    [rows.index(row) for row, _, _ in drawn],
                    [hover for _, _, hover in drawn],
                    marker={"color": look.color, "size": size, "symbol": look.symbol + "-open" * bool(pinned)},
                )
            )
    ends = (0.6, len(rows) - 0.6)
    figure.add_trace(rule("whole: doubtful from here", [FAITHFUL_NOISE] * 2, (-0.4, 0.4), dash="dash"))
    figure.add_trace(rule("whole: unfaithful from here", [UNFAITHFUL_NOISE] * 2, (-0.4, 0.4)))
    figure.add_trace(rule("a parameter: doubtful from here", [MAX_PARAMETER_NOISE] * 2, ends, dash="dot"))
    framed(figure, 230 + 24 * len(rows))
    powers = [math.log10(x) for trace in figure.data for x in trace.x]
    margin = 0.03 * (max(powers) - min(powers))
    span = [min(powers) - margin, max(powers) + margin]
    figure.update_xaxes(type="log", title_text="noise ratio", range=span, exponentformat="power")
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[label(row or _OUTSIDE, 22) for row in rows],
        range=[len(rows) - 0.4, -0.6],
    )
    return figure


def _row(parameter: str, modules: Sequence[GradientDamage]) -> str:
    """The innermost of the modules that holds the parameter."""
    holding = [module.name for module in modules if not module.name or parameter.startswith(f"{module.name}.")]
    return max(holding, key=len, default=parameter)


def _hover(check: Fidelity, damage: GradientDamage) -> str:
    return said(
        f"{check.precision}: {damage.name or _OUTSIDE}",
        f"noise ratio {damage.noise_ratio:.2g}",
        f"cosine {damage.cosine:.4f}, {damage.norm_ratio:.3f} of its norm",
        f"{100 * damage.flushed_share:.2g} % flushed to zero",
    )


def _whole_hover(check: Fidelity) -> str:
    lines = [f"{check.precision} batch {check.batch_size}: {check.verdict}", f"noise ratio {check.noise_ratio:.2g}"]
    if check.gradient_cosine is not None:
        lines.append(f"cosine {check.gradient_cosine:.5f}")
    if check.training_gap is not None:
        lines.append(f"training gap {check.training_gap:.2g} over {check.num_paired_steps} steps")
    return said(*lines)


# log2 of the ends of the ranges: IEEE 754 binary16, which rounds to 0 below half of its least number, and bfloat16,
# which has float32's exponent.
_FP16_FLUSHED, _FP16_SUBNORMAL, _FP16_NORMAL, _FP16_END = -25, -24, -14, 16
_BF16_NORMAL, _BF16_END = -126, 128
_POWERS = {"tickprefix": "2<sup>", "ticksuffix": "</sup>"}


class Calibrated(NamedTuple):
    """A calibration that speaks, the pair of init_scale and growth_interval chosen on it, and the candidate's name."""

    scales: Scales
    pair: Pair
    about: str

    @property
    def log2_scale(self) -> float:
        """What the chosen scale multiplies the gradient of one pass by, as a power of 2."""
        return math.log2(self.pair[0]) - self.scales.log2_divisor


def calibrated(recommendation: Recommendation, records: Sequence[Record]) -> Calibrated | str:
    """The calibration behind the config, or else the last one; or the clause that says why there is none."""
    config, evidence = recommendation.config, recommendation.evidence.loss_scale
    known = loss_scales.calibrated(records, DEFAULT_NUM_STEPS if evidence is None else evidence.num_steps)
    own = config.numerics
    for key in (*filter(own.__eq__, known), *reversed(known)):
        found = known[key]
        if isinstance(found, Scales):
            scale = config.loss_scale if key == own else None
            pair = found.best if scale is None else (scale.init_scale, scale.growth_interval)
            return Calibrated(found, pair, f"fp16 batch {key.batch_size}")
    for key, answer in known.items():
        why = answer.reason if isinstance(answer, Uncalibrated) else answer.refusal
        return f"fp16 batch {key.batch_size} has no loss scale: {why}"
    return f"fp16 was not calibrated, because {_why_not(recommendation)}"


def gradients(recommendation: Recommendation, found: Calibrated | str) -> Drawn:
    """The histogram of the gradient as computed, and at the chosen loss scale, over the range of each format."""
    checks = [check.gradient_histogram for check in recommendation.fidelity if check.gradient_histogram]
    if isinstance(found, Calibrated):
        histogram = found.scales.calibration.gradient_histogram
        shifts = {"as computed": 0.0, f"at a loss scale of {exact(found.pair[0])}": found.log2_scale}
    elif checks:
        histogram, shifts = checks[-1], {"as computed": 0.0}
    else:
        return f"No gradient histogram: {found}."
    if not histogram:
        return "No gradient histogram: every gradient in the calibration was zero."
    ends = [octave + shift for octave in (histogram[0][0], histogram[-1][0] + 1) for shift in shifts.values()]
    low, high = min(*ends, _FP16_FLUSHED) - 2, max(*ends, _FP16_END) + 2
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.76, 0.24])
    highest = 0.0
    for name, shift in shifts.items():
        bars = _histogram(name, histogram, shift, is_scaled=name != "as computed")
        highest = max(highest, *bars.y)
        figure.add_trace(bars, row=1, col=1)
    for name, end in (("flushed to zero in fp16 below", _FP16_FLUSHED), ("fp16 overflows above", _FP16_END)):
        dash = "dot" if end < 0 else "dash"
        figure.add_trace(rule(f"{name} 2<sup>{end}</sup>", [end, end], [0, highest], dash=dash), row=1, col=1)
    for bar in _ranges(low, high):
        figure.add_trace(bar, row=2, col=1)
    framed(figure, 420, barmode="overlay", bargap=0)
    figure.update_yaxes(title_text="% of entries", row=1, col=1)
    figure.update_yaxes(categoryorder="array", categoryarray=["bf16", "fp16"], row=2, col=1)
    figure.update_xaxes(range=[low, high], row=1, col=1)
    figure.update_xaxes(range=[low, high], title_text="magnitude of an entry of the gradient", **_POWERS, row=2, col=1)
    return figure


def foretold(found: Calibrated | str) -> Drawn:
    """The loss scale over the horizon, with its skips: as chosen, and with GradScaler's defaults."""
    if isinstance(found, str):
        return f"No forecast of the loss scale: {found}."
    figure, end = Figure(), found.scales.num_steps
    pairs = {"chosen": found.pair} | ({} if found.pair == DEFAULT_PAIR else {"GradScaler's defaults": DEFAULT_PAIR})
    for name, pair in pairs.items():
        is_chosen = name == "chosen"
        course = found.scales.course(pair, is_bounded=is_chosen)
        skipped = [stretch for stretch in course if stretch.skip is not None]
        color, dash = (LOOKS["fp16"].color, "solid") if is_chosen else ("var(--muted)", "dash")
        x, y = [stretch.first_step for stretch in course], [_log2(stretch.scale) for stretch in course]
        scale = rule(
            f"{name}: {count(len(skipped), 'skip')}",
            [*x, end],
            [*y, y[-1]],
            color=color,
            dash=dash,
            width=2,
            shape="hv",
        )
        scale.update(legendgroup=name, hovertemplate="step %{x:,}: 2<sup>%{y}</sup><extra></extra>")
        skips = marks(
            f"{name}: skipped",
            [stretch.skip for stretch in skipped],
            [_log2(stretch.scale) for stretch in skipped],
            [f"step {stretch.skip:,} skipped at {exact(stretch.scale)}" for stretch in skipped],
            legendgroup=name,
            showlegend=False,
            marker={"symbol": "x" if is_chosen else "x-open", "size": 8, "color": "var(--bad)"},
        )
        figure.add_traces([scale, skips])
    least = min(found.scales.finite_log2_scales)
    hover = f"2<sup>{least:.1f}</sup> was safe in every pass"
    figure.add_trace(rule("least safe scale measured", [0, end], [least] * 2, hover, color="var(--warn)", dash="dot"))
    xaxis = {"title_text": "optimizer step", "tickformat": ",d"}
    return framed(figure, 380, xaxis=xaxis, yaxis={"title_text": "loss scale", **_POWERS})


def _histogram(name: str, histogram: Sequence[tuple[int, int]], shift: float, *, is_scaled: bool) -> Bar:
    total = sum(number for _, number in histogram)
    color = LOOKS["fp16"].color if is_scaled else "var(--muted)"
    return Bar(
        x=[octave + shift + 0.5 for octave, _ in histogram],
        y=[100 * number / total for _, number in histogram],
        width=1,
        name=name,
        opacity=0.8,
        hovertext=[
            said(f"{name}: {100 * number / total:.2g} % of the entries, from 2^{octave + shift:g} to twice that")
            for octave, number in histogram
        ],
        hoverinfo="text",
        marker=hatched(color, "" if is_scaled else "/"),
    )


def _ranges(low: float, high: float) -> list[Bar]:
    """The range of each format between the ends of the axis; subnormal numbers are hatched."""
    rows: list[tuple[Precision, str, float, float]] = [
        ("fp16", "normal", _FP16_NORMAL, _FP16_END),
        ("fp16", "subnormal: fewer digits", _FP16_SUBNORMAL, _FP16_NORMAL),
        ("bf16", "normal", max(low, _BF16_NORMAL), min(high, _BF16_END)),
    ]
    return [
        Bar(
            base=[start],
            x=[end - start],
            y=[precision],
            orientation="h",
            showlegend=False,
            hovertext=[f"{precision} {kind}"],
            hoverinfo="text",
            marker=hatched(LOOKS[precision].color, "" if kind == "normal" else "/"),
        )
        for precision, kind, start, end in rows
    ]


def _log2(scale: float) -> float | None:
    """None for a scale that backed off to 0."""
    return math.log2(scale) if scale > 0 else None


def _why_not(recommendation: Recommendation) -> str:
    everywhere = [e.reason for e in recommendation.excluded if e.precision == "fp16" and e.batch_size is None]
    if everywhere:
        return everywhere[0].rstrip(".")
    asked = recommendation.options.get("precisions")
    if asked is not None and "fp16" not in asked:
        return f"the search was for {', '.join(asked)} only"
    if any(row.precision == "fp16" and row.samples_per_second is not None for row in recommendation.candidates):
        return "no fp16 candidate was fast enough to be confirmed"
    return "no fp16 candidate was measured"
