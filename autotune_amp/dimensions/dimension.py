"""Dimension: one thing that a setting decides, such as precision or batch size, and what a search does with it.

To add one: a field in `core.setting.Setting`, a file here with one object, and its line in `DIMENSIONS`.
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
    """The values of a dimension to try, and the excluded values, each with the reason for its exclusion."""

    values: tuple[Value, ...] = ()
    left_out: Mapping[Value, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Leader:
    """The setting that leads a search, and the results by which a dimension judges what is worth a trial on it.

    `measurements` are those of all settings, `trials` the records of all trials, failed ones too. `values` has the
    values that can be tried, by dimension; with `are_values_named` the user named them. `num_steps` is the length of
    the training run in optimizer steps.
    """

    setting: Setting
    objective: Objective
    measurements: Mapping[Setting, Sequence[Measurement]]
    trials: Sequence[Record]
    values: Mapping[str, Sequence[Any]]
    are_values_named: bool
    num_steps: int

    @property
    def effect(self) -> Effect:
        """Return what a dimension has to affect for this objective."""
        return "memory" if self.objective == "memory" else "speed"

    @property
    def step_seconds(self) -> float:
        """Return the least seconds of a step of the leading setting."""
        return min(measured.step_seconds for measured in self.measurements[self.setting])


class Dimension(Generic[Value]):
    """Interface for one thing that a setting decides, in the field `name` of `Setting`.

    If `affects` contains "numerics", each value is checked against fp32. `found_by` names the part of the search that
    tries the values: "curves", the throughput model over batch sizes; "variants", the stage that tries `choices` on the
    leading setting; None for a stage of its own. `removable` has the parts of a profiled step that a value can shorten
    (a `PartName` of `trial.step_profile.breakdown`, or "convolutions"), each with the largest share of it that can go;
    `sets_also` names the dimensions whose values are set with it, which count as its own. A trial of it takes at least
    `extra_seconds` longer than others. If it `frees_memory`, it is tried at a larger batch size. A fallback plan keeps
    it unless it is `left_out_of_fallbacks`.
    """

    name: ClassVar[str]
    affects: ClassVar[frozenset[Effect]] = frozenset({"speed", "memory", "numerics"})
    found_by: ClassVar[Literal["curves", "variants"] | None] = "variants"
    removable: ClassVar[Mapping[str, float]] = {}
    sets_also: ClassVar[tuple[str, ...]] = ()
    extra_seconds: ClassVar[float] = 0.0
    frees_memory: ClassVar[bool] = False
    left_out_of_fallbacks: ClassVar[bool] = False

    @property
    def default(self) -> Any:
        """Return the value of a setting that gives none; msgspec's NODEFAULT for precision and batch size."""
        return DEFAULTS[self.name]

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[Value]:  # noqa: ARG002
        """Return the values to try, given a `Hardware`, a `Description` and `SearchOptions`."""
        return Choices()

    def apply(self, training: Any, value: Value) -> None:
        """Apply `value` to `training`, a `trial.training.BaseTraining` in a trial's process, before its first step.

        The base class does nothing: for values that the training code reads from its setting.
        """

    def export(self, value: Value, target: str) -> Sequence[str] | None:  # noqa: ARG002
        """Return the lines that set `value` in the script of `autotune-amp export --to TARGET`.

        None if that script has no place for the value or contains it already.
        """
        return None

    def risk(self, value: Value) -> int:  # noqa: ARG002
        """Return the risk of failure of `value`, from 0 up. Among settings of similar speed the lowest risk wins."""
        return 0

    def value_in(self, setting: Setting) -> Value | None:
        """Return the value of this dimension in a setting, or None if it changes nothing there."""
        value: Value = getattr(setting, self.name)
        return value if setting.uses(self.name) else None

    def on(self, setting: AnySetting, value: Value) -> AnySetting:
        """Return a copy of a setting that uses `value` for this dimension."""
        return replace(setting, **{self.name: value})

    def is_tried_in(self, setting: Setting, value: Value) -> bool:
        """Return whether a trial of `setting` is a trial of `value`."""
        return self.value_in(setting) == value

    def is_without(self, other: Setting, setting: Setting) -> bool:
        """Return whether `setting` can be compared with `other` to see the gain of this dimension: at any batch size,
        the setting with the default.
        """
        plain = replace(setting, **{self.name: self.default})
        return replace(other, batch_size=1, accumulation_steps=1) == replace(plain, batch_size=1, accumulation_steps=1)

    def reason_against_setting(self, setting: Setting, leader: Leader) -> str | None:  # noqa: ARG002
        """Return the reason why a setting that uses this dimension is not worth a trial, None if it may be."""
        return None

    def reason_against(self, value: Value, leader: Leader) -> str | None:  # noqa: ARG002
        """Return the reason why `value` is not worth a trial on the leading setting, None if it may be."""
        return None


class Variant(Dimension[str]):
    """Dimension that changes the model, its optimizer or the process before training, and lists its values.

    If `why_not_auto` is given, the values are tried only if the user names the dimension, with that reason. `line` is
    the line of plain PyTorch that sets a value, with {} for the value, None if there is none.
    """

    why_not_auto: ClassVar[str | None] = None
    line: ClassVar[str | None] = None

    @property
    def values(self) -> tuple[str, ...]:
        """Return all values, the default first, then in the order of rising risk."""
        return VARIANT_VALUES[self.name]

    @property
    def others(self) -> tuple[str, ...]:
        """Return the values that change something."""
        return self.values[1:]

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[str]:  # noqa: ARG002
        """Return the values that the workload supports, or those of them that the user named."""
        named, found = options.variants, dict[str, str | None](description.variants.get(self.name, {}))
        if named and not description.variants:
            found = dict.fromkeys(self.others, "a command's settings are those that it has placeholders for")
        if named is not None:
            found = {value: why for value, why in found.items() if self.name in named or value in named}
        why_not_auto = self.why_not_auto if named is None else None
        left_out = {value: reason for value, why in found.items() if (reason := why or why_not_auto) is not None}
        return Choices(tuple(value for value in found if value not in left_out), left_out)

    def apply(self, training: Any, value: str) -> None:  # noqa: D102 - see Dimension
        if value != self.default:
            training.apply_variant(self, value)

    def export(self, value: str, target: str) -> Sequence[str] | None:  # noqa: D102 - see Dimension
        is_to_set = target == "torch" and value != self.default
        return [self.line.format(value)] if self.line is not None and is_to_set else None

    def risk(self, value: str) -> int:  # noqa: D102 - see Dimension
        return self.values.index(value)

    def is_applied(self, value: str, live: LiveTraining) -> bool:
        """Return whether live objects, or their process, have this value already."""
        raise NotImplementedError

    def unsupported_reason(self, value: str, live: LiveTraining) -> str | None:
        """Return the reason why these objects do not support `value`, None if they do."""
        raise NotImplementedError

    def change(self, value: str, live: LiveTraining) -> Callable[[], None] | None:
        """Give live objects this value in place; return a function that undoes a process-wide change, or None."""
        raise NotImplementedError

    def change_once(self, value: str, live: LiveTraining) -> Callable[[], None] | None:
        """Give live objects this value as `change` does, unless they have it already."""
        return None if self.is_applied(value, live) else self.change(value, live)
