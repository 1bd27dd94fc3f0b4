"""Trials that are foreseen load together, and change nothing of what a search does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from scripted_backend import (
    ScriptedBackend,
    ScriptedSearch,
    candidate,
    hardware,
    measured,
)

from autotune_amp.core.outcome import Outcome
from autotune_amp.processes.local import LoadingBackend
from autotune_amp.search.ledger import Shortlist
from autotune_amp.search.planner import MIN_ROUNDS
from autotune_amp.search.run import run_stages
from autotune_amp.search.space import Space
from autotune_amp.search.stages.confirm import ConfirmationRounds
from autotune_amp.search.stages.explore import exploration_stages
from autotune_amp.search.stages.pending import foreseen_trials
from autotune_amp.trial.jobs import Trial

SIZES = (8, 16, 32, 64)
SPACE = Space(
    candidates=tuple(candidate(precision, size) for precision in ("fp32", "tf32", "bf16") for size in SIZES),
    baseline=candidate("fp32", 8),
    effective_batch_size=None,
)
FP32, BF16 = candidate("fp32", 8), candidate("bf16", 8)
Key = tuple[Any, ...]


def answer(trial: Trial) -> Outcome:
    factor = {"fp32": 1.0, "tf32": 1.5, "bf16": 3.0}[trial.candidate.precision]
    return measured(trial, factor * 100.0 * trial.candidate.batch_size**0.3)


def key(trial: Trial) -> Key:
    return trial.candidate, trial.seed, trial.round, tuple(trial.environment.items())


class Loading(ScriptedBackend):
    """A backend that loads processes together, and notes which."""

    num_together = 4

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.waiting: list[Key] = []
        self.waves: list[list[Key]] = []
        self.was_loaded: list[bool] = []
        self.limits_seconds: list[float] = []
        self.last_asked: Sequence[Trial] | None = None

    def load_together(self, jobs: Sequence[Trial], limit_seconds: float) -> None:
        self.limits_seconds.append(limit_seconds)
        self.last_asked = jobs
        keys = [key(job) for job in jobs]
        if not keys:
            self.waiting = []
        elif keys[0] not in self.waiting:
            self.waves.append(keys)
            self.waiting = list(keys)

    def run(self, spec: Trial) -> Outcome:
        self.was_loaded.append(key(spec) in self.waiting)
        if self.was_loaded[-1]:
            self.waiting.remove(key(spec))
        return super().run(spec)


def searched(num_together: int, *, are_fresh: bool = True) -> tuple[ScriptedSearch, Loading]:
    device = hardware({"fp32": 1.0, "tf32": 2.0, "bf16": 4.0, "fp16": None, "fp8": None})
    search = ScriptedSearch(SPACE, answer, device=device)
    search.job_defaults = replace(search.job_defaults, are_trials_fresh=are_fresh, num_together=num_together)
    backend = Loading(answer, search.budget)
    backend.num_together = num_together
    search.backend = backend
    assert isinstance(backend, LoadingBackend)
    return search, backend


def test_a_search_that_loads_them_together_runs_the_same_trials() -> None:
    outcomes = []
    for num_together in (1, 4):
        search, backend = searched(num_together)
        search.explore()
        outcomes.append([(record.candidate, record.outcome) for record in search.records])
    assert outcomes[0] == outcomes[1]
    assert backend.waves
    assert sum(backend.was_loaded) > len(backend.was_loaded) / 2
    for wave in backend.waves:
        assert 1 < len(wave) <= 4
        assert len(set(wave)) == len(wave)
    assert backend.last_asked == [], "what was foreseen and not run is ended"


def test_loading_takes_no_longer_than_the_budget_and_from_the_deadline_of_its_trial() -> None:
    search, backend = searched(4)
    search.measure(FP32)
    backend.limits_seconds.clear()
    load_together = backend.load_together

    def load(jobs: Sequence[Trial], limit_seconds: float) -> None:
        load_together(jobs, limit_seconds)
        if jobs:
            search.budget.now += 30.0

    backend.load_together = load  # type: ignore[method-assign]
    runner = search.runner()
    trial = runner.planner.trial(search.ledger, BF16, 100.0)
    runner.start(trial, backend.slots[0], [runner.planner.trial(search.ledger, candidate("tf32", 8), 100.0)])
    assert backend.limits_seconds == [trial.deadline_seconds]
    assert backend.specs[-1].deadline_seconds == pytest.approx((trial.deadline_seconds or 0.0) - 30.0)


def test_once_runs_can_no_longer_load_together_the_planner_knows() -> None:
    search, backend = searched(4)
    search.measure(FP32)
    backend.num_together = 1
    runner = search.runner()
    assert runner.planner.job_defaults.num_together == 4
    list(run_stages([ConfirmationRounds(Shortlist(BF16, None, FP32), {})], runner))
    assert runner.planner.job_defaults.num_together == 1
    assert not backend.waves


def test_what_is_foreseen_fixes_nothing_in_the_planner() -> None:
    search, _ = searched(4)
    search.measure(FP32, BF16)
    planner = search.planner
    trial = planner.trial(search.ledger, candidate("tf32", 8), 100.0)
    assert len(foreseen_trials(exploration_stages(), search.ledger, planner, trial)) == 3
    assert planner._num_rounds is None


def test_without_room_nothing_is_foreseen() -> None:
    search, backend = searched(1)
    search.explore()
    assert backend.last_asked is None
    assert not backend.waves


@pytest.mark.parametrize("num_together", [2, 4, 8])
def test_the_runs_of_all_rounds_load_together(num_together: int) -> None:
    search, backend = searched(num_together)
    search.measure(FP32, BF16)
    backend.was_loaded.clear()
    backend.waves.clear()
    search.run(ConfirmationRounds(Shortlist(BF16, None, FP32), {}))
    rounds = [record.round for record in search.records if record.purpose == "confirm"]
    assert len(rounds) == 2 * MIN_ROUNDS
    assert all(backend.was_loaded)
    assert len(backend.waves) == -(-len(rounds) // num_together)
    assert {run for wave in backend.waves for run in wave} == {
        (record.candidate, 0, record.round, ()) for record in search.records if record.purpose == "confirm"
    }


def test_an_interrupted_search_ends_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    search, backend = searched(4)
    search.measure(FP32)

    def interrupted(_: Trial) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(backend, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search.explore()
    assert backend.last_asked == []
