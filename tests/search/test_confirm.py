"""Evaluations and checkpoints in the confirmation: once for each, in a bounded share of its time."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from scripted_runner import (
    SETUP_SECONDS,
    ScriptedClock,
    ScriptedRunner,
    candidate,
    described,
    hardware,
    measured,
    session,
)

from autotune_amp.core.outcome import Outcome
from autotune_amp.search.choose import Shortlist
from autotune_amp.search.confirm import ENDING_SHARE, MIN_ROUNDS, Processes, confirm
from autotune_amp.search.evidence import confirm_runs
from autotune_amp.search.session import CONFIRM_SHARE
from autotune_amp.trial.jobs import Trial

BF16, FP32 = candidate("bf16", 32), candidate("fp32", 32)
HEAP = {"MALLOC_TRIM_THRESHOLD_": "1"}
BUDGET_SECONDS = 40.0
ENDING_SECONDS = ENDING_SHARE * CONFIRM_SHARE * BUDGET_SECONDS


class Machine(ScriptedRunner):
    """Whose workload evaluates for `evaluation_seconds` wherever it is asked to."""

    def __init__(self, folder: Path, evaluation_seconds: float | None) -> None:
        self.clock = ScriptedClock(BUDGET_SECONDS)
        self.evaluation_seconds = evaluation_seconds
        self.process_seconds = 0.0
        super().__init__(self.answered, self.clock)
        description = described(has_ending=evaluation_seconds is not None)
        self.session = session(folder, self.clock, hardware({"fp32": 1.0, "bf16": 2.0}), description=description)
        for tried in (BF16, FP32):
            self.session.run(self.as_runner, self.session.spec(tried))

    def answered(self, spec: Trial) -> Outcome:
        found = measured(spec, 2000.0 if spec.candidate == BF16 else 1000.0)
        self.clock.now += self.process_seconds
        if spec.ending_seconds is None:
            return found
        assert self.evaluation_seconds is not None
        seconds = min(self.evaluation_seconds, spec.ending_seconds)
        self.clock.now += seconds
        problem = None if seconds == self.evaluation_seconds else "evaluate did not end"
        return msgspec.structs.replace(found, ending_seconds=seconds, ending_problem=problem)

    def confirm(self) -> list[Trial]:
        """The specs that are run for it."""
        num_before = len(self.specs)
        self.start_seconds = SETUP_SECONDS + self.process_seconds
        processes = Processes(lambda _: nullcontext(self.as_runner), self.start_seconds)
        confirm(self.session, processes, Shortlist(BF16, None, FP32), HEAP)
        return self.specs[num_before:]


@pytest.mark.parametrize("evaluation_seconds", [0.5, 8.0, 1000.0])
def test_an_evaluation_leaves_time_for_the_rounds(tmp_path: Path, evaluation_seconds: float) -> None:
    machine = Machine(tmp_path, evaluation_seconds)
    given = [spec for spec in machine.confirm() if spec.ending_seconds is not None]
    assert [(spec.candidate, spec.purpose) for spec in given] == [(BF16, "confirm"), (FP32, "confirm")]
    assert given[0].ending_seconds == ENDING_SECONDS
    assert given[1].ending_seconds == max(0.0, ENDING_SECONDS - evaluation_seconds)
    for tried, environment in ((BF16, HEAP), (FP32, {})):
        assert confirm_runs(machine.session.records, tried, environment).num_confirming >= MIN_ROUNDS
    assert machine.clock.now <= BUDGET_SECONDS


def test_what_went_wrong_once_is_not_tried_again_by_a_search_that_goes_on(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 8.0)
    machine.confirm()
    kept = [r for r in machine.session.records if r.round in (None, 0)]
    machine.session.records[:] = kept
    assert all(spec.ending_seconds is None for spec in machine.confirm())


def test_a_workload_without_either_is_asked_for_neither(tmp_path: Path) -> None:
    specs = Machine(tmp_path, None).confirm()
    assert {spec.ending_seconds for spec in specs} == {None}


def test_what_the_search_left_over_confirms_both_and_no_more(tmp_path: Path) -> None:
    machine = Machine(tmp_path, None)
    machine.process_seconds = 0.1 * BUDGET_SECONDS  # their share holds four processes, of the seven that it takes
    machine.confirm()
    for tried, environment in ((BF16, HEAP), (FP32, {})):
        assert confirm_runs(machine.session.records, tried, environment).num_confirming == MIN_ROUNDS
    assert CONFIRM_SHARE * BUDGET_SECONDS < machine.clock.now <= BUDGET_SECONDS
