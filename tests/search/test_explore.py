"""What is measured again, and what the time left allows."""

from __future__ import annotations

import pytest
from scripted_backend import ScriptedSearch, candidate, ledger_of, measured

from autotune_amp.core.outcome import Failure, Outcome, Record
from autotune_amp.core.setting import Setting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.ranking import failures
from autotune_amp.search.space import Space
from autotune_amp.search.stages.explore import Looks
from autotune_amp.search.study import Study
from autotune_amp.trial.jobs import Trial


def record(number: int, tried: Setting, outcome: Outcome) -> Record:
    return Record(search_id="s", number=number, candidate=tried, purpose="search", outcome=outcome, seconds=1.0)


def tried(rates: list[tuple[Setting, float]]) -> list[Record]:
    return [
        record(number, c, measured(Trial(candidate=c, device="cpu"), rate)) for number, (c, rate) in enumerate(rates)
    ]


def known(records: list[Record]) -> Ledger:
    return ledger_of(records, Space(candidates=(), baseline=candidate("fp32", 32)))


def test_a_stall_while_measuring_again_does_not_rule_out_what_was_measured() -> None:
    records = tried([(candidate("fp32", 64), 100.0), (candidate("fp32", 32), 90.0)])
    records.append(record(9, candidate("fp32", 64), Failure(kind="timeout", message="still after step 3")))
    assert failures(records) == {}
    assert candidate("fp32", 64) in known(records).measured
    alone = record(10, candidate("fp32", 128), Failure(kind="timeout", message="still after step 3"))
    assert set(failures([*records, alone])) == {candidate("fp32", 128)}


@pytest.mark.parametrize(("times", "is_run"), [(1.5, False), (2.5, True)])
def test_what_is_run_for_certainty_alone_must_fit_twice(times: float, is_run: bool) -> None:
    space = Space(candidates=tuple(candidate("fp32", size) for size in (16, 32)), baseline=candidate("fp32", 32))
    made = ScriptedSearch(space, lambda spec: measured(spec, 32.0))
    made.measure(candidate("fp32", 32))
    made.budget.now = made.budget.seconds - made.budget.confirm_seconds - times * made.records[-1].seconds
    with Study.open("sqlite://", "scripted", made.ledger) as study:
        found = Looks(made.conditions, study).next(made.ledger, made.budget)
    assert (found is not None) == is_run
