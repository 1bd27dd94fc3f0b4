"""Building that costs much is shared: when, how, and what the search still reaches, on a scripted machine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scripted_backend import ScriptedSearch, candidate, described, hardware, measured

from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.search.progress import Progress
from autotune_amp.search.space import Space
from autotune_amp.trial.jobs import Trial

FP32, BF16 = candidate("fp32", 32), candidate("bf16", 32)
SPACE = Space(candidates=(FP32, candidate("fp32", 64), BF16, candidate("bf16", 64)), baseline=FP32)


class Machine(ScriptedSearch):
    """Each trial builds for `build_seconds` first, or all share what was built once."""

    def __init__(
        self, build_seconds: float, context_seconds: float = 0.0, budget_seconds: float = 200.0, **about: Any
    ) -> None:
        self.build_seconds, self.context_seconds = build_seconds, context_seconds
        self.lines: list[str] = []
        progress = Progress()
        progress.note = self.lines.append  # type: ignore[assignment,method-assign]
        super().__init__(
            SPACE,
            self.answer,
            budget_seconds,
            device=hardware({"fp32": 1.0, "tf32": None, "bf16": 1.0, "fp16": None, "fp8": None}),
            description=described(build_seconds=build_seconds, context_seconds=context_seconds, **about),
            progress=progress,
        )
        self.backend.share_build = self.share_build  # type: ignore[method-assign]  # it takes its time
        self.num_builds, self.rate = 0, 1000.0

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
        self.backend.is_build_shared = self.backend.why_not_shared is None
        return self.backend.why_not_shared


# Ten steps of 32 samples: a trial takes 0.3 s from its first step on at a rate of 1000, and 3.2 s at 100.
@pytest.mark.parametrize(
    ("build_seconds", "context_seconds", "rate", "shares", "is_kept"),
    [
        (0.4, 0.0, 1000.0, False, False),  # most of a trial, and nothing to save
        (0.6, 0.0, 1000.0, True, False),
        (0.6, 0.5, 1000.0, True, False),
        (0.2, 0.6, 1000.0, False, True),  # forks do not inherit the context
        (0.6, 0.0, 100.0, False, False),  # less than a fifth of it
    ],
)
def test_building_is_shared_where_it_is_much_of_a_trial(
    build_seconds: float, context_seconds: float, rate: float, shares: bool, is_kept: bool
) -> None:
    machine = Machine(build_seconds, context_seconds)
    machine.rate = rate
    machine.explore(max_trials=3)
    assert machine.backend.is_build_shared == shares
    assert machine.backend.is_forking != is_kept
    assert len(machine.lines) == (shares or is_kept)
    assert machine.num_builds == 3, "both precisions are compared before"


def test_one_worker_is_kept_where_forks_cannot_share() -> None:
    machine = Machine(build_seconds=3.1)
    machine.backend.why_not_shared = "building the workload started cuda in its process"
    machine.explore(max_trials=3)
    assert not machine.backend.is_forking
    assert "started cuda" in machine.lines[-1]


def test_nothing_is_shared_where_memory_or_time_for_one_model_more_is_missing() -> None:
    large = Machine(build_seconds=3.1, num_parameters=2**33)
    large.explore(max_trials=3)
    late = Machine(build_seconds=100.0)
    late.share_building()
    assert (large.num_builds, late.num_builds) == (3, 0)
    assert not large.backend.is_build_shared
    assert large.backend.is_forking


@pytest.mark.parametrize("budget", [10.0, 20.0, 100.0])
def test_a_budget_that_is_mostly_building_still_gives_an_answer(budget: float) -> None:
    machine = Machine(build_seconds=4.0, budget_seconds=budget)
    machine.budget.now = 5.0  # loading it and describing it
    machine.explore()
    assert any(isinstance(record.outcome, Measurement) for record in machine.records)
    assert machine.budget.now <= budget
