"""One fresh process for all runs of a confirmation's round, on a scripted accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import pytest
from replay import ReplayBudget
from scripted_backend import ScriptedBackend, ScriptedSearch, candidate, described, hardware, ledger_of, measured

from autotune_amp.core.outcome import Failure, Measurement, Outcome, Record
from autotune_amp.core.setting import Setting
from autotune_amp.isolation.local import Backend, Isolation
from autotune_amp.search.answer.decide import gather
from autotune_amp.search.ledger import Shortlist
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.ranking import confirm_runs, were_processes_shared
from autotune_amp.search.space import Space
from autotune_amp.search.stages.confirm import MIN_ROUNDS, NUM_ROUNDS, Confirm, ConfirmingProcesses, reserved_seconds
from autotune_amp.trial.jobs import Trial

BF16, LARGER, FP32 = candidate("bf16", 32), candidate("bf16", 64), candidate("fp32", 32)
SHORTLIST = Shortlist(BF16, LARGER, FP32)
SPEEDS = {BF16: 2000.0, LARGER: 1950.0, FP32: 1000.0}
RUN_SECONDS = 2.5


class Card(ScriptedBackend):
    """Its processes take a while to start; one that is kept takes none until something fails in it."""

    def __init__(
        self,
        budget: ReplayBudget,
        isolation: Isolation,
        process_seconds: float,
        answer: Callable[[Trial, bool], Outcome],
    ) -> None:
        super().__init__(lambda spec: answer(spec, self.is_fresh), budget)
        self.isolation = isolation
        self.process_seconds = process_seconds
        self.is_fresh, self.is_broken = True, False

    def run(self, spec: Trial) -> Outcome:
        self.is_fresh = self.isolation == "fresh" or not self.specs or self.is_broken
        self.start_seconds = self.process_seconds if self.is_fresh else 0.0
        self._budget.now += self.start_seconds + RUN_SECONDS
        self.specs.append(spec)
        outcome = self._answer(spec)
        self.is_broken = isinstance(outcome, Failure)
        return outcome


class Machine:
    """A search that measured three candidates on `device`, before its confirmation."""

    def __init__(
        self,
        device: str,
        budget_seconds: float = SearchOptions().budget_seconds,
        start_seconds: float = 5.0,
    ) -> None:
        self.start_seconds = start_seconds
        self.made: list[Isolation] = []
        self.failing: dict[tuple[Setting, int], str] = {}
        self.process_factors = [1.0] * 20
        space = Space(candidates=tuple(SPEEDS), baseline=FP32)
        where = msgspec.structs.replace(hardware({"fp32": 1.0, "bf16": 2.0}), device=device)
        self.searched = ScriptedSearch(
            space,
            lambda spec: measured(spec, SPEEDS[spec.candidate]),
            budget_seconds,
            device=where,
            description=described(),
        )
        self.searched.measure(*SPEEDS)
        self.ledger, self.clock = self.searched.ledger, self.searched.budget

    def confirm(self, environment: dict[str, str]) -> Sequence[Record]:
        """The records of the confirmation, which has its own share of the budget and no more."""
        self.clock.now = max(self.clock.now, self.clock.seconds - self.clock.confirm_seconds)
        num_before = len(self.ledger.records)
        conditions = self.searched.fresh(environment, self.start_seconds)
        processes = ConfirmingProcesses(self.make, are_shared=conditions.shares_processes)
        self.searched.run(Confirm(conditions, SHORTLIST), processes)
        return self.ledger.records[num_before:]

    def make(self, isolation: Isolation, environment: dict[str, str]) -> Backend:
        self.made.append(isolation)
        return cast("Backend", Card(self.clock, isolation, self.start_seconds, self.answer))

    def answer(self, spec: Trial, is_fresh: bool) -> Outcome:
        number = sum(r.round is not None and r.candidate == spec.candidate for r in self.ledger.records)
        kind = self.failing.get((spec.candidate, number))
        if kind is not None:
            return Failure(kind="oom", message=kind)
        factor = self.process_factors[len(self.made) - 1]
        return measured(spec, factor * SPEEDS[spec.candidate], build_seconds=0.1 if is_fresh else 0.0)


def names(records: Sequence[Record]) -> list[list[str]]:
    """What was measured in each process."""
    found: list[list[str]] = []
    for record in records:
        if record.start_seconds:
            found.append([])
        found[-1].append(str(record.candidate))
    return found


def test_a_round_is_one_process_on_an_accelerator_and_its_order_alternates() -> None:
    machine = Machine("cuda:0", budget_seconds=1000.0)
    records = machine.confirm({})
    order = [str(c) for c in (BF16, LARGER, FP32)]
    assert names(records) == [order if number % 2 == 0 else order[::-1] for number in range(NUM_ROUNDS)]
    assert machine.made == ["kept"] * NUM_ROUNDS


def test_a_failure_costs_its_own_row_and_a_process() -> None:
    machine = Machine("cuda:0", budget_seconds=1000.0)
    machine.failing[LARGER, 0] = "another process took the memory"
    records = machine.confirm({})
    assert names(records)[:3] == [[str(BF16), str(LARGER)], [str(FP32)], [str(FP32), str(BF16)]]
    failed = [r.candidate for r in records if isinstance(r.outcome, Failure)]
    assert failed == [LARGER]
    assert confirm_runs(records, FP32, {}).num_confirming == NUM_ROUNDS


def test_only_the_rounds_that_are_missing_are_run_by_a_search_that_goes_on() -> None:
    machine = Machine("cuda:0", budget_seconds=1000.0)
    machine.confirm({})
    kept = [r for r in machine.ledger.records if r.round in (None, 0) or (r.round == 1 and r.candidate == FP32)]
    machine.ledger.records = tuple(kept)
    machine.ledger._forget()
    again = machine.confirm({})
    assert names(again)[0] == [str(LARGER), str(BF16)]
    assert [r.round for r in again if r.candidate == FP32] == [2, 3, 4]


def test_what_ran_in_the_same_processes_says_nothing_more_of_how_far_processes_differ() -> None:
    machine = Machine("cuda:0")
    machine.process_factors = [0.95, 1.0, 1.05] * 7
    records = machine.confirm({})
    assert all(isinstance(r.outcome, Measurement) for r in records)

    def evidence(known: Sequence[Record]) -> tuple[float, float]:
        winner, baseline = confirm_runs(known, BF16, {}), confirm_runs(known, FP32, {})
        found = gather(ledger_of(known, machine.ledger.space), winner, baseline, {})
        assert found.is_confirmed
        assert found.are_processes_shared == were_processes_shared(known)
        assert not found.is_build_shared
        return found.samples_per_second_interval

    low, high = evidence(records)
    apart = [msgspec.structs.replace(r, start_seconds=5.0) for r in records]
    low_apart, high_apart = evidence(apart)
    assert high / low > high_apart / low_apart


def test_a_run_keeps_a_process_of_its_own_on_a_cpu() -> None:
    machine = Machine("cpu", budget_seconds=1000.0)
    records = machine.confirm({"MALLOC_TRIM_THRESHOLD_": "1"})
    assert set(map(len, names(records))) == {1}
    assert set(machine.made) == {"fresh"}
    assert not were_processes_shared(records)


@pytest.mark.parametrize("start_seconds", [5.0, 8.0, 10.0])
def test_the_default_budget_confirms_where_a_process_takes_seconds_to_start(start_seconds: float) -> None:
    machine = Machine("cuda:0", start_seconds=start_seconds)
    machine.clock.confirm_seconds = reserved_seconds(machine.clock.seconds, start_seconds)
    records = machine.confirm({})
    for tried in (BF16, FP32):
        assert confirm_runs(records, tried, {}).num_confirming >= MIN_ROUNDS
    assert machine.clock.now <= machine.clock.seconds
