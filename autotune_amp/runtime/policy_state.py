"""Inputs, outputs and memory of the controller's policy: plain data, no torch.

A rung is an index into the precisions, with the config's own precision first.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import FormatError, InvalidRequestError

NUM_RECENT_LOSSES = 15
LARGEST_SCALE = 2.0**127  # power of two in float32
_Saved = TypeVar("_Saved")

Phase = Literal["STARTUP", "STEADY", "PROBATION", "ADVISED", "BLAMED"]
# Ranges that a state is checked against when it is read; they exclude NaN.
GrowthFactor = Annotated[float, msgspec.Meta(ge=1, le=sys.float_info.max)]
BackoffFactor = Annotated[float, msgspec.Meta(gt=0, le=1)]
GrowthInterval = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
DeviceCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # int32 on the device
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]


class Signal(NamedTuple):
    """Observation of one `update()`. `lost_share` is an occasional estimate of the gradient's share lost by fp16."""

    overflow: bool = False
    loss_nonfinite: bool = False
    lost_share: float | None = None
    loss: float | None = None


class DiagnosisResult(NamedTuple):
    """Result of rerunning the batch, the same on every rank.

    `reproduced`: the batch is not finite again, or an earlier pass of its window may be the cause. `culprit` names the
    place where non-finite numbers begin. `finite_in` are the lower rungs' precisions in which loss and gradients are
    finite. With `pins` kept in fp32 the current precision is finite. `is_precision`: the batch is finite in a safer
    precision, or with the pins; None if that is unknown.
    """

    reproduced: bool
    finite_in: tuple[Precision, ...] = ()
    culprit: str | None = None
    pins: tuple[str, ...] = ()
    is_precision: bool | None = None


MoveKind = Literal["demotion", "revert", "pin", "rescale", "not_precision", "promotion"]
RecordKind = Literal[MoveKind, "advice", "by_hand", "stop"]


class Action(NamedTuple):
    """Action that the policy requests, with its reason.

    diagnose: rerun the batch to find the cause; answer with `Policy.answer_diagnosis`.
    demotion: step down to `rung`. Tentative if no rerun could show that precision is at fault: the next steps decide.
    revert: go back to the rung before the tentative demotion, since it did not help: precision was not the cause.
    pin: keep `modules` in fp32 and stay in this rung.
    rescale: set the loss scale to `scale`.
    not_precision: skip such steps, hold the scale from before the burst, and undo a tentative demotion.
    probe: run the current batch in `rung` at `scale` without stepping; answer with `Policy.probed`.
    promotion: go back up to `rung`.
    stop: end the run; `is_precision` tells whether precision was the cause.
    advise: a lower precision may help, but the controller cannot set it: tell the user how to allow it.
    warn: nothing can be done about it, but the user should know.
    """

    kind: MoveKind | Literal["diagnose", "probe", "stop", "warn", "advise"]
    reason: str = ""
    rung: int = 0
    scale: float = 0.0
    modules: tuple[str, ...] = ()
    is_tentative: bool = False
    is_precision: bool = False


def float32(value: float) -> float:
    """Return `value` rounded as torch's kernel rounds a new scale: computed in double precision, stored in float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class ScaleRule:
    """Loss scale and its update rule, GradScaler's, bit for bit as devices compute it.

    An overflow multiplies the scale by `backoff_factor` once `hysteresis` overflows were counted since it last grew;
    `growth_interval` steps without overflow multiply it by `growth_factor`. It stays within [`floor`, `max_scale`].
    """

    def __init__(self, loss_scale: LossScale) -> None:
        self.scale = float32(loss_scale.init_scale)
        self.growth_tracker = 0
        self.growth_factor = loss_scale.growth_factor
        self.backoff_factor = loss_scale.backoff_factor
        self.growth_interval = loss_scale.growth_interval
        self.hysteresis = self.hysteresis_left = loss_scale.hysteresis
        self.floor = float32(MIN_LOSS_SCALE if loss_scale.min_scale is None else loss_scale.min_scale)
        self.max_scale = float32(min(loss_scale.max_scale, LARGEST_SCALE))

    @property
    def would_cross_floor(self) -> bool:
        """Whether the next overflow would lower the scale below the floor."""
        return self.hysteresis_left <= 1 and self.scale * self.backoff_factor < self.floor

    def overflow(self) -> float:
        """Count an overflow. Return the octaves that the scale loses by it, without the floor's limit."""
        self.growth_tracker = 0
        self.hysteresis_left -= 1
        if self.hysteresis_left > 0:
            return 0.0
        self.scale = max(self.floor, float32(self.scale * self.backoff_factor))
        return -math.log2(self.backoff_factor)

    def clean(self) -> float:
        """Count a step without overflow. Return the octaves gained, 0 if the scale did not grow."""
        self.growth_tracker += 1
        if self.growth_tracker < self.growth_interval:
            return 0.0
        self.growth_tracker = 0
        self.hysteresis_left = self.hysteresis
        before = self.scale
        self.scale = min(self.max_scale, float32(before * self.growth_factor))
        return math.log2(self.scale / before)

    def set(self, scale: float) -> None:
        """Set the scale within its bounds. The growth tracker is kept, as in GradScaler."""
        self.scale = self.bounded(scale)

    def bounded(self, scale: float) -> float:
        """Return the number within the scale's bounds that is nearest to `scale`, rounded to float32."""
        return float32(min(self.max_scale, max(self.floor, scale)))


def check_scale(scale: object) -> float:
    """Return `scale` as a float. Raises `InvalidRequestError` unless it is a finite number above 0."""
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not 0 < scale <= sys.float_info.max:  # type: ignore[operator] # a number; not NaN either
        raise InvalidRequestError(
            f"The loss scale given is {scale!r}; it must be a finite number above 0. At 0 or infinity GradScaler "
            "turns the weights into NaN or never steps again.",
            "Load a checkpoint from before the scale collapsed, or leave the controller's state out and start at "
            "the config's init_scale.",
        )
    return float(scale)  # type: ignore[arg-type] # a number


def converted(state: object, what: type[_Saved]) -> _Saved:
    """Return a copy of a saved state in the given types. Raises `FormatError` for a missing part or a wrong type."""
    try:
        return msgspec.convert(state, what)
    except msgspec.ValidationError as error:
        raise FormatError(f"The controller's state is damaged: {error}.", "Load an earlier checkpoint.") from error


@dataclass
class PolicyState:
    """State of the policy. Counters are in updates.

    `bad_losses` are the updates with a non-finite loss, for T1; `octaves` holds [update, octaves of loss scale lost
    (negative: gained)], for T3. `demoted_from` is the rung before a tentative demotion, until the run has stayed below
    it long enough; `first_loss`, `best_loss` and `typical_loss` are medians of NUM_RECENT_LOSSES losses: the first, the
    lowest and the latest; `withdrawn` are precisions not to step to, with the reason.
    """

    rung: Count = 0
    phase: Phase = "STARTUP"
    num_updates: Count = 0
    num_skips: Count = 0
    dwell: Count = 0
    bad_run: Count = 0
    clean_run: Count = 0
    num_settled: Count = 0
    quiet_until: Count = 0
    last_overflow: Count | None = None
    demoted_from: Count | None = None
    has_pinned: bool = False
    was_promoted: bool = False
    num_promotions: Count = 0
    num_failures: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0  # an exponent
    scale_before_burst: Positive = 1.0
    withdrawn: dict[Precision, str] = field(default_factory=dict)
    has_raised: bool = False
    raise_was_undone: bool = False
    num_unreproduced: Count = 0
    first_loss: Finite | None = None
    best_loss: Finite | None = None
    typical_loss: Finite | None = None
    recent_losses: Annotated[list[Finite], msgspec.Meta(max_length=NUM_RECENT_LOSSES - 1)] = field(default_factory=list)
    bad_losses: list[Count] = field(default_factory=list)
    octaves: list[Annotated[list[int | Finite], msgspec.Meta(min_length=2, max_length=2)]] = field(default_factory=list)


class SavedRule(msgspec.Struct):
    """Parts of a `ScaleRule` that change during training."""

    scale: object  # checked by `check_scale`
    growth_tracker: DeviceCount
    hysteresis_left: Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]  # negative if the floor holds the scale
    floor: Annotated[float, msgspec.Meta(ge=MIN_LOSS_SCALE, le=LARGEST_SCALE)]


class SavedState(msgspec.Struct):
    """Saved state of a policy."""

    policy: PolicyState
    precision: Precision
    loss_scale: SavedRule


def held(part: str, name: str, kind: Any = None) -> Any:
    """Return a property for an attribute of GradScaler that a part of the controller holds, of this `kind`."""

    def set_it(controller: Any, value: Any) -> None:
        try:
            setattr(getattr(controller, part), name, value if kind is None else msgspec.convert(value, kind))
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f"The {name} given is {value!r}: {error}.", "Growth is by 1 or more, backing off by 1 or less."
            ) from error

    return property(operator.attrgetter(f"{part}.{name}"), set_it)
