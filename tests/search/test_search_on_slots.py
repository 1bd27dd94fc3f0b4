"""Searches on several slots: on a clock of their own they choose the same in less time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from closed_form import ClosedForm, Repeated, landscapes
from msgspec.structs import replace
from replay import Done, ReplayBudget, SlotBackends
from scripted_backend import (
    SUMMARY,
    ScriptedBackend,
    ScriptedSearch,
    candidate,
    described,
    fidelity,
    measured,
    measurement,
    out_of_memory,
)
from search_replay import Replayed, search_replay, setting_of

from autotune_amp.core.outcome import Failure, Outcome, Record
from autotune_amp.core.recommendation import Decision
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Slot
from autotune_amp.search import ranking
from autotune_amp.search.answer.decide import decide
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import Planner
from autotune_amp.search.ranking import PLATEAU
from autotune_amp.search.run import Runner, run_stages
from autotune_amp.search.space import Space
from autotune_amp.search.stages import Stage
from autotune_amp.search.stages.explore import exploration_stages
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Trial

# Of those without and with a little noise, as many as a search is held to.
NAMES = [name for name in landscapes() if not name.endswith(", 15 %")][:16]


def played(form: ClosedForm, num_slots: int, seed: int = 0) -> Replayed:
    return search_replay(Repeated(form, seed), seed, 200.0, num_slots)


def choice(found: Replayed) -> Setting:
    assert found.decision is not None
    return setting_of(found.decision)


@pytest.mark.slow
def test_four_slots_choose_as_well_as_one_and_search_in_half_of_the_seconds() -> None:
    forms = [landscapes()[name] for name in NAMES]
    seconds, missed = {1: 0.0, 4: 0.0}, {1: 0.0, 4: 0.0}
    for form in forms:
        for num_slots in (1, 4):
            found = played(form, num_slots)
            seconds[num_slots] += found.searched_seconds  # the confirmation takes as long on any number
            missed[num_slots] += form.regret(choice(found)) / len(forms)
        if not form.noise:
            assert choice(played(form, 4)) == choice(played(form, 1))
    assert seconds[4] <= 0.5 * seconds[1]
    assert missed[4] <= missed[1] + PLATEAU / 3


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_where_steps_take_as_long_for_any_batch_the_largest_is_found(num_slots: int) -> None:
    form = landscapes()["launch-bound, 0 %"]
    found = played(form, num_slots)
    assert form.regret(choice(found)) == 0.0
    assert choice(found).batch_size == max(setting.batch_size for setting in found.ledger.space.candidates)


@pytest.mark.slow
def test_further_dimensions_that_were_tried_at_the_same_time_are_put_together() -> None:
    for name, form in landscapes(with_variants=True).items():
        if name.endswith(", 0 %"):
            alone, beside = (search_replay(Repeated(form, 0), 0, 300.0, num_slots) for num_slots in (1, 4))
            assert form.regret(choice(beside)) <= form.regret(choice(alone)) + 1e-9, name


def test_every_slot_begins_with_the_baseline_and_none_waits_for_another() -> None:
    found = played(landscapes()["plateau, 5 %"], 4)
    trials = [record for _, record in found.records if record.purpose == "search"]
    assert [r.candidate for r in trials[:4]] == [found.ledger.space.baseline] * 4
    assert {r.slot for r in trials[:4]} == {r.slot for r in trials[4:]}
    ends: dict[str | None, float] = {}
    for end, record in found.records:
        assert end - record.seconds >= ends.get(record.slot, 0.0) - 1e-9, "two at once on one slot"
        ends[record.slot] = end
    assert len({record.number for _, record in found.records}) == len(found.records)


# -- confirming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [2, 8])
def test_the_confirmation_is_one_run_at_a_time_on_one_slot_and_counts_as_on_a_single_one(num_slots: int) -> None:
    form = landscapes()["plateau, 0 %"]
    found, alone = played(form, num_slots), played(form, 1)
    confirming = [r for _, r in found.records if r.round is not None]
    assert {(r.slot, r.num_beside) for r in confirming} == {("slot 0", 0)}
    assert [str(r.candidate) for r in confirming] == [str(r.candidate) for _, r in alone.records if r.round is not None]
    assert found.decision is not None
    evidence = found.decision.evidence
    assert evidence.is_confirmed
    assert evidence.devices == tuple(f"slot {number}" for number in range(num_slots))
    assert evidence.samples_per_second == pytest.approx(form.rate(choice(found)), rel=0.01)
    assert alone.decision is not None
    assert alone.decision.evidence.devices == ()


BASELINE, WINNER = candidate("fp32", 32), candidate("bf16", 64)


def test_of_a_round_on_several_slots_the_one_with_the_most_runs_counts() -> None:
    lost = [record(s, "confirm", 90.0, round=0, slot="a") for s in (WINNER, BASELINE)]
    whole = [record(s, "confirm", 100.0, round=0, slot="b") for s in (BASELINE, WINNER)]
    next_round = [record(BASELINE, "confirm", 100.0, round=1, slot="b")]
    assert ranking.without_lost_rounds([*lost, *whole, *next_round]) == [*whole, *next_round]
    assert ranking.without_lost_rounds([*lost, *whole[:1]]) == lost


# -- one slot after the other ------------------------------------------------------------------------------------------

SLOTS = [Slot("cuda:0", f"cuda:{number}", uuid=f"GPU-{number}", is_here=False) for number in range(4)]
SPACE = Space(candidates=tuple(candidate(p, b) for p in ("fp32", "bf16") for b in (8, 16, 32, 64)), baseline=BASELINE)


def on_slots(searched: ScriptedSearch, num_slots: int, backend: Any = None) -> Runner:
    slots = SLOTS[:num_slots]
    beside = backend or SlotBackends(dict.fromkeys(slots, searched.backend))
    return Runner(beside, searched.ledger, searched.planner, searched.watcher)


def answer(trial: Trial) -> Outcome:
    return measured(trial, 100.0)


@pytest.mark.parametrize("max_trials", [1, 2, 3, 6])
def test_no_more_trials_than_asked_for(max_trials: int) -> None:
    searched = ScriptedSearch(SPACE, answer)
    searched.job_defaults = replace(searched.job_defaults, max_trials=max_trials)
    for _ in run_stages(exploration_stages(), on_slots(searched, 4)):
        pass
    assert sum(r.purpose == "search" for r in searched.records) == max_trials


def test_the_study_knows_every_trial_and_its_slot() -> None:
    searched = ScriptedSearch(SPACE, answer)
    with Study.open("sqlite://", "slots", searched.ledger) as study:
        for _ in run_stages(exploration_stages(), on_slots(searched, 4)):
            study.catch_up(searched.ledger)
        told = {t.user_attrs["record"]: t.user_attrs["slot"] for t in study._study.trials}
    tried = {r.number: r.slot for r in searched.records if r.purpose == "search"}
    assert told == tried
    assert len(set(told.values())) == 4


class Listed(Stage):
    """A stage of given settings, one after the other."""

    def __init__(self, searched: ScriptedSearch, *settings: Setting) -> None:
        self._trials = [searched.job_defaults.trial(searched.ledger, setting) for setting in settings]
        self.asked_beside: list[int] = []

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        self.asked_beside.append(ledger.num_awaited)
        return self._trials.pop(0) if self._trials else None


class Exclusive(Listed):
    """The same, each alone."""

    is_exclusive = True


def test_an_exclusive_stage_has_one_job_at_a_time_once_nothing_else_runs() -> None:
    searched = ScriptedSearch(SPACE, answer)
    stages = (
        Listed(searched, BASELINE),
        Listed(searched, candidate("fp32", 8), candidate("fp32", 16)),
        Exclusive(searched, candidate("bf16", 8), candidate("bf16", 64)),
    )
    runner = on_slots(searched, 4, Timed(searched, lambda trial, _: measured(trial, 100.0)))
    list(run_stages(stages, runner))
    by_setting = {str(r.candidate): r.num_beside for r in searched.records}
    assert by_setting["fp32 batch 8"] == by_setting["fp32 batch 16"] > 0
    assert by_setting["bf16 batch 8"] == by_setting["bf16 batch 64"] == 0


class Timed(SlotBackends):
    """Answers by the trial and by how many others run beside it; each takes a second."""

    def __init__(self, searched: ScriptedSearch, answer: Callable[[Trial, int], Outcome]) -> None:
        super().__init__(dict.fromkeys(SLOTS, searched.backend))
        self._answer, self._budget = answer, searched.budget
        self._handles: list[Done] = []

    def submit(self, job: Any, slot: Slot) -> Done:
        self._handles = [handle for handle in self._handles if handle.ends_at > self._budget.now]
        done = Done(self._answer(job, len(self._handles)), None, self._budget, self._budget.now + 1.0)
        self._handles.append(done)
        return done


def test_what_lacks_the_memory_of_its_card_is_out_of_memory() -> None:
    searched = ScriptedSearch(SPACE, answer)
    backend = Timed(searched, lambda *_: out_of_memory())
    list(run_stages([Listed(searched, BASELINE, candidate("fp32", 64))], on_slots(searched, 4, backend)))
    assert [isinstance(r.outcome, Failure) for r in searched.records] == [True, True]


def test_the_clock_of_a_replay_moves_once_for_what_runs_at_the_same_time() -> None:
    budget = ReplayBudget()
    handles = [Done(n, None, budget, float(n)) for n in (3, 1, 2)]
    backend = SlotBackends({SLOTS[0]: ScriptedBackend(answer, budget)})
    assert backend.wait(handles).result() == 1
    assert [handle.result() for handle in handles] == [3, 1, 2]
    assert budget.now == 3.0


# -- what is of another kind is not compared ---------------------------------------------------------------------------


def record(setting: Setting, purpose: Any, speed: float, **fields: Any) -> Record:
    fields = {"search_id": "s", "number": 1, "seconds": 1.0, "outcome": measurement(speed), **fields}
    return Record(candidate=setting, purpose=purpose, **fields)


FAITHFUL = record(WINNER, "fidelity", 1.0, outcome=fidelity("bf16"))


def ledger_of(*records: Record) -> Ledger:
    numbered = [replace(r, number=number) for number, r in enumerate(records, start=1)]
    candidates = (*SPACE.candidates, WINNER)
    return Ledger(Space(candidates=candidates, baseline=BASELINE, checks=frozenset({"fidelity"})), numbered)


def decided(ledger: Ledger) -> Decision:
    return decide(ledger, environment={}, search=SUMMARY, description=described())


def test_a_speed_beside_others_is_not_compared_with_one_alone() -> None:
    searched = [FAITHFUL, *(record(s, "search", v, num_beside=1) for s, v in ((BASELINE, 100.0), (WINNER, 130.0)))]
    winners = [record(WINNER, "confirm", 240.0, round=number) for number in range(3)]
    decision = decided(ledger_of(*searched, *winners))
    assert Setting.of(decision.config) == WINNER
    assert decision.evidence.samples_per_second == 240.0
    assert (decision.evidence.speedup, decision.evidence.is_confirmed) == (None, False)
    baselines = [record(BASELINE, "confirm", 200.0, round=number) for number in range(3)]
    decision = decide(
        ledger_of(*searched, *winners, *baselines), environment={}, search=SUMMARY, description=described()
    )
    assert decision.evidence.speedup == pytest.approx(1.2)


def test_interrupted_before_the_winner_was_confirmed_the_search_s_own_trials_decide() -> None:
    speeds = ((WINNER, 240.0), (BASELINE, 77.0))
    searched = [FAITHFUL, *(record(s, "search", v, num_beside=3) for s, v in speeds)]
    confirmed = [record(s, "confirm", v, round=n) for n in range(3) for s, v in reversed(speeds)]
    for ended in range(1 + len(confirmed)):
        decision = decide(
            ledger_of(*searched, *confirmed[:ended]), environment={}, search=SUMMARY, description=described()
        )
        assert Setting.of(decision.config) == WINNER, ended
