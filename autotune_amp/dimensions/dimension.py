"""Dimension: interface for one field of a setting, such as precision or batch size, in search, trial and export.

To add a dimension: add a field to `core.setting.Setting`, a file here with one object, and a line to `DIMENSIONS`.
Arguments of a command share one field; each has a `dimensions.argument.Argument`, which reads and writes its value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from msgspec.structs import replace

from autotune_amp.core.evidence import Objective
from autotune_amp.core.outcome import Measurement, Record
from autotune_amp.core.setting import DEFAULTS, VARIANT_VALUES, Setting

if TYPE_CHECKING:
    from autotune_amp.dimensions.live_training import LiveTraining

Effect: TypeAlias = Literal["speed", "memory", "numerics"]
Value = TypeVar("Value")
AnySetting = TypeVar("AnySetting", bound=Setting)

APPLIED_ALREADY = "it is so already"


@dataclass(frozen=True)
class Choices(Generic[Value]):
    """Values of a dimension to try, and `left_out`, the excluded values with the reason for each."""

    values: tuple[Value, ...] = ()
    left_out: Mapping[Value, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Leader:
    """Leading setting of a search so far, with the results that decide which values are worth a trial on it.

    `measurements` are those of all settings, `trials` the records of all trials, including failed ones. `values` are
    the values to try, by dimension; `are_values_named` is True if the user chose them. `num_steps` is the length of the
    user's training run in optimizer steps. `num_workers` is the number of workers of the leading setting's loader.
    """

    setting: Setting
    objective: Objective
    measurements: Mapping[Setting, Sequence[Measurement]]
    trials: Sequence[Record]
    values: Mapping[str, Sequence[Any]]
    are_values_named: bool
    num_steps: int
    num_workers: int | None = None

    @property
    def effect(self) -> Effect:
        """Return what a dimension must affect to be useful for this objective."""
        return "memory" if self.objective == "memory" else "speed"

    @property
    def step_seconds(self) -> float:
        """Return the seconds per optimizer step of the leading setting's fastest measurement."""
        return min(measured.step_seconds for measured in self.measurements[self.setting])


class Dimension(Generic[Value]):
    """Interface for one field of `Setting`, called `name`, or for one of the arguments in a field.

    `affects`: if it contains "numerics", each value is compared with fp32. `found_by` is the part of the search that
    tries the values: "curves" is the throughput model over batch sizes, "variants" the stage that tries `choices` on
    the leading setting, None another stage. `removable` maps the parts of a profiled step that a value can shorten (a
    `PartName` of `trial.step_profile.breakdown`, or "convolutions") to the largest share that it can save. `sets_also`
    names the dimensions that are set together with this one. `extra_seconds` is the least additional time of a trial.
    If `frees_memory` is True, values are tried at a larger batch size. If `left_out_of_fallbacks` is True, fallback
    plans use the default.
    """

    name: str
    affects: frozenset[Effect] = frozenset({"speed", "memory", "numerics"})
    found_by: ClassVar[Literal["curves", "variants"] | None] = "variants"
    removable: ClassVar[Mapping[str, float]] = {}
    sets_also: ClassVar[tuple[str, ...]] = ()
    extra_seconds: ClassVar[float] = 0.0
    frees_memory: ClassVar[bool] = False
    left_out_of_fallbacks: ClassVar[bool] = False

    @property
    def default(self) -> Any:
        """Return the default value of the field; msgspec's NODEFAULT for precision and batch size."""
        return DEFAULTS[self.name]

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[Value]:  # noqa: ARG002
        """Return the values to try. The arguments are a `Hardware`, a `Description` and `SearchOptions`."""
        return Choices()

    def apply(self, training: Any, value: Value) -> None:
        """Apply `value` to `training`, a `trial.training.BaseTraining` in a trial's process, before its first step.

        By default nothing is done: the training reads most values from its setting.
        """

    def export(self, value: Value, target: str) -> Sequence[str] | None:  # noqa: ARG002
        """Return the lines that set `value` in the script of `autotune-amp export --to TARGET`, or None."""
        return None

    def risk(self, value: Value) -> int:  # noqa: ARG002
        """Return the risk of failure of `value`, 0 or more. Among settings of similar speed the lowest risk wins."""
        return 0

    def value_in(self, setting: Setting) -> Value | None:
        """Return the value of this dimension in a setting, None if the setting does not use the dimension."""
        return self.read(setting) if setting.uses(self.name) else None

    def read(self, setting: Setting) -> Value:
        """Return the value that a setting holds for this dimension, whether it is in use or not."""
        value: Value = getattr(setting, self.name)
        return value

    def write(self, setting: AnySetting, value: Value) -> AnySetting:
        """Return a copy of a setting that holds `value` for this dimension, all others unchanged."""
        return replace(setting, **{self.name: value})

    def on(self, setting: AnySetting, value: Value) -> AnySetting:
        """Return a copy of a setting that uses `value` for this dimension, others being changed if that takes it."""
        return self.write(setting, value)

    def is_tried_in(self, setting: Setting, value: Value) -> bool:
        """Return whether a trial of `setting` is a trial of `value`."""
        return self.value_in(setting) == value

    def is_without(self, other: Setting, setting: Setting) -> bool:
        """Return whether `other` is `setting` with this dimension's default, at any batch size.

        The difference between the two is then the gain of this dimension.
        """
        plain = self.write(setting, self.default)
        return replace(other, batch_size=1, accumulation_steps=1) == replace(plain, batch_size=1, accumulation_steps=1)

    def reason_against_setting(self, setting: Setting, leader: Leader) -> str | None:  # noqa: ARG002
        """Return the reason why a setting that uses this dimension is not worth a trial, or None."""
        return None

    def reason_against(self, value: Value, leader: Leader) -> str | None:  # noqa: ARG002
        """Return the reason why `value` is not worth a trial on the leading setting, or None."""
        return None


class Variant(Dimension[str]):
    """Dimension with a list of values that change the model, its optimizer or the process before training.

    `why_not_auto` is the reason why its values are tried only if the user names the dimension, None if they are tried
    by default. `line` is the line of PyTorch code that sets a value, with {} for the value, None if there is none.
    """

    why_not_auto: ClassVar[str | None] = None
    line: ClassVar[str | None] = None

    @property
    def values(self) -> tuple[str, ...]:
        """Return all values, the default first, in the order of increasing risk."""
        return VARIANT_VALUES[self.name]

    @property
    def others(self) -> tuple[str, ...]:
        """Return all values but the default."""
        return self.values[1:]

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:  # noqa: ARG002
        """Return the values that the workload supports, only those that the user named if there are any."""
        named, reasons = options.variants, dict[str, str | None](description.variants.get(self.name, {}))
        if named and not description.variants:
            reasons = dict.fromkeys(self.others, "a command can only set its placeholders")
        if named is not None:
            reasons = {value: why for value, why in reasons.items() if self.name in named or value in named}
        why_not_auto = self.why_not_auto if named is None else None
        left_out = {value: reason for value, why in reasons.items() if (reason := why or why_not_auto) is not None}
        return Choices(tuple(value for value in reasons if value not in left_out), left_out)

    def apply(self, training: Any, value: str) -> None:  # noqa: D102 - see Dimension
        if value != self.default:
            training.apply_variant(self, value)

    def export(self, value: str, target: str) -> Sequence[str] | None:  # noqa: D102 - see Dimension
        is_to_set = target == "torch" and value != self.default
        return [self.line.format(value)] if self.line is not None and is_to_set else None

    def risk(self, value: str) -> int:  # noqa: D102 - see Dimension
        return self.values.index(value)

    def is_applied(self, value: str, live: LiveTraining) -> bool:
        """Return whether the live objects, or their process, already have this value."""
        raise NotImplementedError

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:
        """Return the reason why the live objects do not support `value`, None if they do."""
        raise NotImplementedError

    def change(self, value: str, live: LiveTraining) -> Callable[[], None] | None:
        """Change the live objects in place to `value`; return a function that undoes a process-wide change, or None."""
        raise NotImplementedError

    def change_once(self, value: str, live: LiveTraining) -> Callable[[], None] | None:
        """Call `change` unless the live objects already have this value."""
        return None if self.is_applied(value, live) else self.change(value, live)
