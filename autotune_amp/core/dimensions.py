"""Dimensions: the individual choices that make up a setting, such as precision or batch size.

To add one, define one object, list it in `core.setting` and add its field there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

# Ordered from the safest at run time to the most failure-prone.
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")
AROUND_FP8: Precision = "bf16"  # precision of the rest of a model whose linear layers multiply in fp8


def autocast_precision(precision: Precision) -> Precision:
    """Return the precision of autocast for `precision`: bf16 for fp8, whose layers are part of a bf16 model."""
    return AROUND_FP8 if precision == "fp8" else precision


Effect: TypeAlias = Literal["speed", "memory", "numerics"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Choices(Generic[Value]):
    """The values of a dimension to try, and the excluded values, each with the reason for its exclusion."""

    values: tuple[Value, ...] = ()
    left_out: Mapping[Value, str] = field(default_factory=dict)


class Dimension(Generic[Value]):
    """Interface for one choice that a setting makes, stored in the field `name` of `Setting`.

    `default` is the value of a setting that does not give one; precision and batch size are always given. If `affects`
    contains "numerics", each value is checked against fp32. `found_by` names the part of the search that tries the
    values: "curves", the throughput model over batch sizes; "variants", the stage that tries `choices` on the leading
    setting; None for a stage of its own.
    """

    name: str
    default: Any
    affects: frozenset[Effect]
    found_by: Literal["curves", "variants"] | None = "variants"

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[Value]:  # noqa: ARG002
        """Return the values to try, given a `Hardware`, a `Description` and `SearchOptions`."""
        return Choices()

    def apply(self, training: Any, value: Value) -> None:
        """Apply `value` to `training`, a `trial.training.BaseTraining` in a trial's process, before its first step.

        The base class does nothing: for values that the training code reads from its setting.
        """

    def risk(self, value: Value) -> int:  # noqa: ARG002
        """Return the risk of failure of `value`, from 0 up. Among settings of similar speed the lowest risk wins."""
        return 0

    def label(self, value: Value) -> str:  # noqa: ARG002
        """Return the text for `value` in the name of a setting, "" to omit it."""
        return ""

    def value_in(self, setting: Any) -> Value | None:
        """Return the value of this dimension in a `Setting`, or None if it is the default."""
        value: Value = getattr(setting, self.name)
        return None if value == self.default else value

    def on(self, setting: Any, value: Value) -> Any:
        """Return a copy of a `Setting` that uses `value` for this dimension."""
        return msgspec.structs.replace(setting, **{self.name: value})

    def fits(self, value: Value, setting: Any) -> bool:  # noqa: ARG002
        """Return whether `value` is compatible with the other values of a `Setting`."""
        return True

    def export(self, value: Value, target: str) -> Sequence[str] | None:  # noqa: ARG002
        """Return the lines that set `value` in the script of `autotune-amp export --to TARGET`.

        None if that script has no place for the value or contains it already.
        """
        return None


class _Precision(Dimension[Precision]):
    name = "precision"
    default = "fp32"
    affects = frozenset({"speed", "memory", "numerics"})
    found_by = "curves"

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[Precision]:
        asked: Sequence[Precision] = options.precisions or PRECISIONS
        reasons = {precision: self.why_not(precision, hardware, description) for precision in asked}
        left_out = {precision: reason for precision, reason in reasons.items() if reason is not None}
        return Choices(tuple(precision for precision in asked if precision not in left_out), left_out)

    def why_not(self, precision: Precision, hardware: Any, description: Any) -> str | None:
        """Return the reason why the workload cannot be trained in `precision` on this hardware, or None if it can."""
        weights = description.weights
        capability = hardware.precisions.get(precision)
        if capability is None:
            return f"the probe of {hardware.device} says nothing of it"
        if capability.level == "unsupported":  # first: it holds for whatever is trained here
            return str(capability.reason)
        if precision in description.unsettable:
            return str(description.unsettable[precision])
        if precision == "fp8":
            return "fp8 is tried on what wins in another precision, by --try fp8_recipe"
        kept = f"the weights are kept in {weights}"
        if weights == "bf16" and precision == "fp16":
            return (
                f"{kept}: values beyond fp16's range would overflow, and the gradient scaler is made for fp32 gradients"
            )
        if weights == "fp16" and precision in ("fp16", "bf16"):
            return f"{kept}, and so are their gradients, which no gradient scaler can unscale; keep them in fp32"
        if weights in ("bf16", "fp16") and precision == "tf32":
            return f"{kept}: TF32 concerns fp32 products, so it is the same as fp32"
        return None

    def apply(self, training: Any, value: Precision) -> None:
        training.set_precision(value)

    def risk(self, value: Precision) -> int:
        return PRECISIONS.index(value)

    def label(self, value: Precision) -> str:
        return value


class _PinnedModules(Dimension[tuple[str, ...]]):
    """Dimension of the modules kept in fp32. The fidelity check finds which modules to pin."""

    name = "pinned_modules"
    default = ()
    affects = frozenset({"speed", "memory", "numerics"})
    found_by = None

    def apply(self, training: Any, value: tuple[str, ...]) -> None:
        training.pin(value)

    def label(self, value: tuple[str, ...]) -> str:
        return f"with {len(value)} module{'s' if len(value) > 1 else ''} pinned" if value else ""


class _Plain(Dimension[Any]):
    """Dimension whose value the training code reads from its setting and that needs no check against fp32."""

    def __init__(
        self,
        name: str,
        default: Any,
        *affects: Effect,
        label: Callable[[Any], str],
        risk: Callable[[Any], int] = lambda _: 0,
        found_by: Literal["curves"] | None = None,
    ) -> None:
        self.name, self.default, self.affects, self.found_by = name, default, frozenset(affects), found_by
        self._label, self._risk = label, risk

    def risk(self, value: Any) -> int:
        return self._risk(value)

    def label(self, value: Any) -> str:
        return self._label(value)


PRECISION = _Precision()
# The sizes to try follow from the effective batch size (`search.space`), with accumulation making up the rest; a
# separate check tells whether accumulation is exact.
BATCH_SIZE = _Plain("batch_size", 1, "speed", "memory", label="batch {}".format, risk=int, found_by="curves")
ACCUMULATION_STEPS = _Plain("accumulation_steps", 1, "speed", label=lambda num: f"x {num}" if num > 1 else "")
PINNED_MODULES = _PinnedModules()
# Tried if the data loader limits the speed (`search.stages.variants`), starting with the user's own number.
NUM_WORKERS = _Plain(
    "num_workers",
    None,
    "speed",
    label=lambda num: "" if num is None else f"with {num} loader worker{'' if num == 1 else 's'}",
    risk=lambda num: 0 if num is None else 1 + num,
)
# Used by the baseline only. Fidelity results for it are looked up under the equivalent precision (`ranking.check_key`).
AS_FOUND = _Plain("as_found", False, "speed", "memory", label=lambda is_so: "as found" if is_so else "")
