"""Timing of the steps of a framework's own training loop, including everything that it does between them.

The loop takes batches from its own loader. The last batch of each of its first two steps is replaced by the worst
batch, if there is one: in the second step the optimizer has its state. Both steps are part of the warm-up, which lasts
until later step times stop falling.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_amp.command.agent.tokens import TokenCount, count_tokens
from autotune_amp.core.errors import WorkloadError
from autotune_amp.core.workload import Fitting
from autotune_amp.hardware.measuring import synchronize
from autotune_amp.trial import data
from autotune_amp.trial.context import Optimizers
from autotune_amp.trial.failures import raise_if_steps_failed
from autotune_amp.trial.jobs import should_continue_warmup, stop_reason
from autotune_amp.trial.judge import MAX_SKIPS, StepLosses
from autotune_amp.trial.timing import (
    MAX_COMPILING_STEPS,
    StepCallback,
    Timing,
    groups_per_loader_round,
    num_backoffs,
    step_losses,
    token_fields,
)
from autotune_amp.trial.training import Training

NUM_WORST_STEPS = 2


class _MeasuredEnoughError(BaseException):
    """Exception that ends a loop from within. As a BaseException it passes the loop's own ``except Exception``."""


def time_own_loop(
    training: Training, report: StepCallback, count_compilations: Callable[[], int] = lambda: 0
) -> Timing:
    """Run the workload's `fit` until enough steps are measured, and return their timing; `report` is called as in
    `time_steps`.

    Step seconds are for a whole effective batch: a step with fewer samples, as the last of an epoch, counts as that
    share of a step. Raises `RunFailedError` if losses are not finite or the loss scaler skips every step, as
    `failure_from_steps` decides, and `WorkloadError` if the loop ends before anything was measured.
    """
    fit = training.workload.fit
    assert fit is not None
    supply = _BatchSupply(training)
    steps = _OwnLoopTimer(training, supply, report, count_compilations)
    optimizer = training.optimizer
    fitting = Fitting(
        model=training.model,
        optimizer=optimizer.parts if isinstance(optimizer, Optimizers) else optimizer,
        data=supply.wrap(training.batches) if training.loader is None else training.loader,
        setting=training.spec.candidate,
        loss_scale=training.spec.loss_scale,
        scaler=training.scaler,
        stepped=steps,
    )
    with (
        Path(os.devnull).open("w") as nowhere,  # for the loop's progress bar and logs
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        supply.watch_loaders(),
        contextlib.suppress(_MeasuredEnoughError),
    ):
        fit(fitting)
    training.model.to(training.device)  # a loop may have moved it
    if training.workload.checkpoint is not None:  # a checkpoint saves the optimizer's state, and the loop's was freed
        training.forward_backward(training.next_batch())
        training.update()
    return steps.timing()


class _BatchSupply:
    """Source of the loop's batches, which counts their samples and tokens and times the wait for them."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._batch_size = training.spec.candidate.batch_size
        self._accumulation_steps = training.spec.candidate.accumulation_steps
        self._is_fetching = False
        self._num_batches = 0
        # Samples and tokens of batches fetched but not trained on yet.
        self._ahead: deque[tuple[int, TokenCount | None]] = deque()
        self.largest = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def watch_loaders(self) -> Iterator[None]:
        """Count and time the batches of all DataLoaders of this process, since the loop makes loaders of its own."""
        iterator_class: Any = _BaseDataLoaderIter
        original_next = iterator_class.__next__

        def watched_next(iterator: Any) -> Any:
            if self._is_fetching:  # a loader inside of a dataset, or that of the worst batch
                return original_next(iterator)
            is_counted = data.draws_full_batches(iterator._index_sampler, self._batch_size)
            return self._fetch(lambda: original_next(iterator), is_counted=is_counted)

        iterator_class.__next__ = watched_next
        try:
            yield
        finally:
            iterator_class.__next__ = original_next

    def wrap(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches that do not come from a DataLoader, counted and timed."""
        while True:
            yield self._fetch(lambda: next(batches))

    def _fetch(self, next_batch: Callable[[], Any], *, is_counted: bool = False) -> Any:
        self._is_fetching = True
        try:
            wait_began = time.perf_counter()
            batch = next_batch()
            self.seconds += time.perf_counter() - wait_began
            self._num_batches += 1
            num_windows, rest = divmod(self._num_batches, self._accumulation_steps)
            if rest == 0 and num_windows <= NUM_WORST_STEPS:
                worst = self._training.worst_batch()
                batch = batch if worst is None else worst
        finally:
            self._is_fetching = False
        num_samples = None if is_counted else data.num_samples(batch, self._batch_size)
        # A larger number counts something other than samples, such as the nodes of graphs.
        num_counted = self._batch_size if num_samples is None else min(num_samples, self._batch_size)
        self._ahead.append((num_counted, count_tokens(batch)))
        self.largest = max(self.largest, num_counted)
        return batch

    def pop_counts(self, num_batches: int) -> list[tuple[int, TokenCount | None]]:
        """Return the samples and tokens of each of the next `num_batches` fetched batches, and remove these from the
        queue.
        """
        return [self._ahead.popleft() if self._ahead else (self._batch_size, None) for _ in range(num_batches)]


class _StepStart(NamedTuple):
    """State of the loop at the start of a group of steps: the time, totals so far, and the loss scale."""

    seconds: float
    data_seconds: float
    num_compilations: int
    scale: float | None


class _StepGroup(NamedTuple):
    """Steps that were timed together."""

    num_steps: int
    before: _StepStart
    after: _StepStart
    num_samples: int
    num_skips: int
    tokens: tuple[TokenCount | None, ...]  # of each batch

    @property
    def step_seconds(self) -> float:
        return (self.after.seconds - self.before.seconds) / self.num_steps

    @property
    def data_seconds(self) -> float:
        return self.after.data_seconds - self.before.data_seconds

    @property
    def has_compiled(self) -> bool:
        return self.after.num_compilations > self.before.num_compilations


class _OwnLoopTimer:
    """Callback after each optimizer step of the loop: it times the steps, and ends the loop when they suffice."""

    def __init__(
        self, training: Training, supply: _BatchSupply, report: StepCallback, count_compilations: Callable[[], int]
    ) -> None:
        self._training, self._supply, self._report = training, supply, report
        self._count_compilations = count_compilations
        # Steps on batches that workers loaded during the slow first steps do not wait for data.
        num_ahead = math.ceil(training.num_loaded_ahead / training.spec.candidate.accumulation_steps)
        self._num_warmup = max(training.spec.num_warmup_steps[0], NUM_WORST_STEPS + 1) + num_ahead
        self._num_steps = self._num_together = 0
        self._counts: list[tuple[int, TokenCount | None]] = []  # of the batches since the last group of steps
        self._began = self._before = self._step_start()
        self._first_step_seconds = 0.0
        self._warm_up: list[_StepGroup] = []  # without the first steps, which may be on the worst batch
        self._is_warm = False
        self._compiled: list[_StepGroup] = []
        self._groups: list[_StepGroup] = []
        self._loss = math.nan
        self._losses: list[StepLosses] = []

    def __call__(self, loss: Any, num_batches: int) -> None:
        spec = self._training.spec
        self._counts += self._supply.pop_counts(num_batches)
        self._num_steps += 1
        self._num_together += 1
        self._training.num_steps_taken += 1
        is_least_warmup = self._num_steps <= self._num_warmup
        if not is_least_warmup and self._num_together < spec.num_steps_per_report:
            return
        synchronize(self._training.device)
        num_skips = num_backoffs(self._training, self._before.scale)
        num_samples, tokens = sum(num for num, _ in self._counts), tuple(counted for _, counted in self._counts)
        group = _StepGroup(self._num_together, self._before, self._step_start(), num_samples, num_skips, tokens)
        self._raise_if_losses_fail(loss, group)
        if not self._is_warm:
            self._first_step_seconds = self._first_step_seconds or group.step_seconds
            self._warm_up += [group] if self._num_steps > NUM_WORST_STEPS else []
            self._is_warm = self._num_steps >= self._num_warmup and not self._should_continue_warmup()
            self._losses = [] if self._is_warm else self._losses
            self._report(0, group.step_seconds)
        elif group.has_compiled and sum(compiled.num_steps for compiled in self._compiled) < MAX_COMPILING_STEPS:
            self._compiled.append(group)
            self._report(len(self._groups) * spec.num_steps_per_report, group.step_seconds)
        else:
            self._groups.append(group)
            self._report(len(self._groups) * spec.num_steps_per_report, group.step_seconds)
            self._end_if_enough()
        self._num_together, self._counts = 0, []
        self._before = self._step_start()

    def timing(self) -> Timing:
        """Return the timing of the measured steps. Raises the errors of `time_own_loop`."""
        raise_if_steps_failed(self._losses)
        spec = self._training.spec
        round_size = groups_per_loader_round(self._training)
        groups = self._groups[: len(self._groups) // round_size * round_size] or self._groups
        if not groups:
            raise WorkloadError(
                f"{self._training.workload.trainer} ended its training after {self._num_steps} steps, before any was "
                "measured.",
                "Give it more data, or remove the callback that ends it.",
            )
        if 0 < self._supply.largest < spec.candidate.batch_size:
            raise WorkloadError(
                f"The loader of {self._training.workload.trainer} returned batches of {self._supply.largest} samples, "
                f"not of {spec.candidate.batch_size}.",
                "Set its batch size from the framework's own argument.",
            )
        num_skips = sum(group.num_skips for group in groups)
        num_steps = sum(group.num_steps for group in groups)
        num_samples = sum(group.num_samples for group in groups)
        mean_share_of_batch = num_samples / (num_steps * spec.candidate.effective_batch_size)
        return Timing(
            first_step_seconds=self._first_step_seconds,
            raw_step_seconds=tuple(group.step_seconds / mean_share_of_batch for group in groups),
            num_steps_together=spec.num_steps_per_report,
            data_seconds=sum(group.data_seconds for group in groups) / num_steps / mean_share_of_batch,
            update_seconds=None,
            num_skips=num_skips,
            last_loss=self._loss,
            was_cut=False,
            num_compiling_steps=sum(group.num_steps for group in self._compiled),
            is_own_loop=True,
            **token_fields([counted for group in groups for counted in group.tokens], num_steps * mean_share_of_batch),
        )

    def _step_start(self) -> _StepStart:
        return _StepStart(
            time.perf_counter(),
            self._supply.seconds,
            self._count_compilations(),
            self._training.loss_scale(),
        )

    def _should_continue_warmup(self) -> bool:
        return should_continue_warmup(
            [group.step_seconds for group in self._warm_up],
            num_steps=self._num_steps,
            warming_seconds=sum(group.step_seconds * group.num_steps for group in self._warm_up),
            limits=self._training.spec.num_warmup_steps,
        )

    def _end_if_enough(self) -> None:
        spec, now = self._training.spec, time.perf_counter()
        min_groups, max_groups = (math.ceil(num / spec.num_steps_per_report) for num in spec.num_steps)
        spent_compiling = sum(group.step_seconds * group.num_steps for group in self._compiled)
        reason = stop_reason(
            spec,
            [group.step_seconds for group in self._groups],
            is_whole=len(self._groups) >= min_groups,
            is_most=len(self._groups) >= max_groups,
            measure_seconds=math.inf if spec.measure_seconds is None else spec.measure_seconds,
            measuring_seconds=now - self._groups[0].before.seconds - spent_compiling,
            training_seconds=now - self._began.seconds,
            num_steps=sum(group.num_steps for group in self._groups),
        )
        if reason is not None:
            raise _MeasuredEnoughError

    def _raise_if_losses_fail(self, loss: Any, group: _StepGroup) -> None:
        """Raise `RunFailedError` if the losses show a failure. Of steps timed together only the last loss is read."""
        losses: tuple[float, ...] = ()
        if isinstance(loss, torch.Tensor):
            self._loss = float(loss.detach())
            losses = (self._loss,)
        self._losses += step_losses([()] * (group.num_steps - 1) + [losses], group.num_skips)
        raise_if_steps_failed(self._losses[-MAX_SKIPS:], goes_on=True)
