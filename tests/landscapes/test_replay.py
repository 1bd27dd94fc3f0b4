"""What a replay plays back, and what it costs: by the rules of a real trial, in virtual seconds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from backend_contract import BackendContract, Made
from hypothesis import given, settings
from hypothesis import strategies as st
from landscape import Landscape, Process
from made_landscape import HEADER, SETUP_SECONDS, failed, landscape, process
from replay import Played, ReplayBackend, ReplayBudget, play
from search_replay import search_replay, setting_of

from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import Check, Trial

FP32 = Setting(precision="fp32", batch_size=16)
BEST = Setting(precision="bf16", batch_size=64)
STEADY = process(FP32, (0.1,) * 20, warmup=(0.5, 0.1, 0.1))


class TestReplay(BackendContract):
    @pytest.fixture
    def made(self) -> Made:
        ran_out = Setting(precision="fp32", batch_size=32)
        kept = [p for p in landscape(rate).processes if p.cell.candidate != ran_out]
        played_back = Landscape(HEADER, [*kept, failed(ran_out)])
        return Made(
            ReplayBackend(played_back, ReplayBudget(), seed=0),
            spec(),
            Trial(candidate=ran_out, device="cpu"),
            "oom",
            Check(what="fidelity", candidate=Setting(precision="bf16", batch_size=16), device="cpu"),
        )


def spec(**fields: Any) -> Trial:
    return Trial(candidate=FP32, device="cpu", **fields)


def played(recorded: Process, **fields: Any) -> Played:
    return play(recorded, spec(**fields), HEADER, random.Random(0))


def steps(found: Played) -> tuple[float, ...]:
    assert isinstance(found.outcome, Measurement)
    return found.outcome.raw_step_seconds


def kind(found: Played) -> str:
    assert isinstance(found.outcome, Failure)
    return found.outcome.kind


def rate(candidate: Setting) -> float:
    """bf16 at 64 far above all others."""
    if candidate == BEST:
        return 1000.0
    return {"fp32": 100.0, "bf16": 150.0, "fp16": 1.0}[candidate.precision] * min(candidate.batch_size, 32) / 32


@pytest.mark.parametrize(("cut_step_seconds", "num_steps"), [(0.11, 8), (0.09, 5), (0.05, 2)])
def test_what_is_slow_is_cut(cut_step_seconds: float, num_steps: int) -> None:
    found = played(STEADY, cut_step_seconds=cut_step_seconds)
    assert isinstance(found.outcome, Measurement)
    assert found.outcome.was_cut == (cut_step_seconds < 0.1)
    assert len(steps(found)) == num_steps  # two steps of warm-up where it is hopeless
    assert found.seconds == pytest.approx(SETUP_SECONDS + 0.7 + (0.0 if num_steps == 2 else 0.1 * (1 + num_steps)))


def test_recorded_steps_that_still_fall_are_part_of_the_warm_up() -> None:
    found = played(process(FP32, (0.05, 0.04, *[0.03] * 20), warmup=(0.5, 0.07, 0.06)))
    assert steps(found) == (0.03,) * 8
    assert isinstance(found.outcome, Measurement)
    assert (found.outcome.num_steps_taken, found.outcome.num_unmeasured_steps) == (8 + 8, 8)
    assert found.seconds == pytest.approx(SETUP_SECONDS + 0.5 + 0.07 + 0.06 + 0.05 + 0.04 + 11 * 0.03)


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({"deadline_seconds": 0.6}, 0.6),
        ({"first_step_deadline_seconds": 0.3}, SETUP_SECONDS + 0.3),
        ({"step_deadline_seconds": 0.05, "first_step_deadline_seconds": 1.0}, SETUP_SECONDS + 0.55),
    ],
)
def test_a_timeout_costs_what_it_waited(limits: dict[str, float], seconds: float) -> None:
    found = played(STEADY, **limits)
    assert kind(found) == "timeout"
    assert found.seconds == pytest.approx(seconds)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_a_whole_search_finds_what_is_far_the_best_within_its_budget(seed: int) -> None:
    found = search_replay(landscape(rate), seed, budget_seconds=120.0)
    assert found.decision is not None
    assert setting_of(found.decision) == BEST
    assert found.trace[-1][1] == BEST
    assert found.records[-1][0] <= 120.0
    assert found.searched_seconds < found.round_seconds[0]
    assert found.round_seconds == sorted(found.round_seconds)
    assert sum(record.seconds for _, record in found.records) == pytest.approx(found.records[-1][0])
