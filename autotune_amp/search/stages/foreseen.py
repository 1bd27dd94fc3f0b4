"""Trials that will probably follow the next one, whose processes may load at the same time. Pure."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from autotune_amp.core.setting import Setting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.stages.confirm import ConfirmationRounds
from autotune_amp.search.stages.pending import ledger_with_predicted
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob

LOADING_STARTS = 2.0  # time for so many starts alone is needed to load several processes together


@runtime_checkable
class _SettingStage(Protocol):
    """Interface of a stage that chooses settings from the outcomes so far."""

    def next_setting(self, ledger: Ledger, planner: Planner, left_seconds: float) -> Setting | None:
        """Return the setting to try next, or None."""


def foreseen_trials(
    stages: Sequence[Any], ledger: Ledger, planner: Planner, job: Trial | Check | ProfileJob
) -> list[Trial]:
    """Return the trials that follow `job`, the next one of these stages, if it and they end as expected: as many as can
    load together with it.

    Some may never run, since the outcomes decide.
    """
    num_together = planner.job_defaults.num_together
    if num_together == 1 or not isinstance(job, Trial):
        return []
    if job.deadline_seconds is not None and job.deadline_seconds < LOADING_STARTS * planner.start_seconds(ledger):
        return []
    if stages and isinstance(stages[0], ConfirmationRounds):
        return stages[0].foreseen_trials(ledger, planner)
    planner = copy.copy(planner)  # what it fixes at its first call is not fixed by what is only expected
    trials = [job]
    for stage in stages:
        if not isinstance(stage, _SettingStage):
            continue
        while len(trials) < num_together:
            expected = ledger_with_predicted(ledger, trials) if ledger.measurements else None
            left_seconds = planner.exploration_seconds(ledger)
            setting = None if expected is None else stage.next_setting(expected, planner, left_seconds)
            if setting is None or any(setting == trial.candidate for trial in trials):
                break
            trials.append(planner.trial(ledger, setting, left_seconds))
    return trials[1:]
