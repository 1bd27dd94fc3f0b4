"""Explore, fall back, confirm and decide on scripted machines: every branch without a wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_backend import ScriptedSearch, all_well, candidate, measured, out_of_memory

from autotune_amp.core.evidence import Objective
from autotune_amp.core.outcome import CheckOutcome, Failure, Outcome
from autotune_amp.core.precisions import PRECISIONS, Precision
from autotune_amp.core.recommendation import Decision
from autotune_amp.search.ledger import Ledger, Shortlist
from autotune_amp.search.space import Space
from autotune_amp.search.stages import checks
from autotune_amp.search.stages.explore import MAX_PROCESSES
from autotune_amp.trial.jobs import Check, Trial

SIZES = (8, 16, 32, 64, 128)
HELD = {"MALLOC_TRIM_THRESHOLD_": "2147483647"}


def space(precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16"), baseline: int = 32) -> Space:
    return Space(
        candidates=tuple(candidate(p, b) for p in precisions for b in SIZES), baseline=candidate("fp32", baseline)
    )


class Machine:
    """bf16 twice as fast as fp32, fp16 hopeless, throughput rising to a plateau at batch 64."""

    def __init__(self, folder: Path, budget_seconds: float = 2000.0) -> None:
        self.check_answers: dict[tuple[str, str, int], CheckOutcome] = {}
        self.oom_from: dict[Precision, int] = {}
        self.base: dict[Precision, float] = {"fp32": 100.0, "bf16": 200.0, "fp16": 2.0}
        self.objective: Objective = "speed"
        self._folder, self._budget_seconds = folder, budget_seconds
        self._searched: ScriptedSearch | None = None

    def on(self, where: Space) -> ScriptedSearch:
        """The search of `where`, begun or gone on with."""
        if self._searched is None:
            self._searched = ScriptedSearch(
                where,
                self.answer,
                self._budget_seconds,
                check_answer=self.check,
                folder=self._folder,
                objective=self.objective,
            )
        return self._searched

    @property
    def searched(self) -> ScriptedSearch:
        assert self._searched is not None
        return self._searched

    @property
    def ledger(self) -> Ledger:
        return self.searched.ledger

    def answer(self, spec: Trial) -> Outcome:
        tried = spec.candidate
        if tried.batch_size >= self.oom_from.get(tried.precision, 10**9):
            return out_of_memory()
        rate = self.base[tried.precision] * min(tried.batch_size, 64) / 64
        if tried.batch_size / rate > (spec.first_step_deadline_seconds or 1e9):
            return Failure(kind="timeout", message="a step took too long")
        return measured(spec, rate, memory=2**26 * tried.batch_size)

    def check(self, spec: Check) -> CheckOutcome:
        key = spec.what, spec.candidate.precision, len(spec.candidate.pinned_modules)
        return self.check_answers.get(key) or all_well(spec)

    def explore(self, where: Space, max_trials: int | None = None, *, is_checked: bool = False) -> None:
        self.on(where).explore(max_trials, is_checked=is_checked)

    def confirm(self, chosen: Shortlist) -> None:
        self.searched.confirm(chosen, HELD)

    def decide(self) -> Decision:
        return self.searched.decide(HELD)

    def checks(self) -> list[str]:
        return [f"{r.purpose} {r.candidate}" for r in self.ledger.records if r.purpose in ("fidelity", "calibration")]


def test_a_whole_search(tmp_path: Path) -> None:
    machine, where = Machine(tmp_path), space()
    machine.explore(where, is_checked=True)
    chosen = machine.ledger.shortlist
    assert chosen is not None
    assert chosen.winner == candidate("bf16", 64)
    machine.searched.measure_fallbacks()
    machine.confirm(chosen)
    decision = machine.decide()
    assert (decision.config.precision, decision.config.batch_size) == ("bf16", 64)
    assert decision.config.environment == HELD
    assert decision.evidence.speedup == pytest.approx(4.0)
    assert decision.evidence.is_confirmed
    (fallback,) = decision.config.plans
    assert (fallback.precision, fallback.batch_size, fallback.accumulation_steps) == ("fp32", 64, 1)
    assert (fallback.samples_per_second, fallback.slowdown) == pytest.approx((100.0, 2.0))
    assert fallback.peak_memory_bytes == 2**26 * 64
    slow = [spec for spec in machine.searched.backend.specs if spec.candidate.precision == "fp16"]
    assert 1 <= len(slow) <= 2, "a hopeless precision's row must say what happened, and costs little"
    assert all(spec.deadline_seconds is not None and spec.deadline_seconds <= 20.0 for spec in slow)
    assert sum(record.seconds for record in machine.ledger.records) < machine.searched.budget.seconds


def test_checks_that_never_end_leave_the_search_its_time(tmp_path: Path) -> None:
    def never_ends(spec: Check) -> CheckOutcome:
        search.budget.now += spec.deadline_seconds or 0.0
        return Failure(kind="timeout", message="it hangs")

    search = ScriptedSearch(space(), Machine(tmp_path).answer, 2000.0, check_answer=never_ends, folder=tmp_path)
    search.explore(is_checked=True)
    purposes = [r.purpose for r in search.records]
    assert "search" in purposes[purposes.index("fidelity") :]
    assert search.planner.seconds_before_confirmation(search.ledger) > 0


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.fixed_dictionaries({p: st.floats(1.0, 1000.0) for p in ("fp32", "bf16", "fp16")}),
    oom=st.fixed_dictionaries({p: st.sampled_from([*SIZES, 10**9]) for p in ("fp32", "bf16", "fp16")}),
    budget=st.floats(5.0, 300.0),
)
def test_on_any_machine_the_answer_was_measured_and_the_budget_kept(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    base: dict[Precision, float],
    oom: dict[Precision, int],
    budget: float,
) -> None:
    monkeypatch.setattr(checks, "NUM_PAIRS", 4)  # each is a commit
    folder = tmp_path_factory.mktemp("machine")
    machine, where = Machine(folder, budget), space()
    machine.base, machine.oom_from = base, oom
    machine.on(where).storage = "sqlite://"
    machine.explore(where, is_checked=True)
    searched = [record for record in machine.ledger.records if record.purpose == "search"]
    tried = [record.candidate for record in searched]
    assert all(tried.count(candidate) <= MAX_PROCESSES for candidate in tried)
    chosen = machine.ledger.shortlist
    if chosen is None:
        assert all(isinstance(record.outcome, Failure) for record in searched)
        return
    machine.searched.measure_fallbacks()
    machine.confirm(chosen)
    overrun = 2 * max(r.seconds for r in machine.ledger.records)
    assert machine.searched.budget.now <= budget + overrun
    decision = machine.decide()
    assert any(r.candidate == chosen.winner for r in machine.ledger.records)
    assert any(
        (r.candidate.precision, r.candidate.batch_size) == (decision.config.precision, decision.config.batch_size)
        and not isinstance(r.outcome, Failure)
        for r in machine.ledger.records
    )
    for plan in decision.config.plans:
        assert PRECISIONS.index(plan.precision) < PRECISIONS.index(decision.config.precision)
        effective = decision.config.batch_size * decision.config.accumulation_steps
        assert plan.batch_size * plan.accumulation_steps == effective
