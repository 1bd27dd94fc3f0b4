"""What a search expects of the jobs that run, and decides by."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from scripted_backend import ScriptedSearch, candidate, fidelity, measured

from autotune_amp.core.outcome import Measurement, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.space import Space
from autotune_amp.search.stages.checks import next_action
from autotune_amp.search.stages.pending import ledger_with_predicted
from autotune_amp.trial.jobs import Check, Trial
from autotune_amp.trial.step_profile.breakdown import ProfileJob

SIZES = (8, 16, 32, 64, 128, 256)
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
SPACE = Space(
    candidates=tuple(candidate(p, b) for p in PRECISIONS for b in SIZES),
    baseline=candidate("fp32", 32),
    checks=frozenset({"fidelity", "calibration", "accumulation"}),
)


def rate(setting: Setting) -> float:
    return {"fp32": 100.0, "bf16": 200.0, "fp16": 190.0}[setting.precision] * min(1.0, setting.batch_size / 128)


def answer(trial: Trial) -> Outcome:
    return measured(trial, rate(trial.candidate))


def after(*settings: Setting) -> ScriptedSearch:
    searched = ScriptedSearch(SPACE, answer)
    searched.measure(*settings)
    return searched


def trial(setting: Setting, **fields: Any) -> Trial:
    return Trial(candidate=setting, device="cpu", **fields)


def check(setting: Setting, **fields: Any) -> Check:
    return Check(**{"what": "fidelity", **fields}, candidate=setting, device="cpu")


def expected(ledger: Ledger, *pending: Any) -> Ledger:
    found = ledger_with_predicted(ledger, pending)
    assert found is not None
    return found


def test_a_trial_is_expected_to_run_as_those_around_it() -> None:
    ledger = after(*(candidate("fp32", b) for b in (16, 32, 64))).ledger
    found = expected(ledger, trial(candidate("fp32", 128))).outcomes[candidate("fp32", 128)]
    assert isinstance(found, Measurement)
    assert rate(candidate("fp32", 64)) < found.samples_per_second < 2 * rate(candidate("fp32", 128))
    assert found.step_seconds == pytest.approx(128 / found.samples_per_second)
    low, high = found.step_seconds_interval
    assert low <= found.step_seconds <= high
    assert max(found.raw_step_seconds) <= high, "they are stretched alike"


def test_of_several_ranks_and_of_tokens_as_many_are_expected_as_those_around_it_have() -> None:
    def in_tokens(trial: Trial) -> Outcome:
        found = measured(trial, rate(trial.candidate))
        return replace(found, samples_per_second=4 * found.samples_per_second, tokens_per_second=400.0)

    searched = ScriptedSearch(SPACE, in_tokens)
    searched.measure(*(candidate("fp32", b) for b in (32, 64)))
    slow, found = (
        expected(searched.ledger, trial(candidate("fp32", 256))).measurements[candidate("fp32", b)][-1]
        for b in (64, 256)
    )
    assert found.tokens_per_second == pytest.approx(400.0 * found.samples_per_second / slow.samples_per_second)
    assert found.step_seconds == pytest.approx(4 * 256 / found.samples_per_second)


def test_what_is_only_expected_sets_no_limits_and_is_not_kept() -> None:
    ledger = after(candidate("fp32", 32), candidate("fp32", 64)).ledger
    records, best = ledger.records, ledger.best
    found = expected(ledger, trial(candidate("fp32", 256)), check(candidate("bf16", 16)))
    assert (found.best, found.actual) == (best, ledger)
    assert len(found.records) == len(records) + 2
    assert ledger.records == records
    assert candidate("fp32", 256) not in ledger.outcomes


def test_a_pending_check_is_not_asked_for_again() -> None:
    ledger = after(candidate("fp32", 32), candidate("bf16", 128)).ledger
    first = next_action(ledger)
    assert first is not None
    assert (first.purpose, first.setting.precision) == ("fidelity", "bf16")
    pending = check(first.setting)
    assert next_action(expected(ledger, pending)) is None


def test_a_pending_calibration_is_not_asked_for_again_and_refuses_nothing() -> None:
    ledger = after(candidate("fp32", 32), candidate("fp16", 128)).ledger
    assert ledger.awaits_calibration(candidate("fp16", 128))
    found = expected(ledger, check(candidate("fp16", 128), what="calibration"))
    assert not found.awaits_calibration(candidate("fp16", 128))
    assert candidate("fp16", 128) in found.merits


def test_an_expected_trial_is_not_calibrated_before_it_ran() -> None:
    ledger = after(candidate("fp32", 32), candidate("fp16", 64)).ledger
    found = expected(ledger, trial(candidate("fp16", 128)))
    assert candidate("fp16", 128) in found.measurements
    assert not found.awaits_calibration(candidate("fp16", 128))


@pytest.mark.parametrize(
    "job",
    [
        check(candidate("fp32", 16), what="accumulation"),
        ProfileJob(device="cpu", trial=trial(candidate("fp32", 32))),
    ],
)
def test_what_changes_everything_is_waited_for(job: Any) -> None:
    assert ledger_with_predicted(after(candidate("fp32", 32)).ledger, [job]) is None


def test_before_anything_ran_the_trials_are_only_counted() -> None:
    searched = ScriptedSearch(SPACE, answer)
    found = expected(searched.ledger, trial(SPACE.baseline), trial(SPACE.baseline))
    assert (found.num_awaited, found.records) == (2, ())


def test_a_verdict_that_is_there_stands_beside_an_expected_one() -> None:
    searched = ScriptedSearch(SPACE, answer, check_answer=lambda job: fidelity(job.candidate.precision, "unfaithful"))
    searched.measure(candidate("fp32", 32), candidate("bf16", 128))
    found = expected(searched.ledger, check(candidate("bf16", 16)), check(candidate("fp16", 16)))
    assert {key.precision: verdict.verdict for key, verdict in found.fidelity.items()} == {
        "bf16": "faithful",
        "fp16": "faithful",
    }


settings_of_the_space = st.sampled_from(SPACE.candidates)


@given(
    tried=st.lists(settings_of_the_space, min_size=1, max_size=6, unique=True),
    pending=st.lists(settings_of_the_space, max_size=6),
)
def test_whatever_runs_the_expected_is_finite_and_the_ledger_as_it_was(
    tried: list[Setting], pending: list[Setting]
) -> None:
    ledger = after(*tried).ledger
    before = ledger.measured_merits
    if set(tried) == set(pending):  # it begins: the same runs on every slot
        assert ledger_with_predicted(ledger, [*map(trial, pending)]) is None
        return
    found = expected(ledger, *map(trial, pending))
    assert set(found.measured_merits) == {*tried, *pending}
    assert all(0 < merit.speed < 1e6 for merit in found.measured_merits.values())
    assert ledger.measured_merits == before
