"""What the policy remembers from one update to the next: plain types, saved whole in every checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from autotune_amp.config import Precision
from autotune_amp.errors import FormatError


@dataclass
class PolicyState:
    """Counters are in updates. `bad_losses` are the updates with a non-finite loss, for T1; `octaves` holds
    [update, octaves of loss scale lost (negative: gained)], for T3.
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
    tentative_from: int | None = None
    has_pinned: bool = False
    startup_was_cleared: bool = False
    was_promoted: bool = False
    num_promotions: int = 0
    num_failures: int = 0
    scale_before_burst: float = 1.0
    bad_losses: list[int] = field(default_factory=list)
    octaves: list[list[float]] = field(default_factory=list)

    def save(self) -> dict[str, Any]:
        """A copy in plain types."""
        state = {entry.name: getattr(self, entry.name) for entry in fields(PolicyState)}
        return state | {"bad_losses": list(self.bad_losses), "octaves": [list(entry) for entry in self.octaves]}

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
        rung = list(rungs).index(precision)  # type: ignore[arg-type] # it is in
        num_dropped = state["rung"] - rung
        for entry in fields(PolicyState):
            setattr(self, entry.name, state[entry.name])
        self.rung = rung
        if self.tentative_from is not None:
            self.tentative_from -= num_dropped
            if self.tentative_from < 0:  # no way back up: what the next steps show is judged as in any other rung
                self.tentative_from, self.phase = None, "STEADY"
        self.bad_losses = list(state["bad_losses"])
        self.octaves = [list(entry) for entry in state["octaves"]]
