"""The pure state machine of the controller: a signal in, an action out. No torch.

    STARTUP ──4 clean steps──> STEADY ──trip──> (diagnosis) ──precision──> a lower rung, or pins: STEADY
       │                        ^   │                └───────not precision──> BLAMED ──10 bad steps──> stop
       │ trip: as from STEADY   │   └─trip, nothing to rerun──> a lower rung: PROBATION ──a clean step──> STEADY
       v                        └──a clean step after 200── BLAMED <──3 bad steps: revert──┘

Thresholds are those of the specification this project keeps (loss scaling, section 4); `studies/overflow_survival`
shows them at work. Every method that takes a step of the machine says which states it leaves.
"""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, TypeAlias

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.precision.modes import MODES
from autotune_amp.runtime import actions
from autotune_amp.runtime.actions import Action, Move, Signal

NUM_SETTLING_STEPS = 4
NUM_PROBATION_STEPS = 3
NUM_BLAMED_STEPS = 10
DWELL_STEPS = 200
LOSS_WINDOW, LOSS_RUN, LOSS_COUNT = 50, 2, 3  # T1
SKIP_WINDOW, SKIP_COUNT, NET_OCTAVES = 200, 8, 3.0  # T3
LOST_SHARE_LIMIT = 0.01  # T4
DIVERGED_GROWTH = 4.0  # of the typical loss: no precision mends what the learning rate did
RAISE_FACTOR = 2.0**6
PROMOTION_STEPS, MAX_PROMOTIONS, PROMOTION_HEADROOM = 2000, 3, 2.0**4
NUM_RECENT_LOSSES = 15

Names: TypeAlias = Collection[str]
_LARGEST_SCALE = 2.0**127  # power of two in float32


def float32(value: float) -> float:
    """`value` rounded as torch's kernel rounds the new scale: computed in double precision, stored in float32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


class ScaleRule:
    """The loss scale and what an optimizer step does to it, bit for bit as devices compute it: GradScaler's rule.

    An overflow multiplies the scale by `backoff_factor` once `hysteresis` overflows were counted since it last grew;
    `growth_interval` steps without one multiply it by `growth_factor`. It stays within [`floor`, `max_scale`].
    """

    _STATE = ("scale", "growth_tracker", "hysteresis_left", "floor")

    def __init__(self, loss_scale: LossScale) -> None:
        self.scale = float32(loss_scale.init_scale)
        self.growth_tracker = 0
        self.growth_factor = loss_scale.growth_factor
        self.backoff_factor = loss_scale.backoff_factor
        self.growth_interval = loss_scale.growth_interval
        self.hysteresis = self.hysteresis_left = loss_scale.hysteresis
        self.floor = float32(MIN_LOSS_SCALE if loss_scale.min_scale is None else loss_scale.min_scale)
        self.max_scale = float32(min(loss_scale.max_scale, _LARGEST_SCALE))

    @property
    def would_cross_floor(self) -> bool:
        """Whether the next overflow is one that the floor alone keeps from lowering the scale in full."""
        return self.hysteresis_left <= 1 and self.scale * self.backoff_factor < self.floor

    def overflow(self) -> float:
        """Count an overflow; returns the octaves that it costs, those suppressed by the floor included."""
        self.growth_tracker = 0
        self.hysteresis_left -= 1
        if self.hysteresis_left > 0:
            return 0.0
        self.scale = max(self.floor, float32(self.scale * self.backoff_factor))
        return -math.log2(self.backoff_factor)

    def clean(self) -> float:
        """Count a step without overflow; returns the octaves gained, 0 where the scale did not grow."""
        self.growth_tracker += 1
        if self.growth_tracker < self.growth_interval:
            return 0.0
        self.growth_tracker = 0
        self.hysteresis_left = self.hysteresis
        before = self.scale
        self.scale = min(self.max_scale, float32(before * self.growth_factor))
        return math.log2(self.scale / before)

    def set(self, scale: float) -> None:
        """Set the scale, within its bounds; the tracker is kept, as GradScaler keeps it."""
        self.scale = float32(min(self.max_scale, max(self.floor, scale)))

    def state_dict(self) -> dict[str, float | int]:
        """What changes while training; plain numbers."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; raises `InvalidRequestError` for one that lacks a part or cannot work."""
        _require_parts(state, self._STATE)
        check_scale(state["scale"])
        for name in self._STATE:
            setattr(self, name, state[name])
        self.set(state["scale"])  # the bounds may be others now


def check_scale(scale: object) -> float:
    """`scale` as a float; raises `InvalidRequestError` unless it is a finite number above 0."""
    if not isinstance(scale, (int, float)) or isinstance(scale, bool) or not math.isfinite(scale) or scale <= 0:
        raise InvalidRequestError(
            f"The loss scale given is {scale!r}; it must be a finite number above 0. At 0 or infinity GradScaler "
            "turns the weights into NaN or never steps again.",
            "Load a checkpoint from before the scale collapsed, or leave the controller's state out and start at "
            "the config's init_scale.",
        )
    return float(scale)


def _require_parts(state: Mapping[str, Any], names: Names) -> None:
    if missing := sorted(set(names) - set(state)):
        raise FormatError(f"The controller's state lacks {', '.join(missing)}.", "Load a state that it saved.")


@dataclass
class PolicyState:
    """Counters are in updates. `bad_losses` are the updates with a non-finite loss, for T1; `octaves` holds
    [update, octaves of loss scale lost (negative: gained)], for T3. `demoted_from` is the rung before a tentative
    demotion, until the run has dwelt below it; `first_loss`, `best_loss` and `typical_loss` are medians of
    NUM_RECENT_LOSSES losses: the first ones, the lowest and the latest;
    `withdrawn` the precisions not to step to, with the reason.
    """

    rung: int = 0
    phase: str = "STARTUP"
    num_updates: int = 0
    num_skips: int = 0
    dwell: int = 0
    bad_run: int = 0
    clean_run: int = 0
    num_settled: int = 0
    quiet_until: int = 0
    last_overflow: int | None = None
    demoted_from: int | None = None
    has_pinned: bool = False
    startup_was_cleared: bool = False
    was_promoted: bool = False
    num_promotions: int = 0
    num_failures: int = 0
    scale_before_burst: float = 1.0
    withdrawn: dict[str, str] = field(default_factory=dict)
    has_raised: bool = False
    raise_was_undone: bool = False
    num_unreproduced: int = 0
    first_loss: float | None = None
    best_loss: float | None = None
    typical_loss: float | None = None
    recent_losses: list[float] = field(default_factory=list)
    bad_losses: list[int] = field(default_factory=list)
    octaves: list[list[float]] = field(default_factory=list)


class Policy(PolicyState):
    """Where the controller stands and what it does next.

    `rungs` are the config's own precision and its fallbacks, in order. `can_rerun` says that a `Diagnose` or `Probe`
    can be answered. An action that moves takes effect with `confirm`, so that the caller can `refuse` it.
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
        self.promotes = promotes
        self.scale = ScaleRule(self.loss_scale)
        self.scale_before_burst = self.scale.scale
        # Of the trip being dealt with: nothing is learned any more; or the loss scale may only have begun too high.
        self._is_failing = self._is_descending = False

    @property
    def precision(self) -> Precision:
        """The current rung's precision."""
        return self.rungs[self.rung]

    @property
    def is_scaling(self) -> bool:
        """Whether the loss is scaled in the current rung."""
        return MODES[self.precision].takes_scaler

    @property
    def is_watching(self) -> bool:
        """Whether something went wrong so lately that the next signals should not wait."""
        return self.bad_run > 0 or self.phase in ("PROBATION", "BLAMED") or bool(self.bad_losses)

    def forget(self) -> None:
        """What counts towards a trip counts anew."""
        self.bad_losses.clear()
        self.octaves.clear()
        self.bad_run = self.clean_run = 0

    def _arrive(self) -> None:
        """A move was made: to STEADY, unless the move says otherwise."""
        self.forget()
        self.dwell = 0
        self.phase = "STEADY"
        self.demoted_from = None
        self.has_raised = self.raise_was_undone = False

    def _note_loss(self, loss: float) -> None:
        """Remember how the loss develops; what is not finite says nothing of that."""
        if not math.isfinite(loss):
            return
        self.recent_losses.append(loss)
        if len(self.recent_losses) == NUM_RECENT_LOSSES:
            self.typical_loss = median(self.recent_losses)
            self.first_loss = self.typical_loss if self.first_loss is None else self.first_loss
            self.best_loss = self.typical_loss if self.best_loss is None else min(self.best_loss, self.typical_loss)
            self.recent_losses.clear()

    @property
    def _loss_growth(self) -> float:
        """How many times its best the loss is lately; 1.0 where it is no higher than at first, or cannot be said."""
        if self.first_loss is None or self.best_loss is None or self.typical_loss is None or self.best_loss <= 0:
            return 1.0
        is_telling = len(self.recent_losses) > NUM_RECENT_LOSSES // 3
        lately = median(self.recent_losses) if is_telling else self.typical_loss
        return lately / self.best_loss if lately > self.first_loss else 1.0

    def withdraw(self, precision: Precision, reason: str) -> None:
        """Never step to `precision`; the rung that the run is in stays."""
        if precision != self.precision:
            self.withdrawn[precision] = reason

    def observe(self, signal: Signal) -> Action | None:
        """One update. Leaves any state."""
        self.num_updates += 1
        self.dwell += 1
        if self.dwell == DWELL_STEPS:
            self.demoted_from = None
        if signal.loss is not None:
            self._note_loss(signal.loss)
        return self._bad(signal) if signal.overflow or signal.loss_nonfinite else self._clean(signal)

    def _clean(self, signal: Signal) -> Action | None:
        self.bad_run = self.num_unreproduced = 0
        self.clean_run += 1
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
                self.phase = "STEADY"  # from here on skips count
                self.octaves.clear()
                self._settle_floor()
        elif self.phase == "PROBATION" or self.dwell >= DWELL_STEPS:
            self.phase = "STEADY"  # from PROBATION: stepping down helped; from BLAMED: the burst is long over
        return None

    def _settle_floor(self) -> None:
        """Leaving STARTUP: the floor is 12 octaves under what the run settled at."""
        if self.loss_scale.min_scale is None:
            self.scale.floor = max(MIN_LOSS_SCALE, min(1.0, float32(self.scale.scale * 2.0**-12)))

    def _bad(self, signal: Signal) -> Action | None:
        self.num_skips += 1
        self.clean_run = 0
        self.bad_run += 1
        if self.phase == "BLAMED":
            reason = f"{NUM_BLAMED_STEPS} steps in a row were not finite, and precision is not at fault"
            return actions.Stop(reason, False) if self.bad_run == NUM_BLAMED_STEPS else None
        if self.phase == "PROBATION":
            if self.bad_run < NUM_PROBATION_STEPS or self.demoted_from is None:
                return None
            reason = f"{NUM_PROBATION_STEPS} steps in {self.precision} were not finite either: it was not precision"
            return actions.Revert(self.demoted_from, reason)
        if self.bad_run == 1 and self.is_scaling:
            self.scale_before_burst = self.scale.scale
        if signal.loss_nonfinite or not self.is_scaling:
            return self._bad_loss("loss" if signal.loss_nonfinite else "gradient")
        return self._overflow()

    def _bad_loss(self, what: str) -> Action | None:
        """T1. No backing off: rescaling cannot help a loss, and without a scale there is nothing to rescale."""
        since = self.num_updates - LOSS_WINDOW
        self.bad_losses = [update for update in self.bad_losses if update > since] + [self.num_updates]
        run = self.bad_losses[-LOSS_RUN:]
        if run[-1] - run[0] == LOSS_RUN - 1 and len(run) == LOSS_RUN:
            return self._trip(f"the {what} was not finite {LOSS_RUN} times running", is_failing=True)
        if len(self.bad_losses) >= LOSS_COUNT:
            what += f" was not finite {len(self.bad_losses)} times in {LOSS_WINDOW} steps"
            return self._trip(f"the {what}", is_failing=True)
        return None

    def _overflow(self) -> Action | None:
        """T2 and T3. From STARTUP only T2: the first descent to a scale that works is no fault, however long."""
        crosses = self.scale.would_cross_floor
        before = self.scale.scale
        self.octaves.append([self.num_updates, self.scale.overflow()])
        self.last_overflow = self.num_updates
        self.raise_was_undone |= self.has_raised
        if crosses:
            return self._trip(f"the loss scale would cross its floor of {self.scale.floor:g}", is_failing=True)
        if self.phase == "STARTUP":
            is_below = before >= self.loss_scale.floor > self.scale.scale
            if is_below and self.can_rerun and not self.startup_was_cleared:
                reason = f"the loss scale fell to {self.scale.scale:g} before any step was taken"
                return self._trip(reason, is_descending=True)
            return None
        self.octaves = [entry for entry in self.octaves if entry[0] > self.num_updates - SKIP_WINDOW]
        lost = [octaves for _, octaves in self.octaves]
        num_skips, net = sum(octaves >= 0 for octaves in lost), sum(lost)
        if num_skips >= SKIP_COUNT and net >= NET_OCTAVES:
            self.scale_before_burst = float32(min(self.scale.max_scale, self.scale.scale * 2.0**net))
            return self._trip(f"{num_skips} skips in {SKIP_WINDOW} steps, and {net:g} octaves of loss scale lost")
        return None

    def _underflow(self, lost_share: float) -> Action | None:
        """T4, from STEADY. A higher scale is tried first: it costs a skip at worst, stepping down costs speed."""
        reason = f"{lost_share:.1%} of the gradient is too small for fp16 at scale {self.scale.scale:g}"
        if self.num_updates < self.quiet_until:
            return None
        is_held_down = self.last_overflow is not None and self.num_updates - self.last_overflow < DWELL_STEPS
        if not (is_held_down or self.raise_was_undone) and self.scale.scale < self.scale.max_scale:
            return actions.Rescale(min(self.scale.max_scale, self.scale.scale * RAISE_FACTOR), reason)
        self._is_failing = False
        return self._step_down(reason, None)

    def _trip(self, reason: str, *, is_failing: bool = False, is_descending: bool = False) -> Action | None:
        self._is_failing, self._is_descending = is_failing, is_descending
        if self.num_updates < self.quiet_until:
            return None
        if self._loss_growth > DIVERGED_GROWTH:
            growth = f"{self._loss_growth:.3g} times its best, above where it began"
            return actions.Blame(self.scale_before_burst, f"{reason}, and the loss has grown to {growth}: it diverges")
        return actions.Diagnose(reason) if self.can_rerun else self._step_down(reason, None)

    def judge(
        self, reason: str, *, reproduced: bool, is_precision: bool | None, finite_in: Names, pins: Names = ()
    ) -> Action | None:
        """The answer to `Diagnose`; `is_precision` is None where it could not be found out. Leaves STARTUP, STEADY."""
        if not reproduced:
            self.num_unreproduced += 1
            if self.num_unreproduced > 1:  # and no step taken since: the closure does not rerun what fails
                return self._step_down(f"{reason}, and rerunning the latest batch does not show why", None)
            self.decline(NUM_BLAMED_STEPS)
            return actions.Warn(f"{reason}, but the batch rerun was finite: nothing changed")
        if is_precision is False:
            return actions.Blame(self.scale_before_burst, f"{reason}, in fp32 too: it is not precision")
        if self._is_descending:
            self.startup_was_cleared = True
            return None
        if is_precision is None:
            return self._step_down(reason, None)
        if pins and not self.has_pinned:
            return actions.Pin(tuple(pins), reason)
        return self._step_down(reason, finite_in)

    def _step_down(self, reason: str, finite_in: Names | None) -> Action:
        """`finite_in` is the evidence of a rerun, None without one."""
        for index in range(self.rung + 1, len(self.rungs)):
            name = self.rungs[index]
            if name not in self.withdrawn and (finite_in is None or name in finite_in):
                return actions.Demote(index, reason, is_tentative=finite_in is None)
        below = self.rungs[self.rung + 1 :]
        why = "".join(f"; {name}: {self.withdrawn[name]}" for name in below if name in self.withdrawn)
        if finite_in is not None or (below and self._is_failing):
            self.decline()
            return actions.Stop(f"{reason}, and no rung is left that fits{why}", True)
        if self._is_failing:
            which = "there is no rung to try" if MODES[self.precision].uses_autocast else "it is not precision"
            return actions.Blame(self.scale_before_burst, f"{reason}; {which}")
        self.decline()
        return actions.Warn(f"{reason}; there is no rung to step down to{why}")

    def refuse(self, action: actions.Demote, reason: str, finite_in: Names | None = None) -> Action:
        """The rung of `action` does not fit; what to do instead."""
        self.withdrawn[self.rungs[action.rung]] = reason
        return self._step_down(action.reason, finite_in)

    def decline(self, num_quiet: int = DWELL_STEPS) -> None:
        """Nothing can be done about a trip (the caller may be advisory): no other for `num_quiet` updates."""
        self.forget()
        self.quiet_until = self.num_updates + num_quiet

    def confirm(self, move: Move) -> actions.Stop | None:
        """`move` was carried out. Leaves any state for the one that `move` leads to."""
        if isinstance(move, actions.Rescale):
            self.octaves.append([self.num_updates, -math.log2(move.scale / self.scale.scale)])
            self.scale.set(move.scale)
            self.has_raised = True
            return None
        from_rung, was_starting = self.rung, self.phase == "STARTUP"
        rung_to_return_to = from_rung if self.demoted_from is None else self.demoted_from
        self._arrive()
        if isinstance(move, actions.Pin):
            self.has_pinned = True
            self.scale.set(self.scale_before_burst)
        elif isinstance(move, actions.Blame):
            self.rung = rung_to_return_to
            self.phase = "BLAMED"
            self.scale.set(move.scale)
        else:
            self.rung = move.rung
        if isinstance(move, actions.Revert):
            self.phase = "BLAMED"
            self.scale.set(self.scale_before_burst)
        elif isinstance(move, actions.Promote):
            self.num_promotions += 1
            self.was_promoted = True
            self.scale.set(self.scale_before_burst)
        elif isinstance(move, actions.Demote):
            self.num_failures += self.was_promoted
            self.was_promoted = False
            if move.is_tentative:
                self.phase = "PROBATION"
                self.demoted_from = rung_to_return_to
        if was_starting:
            self._settle_floor()
        return actions.Stop(move.reason, False) if isinstance(move, actions.Revert) else None

    def rung_of(self, precision: Precision) -> int:
        """The rung of `precision`; raises `InvalidRequestError` where there is none."""
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
        self._arrive()

    def _consider_promotion(self) -> Action | None:
        wait = PROMOTION_STEPS * 2**self.num_failures
        if self.clean_run < wait or self.num_promotions == MAX_PROMOTIONS or not self.can_rerun:
            return None
        faster = [index for index in range(self.rung) if self.rungs[index] not in self.withdrawn]
        if not faster:
            return None
        needed = self.scale_before_burst if MODES[self.rungs[faster[-1]]].takes_scaler else 1.0
        return actions.Probe(faster[-1], min(self.scale.max_scale, needed * PROMOTION_HEADROOM))

    def probed(self, probe: actions.Probe, *, fits: bool, reason: str) -> Action | None:
        """The answer to `Probe`, from STEADY: go up, or wait twice as long."""
        if fits:
            return actions.Promote(probe.rung, reason)
        self.num_failures += 1
        self.clean_run = 0
        return None

    def state_dict(self) -> dict[str, Any]:
        """All that it remembers, in plain types."""
        state = copy.deepcopy({entry.name: getattr(self, entry.name) for entry in fields(PolicyState)})
        return {"policy": state, "precision": self.precision, "loss_scale": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; raises `FormatError` or `InvalidRequestError` and changes nothing if it cannot.

        The rungs may begin further down than those saved: a run goes on from the config of a `DemotedError`.
        """
        saved, precision = state["policy"], state["precision"]
        names = [entry.name for entry in fields(PolicyState)]
        _require_parts(saved, names)
        if precision not in self.rungs:
            raise FormatError(
                f"The state was saved in {precision}; this run's rungs are {', '.join(self.rungs)}.",
                "Make the controller from the config that the saved run used, or that its DemotedError carried.",
            )
        self.scale.load_state_dict(state["loss_scale"])
        withdrawn = self.withdrawn  # what this machine and model cannot run
        for name in names:
            setattr(self, name, copy.deepcopy(saved[name]))
        self.rung = self.rungs.index(precision)
        self.withdrawn = {**withdrawn, **self.withdrawn}
        if self.demoted_from is not None:
            self.demoted_from -= saved["rung"] - self.rung
            if self.demoted_from < 0:  # no way back up: what the next steps show is judged as in any other rung
                self.demoted_from = None
                self.phase = "STEADY" if self.phase == "PROBATION" else self.phase
