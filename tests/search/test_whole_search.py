"""Explore, fall back, confirm and decide on scripted machines: every branch without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_runner import (
    ScriptedClock,
    ScriptedRunner,
    all_well,
    candidate,
    hardware,
    measured,
    out_of_memory,
    session,
)

from autotune_amp.core.config import PRECISIONS, LossScale, Precision
from autotune_amp.core.outcome import CheckOutcome, Failure, Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.search import gate
from autotune_amp.search.choose import Decision, Shortlist, decide, shortlist
from autotune_amp.search.confirm import NUM_ROUNDS, Processes, Run, confirm, measure_fallbacks, plan_round
from autotune_amp.search.explore import NUM_SEARCH_PROCESSES, explore, search_spec
from autotune_amp.search.gate import pass_gate
from autotune_amp.search.session import CONFIRM_SHARE, Session
from autotune_amp.search.space import Space
from autotune_amp.search.study import Study
from autotune_amp.trial.jobs import Check, Trial

SIZES = (8, 16, 32, 64, 128)
HELD = {"MALLOC_TRIM_THRESHOLD_": "2147483647"}
RATES: dict[Precision, float | None] = {"fp32": 1.0, "tf32": None, "bf16": 3.0, "fp16": 0.01, "fp8": None}


def space(precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16"), baseline: int = 32) -> Space:
    return Space(
        candidates=tuple(candidate(p, b) for p in precisions for b in SIZES), baseline=candidate("fp32", baseline)
    )


class Machine:
    """bf16 twice as fast as fp32, fp16 hopeless, throughput rising to a plateau at batch 64."""

    def __init__(self, folder: Path, budget_seconds: float = 200.0) -> None:
        self.clock = ScriptedClock(budget_seconds)
        self.session: Session = session(folder, self.clock, hardware(RATES))
        self.runner = ScriptedRunner(self.answer, self.clock, check_answer=self.check)
        self.check_answers: dict[tuple[str, str, int], CheckOutcome] = {}
        self.oom_from: dict[Precision, int] = {}
        self.base: dict[Precision, float] = {"fp32": 100.0, "bf16": 200.0, "fp16": 2.0}
        self.nonfinite: tuple[Precision, ...] = ()
        self.confirming: list[tuple[Setting, dict[str, str]]] = []

    def answer(self, spec: Trial) -> Outcome:
        tried = spec.candidate
        if tried.precision in self.nonfinite and not tried.pinned_modules:
            return Failure(kind="nonfinite", message="the loss became nan")
        if tried.batch_size >= self.oom_from.get(tried.precision, 10**9):
            return out_of_memory()
        rate = self.base[tried.precision] * min(tried.batch_size, 64) / 64
        if tried.batch_size / rate > (spec.first_step_deadline_seconds or 1e9):
            return Failure(kind="timeout", message="a step took too long")
        return measured(spec, rate, memory=2**26 * tried.batch_size)

    def check(self, spec: Check) -> CheckOutcome:
        key = spec.what, spec.precision, len(spec.pinned_modules)
        return self.check_answers.get(key) or all_well(spec)

    def explore(self, where: Space, folder: Path, max_trials: int | None = None, *, is_gated: bool = False) -> None:
        with Study.open(
            folder / "study.db",
            "scripted",
            where,
            search_id="scripted-1",
            judge=self.session.judge,
            records=self.session.records,
        ) as study:
            explore(self.session, self.runner.as_runner, where, study, max_trials)
            if is_gated:
                pass_gate(self.session, self.runner.as_runner, where, study, search_spec)

    def confirm(self, chosen: Shortlist) -> None:
        def runner_for(environment: dict[str, str]):  # type: ignore[no-untyped-def]  # a scripted runner
            runner = ScriptedRunner(self.answer, self.clock, environment)
            run = runner.run

            def noted(spec: Trial) -> Outcome:
                self.confirming.append((spec.candidate, environment))
                return run(spec)

            runner.run = noted  # type: ignore[method-assign]  # a scripted runner
            return runner

        confirm(self.session, Processes(runner_for, start_seconds=1.0), chosen, HELD)

    def decide(self, where: Space) -> Decision:
        return decide(
            self.session.records,
            where,
            environment=HELD,
            loss_scale=LossScale(),
            exclusions=self.session.exclusions(where),
            scales=self.session.scales,
        )

    def checks(self) -> list[str]:
        return [f"{r.purpose} {r.candidate}" for r in self.session.records if r.purpose in ("fidelity", "calibration")]


def test_a_whole_search(tmp_path: Path) -> None:
    machine, where = Machine(tmp_path), space()
    machine.explore(where, tmp_path, is_gated=True)
    chosen = shortlist(machine.session.records, where.baseline)
    assert chosen is not None
    assert chosen.winner == candidate("bf16", 64)
    measure_fallbacks(machine.session, machine.runner.as_runner, where, chosen.winner)
    machine.confirm(chosen)
    decision = machine.decide(where)
    assert (decision.config.precision, decision.config.batch_size) == ("bf16", 64)
    assert decision.config.environment == HELD
    assert decision.evidence.speedup == pytest.approx(4.0)
    assert decision.evidence.is_confirmed
    (fallback,) = decision.config.plans
    assert (fallback.precision, fallback.batch_size, fallback.accumulation_steps) == ("fp32", 64, 1)
    assert fallback.samples_per_second == pytest.approx(100.0)
    assert fallback.slowdown == pytest.approx(2.0)
    assert fallback.peak_memory_bytes == 2**26 * 64
    seconds = sum(record.seconds for record in machine.session.records)
    assert seconds < machine.clock.budget_seconds


def test_a_hopeless_precision_costs_at_most_a_tenth_of_the_budget(tmp_path: Path) -> None:
    machine, where = Machine(tmp_path), space()
    machine.explore(where, tmp_path)
    slow = [spec for spec in machine.runner.specs if spec.candidate.precision == "fp16"]
    assert 1 <= len(slow) <= 2, "its row must say what happened, and that must not be tried at every batch size"
    assert all(spec.deadline_seconds is not None and spec.deadline_seconds <= 20.0 for spec in slow)
    assert any(e.precision == "fp16" for e in machine.decide(where).excluded)


def test_a_fallback_that_does_not_fit_is_split(tmp_path: Path) -> None:
    machine, where = Machine(tmp_path), space()
    machine.oom_from = {"fp32": 64}
    machine.explore(where, tmp_path, is_gated=True)
    measure_fallbacks(machine.session, machine.runner.as_runner, where, candidate("bf16", 64))
    (plan,) = machine.decide(where).config.plans
    assert (plan.precision, plan.batch_size, plan.accumulation_steps) == ("fp32", 32, 2)


def test_max_trials_is_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.explore(space(), tmp_path, max_trials=3)
    assert len(machine.session.records) == 3


def test_what_a_small_budget_left_untried_is_said(tmp_path: Path) -> None:
    machine, where = Machine(tmp_path, budget_seconds=8.0), space()
    machine.explore(where, tmp_path)
    excluded = decide(
        machine.session.records, where, environment=HELD, loss_scale=LossScale(), is_budget_spent=True
    ).excluded
    assert any("not tried" in entry.reason for entry in excluded)
    assert machine.clock.now <= 8.0


def test_a_baseline_out_of_memory_leaves_no_speedup(tmp_path: Path) -> None:
    machine, where = Machine(tmp_path), space(baseline=128)
    machine.oom_from = {"fp32": 128}
    machine.explore(where, tmp_path, is_gated=True)
    chosen = shortlist(machine.session.records, where.baseline)
    assert chosen is not None
    machine.confirm(chosen)
    decision = machine.decide(where)
    assert decision.config.precision == "bf16"
    assert decision.evidence.speedup is None
    assert decision.evidence.baseline.samples_per_second is None
    assert "oom" in (decision.evidence.baseline.reason or "")
    assert where.baseline not in [tried for tried, _ in machine.confirming]


def test_a_baseline_at_home_on_the_plateau_is_kept(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.base["bf16"] = 100.0
    where = space(baseline=64)
    machine.explore(where, tmp_path)
    chosen = shortlist(machine.session.records, where.baseline)
    assert chosen is not None
    machine.confirm(chosen)
    decision = machine.decide(where)
    assert (decision.config.precision, decision.config.batch_size) == ("fp32", 64)
    assert decision.reason.startswith("Keep what you have")
    assert decision.config.environment == {}
    assert decision.evidence.speedup == 1.0


SHORTLIST = Shortlist(candidate("bf16", 64), candidate("bf16", 128), candidate("fp32", 32))


def test_rounds_are_interleaved_and_alternate() -> None:
    rounds = [plan_round(SHORTLIST, HELD, len, 100.0, number) for number in range(NUM_ROUNDS)]
    kinds = [[run.candidate for run in runs if run.purpose == "confirm"] for runs in rounds]
    assert kinds[1] == kinds[0][::-1]
    assert kinds[2] == kinds[0]
    assert all(len(runs) == 3 for runs in kinds)
    assert [run.purpose for runs in rounds for run in runs].count("plain") == 1
    environments = {run.candidate: run.environment for run in rounds[0] if run.purpose == "confirm"}
    assert environments == {SHORTLIST.winner: HELD, SHORTLIST.runner_up: HELD, SHORTLIST.baseline: {}}


@pytest.mark.parametrize(
    ("left", "number", "expected"),
    [
        (10.0, 0, ["bf16 batch 64", "bf16 batch 128", "fp32 batch 32", "bf16 batch 64"]),
        (9.9, 0, ["bf16 batch 64", "fp32 batch 32", "bf16 batch 64"]),  # the runner-up gives way to a third round
        (5.0, 1, ["fp32 batch 32", "bf16 batch 64"]),
        (2.0, 0, ["bf16 batch 64", "fp32 batch 32"]),
        (1.9, 0, ["bf16 batch 64"]),
        (0.9, 0, []),
        (3.0, 3, ["fp32 batch 32", "bf16 batch 128", "bf16 batch 64"]),
    ],
)
def test_what_a_round_runs_with_the_time_left(left: float, number: int, expected: list[str]) -> None:
    runs = plan_round(SHORTLIST, HELD, len, left, number)
    assert [str(run.candidate) for run in runs] == expected


@given(
    left=st.floats(0.0, 200.0),
    costs=st.lists(st.floats(0.1, 50.0), min_size=3, max_size=3),
    has_runner_up=st.booleans(),
    is_baseline=st.booleans(),
    number=st.integers(0, NUM_ROUNDS),
)
def test_a_round_never_costs_more_than_what_is_left(
    left: float, costs: list[float], has_runner_up: bool, is_baseline: bool, number: int
) -> None:
    baseline = candidate("fp32", 32)
    winner = baseline if is_baseline else candidate("bf16", 64)
    runner_up = candidate("bf16", 128) if has_runner_up else None
    seconds = dict(zip((baseline, candidate("bf16", 64), candidate("bf16", 128)), costs, strict=True))

    def seconds_of(runs: Sequence[Run]) -> float:
        return sum(seconds[run.candidate] for run in runs)

    runs = plan_round(Shortlist(winner, runner_up, baseline), HELD, seconds_of, left, number)
    assert seconds_of(runs) <= left + 1e-6
    assert not runs or winner in {run.candidate for run in runs}
    assert seconds[winner] > left or runs


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    monkeypatch.setattr(gate, "NUM_PAIRS", 4)  # a pair costs Optuna a dozen commits
    folder = tmp_path_factory.mktemp("machine")
    machine, where = Machine(folder, budget), space()
    machine.base, machine.oom_from = base, oom
    machine.explore(where, folder, is_gated=True)
    searched = [record for record in machine.session.records if record.purpose == "search"]
    tried = [record.candidate for record in searched]
    assert all(tried.count(candidate) <= NUM_SEARCH_PROCESSES for candidate in tried)
    chosen = shortlist(machine.session.records, where.baseline)
    if chosen is None:
        assert all(isinstance(record.outcome, Failure) for record in searched)
        return
    measure_fallbacks(machine.session, machine.runner.as_runner, where, chosen.winner)
    began = machine.clock.now
    machine.confirm(chosen)
    assert (
        machine.clock.now - began <= CONFIRM_SHARE * budget + 2 * max(r.seconds for r in machine.session.records) + 60
    )
    decision = machine.decide(where)
    confirmed = [r for r in machine.session.records if r.candidate == chosen.winner]
    assert confirmed
    assert any(
        (r.candidate.precision, r.candidate.batch_size) == (decision.config.precision, decision.config.batch_size)
        and not isinstance(r.outcome, Failure)
        for r in machine.session.records
    )
    for plan in decision.config.plans:
        assert PRECISIONS.index(plan.precision) < PRECISIONS.index(decision.config.precision)
        effective = decision.config.batch_size * decision.config.accumulation_steps
        assert plan.batch_size * plan.accumulation_steps == effective
