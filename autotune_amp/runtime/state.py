"""What the policy remembers from one update to the next: plain types, saved whole in every checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from autotune_amp.core.config import Precision
from autotune_amp.core.errors import FormatError

NUM_RECENT_LOSSES = 15


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
