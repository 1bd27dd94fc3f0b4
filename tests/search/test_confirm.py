"""Evaluations and checkpoints in the confirmation: once for each, in a bounded share of its time."""

from __future__ import annotations

import msgspec
import pytest
from scripted_backend import (
    SETUP_SECONDS,
    ScriptedSearch,
    candidate,
    described,
    measured,
)

from autotune_amp.core.outcome import Outcome
from autotune_amp.search.answer.evidence import confirm_runs
from autotune_amp.search.budget import CONFIRM_SHARE
from autotune_amp.search.ledger import Shortlist
from autotune_amp.search.space import Space
from autotune_amp.search.stages.confirm import ENDING_SHARE, MIN_ROUNDS
from autotune_amp.trial.jobs import Trial

BF16, FP32 = candidate("bf16", 32), candidate("fp32", 32)
HEAP = {"MALLOC_TRIM_THRESHOLD_": "1"}
BUDGET_SECONDS = 40.0
ENDING_SECONDS = ENDING_SHARE * CONFIRM_SHARE * BUDGET_SECONDS


class Machine:
    """Whose workload evaluates for `evaluation_seconds` wherever it is asked to."""

    def __init__(self, evaluation_seconds: float | None) -> None:
        self.evaluation_seconds = evaluation_seconds
        self.process_seconds = 0.0
        space = Space(candidates=(BF16, FP32), baseline=FP32)
        description = described(has_ending=evaluation_seconds is not None)
        self.searched = ScriptedSearch(space, self.answered, BUDGET_SECONDS, description=description)
        self.searched.measure(BF16, FP32)
        self.ledger, self.budget = self.searched.ledger, self.searched.budget

    def answered(self, spec: Trial) -> Outcome:
        found = measured(spec, 2000.0 if spec.candidate == BF16 else 1000.0)
        self.searched.budget.now += self.process_seconds
        if spec.ending_seconds is None:
            return found
        assert self.evaluation_seconds is not None
        seconds = min(self.evaluation_seconds, spec.ending_seconds)
        self.searched.budget.now += seconds
        problem = None if seconds == self.evaluation_seconds else "evaluate did not end"
        return msgspec.structs.replace(found, ending_seconds=seconds, ending_problem=problem)

    def confirm(self) -> list[Trial]:
        """The trials that are run for it."""
        num_before = len(self.searched.backend.specs)
        start_seconds = SETUP_SECONDS + self.process_seconds
        self.searched.confirm(Shortlist(BF16, None, FP32), HEAP, start_seconds)
        return self.searched.backend.specs[num_before:]


@pytest.mark.parametrize("evaluation_seconds", [0.5, 8.0, 1000.0])
def test_an_evaluation_leaves_time_for_the_rounds(evaluation_seconds: float) -> None:
    machine = Machine(evaluation_seconds)
    given = [spec for spec in machine.confirm() if spec.ending_seconds is not None]
    assert [(spec.candidate, spec.purpose) for spec in given] == [(BF16, "confirm"), (FP32, "confirm")]
    assert given[0].ending_seconds == ENDING_SECONDS
    assert given[1].ending_seconds == max(0.0, ENDING_SECONDS - evaluation_seconds)
    for tried, environment in ((BF16, HEAP), (FP32, {})):
        assert confirm_runs(machine.ledger.records, tried, environment).num_confirming >= MIN_ROUNDS
    assert machine.budget.now <= BUDGET_SECONDS


def test_what_went_wrong_once_is_not_tried_again_by_a_search_that_goes_on() -> None:
    machine = Machine(8.0)
    machine.confirm()
    kept = [r for r in machine.ledger.records if r.round in (None, 0)]
    machine.ledger.records = tuple(kept)
    machine.ledger._forget()
    assert all(spec.ending_seconds is None for spec in machine.confirm())


def test_what_the_search_left_over_confirms_both_and_no_more() -> None:
    machine = Machine(None)
    machine.process_seconds = 0.1 * BUDGET_SECONDS  # their share holds four processes, of the seven that it takes
    machine.confirm()
    for tried, environment in ((BF16, HEAP), (FP32, {})):
        assert confirm_runs(machine.ledger.records, tried, environment).num_confirming == MIN_ROUNDS
    assert CONFIRM_SHARE * BUDGET_SECONDS < machine.budget.now <= BUDGET_SECONDS
