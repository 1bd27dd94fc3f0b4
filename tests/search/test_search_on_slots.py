"""Searches on several slots: on a clock of their own they choose the same in less time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
from closed_form import ClosedForm, Repeated, landscapes
from msgspec.structs import replace
from replay import Beside, Done, ReplayBudget
from scripted_backend import ScriptedBackend, ScriptedSearch, candidate, fidelity, measured, measurement, out_of_memory
from search_replay import Replayed, search_replay, setting_of

from autotune_amp.core.outcome import Failure, Measurement, Outcome, Record
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import Slot
from autotune_amp.search import ranking
from autotune_amp.search.answer.decide import decide
from autotune_amp.search.ledger import Ledger
from autotune_amp.search.planner import MIN_ROUNDS, Planner
from autotune_amp.search.ranking import PLATEAU
from autotune_amp.search.run import Runner, Watchers, run
from autotune_amp.search.space import Space
from autotune_amp.search.stages.confirm import NUM_ROUNDS_BESIDE
from autotune_amp.search.stages.explore import exploring
from autotune_amp.search.storage.study import Study
from autotune_amp.trial.jobs import Trial

# Of those without and with a little noise, as many as a search is held to.
NAMES = [name for name in landscapes() if not name.endswith(", 15 %")][:16]


def played(form: ClosedForm, num_slots: int, seed: int = 0) -> Replayed:
    return search_replay(Repeated(form, seed), seed, 200.0, num_slots)


def choice(found: Replayed) -> Setting:
    assert found.decision is not None
    return setting_of(found.decision)


def test_four_slots_choose_as_well_as_one_in_half_of_the_seconds() -> None:
    forms = [landscapes()[name] for name in NAMES]
    seconds, missed = {1: 0.0, 4: 0.0}, {1: 0.0, 4: 0.0}
    for form in forms:
        for num_slots in (1, 4):
            found = played(form, num_slots)
            seconds[num_slots] += found.records[-1][0]
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


class Contended(Beside):
    """Slots that share something: beside others a trial takes longer."""

    slowdown: ClassVar[float]

    def __init__(self, backends: Any) -> None:
        super().__init__(backends)
        self._ends: list[Done] = []

    def submit(self, job: Any, slot: Slot) -> Done:
        handle = super().submit(job, slot)
        self._ends = [other for other in self._ends if other.ends_at > other._budget.now]
        self._ends.append(handle)
        if isinstance(handle._found, Measurement) and (job.round is None or len(self._ends) > 1):
            found, factor = handle._found, self.slowdown
            handle._found = replace(
                found,
                step_seconds=factor * found.step_seconds,
                samples_per_second=found.samples_per_second / factor,
                raw_step_seconds=tuple(factor * seconds for seconds in found.raw_step_seconds),
            )
        return handle


@pytest.mark.parametrize(("slowdown", "is_beside"), [(1.0, True), (1.02, True), (1.3, False)])
def test_rounds_beside_one_another_count_only_where_that_makes_no_difference(
    slowdown: float, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contended, "slowdown", slowdown, raising=False)
    monkeypatch.setattr("search_replay.Beside", Contended)
    form = landscapes()["plateau, 0 %"]
    found = played(form, 4)
    assert found.decision is not None
    evidence, chosen = found.decision.evidence, choice(found)
    assert evidence.slots is not None
    assert evidence.slots.is_confirmed_beside == is_beside
    assert evidence.slots.slowdown == pytest.approx(slowdown - 1, abs=0.05)
    assert evidence.is_confirmed
    promised = form.rate(chosen) if not is_beside else form.rate(chosen) / slowdown
    assert evidence.samples_per_second == pytest.approx(promised, rel=0.01)
    rounds = {r.round for _, r in found.records if r.round is not None and not r.num_beside}
    assert len(rounds) == 1 if is_beside else len(rounds) >= MIN_ROUNDS, "alone: the baseline once, or every round"


def test_as_many_rounds_as_slots_run_at_once_and_each_stays_on_its_slot() -> None:
    for num_slots in (2, 3, 8):
        found = played(landscapes()["launch-bound, 0 %"], num_slots)
        beside = [r for _, r in found.records if r.round is not None and r.num_beside]
        slots = {number: {r.slot for r in beside if r.round == number} for number in {r.round for r in beside}}
        assert NUM_ROUNDS_BESIDE <= len(slots) <= 2 * NUM_ROUNDS_BESIDE
        assert len(slots) % num_slots == 0
        assert all(len(names) == 1 for names in slots.values())
        assert len(set().union(*slots.values())) == num_slots


BASELINE, WINNER = candidate("fp32", 32), candidate("bf16", 64)


def run_of(setting: Setting, number: int, speed: float, num_beside: int) -> Record:
    where = {"round": number, "slot": f"cuda:{number}", "num_beside": num_beside}
    return record(setting, "confirm", speed, number=number + 1, **where)


def confirmed(alone: float, beside: Sequence[float]) -> list[Record]:
    return [run_of(BASELINE, 0, alone, 0), *(run_of(BASELINE, n, speed, 3) for n, speed in enumerate(beside))]


@pytest.mark.parametrize(
    ("alone", "beside", "is_different"),
    [
        (100.0, (100.0, 100.5, 99.5, 100.2), False),
        (100.0, (98.0, 98.2, 97.8, 98.0), False),  # within what processes differ by anyway
        (100.0, (95.0, 95.2, 94.8, 95.0), True),
        (100.0, (95.0, 101.0, 89.0, 98.0), False),  # nobody can tell
        (100.0, (80.0, 95.0, 70.0, 90.0), True),  # whatever the noise
        (90.0, (100.0, 100.5, 99.5, 100.2), False),  # faster: no others' doing
    ],
)
def test_a_difference_is_one_beyond_chance(alone: float, beside: Sequence[float], is_different: bool) -> None:
    records = confirmed(alone, beside)
    found = ranking.beside(records)
    assert found is not None
    assert found.is_different == is_different
    assert len(ranking.counted(records)) == (1 if is_different else 5)


def test_what_was_never_run_alone_says_nothing_and_does_not_count() -> None:
    records = [run_of(WINNER, n, 100.0, 3) for n in range(4)]
    assert ranking.beside(records) is None
    assert ranking.counted(records) == []


# -- one slot after the other ------------------------------------------------------------------------------------------

SLOTS = [Slot("cpu", f"cpu {number}", cpus=(number,), is_here=False) for number in range(4)]
SPACE = Space(candidates=tuple(candidate(p, b) for p in ("fp32", "bf16") for b in (8, 16, 32, 64)), baseline=BASELINE)


def on_slots(searched: ScriptedSearch, num_slots: int, backend: Any = None) -> Runner:
    slots = SLOTS[:num_slots]
    beside = backend or Beside(dict.fromkeys(slots, searched.backend))
    return Runner(beside, searched.ledger, searched.planner, Watchers(searched.watcher))


def answer(trial: Trial) -> Outcome:
    return measured(trial, 100.0)


@pytest.mark.parametrize("max_trials", [1, 2, 3, 6])
def test_no_more_trials_than_asked_for(max_trials: int) -> None:
    searched = ScriptedSearch(SPACE, answer)
    with Study.open("sqlite://", "slots", searched.ledger) as study:
        searched.conditions = replace(searched.conditions, max_trials=max_trials)
        for _ in run(exploring(study), on_slots(searched, 4)):
            pass
    assert sum(r.purpose == "search" for r in searched.records) == max_trials


def test_the_study_knows_every_trial_and_its_slot() -> None:
    searched = ScriptedSearch(SPACE, answer)
    with Study.open("sqlite://", "slots", searched.ledger) as study:
        for _ in run(exploring(study), on_slots(searched, 4)):
            pass
        study.catch_up(searched.ledger, is_over=True)
        told = {t.user_attrs["record"]: t.user_attrs["slot"] for t in study._study.trials}
    tried = {r.number: r.slot for r in searched.records if r.purpose == "search"}
    assert told == tried
    assert len(set(told.values())) == 4


class Listed:
    """A stage of given settings, one after the other."""

    is_exclusive: ClassVar[bool] = False

    def __init__(self, searched: ScriptedSearch, *settings: Setting) -> None:
        self._trials = [searched.conditions.trial(searched.ledger, setting) for setting in settings]
        self.asked_beside: list[int] = []

    def next(self, ledger: Ledger, planner: Planner) -> Trial | None:
        self.asked_beside.append(ledger.num_awaited)
        return self._trials.pop(0) if self._trials else None


class Exclusive(Listed):
    """The same, each alone."""

    is_exclusive: ClassVar[bool] = True


def beside_of(records: Sequence[Record]) -> dict[int, int]:
    return {r.candidate.batch_size: r.num_beside for r in records}


def test_an_exclusive_stage_has_one_job_at_a_time_once_nothing_else_runs() -> None:
    searched = ScriptedSearch(SPACE, answer)
    stages = (
        Listed(searched, BASELINE),
        Listed(searched, candidate("fp32", 8), candidate("fp32", 16)),
        Exclusive(searched, candidate("bf16", 8), candidate("bf16", 64)),
    )
    runner = on_slots(searched, 4, Timed(searched, lambda trial, _: measured(trial, 100.0)))
    list(run(stages, runner))
    by_setting = {str(r.candidate): r.num_beside for r in searched.records}
    assert by_setting["fp32 batch 8"] == by_setting["fp32 batch 16"] > 0
    assert by_setting["bf16 batch 8"] == by_setting["bf16 batch 64"] == 0


class Timed(Beside):
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


def test_what_lacks_memory_beside_others_that_share_it_is_run_once_more_alone() -> None:
    searched = ScriptedSearch(SPACE, answer)
    sizes: list[int] = []

    def lacks_memory(trial: Trial, num_beside: int) -> Outcome:
        sizes.append(trial.candidate.batch_size)
        return out_of_memory() if num_beside and trial.candidate.batch_size > 8 else measured(trial, 100.0)

    stage = Listed(searched, *(candidate("fp32", size) for size in (8, 16, 32)))
    list(run([stage], on_slots(searched, 4, Timed(searched, lacks_memory))))
    assert sorted(sizes) == [8, 16, 16, 32, 32]
    assert beside_of(searched.records) == {8: 2, 16: 0, 32: 0}
    assert not any(isinstance(r.outcome, Failure) for r in searched.records)


def test_what_lacks_the_memory_of_its_own_card_is_out_of_memory() -> None:
    searched = ScriptedSearch(SPACE, answer)
    backend = Timed(searched, lambda *_: out_of_memory())
    backend.slots = tuple(Slot("cuda:0", slot.name, uuid=slot.name) for slot in SLOTS)
    list(run([Listed(searched, BASELINE, candidate("fp32", 64))], on_slots(searched, 4, backend)))
    assert [isinstance(r.outcome, Failure) for r in searched.records] == [True, True]


def test_the_clock_of_a_replay_moves_once_for_what_runs_at_the_same_time() -> None:
    budget = ReplayBudget()
    handles = [Done(n, None, budget, float(n)) for n in (3, 1, 2)]
    backend = Beside({SLOTS[0]: ScriptedBackend(answer, budget)})
    assert backend.wait(handles).result() == 1
    assert [handle.result() for handle in handles] == [3, 1, 2]
    assert budget.now == 3.0


# -- what is of another kind is not compared ---------------------------------------------------------------------------

HALF = candidate("fp32", 64)  # a plan of the winner's effective batch


def record(setting: Setting, purpose: Any, speed: float, **fields: Any) -> Record:
    fields = {"search_id": "s", "number": 1, "seconds": 1.0, "outcome": measurement(speed), **fields}
    return Record(candidate=setting, purpose=purpose, **fields)


FAITHFUL = record(WINNER, "fidelity", 1.0, outcome=fidelity("bf16"))


def ledger_of(*records: Record) -> Ledger:
    numbered = [replace(r, number=number) for number, r in enumerate(records, start=1)]
    candidates = (*SPACE.candidates, WINNER)
    return Ledger(Space(candidates=candidates, baseline=BASELINE, checks=frozenset({"fidelity"})), numbered)


ON_SHARES = (
    FAITHFUL,
    record(BASELINE, "search", 100.0, slot="cpu 0", has_share=True),
    record(WINNER, "search", 130.0, slot="cpu 1", has_share=True, num_beside=1),
    record(HALF, "fallback", 96.0, slot="cpu 0", has_share=True),
)


def test_all_of_a_cpu_is_not_held_against_a_share_of_it() -> None:
    winners = [record(WINNER, "confirm", 480.0, round=number) for number in range(3)]
    decision = decide(ledger_of(*ON_SHARES, *winners), environment={})
    assert Setting.of(decision.config) == WINNER
    assert decision.evidence.samples_per_second == 480.0
    assert (decision.evidence.speedup, decision.evidence.is_confirmed) == (None, False)
    baselines = [record(BASELINE, "confirm", 400.0, round=number) for number in range(3)]
    decision = decide(ledger_of(*ON_SHARES, *winners, *baselines), environment={})
    assert decision.evidence.speedup == pytest.approx(1.2)


def test_a_plan_measured_on_a_share_is_scaled_by_what_was_measured_on_both() -> None:
    confirmed = [record(s, "confirm", v, round=n) for n in range(3) for s, v in ((WINNER, 480.0), (BASELINE, 400.0))]
    (plan,) = decide(ledger_of(*ON_SHARES, *confirmed), environment={}).config.plans
    assert (plan.precision, plan.batch_size) == ("fp32", 64)
    assert plan.slowdown == pytest.approx(130 / 96)
    assert plan.samples_per_second == pytest.approx(480.0 * 96 / 130)


def test_interrupted_before_the_winner_ran_alone_the_search_s_own_trials_decide() -> None:
    speeds = ((WINNER, 240.0), (BASELINE, 77.0))
    searched = [FAITHFUL, *(record(s, "search", v, num_beside=3) for s, v in speeds)]
    alone = record(BASELINE, "confirm", 100.0, round=-1)
    together = [record(s, "confirm", v, round=n, num_beside=3) for n in range(4) for s, v in speeds]
    for ended in range(1 + len(together)):
        decision = decide(ledger_of(*searched, alone, *together[:ended]), environment={})
        assert Setting.of(decision.config) == WINNER, ended


def test_what_a_share_of_the_cpu_drew_is_not_known() -> None:
    searched = ScriptedSearch(SPACE, answer)
    metered = measurement(100.0, joules_per_sample=1.0)
    list(run([Listed(searched, BASELINE)], on_slots(searched, 2, Timed(searched, lambda *_: metered))))
    (found,) = searched.records
    assert isinstance(found.outcome, Measurement)
    assert found.outcome.joules_per_sample is None
