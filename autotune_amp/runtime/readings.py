"""State of a run in numbers that have the same name everywhere: run log, page, sinks, frameworks' logs. No torch."""

from __future__ import annotations

from typing import Annotated, NamedTuple, get_type_hints

import msgspec

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.documents import NotNegative, Whole

PREFIX = "autotune_amp/"
# Text keys that sinks get for a move in addition to the metrics.
MOVE, BEFORE, REASON, PINNED_MODULES = (PREFIX + name for name in ("move", "before", "reason", "pinned_modules"))


def _is(description: str, unit: str = "1") -> msgspec.Meta:
    """Return the metadata of a metric. Its unit is written as in UCUM, which OpenTelemetry requires."""
    return msgspec.Meta(description=description, extra={"unit": unit})


def _metric_name(field: str) -> str:
    return field.removeprefix("num_")


class Readings(msgspec.Struct, frozen=True, kw_only=True, rename=_metric_name):
    """State of a run after `update` attempted optimizer steps, as far as the host knows. Each field is a metric.

    The metric's name is the field's without ``num_``. A field that is None has no value at present.
    """

    update: Annotated[Whole, _is("Optimizer steps tried.", "{update}")]
    epoch: Annotated[Whole | None, _is("What controller.epoch() was told.", "{epoch}")] = None
    precision: Annotated[Precision, _is("The precision that the run computes in.")]
    rung: Annotated[Whole, _is("0 is the config's own precision, one past the last fallback: disabled.")]
    scale: Annotated[NotNegative | None, _is("The loss scale; none where the loss is not scaled.")]
    growth_tracker: Annotated[Whole | None, _is("Steps without overflow since the loss scale changed.", "{step}")] = (
        None
    )
    num_steps: Annotated[Whole, _is("Updates in which every optimizer with gradients stepped.", "{step}")]
    num_skips: Annotated[Whole, _is("Updates in which one did not: overflows and bad batches.", "{step}")]
    num_overflows: Annotated[Whole, _is("Skips for an overflow: of a gradient, or seen in the forward pass.", "{step}")]
    num_bad_batches: Annotated[
        Whole, _is("Skips whose loss was not finite, with no overflow seen in the pass.", "{step}")
    ]
    num_moves: Annotated[Whole, _is("Moves of the controller.", "{move}")]
    flushed_share: Annotated[
        NotNegative | None, _is("Share of the gradient's entries that fp16 flushed to zero, an estimate from samples.")
    ] = None
    step_seconds: Annotated[NotNegative | None, _is("Median time between updates in this precision.", "s")] = None
    loss: Annotated[float | None, _is("Loss of the last backward pass, the largest of all ranks, if finite.")] = None


class Metric(NamedTuple):
    """Description of a metric. Values that are a count (`is_count`) never decrease."""

    name: str
    description: str
    unit: str
    is_count: bool


def _declared() -> dict[str, Metric]:
    hints = get_type_hints(Readings, include_extras=True)
    return {
        field: Metric(
            PREFIX + _metric_name(field), meta.description, meta.extra["unit"], is_count=field.startswith("num_")
        )
        for field in Readings.__struct_fields__
        for meta in hints[field].__metadata__[-1:]  # the last one; the number's range comes before it
    }


METRICS = _declared()  # by the field of `Readings`


def metrics(readings: Readings) -> dict[str, float | str]:
    """Return the metrics that have a value, by name. Only the precision is text."""
    values = {metric.name: getattr(readings, field) for field, metric in METRICS.items()}
    return {name: value for name, value in values.items() if value is not None}
