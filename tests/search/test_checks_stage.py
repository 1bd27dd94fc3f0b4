"""What is checked before the confirmation, and what the checks make of the choice; no process, no wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from msgspec.structs import replace
from scripted_backend import calibration, candidate, fidelity, ledger_of, shortlist
from test_decide import Log, at, decided
from test_whole_search import Machine, space

from autotune_amp.core.config import LossScale
from autotune_amp.core.outcome import Failure, FailureKind
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.search.answer.explain import nothing_works_error
from autotune_amp.search.loss_scales import DEFAULT_PAIR, calibration_results
from autotune_amp.search.ranking import check_key, fidelity_verdicts
from autotune_amp.search.space import Space
from autotune_amp.search.stages import checks
from autotune_amp.search.stages.checks import CheckAction, next_action
from autotune_amp.search.stages.explore import MAX_PROCESSES
from autotune_amp.search.stages.fallbacks import missing_plans

FP32, BF16, FP16, TF32 = at("fp32", 32), at("bf16", 64), at("fp16", 64), at("tf32", 32)
FOUND = at("fp32", 32, as_found=True)
WHERE = Space(candidates=(FP32, BF16, FP16), baseline=FP32)


def todo(log: Log, baseline: Setting = FP32, **more: Any) -> object:
    where = Space(candidates=(FP32, BF16, FP16), baseline=baseline, **more)
    return next_action(ledger_of(log.records, where))


def log(**speeds: float) -> Log:
    made = Log()
    for name, speed in speeds.items():
        made.add({"fp32": FP32, "bf16": BF16, "fp16": FP16, "tf32": TF32, "found": FOUND}[name], speed)
    return made


def check(precision: Precision, batch_size: int = 16) -> CheckAction:
    return CheckAction("fidelity", candidate(precision, batch_size))


SLOW = at("bf16", 8)
BESIDE_SLOW = Log().add(FP32, 100.0).add(at("fp32", 64), 101.0).add(SLOW, 10.0)
CALIBRATED = log(fp16=100.0, fp32=50.0).add(FP16, calibration(), "calibration")
REFUSED = log(fp16=200.0, fp32=100.0).add(FP16, calibration(None), "calibration")
HARMED = log(fp32=100.0, bf16=200.0).add(at("bf16", 16), fidelity("bf16", "unfaithful", healing=("norm",)), "fidelity")


@pytest.mark.parametrize(
    ("made", "baseline", "more", "expected"),
    [
        (log(fp32=100.0), FP32, {}, None),
        (log(fp32=100.0), FP32, {"weights": "bf16"}, check("fp32")),
        (log(fp32=100.0, bf16=200.0), FP32, {}, check("bf16")),  # a contender, at a small batch
        (log(fp32=100.0, bf16=200.0).add(at("bf16", 16), fidelity("bf16"), "fidelity"), FP32, {}, None),
        (Log().add(at("fp32", 4), 100.0).add(at("bf16", 4), 200.0), at("fp32", 4), {}, check("bf16", 4)),
        (BESIDE_SLOW, FP32, {}, None),
        (BESIDE_SLOW, SLOW, {}, None),  # what it may do wrong changes nothing
        (log(fp32=100.0, found=120.0), FOUND, {"has_tf32": True}, check("tf32")),
        (log(fp32=100.0, found=120.0), FOUND, {}, None),  # off CUDA it is something else, which no check is for
        (log(fp32=100.0, bf16=19.0), FP32, {}, None),  # hopelessly slow
        (log(fp32=100.0, bf16=21.0), FP32, {}, check("bf16")),
        (log(fp16=100.0, fp32=50.0), FP32, {}, CheckAction("calibration", FP16)),
        (log(fp32=100.0, fp16=95.0), FP32, {}, CheckAction("calibration", FP16)),  # it may win
        (log(fp32=100.0, fp16=80.0), FP32, {}, check("fp16")),  # too slow for a calibration
        (CALIBRATED, FP32, {}, check("fp16")),
        (REFUSED, FP32, {}, check("fp16")),  # it may be healed
        (log(fp32=100.0).add(FP16, Failure(kind="nonfinite", message="inf")), FP32, {}, check("fp16")),
        (log(fp32=100.0).add(FP16, Failure(kind="oom", message="too large")), FP32, {}, None),
    ],
)
def test_what_is_checked(made: Log, baseline: Setting, more: dict[str, Any], expected: CheckAction | None) -> None:
    assert todo(made, baseline, **more) == expected


def test_for_memory_fp16_that_is_slower_is_calibrated_too() -> None:
    slower = log(fp32=100.0, fp16=80.0)
    assert next_action(ledger_of(slower.records, WHERE, objective="memory")) == CheckAction("calibration", FP16)


def test_what_pins_heal_is_checked_with_them_then_measured_and_takes_part() -> None:
    made, pinned, checked = Log(), *(at("bf16", size, pinned_modules=("norm",)) for size in (64, 16))
    made.records = list(HARMED.records)
    assert todo(made) == CheckAction("fidelity", checked)
    made.add(checked, fidelity("bf16", "unfaithful", pins=("norm",)), "fidelity")
    assert todo(made) is None, "pins that do not heal are not measured"
    made.records.pop()
    made.add(checked, fidelity("bf16", pins=("norm",)), "fidelity")
    assert todo(made) == CheckAction("search", pinned)
    decision = decided(made.add(pinned, 180.0))
    assert decision.evidence.fidelity is not None
    assert (decision.evidence.fidelity.verdict, decision.evidence.fidelity.pinned_modules) == ("faithful", ("norm",))
    rows = {(r.precision, r.pinned_modules): r.status for r in decision.candidates}
    assert (rows["bf16", ()], rows["bf16", ("norm",)]) == ("excluded", "measured")


def test_doubtful_ranks_behind_all_and_is_recommended_only_alone() -> None:
    made = log(fp32=100.0, bf16=200.0).add(candidate("bf16", 16), fidelity("bf16", "doubtful"), "fidelity")
    decision = decided(made)
    assert decision.config.precision == "fp32"
    alone = Log().add(BF16, 200.0).add(candidate("bf16", 16), fidelity("bf16", "doubtful"), "fidelity")
    assert decided(alone, baseline=FP32).config.precision == "bf16"


def test_an_unfaithful_baseline_is_kept_with_a_warning_where_nothing_else_is_faster() -> None:
    made = Log().add(FP32, 50.0).add(at("bf16", 32), 100.0)
    made.add(candidate("bf16", 16), fidelity("bf16", "unfaithful"), "fidelity")
    decision = decided(made, baseline=at("bf16", 32))
    assert decision.config.precision == "bf16"
    assert any("bf16 is unfaithful: so it was written. Look at the numbers" in line for line in decision.warnings)
    decision = decided(made.add(at("fp32", 64), 150.0), baseline=at("bf16", 32))
    assert (decision.config.precision, decision.config.batch_size) == ("fp32", 64)


@pytest.mark.parametrize(("kind", "verdict"), [("crash", "unchecked"), ("nonfinite", "unfaithful")])
def test_a_check_that_fails_takes_nothing_down(kind: FailureKind, verdict: str) -> None:
    made = log(fp32=100.0, bf16=200.0)
    for _ in range(1 + (kind == "crash")):  # a first crash is nobody's
        made.add(candidate("bf16", 16), Failure(kind=kind, message="it went wrong"), "fidelity")
    assert fidelity_verdicts(made.records)[check_key(candidate("bf16", 8))].verdict == verdict
    assert todo(made) is None
    assert (BF16 in ledger_of(made.records, WHERE).speeds) == (verdict == "unchecked")
    decision = decided(made)
    assert all(row.status not in ("crash", "oom") for row in decision.candidates)
    assert decision.config.precision == "fp32"
    if verdict == "unchecked":
        assert "2.00 times" in decision.reason
        assert f"{kind}: it went wrong" in decision.reason
        made.records = made.records[1:]
        decision = decided(made)
        assert decision.config.precision == "bf16"
        assert any("unchecked" in w and "it went wrong" in w for w in decision.warnings)


def test_fp16_counts_what_is_applied() -> None:
    """A tenth of its steps never reach the optimizer, whatever the pair: bf16 is ahead then."""
    bad = replace(calibration(), log2_scales=(14.5, None, *[14.5] * 8) * 2)
    made = log(fp32=100.0, fp16=200.0, bf16=190.0).add(FP16, bad, "calibration")
    assert ledger_of(made.records, WHERE).speeds[FP16] < 185.0
    assert decided(made, scales=calibration_results(made.records)).config.precision == "bf16"


def test_where_all_that_ran_is_ruled_out_the_reasons_are_said_and_no_harm_is_alleged() -> None:
    made = Log().add(FP16, 200.0).add(FP16, Failure(kind="unsupported", message="no LSTM"), "calibration")
    made.add(at("fp16", 128), Failure(kind="oom", message="it took too much"))
    assert shortlist(made.records, FP32) is None
    error = nothing_works_error(ledger_of(made.records, WHERE), (), has_stepped=False)
    assert "unsupported: no LSTM" in str(error)
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
    """Each pair is a commit."""
    monkeypatch.setattr(checks, "NUM_PAIRS", 6)


def fp16_machine(folder: Path) -> Machine:
    machine = Machine(folder)
    machine.base["fp16"] = 210.0
    return machine


def told(folder: Path) -> list[optuna.trial.FrozenTrial]:
    storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/study.db")
    try:
        return optuna.load_study(study_name="scripted", storage=storage).get_trials(deepcopy=False)
    finally:
        storage.remove_session()
        storage.engine.dispose()


def test_every_pair_is_answered_without_a_training_step(tmp_path: Path) -> None:
    machine, where = fp16_machine(tmp_path), space(("fp32", "fp16"))
    machine.explore(where, is_checked=True)
    ran = [s.candidate for s in machine.searched.backend.specs if s.candidate.precision == "fp16"]
    assert max(map(ran.count, ran)) <= MAX_PROCESSES, "no batch size is measured for a pair"
    fp16 = [t for t in told(tmp_path) if t.params["precision"] == "fp16"]
    best = [t for t in fp16 if t.user_attrs["candidate"] == "fp16 batch 64"]
    assert len(best) >= checks.NUM_PAIRS, "the sampler may have asked for the setting by itself too"
    assert all(t.value == pytest.approx(210.0 * t.user_attrs["applied_share"]) for t in best)
    assert {s.loss_scale for s in machine.searched.backend.specs if s.candidate.precision == "fp16"} == {LossScale()}
    assert machine.ledger.loss_scale(candidate("fp16", 64)) == LossScale(init_scale=2.0**13), "confirmed with it"
    by_pair = {(t.user_attrs["snapped_init_scale"], t.params["growth_interval"]) for t in best}
    assert by_pair >= {(2.0**13, 2000), (2.0**13, 200), DEFAULT_PAIR}
    decision = machine.decide()
    assert (decision.config.precision, decision.config.loss_scale) == ("fp16", LossScale(init_scale=2.0**13))


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
    assert (num_calibrated > 0) == (precision == "fp16")


def test_the_checks_keep_to_the_budget_and_what_they_left_is_said(tmp_path: Path) -> None:
    machine, where = Machine(tmp_path), space()
    machine.explore(where)
    machine.searched.budget.now = machine.searched.budget.seconds
    machine.explore(where, is_checked=True)
    assert machine.checks() == []
    decision = machine.decide()
    assert decision.config.precision == "fp32"
    assert "unchecked" in decision.reason
    assert "no time for its check" in decision.reason


def test_what_a_check_speaks_against_is_not_tried_again_and_what_is_left_is_seeded(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.base = {"fp32": 100.0, "bf16": 300.0, "fp16": 200.0}
    for precision in ("bf16", "fp16"):
        machine.check_answers["fidelity", precision, 0] = fidelity(precision, "unfaithful")
    machine.explore(space(), is_checked=True)
    done = [(r.purpose, r.candidate.precision, r.candidate.batch_size) for r in machine.ledger.records]
    first_check = next(number for number, (purpose, *_) in enumerate(done) if purpose == "fidelity")
    assert len(set(done[:first_check])) == first_check, "contenders are checked before anything is repeated"
    for precision in ("bf16", "fp16"):
        checked = next(i for i, (purpose, what, _) in enumerate(done) if (purpose, what) == ("fidelity", precision))
        assert not [found for found in done[checked:] if found[:2] == ("search", precision)]
    assert ("search", "fp32", 64) in done
    decision = machine.decide()
    assert (decision.config.precision, decision.config.batch_size) == ("fp32", 64)


@pytest.mark.parametrize(
    ("speed", "seconds", "is_checked"),
    [(99.0, 1.0, True), (99.0, 60.0, False), (96.0, 1.0, False), (102.0, 20.0, True)],
)
def test_a_runner_up_is_checked_where_it_may_win_by_enough_for_the_seconds(
    speed: float, seconds: float, *, is_checked: bool
) -> None:
    """Within the plateau bf16 wins before fp16, which is calibrated too."""
    made = log(fp32=50.0, bf16=100.0, fp16=speed).add(candidate("bf16", 16), fidelity("bf16"), "fidelity")
    found = next_action(ledger_of(made.records, WHERE), is_worth=lambda gain, num: gain > 1e-3 * num * seconds)
    assert (found == CheckAction("calibration", FP16)) == is_checked


@pytest.mark.parametrize(
    ("speed", "seconds", "is_checked"), [(96.0, 20.0, True), (96.0, 60.0, False), (60.0, 20.0, True)]
)
def test_a_baseline_that_may_be_kept_is_checked_too(speed: float, seconds: float, *, is_checked: bool) -> None:
    where = Space(candidates=(FP32, BF16), baseline=BF16)
    found = next_action(
        ledger_of(log(fp32=100.0, bf16=speed).records, where), is_worth=lambda gain, num: gain > 1e-3 * num * seconds
    )
    assert found == (check("bf16") if is_checked else None)
