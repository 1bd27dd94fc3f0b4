"""Building that costs much is shared: when, how, and what the search still reaches, on scripted machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_backend import ScriptedSearch, candidate, described, hardware, measured

from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.isolation.local import Backend, Isolation
from autotune_amp.search.answer.evidence import confirm_runs, gather
from autotune_amp.search.ledger import Shortlist
from autotune_amp.search.progress import Progress
from autotune_amp.search.sharing import Costs, confirming_processes
from autotune_amp.search.space import Space
from autotune_amp.search.stages.confirm import NUM_ROUNDS, Confirm
from autotune_amp.trial.jobs import Trial

FP32, BF16 = candidate("fp32", 32), candidate("bf16", 32)
SPACE = Space(candidates=(FP32, candidate("fp32", 64), BF16, candidate("bf16", 64)), baseline=FP32)
HEAP = {"MALLOC_TRIM_THRESHOLD_": "2147483647"}


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Machine(ScriptedSearch):
    """Each trial builds for `build_seconds` first, or all share what was built once."""

    def __init__(
        self,
        build_seconds: float,
        budget_seconds: float = 200.0,
        num_parameters: int = 1000,
        folder: Path | None = None,
    ) -> None:
        self.build_seconds, self.context_seconds = build_seconds, 0.0
        self.notes = Notes()
        super().__init__(
            SPACE,
            self.answer,
            budget_seconds,
            device=hardware({"fp32": 1.0, "tf32": None, "bf16": 1.0, "fp16": None, "fp8": None}),
            description=described(build_seconds=build_seconds, num_parameters=num_parameters),
            progress=self.notes,
            folder=folder,
        )
        self.backend.share_build = self.share_build  # type: ignore[method-assign]  # it takes its time
        self.num_builds = 0
        self.rate = 1000.0
        self.share_deadlines: list[float] = []

    def answer(self, spec: Trial) -> Outcome:
        is_shared = self.backend.is_build_shared
        seconds = 0.0 if is_shared else self.build()
        if spec.deadline_seconds is not None and seconds > spec.deadline_seconds:
            return Failure(kind="timeout", message="it was still building the workload when its time was up")
        found = measured(spec, self.rate, build_seconds=seconds)
        return msgspec.structs.replace(found, context_seconds=self.context_seconds, is_build_shared=is_shared)

    def build(self) -> float:
        self.num_builds += 1
        self.budget.now += self.build_seconds
        return self.build_seconds

    def share_build(self, job: Any, deadline_seconds: float) -> str | None:
        self.build()
        self.share_deadlines.append(deadline_seconds)
        self.backend.is_build_shared = self.backend.why_not_shared is None
        return self.backend.why_not_shared


@pytest.mark.parametrize(
    ("costs", "way"),
    [
        (Costs(0.9, 0.0, 4.0), None),
        (Costs(1.1, 0.0, 4.0), "fork"),
        (Costs(0.9, 0.6, 4.0), "fork"),
        (Costs(0.1, 1.0, 4.0), "kept"),  # the context is not inherited: only one process saves it
        (Costs(60.0, 3.0, 0.5), "fork"),
        (Costs(0.4, 0.3, 0.1), None),  # half a trial, and nothing to save
        (Costs(0.2, 0.6, 0.1), "kept"),
    ],
)
def test_building_is_shared_above_a_fifth_of_a_trial(costs: Costs, way: str | None) -> None:
    assert costs.way == way


def test_the_first_trial_shows_what_building_costs() -> None:
    machine = Machine(build_seconds=3.1)
    machine.explore(max_trials=3)
    (note,) = machine.notes.lines
    assert "3.1 s" in note
    assert "shared" in note
    assert machine.num_builds == 2
    shared = [r.outcome.is_build_shared for r in machine.records if isinstance(r.outcome, Measurement)]
    assert shared == [False, True, True]


def test_one_worker_is_kept_where_forks_cannot_share() -> None:
    machine = Machine(build_seconds=3.1)
    machine.backend.why_not_shared = "building the workload started cuda in its process"
    machine.explore(max_trials=2)
    assert not machine.backend.is_forking
    assert "started cuda" in machine.notes.lines[-1]


def test_nothing_is_shared_where_memory_or_time_for_one_model_more_is_missing() -> None:
    large = Machine(build_seconds=3.1, num_parameters=2**33)
    large.explore(max_trials=2)
    late = Machine(build_seconds=100.0)
    late.share_building()
    assert (large.num_builds, late.num_builds) == (2, 0)
    assert not large.backend.is_build_shared
    assert large.backend.is_forking


@pytest.mark.parametrize("budget", [10.0, 12.0, 20.0, 40.0, 100.0])
def test_a_budget_that_is_mostly_building_still_gives_an_answer(budget: float) -> None:
    machine = Machine(build_seconds=4.0, budget_seconds=budget)
    machine.budget.now = 5.0  # loading it and describing it
    machine.explore()
    assert any(isinstance(record.outcome, Measurement) for record in machine.records)
    assert machine.budget.now <= budget


def confirmed(machine: Machine, start_seconds: float, *, can_share: bool = True) -> tuple[list[Isolation], int]:
    """The processes that the confirmation started, and how many models they built."""
    made: list[Isolation] = []

    def make(isolation: Isolation, environment: dict[str, str]) -> Backend:
        made.append(isolation)
        machine.backend.is_build_shared = isolation == "forked"
        return machine.backend

    machine.explore(max_trials=3)
    machine.num_builds = 0
    with confirming_processes(
        make,
        machine.conditions,
        machine.ledger,
        machine.budget,
        BF16,
        HEAP,
        start_seconds,
        machine.notes,
        can_share=can_share,
    ) as fresh:
        machine.run(Confirm(machine.conditions, Shortlist(BF16, None, FP32), HEAP, fresh.start_seconds), fresh)
    return made, machine.num_builds


def test_the_confirmation_builds_once_for_each_environment_where_building_is_much_of_a_process() -> None:
    machine = Machine(build_seconds=6.0, budget_seconds=300.0)
    made, num_builds = confirmed(machine, start_seconds=9.0)
    assert (made, num_builds) == (["forked", "forked"], 2)
    runs = confirm_runs(machine.records, BF16, HEAP)
    assert runs.num_confirming == NUM_ROUNDS
    baseline = confirm_runs(machine.records, FP32, {})
    evidence = gather(machine.ledger, runs, baseline, HEAP, machine.conditions.description)
    assert evidence.is_build_shared
    assert machine.share_deadlines[1:] == [41.0, 41.0], "time is left for processes of their own"


@pytest.mark.parametrize(
    ("build_seconds", "budget_seconds", "can_share"), [(0.5, 300.0, True), (6.0, 60.0, True), (6.0, 300.0, False)]
)
def test_every_process_builds_its_own_where_sharing_does_not_pay_or_is_not_possible(
    tmp_path: Path, build_seconds: float, budget_seconds: float, can_share: bool
) -> None:
    machine = Machine(build_seconds, budget_seconds)
    made, num_builds = confirmed(machine, 3.0 + build_seconds, can_share=can_share)
    assert set(made) == {"fresh"}
    assert len(made) == num_builds
