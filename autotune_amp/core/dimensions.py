"""Dimensions: the things that a setting decides. Another is one object; `core.setting` lists it and has its field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]

# From the one with least to go wrong at run time to the one with most.
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16", "fp8")
AROUND_FP8: Precision = "bf16"  # what the rest of a model computes in whose linear layers multiply in fp8


def autocast_precision(precision: Precision) -> Precision:
    """What autocast is to be in, and layers are seen to run in by it: fp8 is layers in bf16's."""
    return AROUND_FP8 if precision == "fp8" else precision


Effect: TypeAlias = Literal["speed", "memory", "numerics"]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Choices(Generic[Value]):
    """The values that can be tried, and the others with the reason why they cannot."""

    values: tuple[Value, ...] = ()
    left_out: Mapping[Value, str] = field(default_factory=dict)


class Dimension(Generic[Value]):
    """One thing that a setting decides, under the `name` of its field.

    `default` is what a setting has that does not say; precision and batch size are always said. Where it `affects`
    numerics, each value is checked against fp32. `found_by` says who tries other values: the model of the "curves", or
    "variants", the stage that tries the `choices` on the setting that would win; None where that is a stage of its own.
    """

    name: str
    default: Any
    affects: frozenset[Effect]
    found_by: Literal["curves", "variants"] | None = "variants"

    def choices(self, hardware: Any, description: Any, options: Any) -> Choices[Value]:  # noqa: ARG002
        """The values to try, given a `Hardware`, a `Description` and `SearchOptions`, which stand above this module."""
        return Choices()

    def apply(self, training: Any, value: Value) -> None:
        """Set it up in the process of a trial, on its `trial.training.BaseTraining`; no step has been taken yet.

        Nothing is to be done for what the training reads of its setting itself.
        """

    def risk(self, value: Value) -> int:  # noqa: ARG002
        """How much there is to go wrong, from 0 up: among settings that are about as good the least wins."""
        return 0

    def label(self, value: Value) -> str:  # noqa: ARG002
        """Its part in the name of a setting, "" for none."""
        return ""

    def value_in(self, setting: Any) -> Value | None:
        """The value that a `Setting` has beside the default, None for the default."""
        value: Value = getattr(setting, self.name)
        return None if value == self.default else value

    def on(self, setting: Any, value: Value) -> Any:
        """The `Setting` that tries this value on another."""
        return msgspec.structs.replace(setting, **{self.name: value})

    def fits(self, value: Value, setting: Any) -> bool:  # noqa: ARG002
        """Whether a `Setting` can have this value beside its others."""
        return True

    def export(self, value: Value, target: str) -> Sequence[str] | None:  # noqa: ARG002
        """Lines of the script that `autotune-amp export --to TARGET` writes; None where that script has no place for it
        or says it already.
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
        """Why nothing can be trained in it on this hardware with these weights, None where it can."""
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
    """A check against fp32 says which modules heal a precision."""

    name = "pinned_modules"
    default = ()
    affects = frozenset({"speed", "memory", "numerics"})
    found_by = None

    def apply(self, training: Any, value: tuple[str, ...]) -> None:
        training.pin(value)

    def label(self, value: tuple[str, ...]) -> str:
        return f"with {len(value)} module{'s' if len(value) > 1 else ''} pinned" if value else ""


class _Plain(Dimension[Any]):
    """One that the training reads of its setting itself, and whose values no check against fp32 depends on."""

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
# Which sizes there are follows from the effective batch size (`search.space`), which accumulation makes up for; a check
# of its own says whether that is exact.
BATCH_SIZE = _Plain("batch_size", 1, "speed", "memory", label="batch {}".format, risk=int, found_by="curves")
ACCUMULATION_STEPS = _Plain("accumulation_steps", 1, "speed", label=lambda num: f"x {num}" if num > 1 else "")
PINNED_MODULES = _PinnedModules()
# Tried where the data loader sets the speed (`search.stages.variants`); the user's own number first.
NUM_WORKERS = _Plain(
    "num_workers",
    None,
    "speed",
    label=lambda num: "" if num is None else f"with {num} loader worker{'' if num == 1 else 's'}",
    risk=lambda num: 0 if num is None else 1 + num,
)
# The baseline's alone; its numbers are those of the precision that it amounts to (`ranking.check_key`).
AS_FOUND = _Plain("as_found", False, "speed", "memory", label=lambda is_so: "as found" if is_so else "")
