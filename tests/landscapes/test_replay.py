"""What a replay plays back, and what it costs: by the rules of a real trial, in virtual seconds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import landscape as landscapes
import msgspec
import pytest
from backend_contract import BackendContract, Made
from hypothesis import given, settings
from hypothesis import strategies as st
from landscape import Landscape, Process
from made_landscape import HEADER, SETUP_SECONDS, failed, landscape, process
from replay import NUM_CHECK_PASSES, Played, ReplayBackend, ReplayBudget, play
from search_replay import candidate_of, search_replay

from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import Check, Trial

FP32 = Setting(precision="fp32", batch_size=16)
BEST = Setting(precision="bf16", batch_size=64)
STEADY = process(FP32, (0.1,) * 20, warmup=(0.5, 0.1, 0.1))
RECORDED = sorted(Path(landscapes.__file__).parent.glob("results/*.jsonl"))


class TestReplay(BackendContract):
    @pytest.fixture
    def made(self) -> Made:
        ran_out = Setting(precision="fp32", batch_size=32)
        kept = [p for p in landscape(rate).processes if p.cell.candidate != ran_out]
        played_back = Landscape(HEADER, [*kept, failed(ran_out, "oom", 1.0)])
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
    assert found.seconds == pytest.approx(SETUP_SECONDS + 0.7 + (0.0 if num_steps == 2 else 0.1 * num_steps))


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


def test_memory_over_the_limit_is_out_of_memory_after_the_first_step() -> None:
    found = played(STEADY, memory_limit_bytes=2**28 - 1)
    assert kind(found) == "oom"
    assert found.seconds == pytest.approx(SETUP_SECONDS + 0.5)
    assert isinstance(played(STEADY, memory_limit_bytes=2**28).outcome, Measurement)


def test_recorded_failures_fail_again() -> None:
    full = played(failed(FP32, "oom", 0.4))
    assert (kind(full), full.seconds) == ("oom", 0.4)
    late = failed(FP32, "timeout", 5.0, warmup=(3.0,))
    assert played(late) == Played(Failure(kind="timeout", message="made up"), 5.0)
    assert played(late, deadline_seconds=2.0).seconds == 2.0
    assert played(late, first_step_deadline_seconds=4.0, step_deadline_seconds=1.0).seconds == 4.0
    assert played(late, first_step_deadline_seconds=1.0).seconds == 1.0


@given(
    recorded=st.lists(st.floats(1e-3, 2.0), min_size=1, max_size=40),
    warmup=st.lists(st.floats(1e-3, 5.0), min_size=3, max_size=5),
    low=st.integers(1, 10),
    more=st.integers(0, 40),
    cut=st.none() | st.floats(1e-3, 2.0),
    measure=st.none() | st.floats(0.0, 5.0),
    deadline=st.none() | st.floats(0.01, 20.0),
)
def test_whatever_is_asked_for_is_kept_to(
    recorded: list[float],
    warmup: list[float],
    low: int,
    more: int,
    cut: float | None,
    measure: float | None,
    deadline: float | None,
) -> None:
    found = played(
        process(FP32, tuple(recorded), tuple(warmup)),
        num_steps=(low, low + more),
        cut_step_seconds=cut,
        measure_seconds=measure,
        deadline_seconds=deadline,
    )
    assert deadline is None or found.seconds <= deadline
    if isinstance(found.outcome, Failure):
        assert deadline is not None
        return
    assert set(steps(found)) <= {*recorded, *warmup[1:]}
    assert len(steps(found)) <= max(low + more, len(warmup) - 1)
    assert cut is not None or not found.outcome.was_cut
    if measure is not None and len(steps(found)) > 1 and not found.outcome.was_cut:
        assert sum(steps(found)[:-1]) <= measure + 1e-9
    if steps(found) != tuple(warmup[1:]):
        assert found.seconds == pytest.approx(SETUP_SECONDS + sum(warmup) + sum(steps(found)))


def test_a_check_costs_its_passes_and_keeps_its_deadline() -> None:
    clock = ReplayBudget()
    runner = ReplayBackend(landscape(lambda _: 100.0, num_processes=1), clock, seed=0)
    wanted = Check(what="fidelity", candidate=Setting(precision="bf16", batch_size=16), device="cpu")
    assert not isinstance(runner.submit(wanted).result(), Failure)
    assert clock.now == pytest.approx(SETUP_SECONDS + NUM_CHECK_PASSES * 0.16)
    assert isinstance(runner.submit(msgspec.structs.replace(wanted, deadline_seconds=1.0)).result(), Failure)
    assert clock.now == pytest.approx(SETUP_SECONDS + NUM_CHECK_PASSES * 0.16 + 1.0)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_a_whole_search_finds_what_is_far_the_best_within_its_budget(seed: int) -> None:
    found = search_replay(landscape(rate), seed, budget_seconds=120.0)
    assert found.decision is not None
    assert candidate_of(found.decision) == BEST
    assert found.trace[-1][1] == BEST
    assert found.records[-1][0] <= 120.0
    assert found.searched_seconds < found.round_seconds[0]
    assert found.round_seconds == sorted(found.round_seconds)
    assert sum(record.seconds for _, record in found.records) == pytest.approx(found.records[-1][0])


def test_the_same_seed_searches_alike() -> None:
    whole = landscape(lambda c: 100 + 10 * c.batch_size**0.5)
    one, other, third = (search_replay(whole, seed, 60.0) for seed in (1, 1, 2))
    assert one.trace == other.trace
    assert one.trace != third.trace


@pytest.mark.parametrize("path", RECORDED[:2], ids=lambda path: path.stem)
def test_a_recorded_landscape_is_searched(path: Path) -> None:
    whole = Landscape.load(path)
    found = search_replay(whole, 0)
    assert found.decision is not None
    assert whole.samples_per_second(candidate_of(found.decision)) > 0
