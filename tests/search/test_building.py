"""Building that costs much is shared: when, how, and what the search still reaches, on scripted machines."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec
import pytest
from scripted_runner import ScriptedClock, ScriptedRunner, candidate, described, hardware, measured, session

from autotune_amp.core.config import LossScale
from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.isolation.backend import Backend
from autotune_amp.isolation.local import Isolation
from autotune_amp.search.building import Costs, confirming_runners
from autotune_amp.search.choose import Shortlist
from autotune_amp.search.confirm import NUM_ROUNDS, confirm
from autotune_amp.search.evidence import confirm_runs, gather
from autotune_amp.search.explore import explore, left_to_explore, search_spec, share_building
from autotune_amp.search.progress import Progress
from autotune_amp.search.space import Space
from autotune_amp.search.study import Study
from autotune_amp.trial.jobs import Trial

FP32, BF16 = candidate("fp32", 32), candidate("bf16", 32)
SPACE = Space(candidates=(FP32, candidate("fp32", 64), BF16, candidate("bf16", 64)), baseline=FP32)
HEAP = {"MALLOC_TRIM_THRESHOLD_": "2147483647"}


class Notes(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Machine(ScriptedRunner):
    """Each trial builds for `build_seconds` first, or all share what was built once."""

    def __init__(
        self, folder: Path, build_seconds: float, budget_seconds: float = 200.0, num_parameters: int = 1000
    ) -> None:
        self.clock = ScriptedClock(budget_seconds)
        super().__init__(self.answer, self.clock)
        self.build_seconds, self.context_seconds = build_seconds, 0.0
        self.notes = Notes()
        self.description = described(build_seconds=build_seconds, num_parameters=num_parameters)
        device = hardware({"fp32": 1.0, "tf32": None, "bf16": 1.0, "fp16": None, "fp8": None})
        self.session = session(folder, self.clock, device, self.notes, self.description)
        self.num_builds = 0
        self.rate = 1000.0
        self.share_deadlines: list[float] = []

    def answer(self, spec: Trial) -> Outcome:
        seconds = 0.0 if self.is_build_shared else self.build()
        if spec.deadline_seconds is not None and seconds > spec.deadline_seconds:
            return Failure(kind="timeout", message="it was still building the workload when its time was up")
        found = measured(spec, self.rate, build_seconds=seconds)
        return msgspec.structs.replace(
            found, context_seconds=self.context_seconds, is_build_shared=self.is_build_shared
        )

    def build(self) -> float:
        self.num_builds += 1
        self.clock.now += self.build_seconds
        return self.build_seconds

    def share_build(self, spec: Trial, deadline_seconds: float) -> str | None:
        self.build()
        self.share_deadlines.append(deadline_seconds)
        return super().share_build(spec, deadline_seconds)

    def explore(self, folder: Path, max_trials: int | None = None) -> None:
        with Study.open(
            folder / "study.db", "scripted", SPACE, search_id="scripted-1", judge=self.session.judge
        ) as study:
            explore(self.session, self.as_runner, SPACE, study, max_trials)


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


def test_the_first_trial_shows_what_building_costs(tmp_path: Path) -> None:
    machine = Machine(tmp_path, build_seconds=3.1)
    machine.explore(tmp_path, max_trials=3)
    (note,) = machine.notes.lines
    assert note == "Building the workload takes 3.1 s, 91 % of a trial: it is built once and shared by the trials."
    assert machine.num_builds == 2
    shared = [r.outcome.is_build_shared for r in machine.session.records if isinstance(r.outcome, Measurement)]
    assert shared == [False, True, True]


def test_long_building_is_shared_from_the_first_trial_on(tmp_path: Path) -> None:
    machine = Machine(tmp_path, build_seconds=12.0)
    machine.explore(tmp_path, max_trials=3)
    assert machine.notes.lines == ["Building the workload takes 12.0 s: it is built once and shared by the trials."]
    assert machine.num_builds == 1


def test_a_resumed_search_shares_at_once(tmp_path: Path) -> None:
    Machine(tmp_path, build_seconds=3.1).explore(tmp_path, max_trials=1)
    resumed = Machine(tmp_path, build_seconds=3.1)
    resumed.explore(tmp_path, max_trials=2)
    assert resumed.num_builds == 1


def test_one_worker_is_kept_where_forks_cannot_share(tmp_path: Path) -> None:
    machine = Machine(tmp_path, build_seconds=3.1)
    machine.why_not_shared = "building the workload started cuda in its process"
    machine.explore(tmp_path, max_trials=2)
    assert machine.isolation == "kept"
    assert machine.notes.lines[-1].endswith(
        "one process is kept instead: building the workload started cuda in its process."
    )


def test_one_worker_is_kept_where_starting_the_accelerator_costs_more(tmp_path: Path) -> None:
    machine = Machine(tmp_path, build_seconds=0.5)
    machine.context_seconds = 3.0
    machine.explore(tmp_path, max_trials=2)
    assert machine.isolation == "kept"
    assert machine.num_builds == 2, "what was kept would have to be scripted"


def test_nothing_is_shared_where_memory_or_time_for_one_model_more_is_missing(tmp_path: Path) -> None:
    large = Machine(tmp_path / "large", build_seconds=3.1, num_parameters=2**33)
    large.explore(tmp_path / "large", max_trials=2)
    late = Machine(tmp_path / "late", build_seconds=100.0)
    share_building(late.session, late.as_runner, SPACE)
    assert (large.num_builds, late.num_builds) == (2, 0)
    assert not large.is_build_shared
    assert large.isolation == "forked"


@pytest.mark.parametrize("budget", [10.0, 12.0, 20.0, 40.0, 100.0])
def test_a_budget_that_is_mostly_building_still_gives_an_answer(tmp_path: Path, budget: float) -> None:
    machine = Machine(tmp_path, build_seconds=4.0, budget_seconds=budget)
    machine.clock.now = 5.0  # loading it and describing it
    machine.explore(tmp_path)
    assert any(isinstance(record.outcome, Measurement) for record in machine.session.records)
    assert machine.clock.now <= budget


def test_the_first_trial_may_have_all_that_is_left(tmp_path: Path) -> None:
    machine = Machine(tmp_path, build_seconds=4.0, budget_seconds=10.0)
    machine.clock.now = 5.0
    assert left_to_explore(machine.session, SPACE) == 5.0
    assert search_spec(machine.session, FP32, 5.0).deadline_seconds == pytest.approx(4.0 + 2 / 3)


def confirmed(
    machine: Machine, folder: Path, start_seconds: float, *, can_share: bool = True
) -> tuple[list[Isolation], int]:
    """The processes that the confirmation started, and how many models they built."""
    made: list[Isolation] = []

    def make(isolation: Isolation, environment: dict[str, str]) -> Backend:
        made.append(isolation)
        machine.is_build_shared = isolation == "forked"
        return cast("Backend", machine)

    machine.explore(folder, max_trials=3)
    machine.num_builds = 0
    with confirming_runners(machine.session, make, BF16, HEAP, start_seconds, can_share=can_share) as processes:
        confirm(machine.session, processes, Shortlist(BF16, None, FP32), HEAP)
    return made, machine.num_builds


def test_the_confirmation_builds_once_for_each_environment_where_building_is_much_of_a_process(tmp_path: Path) -> None:
    machine = Machine(tmp_path, build_seconds=6.0, budget_seconds=300.0)
    made, num_builds = confirmed(machine, tmp_path, start_seconds=9.0)
    assert (made, num_builds) == (["forked", "forked"], 2)
    runs = confirm_runs(machine.session.records, BF16, HEAP)
    assert runs.num_confirming == NUM_ROUNDS
    baseline = confirm_runs(machine.session.records, FP32, {})
    evidence = gather(machine.session.records, runs, baseline, HEAP, LossScale(), machine.description)
    assert evidence.is_build_shared
    assert machine.share_deadlines[1:] == [41.0, 41.0], "time is left for processes of their own"


def test_a_short_build_is_not_shared_by_the_confirmation_however_much_of_a_process_it_is(tmp_path: Path) -> None:
    machine = Machine(tmp_path, build_seconds=0.4, budget_seconds=300.0)
    machine.rate = 1e5
    made, num_builds = confirmed(machine, tmp_path, start_seconds=0.5)
    assert set(made) == {"fresh"}
    assert len(made) == num_builds


@pytest.mark.parametrize(
    ("build_seconds", "budget_seconds", "can_share"), [(0.5, 300.0, True), (6.0, 60.0, True), (6.0, 300.0, False)]
)
def test_every_process_builds_its_own_where_sharing_does_not_pay_or_is_not_possible(
    tmp_path: Path, build_seconds: float, budget_seconds: float, can_share: bool
) -> None:
    machine = Machine(tmp_path, build_seconds, budget_seconds)
    made, num_builds = confirmed(machine, tmp_path, 3.0 + build_seconds, can_share=can_share)
    assert set(made) == {"fresh"}
    assert len(made) == num_builds
