from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_backend import SUMMARY, accumulation, described, fidelity, ledger_of, shortlist
from scripted_backend import measurement as measured

from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.evidence import PlainEnvironment
from autotune_amp.core.outcome import CheckOutcome, Failure, FailureKind, Measurement, Outcome, Purpose, Record
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.core.recommendation import Decision, Exclusion, SearchSummary
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import rate
from autotune_amp.search.answer.decide import decide
from autotune_amp.search.ranking import best_runs, check_key, fidelity_verdicts, rank
from autotune_amp.search.space import Space
from autotune_amp.search.stages.fallbacks import fallback_plans

HEAP = {"MALLOC_TRIM_THRESHOLD_": "2147483647"}
OOM = Failure(kind="oom", message="it asked for 3 GiB of 2 GiB")


def at(precision: Precision, batch_size: int, **more: Any) -> Setting:
    return Setting(precision=precision, batch_size=batch_size, **more)


FP32, BF16, FP16 = at("fp32", 32), at("bf16", 64), at("fp16", 64)
FOUND = at("fp32", 32, as_found=True)


SPENT = SearchSummary(study="s", num_trials=1, num_failures=0, seconds=1.0, is_budget_spent=True)


class Log:
    """Builds the records of a search as it would write them."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def add(
        self, candidate: Setting, outcome: Outcome | CheckOutcome | float, purpose: Purpose = "search", **more: Any
    ) -> Log:
        if isinstance(outcome, float):
            outcome = measured(outcome)
        fields = {"search_id": "s", "number": len(self.records), "seconds": 1.0, **more}
        self.records.append(Record(candidate=candidate, purpose=purpose, outcome=outcome, **fields))
        return self

    def confirm(self, candidate: Setting, *outcomes: Outcome | float, environment: dict[str, str] | None = None) -> Log:
        for number, outcome in enumerate(outcomes):
            self.add(candidate, outcome, "confirm", round=number, environment=environment or {})
        return self


def decided(
    log: Log,
    baseline: Setting = FP32,
    environment: dict[str, str] | None = None,
    *,
    is_checked: bool = True,
    **more: Any,
) -> Decision:
    """The decision where, unless told otherwise, all that the log has no verdict on was found faithful."""
    candidates = tuple(dict.fromkeys(r.candidate for r in log.records if not r.candidate.as_found))
    space = more.pop("space", Space(candidates=candidates, baseline=baseline))
    made = Log()
    made.records = list(log.records)
    known = fidelity_verdicts(log.records)
    checks = {check_key(c) for c in (*candidates, baseline) if not c.as_found and c.precision != "fp32"} - known.keys()
    for check in checks if is_checked else ():
        made.add(at(check.precision, 16, pinned_modules=check.pinned_modules), fidelity(check.precision), "fidelity")
    ledger = ledger_of(made.records, space, more.pop("scales", None), more.pop("objective", "speed"))
    return decide(ledger, environment=environment or {}, **{"search": SUMMARY, "description": described(), **more})


def usual() -> Log:
    """bf16 twice as fast as the baseline, fp16 close behind, all confirmed three times in their environments."""
    log = Log().add(FP32, 100.0).add(BF16, 200.0).add(FP16, 190.0)
    log.confirm(BF16, 202.0, 200.0, 198.0, environment=HEAP).confirm(FP16, 191.0, 190.0, 189.0, environment=HEAP)
    return log.confirm(FP32, 101.0, 100.0, 99.0)


@pytest.mark.parametrize(
    ("measured_speeds", "winner"),
    [
        ({FP32: 98.0, BF16: 100.0}, FP32),
        ({FP32: 96.9, BF16: 100.0}, BF16),
        ({at("fp32", 256): 100.0, at("fp32", 64): 98.0, at("fp32", 32): 97.5, at("fp32", 16): 80.0}, at("fp32", 32)),
        ({at("bf16", 16): 99.0, at("fp32", 256): 98.0}, at("fp32", 256)),  # precision goes before batch
        ({FOUND: 200.0, BF16: 100.0}, BF16),  # a config cannot express as found
        ({FOUND: 200.0}, FOUND),
    ],
)
def test_the_rule(measured_speeds: dict[Setting, float], winner: Setting) -> None:
    assert rank(measured_speeds)[0] == winner


def test_what_was_measured_as_a_fallback_may_be_recommended_where_it_was_asked_for() -> None:
    half, full = at("fp16", 256), at("fp32", 256)
    log = Log().add(FP32, 3000.0).add(half, 4576.0).add(full, 7150.0, "fallback")
    config = decided(log).config
    assert (config.precision, config.batch_size) == ("fp32", 256)
    config = decided(log, space=Space(candidates=(FP32, half), baseline=FP32)).config
    assert (config.precision, config.batch_size) == ("fp16", 256)
    assert [plan.batch_size for plan in config.plans] == [256]


candidates = st.builds(
    Setting, precision=st.sampled_from(PRECISIONS), batch_size=st.integers(1, 512), as_found=st.booleans()
)


@pytest.mark.parametrize(
    ("measured_speeds", "expected"),
    [
        ({FP32: 100.0, BF16: 200.0, FP16: 190.0}, (BF16, FP16)),
        ({FP32: 100.0, BF16: 200.0}, (BF16, FP32)),  # nobody close: the next in the ranking
        ({BF16: 198.0, FP16: 200.0, at("fp32", 64): 185.0}, (BF16, FP16)),
        ({BF16: 200.0, at("fp32", 64): 185.0, at("bf16", 128): 186.0}, (BF16, at("bf16", 128))),  # faster, not next
        ({FOUND: 100.0, FP32: 90.0}, (FOUND, FP32)),
        ({FOUND: 100.0}, (FOUND, None)),
    ],
)
def test_the_shortlist(measured_speeds: dict[Setting, float], expected: tuple[Setting, Setting | None]) -> None:
    log = Log()
    for candidate, speed in measured_speeds.items():
        log.add(candidate, speed)
    assert shortlist(log.records, FOUND) == (*expected, FOUND)


def test_once_the_checks_are_over_what_has_none_comes_after_fp32() -> None:
    made = Log().add(FP32, 100.0).add(BF16, 200.0).add(FP16, 190.0)
    where = Space(candidates=(FP32, BF16, FP16), baseline=FP32)
    assert shortlist(made.records, FP32) == (BF16, FP16, FP32)
    assert ledger_of(made.records, where).final_shortlist == (FP32, BF16, FP32)
    made.add(at("fp16", 16), fidelity("fp16"), "fidelity")
    assert ledger_of(made.records, where).final_shortlist == (FP16, FP32, FP32)
    low = Space(candidates=(FP32, BF16), baseline=FP32, weights="bf16")  # then fp32 needs a check of its own
    assert ledger_of(Log().add(FP32, 100.0).add(BF16, 200.0).records, low).final_shortlist == (BF16, FP32, FP32)
    assert ledger_of([], where).final_shortlist is None


def test_a_setting_is_as_fast_as_its_last_trial_until_it_is_confirmed() -> None:
    log = Log().add(BF16, 100.0).add(BF16, 200.0)
    assert best_runs(log.records, BF16, {}).speeds == [200.0]
    log.confirm(BF16, 150.0)
    assert best_runs(log.records, BF16, {}).speeds == [150.0]


def test_what_failed_once_is_never_chosen() -> None:
    log = usual().confirm(BF16, OOM, environment=HEAP)
    assert BF16 not in ledger_of(log.records, Space(candidates=(), baseline=FP32)).speeds
    assert decided(log, environment=HEAP).config.precision == "fp16"


@pytest.mark.parametrize(("kind", "precision"), [("timeout", "bf16"), ("crash", "fp16")])
def test_a_confirmation_that_the_budget_cut_off_speaks_against_nothing(kind: FailureKind, precision: str) -> None:
    log = usual()
    for number in (3, 4):  # a first crash alone would speak against nothing
        log.add(BF16, Failure(kind=kind, message="it ended"), "confirm", round=number, environment=HEAP)
    decision = decided(log, environment=HEAP)
    assert decision.config.precision == precision
    assert [e.reason for e in decision.excluded] == ([] if kind == "timeout" else ["crash: it ended"])
    assert ("crash" in {row.status for row in decision.candidates}) == (kind == "crash")


def test_the_confirmation_can_overturn_the_search() -> None:
    log = Log().add(FP32, 100.0).add(BF16, 200.0).add(FP16, 195.0).confirm(BF16, *[150.0] * 3)
    log.confirm(FP16, measured(190.0, 5), measured(195.0, 9), measured(260.0, 7)).confirm(FP32, *[100.0] * 3)
    config, evidence = decided(log).config, decided(log).evidence
    assert (config.precision, config.loss_scale) == ("fp16", LossScale())
    assert (evidence.samples_per_second, evidence.peak_memory_bytes) == (195.0, 9), "the median and the largest"


@pytest.mark.parametrize(("speed", "is_kept"), [(90.0, True), (102.9, True), (103.1, False)])
def test_what_there_is_stays_unless_three_percent_are_gained(speed: float, is_kept: bool) -> None:
    log = Log().add(FP32, 100.0).add(BF16, 200.0)
    log.confirm(BF16, *[speed] * 3, environment=HEAP).confirm(FP32, 100.0, 100.0, 100.0)
    decision = decided(log, environment=HEAP)
    assert (decision.config.precision == "fp32") == is_kept
    if is_kept:
        assert decision.reason.startswith("Keep what you have: fp32 batch 32")
        assert decision.config.environment == {}
        assert (decision.evidence.speedup, decision.evidence.speedup_interval) == (1.0, (1.0, 1.0))
        assert decision.evidence.samples_per_second == 100.0
        assert decision.evidence.plain_environment is None
        assert decision.warnings == ()


def test_less_to_go_wrong_is_no_reason_to_be_slower_than_today() -> None:
    log = Log().add(BF16, 100.0).add(FP32, 200.0).confirm(FP32, *[98.0] * 3).confirm(BF16, 100.0, 100.0, 100.0)
    assert decided(log, baseline=BF16).config.precision == "bf16"


@pytest.mark.parametrize(
    ("ours", "is_kept"),
    [
        ([120.0], True),  # of one process each nobody knows how they differ
        ([130.0], False),
        ([120.0, 121.0, 119.0], False),
        ([150.0, 90.0, 120.0], True),
    ],
)
def test_a_change_needs_a_gain_that_is_sure(ours: list[float], is_kept: bool) -> None:
    log = Log().add(FP32, 100.0).add(BF16, 120.0).confirm(BF16, *ours).confirm(FP32, *[100.0] * len(ours))
    decision = decided(log)
    assert (decision.config.precision == "fp32") == is_kept
    assert (f"{BF16} may be faster" in decision.reason) == is_kept


def test_a_runner_up_says_nothing_of_the_noise_of_the_baseline_that_both_are_compared_with() -> None:
    made = Log().add(FP32, 103.0).add(BF16, 108.0).add(FP16, 107.0)
    made.confirm(FP32, 100.0, 106.0, 103.0).confirm(BF16, 108.0, 108.0, 108.0)
    alone = decided(made).evidence.speedup_interval
    assert decided(made.confirm(FP16, 107.0, 107.0, 107.0)).config.precision == "fp32"
    assert alone == (1.0, 1.0), "fp32 is kept without a runner-up too"


@pytest.mark.parametrize(
    ("faster", "is_sure"),
    [
        ([105.0, 106.5, 104.5], True),
        ([105.0, 106.5, 104.5, 112.0], True),  # after three rounds it was
        ([105.0, 107.5, 102.9, 107.4], False),
        ([105.0, 107.5, 102.9, 107.4, 102.9, 107.4, 102.9, 107.4], True),
    ],
)
def test_a_gain_that_is_looked_at_after_each_further_round_has_to_be_surer(
    faster: list[float], *, is_sure: bool
) -> None:
    """By 97.5 % each of them would be sure, and some of eighteen looks at no gain at all."""
    made = Log().add(FP32, 100.0).add(BF16, 105.0).confirm(FP32, *[100.0] * len(faster)).confirm(BF16, *faster)
    assert decided(made).config.precision == ("bf16" if is_sure else "fp32")


def test_what_is_surely_faster_is_taken_where_the_fastest_is_not() -> None:
    log = Log().add(FP32, 100.0).add(BF16, 200.0).add(FP16, 190.0).confirm(FP32, *[100.0] * 3)
    log.confirm(BF16, 115.0).confirm(FP16, 113.0, 109.0, 117.0)
    assert decided(log).config.precision == "fp16"


ALONE = Space(candidates=(FP32, BF16), baseline=FP32)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"is_budget_spent": True}, ("in 75 s", "29 s to start", "Give --budget")),
        ({"is_budget_spent": True, "was_interrupted": True}, ("interrupted", "same search again")),
        ({}, ("--trials",)),
    ],
)
def test_where_only_today_was_measured_that_is_what_is_said(fields: dict[str, Any], said: tuple[str, ...]) -> None:
    search = SearchSummary(study="s", num_trials=1, num_failures=0, seconds=75.0, start_seconds=29.0, **fields)
    decision = decided(Log().add(FP32, 100.0), space=ALONE, search=search, is_checked=False)
    assert decision.reason.startswith("Only fp32 batch 32 was measured")
    assert all(part in decision.reason for part in said), decision.reason
    assert not any("less promising" in (row.reason or "") for row in decision.candidates)
    compared = decided(Log().add(FP32, 100.0).add(BF16, 90.0), space=ALONE, search=search)
    assert compared.reason.startswith("Keep what you have")


def test_the_environment_alone_can_be_the_gain() -> None:
    log = Log().add(FP32, 150.0).confirm(FP32, *[150.0] * 3, environment=HEAP).confirm(FP32, *[100.0] * 3)
    decision = decided(log, environment=HEAP)
    assert decision.config == AmpConfig(precision="fp32", batch_size=32, environment=HEAP)
    assert decision.evidence.speedup == 1.5
    assert decision.evidence.plain_environment == PlainEnvironment(samples_per_second=100.0, speedup=1.0)
    assert "in the recommended environment reaches 150 samples/s, 1.50 times" in decision.reason


def test_variables_that_may_help_are_named_and_not_the_baseline_itself() -> None:
    log = Log().add(FP32, 100.0).confirm(FP32, *[100.0, 101.0, 99.0])
    log.confirm(FP32, *[90.0, 140.0, 115.0], environment=HEAP)
    reason = decided(log, environment=HEAP).reason
    assert f"{FP32} with the recommended variables may be faster" in reason


def test_a_baseline_as_found_is_the_yardstick_and_kept_as_it_is() -> None:
    log = Log().add(FOUND, 100.0).add(FP32, 60.0).confirm(FP32, *[60.0] * 3).confirm(FOUND, *[100.0] * 3)
    decision = decided(log, baseline=FOUND)
    assert decision.reason.startswith("Keep what you have: fp32 batch 32 as found")
    assert decision.evidence.samples_per_second == 100.0
    assert decision.config.as_found
    assert decision.evidence.baseline.config.as_found
    assert not decided(usual(), environment=HEAP).config.as_found
    assert decided(Log().add(FOUND, 100.0).confirm(FOUND, 50.0), baseline=FOUND).evidence.samples_per_second == 50.0


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (Log().add(FP32, OOM).add(BF16, 200.0).confirm(BF16, *[200.0] * 3), "oom: it asked for 3 GiB of 2 GiB"),
        (Log().add(FP32, 100.0).add(BF16, 200.0).confirm(BF16, *[200.0] * 3).confirm(FP32, OOM), "oom: it asked"),
        (Log().add(BF16, 200.0).confirm(BF16, *[200.0] * 3), "not measured: the search ended before"),
    ],
)
def test_a_baseline_without_a_number_leaves_no_speedup(log: Log, reason: str) -> None:
    decision = decided(log)
    assert decision.config.precision == "bf16"
    evidence = decision.evidence
    assert (evidence.speedup, evidence.speedup_interval, evidence.baseline.samples_per_second) == (None, None, None)
    assert evidence.baseline.reason is not None
    assert evidence.baseline.reason.startswith(reason)
    assert evidence.baseline.reason in decision.reason
    assert evidence.is_confirmed


@pytest.mark.parametrize(("num_winner", "num_baseline"), [(0, 0), (2, 3), (3, 2), (2, 2)])
def test_fewer_than_three_processes_confirm_nothing(num_winner: int, num_baseline: int) -> None:
    log = Log().add(FP32, 100.0).add(BF16, 200.0)
    log.confirm(BF16, *[200.0] * num_winner).confirm(FP32, *[100.0] * num_baseline)
    decision = decided(log)
    assert decision.config.precision == "bf16"
    assert not decision.evidence.is_confirmed
    assert decision.evidence.num_processes == max(1, num_winner)
    (said,) = [w for w in decision.warnings if w.startswith("Unconfirmed:")]
    assert ("this config" if num_winner < 3 else "the baseline") in said
    assert "--budget" in said


def test_the_speedup_interval_pairs_what_ran_in_the_same_round() -> None:
    log = Log().add(FP32, 100.0).add(BF16, 200.0)
    log.confirm(BF16, 240.0, 200.0, 160.0).confirm(FP32, 120.0, 100.0, 80.0)  # the machine slows down
    paired = decided(log).evidence.speedup_interval
    crossed = Log().add(FP32, 100.0).add(BF16, 200.0)
    crossed.confirm(BF16, 480.0, 400.0, 320.0).confirm(FP32, 80.0, 100.0, 120.0)
    unpaired = decided(crossed).evidence.speedup_interval
    assert paired is not None
    assert unpaired is not None
    assert unpaired[1] - unpaired[0] > 2 * (paired[1] - paired[0])


def test_fallbacks_are_what_was_measured_to_fit_at_the_same_effective_batch() -> None:
    log = Log().add(FP32, 50.0).add(FP16, 300.0).add(at("bf16", 64), 200.0)
    log.add(at("fp32", 64), OOM, "fallback").add(at("fp32", 32, accumulation_steps=2), measured(90.0, 7), "fallback")
    log.add(at("fp32", 16, accumulation_steps=4), 80.0, "fallback").add(at("tf32", 64), 120.0)
    failing = at("bf16", 32, accumulation_steps=2)
    log.add(failing, 250.0).confirm(failing, *[Failure(kind="crash", message="it died")] * 2)
    whole = FallbackPlan(
        precision="bf16", batch_size=64, peak_memory_bytes=1000, samples_per_second=200.0, slowdown=1.5
    )
    assert decided(log).config.fallback == (whole,), "nobody asked whether accumulation is exact"
    log.add(at("fp32", 16), accumulation(), "accumulation")
    log.add(at("fp32", 32, accumulation_steps=2), measured(90.0, 5), "fallback")  # the most of two processes counts
    assert decided(log).config.fallback == (
        whole,
        FallbackPlan(
            precision="fp32",
            batch_size=32,
            accumulation_steps=2,
            peak_memory_bytes=7,
            samples_per_second=90.0,
            slowdown=300.0 / 90.0,
        ),
    )


def test_a_plan_of_a_compiled_config_is_measured_without_compiling_and_held_against_such_steps() -> None:
    compiled = at("bf16", 64, compile="default")
    log = Log().add(at("fp32", 64), 50.0).add(at("bf16", 64), 200.0).add(compiled, 400.0)
    (plan,) = fallback_plans(log.records, compiled, is_splitting_allowed=False)
    assert (plan.precision, plan.compile, plan.samples_per_second, plan.slowdown) == ("fp32", "off", 50.0, 4.0)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (measured(200.0, data_seconds=0.1), "20 % of a step waits for it; without waiting it would reach 250 "),
        (measured(200.0, num_skips=2), "skipped 6 of the measured steps"),
        (measured(200.0), None),
    ],
)
def test_doubts_are_said(outcome: Measurement, said: str | None) -> None:
    chosen = at("fp16", 32)
    log = Log().add(FP32, 100.0).add(chosen, 200.0).confirm(FP32, *[100.0] * 3).confirm(chosen, *[outcome] * 3)
    found = decided(log)
    warnings = found.warnings
    assert [note for note in found.notes if "it was not calibrated" in note]
    apart = Log().add(FP32, 100.0).confirm(FP32, 70.0, 100.0, 140.0)
    assert any("The processes disagree" in w for w in decided(apart).warnings)
    assert len(warnings) == (0 if said is None else 1)
    assert said is None or any(said in w for w in warnings)


def test_a_command_keeps_its_own_loss_scale_and_nothing_is_said_of_a_calibration() -> None:
    chosen = at("fp16", 32)
    log = Log().add(FP32, 100.0).add(chosen, 200.0).confirm(FP32, *[100.0] * 3).confirm(chosen, *[200.0] * 3)
    space = Space(candidates=(FP32, chosen), baseline=FP32, checks=frozenset({"fidelity"}))
    assert "calibrated" not in " ".join(decided(log, space=space).notes)


def test_a_command_whose_loader_has_workers_is_told_how_more_are_tried() -> None:
    log = Log().add(FP32, 100.0).confirm(FP32, *[measured(100.0, data_seconds=0.2)] * 3)
    command = described(num_workers=None, missing_placeholders=("{num_workers=8}",))
    (warning,) = [each for each in decided(log, description=command).warnings if "data loader" in each]
    assert "{num_workers=8}" in warning
    assert "itself" not in warning


def test_steps_skipped_without_a_loss_scale_are_said() -> None:
    chosen = at("bf16", 32)
    log = Log().add(FP32, 100.0).add(chosen, 200.0).confirm(FP32, *[100.0] * 3)
    log = log.confirm(chosen, *[measured(200.0, num_skips=2)] * 3)
    assert any("6 of the measured steps" in w and "no loss scale" in w for w in decided(log).warnings)


@pytest.mark.parametrize(("searched", "is_said"), [(140.0, False), (160.0, True), (71.0, False), (60.0, True)])
def test_a_confirmation_far_off_the_searchs_trials_is_said_and_the_promise_holds_both(
    searched: float, is_said: bool
) -> None:
    def log(speed: float) -> Log:
        long_enough = measured(speed, raw_step_seconds=(1.0,) * 8)
        return Log().add(FP32, long_enough).add(FP32, long_enough).confirm(FP32, 101.0, 100.0, 99.0)

    steady, found = decided(log(100.0)), decided(log(searched))
    (low, high), both = steady.evidence.samples_per_second_interval, found.evidence.samples_per_second_interval
    said = [w for w in found.warnings if w.startswith("The machine changed")]
    if is_said:
        assert both == (min(low, searched), max(high, searched))
        assert f"ran at {rate(searched)}, the confirmation at 100 samples/s" in said[0]
        assert not any("disagree" in w for w in (*found.warnings, *found.notes)), "said once, and rightly"
    else:
        assert not said
        assert low * 0.9 < both[0] < both[1] < high * 1.1


@pytest.mark.parametrize(
    ("chosen", "is_warned"),
    [(at("bf16", 64), True), (at("bf16", 32), False), (at("bf16", 16, accumulation_steps=2), False)],
)
def test_a_changed_effective_batch_is_said(chosen: Setting, is_warned: bool) -> None:
    warnings = decided(Log().add(FP32, 100.0).add(chosen, 200.0)).warnings
    assert any("learning rate" in w and "--effective-batch-size 32" in w for w in warnings) == is_warned


def test_every_candidate_has_a_row_and_every_loss_its_reason() -> None:
    tried, cut, failed, ruled_out, left = (at("bf16", b) for b in (8, 16, 64, 128, 4))
    fp8 = Exclusion(precision="fp8", batch_size=None, reason="no fp8")
    space = Space(candidates=(FP32, left, tried, cut, failed, ruled_out), baseline=FP32, excluded=(fp8,))
    log = Log().add(FP32, 100.0).add(tried, 150.0).add(cut, measured(60.0, was_cut=True)).add(failed, OOM)
    log.confirm(tried, 140.0, 141.0, 142.0).confirm(FP32, 100.0, 100.0, 100.0)
    beyond = "bf16 batch 64 ran out of memory, and this needs at least as much"
    decision = decided(log, space=space, search=SPENT)
    assert len(decision.excluded) == 4
    rows = {(r.precision, r.batch_size): (r.status, r.samples_per_second, r.reason) for r in decision.candidates}
    assert rows == {
        ("fp32", 32): ("confirmed", 100.0, None),
        ("bf16", 4): ("untried", None, "not tried: the search ended before"),
        ("bf16", 8): ("confirmed", 141.0, None),
        ("bf16", 16): ("cut", 60.0, None),
        ("bf16", 64): ("oom", None, OOM.message),
        ("bf16", 128): ("excluded", None, beyond),
    }
    reasons = {(e.precision, e.batch_size): e.reason for e in decision.excluded}
    assert reasons == {
        ("fp8", None): "no fp8",
        ("bf16", 64): f"oom: {OOM.message}",
        ("bf16", 128): beyond,
        ("bf16", 4): "not tried: the search ended before",
    }
    ended_by_itself = decided(log, space=space)
    assert [e.batch_size for e in ended_by_itself.excluded] == [None, 64, 128]
    assert ended_by_itself.candidates[1].status == "untried"
    assert "less promising" in (ended_by_itself.candidates[1].reason or "")


def test_a_row_never_mixes_environments() -> None:
    log = Log().add(FP32, 150.0).add(BF16, 200.0)
    log.confirm(FP32, *[151.0] * 3, environment=HEAP).confirm(FP32, 98.0, 99.0, 100.0)
    log.confirm(BF16, 201.0, environment=HEAP).add(BF16, 120.0, "plain", round=0)
    decision = decided(log, environment=HEAP)
    baseline, again, other = decision.candidates
    assert (again.samples_per_second, again.has_environment) == (151.0, True)
    assert baseline.samples_per_second == decision.evidence.baseline.samples_per_second == 99.0
    assert baseline.step_seconds == decision.evidence.baseline.step_seconds
    assert other.samples_per_second == 201.0
    unconfirmed = Log().add(FP32, 150.0).add(BF16, 200.0).add(BF16, 120.0, "plain", round=0)
    assert decided(unconfirmed, environment=HEAP).candidates[1].samples_per_second == 200.0


@pytest.mark.parametrize(
    ("chosen", "measured_plans", "missing"), [(at("fp16", 32), ("bf16",), ["fp32"]), (at("fp32", 32), (), [])]
)
def test_a_step_down_without_a_plan_is_said(
    chosen: Setting, measured_plans: tuple[Precision, ...], missing: list[str]
) -> None:
    others = tuple(at(p, 64) for p in ("fp32", "bf16", "fp16"))
    space = Space(candidates=(*others, chosen), baseline=at("fp32", 16))
    log = Log().add(chosen, 200.0)
    for precision in measured_plans:
        log.add(at(precision, 32), 90.0, "fallback")
    warnings = [w for w in decided(log, space=space).notes if w.startswith("No plan for stepping down")]
    assert [w.split()[6] for w in warnings] == missing
    assert all("--budget" in w for w in warnings)
    alone = Space(candidates=(chosen,), baseline=chosen)
    assert not any("No plan" in w for w in decided(log, space=alone).notes)


@pytest.mark.parametrize("chosen", [at("fp16", 32), at("bf16", 32, weights="bf16")], ids=["unfaithful", "weights"])
def test_a_step_down_that_is_left_out_on_purpose_is_not_missed(chosen: Setting) -> None:
    log = Log().add(chosen, 200.0)
    if chosen.precision == "fp16":
        log.add(at("bf16", 16), fidelity("bf16", "unfaithful"), "fidelity").add(at("fp32", 32), 90.0, "fallback")
    space = Space(candidates=tuple(at(p, 32) for p in ("fp32", "bf16", "fp16")), baseline=at("fp32", 16))
    assert not any("No plan" in note for note in decided(log, space=space).notes)


@given(
    st.dictionaries(candidates.filter(lambda c: not c.as_found), st.floats(1.0, 1000.0), min_size=1, max_size=8),
    st.data(),
)
def test_what_is_recommended_was_measured_and_is_near_the_best_where_that_is_surely_faster(
    given_speeds: dict[Setting, float], data: st.DataObject
) -> None:
    baseline = data.draw(st.sampled_from(sorted(given_speeds, key=str)))
    log = Log()
    for candidate, speed in given_speeds.items():
        log.add(candidate, speed)
    decision = decided(log, baseline=baseline)
    config = decision.config
    chosen = at(config.precision, config.batch_size, accumulation_steps=config.accumulation_steps)
    assert decision.evidence.samples_per_second == given_speeds[chosen]
    assert given_speeds[chosen] >= given_speeds[baseline]
    if max(given_speeds.values()) > 1.3 * given_speeds[baseline]:
        assert given_speeds[chosen] >= 0.97 * max(given_speeds.values())
    assert decision.evidence.speedup == pytest.approx(given_speeds[chosen] / given_speeds[baseline])
    low, high = decision.evidence.samples_per_second_interval
    assert low < given_speeds[chosen] < high


def test_what_was_not_confirmed_is_compared_with_trials_of_the_same_hour() -> None:
    """The machine ran at a third of its speed by the confirmation: nothing else has become faster by that."""
    slower, faster, cut = at("bf16", 32), at("fp16", 32), at("fp32", 16)
    log = Log().add(FP32, 100.0).add(slower, 80.0).add(cut, measured(40.0, was_cut=True)).confirm(FP32, *[33.0] * 3)
    assert "times as fast" not in decided(log).reason
    said = decided(Log().add(FP32, 100.0).add(faster, 150.0).confirm(FP32, *[33.0] * 3), is_checked=False).reason
    assert "fp16 batch 32 is 1.50 times as fast" in said


def test_three_warnings_are_said_and_the_rest_are_notes() -> None:
    circumstances = tuple(f"Mind {number}." for number in range(4))
    summary = msgspec.structs.replace(SPENT, warnings=circumstances, notes=("The driver is old.",))
    found = decided(Log().add(FP32, 100.0), search=summary)
    assert found.warnings[0].startswith("Unconfirmed")
    assert found.warnings[1:] == circumstances[:2]
    assert set(circumstances[2:]) | {"The driver is old."} <= set(found.notes)


@pytest.mark.parametrize(
    ("was_interrupted", "way_out"), [(False, "Use a larger --budget"), (True, "Run the same search")]
)
def test_what_confirms_an_answer_is_what_the_search_ended_for_want_of(was_interrupted: bool, way_out: str) -> None:
    summary = msgspec.structs.replace(SPENT, was_interrupted=was_interrupted)
    (said,) = (w for w in decided(Log().add(FP32, 100.0).add(BF16, 50.0), search=summary).warnings if "Unconf" in w)
    assert way_out in said


def test_nothing_is_said_of_settings_that_did_not_run() -> None:
    assert "nothing else that was tried ran" in decided(Log().add(FP32, 100.0).add(BF16, OOM)).reason
    assert "of 2 settings measured none" in decided(Log().add(FP32, 100.0).add(BF16, 50.0)).reason


def test_the_efficiency_of_ranks_is_over_as_many_times_one_of_them() -> None:
    log = Log().add(FP32, 300.0).confirm(FP32, *[300.0] * 3).add(FP32, 100.0, "one_rank")
    ranks = decided(log, description=described(num_ranks=4, is_ranked=True)).evidence.ranks
    assert ranks is not None
    assert ranks.efficiency == pytest.approx(0.75)


def test_ranks_whose_winner_failed_in_the_confirmation_have_no_efficiency() -> None:
    log = Log().add(FP32, 100.0).add(BF16, 300.0).confirm(FP32, *[100.0] * 3).confirm(BF16, OOM)
    ranks = decided(log.add(BF16, 100.0, "one_rank"), description=described(num_ranks=2, is_ranked=True)).evidence.ranks
    assert ranks is not None
    assert ranks.efficiency is None


def test_what_is_confirmed_is_compared_within_one_session() -> None:
    """A slow day's baseline makes no winner of what is slower than the baseline."""
    log = Log().add(FP32, 60.0).add(BF16, 88.0, session=2)
    for number in range(3):
        log.add(FP32, 60.0, "confirm", round=number)
    for number in range(2):
        log.add(BF16, 88.0, "confirm", round=number, session=2).add(FP32, 100.0, "confirm", round=number, session=2)
    assert decided(log).config.precision == "fp32"
    log.add(FP16, 140.0).add(FP16, 140.0, "confirm", round=0, session=2)
    assert decided(log).evidence.speedup == pytest.approx(1.4), "of the round that both ran"


def test_a_gain_is_over_the_baseline_as_it_ran_then() -> None:
    """The winner was not confirmed and the baseline was, at a third of the speed that both had before."""
    found = decided(Log().add(FP32, 100.0).add(BF16, 150.0).confirm(FP32, *[33.0] * 3)).evidence
    assert found.speedup == pytest.approx(1.5)
    assert found.baseline.samples_per_second == 100.0


def test_a_command_s_trials_add_to_what_was_confirmed_and_confirm_nothing_else() -> None:
    """They count as confirming runs in the user's own environment; one lucky trial is no match for three runs."""
    log = Log().add(FP32, 100.0, round=0).add(BF16, 200.0, round=0).add(FP16, 198.0, round=0)
    log.add(BF16, 185.0, "confirm", round=1).add(FP32, 100.0, "confirm", round=1).add(BF16, 184.0, "confirm", round=2)
    assert (decided(log).config.precision, decided(log).evidence.num_processes) == ("bf16", 3)
