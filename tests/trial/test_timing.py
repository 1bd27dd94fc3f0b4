"""The measuring protocol with a clock of our own: what was done, never how fast."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.setting import Setting
from autotune_amp.trial import timing
from autotune_amp.trial.failures import RunFailedError
from autotune_amp.trial.jobs import MAX_TIMED_MICRO_BATCHES, Trial
from autotune_amp.trial.judge import NUM_NONFINITE_STEPS


class Scripted:
    """A training whose steps last what a script says, on a clock that moves only when it does."""

    def __init__(self, seconds: Iterator[float], **fields: Any) -> None:
        self.spec = Trial(
            candidate=Setting(precision="fp32", batch_size=4, accumulation_steps=fields.pop("accumulation_steps", 1)),
            device="cpu",
            **fields,
        )
        self.device = torch.device("cpu")
        self.now = 0.0
        self.loss = 1.0
        self.num_batches = self.num_updates = self.num_steps_taken = 0
        self.scaler: Any = None
        self.scales: list[float] = []
        self._seconds = seconds
        self.data_seconds = 0.0
        self.num_loaded_ahead = self.num_ready = self.num_loader_workers = 0
        self.update_seconds = 0.0
        self.is_update_apart = self.has_stepped = True
        self.worst: str | None = None
        self.worst_seconds = 0.0
        self.batches: list[str] = []
        self.entered: list[str] = []

    def start_loading(self) -> None:
        """Takes no time."""

    def next_batch(self) -> str:
        if self.num_ready:
            self.num_ready -= 1
        else:
            self.now += self.data_seconds
        return "typical"

    def worst_batch(self) -> str | None:
        return self.worst

    def forward_backward(self, batch: str, *, is_last: bool = True) -> torch.Tensor:
        self.batches.append(batch)
        self.num_batches += 1
        self.now += next(self._seconds) if batch == "typical" else self.worst_seconds
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
    return itertools.repeat(seconds)


def run(clock: SimpleNamespace, training: Scripted) -> timing.Timing:
    clock.training = training
    return timing.time_steps(
        training,  # type: ignore[arg-type]  # a scripted training
        lambda number, seconds: None,
        training.entered.append,
    )


UNEVEN = [0.1, 0.9, 0.5]


class OfTokens(Scripted):
    """A training on 3 and 7 tokens by turns, padded to 8."""

    def next_batch(self) -> Any:
        super().next_batch()
        num = 7 if self.num_batches % 2 else 3
        return {"input_ids": torch.ones(8, dtype=torch.long), "attention_mask": (torch.arange(8) < num).long()}

    def forward_backward(self, batch: Any, *, is_last: bool = True) -> torch.Tensor:
        batch.clear()  # the user's code may take it apart
        return super().forward_backward("typical", is_last=is_last)


@pytest.mark.parametrize(("accumulation_steps", "per_step"), [(1, 5.0), (2, 10.0), (64, 320.0)])
def test_tokens_are_those_of_the_measured_steps_scaled_to_whole_windows(
    clock: SimpleNamespace, accumulation_steps: int, per_step: float
) -> None:
    found = run(clock, OfTokens(constant(0.5), accumulation_steps=accumulation_steps))
    assert found.tokens_per_step == pytest.approx(per_step)
    assert found.padded_share == pytest.approx(3 / 8)
    assert run(clock, Scripted(constant(0.5))).tokens_per_step is None


@pytest.mark.parametrize(
    ("steps", "fields", "num_measured", "was_cut"),
    [
        ([60.0, *[0.5] * 99], {}, 8, False),  # steady: the least number, the first step apart
        (UNEVEN * 99, {}, 40, False),  # the largest number
        ([2.0] * 99, {"measure_seconds": 5.0}, 3, False),
        ([2.0] * 99, {"deadline_seconds": 10.0}, 1, False),  # of which the warm-up took most
        ([1.3] * 99, {"cut_step_seconds": 1.25}, 5, True),
        ([1.2] * 99, {"cut_step_seconds": 1.25}, 8, False),
        ([30.0] * 99, {"cut_step_seconds": 1.25}, 2, True),  # hopeless: those of the warm-up
        ([0.03] * 99, {"cut_step_seconds": 0.0125}, 2, True),  # nobody waits for those to fall
        ([1.0, 30.0, *[1.0] * 99], {"cut_step_seconds": 1.25}, 8, False),  # one stall
    ],
)
def test_how_long_is_measured(
    clock: SimpleNamespace, steps: list[float], fields: dict[str, Any], num_measured: int, was_cut: bool
) -> None:
    training = Scripted(iter(steps), **fields)
    found = run(clock, training)
    assert (len(found.raw_step_seconds), found.was_cut) == (num_measured, was_cut)
    assert found.first_step_seconds == steps[0]
    assert found.raw_step_seconds == pytest.approx(steps[training.num_updates - num_measured : training.num_updates])


class FirstPages(Scripted):
    """All of its time is the wait for data."""

    def next_batch(self) -> str:
        self.now += next(self._seconds)
        return super().next_batch()

    def forward_backward(self, batch: str, *, is_last: bool = True) -> torch.Tensor:
        return torch.tensor(self.loss)


@pytest.mark.parametrize("purpose", ["search", "confirm"])
@pytest.mark.parametrize("is_data", [False, True])
def test_measuring_waits_until_steps_stop_falling(clock: SimpleNamespace, purpose: Any, is_data: bool) -> None:
    falling = [1.0, 0.06, 0.05, 0.055, 0.045, 0.04, 0.035, 0.037, 0.03]
    seconds = itertools.chain(falling, constant(0.03))
    training = FirstPages(seconds, purpose=purpose) if is_data else Scripted(seconds, purpose=purpose)
    found = run(clock, training)
    assert found.raw_step_seconds == pytest.approx((0.03,) * 8)
    assert found.first_step_seconds == pytest.approx(1.0)
    assert training.num_updates <= len(falling) + 2 + 8


def test_seconds_of_compiling_are_not_measured_seconds(clock: SimpleNamespace) -> None:
    """Neither those in a measured step, which is taken again, nor those of the warm-up."""
    for scripted, expected in (
        ([0.5] * 5 + [60.0] + [0.5] * 40, 8),  # in the third measured step
        ([0.5, 60.0, *[0.1, 0.9] * 40], 10),  # before them: 4.2 s are up in the tenth
    ):
        compiled: list[float] = []

        def seconds(scripted: list[float] = scripted, compiled: list[float] = compiled) -> Iterator[float]:
            for value in scripted:
                compiled += [value] if value == 60.0 else []
                yield value

        training = clock.training = Scripted(seconds(), measure_seconds=4.2, num_steps=(8, 40))
        found = timing.time_steps(
            training,  # type: ignore[arg-type]  # a scripted training
            lambda number, seconds: None,
            training.entered.append,
            lambda compiled=compiled: len(compiled),  # type: ignore[misc]
        )
        assert max(found.raw_step_seconds) < 1.0
        assert len(found.raw_step_seconds) == expected
        assert found.num_compiling_steps == 1


def test_what_a_deadline_cuts_off_a_burst_is_dropped_with_its_skips(clock: SimpleNamespace) -> None:
    training = Scripted(constant(1.0), deadline_seconds=15.0)
    training.num_loader_workers = 4
    training.scaler = SimpleNamespace(get_backoff_factor=lambda: 0.5)
    training.scales = [8.0] * 9 + [4.0, 2.0]  # the sixth and the seventh measured step are skipped
    found = run(clock, training)
    assert training.num_updates == 3 + 7
    assert (len(found.raw_step_seconds), found.num_skips) == (4, 0)


@pytest.mark.parametrize("num_ready", [0, 8, 40])
def test_what_was_loaded_ahead_in_the_slow_first_step_does_not_hide_the_wait(
    clock: SimpleNamespace, num_ready: int
) -> None:
    training = Scripted(constant(0.1), num_steps=(8, 8))
    training.data_seconds, training.num_loaded_ahead, training.num_ready = 0.3, num_ready, num_ready
    found = run(clock, training)
    assert found.data_seconds == pytest.approx(0.3)
    assert found.raw_step_seconds == pytest.approx((0.4,) * 8)
    training.num_ready = 1000
    run(clock, training)
    dropped = num_ready + 1 if num_ready else 0  # no more than the workers may hold, and the step after it
    assert training.num_ready == 1000 - 4 - dropped - 8


class Bursting(Scripted):
    """Workers begin together: each time they deliver as many batches as they are, after `load_seconds`."""

    load_seconds = 1.2

    def __init__(self, num_workers: int, seconds: float = 0.03, **fields: Any) -> None:
        super().__init__(constant(seconds), **fields)
        self.num_loader_workers, self.num_loaded_ahead = num_workers, 2 * num_workers
        self.arrivals = [0.0] * self.num_loaded_ahead

    def next_batch(self) -> str:
        self.now = max(self.now, self.arrivals.pop(0))
        self.arrivals.append(max(self.now, self.arrivals[-self.num_loader_workers]) + self.load_seconds)
        return "typical"


@pytest.mark.parametrize("purpose", ["search", "confirm"])
@pytest.mark.parametrize(
    ("num_workers", "fields"),
    [
        (12, {"measure_seconds": 3.0}),
        (12, {"num_steps": (8, 8)}),
        (12, {"num_steps": (400, 400), "measure_seconds": 2.0}),
        (6, {"accumulation_steps": 4}),
    ],
)
def test_batches_that_come_in_bursts_are_measured_in_whole_bursts(
    clock: SimpleNamespace, purpose: Any, num_workers: int, fields: dict[str, Any]
) -> None:
    training = Bursting(num_workers, purpose=purpose, **fields)
    found = run(clock, training)
    num_batches = training.spec.candidate.accumulation_steps
    at_best = Bursting.load_seconds / num_workers * num_batches
    num_steps = len(found.raw_step_seconds)
    assert num_steps * num_batches % num_workers == 0
    assert num_steps * num_batches >= 2 * num_workers
    assert sum(found.raw_step_seconds) / num_steps == pytest.approx(at_best)
    assert found.data_seconds == pytest.approx(at_best - 0.03 * num_batches)


@pytest.mark.parametrize(("num_workers", "num_batches", "num_groups"), [(12, 1, 12), (6, 4, 3), (4, 4, 1), (3, 2, 3)])
def test_a_burst_is_over_as_soon_as_each_worker_has_given_equally_many(
    num_workers: int, num_batches: int, num_groups: int
) -> None:
    training: Any = Bursting(num_workers, accumulation_steps=num_batches)
    assert timing.groups_per_loader_round(training) == num_groups


def test_a_slow_loader_does_not_use_the_trial_up_before_it_measures(clock: SimpleNamespace) -> None:
    training = Scripted(constant(0.1), num_steps=(2, 2), measure_seconds=5.0)
    training.data_seconds, training.num_loaded_ahead = 2.0, 100
    run(clock, training)
    assert training.now == pytest.approx(3 * 2.1 + 3 * 2.0 + (1 + 2) * 2.1)


class Asynchronous(Scripted):
    """A device that computes while the host waits for data, until they synchronise."""

    def __init__(self, seconds: float, data_seconds: float) -> None:
        super().__init__(constant(0.0))
        self.device = torch.device("cuda")
        self.spec = msgspec.structs.replace(self.spec, device="cuda")
        self.compute_seconds, self.data_seconds = seconds, data_seconds
        self.is_done_at = 0.0

    def forward_backward(self, batch: str, *, is_last: bool = True) -> torch.Tensor:
        self.is_done_at = max(self.now, self.is_done_at) + self.compute_seconds
        return super().forward_backward(batch, is_last=is_last)

    def synchronize(self, device: torch.device) -> None:
        self.now = max(self.now, self.is_done_at)


@pytest.mark.parametrize(
    ("compute_seconds", "data_seconds", "wait"), [(1.0, 0.25, 0.0625), (1.0, 1.5, 0.75), (1.0, 0.05, 0.05)]
)
def test_what_the_device_computes_meanwhile_is_no_wait_for_data(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, compute_seconds: float, data_seconds: float, wait: float
) -> None:
    training = Asynchronous(compute_seconds, data_seconds)
    monkeypatch.setattr(timing, "synchronize", training.synchronize)
    found = run(clock, training)
    assert found.data_seconds == pytest.approx(wait)
    assert found.num_steps_together == 4


@pytest.mark.parametrize("purpose", ["search", "confirm"])
def test_the_worst_batch_is_trained_on_and_is_no_measured_step(clock: SimpleNamespace, purpose: Any) -> None:
    training = Scripted(constant(0.5), purpose=purpose)
    training.worst, training.worst_seconds = "worst", 30.0
    found = run(clock, training)
    ordinary = ["typical"] * 8
    last = ["worst"] if purpose == "confirm" else []
    assert training.batches == ["worst", "typical", "typical", "worst", *ordinary, *last]
    assert training.num_updates == len(training.batches)
    assert training.entered == ["taking a step on the worst batch"] * (1 + len(last))
    assert found.first_step_seconds == 30.0
    assert found.raw_step_seconds == (0.5,) * 8
    assert found.update_seconds == 0.0


@pytest.mark.parametrize("window", [1, 3, 4, 5, 64])
def test_of_a_window_that_ranks_share_only_the_last_pass_exchanges(clock: SimpleNamespace, window: int) -> None:
    num_timed = min(window, MAX_TIMED_MICRO_BATCHES)
    passes = itertools.cycle([0.5] * (num_timed - 1) + [2.0])
    training = Scripted(passes, accumulation_steps=window, num_ranks=2)
    training.update_seconds = 3.0
    found = run(clock, training)
    assert found.raw_step_seconds == pytest.approx((0.5 * (window - 1) + 2.0 + 3.0,) * 8)


@pytest.mark.parametrize("window", [2, 4, 8, 64])
def test_long_windows_are_composed_from_a_few_micro_batches(clock: SimpleNamespace, window: int) -> None:
    training = Scripted(constant(0.5), accumulation_steps=window)
    training.update_seconds = 3.0
    training.data_seconds = 0.25
    found = run(clock, training)
    assert found.raw_step_seconds == pytest.approx((window * 0.75 + 3.0,) * 8)
    assert found.data_seconds == pytest.approx(window * 0.25)
    assert found.update_seconds == pytest.approx(3.0)
    assert training.num_batches == 11 * min(window, MAX_TIMED_MICRO_BATCHES)
    loop = Scripted(constant(0.5), accumulation_steps=window, purpose="confirm", num_steps=(2, 2))
    loop.is_update_apart, loop.worst = False, "worst"
    assert run(clock, loop).update_seconds is None
    assert loop.num_batches == 7 * window, "a confirmation runs whole windows"
    assert {index % window for index, batch in enumerate(loop.batches) if batch == "worst"} == {window - 1}, (
        "the worst batch comes where the other gradients are there"
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_trial(clock: SimpleNamespace, loss: float) -> None:
    for worst in (None, "worst"):
        training = Scripted(constant(0.5))
        training.loss, training.worst = loss, worst
        with pytest.raises(RunFailedError, match=str(loss)):
            run(clock, training)
        assert training.num_batches == NUM_NONFINITE_STEPS


def test_a_loop_that_takes_no_optimizer_step_is_told_so(clock: SimpleNamespace) -> None:
    training = Scripted(constant(0.5))
    training.has_stepped = False
    with pytest.raises(WorkloadError, match="no optimizer step"):
        run(clock, training)


def test_warm_up_goes_on_while_the_loss_scale_comes_down(clock: SimpleNamespace) -> None:
    training = Scripted(constant(0.5))
    training.scaler = SimpleNamespace(get_backoff_factor=lambda: 0.5)
    training.scales = [2.0**k for k in range(16, 5, -1)]
    found = run(clock, training)
    assert found.num_skips == 0
    assert training.num_updates == 10 + 1 + 8
    training.scales = [2.0**k for k in range(16, -200, -1)]
    with pytest.raises(RunFailedError, match="still overflow"):
        run(clock, training)
