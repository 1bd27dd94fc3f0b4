"""What the confirmation runs in its time, evaluations and checkpoints among it."""

from __future__ import annotations

import msgspec
import pytest
from scripted_backend import SETUP_SECONDS, ScriptedSearch, candidate, described, measured

from autotune_amp.core.outcome import Outcome, Record
from autotune_amp.search.ledger import Shortlist
from autotune_amp.search.ranking import confirm_runs
from autotune_amp.search.run import CONFIRM_SHARE
from autotune_amp.search.space import Space
from autotune_amp.search.stages.confirm import (
    ENDING_SHARE,
    MIN_ROUNDS,
    NUM_ROUNDS,
    Confirm,
    plan_round,
    run_seconds,
    start_seconds,
)
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
        self.speeds = {BF16: 2000.0, FP32: 1000.0}
        space = Space(candidates=(BF16, FP32), baseline=FP32)
        description = described(has_ending=evaluation_seconds is not None)
        self.searched = ScriptedSearch(space, self.answered, BUDGET_SECONDS, description=description)
        self.searched.measure(BF16, FP32)
        self.ledger, self.budget = self.searched.ledger, self.searched.budget

    def answered(self, spec: Trial) -> Outcome:
        found = measured(spec, self.speeds[spec.candidate])
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


@pytest.mark.parametrize(("margin", "runs"), [(1.05, False), (1.15, True)])
def test_a_process_is_started_where_a_tenth_more_than_its_time_is_left(margin: float, runs: bool) -> None:
    machine = Machine(None)
    stage = Confirm(machine.searched.fresh({}, 3.0), Shortlist(FP32, None, FP32))
    machine.budget.now = BUDGET_SECONDS - margin * (3.0 + run_seconds(machine.ledger, FP32))
    assert (stage.next(machine.ledger, machine.budget) is not None) == runs


def test_what_processes_took_is_the_mean_of_what_was_seen() -> None:
    machine = Machine(None)
    for seconds in (4.0, 10.0):
        found = msgspec.structs.replace(measured(Trial(candidate=FP32, device="cpu"), 1000.0), build_seconds=1.0)
        machine.ledger.append(
            Record(
                search_id="s",
                number=9,
                candidate=FP32,
                purpose="confirm",
                round=0,
                outcome=found,
                seconds=seconds,
                start_seconds=seconds / 4,
            )
        )
    assert start_seconds(machine.ledger.records, 100.0) == pytest.approx((2.0 + 3.5) / 2)
    assert run_seconds(machine.ledger, FP32) == pytest.approx((2.0 + 6.5) / 2)


@pytest.mark.parametrize(("speed", "is_run"), [(390.0, False), (410.0, True)])
def test_a_runner_up_five_times_slower_costs_no_process(speed: float, is_run: bool) -> None:
    machine, slow = Machine(None), candidate("fp32", 8)
    machine.speeds[slow] = speed
    machine.searched.measure(slow)
    machine.searched.confirm(Shortlist(BF16, slow, FP32), HEAP, start_seconds=0.1)
    confirming = [spec for spec in machine.searched.backend.specs if spec.is_miniature]
    assert (slow in {spec.candidate for spec in confirming}) == is_run
    assert {spec.hold_heap for spec in confirming} == {False}, "its process starts with the variables, or without"


SHORTLIST = Shortlist(candidate("bf16", 64), candidate("bf16", 128), candidate("fp32", 32))


def test_rounds_are_interleaved_and_alternate() -> None:
    rounds = [plan_round(SHORTLIST, HEAP, len, 100.0, number) for number in range(NUM_ROUNDS)]
    kinds = [[run.setting for run in runs if run.purpose == "confirm"] for runs in rounds]
    assert kinds[1] == kinds[0][::-1]
    assert kinds[2] == kinds[0]
    assert all(len(runs) == 3 for runs in kinds)
    assert [run.purpose for runs in rounds for run in runs].count("plain") == 1
    environments = {run.setting: run.environment for run in rounds[0] if run.purpose == "confirm"}
    assert environments == {SHORTLIST.winner: HEAP, SHORTLIST.runner_up: HEAP, SHORTLIST.baseline: {}}


@pytest.mark.parametrize(
    ("left", "number", "expected"),
    [
        (10.0, 0, ["bf16 batch 64", "bf16 batch 128", "fp32 batch 32", "bf16 batch 64"]),
        (9.9, 0, ["bf16 batch 64", "fp32 batch 32", "bf16 batch 64"]),  # the runner-up gives way to a third round
        (5.0, 1, ["fp32 batch 32", "bf16 batch 64"]),
        (2.0, 0, ["bf16 batch 64", "fp32 batch 32"]),
        (1.9, 0, ["bf16 batch 64"]),
        (0.9, 0, []),
        (3.0, 3, ["fp32 batch 32", "bf16 batch 128", "bf16 batch 64"]),
    ],
)
def test_what_a_round_runs_with_the_time_left(left: float, number: int, expected: list[str]) -> None:
    runs = plan_round(SHORTLIST, HEAP, len, left, number)
    assert [str(run.setting) for run in runs] == expected
