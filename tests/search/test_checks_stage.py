"""What is checked before the confirmation, and what the checks make of the choice; no process, no wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest
from scripted_backend import ScriptedSearch, calibration, candidate, fidelity, ledger_of, shortlist
from scripted_backend import measured as scripted
from scripted_backend import measurement as measured
from test_decide import HEAP, Log, at, decided
from test_whole_search import Machine, space

from autotune_amp.core.config import LossScale
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.outcome import Failure, FailureKind
from autotune_amp.core.setting import Setting
from autotune_amp.search.loss_scales import DEFAULT_PAIR, calibrated
from autotune_amp.search.ranking import check_key, found_fidelity, verdict_on
from autotune_amp.search.search import nothing_works
from autotune_amp.search.space import Space
from autotune_amp.search.stages import checks
from autotune_amp.search.stages.checks import Todo, next_todo
from autotune_amp.search.stages.explore import NUM_SEARCH_PROCESSES
from autotune_amp.search.stages.fallbacks import missing_plans
from autotune_amp.search.study import Study, sqlite_url

FP32, BF16, FP16, TF32 = at("fp32", 32), at("bf16", 64), at("fp16", 64), at("tf32", 32)
FOUND = at("fp32", 32, as_found=True)
WHERE = Space(candidates=(FP32, BF16, FP16), baseline=FP32)


def todo(log: Log, baseline: Setting = FP32, **more: Any) -> object:
    where = Space(candidates=(FP32, BF16, FP16), baseline=baseline, **more)
    return next_todo(ledger_of(log.records, where))


def log(**speeds: float) -> Log:
    made = Log()
    for name, speed in speeds.items():
        made.add({"fp32": FP32, "bf16": BF16, "fp16": FP16, "tf32": TF32, "found": FOUND}[name], speed)
    return made


def test_fp32_needs_no_check_unless_its_weights_are_low() -> None:
    assert todo(log(fp32=100.0)) is None
    assert todo(log(fp32=100.0), weights="bf16") == Todo("fidelity", candidate("fp32", 16))


def test_contenders_are_checked_once_each_at_a_small_batch() -> None:
    made = log(fp32=100.0, bf16=200.0)
    assert todo(made) == Todo("fidelity", candidate("bf16", 16))
    assert todo(made.add(candidate("bf16", 16), fidelity("bf16"), "fidelity")) is None
    small = Log().add(at("fp32", 4), 100.0).add(at("bf16", 4), 200.0)
    assert todo(small, at("fp32", 4)) == Todo("fidelity", candidate("bf16", 4))


def test_a_baseline_in_low_precision_is_checked_and_one_with_tf32_in_parts() -> None:
    bf16_slow = at("bf16", 8)
    made = Log().add(FP32, 100.0).add(at("fp32", 64), 101.0).add(bf16_slow, 10.0)
    assert todo(made) is None
    assert todo(made, bf16_slow) == Todo("fidelity", candidate("bf16", 8))
    found = log(fp32=100.0, found=120.0)
    assert todo(found, FOUND, has_tf32=True) == Todo("fidelity", candidate("tf32", 16))
    assert todo(found, FOUND) is None  # off CUDA it is something else, which no check is for
    where = Space(candidates=(FP32,), baseline=FOUND)
    unknown = verdict_on(FOUND, where, {})
    assert unknown is not None
    assert (unknown.verdict, "cannot be checked" in unknown.reason) == ("unchecked", True)


def test_a_hopelessly_slow_runner_up_costs_no_check() -> None:
    assert todo(log(fp32=100.0, bf16=19.0)) is None
    assert todo(log(fp32=100.0, bf16=21.0)) == Todo("fidelity", candidate("bf16", 16))


def test_fp16_is_calibrated_where_it_may_win_and_only_there() -> None:
    assert todo(log(fp16=100.0, fp32=50.0)) == Todo("calibration", FP16)
    assert todo(log(fp32=100.0, fp16=95.0)) == Todo("calibration", FP16)
    assert todo(log(fp32=100.0, fp16=80.0)) == Todo("fidelity", candidate("fp16", 16))
    made = log(fp16=100.0, fp32=50.0).add(FP16, calibration(), "calibration")
    assert todo(made) == Todo("fidelity", candidate("fp16", 16))


def test_a_precision_that_harms_leaves_the_field_to_the_next() -> None:
    made = log(fp32=100.0, bf16=200.0, fp16=195.0).add(FP16, calibration(), "calibration")
    made.add(candidate("bf16", 16), fidelity("bf16", "unfaithful"), "fidelity")
    scales = calibrated(made.records)
    chosen = shortlist(made.records, FP32, scales)
    assert chosen is not None
    assert (chosen.winner, chosen.runner_up) == (FP16, FP32)
    assert todo(made) == Todo("fidelity", candidate("fp16", 16))


def test_what_pins_heal_is_checked_with_them_then_measured_and_takes_part() -> None:
    made = log(fp32=100.0, bf16=200.0)
    made.add(candidate("bf16", 16), fidelity("bf16", "unfaithful", healing=("norm",)), "fidelity")
    pinned = at("bf16", 64, pinned_modules=("norm",))
    checked = at("bf16", 16, pinned_modules=("norm",))
    assert todo(made) == Todo("fidelity", checked)
    made.add(checked, fidelity("bf16", pins=("norm",)), "fidelity")
    assert todo(made) == Todo("search", pinned)
    made.add(pinned, 180.0)
    assert todo(made) is None
    decision = decided(made.confirm(pinned, *[180.0] * 3, environment=HEAP), environment=HEAP)
    assert decision.config.pinned_modules == ("norm",)
    assert decision.config.batch_size == 64
    assert decision.evidence.fidelity is not None
    assert (decision.evidence.fidelity.verdict, decision.evidence.fidelity.pinned_modules) == ("faithful", ("norm",))
    assert [f.verdict for f in decision.fidelity] == ["unfaithful", "faithful"]
    rows = {(r.precision, r.pinned_modules): r.status for r in decision.candidates}
    assert rows[("bf16", ())] == "excluded"
    assert rows[("bf16", ("norm",))] == "confirmed"


def test_pins_that_do_not_heal_in_the_end_are_not_measured() -> None:
    made = log(fp32=100.0, bf16=200.0)
    made.add(candidate("bf16", 16), fidelity("bf16", "unfaithful", healing=("norm",)), "fidelity")
    made.add(at("bf16", 16, pinned_modules=("norm",)), fidelity("bf16", "unfaithful", pins=("norm",)), "fidelity")
    assert todo(made) is None


def test_fp16_that_was_refused_or_never_finite_may_be_healed() -> None:
    refused = log(fp16=200.0, fp32=100.0).add(FP16, calibration(None), "calibration")
    assert todo(refused) == Todo("fidelity", candidate("fp16", 16))
    never = log(fp32=100.0).add(FP16, Failure(kind="nonfinite", message="inf"))
    assert todo(never) == Todo("fidelity", candidate("fp16", 16))
    never.add(candidate("fp16", 16), fidelity("fp16", "unfaithful", healing=("norm",)), "fidelity")
    never.add(at("fp16", 16, pinned_modules=("norm",)), fidelity("fp16", pins=("norm",)), "fidelity")
    pinned = at("fp16", 64, pinned_modules=("norm",))
    assert todo(never) == Todo("search", pinned)
    assert todo(never.add(pinned, 150.0)) == Todo("calibration", pinned)
    other = log(fp32=100.0).add(FP16, Failure(kind="oom", message="too large"))
    assert todo(other) is None


def test_doubtful_ranks_behind_all_and_is_recommended_only_alone() -> None:
    made = log(fp32=100.0, bf16=200.0).add(candidate("bf16", 16), fidelity("bf16", "doubtful"), "fidelity")
    decision = decided(made)
    assert decision.config.precision == "fp32"
    alone = Log().add(BF16, 200.0).add(candidate("bf16", 16), fidelity("bf16", "doubtful"), "fidelity")
    decision = decided(alone, baseline=FP32)
    assert decision.config.precision == "bf16"
    assert "bf16 is doubtful: so it was written. Look at the numbers." in decision.warnings
    kept = (
        log(fp32=100.0).add(at("bf16", 32), 104.0).add(candidate("bf16", 16), fidelity("bf16", "doubtful"), "fidelity")
    )
    assert decided(kept, baseline=at("bf16", 32)).config.precision == "fp32"


def test_an_unfaithful_baseline_is_not_kept_and_the_reason_says_why() -> None:
    made = Log().add(FP32, 50.0).add(at("bf16", 32), 100.0)
    made.add(candidate("bf16", 16), fidelity("bf16", "unfaithful"), "fidelity")
    decision = decided(made, baseline=at("bf16", 32))
    assert decision.config.precision == "fp32"
    assert "The baseline is no choice: bf16 is unfaithful: so it was written." in decision.reason
    assert decision.evidence.speedup == 0.5
    assert [e.reason for e in decision.excluded] == ["bf16 is unfaithful: so it was written"]


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("crash", "unchecked"),
        ("oom", "unchecked"),
        ("timeout", "unchecked"),
        ("workload_error", "unchecked"),
        ("unsupported", "unfaithful"),
        ("nonfinite", "unfaithful"),
    ],
)
def test_a_check_that_fails_takes_nothing_down(kind: FailureKind, verdict: str) -> None:
    made = log(fp32=100.0, bf16=200.0)
    made.add(candidate("bf16", 16), Failure(kind=kind, message="it went wrong"), "fidelity")
    assert found_fidelity(made.records)[check_key(candidate("bf16", 8))].verdict == verdict
    assert todo(made) is None
    assert (BF16 in ledger_of(made.records, WHERE).speeds) == (verdict == "unchecked")
    decision = decided(made)
    assert all(row.status not in ("crash", "oom") for row in decision.candidates)
    assert decision.config.precision == "fp32"
    if verdict == "unchecked":
        assert f"bf16 is unchecked: the check did not come to an end: {kind}: it" in decision.reason
        made.records = made.records[1:]
        decision = decided(made)
        assert decision.config.precision == "bf16"
        assert any("is unchecked" in w and "it went wrong" in w for w in decision.warnings)


def test_unchecked_comes_after_faithful_and_before_doubtful() -> None:
    made = log(fp16=210.0, bf16=200.0).add(candidate("fp16", 16), fidelity("fp16", "doubtful"), "fidelity")
    decision = decided(made, is_checked=False)
    assert decision.config.precision == "bf16"
    assert "fp16 batch 64 is 1.05 times as fast and is left out: fp16 is doubtful" in decision.reason
    made.add(FP32, 20.0)
    decision = decided(made, is_checked=False)
    assert decision.config.precision == "fp32"
    assert "fp16 batch 64 is 10.50 times as fast and is left out" in decision.reason


def test_a_faithful_verdict_on_weights_that_do_not_train_is_a_warning() -> None:
    unmoved = msgspec.structs.replace(fidelity("bf16"), has_moved=False)
    decision = decided(log(bf16=200.0).add(candidate("bf16", 16), unmoved, "fidelity"))
    assert decision.config.precision == "bf16"
    (warning,) = [warning for warning in decision.warnings if "Search again with" in warning]
    assert warning.startswith("bf16 is faithful: so it was written. Search again")


def test_fp16_counts_what_is_applied() -> None:
    """A tenth of its steps never reach the optimizer, whatever the pair: bf16 is ahead then."""
    made = log(fp32=100.0, fp16=200.0, bf16=190.0)
    bad = calibration()
    bad = type(bad)(
        **{
            **{f: getattr(bad, f) for f in bad.__struct_fields__},
            "log2_scales": (14.5, None, *[14.5] * 8) * 2,
        }
    )
    made.add(FP16, bad, "calibration")
    scales = calibrated(made.records)
    assert ledger_of(made.records, WHERE).speeds[FP16] < 185.0
    assert decided(made, scales=scales).config.precision == "bf16"


def test_a_calibrated_choice_carries_its_pair_and_its_evidence() -> None:
    made = log(fp32=100.0, fp16=200.0).add(FP16, calibration(), "calibration")
    made.add(candidate("fp16", 16), fidelity("fp16"), "fidelity")
    made.confirm(FP16, *[measured(200.0)] * 3, environment=HEAP)
    scales = calibrated(made.records)
    decision = decided(made, environment=HEAP, scales=scales)
    assert decision.config.loss_scale == LossScale(init_scale=2.0**13, growth_interval=2000)
    assert decision.evidence.loss_scale is not None
    assert decision.evidence.loss_scale.num_confirming_steps == 3
    assert not any("calibrated" in w for w in decision.warnings)
    uncalibrated = decided(log(fp32=100.0, fp16=200.0))
    assert any("it was not calibrated, since the budget ended" in w for w in uncalibrated.warnings)


@pytest.mark.parametrize("kind", ["timeout", "oom", "crash"])
def test_a_calibration_that_did_not_end_leaves_the_defaults_and_is_tried_once(kind: FailureKind) -> None:
    made = log(fp32=100.0, fp16=200.0).add(FP16, Failure(kind=kind, message="it went wrong"), "calibration")
    assert todo(made) == Todo("fidelity", candidate("fp16", 16))
    decision = decided(made, scales=calibrated(made.records))
    assert (decision.config.precision, decision.evidence.loss_scale) == ("fp16", None)
    said = f"it was not calibrated, since the calibration did not come to an end: {kind}: it went wrong."
    assert [w for w in decision.warnings if said in w]
    assert decision.excluded == ()


def test_where_all_that_ran_is_ruled_out_the_reasons_are_said_and_no_harm_is_alleged() -> None:
    made = Log().add(FP16, 200.0).add(FP16, Failure(kind="unsupported", message="no LSTM"), "calibration")
    made.add(at("fp16", 128), Failure(kind="oom", message="it took too much"))
    assert shortlist(made.records, FP16) is None
    error = nothing_works(ledger_of(made.records, WHERE), (), has_stepped=False)
    assert "Whatever ran is ruled out: fp16: its loss scale could not be calibrated: unsupported: no LSTM." in str(
        error
    )
    assert "oom" not in str(error)


def test_a_harmful_precision_is_no_fallback() -> None:
    fp16 = at("fp16", 32)
    made = Log().add(FP32, 50.0).add(fp16, 200.0).add(at("bf16", 32), 150.0)
    made.add(candidate("bf16", 16), fidelity("bf16", "unfaithful"), "fidelity")
    assert [plan.precision for plan in decided(made).config.plans] == ["fp32"]
    where = Space(candidates=(at("bf16", 64), at("fp32", 64)), baseline=FP32)
    assert [c.precision for c in missing_plans(ledger_of(made.records, where), FP16)] == ["fp32"], "nor run for it"


# --- the same with a session, a study and a scripted machine ---------------------------------------------------------


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair costs Optuna a dozen commits."""
    monkeypatch.setattr(checks, "NUM_PAIRS", 6)


def fp16_machine(folder: Path) -> Machine:
    machine = Machine(folder)
    machine.base["fp16"] = 210.0
    return machine


def told(folder: Path) -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.RDBStorage(sqlite_url(folder / "study.db"))
    try:
        return optuna.load_study(study_name="scripted", storage=storage).get_trials(deepcopy=False)
    finally:
        storage.remove_session()
        storage.engine.dispose()


def test_every_pair_is_answered_without_a_training_step(tmp_path: Path) -> None:
    machine, where = fp16_machine(tmp_path), space(("fp32", "fp16"))
    machine.explore(where, is_checked=True)
    ran = [s.candidate for s in machine.searched.backend.specs if s.candidate.precision == "fp16"]
    assert max(map(ran.count, ran)) <= NUM_SEARCH_PROCESSES, "no batch size is measured for a pair"
    fp16 = [t for t in told(tmp_path) if t.params["precision"] == "fp16"]
    assert all({"init_scale", "growth_interval"} <= set(t.params) for t in fp16)
    best = [t for t in fp16 if t.user_attrs["candidate"] == "fp16 batch 64"]
    assert len(best) >= checks.NUM_PAIRS, "the sampler may have asked for the setting by itself too"
    assert all(0 <= t.user_attrs["applied_share"] <= 1 for t in best)
    rate = 210.0
    assert all(t.value == pytest.approx(rate * t.user_attrs["applied_share"]) for t in best)
    by_pair = {(t.user_attrs["snapped_init_scale"], t.params["growth_interval"]) for t in best}
    assert by_pair >= {(2.0**13, 2000), (2.0**13, 200), DEFAULT_PAIR}
    with_record = [t for t in fp16 if "record" in t.user_attrs]
    assert len(with_record) == len(ran)
    decision = machine.decide()
    assert (decision.config.precision, decision.config.loss_scale) == ("fp16", LossScale(init_scale=2.0**13))


def test_the_confirmation_runs_with_the_chosen_pair(tmp_path: Path) -> None:
    machine, where = fp16_machine(tmp_path), space(("fp32", "fp16"))
    machine.explore(where, is_checked=True)
    assert {s.loss_scale for s in machine.searched.backend.specs if s.candidate.precision == "fp16"} == {LossScale()}
    chosen = machine.ledger.shortlist
    assert chosen is not None
    assert machine.ledger.loss_scale(chosen.winner) == LossScale(init_scale=2.0**13)


def test_a_resumed_search_checks_nothing_twice_and_asks_for_no_more_pairs(tmp_path: Path) -> None:
    machine, where = fp16_machine(tmp_path), space()
    machine.explore(where, is_checked=True)
    checks, num_told = machine.checks(), len([t for t in told(tmp_path) if "applied_share" in t.user_attrs])
    assert len(checks) == len(set(checks)) > 1
    again = fp16_machine(tmp_path)
    again.explore(where, is_checked=True)
    assert again.checks() == checks
    assert again.searched.backend.checks == []
    answered = [t for t in told(tmp_path) if "applied_share" in t.user_attrs]
    assert len(answered) <= num_told + 4  # what TPE repeats before exploring ends
    assert again.decide().config == machine.decide().config


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_unfaithful_winner_is_excluded_or_healed(tmp_path: Path, precision: Precision) -> None:
    machine, where = fp16_machine(tmp_path), space(("fp32", precision))
    machine.check_answers["fidelity", precision, 0] = fidelity(precision, "unfaithful")
    machine.explore(where, is_checked=True)
    decision = machine.decide()
    assert decision.config.precision == "fp32"
    assert any(e.precision == precision and "unfaithful" in e.reason for e in decision.excluded)

    healed = fp16_machine(tmp_path / "healed")
    healed.check_answers["fidelity", precision, 0] = fidelity(precision, "unfaithful", healing=("a", "b"))
    healed.explore(where, is_checked=True)
    config = healed.decide().config
    assert (config.precision, config.pinned_modules) == (precision, ("a", "b"))
    num_calibrated = sum("calibration" in name and "pinned" in name for name in healed.checks())
    assert num_calibrated == (1 if precision == "fp16" else 0)


def test_the_checks_keep_to_the_budget_and_what_they_left_is_said(tmp_path: Path) -> None:
    machine, where = Machine(tmp_path), space()
    machine.explore(where)
    machine.searched.budget.now = machine.searched.budget.seconds
    machine.explore(where, is_checked=True)
    assert machine.checks() == []
    decision = machine.decide()
    assert decision.config.precision == "fp32"
    assert "times as fast and is left out: bf16 is unchecked: the budget ended before it was checked" in decision.reason


def test_refused_fp16_leaves_the_choice(tmp_path: Path) -> None:
    machine, where = fp16_machine(tmp_path), space()
    machine.check_answers["calibration", "fp16", 0] = calibration(4.2, {-40: 400, -6: 600})
    machine.explore(where, is_checked=True)
    decision = machine.decide()
    assert decision.config.precision == "bf16"
    assert any(e.precision == "fp16" and "40.0 %" in e.reason for e in decision.excluded)
    refused = [t for t in told(tmp_path) if t.user_attrs.get("failure") == "nonfinite"]
    assert refused
    assert all(t.value is None for t in refused)


def test_contenders_are_checked_before_anything_is_run_for_certainty(tmp_path: Path) -> None:
    """A slow check at the end of a short budget would leave the fastest unchecked, and what is slower recommended."""
    machine = Machine(tmp_path)
    machine.explore(space(("fp32", "bf16")), is_checked=True)
    done = [(r.purpose, r.candidate) for r in machine.ledger.records]
    first_check = next(number for number, (purpose, _) in enumerate(done) if purpose == "fidelity")
    assert len(set(done[:first_check])) == first_check, "nothing is repeated yet"
    assert len(done) > first_check + 1


def test_what_a_check_speaks_against_is_not_tried_again_and_what_is_left_is_seeded(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.base = {"fp32": 100.0, "bf16": 300.0, "fp16": 200.0}
    for precision in ("bf16", "fp16"):
        machine.check_answers["fidelity", precision, 0] = fidelity(precision, "unfaithful")
    machine.explore(space(), is_checked=True)
    done = [(r.purpose, r.candidate.precision, r.candidate.batch_size) for r in machine.ledger.records]
    for precision in ("bf16", "fp16"):
        checked = next(i for i, (purpose, what, _) in enumerate(done) if (purpose, what) == ("fidelity", precision))
        assert not [found for found in done[checked:] if found[:2] == ("search", precision)]
    assert ("search", "fp32", 64) in done
    decision = machine.decide()
    assert (decision.config.precision, decision.config.batch_size) == ("fp32", 64)


def test_fp16_that_nobody_calibrated_is_told_when_the_search_is_over() -> None:
    searched = ScriptedSearch(WHERE, lambda trial: scripted(trial, 100.0))
    searched.measure(FP32, FP16)
    with Study.open("sqlite://", "scripted", ledger_of([], WHERE)) as study:
        for is_over, num_told in ((False, 1), (True, 2)):
            study.catch_up(searched.ledger, is_over=is_over)
            assert len(study._study.trials) == num_told
