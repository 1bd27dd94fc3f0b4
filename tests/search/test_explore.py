"""What is measured again, and what the time left allows."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace
from scripted_backend import ScriptedSearch, all_well, calibration, candidate, described, hardware, ledger_of, measured

from autotune_amp.core.evidence import Objective
from autotune_amp.core.outcome import CheckOutcome, Failure, Measurement, Outcome, Record
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.search.answer.explain import nothing_works_error
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Budget, JobDefaults, Planner
from autotune_amp.search.ranking import failures
from autotune_amp.search.space import Space
from autotune_amp.search.stages.explore import MAX_PROCESSES, next_promising
from autotune_amp.trial.jobs import Check, Trial

SIZES, SETTING = (8, 32, 128), candidate("fp32", 32)
CONDITIONS = JobDefaults(
    hardware=hardware({"fp32": 1.0, "bf16": 2.0}), description=described(), memory_limit_bytes=2**33
)


def record(number: int, tried: Setting, outcome: Outcome) -> Record:
    return Record(search_id="s", number=number, candidate=tried, purpose="search", outcome=outcome, seconds=1.0)


def tried(rates: list[tuple[Setting, float]]) -> list[Record]:
    return [
        record(number, c, measured(Trial(candidate=c, device="cpu"), rate)) for number, (c, rate) in enumerate(rates)
    ]


def known(records: list[Record]) -> Ledger:
    return ledger_of(records, Space(candidates=(), baseline=candidate("fp32", 32)))


def promising(
    ledger: Ledger, untried: list[Setting] | None = None, left_seconds: float = math.inf, max_processes: int = 4
) -> Setting | None:
    return next_promising(
        ledger,
        Planner(CONDITIONS, Budget(math.inf)),
        ledger.throughputs(),
        left_seconds,
        untried or [],
        max_processes=max_processes,
    )


def test_a_stall_while_measuring_again_does_not_rule_out_what_was_measured() -> None:
    records = tried([(candidate("fp32", 64), 100.0), (candidate("fp32", 32), 90.0)])
    records.append(record(9, candidate("fp32", 64), Failure(kind="timeout", message="still after step 3")))
    assert failures(records) == {}
    assert candidate("fp32", 64) in known(records).measured_merits
    alone = record(10, candidate("fp32", 128), Failure(kind="timeout", message="still after step 3"))
    assert set(failures([*records, alone])) == {candidate("fp32", 128)}


def test_a_job_may_load_for_as_long_as_the_search_has_time() -> None:
    space = Space(candidates=(candidate("fp32", 64),), baseline=candidate("fp32", 64))
    search = ScriptedSearch(space, lambda spec: measured(spec, 100.0), 50.0)
    search.budget.now = 20.0
    search.measure(space.baseline)
    assert [spec.loading_seconds for spec in search.backend.specs] == [30.0]


def test_a_first_process_that_was_still_loading_when_time_was_up_speaks_against_nothing() -> None:
    slow = Failure(kind="timeout", message="the workload takes more than 9 s to load", is_loading=True)
    ledger = known([record(1, candidate("bf16", 64), slow)])
    assert ledger.failures == {}
    assert ledger.outcomes == {}, "it may be tried again"
    assert ledger.num_failures == 0
    assert nothing_works_error(ledger, (), has_stepped=False) is None, "the budget was too small, and nothing is wrong"
    again = known([record(number, candidate("bf16", 64), slow) for number in (1, 2)])
    assert set(again.failures) == {candidate("bf16", 64)}, "it is not tried for ever"


@pytest.mark.parametrize(("times", "is_run"), [(0.9, False), (1.1, True)])
def test_what_promises_something_must_fit_into_the_time_left(times: float, is_run: bool) -> None:
    """A trial of 32 s, of which 20 are no steps: 12 s are a long first step, two of warm-up and eight measured."""
    setting, untried = candidate("fp32", 32), [candidate("fp32", 64)]
    found = measured(Trial(candidate=setting, device="cpu"), 32.0)
    took = Record(search_id="s", number=1, candidate=setting, purpose="search", outcome=found, seconds=20.0 + 12.0)
    ledger = known([took])
    planner = Planner(CONDITIONS, Budget(math.inf))
    seconds = planner.trial_seconds(ledger, untried[0], 64 / 32.0)  # no faster than what was measured
    assert (promising(ledger, untried, left_seconds=times * seconds) == untried[0]) == is_run


def test_a_trial_is_as_long_whatever_the_speed_counts() -> None:
    class Listening(Planner):
        steps: list[float]

        def trial_seconds(self, ledger: Ledger, setting: Setting, step_seconds: float) -> float:
            self.steps.append(step_seconds)
            return super().trial_seconds(ledger, setting, step_seconds)

    def steps(objective: Objective) -> list[float]:
        planner = Listening(CONDITIONS, Budget(math.inf))
        planner.steps = []
        ledger = ledger_of(records, Space(candidates=(), baseline=candidate("fp32", 32)), objective=objective)
        next_promising(ledger, planner, ledger.throughputs(), math.inf, [candidate("bf16", 64)])
        return planner.steps

    records = []
    for each in tried([(candidate("fp32", 32), 100.0), (candidate("bf16", 32), 90.0)]):
        assert isinstance(each.outcome, Measurement)
        tokens = 512 * each.outcome.samples_per_second
        records.append(replace(each, outcome=replace(each.outcome, tokens_per_second=tokens)))
    assert steps("tokens") == pytest.approx(steps("speed"))


def test_what_stalls_again_and_again_is_left() -> None:
    leaders = [candidate("fp32", 32), candidate("bf16", 32)]
    records = tried([(leaders[0], 100.0), (leaders[1], 103.0), (leaders[0], 120.0)])
    again = promising(known(records))
    assert again in leaders
    stalled = Failure(kind="timeout", message="still after step 3")
    records += [record(10 + number, again, stalled) for number in range(MAX_PROCESSES)]
    assert promising(known(records)) != again


@pytest.mark.parametrize("histogram", [{-40: 1000}, None])
def test_a_refused_precision_is_left_and_the_others_are_explored(histogram: dict[int, int] | None) -> None:
    """fp16 is the fastest, and no loss scale is safe for it, or all of its gradient is flushed."""
    sizes = (8, 16, 32, 64, 128, 256)
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    space = Space(candidates=tuple(candidate(p, b) for p in precisions for b in sizes), baseline=SETTING)
    speeds = {"fp32": 1.0, "bf16": 2.0, "fp16": 3.0}

    def check_answer(spec: Check) -> CheckOutcome:
        if spec.what != "calibration":
            return all_well(spec)
        return calibration(None) if histogram is None else calibration(histogram=histogram)

    def answer(spec: Trial) -> Outcome:
        size = spec.candidate.batch_size
        return measured(spec, 1000 * speeds[spec.candidate.precision] * size / (64 + size))

    device = hardware({"fp32": 1.0, "bf16": 2.0, "fp16": 2.0})
    search = ScriptedSearch(space, answer, 2000.0, check_answer=check_answer, device=device)
    search.explore(is_checked=True)
    assert sum(r.purpose == "search" and r.candidate.precision == "fp16" for r in search.records) < len(sizes)
    assert search.ledger.shortlist is not None
    assert search.ledger.shortlist.winner == candidate("bf16", 256)


def test_where_processes_differ_the_leaders_are_measured_again_but_not_for_ever() -> None:
    leaders = [candidate("fp32", 32), candidate("bf16", 32)]
    rates = [(leaders[0], 100.0), (leaders[1], 103.0), (leaders[0], 120.0)]
    for _ in range(2 * MAX_PROCESSES):
        ledger = known(tried(rates))
        setting = promising(ledger)
        if setting is None:
            break
        rates.append((setting, 90.0 + 7 * len(rates)))
    assert setting is None
    num_processes = [sum(c == leader for c, _ in rates) for leader in leaders]
    assert 2 < max(num_processes) <= MAX_PROCESSES
    assert promising(known(tried(rates[:3])), max_processes=1) is None


def test_a_throughput_without_the_wait_for_data() -> None:
    fast, slow = candidate("bf16", 32), candidate("fp32", 32)
    waits = {fast: 0.6, slow: 0.1}
    records = [
        record(number, setting, measured(Trial(candidate=setting, device="cpu"), 100.0, data_share=wait))
        for number, (setting, wait) in enumerate(waits.items())
    ]
    found = known(records).throughputs(without_waiting=True)
    assert found == {fast: [pytest.approx(250.0)], slow: [pytest.approx(100 / 0.9)]}
    assert known(records).throughputs() == {fast: [100.0], slow: [100.0]}
