"""What lies beyond an effective batch size that is kept is shown with the time that is left, and never recommended."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_backend import ScriptedSearch, candidate, described, hardware, measured, out_of_memory

from autotune_amp.core.evidence import outlook_line
from autotune_amp.core.outcome import Outcome
from autotune_amp.core.recommendation import Decision
from autotune_amp.search.space import Space
from autotune_amp.search.stages.confirm import LargerBatchTrials
from autotune_amp.trial.jobs import Trial

KEPT = 32
SPACE = Space(
    candidates=tuple(candidate(p, b, KEPT // b) for p in ("fp32", "bf16") for b in (8, 16, 32)),
    baseline=candidate("fp32", KEPT),
    effective_batch_size=KEPT,
)


class Machine:
    """bf16 pays at large batches alone, up to `plateau`; from `oom_from` on nothing fits."""

    def __init__(self, plateau: int = 10**9, oom_from: int = 10**9, space: Space = SPACE, **fields: Any) -> None:
        self.plateau, self.oom_from = plateau, oom_from
        self.searched = ScriptedSearch(
            space,
            self.answer,
            1000.0,
            device=hardware({"fp32": 1.0, "tf32": None, "bf16": 3.0, "fp16": None, "fp8": None}),
            description=described(batch_size=KEPT, **fields),
        )

    def answer(self, trial: Trial) -> Outcome:
        if trial.candidate.batch_size >= self.oom_from:
            return out_of_memory()
        size = min(trial.candidate.batch_size, self.plateau)
        return measured(trial, size / (0.1 + {"fp32": 0.001, "bf16": 0.0001}[trial.candidate.precision] * size))

    def search(self, left_seconds: float = 100.0) -> Decision:
        """A search with so much time left after its confirmation."""
        self.searched.explore(is_checked=True)
        assert self.searched.ledger.final_shortlist is not None
        self.searched.confirm(self.searched.ledger.final_shortlist, {})
        self.searched.set_start({}, 0.5)
        self.searched.budget.now = self.searched.budget.seconds - left_seconds
        self.searched.run(LargerBatchTrials({}))
        return self.searched.decide({})

    def beyond(self) -> list[str]:
        return [str(record.candidate) for record in self.searched.records if record.purpose == "outlook"]


@pytest.mark.parametrize(
    "fields", [{"keeps_effective_batch_size": True}, {"unsettable": {"batch_size": "the script makes its own batches"}}]
)
def test_a_command_that_keeps_its_total_or_its_batches_has_no_larger_one(fields: dict[str, Any]) -> None:
    machine = Machine(**fields)
    machine.search()
    assert machine.beyond() == []


def test_a_larger_one_accumulates_as_often_as_the_script_does_in_any_case() -> None:
    space = Space(
        candidates=(candidate("fp32", 8, 4), candidate("bf16", 8, 4)),
        baseline=candidate("fp32", 8, 4),
        effective_batch_size=KEPT,
    )
    machine = Machine(space=space, accumulation_steps=4, unsettable={"accumulation_steps": "the script's own loop"})
    machine.search()
    assert machine.beyond()[:2] == ["bf16 batch 16 x 4", "bf16 batch 32 x 4"]


def test_the_outlook_is_shown_and_changes_nothing_of_what_is_recommended() -> None:
    machine = Machine()
    before = Machine().search(left_seconds=0.0)
    decision = machine.search()
    assert machine.beyond() == [f"bf16 batch {size}" for size in (64, 128, 256, 512)], "at most 16 times what is kept"
    outlook = decision.outlook
    assert outlook is not None
    assert (outlook.precision, outlook.batch_size, outlook.accumulation_steps) == ("bf16", 512, 1)
    assert outlook.speedup == pytest.approx(outlook.samples_per_second / (KEPT / 0.132))
    assert "learning rate" in outlook_line(outlook)
    for name in ("config", "candidates", "excluded"):
        assert getattr(decision, name) == getattr(before, name)
    assert decision.config.effective_batch_size == KEPT


@pytest.mark.parametrize(
    ("machine", "left_seconds", "tried"),
    [
        (Machine(plateau=128), 100.0, [64, 128, 256]),
        (Machine(oom_from=128), 100.0, [64, 128]),
        (Machine(oom_from=32), 100.0, []),
        (Machine(plateau=8), 100.0, [64]),
        (Machine(), 0.5, []),
        (Machine(space=Space(candidates=SPACE.candidates, baseline=SPACE.baseline)), 100.0, []),
    ],
    ids=["no gain", "memory", "what is kept does not fit", "no gain at all", "no time", "free already"],
)
def test_it_ends_where_nothing_more_can_be_gained(machine: Machine, left_seconds: float, tried: list[int]) -> None:
    decision = machine.search(left_seconds)
    assert [int(name.split()[-1]) for name in machine.beyond()] == tried
    best = max((size for size in tried if size <= machine.plateau and size < machine.oom_from), default=None)
    assert (None if decision.outlook is None else decision.outlook.batch_size) == best
    assert best is None or machine.searched.ledger.num_failures == 0, "an outlook that does not fit is none"
    assert {excluded.batch_size for excluded in decision.excluded}.isdisjoint(tried)


def test_the_time_left_is_kept() -> None:
    machine = Machine()
    machine.search(left_seconds=12.0)
    assert 0 < len(machine.beyond()) < 4
    assert machine.searched.budget.left() >= 0
