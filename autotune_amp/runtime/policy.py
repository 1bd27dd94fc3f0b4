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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any, TypeAlias

from autotune_amp.core.config import MIN_LOSS_SCALE, LossScale
from autotune_amp.core.errors import FormatError, InvalidRequestError
from autotune_amp.core.setting import Precision
from autotune_amp.runtime import actions
from autotune_amp.runtime.actions import Action, Move, Signal
from autotune_amp.runtime.scale_rule import ScaleRule, float32

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

    def save(self) -> dict[str, Any]:
        """A copy in plain types."""
        return copy.deepcopy({entry.name: getattr(self, entry.name) for entry in fields(PolicyState)})

    def forget(self) -> None:
        """What counts towards a trip counts anew."""
        self.bad_losses.clear()
        self.octaves.clear()
        self.bad_run = self.clean_run = 0

    def arrive(self) -> None:
        """A move was made: to STEADY, unless the move says otherwise."""
        self.forget()
        self.dwell = 0
        self.phase = "STEADY"
        self.demoted_from = None
        self.has_raised = self.raise_was_undone = False

    def note_loss(self, loss: float) -> None:
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
    def loss_growth(self) -> float:
        """How many times its best the loss is lately; 1.0 where it is no higher than at first, or cannot be said."""
        if self.first_loss is None or self.best_loss is None or self.typical_loss is None or self.best_loss <= 0:
            return 1.0
        is_telling = len(self.recent_losses) > NUM_RECENT_LOSSES // 3
        lately = median(self.recent_losses) if is_telling else self.typical_loss
        return lately / self.best_loss if lately > self.first_loss else 1.0

    def restore(self, state: Mapping[str, Any], rungs: Sequence[Precision], precision: object) -> None:
        """Take over what `save` gave; raises `FormatError` where it lacks a part or `precision` is no rung here.

        The rungs may begin further down than those saved: a run goes on from the config of a `DemotedError`.
        """
        missing = sorted({entry.name for entry in fields(PolicyState)} - set(state))
        if missing:
            raise FormatError(f"The controller's state lacks {', '.join(missing)}.", "Load a state that it saved.")
        if precision not in rungs:
            raise FormatError(
                f"The state was saved in {precision}; this run's rungs are {', '.join(rungs)}.",
                "Make the controller from the config that the saved run used, or that its DemotedError carried.",
            )
        withdrawn = self.withdrawn  # what this machine and model cannot run
        rung = list(rungs).index(precision)  # type: ignore[arg-type] # it is in
        num_dropped = state["rung"] - rung
        for entry in fields(PolicyState):
            setattr(self, entry.name, copy.deepcopy(state[entry.name]))
        self.rung = rung
        if self.demoted_from is not None:
            self.demoted_from -= num_dropped
            if self.demoted_from < 0:  # no way back up: what the next steps show is judged as in any other rung
                self.demoted_from = None
                self.phase = "STEADY" if self.phase == "PROBATION" else self.phase
        self.withdrawn = {**withdrawn, **self.withdrawn}


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
        return self.precision == "fp16"

    @property
    def is_watching(self) -> bool:
        """Whether something went wrong so lately that the next signals should not wait."""
        return self.bad_run > 0 or self.phase in ("PROBATION", "BLAMED") or bool(self.bad_losses)

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
            self.note_loss(signal.loss)
        return self._bad(signal) if signal.overflow or signal.loss_nonfinite else self._clean(signal.lost_share)

    def _clean(self, lost_share: float | None) -> Action | None:
        self.bad_run = self.num_unreproduced = 0
        self.clean_run += 1
        if self.is_scaling and self.phase != "BLAMED" and (gained := self.scale.clean()):
            self.octaves.append([self.num_updates, -gained])
        if self.bad_losses and self.num_updates - self.bad_losses[-1] >= LOSS_WINDOW:
            self.bad_losses.clear()
        if self.phase == "STEADY":
            if lost_share is not None and lost_share > LOST_SHARE_LIMIT and self.is_scaling:
                return self._underflow(lost_share)
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
        return actions.Measure(reason) if self.can_rerun else self._step_down(reason, None)

    def judge_underflow(self, reason: str, lost_share: float) -> Action:
        """The answer to `Measure`, from STEADY: the share of the gradient that fp16 flushes, measured in fp32."""
        if lost_share <= LOST_SHARE_LIMIT:
            self.decline()
            return actions.Warn(f"{reason} by estimate, but {lost_share:.1%} as measured in fp32: nothing changed")
        return self._step_down(f"{reason}, {lost_share:.1%} as measured in fp32", None)

    def _trip(self, reason: str, *, is_failing: bool = False, is_descending: bool = False) -> Action | None:
        self._is_failing, self._is_descending = is_failing, is_descending
        if self.num_updates < self.quiet_until:
            return None
        if self.loss_growth > DIVERGED_GROWTH:
            growth = f"{self.loss_growth:.3g} times its best, above where it began"
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
            which = "it is not precision" if self.precision in ("fp32", "tf32") else "there is no rung to try"
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
        from_rung, demoted_from, was_starting = self.rung, self.demoted_from, self.phase == "STARTUP"
        self.arrive()
        if isinstance(move, actions.Pin):
            self.has_pinned = True
            self.scale.set(self.scale_before_burst)
        elif isinstance(move, actions.Blame):
            self.rung = from_rung if demoted_from is None else demoted_from
            self._blame(move.scale)
        elif isinstance(move, actions.Revert):
            self.rung = move.rung
            self._blame(self.scale_before_burst)
        elif isinstance(move, actions.Promote):
            self.rung = move.rung
            self.num_promotions += 1
            self.was_promoted = True
            self.scale.set(self.scale_before_burst)
        else:
            self.rung = move.rung
            if self.was_promoted:
                self.num_failures += 1
                self.was_promoted = False
            if move.is_tentative:
                self.phase = "PROBATION"
                self.demoted_from = from_rung if demoted_from is None else demoted_from
        if was_starting:
            self._settle_floor()
        return actions.Stop(move.reason, False) if isinstance(move, actions.Revert) else None

    def _blame(self, scale: float) -> None:
        self.phase = "BLAMED"
        self.scale.set(scale)

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
        self.arrive()

    def _consider_promotion(self) -> Action | None:
        wait = PROMOTION_STEPS * 2**self.num_failures
        if self.clean_run < wait or self.num_promotions == MAX_PROMOTIONS or not self.can_rerun:
            return None
        faster = [index for index in range(self.rung) if self.rungs[index] not in self.withdrawn]
        if not faster:
            return None
        needed = self.scale_before_burst if self.rungs[faster[-1]] == "fp16" else 1.0
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
        return {"policy": self.save(), "precision": self.precision, "loss_scale": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state; raises `FormatError` or `InvalidRequestError` and changes nothing if it cannot."""
        self.scale.check_state(state["loss_scale"])
        self.restore(state["policy"], self.rungs, state["precision"])
        self.scale.load_state_dict(state["loss_scale"])
