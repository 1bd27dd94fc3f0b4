"""What the confirmation runs, in which processes and in what time: on a scripted CPU, and on a card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_backend import (
    ScriptedBackend,
    ScriptedSearch,
    calibration,
    candidate,
    described,
    hardware,
    ledger_of,
    measured,
    measurement,
)
from test_decide import Log

from autotune_amp.core.outcome import Failure, Measurement, Outcome, Record
from autotune_amp.core.setting import Setting
from autotune_amp.processes.devices import ConfirmationBackend
from autotune_amp.processes.local import Slot
from autotune_amp.search.gains import gain_and_rounds_to_settle, other_process_speeds
from autotune_amp.search.ledger import LOSS_SCALE, Shortlist
from autotune_amp.search.loss_scales import Scales
from autotune_amp.search.planner import MIN_ROUNDS
from autotune_amp.search.ranking import best_runs, confirm_runs, were_processes_shared
from autotune_amp.search.space import Space
from autotune_amp.search.stages.checks import Checks
from autotune_amp.search.stages.confirm import (
    ENDING_SHARE,
    MAX_ROUNDS,
    ConfirmationRounds,
    OneRankTrial,
    plan_round,
)
from autotune_amp.trial.jobs import Trial

BF16, LARGER, SLOW, FP32 = candidate("bf16", 32), candidate("bf16", 64), candidate("fp32", 8), candidate("fp32", 32)
SHORTLIST = Shortlist(BF16, LARGER, FP32)
HEAP = {"MALLOC_TRIM_THRESHOLD_": "1"}
RUN_SECONDS = 2.5


class Machine:
    """A search that measured what its shortlist names. A process takes `start_seconds` to its first step, a run 2.5 s,
    and the workload evaluates for `evaluation_seconds` wherever it is asked to.
    """

    def __init__(
        self,
        device: str = "cpu",
        budget_seconds: float = 1000.0,
        start_seconds: float = 5.0,
        evaluation_seconds: float | None = None,
    ) -> None:
        self.start_seconds, self.evaluation_seconds = start_seconds, evaluation_seconds
        self.speeds = {BF16: 2000.0, LARGER: 1950.0, FP32: 1000.0}
        self.num_made = 0
        self.specs: list[Trial] = []
        self.failing: tuple[Setting, int] | None = None
        self.stalls: dict[tuple[Setting, int], float] = {}  # seconds more than foreseen
        self.is_started = False
        self.noise = 0.0  # by how much every other round of the baseline is slower or faster, of its logarithm
        self.searched = ScriptedSearch(
            Space(candidates=tuple(self.speeds), baseline=FP32),
            lambda spec: measured(spec, self.speeds[spec.candidate]),
            budget_seconds,
            device=replace(hardware({"fp32": 1.0, "bf16": 2.0}), device=device),
            description=described(has_ending=evaluation_seconds is not None),
        )
        self.searched.measure(*self.speeds)
        self.ledger, self.budget = self.searched.ledger, self.searched.budget

    def confirm(self, environment: dict[str, str] | None = None, shortlist: Shortlist = SHORTLIST) -> Sequence[Record]:
        """The records of the confirmation."""
        num_before = len(self.ledger.records)
        self.searched.set_start(environment or {}, self.start_seconds)
        processes = ConfirmationBackend(
            self.make, Slot("cpu"), shares_processes=self.searched.job_defaults.shares_processes
        )
        self.searched.run(ConfirmationRounds(shortlist, environment or {}), processes)
        return self.ledger.records[num_before:]

    def make(self, environment: dict[str, str]) -> ScriptedBackend:
        self.num_made += 1
        self.is_started = False
        backend = ScriptedBackend(self.answer, self.budget)
        backend.run = lambda spec: self.run(backend, spec)  # type: ignore[method-assign]
        return backend

    def run(self, backend: ScriptedBackend, spec: Trial) -> Outcome:
        self.specs.append(spec)
        backend.start_seconds = 0.0 if self.is_started else self.start_seconds
        self.budget.now += backend.start_seconds + RUN_SECONDS
        outcome = self.answer(spec)
        self.is_started = isinstance(outcome, Measurement)
        return outcome

    def answer(self, spec: Trial) -> Outcome:
        number = sum(r.round is not None and r.candidate == spec.candidate for r in self.ledger.records)
        self.budget.now += self.stalls.get((spec.candidate, number), 0.0)
        if self.failing == (spec.candidate, number):
            return Failure(kind="oom", message="another process took the memory")
        change = math.exp(self.noise * (-1) ** number) if spec.candidate == FP32 else 1.0
        found = measured(spec, change * self.speeds[spec.candidate], build_seconds=0.0)
        if spec.ending_seconds is None or self.evaluation_seconds is None:
            return found
        seconds = min(self.evaluation_seconds, spec.ending_seconds)
        self.budget.now += seconds
        problem = None if seconds == self.evaluation_seconds else "evaluate did not end"
        return replace(found, ending_seconds=seconds, ending_problem=problem)

    def num_confirming(self, tried: Setting, environment: dict[str, str] | None = None) -> int:
        return confirm_runs(self.ledger.records, tried, environment or {}).num_confirming

    def forget_after(self, *kept: Record) -> None:
        """A search that was killed then, and goes on."""
        self.ledger.records = kept
        self.ledger._clear_derived_values()
        self.specs.clear()


def names(records: Sequence[Record]) -> list[list[str]]:
    """What was measured in each process."""
    found: list[list[str]] = []
    for record in records:
        if record.start_seconds:
            found.append([])
        found[-1].append(str(record.candidate))
    return found


def test_a_round_is_one_process_on_an_accelerator_and_its_order_alternates() -> None:
    machine = Machine("cuda:0")
    records = machine.confirm()
    order = [str(c) for c in (BF16, LARGER, FP32)]
    assert names(records) == [order if number % 2 == 0 else order[::-1] for number in range(MIN_ROUNDS)]
    assert machine.num_made == MIN_ROUNDS
    assert not any(spec.is_alone for spec in machine.specs)


def test_a_run_keeps_a_process_of_its_own_on_a_cpu() -> None:
    machine = Machine()
    records = machine.confirm(HEAP)
    assert set(map(len, names(records))) == {1}
    assert all(spec.is_alone for spec in machine.specs)
    assert not were_processes_shared(records)
    assert {spec.hold_heap for spec in machine.specs} == {False}, "its process starts with the variables, or without"


@pytest.mark.parametrize("noise", [0.0, 0.35])
def test_rounds_go_on_until_it_is_sure_who_is_faster(noise: float) -> None:
    machine = Machine("cuda:0")
    machine.noise = noise
    machine.confirm(shortlist=Shortlist(BF16, None, FP32))
    num_rounds = machine.num_confirming(BF16)
    assert machine.num_confirming(FP32) == num_rounds
    assert MIN_ROUNDS < num_rounds <= MAX_ROUNDS if noise else num_rounds == MIN_ROUNDS


def test_rounds_of_one_setting_alone_bring_a_comparison_no_nearer_to_its_end() -> None:
    log = Log().confirm(FP32, *[100.0] * 3).confirm(BF16, 100.0, 120.0, 144.0)
    space = Space(candidates=(FP32, BF16), baseline=FP32)
    rounds = gain_and_rounds_to_settle(ledger_of(log.records, space), Shortlist(BF16, None, FP32), {}, 17)
    for number in (3, 4):
        log.add(BF16, 120.0, "confirm", round=number)
    assert gain_and_rounds_to_settle(ledger_of(log.records, space), Shortlist(BF16, None, FP32), {}, 17) == rounds
    assert rounds is not None


def test_the_spread_of_a_settings_own_processes_counts_once() -> None:
    """A command's trial in the search counts as its first round."""
    log = Log()
    for setting, speed, number in ((BF16, 100.0, 0), (FP32, 50.0, None), (FP32, 51.0, None)):
        log.add(setting, measurement(speed, raw_step_seconds=(1.0,) * 8), round=number)
    for number in (1, 2):
        log.add(BF16, 100.0 + number, "confirm", round=number)
    runs = confirm_runs(log.records, BF16, {})
    assert runs.speeds == [100.0, 101.0, 102.0]
    assert other_process_speeds(log.records, runs) == [[50.0, 51.0]]
    trial = best_runs(log.records, FP32, {})
    assert other_process_speeds(log.records, runs, trial) == [[50.0, 51.0]], "one process has no spread of its own"


def test_a_failure_costs_its_own_row_and_a_process() -> None:
    machine = Machine("cuda:0")
    machine.failing = LARGER, 0
    records = machine.confirm()
    assert names(records)[:3] == [[str(BF16), str(LARGER)], [str(FP32)], [str(FP32), str(BF16)]]
    assert [r.candidate for r in records if isinstance(r.outcome, Failure)] == [LARGER]
    assert machine.num_confirming(FP32) == MIN_ROUNDS


def test_a_search_goes_on_where_a_contender_failed_in_its_confirmation() -> None:
    machine = Machine()
    machine.failing = BF16, 0
    machine.confirm()
    machine.forget_after(*[r for r in machine.ledger.records if r.round in (None, 0)])
    assert {r.candidate for r in machine.confirm()} == {LARGER, FP32}


def test_one_rank_trains_with_the_loss_scale_of_the_others() -> None:
    fp16 = candidate("fp16", 32)
    searched = ScriptedSearch(
        Space(candidates=(fp16, FP32), baseline=FP32),
        lambda spec: measured(spec, 2000.0 if spec.candidate == fp16 else 1000.0),
        description=described(num_ranks=2, is_ranked=True),
    )
    searched.measure(fp16, FP32)
    searched.run(Checks())
    searched.ledger.scales[fp16.scaling] = Scales(calibration(), 1000)
    searched.run(OneRankTrial({}, 0))
    (alone,) = (record for record in searched.ledger.records if record.purpose == "one_rank")
    assert alone.loss_scale == searched.ledger.loss_scale(fp16) != LOSS_SCALE


def test_only_the_rounds_that_are_missing_are_run_by_a_search_that_goes_on() -> None:
    machine = Machine("cuda:0")
    machine.confirm()
    done = [r for r in machine.ledger.records if r.round in (None, 0) or (r.round == 1 and r.candidate == FP32)]
    machine.forget_after(*done)
    again = machine.confirm()
    assert names(again)[0] == [str(LARGER), str(BF16)]
    assert [r.round for r in again if r.candidate == FP32] == [2]


def test_a_round_that_an_earlier_session_left_half_runs_wholly_again() -> None:
    """The machine may be slower by then; a round that is whole stays."""
    machine = Machine("cuda:0")
    machine.confirm()
    machine.forget_after(*[r for r in machine.ledger.records if r.round in (None, 0, 1)][:-1])
    machine.ledger.session += 1
    again = machine.confirm()
    assert {r.round for r in again} == {1, 2}
    assert {r.candidate for r in again if r.round == 1} == {BF16, LARGER, FP32}
    assert {r.session for r in again} == {2}


def test_the_baseline_runs_again_beside_a_winner_of_another_session() -> None:
    machine = Machine("cuda:0")
    machine.confirm(shortlist=Shortlist(BF16, None, FP32))
    machine.forget_after(*machine.ledger.records)
    machine.ledger.session += 1
    again = machine.confirm(shortlist=Shortlist(LARGER, None, FP32))
    assert [sum(r.candidate == each for r in again) for each in (LARGER, FP32)] == [MIN_ROUNDS, MIN_ROUNDS]


@pytest.mark.parametrize("evaluation_seconds", [0.5, 8.0, 1000.0])
def test_an_evaluation_leaves_time_for_the_rounds(evaluation_seconds: float) -> None:
    machine = Machine("cpu", 80.0, 0.5, evaluation_seconds)
    machine.confirm(HEAP, Shortlist(BF16, None, FP32))
    share = ENDING_SHARE * 80.0
    given = {spec.candidate: spec.ending_seconds for spec in machine.specs if spec.ending_seconds is not None}
    assert given == {BF16: share, FP32: max(0.0, share - evaluation_seconds)}
    assert min(machine.num_confirming(BF16, HEAP), machine.num_confirming(FP32)) >= MIN_ROUNDS
    assert machine.budget.left() >= 0
    machine.forget_after(*[r for r in machine.ledger.records if r.round in (None, 0)])
    machine.budget.now = 0.0
    machine.confirm(HEAP, Shortlist(BF16, None, FP32))
    assert all(spec.ending_seconds is None for spec in machine.specs), "what went wrong once is not tried again"


def test_an_evaluation_gets_no_more_than_is_left_after_a_stall() -> None:
    machine = Machine("cpu", 1000.0, 0.5, evaluation_seconds=50.0)
    machine.budget.now = 1000.0 - 110.0
    machine.stalls[BF16, 0] = 10.0
    machine.confirm(shortlist=Shortlist(BF16, None, FP32))
    given = [spec.ending_seconds for spec in machine.specs]
    assert given[0] == 100.0
    assert given[1] is not None
    assert 0 < given[1] < 50.0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_run_that_took_longer_than_foreseen_leaves_the_baseline_confirmed(number: int) -> None:
    machine = Machine("cpu", 90.0, start_seconds=5.0)
    machine.stalls[BF16, number] = 20.0
    machine.confirm(shortlist=Shortlist(BF16, None, FP32))
    assert machine.num_confirming(BF16) == machine.num_confirming(FP32) == MIN_ROUNDS
    assert machine.budget.left() >= 0


@pytest.mark.parametrize(("margin", "runs"), [(1.05, False), (1.15, True)])
def test_a_process_is_started_where_a_tenth_more_than_its_time_is_left(margin: float, runs: bool) -> None:
    machine = Machine()
    machine.searched.set_start({}, 3.0)
    planner, stage = machine.searched.planner, ConfirmationRounds(Shortlist(FP32, None, FP32), {})
    machine.budget.now = machine.budget.seconds - margin * (3.0 + planner.run_seconds(machine.ledger, FP32))
    assert (stage.next(machine.ledger, planner) is not None) == runs


def test_what_processes_took_is_the_mean_of_what_was_seen() -> None:
    machine = Machine()
    found = measured(Trial(candidate=FP32, device="cpu"), 1000.0, build_seconds=1.0)
    fields: dict[str, Any] = {"search_id": "s", "number": 9, "candidate": FP32, "round": 0, "outcome": found}
    for seconds in (4.0, 10.0):
        machine.ledger.append(Record(**fields, purpose="confirm", seconds=seconds, start_seconds=seconds / 4))
    machine.ledger._clear_derived_values()
    assert machine.searched.planner.start_seconds(machine.ledger) == pytest.approx((2.0 + 3.5) / 2)
    assert machine.searched.planner.run_seconds(machine.ledger, FP32) == pytest.approx((2.0 + 6.5) / 2)


@pytest.mark.parametrize(("speed", "is_run"), [(1930.0, False), (1990.0, True)])
def test_a_runner_up_that_could_not_win_by_enough_costs_no_process(speed: float, is_run: bool) -> None:
    machine = Machine()
    machine.speeds[SLOW] = speed
    machine.searched.measure(SLOW)
    machine.confirm(HEAP, Shortlist(BF16, SLOW, FP32))
    assert (SLOW in {spec.candidate for spec in machine.specs}) == is_run


def test_the_winner_runs_once_in_the_users_own_environment() -> None:
    rounds = [plan_round(SHORTLIST, HEAP, len, 100.0, number, 1) for number in range(MAX_ROUNDS)]
    assert [run for runs in rounds for run in runs if run.purpose == "plain"] == [(BF16, "plain", {})]
    environments = {run.setting: run.environment for run in rounds[0] if run.purpose == "confirm"}
    assert environments == {BF16: HEAP, LARGER: HEAP, FP32: {}}


@pytest.mark.parametrize(
    ("left", "number", "expected"),
    [
        (10.0, 0, [BF16, LARGER, FP32, BF16]),
        (9.9, 0, [BF16, FP32, BF16]),  # the runner-up gives way to a third round
        (5.0, 1, [FP32, BF16]),
        (2.0, 0, [BF16, FP32]),
        (1.9, 0, [BF16]),
        (0.9, 0, []),
        (3.0, 3, [FP32, LARGER, BF16]),
    ],
)
def test_what_a_round_runs_with_the_time_left(left: float, number: int, expected: list[Setting]) -> None:
    assert [
        run.setting for run in plan_round(SHORTLIST, HEAP, len, left, number, max(1, MIN_ROUNDS - number))
    ] == expected
