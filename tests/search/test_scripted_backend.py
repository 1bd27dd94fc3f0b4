"""The scripted backend is one that searches can rely on like any other, and a stage is a class with one method."""

from __future__ import annotations

import pytest
from backend_contract import BackendContract, Made
from replay import ReplayBudget
from scripted_backend import ScriptedBackend, ScriptedSearch, candidate, measured, out_of_memory

from autotune_amp.core.outcome import Outcome
from autotune_amp.core.setting import Setting
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.space import Space
from autotune_amp.search.stages import Stage
from autotune_amp.trial.jobs import Check, Trial


def answer(trial: Trial) -> Outcome:
    return out_of_memory() if trial.candidate.batch_size > 8 else measured(trial, 100.0)


class TestScripted(BackendContract):
    @pytest.fixture
    def made(self) -> Made:
        return Made(
            ScriptedBackend(answer, ReplayBudget(100.0)),
            Trial(candidate=candidate("fp32", 8), device="cpu"),
            Trial(candidate=candidate("fp32", 16), device="cpu"),
            "oom",
            Check(what="fidelity", candidate=Setting(precision="bf16", batch_size=8), device="cpu"),
        )


class Smallest(Stage):
    """A stage of a test's own: every candidate from the smallest batch up, until one does not run."""

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        untried = [c for c in ledger.space.candidates if c not in ledger.outcomes]
        smallest = min(untried, key=lambda c: c.batch_size, default=None)
        if smallest is None or ledger.failures:
            return None
        return planner.trial(ledger, smallest, planner.exploration_seconds(ledger))


def test_what_a_stage_of_ones_own_measures_is_decided_on() -> None:
    space = Space(candidates=tuple(candidate("fp32", b) for b in (32, 8, 16, 4)), baseline=candidate("fp32", 4))
    searched = ScriptedSearch(space, answer)
    searched.run(Smallest())
    assert [record.candidate.batch_size for record in searched.records] == [4, 8, 16]
    assert searched.ledger.final_shortlist is not None
    assert searched.decide({}).config.batch_size == 4
