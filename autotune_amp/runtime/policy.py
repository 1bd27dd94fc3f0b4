"""Policy of the controller: a pure state machine from signals to actions. No torch.

    STARTUP ──4 clean steps──> STEADY ──trip──> (diagnosis) ──precision──> a lower rung, or pins: STEADY
       │                        ^   │                └───────not precision──> BLAMED ──10 bad steps──> stop
       │ trip: as from STEADY   │   └─trip, nothing to rerun──> a lower rung: PROBATION ──a clean step──> STEADY
       v                        └──a clean step after 200── BLAMED <──3 bad steps: revert──┘

Trips (T1: losses not finite, T2: the scale at its floor, T3: many skips, T4: gradients lost) end in `_step_down`, the
demotion, which `Executor._move` carries out unless it does not fit in memory or the controller is advisory. The
evidence for the thresholds is in studies/README.md (Loss scaling); `studies/overflow_survival` shows them at work.
Every method that makes a transition names the states that it leaves.
"""

from __future__ import annotations

import copy
import math
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.core.documents import Whole
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.core.precisions import Precision
from autotune_amp.precision.modes import MODES

# Steps are updates.
NUM_SETTLING_STEPS = 4  # clean ones that end STARTUP
NUM_PROBATION_STEPS = 3  # bad ones after a tentative demotion that take it back
NUM_BLAMED_STEPS = 10  # bad ones in a row that stop a run whose failures are not precision's
DWELL_STEPS = 200  # spent in a rung before anything that happened there is over
LOSS_WINDOW, LOSS_COUNT = 50, 3  # T1: this many in this many steps, or two in a row
SKIP_WINDOW, SKIP_COUNT, NET_OCTAVES = 200, 8, 3.0  # T3
LOST_SHARE_LIMIT = 0.01  # T4
# If all gradients vanish at this scale they are all below 2**-34, from which no precision could learn.
EMPTY_SCALE = 2.0**10
DIVERGED_GROWTH = 4.0  # times the best loss: no precision fixes a learning rate that is too high
NUM_RECENT_LOSSES = 15  # of which the median is a typical loss
RAISE_FACTOR = 2.0**6  # by which T4 first raises the loss scale
PROMOTION_STEPS, MAX_PROMOTIONS, PROMOTION_HEADROOM = 2000, 3, 2.0**4
LARGEST_SCALE = 2.0**127  # power of two in float32

Names: TypeAlias = Collection[str]
Phase = Literal["STARTUP", "STEADY", "PROBATION", "ADVISED", "BLAMED"]
# Ranges that a state is checked against when it is read; they exclude NaN.
GrowthFactor = Annotated[float, msgspec.Meta(ge=1, le=sys.float_info.max)]
BackoffFactor = Annotated[float, msgspec.Meta(gt=0, le=1)]
GrowthInterval = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
DeviceCount = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # int32 on the device
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
_Saved = TypeVar("_Saved")


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
    precision, or with the pins; None if that is unknown. Without the attention backends `attention` the current
    precision is finite: they are the cause, not the precision.
    """

    reproduced: bool
    finite_in: tuple[Precision, ...] = ()
    culprit: str | None = None
    pins: tuple[str, ...] = ()
    is_precision: bool | None = None
    attention: tuple[str, ...] = ()


MoveKind = Literal["demotion", "revert", "pin", "attention", "rescale", "not_precision", "promotion"]
RecordKind = Literal[MoveKind, "advice", "by_hand", "stop"]


class Action(NamedTuple):
    """Action that the policy requests, with its reason.

    diagnose: rerun the batch to find the cause; answer with `Policy.answer_diagnosis`.
    demotion: step down to `rung`. Tentative if no rerun could show that precision is at fault: the next steps decide.
    revert: go back to the rung before the tentative demotion, since it did not help: precision was not the cause.
    pin: keep `modules` in fp32 and stay in this rung.
    attention: use the attention backends `backends` no more, and stay in this rung.
    rescale: set the loss scale to `scale`.
    not_precision: skip such steps, restore the scale from before the burst, which then only backs off, and undo a
        tentative demotion.
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
    backends: tuple[str, ...] = ()
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

    rung: Whole = 0
    phase: Phase = "STARTUP"
    num_updates: Whole = 0
    dwell: Whole = 0
    bad_run: Whole = 0
    clean_run: Whole = 0
    num_settled: Whole = 0
    quiet_until: Whole = 0
    last_overflow: Whole | None = None
    demoted_from: Whole | None = None
    has_pinned: bool = False
    was_promoted: bool = False
    num_promotions: Whole = 0
    num_failures: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0  # an exponent
    scale_before_burst: Positive = 1.0
    withdrawn: dict[Precision, str] = field(default_factory=dict)
    has_raised: bool = False
    raise_was_undone: bool = False
    num_unreproduced: Whole = 0
    first_loss: Finite | None = None
    best_loss: Finite | None = None
    typical_loss: Finite | None = None
    recent_losses: Annotated[list[Finite], msgspec.Meta(max_length=NUM_RECENT_LOSSES - 1)] = field(default_factory=list)
    bad_losses: list[Whole] = field(default_factory=list)
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


class Policy(PolicyState):
    """State machine that decides the controller's next action.

    `rungs` are the config's own precision and its fallbacks, in order. `can_rerun`: *diagnose* and *probe* can be
    answered; `can_move`: the precision can be changed at all. A move takes effect with `confirm`, so that the caller
    can `refuse` it.
    """

    def __init__(
        self,
        rungs: Sequence[Precision],
        loss_scale: LossScale | None = None,
        *,
        can_rerun: bool = False,
        promotes: bool = False,
    ) -> None:
        super().__init__()
        self.rungs = tuple(rungs)
        self.loss_scale = loss_scale or LossScale()
        self.can_rerun = can_rerun
        self.can_move = True
        self.promotes = promotes
        self.scale = ScaleRule(self.loss_scale)
        self.scale_before_burst = self.scale.scale
        # About the present trip: whether learning has stopped, and the result of a rerun of its batch.
        self._is_failing = False
        self._finite_in: Names | None = None

    @property
    def precision(self) -> Precision:
        """Return the current rung's precision."""
        return self.rungs[self.rung]

    @property
    def is_scaling(self) -> bool:
        """Whether the loss is scaled in the current rung."""
        return MODES[self.precision].takes_scaler

    @property
    def is_watching(self) -> bool:
        """Whether the next signals must not be delayed, since something failed recently."""
        return self.bad_run > 0 or self.phase in ("PROBATION", "BLAMED") or bool(self.bad_losses)

    def forget(self) -> None:
        """Reset all counts towards a trip."""
        self.bad_losses.clear()
        self.octaves.clear()
        self.bad_run = self.clean_run = 0

    def _reset_after_move(self) -> None:
        """Reset the state after a move, to STEADY unless the caller sets another phase."""
        self.forget()
        self.dwell = 0
        self.phase = "STEADY"
        self.demoted_from = None
        self.has_raised = self.raise_was_undone = False

    def _note_loss(self, loss: float) -> None:
        self.recent_losses.append(loss)
        if len(self.recent_losses) == NUM_RECENT_LOSSES:
            self.typical_loss = typical = median(self.recent_losses)
            self.first_loss = typical if self.first_loss is None else self.first_loss
            self.best_loss = typical if self.best_loss is None else min(self.best_loss, typical)
            self.recent_losses.clear()

    @property
    def _loss_growth(self) -> float:
        """Return the recent loss divided by the best; 1.0 if it is no higher than at first, or unknown."""
        if self.first_loss is None or self.best_loss is None or self.typical_loss is None or self.best_loss <= 0:
            return 1.0
        is_telling = len(self.recent_losses) > NUM_RECENT_LOSSES // 3
        lately = median(self.recent_losses) if is_telling else self.typical_loss
        return lately / self.best_loss if lately > self.first_loss else 1.0

    def withdraw(self, precision: Precision, reason: str) -> None:
        """Never step to `precision` from now on; a run that is in it stays."""
        if precision != self.precision:
            self.withdrawn[precision] = reason

    def observe(self, signal: Signal) -> Action | None:
        """Take in the signal of one update, and return the action that it calls for, if any. Leaves any state."""
        self.num_updates += 1
        self.dwell += 1
        if self.dwell == DWELL_STEPS:
            self.demoted_from = None
        if signal.loss is not None and math.isfinite(signal.loss):
            self._note_loss(signal.loss)
        return self._bad(signal) if signal.overflow or signal.loss_nonfinite else self._clean(signal)

    def _clean(self, signal: Signal) -> Action | None:
        self.bad_run = self.num_unreproduced = 0
        self.clean_run += 1
        if self.phase == "ADVISED":
            self.phase = "STARTUP" if self.num_settled < NUM_SETTLING_STEPS else "STEADY"
        if self.is_scaling and self.phase != "BLAMED" and (gained := self.scale.clean()):
            self.octaves.append([self.num_updates, -gained])
        if self.bad_losses and self.num_updates - self.bad_losses[-1] >= LOSS_WINDOW:
            self.bad_losses.clear()
        if self.phase == "STEADY":
            if (lost := signal.lost_share or 0.0) > LOST_SHARE_LIMIT and signal.loss != 0 and self.is_scaling:
                return self._underflow(lost)
            return self._consider_promotion() if self.promotes else None
        if self.phase == "STARTUP":
            self.num_settled += 1
            if self.num_settled == NUM_SETTLING_STEPS:
                self.phase = "STEADY"  # skips count from here on
                self.octaves.clear()
                self._settle_floor()
        elif self.phase == "PROBATION" or self.dwell >= DWELL_STEPS:
            self.phase = "STEADY"  # from PROBATION: stepping down helped; from BLAMED: the burst is over
        return None

    def _settle_floor(self) -> None:
        """Set the floor to 12 octaves below the present scale, on leaving STARTUP."""
        if self.loss_scale.min_scale is None:
            self.scale.floor = max(MIN_LOSS_SCALE, min(1.0, float32(self.scale.scale * 2.0**-12)))

    def _bad(self, signal: Signal) -> Action | None:
        self.clean_run = 0
        if self.phase == "BLAMED" and self.is_scaling and not signal.loss_nonfinite:
            scale_before = self.scale.scale
            self.scale.overflow()
            if self.scale.scale < scale_before:  # a lower scale may be all that is needed
                return None
        self.bad_run += 1
        if self.phase == "BLAMED":
            if self.bad_run != NUM_BLAMED_STEPS:
                return None
            return Action("stop", f"{NUM_BLAMED_STEPS} steps in a row were not finite: it is not precision")
        if self.phase == "PROBATION":
            if self.bad_run < NUM_PROBATION_STEPS or self.demoted_from is None:
                return None
            reason = f"{NUM_PROBATION_STEPS} steps in {self.precision} were not finite either: it was not precision"
            return Action("revert", reason)
        if self.bad_run == 1 and self.is_scaling:
            self.scale_before_burst = self.scale.scale
        is_past_scaling = signal.loss_nonfinite or not self.is_scaling
        what = "loss" if signal.loss_nonfinite else "gradient"
        action = self._bad_loss(what) if is_past_scaling else self._overflow()
        if self.phase == "ADVISED" and self.bad_run == NUM_BLAMED_STEPS:
            return Action("stop", f"{NUM_BLAMED_STEPS} steps in a row were not finite", is_precision=True)
        return action

    def _bad_loss(self, what: str) -> Action | None:
        """Handle T1. No back-off: rescaling cannot help the loss, and without a scale there is nothing to rescale."""
        now = self.num_updates
        self.bad_losses = [*(update for update in self.bad_losses if update > now - LOSS_WINDOW), now]
        if now - 1 in self.bad_losses:
            return self._trip(f"the {what} was not finite twice running", is_failing=True)
        if len(self.bad_losses) >= LOSS_COUNT:
            return self._trip(f"the {what} was not finite {LOSS_COUNT} times in {LOSS_WINDOW} steps", is_failing=True)
        return None

    def _overflow(self) -> Action | None:
        """Handle T2 and T3, in STARTUP only T2: the first descent to a working scale is normal, however long."""
        crosses = self.scale.would_cross_floor
        self.octaves.append([self.num_updates, self.scale.overflow()])
        self.last_overflow = self.num_updates
        self.raise_was_undone |= self.has_raised
        if crosses:
            return self._trip(f"the loss scale would cross its floor of {self.scale.floor:g}", is_failing=True)
        if self.phase == "STARTUP":
            return None
        self.octaves = [entry for entry in self.octaves if entry[0] > self.num_updates - SKIP_WINDOW]
        lost = [octaves for _, octaves in self.octaves]
        num_skips, net = sum(octaves >= 0 for octaves in lost), sum(lost)
        if num_skips < SKIP_COUNT or net < NET_OCTAVES:
            return None
        self.scale_before_burst = float32(min(self.scale.max_scale, self.scale.scale * 2.0**net))
        return self._trip(f"{num_skips} skips in {SKIP_WINDOW} steps, and {net:g} octaves of loss scale lost")

    def _underflow(self, lost_share: float) -> Action | None:
        """Handle T4, from STEADY. First try a higher scale: it costs a skip at worst, stepping down costs speed."""
        if self.num_updates < self.quiet_until:
            return None
        reason = f"{lost_share:.1%} of the gradient is too small for fp16 at scale {self.scale.scale:g}"
        is_held_down = self.last_overflow is not None and self.num_updates - self.last_overflow < DWELL_STEPS
        if not (is_held_down or self.raise_was_undone) and self.scale.scale < self.scale.max_scale:
            return Action("rescale", reason, scale=min(self.scale.max_scale, self.scale.scale * RAISE_FACTOR))
        self._is_failing = False
        return self._step_down(reason, None)

    def usable_lost_share(self, lost_share: float | None) -> float | None:
        """Return the lost share, or None if the whole gradient is zero, as with a constant loss."""
        return None if lost_share == 1.0 and self.scale.scale >= EMPTY_SCALE else lost_share

    def _trip(self, reason: str, *, is_failing: bool = False) -> Action | None:
        self._is_failing = is_failing
        if self.num_updates < self.quiet_until:
            if is_failing and self._can_only_advise:
                self._await_stop()
            return None
        if (growth := self._loss_growth) > DIVERGED_GROWTH:
            return Action("not_precision", f"{reason}, and the loss is {growth:.3g} times its best: it diverges")
        return Action("diagnose", reason) if self.can_rerun else self._step_down(reason, None)

    @property
    def _can_only_advise(self) -> bool:
        """Whether a lower precision may help, but the controller cannot change it."""
        return not self.can_move and (self.is_scaling or self.rung + 1 < len(self.rungs))

    def _await_stop(self) -> None:
        """Prepare to stop, leaving STARTUP or STEADY: nothing is learned, and the controller cannot change that."""
        if self.phase in ("STARTUP", "STEADY"):
            self.phase = "ADVISED"
            self.bad_run = min(self.bad_run, 2)  # the first descent of the loss scale may have been long

    def advise(self) -> None:
        """Note that the user was advised. Leaves STARTUP and STEADY if nothing is learned any more."""
        bad_run = self.bad_run
        self.decline()
        if self._is_failing:
            self.bad_run = bad_run
            self._await_stop()

    def answer_diagnosis(self, reason: str, finding: DiagnosisResult) -> Action | None:
        """Return the action that follows from the finding of a *diagnose*. Leaves STARTUP and STEADY."""
        if not finding.reproduced:
            self.num_unreproduced += 1
            if self.num_unreproduced > 1:  # without a step since: the closure misses the failure
                return self._step_down(f"{reason}, and rerunning the latest batch does not show why", None)
            self.decline(NUM_BLAMED_STEPS)
            return Action("warn", f"{reason}, but the batch rerun was finite: nothing changed")
        reason += f", first in {finding.culprit}" if finding.culprit else ""
        if finding.attention:
            return Action("attention", reason, backends=finding.attention)
        if finding.is_precision is False:
            return Action("not_precision", f"{reason}, in fp32 too: it is not precision")
        if finding.is_precision and finding.pins and not self.has_pinned:
            return Action("pin", reason, modules=finding.pins)
        return self._step_down(reason, finding.finite_in if finding.is_precision else None)

    def _step_down(self, reason: str, finite_in: Names | None) -> Action:
        """Return the action for stepping down. `finite_in` is the result of a rerun, None without one."""
        self._finite_in = finite_in
        if self._is_failing and self._can_only_advise:
            return Action("advise", reason)
        below = self.rungs[self.rung + 1 :]
        for name in below:
            if name not in self.withdrawn and (finite_in is None or name in finite_in):
                return Action("demotion", reason, self.rungs.index(name), is_tentative=finite_in is None)
        why = "".join(f"; {name}: {why}" for name, why in self.withdrawn.items() if name in below)
        if finite_in is not None or (below and self._is_failing):
            self.decline()
            return Action("stop", f"{reason}, and no rung is left that fits{why}", is_precision=True)
        if self._is_failing:
            return Action("not_precision", f"{reason}; there is no rung to try")
        self.decline()
        return Action("warn", f"{reason}; there is no rung to step down to{why}")

    def refuse(self, demotion: Action, reason: str) -> Action:
        """Withdraw the rung of a demotion that does not fit, and return the action to take instead."""
        self.withdrawn[self.rungs[demotion.rung]] = reason
        return self._step_down(demotion.reason, self._finite_in)

    def decline(self, num_quiet: int = DWELL_STEPS) -> None:
        """Ignore trips for `num_quiet` updates, since nothing can be done about them (the caller may be advisory)."""
        self.forget()
        self.quiet_until = self.num_updates + num_quiet

    def confirm(self, move: Action) -> Action | None:
        """Update the state after a move was carried out, and return a following action, if any. Leaves any state."""
        if move.kind == "rescale":
            self.octaves.append([self.num_updates, -math.log2(move.scale / self.scale.scale)])
            self.scale.set(move.scale)
            self.has_raised = True
            return None
        was_starting = self.phase == "STARTUP"
        rung_before = self.rung if self.demoted_from is None else self.demoted_from
        self._reset_after_move()
        if move.kind == "demotion":
            self.rung = move.rung
            self.num_failures += self.was_promoted
            self.was_promoted = False
            if move.is_tentative:
                self.phase = "PROBATION"
                self.demoted_from = rung_before
        else:
            self.scale.set(self.scale_before_burst)
        if move.kind == "pin":
            self.has_pinned = True
        elif move.kind == "promotion":
            self.rung = move.rung
            self.num_promotions += 1
            self.was_promoted = True
        elif move.kind in ("not_precision", "revert"):
            self.rung = rung_before
            self.phase = "BLAMED"
        if was_starting:
            self._settle_floor()
        return Action("stop", move.reason) if move.kind == "revert" else None

    def rung_of(self, precision: Precision) -> int:
        """Return the rung of a precision. Raises `InvalidRequestError` if there is none."""
        if precision not in self.rungs:
            raise InvalidRequestError(
                f"{precision!r} is not among this run's rungs, {', '.join(self.rungs)}.",
                f'Name it in the config: AmpConfig(..., fallback=["{precision}"]).',
            )
        return self.rungs.index(precision)

    def move_by_hand(self, precision: Precision) -> None:
        """Go to the rung of `precision`, from any state to STEADY."""
        self.rung = self.rung_of(precision)
        if self.phase == "STARTUP":
            self._settle_floor()
        self._reset_after_move()

    def _consider_promotion(self) -> Action | None:
        above = [rung for rung in range(self.rung) if self.rungs[rung] not in self.withdrawn]
        is_time = self.clean_run >= PROMOTION_STEPS * 2**self.num_failures and self.num_promotions < MAX_PROMOTIONS
        if not (is_time and above and self.can_rerun):
            return None
        scale = min(self.scale.max_scale, self.scale_before_burst * PROMOTION_HEADROOM)
        return Action("probe", f"{self.clean_run} clean steps", above[-1], scale)

    def probed(self, probe: Action, *, is_finite: bool) -> Action | None:
        """Return the action after a *probe*, from STEADY: a promotion, or None and a wait that is twice as long."""
        if is_finite:
            at = f" at scale {probe.scale:g}" if MODES[self.rungs[probe.rung]].takes_scaler else ""
            return Action("promotion", f"{probe.reason}, and finite{at}", probe.rung)
        self.num_failures += 1
        self.clean_run = 0
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the policy's whole state in plain types."""
        state = copy.deepcopy({entry.name: getattr(self, entry.name) for entry in fields(PolicyState)})
        rule = {name: getattr(self.scale, name) for name in SavedRule.__struct_fields__}
        return {"policy": state, "precision": self.precision, "loss_scale": rule}

    def validated(self, state: Mapping[str, Any]) -> SavedState:
        """Validate and return a saved state. Raises `FormatError` or `InvalidRequestError`, and changes nothing.

        The rungs may begin further down than the saved ones: a run may continue from the config of a `DemotedError`.
        """
        saved = converted(state, SavedState)
        check_scale(saved.loss_scale.scale)
        if saved.precision not in self.rungs:
            raise FormatError(
                f"The state was saved in {saved.precision}; this run's rungs are {', '.join(self.rungs)}.",
                "Make the controller from the config that the saved run used, or that its DemotedError carried.",
            )
        phase, rung, demoted_from = saved.policy.phase, saved.policy.rung, saved.policy.demoted_from
        if phase == "PROBATION" if demoted_from is None else demoted_from >= rung:
            raise FormatError(
                f"The controller's state is damaged: it says {phase} in rung {rung}, stepped down from {demoted_from}.",
                "Load an earlier checkpoint.",
            )
        return saved

    def restore(self, saved: SavedState) -> None:
        """Restore a state that `validated` has validated."""
        vars(self.scale).update(msgspec.structs.asdict(saved.loss_scale))
        self.scale.set(check_scale(saved.loss_scale.scale))  # the bounds may have changed
        withdrawn = self.withdrawn  # precisions that this machine and model cannot run
        vars(self).update(vars(saved.policy))
        self.withdrawn = {**withdrawn, **self.withdrawn}
        rung_saved, self.rung = self.rung, self.rungs.index(saved.precision)
        if self.rung != rung_saved and self.demoted_from is not None:  # no way back up: this rung is an ordinary one
            self.demoted_from = None
            self.phase = "STEADY" if self.phase == "PROBATION" else self.phase
