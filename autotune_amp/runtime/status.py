"""State of a run in numbers that have one name everywhere: status, run log, page, sinks, frameworks' logs. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple, get_args, get_type_hints

import msgspec

from autotune_amp.core import markup
from autotune_amp.core.config import AmpConfig
from autotune_amp.core.documents import Integer, NotNegative, Number, Whole
from autotune_amp.core.hardware import Capability, Level
from autotune_amp.core.precisions import Precision
from autotune_amp.core.recommendation import write_atomically
from autotune_amp.core.text import count, duration, exact, number, percent, size, token_rate
from autotune_amp.runtime.policy import RecordKind, converted

PREFIX = "autotune_amp/"
# Text keys that sinks get for a move in addition to the metrics.
MOVE, BEFORE, REASON, PINNED_MODULES = (PREFIX + name for name in ("move", "before", "reason", "pinned_modules"))


_ZeroOrOne = Annotated[int, msgspec.Meta(ge=0, le=1)]


def _meta(description: str, unit: str = "1") -> msgspec.Meta:
    """Return the metadata of a metric. Its unit is written as in UCUM, which OpenTelemetry requires."""
    return msgspec.Meta(description=description, extra={"unit": unit})


def _metric_name(field: str) -> str:
    return field.removeprefix("num_")


class Readings(msgspec.Struct, frozen=True, kw_only=True, rename=_metric_name):
    """State of a run after `update` attempted optimizer steps, as far as the host knows. Each field is a metric.

    The metric's name is the field's without ``num_``. A field that is None has no value at present.
    """

    update: Annotated[Whole, _meta("Optimizer steps tried.", "{update}")]
    epoch: Annotated[Whole | None, _meta("The number given to controller.epoch().", "{epoch}")] = None
    precision: Annotated[Precision, _meta("The precision that the run computes in.")]
    rung: Annotated[Whole, _meta("0 is the config's own precision, one past the last fallback: disabled.")]
    scale: Annotated[NotNegative | None, _meta("The loss scale; none where the loss is not scaled.")] = None
    growth_tracker: Annotated[Whole | None, _meta("Steps without overflow since the loss scale changed.", "{step}")] = (
        None
    )
    num_steps: Annotated[Whole, _meta("Updates in which every optimizer with gradients stepped.", "{step}")]
    num_skips: Annotated[Whole, _meta("Updates in which one did not: overflows and bad batches.", "{step}")]
    num_overflows: Annotated[Whole, _meta("Skips for an overflow of a gradient, or in the forward pass.", "{step}")]
    num_bad_batches: Annotated[
        Whole, _meta("Skips whose loss was not finite, with no overflow seen in the pass.", "{step}")
    ]
    num_moves: Annotated[Whole, _meta("Moves of the controller.", "{move}")]
    num_scaler_updates: Annotated[Whole, _meta("Updates in which the loss was scaled.", "{update}")] = 0
    num_growths: Annotated[Whole, _meta("Times that the loss scale grew after steps without overflow.", "{time}")] = 0
    num_backoffs: Annotated[Whole, _meta("Times that the loss scale backed off after an overflow.", "{time}")] = 0
    flushed_share: Annotated[
        NotNegative | None,
        _meta("Share of the gradient's entries that fp16 flushed to zero, an estimate from samples."),
    ] = None
    flushed_entries: Annotated[
        Whole | None,
        _meta("Entries of one update's gradient that fp16 flushed to zero: flushed_share of all.", "{entry}"),
    ] = None
    elapsed_seconds: Annotated[NotNegative | None, _meta("Seconds between updates, added up.", "s")] = None
    step_seconds: Annotated[NotNegative | None, _meta("Median time between updates in this precision.", "s")] = None
    tokens_per_second: Annotated[
        NotNegative | None,
        _meta("Real tokens a second on all ranks, if each has as many as rank 0.", "{token}/s"),
    ] = None
    mfu: Annotated[
        NotNegative | None,
        _meta("Share of the machine's own measured rate of matrix products in this precision that steps attain."),
    ] = None
    loss: Annotated[
        float | None, _meta("Loss of an update, summed over its passes, if finite; largest of all ranks.")
    ] = None
    peak_memory_bytes: Annotated[
        Whole | None, _meta("Peak memory of tensors on the device; on a CPU the process's present memory.", "By")
    ] = None
    saved_memory_bytes: Annotated[
        Integer | None, _meta("Memory saved compared with the fp32 fallback's measured plan.", "By")
    ] = None
    temperature_celsius: Annotated[Number | None, _meta("Temperature of the GPU.", "Cel")] = None
    sm_clock_mhz: Annotated[NotNegative | None, _meta("Clock of the GPU's multiprocessors.", "MHz")] = None
    power_watts: Annotated[NotNegative | None, _meta("Power that the GPU draws.", "W")] = None
    throttling: Annotated[_ZeroOrOne | None, _meta("1 while heat or power lowers the GPU's clocks, else 0.")] = None


class Metric(NamedTuple):
    """Description of a metric. Values that are a count (`is_count`) never decrease."""

    name: str
    description: str
    unit: str
    is_count: bool


def _declared_metrics() -> dict[str, Metric]:
    hints = get_type_hints(Readings, include_extras=True)
    return {
        field: Metric(
            PREFIX + _metric_name(field), meta.description, meta.extra["unit"], is_count=field.startswith("num_")
        )
        for field in Readings.__struct_fields__
        for meta in hints[field].__metadata__[-1:]  # the last one; the number's range comes before it
    }


METRICS = _declared_metrics()  # by the field of `Readings`


def metric_values(readings: Readings) -> dict[str, float | str]:
    """Return the metrics that have a value, by name. Only the precision is text."""
    values = {metric.name: getattr(readings, field) for field, metric in METRICS.items()}
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class MoveRecord:
    """Move of the controller: at which update, its kind, its reason, and the config from then on.

    `kind` is one of demotion, promotion, revert, pin, attention, rescale, not_precision, advice (of an advisory
    controller), by_hand, stop.
    """

    update: Whole
    kind: RecordKind
    before: Precision
    after: Precision
    reason: str
    config: AmpConfig = field(repr=False)


class Status(Readings, frozen=True, kw_only=True):
    """Status of a run. Counts are since the start or `reset_stats`; `num_updates` optimizer steps were attempted.

    The GPU's temperature, clock, power and `throttling_reasons` are NVML's of a few seconds ago, None or empty without
    it. `capabilities` say which precisions the device supports, with the reason. `flushed_share` and `flushed_entries`
    tell how much of one update's gradient fp16 flushed to zero: an estimate from a sample of its entries, which is
    drawn every 64th update; None until then and where the loss is not scaled.

    `excluded_attention` are the attention backends that gave non-finite numbers and are switched off.
    `steps_by_precision` and `seconds_by_precision` (between updates) split them up; `amp_share` is the share of steps
    in bf16, fp16 or fp8. `forward_max` is the largest magnitude that the observers of `attach` saw since that call,
    None without.
    """

    is_enabled: bool
    is_advisory: bool
    pinned_modules: tuple[str, ...]
    excluded_attention: tuple[str, ...]
    num_updates: int
    skip_share: float
    amp_share: float
    steps_by_precision: dict[Precision, int]
    seconds_by_precision: dict[Precision, float]
    capabilities: dict[Precision, Capability]
    throttling_reasons: tuple[str, ...]
    forward_max: float | None
    history: tuple[MoveRecord, ...]

    def facts(self) -> list[tuple[str, str]]:
        """Return (label, text) rows of the status, without those that have no value at present."""
        causes = f"{count(self.num_overflows, 'overflow')}, {count(self.num_bad_batches, 'bad batch', 'bad batches')}"
        skipped = f"{count(self.num_skips, 'skip')}, {percent(self.skip_share)} ({causes})"
        scale, flushed, seconds = self.scale, self.flushed_share, self.step_seconds
        changes = f"{count(self.num_growths, 'growth')}, {count(self.num_backoffs, 'backoff')}"
        grown = "" if self.growth_tracker is None else f", {count(self.growth_tracker, 'step')} without overflow"
        entries = "" if self.flushed_entries is None else f", about {self.flushed_entries:,}"
        saved = ""
        if self.saved_memory_bytes is not None:
            relation = "more" if self.saved_memory_bytes < 0 else "less"
            saved = f", {size(abs(self.saved_memory_bytes))} {relation} than the plan in fp32"
        lines = [
            ("updates", f"{self.num_updates:,} tried: {count(self.num_steps, 'step')}, {skipped}"),
            ("loss scale", None if scale is None else f"{exact(scale)}, {changes}{grown}"),
            (
                "flushed",
                None if flushed is None else f"{percent(flushed)} of the gradient's entries{entries}, by samples",
            ),
            ("step", None if seconds is None else f"{duration(seconds)} in the median"),
            ("tokens", None if self.tokens_per_second is None else token_rate(self.tokens_per_second)),
            ("MFU", None if self.mfu is None else f"{percent(self.mfu)} of the machine's own rate"),
            ("loss", None if self.loss is None else number(self.loss)),
            ("memory", f"{size(self.peak_memory_bytes or 0)} at the peak{saved}"),
            ("GPU", gpu_state(self) or None),
            ("throttled", ", ".join(self.throttling_reasons) or None),
            ("largest", None if self.forward_max is None else f"{number(self.forward_max)}, of a module's output"),
            ("pinned", ", ".join(self.pinned_modules) or None),
            ("attention", f"without {', '.join(self.excluded_attention)}" if self.excluded_attention else None),
            *((level, ", ".join(self._supported(level)) or None) for level in get_args(Level)),
        ]
        return [(label, text) for label, text in lines if text is not None]

    def _supported(self, level: Level) -> list[Precision]:
        """Return the precisions that the device supports at this level."""
        return [name for name, capability in self.capabilities.items() if capability.level == level]

    def _repr_html_(self) -> str:
        spent = (
            (name, f"{steps:,}", duration(self.seconds_by_precision.get(name, 0.0)))
            for name, steps in self.steps_by_precision.items()
        )
        moves = [(f"{move.update:,}", move.kind, move.before, move.after, move.reason) for move in self.history]
        moved = markup.table(("update", "move", "from", "to", "reason"), moves) if moves else ""
        told = (
            markup.definition_list(self.facts())
            + markup.table(("precision", "steps", "time"), spent, num_numeric=2)
            + moved
        )
        state = "" if self.is_enabled else ", disabled"
        return markup.notebook_box(f"{self.precision} at update {self.update:,}{state}", told)


def gpu_state(readings: Readings) -> str:
    """Return the GPU's temperature, clock and power in words, empty if none is known."""
    sensors = (
        (readings.temperature_celsius, "degrees C"),
        (readings.sm_clock_mhz, "MHz"),
        (readings.power_watts, "W"),
    )
    return ", ".join(f"{value:,.0f} {unit}" for value, unit in sensors if value is not None)


def to_plain(record: MoveRecord) -> dict[str, object]:
    """Return a record in plain types, with the config as its JSON document, as in checkpoints and stats files."""
    return asdict(record) | {"config": record.config.to_json()}


def from_plain(record: Mapping[str, object]) -> MoveRecord:
    """Return the record that `to_plain` converted. Raises `InvalidRequestError` for anything else."""
    return converted({**record, "config": AmpConfig.from_json(str(record.get("config")))}, MoveRecord)


def write_status(status: Status, path: str | os.PathLike[str]) -> None:
    """Write a status as a JSON document, atomically. Numbers that are not finite become null."""
    document = msgspec.to_builtins(msgspec.structs.replace(status, history=()))
    document |= {"history": [to_plain(record) for record in status.history]}
    write_atomically(Path(path), msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
