"""Timing of optimizer steps: warm up, take a step on the worst batch, and measure until the interval is narrow.

Steps in which torch.compile compiles are not measured.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.utils import counters

from autotune_amp.command.agent.tokens import TokenCount, count_tokens
from autotune_amp.core.errors import WorkloadError
from autotune_amp.hardware.measuring import synchronize
from autotune_amp.trial.failures import raise_if_steps_failed
from autotune_amp.trial.jobs import is_hopeless, should_continue_warmup, stop_reason
from autotune_amp.trial.judge import MAX_SKIPS, StepLosses
from autotune_amp.trial.training import BaseTraining


class CompileWatch:
    """Context that counts compilations, including deferred backward passes and CUDA graph recordings, and graph breaks.

    `on_start` is called at the beginning of each compilation, in the thread that compiles.
    """

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._on_start = on_start
        self._num_compilations = 0

    def __enter__(self) -> CompileWatch:
        self._num_breaks_before = _num_graph_breaks()
        callback_handler.register_start_callback(self._count_compilation)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ValueError):  # the user's code called torch.compiler.reset(), which clears them
            callback_handler.remove_start_callback(self._count_compilation)

    def count(self) -> int:
        """Return the number of compilations so far."""
        return self._num_compilations

    def num_graph_breaks(self) -> int:
        """Return the number of graph breaks so far."""
        return _num_graph_breaks() - self._num_breaks_before

    def _count_compilation(self, _: CallbackArgs) -> None:
        self._num_compilations += 1
        self._on_start()


def _num_graph_breaks() -> int:
    return sum(counters["graph_break"].values())


def forget_compiled() -> None:
    """Drop compiled code in this process; the compiler's cache on disk stays.

    After several batch sizes in one process torch would compile for dynamic shapes, which run slower, and finally stop
    compiling.
    """
    if input_codes.seen:  # without compiled code a reset only imports the compiler, which takes seconds on CUDA
        torch.compiler.reset()


SHORT_WAIT = 0.1  # share of a step; a shorter wait for data does not change how a step is measured
MIN_LOADER_ROUNDS = 2  # if steps wait for data, measure at least so many rounds (`groups_per_loader_round`)
# A step in which torch.compile compiled is repeated; dynamo gives up on a function after eight shapes.
MAX_COMPILING_STEPS = 20

StepCallback = Callable[[int, float], None]  # called with the number of measured steps and seconds per step
PhaseCallback = Callable[[str], None]  # called with the name of a phase


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of optimizer steps. `raw_step_seconds` holds the mean of each `num_steps_together` steps.

    `data_seconds` is the part of a mean step spent waiting for a batch. `update_seconds` is the optimizer's part, None
    if timing it would take a synchronization. `was_cut`: the trial was ended as too slow. `is_own_loop`: the steps are
    those of the workload's `fit`. `tokens_per_step` are the real tokens of a mean step, and `padded_share` the share of
    padding in its positions; None without token ids.
    """

    first_step_seconds: float
    raw_step_seconds: tuple[float, ...]
    num_steps_together: int
    data_seconds: float
    update_seconds: float | None
    num_skips: int = 0
    last_loss: float
    was_cut: bool
    num_compiling_steps: int = 0
    is_own_loop: bool = False
    tokens_per_step: float | None = None
    padded_share: float | None = None


def time_steps(
    training: BaseTraining,
    report: StepCallback,
    start_phase: PhaseCallback,
    count_compilations: Callable[[], int] = lambda: 0,
) -> Timing:
    """Warm up and measure as `training.spec` says, and return the timing. `report(number, seconds)` is called for every
    step.

    If there is a worst batch, the first step is taken on it, and one after the warm-up, since only then the optimizer
    holds its state; in a confirmation also the last step. `start_phase` is called before steps without a deadline. A
    step in which `count_compilations` rose is repeated, at most `MAX_COMPILING_STEPS` times. Raises `RunFailedError` if
    losses are not finite or the loss scaler skips every step, as `failure_from_steps` decides.
    """
    spec = training.spec
    timer = _StepTimer(training, count_compilations)
    training_began = time.perf_counter()
    training.start_loading()
    worst = training.worst_batch()
    has_worst = worst is not None
    first_step_seconds = time.perf_counter() - training_began + timer.time(1, worst).seconds
    del worst  # it may be large
    report(0, first_step_seconds)
    warm_up = _warm_up(training, timer, report)
    if is_hopeless(spec, [step.seconds for step in warm_up]):
        return timer.result(first_step_seconds, warm_up, was_cut=True)
    if has_worst:
        report(0, _step_on_worst(training, timer, start_phase))
    _drop_loaded_ahead(training, timer, report)
    timer.compiling_seconds = 0.0
    measuring_began = time.perf_counter()
    timer.forget_steps()
    groups: list[_TimedSteps] = []
    reason = None
    round_size = groups_per_loader_round(training)
    min_groups, max_groups = (
        math.ceil(num_steps / spec.num_steps_per_report / round_size) * round_size for num_steps in spec.num_steps
    )
    max_groups = max(max_groups, MIN_LOADER_ROUNDS * round_size) if round_size > 1 else max_groups
    limit_seconds = math.inf if spec.measure_seconds is None else spec.measure_seconds
    while reason is None:
        groups.append(timer.time_compiled(spec.num_steps_per_report))
        report(len(groups) * spec.num_steps_per_report, groups[-1].seconds)
        now = time.perf_counter()
        num_needed_groups = round_size * (MIN_LOADER_ROUNDS if round_size > 1 and _is_waiting_for_data(groups) else 1)
        reason = stop_reason(
            spec,
            [group.seconds for group in groups],
            is_whole=len(groups) >= max(min_groups, num_needed_groups) and len(groups) % round_size == 0,
            is_most=len(groups) >= max_groups,
            measure_seconds=limit_seconds * (num_needed_groups / round_size if len(groups) < num_needed_groups else 1),
            measuring_seconds=now - measuring_began - timer.compiling_seconds,
            training_seconds=now - training_began,
            num_steps=len(groups) * spec.num_steps_per_report,
        )
    num_kept = len(groups) // round_size * round_size or len(groups)
    groups = groups[:num_kept]
    seconds_without_wait = None
    if training.device.type != "cpu" and reason != "cut" and _is_waiting_for_data(groups):
        seconds_without_wait = timer.time(spec.num_steps_per_report, repeated_batch=training.next_batch()).seconds
        report(0, seconds_without_wait)
    if has_worst and spec.is_confirmation:
        _step_on_worst(training, timer, start_phase)
    return timer.result(first_step_seconds, groups, was_cut=reason == "cut", seconds_without_wait=seconds_without_wait)


def groups_per_loader_round(training: BaseTraining) -> int:
    """Return the least number of timed groups of steps, called a round, that take equally many batches from each loader
    worker.

    Workers that start together deliver at the same time, and then one step waits for all of them. Only whole rounds
    contain such steps in their true proportion.
    """
    num_batches = training.spec.num_timed_micro_batches * training.spec.num_steps_per_report
    num_workers = training.num_loader_workers or 1
    return num_workers // math.gcd(num_workers, num_batches)


def _is_waiting_for_data(groups: list[_TimedSteps]) -> bool:
    return sum(group.data_seconds for group in groups) > SHORT_WAIT * sum(group.seconds for group in groups)


def _drop_loaded_ahead(training: BaseTraining, timer: _StepTimer, report: StepCallback) -> None:
    """Drop batches that workers prefetched during the slow first steps, then take a step, which waits for new ones.

    Steps on prefetched batches do not wait, even if the loader is slower than the training.
    """
    began = time.perf_counter()
    for _ in range(training.num_loaded_ahead):
        wait_began = time.perf_counter()
        training.next_batch()
        report(0, time.perf_counter() - wait_began)
        if time.perf_counter() - began > (training.spec.measure_seconds or math.inf):
            break
    if training.num_loaded_ahead:
        report(0, timer.time_compiled(1).seconds)


def _step_on_worst(training: BaseTraining, timer: _StepTimer, start_phase: PhaseCallback) -> float:
    start_phase("taking a step on the worst batch")
    return timer.time(1, training.worst_batch()).seconds


def _warm_up(training: BaseTraining, timer: _StepTimer, report: StepCallback) -> list[_TimedSteps]:
    """Time the warm-up steps after the first, and return them.

    Take single steps until a loop has taken its first optimizer step and fp16's loss scale stops falling, then groups
    of steps until their times stop falling.
    """
    spec, began = training.spec, time.perf_counter()
    num_least = spec.num_warmup_steps[0]
    steps: list[_TimedSteps] = []
    while True:
        steps.append(timer.time_compiled(1))
        report(0, steps[-1].seconds)
        num_done = 1 + len(steps)
        if num_done >= num_least and not steps[-1].num_skips and training.has_stepped:
            break
        if num_done >= num_least + MAX_SKIPS:
            raise_if_no_optimizer_step(training, num_done)
    seconds = [step.seconds for step in steps]
    while not is_hopeless(spec, seconds) and should_continue_warmup(
        seconds,
        num_steps=1 + sum(step.num_steps for step in steps),
        warming_seconds=time.perf_counter() - began - timer.compiling_seconds,
        limits=spec.num_warmup_steps,
    ):
        steps.append(timer.time_compiled(spec.num_steps_per_report))
        seconds.append(steps[-1].seconds)
        report(0, seconds[-1])
    return steps


def raise_if_no_optimizer_step(training: BaseTraining, num_calls: int) -> None:
    """Raise `WorkloadError` if `num_calls` calls of the workload's loop took no optimizer step."""
    if not training.has_stepped:
        raise WorkloadError(
            f"{num_calls} calls of train_step took no optimizer step.",
            "Have train_step call the optimizer's step, through `amp`, at least once in so many calls.",
        )


def num_backoffs(training: BaseTraining, scale_before: float | None) -> int:
    """Return the number of steps that the loss scaler skipped since its scale was `scale_before`."""
    scale = training.loss_scale()
    if scale_before is None or scale is None or training.scaler is None or not 0 < scale < scale_before:
        return 0
    return round(math.log(scale / scale_before) / math.log(training.scaler.get_backoff_factor()))


def token_fields(counts: Sequence[TokenCount | None], num_steps: float) -> dict[str, Any]:
    """Return the fields of a `Timing` for tokens in batches of `num_steps` optimizer steps; none without token ids."""
    total = TokenCount(0, 0)
    for counted in counts:
        total = total if counted is None else total.plus(counted)
    num_tokens, num_positions = total.read()
    if not num_tokens:
        return {}
    return {"tokens_per_step": num_tokens / num_steps, "padded_share": 1 - num_tokens / num_positions}


class _TimedSteps(NamedTuple):
    """Steps timed together: mean seconds of a step, of its wait for data and of its update, the number of steps that
    the loss scaler skipped, and the tokens of each batch.
    """

    num_steps: int
    seconds: float
    data_seconds: float
    update_seconds: float
    num_skips: int
    tokens: tuple[TokenCount | None, ...]


class _StepTimer:
    """Timer of optimizer steps. Of a long accumulation window it takes a few micro-batches and scales their time up."""

    def __init__(self, training: BaseTraining, count_compilations: Callable[[], int]) -> None:
        self._training = training
        self._count_compilations = count_compilations
        self.num_compiling_steps, self.compiling_seconds = 0, 0.0
        self._num_micro = training.spec.num_timed_micro_batches
        self._repeats = training.spec.candidate.accumulation_steps / self._num_micro
        self._is_split = self._repeats > 1 or training.device.type == "cpu"
        # If several ranks train together, only the last pass of a window exchanges gradients.
        self._is_last_apart = self._repeats > 1 and training.spec.num_ranks > 1
        self.last_loss = math.nan
        self._steps: list[StepLosses] = []

    def forget_steps(self) -> None:
        """Forget the losses of earlier steps, so that only later steps are judged."""
        self._steps = []

    def result(
        self,
        first_step_seconds: float,
        groups: list[_TimedSteps],
        *,
        seconds_without_wait: float | None = None,
        was_cut: bool,
    ) -> Timing:
        """Return the timing of `groups`. `seconds_without_wait` are those of a step that does not wait for data, None
        if not measured.

        Raises `RunFailedError` if the losses of the steps show a failure.
        """
        raise_if_steps_failed(self._steps)
        data_seconds = _mean(groups, "data_seconds")
        if seconds_without_wait is not None:  # the device computes while the host waits
            data_seconds = min(data_seconds, max(0.0, _mean(groups, "seconds") - seconds_without_wait))
        has_update_seconds = self._is_split and self._training.is_update_apart
        return Timing(
            first_step_seconds=first_step_seconds,
            raw_step_seconds=tuple(group.seconds for group in groups),
            num_steps_together=groups[0].num_steps,
            data_seconds=data_seconds,
            update_seconds=_mean(groups, "update_seconds") if has_update_seconds else None,
            num_skips=sum(group.num_skips for group in groups),
            last_loss=self.last_loss,
            num_compiling_steps=self.num_compiling_steps,
            was_cut=was_cut,
            **token_fields(
                [counted for group in groups for counted in group.tokens],
                sum(group.num_steps for group in groups) / self._repeats,
            ),
        )

    def time_compiled(self, num_steps: int) -> _TimedSteps:
        """Time steps, repeating them while something was compiled, at most `MAX_COMPILING_STEPS` times."""
        while True:
            num_compilations, began = self._count_compilations(), time.perf_counter()
            timed = self.time(num_steps)
            if self._count_compilations() == num_compilations or self.num_compiling_steps >= MAX_COMPILING_STEPS:
                return timed
            self.num_compiling_steps += num_steps
            self.compiling_seconds += time.perf_counter() - began

    def time(self, num_steps: int, worst_batch: Any = None, repeated_batch: Any = None) -> _TimedSteps:
        """Time `num_steps` optimizer steps between two synchronizations.

        Batches come from the loader, unless given: `worst_batch` is the last micro-batch of each step, when gradients
        exist already, and `repeated_batch` is every other one.
        """
        training = self._training
        scale = training.loss_scale()
        synchronize(training.device)
        data_seconds = micro_seconds = last_seconds = update_seconds = 0.0
        losses, tokens = [], []
        last = time.perf_counter()
        for _ in range(num_steps):
            for number in range(self._num_micro):
                is_worst = number == self._num_micro - 1 and worst_batch is not None
                batch = worst_batch if is_worst else repeated_batch
                if batch is None:
                    wait_began = time.perf_counter()
                    batch = training.next_batch()
                    data_seconds += time.perf_counter() - wait_began
                if self._is_last_apart and number == self._num_micro - 1:
                    synchronize(training.device)
                    micro_seconds, last = micro_seconds + time.perf_counter() - last, time.perf_counter()
                tokens.append(count_tokens(batch))  # before the pass, in which the user's code may change the batch
                losses.append(training.forward_backward(batch, is_last=number == self._num_micro - 1))
                del batch
            if self._is_split:
                synchronize(training.device)
                last_seconds, last = last_seconds + time.perf_counter() - last, time.perf_counter()
            training.update()
            training.num_steps_taken += 1
            if self._is_split:
                synchronize(training.device)
                update_seconds, last = update_seconds + time.perf_counter() - last, time.perf_counter()
        synchronize(training.device)
        update_seconds += time.perf_counter() - last
        num_skips = num_backoffs(training, scale)
        values = torch.stack([loss.float() for loss in losses]).tolist()
        self.last_loss = values[-1]
        micro = self._num_micro
        losses_of_steps = [tuple(values[start : start + micro]) for start in range(0, len(values), micro)]
        self._steps += step_losses(losses_of_steps, num_skips)
        raise_if_steps_failed(self._steps[-MAX_SKIPS:], goes_on=True)
        window = self._training.spec.candidate.accumulation_steps
        if self._is_last_apart:
            window_seconds = micro_seconds * (window - 1) / (self._num_micro - 1) + last_seconds
        else:
            window_seconds = last_seconds * self._repeats
        return _TimedSteps(
            num_steps,
            (window_seconds + update_seconds) / num_steps,
            data_seconds * self._repeats / num_steps,
            update_seconds / num_steps,
            num_skips,
            tuple(tokens),
        )


def step_losses(losses: Sequence[tuple[float, ...]], num_skips: int) -> list[StepLosses]:
    """Return the `StepLosses` of steps with these `losses`, `num_skips` of which the loss scaler skipped.

    Which steps it skipped is not recorded: those whose losses are not finite are assumed first.
    """
    order = sorted(range(len(losses)), key=lambda number: all(map(math.isfinite, losses[number])))
    skipped = order[:num_skips]
    return [
        StepLosses(losses=losses_of_step, is_skipped=number in skipped) for number, losses_of_step in enumerate(losses)
    ]


def _mean(groups: list[_TimedSteps], field: str) -> float:
    total: float = sum(getattr(group, field) * group.num_steps for group in groups)
    return total / sum(group.num_steps for group in groups)
