"""The steps of a workload's own loop: which batches they take, how they are timed, how the loop ends."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_amp import LossScale, Workload
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import Fitting
from autotune_amp.precision import torch_state
from autotune_amp.trial import own_loop, worker
from autotune_amp.trial.context import Context, make_model
from autotune_amp.trial.failures import RunFailedError
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.own_loop import time_own_loop
from autotune_amp.trial.timing import Timing
from autotune_amp.trial.training import Training, make_training

NUM_STEPS = 8
Fit = Callable[[Fitting], None]
SAMPLES = TensorDataset(torch.arange(6.0).unsqueeze(1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).square().mean()  # type: ignore[no-any-return]


def workload(fit: Fit, **options: Any) -> Workload:
    data = DataLoader(SAMPLES, batch_size=4)
    return Workload(lambda: nn.Linear(1, 1), loss, data, fit=fit, trainer="Own", **options)


def confirmation(**fields: Any) -> Trial:
    candidate = {"precision": "fp32", "batch_size": 4, **fields.pop("candidate", {})}
    usual = {"num_steps": (NUM_STEPS, NUM_STEPS), "torch_state": torch_state.capture(), "purpose": "confirm"}
    return Trial(candidate=Setting(**candidate), device="cpu", **usual | fields)


def timed(
    fit: Fit,
    *,
    report: Any = lambda number, seconds: None,
    num_compilations: Callable[[], int] = lambda: 0,
    options: Any = None,
    **fields: Any,
) -> Timing:
    made = workload(fit, **options or {})
    training = make_training(made, make_model(made), confirmation(**fields))
    assert isinstance(training, Training)
    with contextlib.closing(training):
        return time_own_loop(training, report, num_compilations)


def loop(fitting: Fitting, num_epochs: int = 100, each_step: Callable[[Any], None] = lambda batch: None) -> None:
    """A framework's, with a loader of its own that drops no batch."""
    window = fitting.setting.accumulation_steps
    for _ in range(num_epochs):
        for number, batch in enumerate(DataLoader(SAMPLES, batch_size=fitting.setting.batch_size), 1):
            found = loss(fitting.model, batch)
            torch.autograd.backward(found)
            each_step(batch)
            if number % window == 0:
                fitting.optimizer.step()
                fitting.stepped(found.detach(), window)


def test_seconds_are_those_of_a_whole_batch_though_an_epoch_ends_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(own_loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def a_second_each(fitting: Fitting) -> None:
        loop(fitting, each_step=lambda batch: setattr(clock, "now", clock.now + 1.0))

    found = timed(a_second_each)  # batches of 4 and 2 in turn: 3 samples a second
    assert found.raw_step_seconds == pytest.approx([4 / 3] * NUM_STEPS)
    assert (found.is_own_loop, found.update_seconds) == (True, None)


def test_its_steps_are_measured_once_they_have_stopped_falling(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(own_loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    falling = itertools.chain([1.0, 0.01, 0.06, 0.05, 0.055, 0.045, 0.04, 0.03], itertools.repeat(0.03))

    def fit(fitting: Fitting) -> None:
        while True:
            for batch in DataLoader(SAMPLES, batch_size=4, drop_last=True):
                clock.now += next(falling)
                fitting.stepped(loss(fitting.model, batch), 1)

    assert timed(fit).raw_step_seconds == pytest.approx([0.03] * NUM_STEPS)


def test_the_wait_for_batches_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(own_loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            clock.now += 0.5
            return (torch.ones(1),)

    def fit(fitting: Fitting) -> None:
        while True:
            for batch in DataLoader(Slow(), batch_size=4):
                clock.now += 3.0
                fitting.stepped(loss(fitting.model, batch), 1)

    found = timed(fit)
    assert found.raw_step_seconds == pytest.approx([5.0] * NUM_STEPS)
    assert found.data_seconds == pytest.approx(2.0)


def test_the_last_batch_of_the_first_two_steps_is_the_worst() -> None:
    seen: list[float] = []
    worst = {"worst_batch": lambda size: [torch.full((size, 1), 100.0)]}
    timed(
        lambda fitting: loop(fitting, each_step=lambda batch: seen.append(float(batch[0].max()))),
        options=worst,
        candidate={"batch_size": 2, "accumulation_steps": 3},
    )
    assert [number for number, largest in enumerate(seen, 1) if largest == 100.0] == [3, 6]


def test_a_loop_that_catches_every_exception_ends_and_loaders_are_watched_no_more() -> None:
    own = _BaseDataLoaderIter.__next__

    def deaf(fitting: Fitting) -> None:
        while True:
            with contextlib.suppress(Exception):
                loop(fitting)

    reported: list[int] = []
    found = timed(deaf, report=lambda number, seconds: reported.append(number))
    assert len(found.raw_step_seconds) == NUM_STEPS
    assert reported[-NUM_STEPS:] == [*range(1, NUM_STEPS + 1)]
    assert set(reported[:-NUM_STEPS]) == {0}
    assert reported.count(0) >= 3  # the warm-up
    assert _BaseDataLoaderIter.__next__ is own


def test_a_step_that_compiles_among_measured_ones_is_reported_with_the_number_of_those() -> None:
    reported, compiled = [0], set[Any]()

    def compiling_once(fitting: Fitting) -> None:
        loop(fitting, each_step=lambda batch: compiled.update({3} & {reported[-1]}))

    found = timed(
        compiling_once,
        report=lambda number, seconds: reported.append(number),
        num_compilations=lambda: len(compiled),
    )
    assert found.num_compiling_steps == 1
    assert reported[-NUM_STEPS - 1 :] == [1, 2, 3, 3, *range(4, NUM_STEPS + 1)]


SIX: Any = {"candidate": {"batch_size": 6}}


def test_a_loop_that_measures_nothing_or_something_else_is_refused() -> None:
    with pytest.raises(WorkloadError, match="Own ended its training after 2 steps"):
        timed(lambda fitting: loop(fitting, num_epochs=1))
    with pytest.raises(WorkloadError, match="batches of 4 samples, not of 6"):
        timed(lambda fitting: loop(fitting._replace(setting=Setting(precision="fp32", batch_size=4))), **SIX)
    with pytest.raises(RunFailedError, match="became nan"):
        timed(lambda fitting: fitting.stepped(torch.tensor(torch.nan), 1))


def outcome(fit: Fit, **fields: Any) -> Measurement:
    found = worker.run(Context(workload(fit), is_kept=False), confirmation(**fields), lambda event: None)
    assert isinstance(found, Measurement)
    return found


def test_it_is_for_confirmations_and_one_that_fails_is_measured_in_the_trials_own_steps() -> None:
    def failing(fitting: Fitting) -> None:
        fitting.stepped(torch.ones(()), 1)
        raise KeyError("no such callback")

    assert outcome(loop).is_own_loop
    assert not outcome(failing, purpose="search").is_own_loop
    failed = outcome(failing)
    assert not failed.is_own_loop
    assert failed.why_not_own_loop is not None
    assert "no such callback" in failed.why_not_own_loop


def test_a_trial_clips_without_the_loss_scale_and_steps_the_schedule() -> None:
    clipped: list[float] = []

    def clip(model: nn.Module) -> None:
        clipped.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

    def schedule(optimizer: torch.optim.Optimizer) -> list[Any]:
        return [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    made = workload(loop, clip=clip, schedule=schedule, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    norms = []
    for precision, scale in (("fp32", None), ("fp16", LossScale(init_scale=256.0))):
        torch.manual_seed(0)
        spec = confirmation(candidate={"precision": precision}, loss_scale=scale)
        training = make_training(made, make_model(made), spec)
        assert isinstance(training, Training)
        with contextlib.closing(training):
            training.forward_backward([torch.full((4, 1), 3.0)])
            training.update()
        assert training.optimizer.param_groups[0]["lr"] == 0.5
        norms.append(clipped.pop())
    assert norms[0] == pytest.approx(norms[1], rel=0.05)
    assert norms[0] > 0.5


def test_batches_fetched_ahead_are_samples_of_the_steps_that_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(own_loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def fetching_ahead(fitting: Fitting) -> None:
        while True:
            batches = list(DataLoader(SAMPLES, batch_size=4))  # 4 and 2
            for batch in batches:
                clock.now += float(len(batch[0]))
                fitting.stepped(loss(fitting.model, batch), 1)

    found = timed(fetching_ahead, num_steps=(1, 1))  # the third step is the warm-up's last, the fourth has 2 samples
    assert found.raw_step_seconds == (4.0,)
