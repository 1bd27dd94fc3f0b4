"""What is measured again, and what the time left allows."""

from __future__ import annotations

import msgspec
import pytest
from scripted_backend import ScriptedSearch, candidate, ledger_of, measured

from autotune_amp.core.outcome import Failure, Measurement, Outcome, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search.answer.decide import gather
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.ranking import best_runs, confirm_runs, failures
from autotune_amp.search.space import Space
from autotune_amp.search.stages.explore import Looks, next_repeat
from autotune_amp.search.study import Study
from autotune_amp.trial.jobs import NUM_STEPS_BEFORE_CUT, Trial


def record(number: int, tried: Setting, outcome: Outcome) -> Record:
    return Record(search_id="s", number=number, candidate=tried, purpose="search", outcome=outcome, seconds=1.0)


def tried(rates: list[tuple[Setting, float]]) -> list[Record]:
    return [
        record(number, c, measured(Trial(candidate=c, device="cpu"), rate)) for number, (c, rate) in enumerate(rates)
    ]


def known(records: list[Record]) -> Ledger:
    return ledger_of(records, Space(candidates=(), baseline=candidate("fp32", 32)))


def test_the_fastest_are_measured_again_one_after_the_other() -> None:
    rates = {16: 50.0, 32: 90.0, 64: 100.0, 128: 95.0}
    records = tried([(candidate("fp32", size), rate) for size, rate in rates.items()])
    again = []
    while (found := next_repeat(known(records))) is not None:
        again.append(found.batch_size)
        records += tried([(found, rates[found.batch_size])])
    assert sorted(again) == [32, 64, 128]


def test_what_failed_or_ran_as_found_is_not_measured_again() -> None:
    as_found = Setting(precision="fp32", batch_size=64, as_found=True)
    records = tried([(as_found, 100.0), (candidate("fp32", 32), 90.0)])
    records.append(record(9, candidate("fp32", 32), Failure(kind="crash", message="it died")))
    assert next_repeat(known(records)) is None


def test_a_stall_while_measuring_again_does_not_rule_out_what_was_measured() -> None:
    records = tried([(candidate("fp32", 64), 100.0), (candidate("fp32", 32), 90.0)])
    records.append(record(9, candidate("fp32", 64), Failure(kind="timeout", message="still after step 3")))
    assert failures(records) == {}
    assert candidate("fp32", 64) in known(records).measured
    alone = record(10, candidate("fp32", 128), Failure(kind="timeout", message="still after step 3"))
    assert set(failures([*records, alone])) == {candidate("fp32", 128)}


def searched(budget_seconds: float, rate: float) -> ScriptedSearch:
    space = Space(candidates=tuple(candidate("fp32", size) for size in (8, 16, 32, 64)), baseline=candidate("fp32", 32))
    made = ScriptedSearch(space, lambda spec: measured(spec, rate * spec.candidate.batch_size**0.1), budget_seconds)
    made.explore()
    return made


def test_without_time_nothing_is_run_for_certainty_alone() -> None:
    found = searched(30.0, rate=16.0)  # a trial takes most of what there is
    sizes = [r.candidate.batch_size for r in found.records]
    assert len(sizes) == len(set(sizes)) < 4


@pytest.mark.parametrize(("times", "is_run"), [(1.5, False), (2.5, True)])
def test_what_is_run_for_certainty_alone_must_fit_twice(times: float, is_run: bool) -> None:
    space = Space(candidates=tuple(candidate("fp32", size) for size in (16, 32)), baseline=candidate("fp32", 32))
    made = ScriptedSearch(space, lambda spec: measured(spec, 32.0))
    made.measure(candidate("fp32", 32))
    made.budget.now = made.budget.seconds - made.budget.confirm_seconds - times * made.records[-1].seconds
    with Study.open("sqlite://", "scripted", made.ledger) as study:
        found = Looks(made.conditions, study).next(made.ledger, made.budget)
    assert (found is not None) == is_run


@pytest.mark.parametrize(
    ("num_steps", "num_together", "is_wider"),
    [(NUM_STEPS_BEFORE_CUT, 1, True), (NUM_STEPS_BEFORE_CUT - 1, 1, False), (2, 4, True)],
)
def test_what_the_search_saw_of_the_machines_drift_widens_the_promise(
    num_steps: int, num_together: int, is_wider: bool
) -> None:
    """Two of its trials of one candidate are far apart; one that was cut after its warm-up says nothing."""

    def promised(records: list[Record]) -> tuple[float, float]:
        runs = confirm_runs(records, candidate("fp32", 32), {})
        return gather(known(records), runs, runs, {}).samples_per_second_interval

    confirming = [
        msgspec.structs.replace(r, purpose="confirm", round=r.number)
        for r in tried([(candidate("fp32", 32), rate) for rate in (99.0, 100.0, 101.0)])
    ]
    searching = [
        msgspec.structs.replace(
            r,
            outcome=msgspec.structs.replace(
                r.outcome,
                raw_step_seconds=(r.outcome.step_seconds,) * num_steps,
                num_steps_together=num_together,
            ),
        )
        for r in tried([(candidate("fp32", 64), 60.0), (candidate("fp32", 64), 110.0)])
        if isinstance(r.outcome, Measurement)
    ]
    (low, high), (lower, higher) = promised(confirming), promised([*searching, *confirming])
    assert (lower < 0.9 * low and higher > 1.1 * high) == is_wider
    assert is_wider or (lower, higher) == (low, high)


def test_without_a_round_in_common_the_speed_up_holds_what_both_promises_allow() -> None:
    ours, theirs = candidate("fp32", 64), candidate("fp32", 32)
    records = tried([(ours, 150.0), (theirs, 100.0)])
    chosen, baseline = (best_runs(records, c, {}) for c in (ours, theirs))
    evidence = gather(known(records), chosen, baseline, {})
    (low, high), promised = evidence.samples_per_second_interval, evidence.baseline.samples_per_second_interval
    assert promised is not None
    assert evidence.speedup == pytest.approx(1.5)
    assert evidence.speedup_interval == pytest.approx((low / promised[1], high / promised[0]))
