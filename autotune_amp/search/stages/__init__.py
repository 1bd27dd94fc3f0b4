"""Stages of a search, each of which returns the next job to run."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from autotune_amp.core.setting import Setting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob

SearchJob: TypeAlias = Trial | Check | ProfileJob


class Stage:
    """Base class of the phases of a search. A stage is pure, apart from its own counters; time limits come from the
    planner.

    An `is_exclusive` stage depends on the last result: its `next` is called only while no job runs.
    """

    is_exclusive: ClassVar[bool] = False

    def next(self, ledger: Ledger, planner: Planner) -> SearchJob | None:
        """Return the next job, or None if the stage is finished or has to wait for a running job."""
        left_seconds = planner.exploration_seconds(ledger)
        setting = self.next_setting(ledger, planner, left_seconds)
        return None if setting is None else planner.trial(ledger, setting, left_seconds)

    def next_setting(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:  # noqa: ARG002
        """Return the setting to try next in `left_seconds`; None if there is none, no time for it, or if the stage
        does not choose settings from the outcomes alone.
        """
        return None
