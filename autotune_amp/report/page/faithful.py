"""The chart of fidelity: each precision's rounding noise over the whole gradient and module by module. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from plotly.graph_objects import Figure, Scatter

from autotune_amp.numerics.grading import FAITHFUL_NOISE, MAX_PARAMETER_NOISE, UNFAITHFUL_NOISE
from autotune_amp.report.page.marks import LOOKS, Drawn, framed, label, said

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autotune_amp.core.fidelity import Fidelity, GradientDamage

_WHOLE, _OUTSIDE = "whole gradient", "outside of modules"
_LEAST_DRAWN = 1e-6  # no noise at all, on an axis of ratios
_ROW_PIXELS = 24


class _Mark(NamedTuple):
    """`row` is the module's, "" that of parameters outside of every module."""

    row: str
    noise_ratio: float
    hover: str


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
        modules = [_Mark(_WHOLE, check.noise_ratio or 0.0, _whole_hover(check))]
        modules += [_Mark(damage.name, damage.noise_ratio, _hover(check, damage)) for damage in check.modules]
        parameters = [
            _Mark(_row(damage.name, check.modules), damage.noise_ratio, _hover(check, damage))
            for damage in check.worst_parameters
        ]
        pinned = f" with {len(check.pinned_modules)} pinned" if check.pinned_modules else ""
        symbol = look.symbol + "-open" * bool(pinned)
        for marks, size, said_of in (
            (modules, 10, f": {check.verdict}"),
            (parameters, 5, ", its noisiest parameters"),
        ):
            drawn = [mark for mark in marks if math.isfinite(mark.noise_ratio)]
            rows += dict.fromkeys(mark.row for mark in drawn if mark.row not in rows)
            figure.add_trace(
                Scatter(
                    x=[max(_LEAST_DRAWN, mark.noise_ratio) for mark in drawn],
                    y=[rows.index(mark.row) for mark in drawn],
                    name=f"{check.precision}{pinned}{said_of}",
                    mode="markers",
                    hovertext=[mark.hover for mark in drawn],
                    hoverinfo="text",
                    marker={"color": look.color, "size": size, "symbol": symbol},
                )
            )
    for name, ratio, dash, ends in (
        ("whole: doubtful from here", FAITHFUL_NOISE, "dash", (-0.4, 0.4)),
        ("whole: unfaithful from here", UNFAITHFUL_NOISE, "solid", (-0.4, 0.4)),
        ("a parameter: doubtful from here", MAX_PARAMETER_NOISE, "dot", (0.6, len(rows) - 0.6)),
    ):
        line = {"color": "var(--bad)", "dash": dash, "width": 1.5}
        figure.add_trace(Scatter(x=[ratio, ratio], y=ends, name=name, mode="lines", line=line, hoverinfo="name"))
    framed(figure, 230 + _ROW_PIXELS * len(rows))
    drawn_ratios = [math.log10(x) for trace in figure.data for x in trace.x]
    margin = 0.03 * (max(drawn_ratios) - min(drawn_ratios))
    span = [min(drawn_ratios) - margin, max(drawn_ratios) + margin]
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
