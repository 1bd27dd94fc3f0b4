"""The measuring protocol with a clock of our own: what was done, never how fast."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune_amp.trial import timing
from autotune_amp.trial.spec import MAX_TIMED_MICRO_BATCHES, Candidate, TrialSpec


class Scripted:
    """A training whose steps last what a script says, on a clock that moves only when it does."""

    def __init__(self, seconds: Iterator[float], **fields: Any) -> None:
        self.spec = TrialSpec(
            candidate=Candidate(precision="fp32", batch_size=4, accumulation_steps=fields.pop("accumulation_steps", 1)),
            device="cpu",
            **fields,
        )
        self.device = torch.device("cpu")
        self.now = 0.0
        self.loss = 1.0
        self.num_batches = self.num_updates = 0
        self.scaler: Any = None
        self.scales: list[float] = []
        self._seconds = seconds
        self.data_seconds = 0.0
        self.update_seconds = 0.0

    def next_batch(self) -> None:
        self.now += self.data_seconds

    def forward_backward(self, batch: None) -> torch.Tensor:
        self.num_batches += 1
        self.now += next(self._seconds)
        return torch.tensor(self.loss)

    def update(self) -> None:
        self.num_updates += 1
        self.now += self.update_seconds
        if len(self.scales) > 1:
            self.scales.pop(0)

    def loss_scale(self) -> float | None:
        return self.scales[0] if self.scales else None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the module's clock; `training` is whose time it tells."""
    holder = SimpleNamespace(training=None)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: holder.training.now))
    return holder


def constant(seconds: float) -> Iterator[float]:
    while True:
        yield seconds


def run(clock: SimpleNamespace, training: Scripted) -> timing.Timing:
    clock.training = training
    return timing.time_steps(training, lambda number, seconds: None)  # type: ignore[arg-type]  # a scripted training


def test_steady_steps_end_at_the_least_number(clock: SimpleNamespace) -> None:
    training = Scripted(constant(0.5))
    found = run(clock, training)
    assert found.raw_step_seconds == (0.5,) * 8
    assert found.first_step_seconds == 0.5
    assert training.num_updates == 3 + 8
    assert training.num_batches == 3 + 8


def test_unsteady_steps_go_on_to_the_largest_number(clock: SimpleNamespace) -> None:
    def uneven() -> Iterator[float]:
        while True:
            yield from (0.1, 0.9, 0.5)

    assert len(run(clock, Scripted(uneven())).raw_step_seconds) == 40


def test_a_slow_first_step_is_reported_apart(clock: SimpleNamespace) -> None:
    def compiling() -> Iterator[float]:
        yield 60.0
        yield from constant(0.5)

    found = run(clock, Scripted(compiling()))
    assert found.first_step_seconds == 60.0
    assert max(found.raw_step_seconds) == 0.5


def test_measuring_ends_when_its_time_is_up(clock: SimpleNamespace) -> None:
    assert len(run(clock, Scripted(constant(2.0), measure_seconds=5.0)).raw_step_seconds) == 3


def test_a_deadline_that_comes_near_ends_measuring_with_what_there_is(clock: SimpleNamespace) -> None:
    assert len(run(clock, Scripted(constant(2.0), deadline_seconds=10.0)).raw_step_seconds) == 1


def test_a_slower_candidate_is_cut_after_five_steps(clock: SimpleNamespace) -> None:
    found = run(clock, Scripted(constant(1.3), cut_step_seconds=1.25))
    assert found.was_cut
    assert len(found.raw_step_seconds) == 5


def test_an_equal_candidate_is_not_cut(clock: SimpleNamespace) -> None:
    found = run(clock, Scripted(constant(1.2), cut_step_seconds=1.25))
    assert not found.was_cut
    assert len(found.raw_step_seconds) == 8


def test_a_hopeless_candidate_is_cut_in_its_warm_up(clock: SimpleNamespace) -> None:
    training = Scripted(constant(30.0), cut_step_seconds=1.25)
    found = run(clock, training)
    assert found.was_cut
    assert training.num_updates == 3
    assert found.raw_step_seconds == (30.0, 30.0)


def test_one_stall_in_the_warm_up_does_not_cut(clock: SimpleNamespace) -> None:
    def stalling() -> Iterator[float]:
        yield from (1.0, 30.0)
        yield from constant(1.0)

    assert not run(clock, Scripted(stalling(), cut_step_seconds=1.25)).was_cut


def test_waiting_for_data_counts_and_is_reported_apart(clock: SimpleNamespace) -> None:
    training = Scripted(constant(0.5))
    training.data_seconds = 0.25
    found = run(clock, training)
    assert found.raw_step_seconds == (0.75,) * 8
    assert found.data_seconds == pytest.approx(0.25)


@pytest.mark.parametrize("window", [2, 4, 8, 64])
def test_long_windows_are_composed_from_a_few_micro_batches(clock: SimpleNamespace, window: int) -> None:
    training = Scripted(constant(0.5), accumulation_steps=window)
    training.update_seconds = 3.0
    training.data_seconds = 0.25
    found = run(clock, training)
    assert found.raw_step_seconds == pytest.approx((window * 0.75 + 3.0,) * 8)
    assert found.data_seconds == pytest.approx(window * 0.25)
    assert training.num_batches == 11 * min(window, MAX_TIMED_MICRO_BATCHES)


def test_the_confirmation_runs_whole_windows(clock: SimpleNamespace) -> None:
    training = Scripted(constant(0.5), accumulation_steps=16, purpose="confirm", num_steps=(2, 2))
    found = run(clock, training)
    assert found.raw_step_seconds == (8.0, 8.0)
    assert training.num_batches == 5 * 16


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_trial(clock: SimpleNamespace, loss: float) -> None:
    training = Scripted(constant(0.5))
    training.loss = loss
    with pytest.raises(timing.NonFiniteError, match=str(loss)):
        run(clock, training)


def test_warm_up_goes_on_while_the_loss_scale_comes_down(clock: SimpleNamespace) -> None:
    training = Scripted(constant(0.5))
    training.scaler = SimpleNamespace(get_backoff_factor=lambda: 0.5)
    training.scales = [2.0**k for k in range(16, 5, -1)]
    found = run(clock, training)
    assert found.num_skips == 0
    assert training.num_updates == 10 + 1 + 8


def test_a_scale_that_never_settles_is_a_failure(clock: SimpleNamespace) -> None:
    training = Scripted(constant(0.5))
    training.scaler = SimpleNamespace(get_backoff_factor=lambda: 0.5)
    training.scales = [2.0**k for k in range(16, -200, -1)]
    with pytest.raises(timing.NonFiniteError, match="still overflow"):
        run(clock, training)
