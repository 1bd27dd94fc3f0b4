"""Accumulation is offered where it learns what the whole batch learns, and withheld elsewhere; no process, no wait."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_backend import SUMMARY, ScriptedSearch, accumulation, calibration, candidate, fidelity, ledger_of
from test_decide import Log
from test_space import LOOP
from test_space import space as built
from test_whole_search import HELD, Machine

from autotune_amp.core.config import AmpConfig, FallbackPlan
from autotune_amp.core.outcome import Accumulation, AccumulationVerdict, CheckOutcome, Failure, Record
from autotune_amp.core.recommendation import Decision
from autotune_amp.core.setting import Setting
from autotune_amp.search import loss_scales
from autotune_amp.search.answer.decide import decide
from autotune_amp.search.answer.explain import accumulation_warnings
from autotune_amp.search.space import Space
from autotune_amp.search.stages.checks import AccumulationCheck

KEPT: dict[str, Any] = {"precision": ["fp32", "bf16"], "about": {"batch_size": 64}}


def machine(folder: Path, found: CheckOutcome | None = None) -> Machine:
    """Where bf16 is twice as fast as fp32 and both run out of memory at batch 64, unless told otherwise."""
    made = Machine(folder)
    if found is not None:
        made.check_answers["accumulation", "fp32", 0] = found
    return made


def judged(on: Machine, where: Space) -> Space:
    """The space after the check."""
    on.on(where).run(AccumulationCheck())
    return on.ledger.space


def searched(on: Machine, where: Space) -> Decision:
    """The whole search after the check, with its confirmation."""
    on.explore(where, is_checked=True)
    assert on.ledger.final_shortlist is not None
    on.searched.measure_fallbacks()
    on.confirm(on.ledger.final_shortlist)
    return on.decide()


def accumulating(where: Space) -> set[int]:
    return {c.batch_size for c in where.candidates if c.accumulation_steps > 1}


def test_an_exact_accumulation_is_offered_and_checked_once(tmp_path: Path) -> None:
    on, where = machine(tmp_path), built(**KEPT)
    assert judged(on, where) == where
    assert judged(on, where) == where, "a resumed search reads its records"
    (spec,) = on.searched.backend.checks
    assert (spec.what, spec.candidate.precision, spec.candidate.batch_size) == ("accumulation", "fp32", 16)
    assert spec.deadline_seconds is not None
    assert spec.deadline_seconds <= on.searched.budget.seconds / 2
    assert on.ledger.trials == [], "a check is no trial"
    on.oom_from = {"fp32": 64, "bf16": 64}
    decision = searched(on, where)
    assert Setting.of(decision.config) == candidate("bf16", 32, 2)
    assert decision.evidence.accumulation == accumulation()
    assert not any("micro-batches" in said or "learning rate" in said for said in (*decision.warnings, *decision.notes))


@pytest.mark.parametrize("found", [accumulation("inexact"), Failure(kind="timeout", message="it took too long")])
def test_what_is_not_shown_to_be_exact_is_withheld_with_the_reason(
    tmp_path: Path, found: Accumulation | Failure
) -> None:
    on = machine(tmp_path, found)
    where = judged(on, built(**KEPT))
    why = found.message if isinstance(found, Failure) else found.reason.rstrip(".")
    assert [str(c) for c in where.candidates] == ["fp32 batch 64", "bf16 batch 64"]
    assert [(e.precision, e.batch_size) for e in where.excluded] == [("fp32", 32), ("bf16", 32)], "no flood"
    assert all(why in e.reason and "all smaller" in e.reason for e in where.excluded)
    decision = searched(on, where)
    assert Setting.of(decision.config) == candidate("bf16", 64)
    (note,) = [w for w in decision.notes if "effective batch size is kept" in w]
    assert why in note
    assert "--effective-batch-size free" in note
    assert not any(why in w for w in decision.warnings), "it changes nothing of what is done"
    assert {e.batch_size for e in decision.excluded} == {32}
    again = ledger_of(on.ledger.records, built(**KEPT), on.ledger.scales)
    description = on.searched.job_defaults.description
    decided = decide(again, environment=HELD, search=SUMMARY, description=description)
    assert decided == decision, "judged from the records alone"


@pytest.mark.parametrize("verdict", ["inexact", "unchecked"])
def test_what_is_not_exact_is_never_recommended_for_memory_although_it_takes_the_least(
    tmp_path: Path, verdict: AccumulationVerdict
) -> None:
    on = machine(tmp_path, accumulation(verdict))
    on.objective = "memory"
    decision = searched(on, built(**KEPT, objective="memory"))
    assert Setting.of(decision.config) == candidate("bf16", 64)
    splits = [r.candidate for r in on.ledger.records if r.purpose == "search" and r.candidate.accumulation_steps > 1]
    assert splits == [], "the check comes first"


def test_what_was_tried_before_accumulation_was_found_inexact_does_not_count() -> None:
    whole, split = candidate("bf16", 64), candidate("bf16", 8, 8)
    log = Log().add(candidate("fp32", 64), 100.0).add(whole, 200.0).add(split, 300.0)
    assert split in ledger_of(log.records, built(**KEPT)).merits
    log.add(split, accumulation("inexact"), "accumulation")
    assert set(ledger_of(log.records, built(**KEPT)).merits) == {candidate("fp32", 64), whole}


@pytest.mark.parametrize("verdict", ["inexact", "unchecked"])
def test_where_the_effective_batch_size_is_free_the_passes_of_today_s_training_stay(
    tmp_path: Path, verdict: AccumulationVerdict
) -> None:
    today = {"batch_size": 16, "accumulation_steps": 4}
    where = built(precision=["fp32", "bf16"], effective_batch_size="free", about=today)
    checked = judged(machine(tmp_path, accumulation(verdict)), where)
    assert checked.candidates == where.candidates
    assert checked.warnings, "what runs today is warned of"


def test_a_command_whose_fallback_does_not_fit_is_not_split_without_a_check() -> None:
    """The check needs a Workload, and no passes of a command were shown to add up."""
    about = {"batch_size": 8, "accumulation_steps": 4, "checks": ("fidelity",), "weighs_passes": True}
    where, winner = built(precision=["fp32", "bf16"], about=about), candidate("bf16", 32)
    log = Log().add(where.baseline, 100.0).add(winner, 300.0).add(candidate("bf16", 16), fidelity("bf16"), "fidelity")
    on = ScriptedSearch(where, lambda trial: Failure(kind="oom", message=f"{trial.candidate} is too large"))
    on.ledger.records = tuple(log.records)
    on.measure_fallbacks()
    assert [spec.candidate for spec in on.backend.specs] == [candidate("fp32", 32)]
    assert on.backend.checks == []


def test_where_nothing_would_accumulate_nothing_is_checked(tmp_path: Path) -> None:
    for where in (built(effective_batch_size="free"), built(batch_size="32:32"), built(about={"unsettable": LOOP})):
        on = machine(tmp_path, accumulation("inexact"))
        assert judged(on, where) == where
        assert on.searched.backend.checks == []


def test_a_baseline_that_accumulates_stays_and_is_warned_of(tmp_path: Path) -> None:
    on = machine(tmp_path, accumulation("inexact"))
    on.base["bf16"] = 90.0
    on.oom_from = {"fp32": 64, "bf16": 64}
    space = built(precision=["fp32", "bf16"], effective_batch_size=64)
    where = judged(on, space)
    assert where.baseline == candidate("fp32", 32, 2)
    assert accumulating(where) == set()
    assert [(e.precision, e.batch_size) for e in where.excluded] == [("fp32", 16), ("bf16", 32)]
    decision = searched(on, where)
    assert decision.config.accumulation_steps == 2
    assert decision.reason.startswith("Keep what you have")
    assert any("fp32 batch 32 x 2, accumulates" in w for w in decision.warnings)


@pytest.mark.parametrize(
    ("verdict", "num_steps", "plan_steps", "is_said"),
    [("weighted", 2, 2, True), ("sum", 1, 4, True), ("sum", 1, 1, False), ("mean", 2, 2, False)],
)
def test_the_weighting_is_said_where_the_config_or_a_plan_accumulates(
    verdict: Any, num_steps: int, plan_steps: int, is_said: bool
) -> None:
    chosen = candidate("bf16", 64 // num_steps, num_steps)
    plan = FallbackPlan(precision="fp32", batch_size=64 // plan_steps, accumulation_steps=plan_steps)
    config = AmpConfig(precision="bf16", batch_size=chosen.batch_size, accumulation_steps=num_steps, fallback=(plan,))
    warnings, notes = said = accumulation_warnings(built(**KEPT), chosen, config, accumulation(verdict))
    assert warnings + notes == ([f"The micro-batches are {verdict}. Do as {verdict} asks."] if is_said else [])
    assert bool(warnings) == (is_said and num_steps > 1), "a plan that may never be needed changes nothing now"
    assert accumulation_warnings(built(**KEPT), chosen, config, None) == ([], [])
    a_commands = msgspec.structs.replace(built(**KEPT), weighs_passes=True, checks=frozenset({"fidelity"}))
    unchecked = accumulation_warnings(a_commands, chosen, config, None)
    assert len([*unchecked[0], *unchecked[1]]) == (max(num_steps, plan_steps) > 1)
    todays = msgspec.structs.replace(a_commands, baseline=candidate("fp32", 64 // plan_steps, plan_steps))
    assert bool(accumulation_warnings(todays, chosen, config, None)[0]) == (num_steps not in (1, plan_steps))
    keeps = msgspec.structs.replace(a_commands, keeps_effective_batch_size=True)
    assert accumulation_warnings(keeps, chosen, config, None) == ([], [])
    is_done = verdict == "weighted"
    weighing = msgspec.structs.replace(built(**KEPT), weighs_passes=True)
    assert accumulation_warnings(weighing, chosen, config, accumulation(verdict)) == (([], []) if is_done else said)


def test_a_changed_effective_batch_size_is_that_of_all_ranks() -> None:
    where = Space(candidates=(), baseline=candidate("fp32", 8), num_batches=2)
    ((warning,), _) = accumulation_warnings(
        where, candidate("bf16", 32), AmpConfig(precision="bf16", batch_size=32), None
    )
    assert re.findall(r"[0-9]+", warning) == ["16", "64", "16"]


@pytest.mark.parametrize("verdict", ["mean", "inexact"])
def test_a_plan_to_step_down_to_is_split_only_where_that_is_exact(tmp_path: Path, verdict: Any) -> None:
    """A free search accumulates nothing, so that nobody has asked before the plan does."""
    on = machine(tmp_path, accumulation(verdict))
    on.oom_from = {"fp32": 64}
    where = judged(on, built(precision=["fp32", "bf16"], effective_batch_size="free"))
    assert on.searched.backend.checks == []
    decision = searched(on, where)
    assert (decision.config.precision, decision.config.batch_size) == ("bf16", 64)
    assert sum(spec.what == "accumulation" for spec in on.searched.backend.checks) == 1
    plans = [(plan.precision, plan.batch_size, plan.accumulation_steps) for plan in decision.config.plans]
    assert plans == ([("fp32", 32, 2)] if verdict == "mean" else [])


@pytest.mark.parametrize(("verdict", "log2_scale"), [("mean", 14.0), ("sum", 13.0)])
def test_trials_and_loss_scales_know_a_sum(tmp_path: Path, verdict: Any, log2_scale: float) -> None:
    on, tried = machine(tmp_path, accumulation(verdict)), candidate("fp16", 32, 2)
    job_defaults = on.on(built(**KEPT)).job_defaults
    assert not job_defaults.trial(on.ledger, tried).is_loss_sum, "nobody has asked"
    judged(on, built(**KEPT))
    on.ledger.append(
        Record(search_id="s", number=9, candidate=tried, purpose="calibration", outcome=calibration(14.5), seconds=1.0)
    )
    assert job_defaults.trial(on.ledger, tried).is_loss_sum == (verdict == "sum")
    scales = loss_scales.scales_of(on.ledger.scales, tried)
    assert scales is not None
    assert scales.preferred[0] == 2.0**log2_scale
