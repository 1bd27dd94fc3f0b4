"""Checks of trained weights: what is looked at again, after how many steps, and what becomes of the verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_backend import CHECK_SECONDS, candidate, fidelity, ledger_of
from test_decide import Log, at, decided
from test_whole_search import Machine, space

from autotune_amp.core.outcome import CheckOutcome, Failure, FailureKind, Fidelity, GradientDamage, Record, Verdict
from autotune_amp.core.setting import Setting
from autotune_amp.search.planner import EXTRA_SHARE
from autotune_amp.search.ranking import check_key, fidelity_verdicts
from autotune_amp.search.space import Space
from autotune_amp.search.stages.checks import MAX_STEPS_BEFORE, Checks, TrainedWeightsChecks, next_trained_weights_check
from autotune_amp.trial.jobs import Check

FP32, BF16, FP16 = at("fp32", 32), at("bf16", 64), at("fp16", 64)
WHERE = Space(candidates=(FP32, BF16, FP16), baseline=FP32)
FIRST: dict[str, Any] = {"fp32_step_seconds": 0.01}
DAMAGE = GradientDamage(
    name="weight",
    noise_ratio=0.0,
    common_error=0.01,
    common_error_interval=(0.0, 0.02),
    cosine=1.0,
    norm_ratio=1.0,
    flushed_share=0.0,
)
EQUAL = FIRST | {"noise_ratio": 0.0, "loss_error": 0.0, "worst_parameters": (DAMAGE,)}  # just what fp32 computes


def log(*checked: Fidelity, speeds: dict[Setting, float] | None = None) -> Log:
    made = Log()
    for setting, speed in (speeds or {FP32: 100.0, BF16: 200.0}).items():
        made.add(setting, speed)
    for found in checked:
        made.add(candidate(found.precision, found.batch_size), found, "fidelity")
    return made


def after(verdict: Verdict, num_steps: int = 200) -> Fidelity:
    return fidelity("bf16", verdict, num_steps_before=num_steps)


@pytest.mark.parametrize(
    ("made", "seconds", "expected"),
    [
        (log(fidelity("bf16", **FIRST)), 20.0, (BF16, MAX_STEPS_BEFORE)),
        (log(fidelity("bf16", **FIRST)), 3.01, (BF16, 110)),  # 0.7 x 3.01 s, less the second of the check itself
        (log(fidelity("bf16", **FIRST)), 2.0, None),
        (log(fidelity("bf16")), 20.0, None),  # nobody knows how long a step takes
        (log(fidelity("bf16", **EQUAL)), 20.0, None),
        (log(fidelity("bf16", **EQUAL | {"worst_parameters": ()})), 20.0, (BF16, MAX_STEPS_BEFORE)),  # of no gradient
        (log(fidelity("bf16", **EQUAL | {"has_moved": False})), 20.0, (BF16, MAX_STEPS_BEFORE)),
        (log(), 20.0, None),
        (log(fidelity("bf16", "unchecked"), speeds={BF16: 200.0}), 20.0, None),
        (log(fidelity("bf16", "unfaithful", **FIRST)), 20.0, None),
        (log(fidelity("bf16", **FIRST), after("faithful")), 20.0, None),
        (log(fidelity("bf16", **FIRST), after("unchecked")), 20.0, None),
        (log(fidelity("bf16", **FIRST), after("unfaithful")), 20.0, None),
        # A rival may win the confirmation; what is far behind cannot.
        (log(fidelity("bf16", **FIRST), speeds={FP32: 100.0, BF16: 95.0}), 20.0, (BF16, MAX_STEPS_BEFORE)),
        (log(fidelity("bf16", **FIRST), speeds={FP32: 100.0, BF16: 85.0}), 20.0, None),
    ],
)
def test_what_is_looked_at_again(made: Log, seconds: float, expected: tuple[Setting, int] | None) -> None:
    assert next_trained_weights_check(ledger_of(made.records, WHERE), seconds) == expected


def test_not_where_nothing_can_train_for_it() -> None:
    made = log(fidelity("bf16", **FIRST))
    assert (
        next_trained_weights_check(ledger_of(made.records, replace(WHERE, checks=frozenset({"fidelity"}))), 20.0)
        is None
    )
    assert next_trained_weights_check(ledger_of(made.records, replace(WHERE, weights="bf16")), 20.0) is None


@pytest.mark.parametrize("verdict", ["faithful", "doubtful", "unchecked"])
def test_what_trained_weights_do_not_rule_out_stands_and_is_told(verdict: Verdict) -> None:
    made = log(fidelity("bf16", **FIRST), after(verdict))
    found = fidelity_verdicts(made.records)[check_key(BF16)]
    assert (found.verdict, found.num_steps_before) == ("faithful", 0)
    assert found.later is not None
    assert (found.later.verdict, found.later.num_steps) == (verdict, 200)
    decision = decided(made)
    assert decision.config.precision == "bf16"
    assert any("so it was written" in line for line in decision.warnings) == (verdict == "doubtful")


def test_what_trained_weights_rule_out_is_out(tmp_path: Path) -> None:
    made = log(fidelity("bf16", **FIRST), after("unfaithful"))
    decision = decided(made)
    assert decision.config.precision == "fp32"
    assert [e.precision for e in decision.excluded] == ["bf16"]


class Trained(Machine):
    """bf16 is faster and fails once the weights are trained, until its sensitive module is pinned."""

    def check(self, spec: Check) -> CheckOutcome:
        answer = super().check(spec)
        if not isinstance(answer, Fidelity):
            return answer
        is_sick = spec.num_steps_before > 0 and spec.candidate.precision == "bf16" and not spec.candidate.pinned_modules
        sick: dict[str, Any] = {"verdict": "unfaithful", "healing_pins": ("loss",)} if is_sick else {}
        return replace(answer, num_steps_before=spec.num_steps_before, **FIRST, **sick)


def looked_at(folder: Path) -> tuple[Trained, list[Record]]:
    """The machine after the stage, and the stage's records."""
    machine = Trained(folder)
    machine.explore(space(), is_checked=True)
    searched = machine.searched
    num_before = len(searched.records)
    searched.run(TrainedWeightsChecks(Checks()))
    return machine, list(searched.records[num_before:])


def test_what_gives_way_is_healed_and_looked_at_in_turn(tmp_path: Path) -> None:
    machine, records = looked_at(tmp_path)
    steps = [r.outcome.num_steps_before if isinstance(r.outcome, Fidelity) else None for r in records]
    pins = [r.candidate.pinned_modules for r in records]
    assert list(zip([r.purpose for r in records], pins, steps, strict=True)) == [
        ("fidelity", (), MAX_STEPS_BEFORE),
        ("fidelity", ("loss",), 0),
        ("search", ("loss",), None),
        ("fidelity", ("loss",), MAX_STEPS_BEFORE),
    ]
    shortlist = machine.ledger.final_shortlist
    assert shortlist is not None
    assert (shortlist.winner.precision, shortlist.winner.pinned_modules) == ("bf16", ("loss",))


def test_it_keeps_to_its_share(tmp_path: Path) -> None:
    searched = looked_at(tmp_path)[0].searched
    first, second = [check.deadline_seconds for check in searched.backend.checks if check.num_steps_before]
    assert first is not None
    assert second is not None
    share = EXTRA_SHARE * searched.budget.now
    assert 0 < first <= share
    assert 0 < second <= share - CHECK_SECONDS


def test_a_check_and_the_training_before_it_end_by_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_seconds = 0.02  # slow enough that the time and not the largest number of steps is the limit
    monkeypatch.setitem(FIRST, "fp32_step_seconds", step_seconds)
    checks = [check for check in looked_at(tmp_path)[0].searched.backend.checks if check.num_steps_before]
    assert checks
    for check in checks:
        assert check.num_steps_before < MAX_STEPS_BEFORE
        assert check.aim_seconds is not None
        assert check.deadline_seconds is not None
        assert check.num_steps_before * step_seconds + check.aim_seconds <= check.deadline_seconds


@pytest.mark.parametrize(
    ("kind", "verdict"), [("nonfinite", "unfaithful"), ("unsupported", "unfaithful"), ("timeout", "unchecked")]
)
def test_a_failure_on_trained_weights_is_a_verdict_of_them(kind: FailureKind, verdict: Verdict) -> None:
    check = Check(what="fidelity", candidate=candidate("bf16", 16), device="cpu", num_steps_before=100)
    found = check.after(Failure(kind=kind, message="it went wrong"), None)
    assert isinstance(found, Fidelity)
    assert (found.verdict, found.num_steps_before) == (verdict, 100)
    assert "it went wrong" in found.reason
