"""Slots that are lost while a search runs, and such as come: nothing is lost with them and nothing counted twice."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, ClassVar

import pytest
from closed_form import Repeated, landscapes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from replay import Done, SlotBackends
from scripted_backend import ScriptedSearch, candidate, measured
from search_replay import Replayed, search_replay, setting_of
from test_search_on_slots import BASELINE, SLOTS, SPACE, Listed, Timed, answer

from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.processes.local import Slot, SlotLostError
from autotune_amp.search import ranking
from autotune_amp.search.planner import MIN_ROUNDS
from autotune_amp.search.ranking import PLATEAU
from autotune_amp.search.run import Runner, run_stages

NAMES = [name for name in landscapes() if name.endswith(", 0 %")]


class _Lost:
    """A job whose slot goes in the middle of it."""

    def __init__(self, beside: Losing, job: Done, slot: Slot) -> None:
        self._beside, self._job, self._slot = beside, job, slot
        self.ends_at = job.ends_at
        self.start_seconds = None

    def result(self) -> Any:
        self._job.result()  # the time passes
        self._beside.slots = tuple(slot for slot in self._beside.slots if slot != self._slot)
        raise SlotLostError(self._slot, "it was switched off")


class Losing(SlotBackends):
    """Loses the slots of the jobs of these numbers, in the order in which they began, but never the last slot."""

    lost_at: ClassVar[frozenset[int]] = frozenset()
    num_begun: ClassVar[int] = 0

    def submit(self, job: Any, slot: Slot) -> Any:
        handle = super().submit(job, slot)
        number, Losing.num_begun = Losing.num_begun, Losing.num_begun + 1
        return _Lost(self, handle, slot) if number in self.lost_at and len(self.slots) > 1 else handle


def played(name: str, lost_at: frozenset[int], num_slots: int = 4) -> Replayed:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search_replay.SlotBackends", Losing)
        patch.setattr(Losing, "lost_at", lost_at)
        patch.setattr(Losing, "num_begun", 0)
        return search_replay(Repeated(landscapes()[name], 0), 0, 200.0, num_slots)


@cache
def missed(name: str) -> float:
    """By how much the choice misses the best where nothing is lost."""
    decision = played(name, frozenset()).decision
    assert decision is not None
    return landscapes()[name].regret(setting_of(decision))


@pytest.mark.slow
@settings(max_examples=12)
@given(name=st.sampled_from(NAMES), lost_at=st.frozensets(st.integers(0, 45), max_size=3))
def test_whatever_is_lost_the_choice_is_as_good_and_nothing_is_counted_twice(
    name: str, lost_at: frozenset[int]
) -> None:
    found = played(name, lost_at)
    records = [record for _, record in found.records]
    # Lost twice: which is a failure.
    assume(not any(isinstance(r.outcome, Failure) and "lost" in r.outcome.message for r in records))
    assert found.decision is not None
    assert landscapes()[name].regret(setting_of(found.decision)) <= missed(name) + PLATEAU
    assert len({record.number for record in records}) == len(records)
    counted = [record for record in ranking.without_lost_rounds(found.ledger.records) if record.round is not None]
    runs = Counter((r.round, r.candidate, r.purpose, tuple(r.environment)) for r in counted)
    assert set(runs.values()) <= {1}
    slots = {number: {r.slot for r in counted if r.round == number} for number in {r.round for r in counted}}
    assert all(len(names) == 1 for names in slots.values()), "a round is held against itself on one slot"
    assert found.decision.evidence.is_confirmed


def test_a_round_whose_slot_goes_is_run_anew_and_whole_elsewhere() -> None:
    form = "plateau, 0 %"
    without = played(form, frozenset())
    rounds = [number for number, (_, record) in enumerate(without.records) if record.round == 0]
    found = played(form, frozenset({rounds[-1]}))  # the last run of the first round
    first = [(r.slot, r.candidate) for r in found.ledger.records if r.round == 0]
    (lost_on, _), (slot, _) = first[0], first[-1]
    assert lost_on != slot
    settings = {without.records[number][1].candidate for number in rounds}
    assert {setting for name, setting in first if name == slot} == settings
    counted = [r for r in ranking.without_lost_rounds(found.ledger.records) if r.round is not None]
    per_round = Counter(r.round for r in counted)
    assert len(per_round) >= MIN_ROUNDS
    assert min(per_round.values()) >= 2, "baseline and winner"


def runner_of(searched: ScriptedSearch, backend: Any) -> Runner:
    return Runner(backend, searched.ledger, searched.planner, searched.watcher)


class Scripted(Timed):
    """Loses the slot of a job as often as `num_losses` says of its batch size."""

    def __init__(self, searched: ScriptedSearch, num_losses: dict[int, int]) -> None:
        super().__init__(searched, lambda trial, _: measured(trial, 100.0))
        self.left = dict(num_losses)
        self.began: list[int] = []

    def submit(self, job: Any, slot: Slot) -> Any:
        handle = super().submit(job, slot)
        size = job.candidate.batch_size
        self.began.append(size)
        if not self.left.get(size):
            return handle
        self.left[size] -= 1
        return _Lost(self, handle, slot)  # type: ignore[arg-type]


def test_a_job_is_run_once_more_and_the_second_time_that_is_its_failure() -> None:
    searched = ScriptedSearch(SPACE, answer)
    backend = Scripted(searched, {16: 1, 32: 2})
    list(run_stages([Listed(searched, *(candidate("fp32", n) for n in (8, 16, 32)))], runner_of(searched, backend)))
    assert sorted(backend.began) == [8, 16, 16, 32, 32]
    outcomes = {r.candidate.batch_size: r.outcome for r in searched.records}
    assert isinstance(outcomes[8], Measurement)
    assert isinstance(outcomes[16], Measurement)
    assert isinstance(outcomes[32], Failure)
    assert "switched off" in outcomes[32].message
    assert len(searched.records) == 3
    assert len(backend.slots) == len(SLOTS) - 3


def test_a_slot_that_comes_is_used_at_once() -> None:
    searched = ScriptedSearch(SPACE, answer)
    backend = Timed(searched, lambda trial, _: measured(trial, 100.0))
    backend.slots = tuple(SLOTS[:1])

    class Growing(Listed):
        def next(self, *asked: Any) -> Any:
            if len(searched.records) == 1:
                backend.slots = tuple(SLOTS[:2])
            return super().next(*asked)

    list(
        run_stages(
            [Growing(searched, BASELINE, *(candidate("fp32", n) for n in (8, 16)))], runner_of(searched, backend)
        )
    )
    assert [record.slot for record in searched.records] == [SLOTS[0].name, *(slot.name for slot in SLOTS[:2])]
