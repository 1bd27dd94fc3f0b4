"""Result of an observed run of a command: the measurement of its setting, or a description of the command. Pure."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean

from autotune_amp.command.messages import Loader
from autotune_amp.command.rank_steps import Interval, Rank
from autotune_amp.command.ranks import RunEvents
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.processes.ranks import failure_of_rank
from autotune_amp.trial.jobs import MAX_FALLING_SECONDS, NUM_WARMUP_STEPS, Trial, stop
from autotune_amp.trial.judge import RunEvidence, judge

MIN_NUM_INTERVALS = 2
MAX_RARE = 0.1  # share of a run's steps
_LOW: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}
FULL: frozenset[str] = frozenset({"fp32", "tf32"})  # no autocast region shows TF32


def slowest(events: RunEvents) -> tuple[Rank, list[Interval]] | None:
    """Return the rank whose steps take longest and its intervals; None before every rank has `MIN_NUM_INTERVALS`."""
    found = [(rank, list(rank.intervals())) for rank in events.ranks.values()]
    if not events.has_all_ranks or not found or min(len(intervals) for _, intervals in found) < MIN_NUM_INTERVALS:
        return None
    return max(found, key=lambda pair: fmean(one.step_seconds for one in pair[1]))


def is_enough(events: RunEvents, trial: Trial, began: float) -> bool:
    """Whether the steps of the run are measured as well as the trial asks for, or are far too slow."""
    found = slowest(events)
    if found is None:
        return False
    rank, intervals = found
    low, high = trial.num_steps
    num_steps = sum(one.num_steps for one in intervals)
    measuring_seconds = sum(one.step_seconds * one.num_steps for one in intervals)
    why = stop(
        trial,
        [one.step_seconds for one in intervals],
        is_whole=num_steps >= low,
        is_most=num_steps >= high,
        measure_seconds=trial.measure_seconds or float("inf"),
        measuring_seconds=measuring_seconds,
        training_seconds=rank.steps[-1].time - began,
    )
    return why is not None


def foreseen_seconds(events: RunEvents, began: float) -> float | None:
    """Return the predicted seconds from `began` until the run has the least number of intervals to measure; None until
    every rank has taken two steps.
    """
    found = [
        (rank.primary_steps[0].time - began, rank.step_seconds) for rank in events.ranks.values() if rank.primary_steps
    ]
    steps = [seconds for _, seconds in found if seconds is not None]
    if not events.has_all_ranks or len(steps) < len(found) or not steps:
        return None
    num_warmup = 2 if max(steps) >= MAX_FALLING_SECONDS else NUM_WARMUP_STEPS
    return max(first for first, _ in found) + (num_warmup - 1 + MIN_NUM_INTERVALS) * max(steps)


def measurement(events: RunEvents, trial: Trial, began: float, memory_bytes: int) -> Measurement | Failure:
    """Return the measurement of a run, or the `Failure` that `judge` finds in the losses or the memory of a rank.

    The rate is the samples of all ranks by the time of the slowest. Memory is that of all ranks together on a CPU, and
    of the largest rank on an accelerator; `memory_bytes` of all processes, which counts against a CPU's limit, is
    reported if it is larger.
    """
    found = slowest(events)
    if found is None:
        return Failure(kind="workload_error", message="too few optimizer steps were seen to measure it")
    rank, intervals = found
    rate = events.samples_per_second()
    assert rate is not None
    raw = tuple(one.step_seconds for one in intervals)
    step_seconds = fmean(raw)
    low, high = trimmed_interval(raw)
    peaks = [each.peak_memory_bytes or 0 for each in events.ranks.values()]
    reserved = [each.reserved_memory_bytes for each in events.ranks.values() if each.reserved_memory_bytes is not None]
    losses = [float(loss) for step in rank.steps for loss in step.losses]
    reserved_bytes = max(reserved) if reserved else max(memory_bytes, sum(peaks))
    # On a CPU the memory limit was already applied to the processes of the run while it went on.
    limit_bytes = None if trial.device == "cpu" else trial.memory_limit_bytes
    if failure := judge(RunEvidence(memory_bytes=reserved_bytes, memory_limit_bytes=limit_bytes)):
        return failure
    for each in events.ranks.values():
        for steps in each.warm_losses:
            if failure := judge(RunEvidence(steps=steps)):
                return failure_of_rank(failure, each.rank, each.world)
    first = rank.primary_steps[0].time - began
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_interval=(min(low, step_seconds), max(high, step_seconds)),
        samples_per_second=rate,
        data_seconds=fmean(one.wait_seconds / one.num_steps for one in intervals),
        peak_memory_bytes=max(peaks) if reserved else sum(peaks),
        reserved_memory_bytes=reserved_bytes,
        raw_step_seconds=raw,
        num_steps_together=max(one.num_steps for one in intervals),
        build_seconds=first,
        context_seconds=0.0,
        first_step_seconds=first,
        num_skips=sum(one.num_skips for one in intervals),
        last_loss=losses[-1] if losses and math.isfinite(losses[-1]) else None,
        was_cut=trial.cut_step_seconds is not None and step_seconds > trial.cut_step_seconds,
        num_compiling_steps=rank.num_compiling_steps,
        num_steps_taken=len(rank.primary_steps),
    )


def description(rank: Rank, name: str, today: Setting, began: float) -> Description:
    """Return the description of a command from the rank that was observed when it ran with its setting of `today`."""
    loader = training_loader(rank)
    num_by_dtype = _num_parameters(rank)
    weights, has_frozen_low = _most(num_by_dtype), any(dtype in _LOW for dtype in _num_frozen(rank))
    return Description(
        name=name,
        batch_size=today.batch_size,
        num_samples=None if loader is None else loader.num_samples,
        data="no DataLoader was seen" if loader is None else f"DataLoader at {loader.line or loader.maker}",
        num_parameters=sum(num_by_dtype.values()),
        num_trainable_parameters=sum(num_by_dtype.values()),
        weights="frozen_low" if weights == "fp32" and has_frozen_low else weights,  # type: ignore[arg-type]
        as_found_precision=today.precision,
        is_as_found_strict=True,
        build_seconds=rank.primary_steps[0].time - began,
        context_seconds=0.0,
        accumulation_steps=today.accumulation_steps,
        weighs_passes=True,
        num_ranks=rank.world,
    )


def training_loader(rank: Rank) -> Loader | None:
    """Return the loader that training fetches from; of several, the one with the largest dataset. None if there is
    none.
    """
    loaders = [rank.loaders[index] for index in rank.training_loaders if index in rank.loaders]
    return max(loaders, key=lambda each: each.num_samples or 0, default=None)


def samples_per_step(rank: Rank) -> float | None:
    """Return the number of samples in an optimizer step of one rank: that of most steps, since the last batch of an
    epoch is smaller, else the mean. None if too few steps were seen.
    """
    intervals = list(rank.intervals())
    return _usual([(one.num_samples, one.num_steps) for one in intervals])


def batch_sizes(rank: Rank) -> frozenset[float]:
    """Return the sizes that count as the batch size, in samples on one rank: that of the batches from the loaders, and
    that of the model's inputs, which is smaller if the script divides its batches. Empty if nothing was seen.
    """
    intervals = [one for one in rank.intervals() if one.num_batches]
    handed_out = _usual([(one.num_samples, one.num_batches) for one in intervals])
    return frozenset(size for size in (handed_out, rank.entered_batches.batch_size if rank.steps else None) if size)


def batch_size(rank: Rank) -> int:
    """Return the batch size of the rank's training loader; without a loader, that of the inputs of its model."""
    loader = training_loader(rank)
    return (loader and loader.batch_size) or round(min(batch_sizes(rank), default=1)) or 1


def passes_per_step(rank: Rank) -> tuple[float, float] | None:
    """Return the least and the largest number of batches in an optimizer step, without steps whose number is rare, as
    at the end of an epoch. None if too few steps were seen.
    """
    nums = [one.num_batches / one.num_steps for one in rank.intervals() if one.num_batches]
    counted = Counter(nums)
    usual = [num for num in nums if counted[num] > max(1, MAX_RARE * len(nums))] or nums
    return (min(usual), max(usual)) if usual else None


def _usual(amounts: list[tuple[float, float]]) -> float | None:
    """Return the quotient of most of the pairs, else the quotient of their sums; None without pairs."""
    if not amounts:
        return None
    usual, num = Counter(a / b for a, b in amounts).most_common(1)[0]
    return usual if 2 * num >= len(amounts) else sum(a for a, _ in amounts) / sum(b for _, b in amounts)


def autocast_precision(rank: Rank) -> Precision:
    """Return the compute type of the steps as set by autocast or by FSDP's mixed precision: "fp32" or "tf32" if neither
    lowered anything, whatever the dtype of the weights.
    """
    devices = {device.partition(":")[0] for optimizer in rank.optimizers.values() for device in optimizer.devices}
    regions = [region.partition(":") for step in rank.steps for region in step.regions]
    low = Counter(_LOW[dtype] for device, _, dtype in regions if device in devices and dtype in _LOW)
    if low:
        return max(low, key=lambda precision: low[precision])
    used = _used(rank)
    if used and max(used, key=lambda dtype: used[dtype]) not in _num_parameters(rank) + _num_frozen(rank):
        return _most(used)  # no weight is kept in this dtype: FSDP casts them
    return "tf32" if any(optimizer.uses_tf32 for optimizer in rank.optimizers.values()) else "fp32"


def weights_of(rank: Rank) -> Precision | None:
    """Return the precision in which most weights of the modules are used; None if nothing of that was seen, as when
    everything was compiled without an autocast region.
    """
    used = _used(rank)
    is_compiled = any(step.num_compilations for step in rank.steps)
    if not used and is_compiled and not any(step.regions for step in rank.steps):
        return None
    return _most(used or _num_parameters(rank))


def precision_of(rank: Rank) -> Precision | None:
    """Return the precision of the steps: that of autocast, else that in which the weights are used; None if neither was
    seen.
    """
    precision, weights = autocast_precision(rank), weights_of(rank)
    if precision not in FULL or weights is None:
        return None if precision in FULL else precision
    return precision if weights in FULL else weights


def todays_precision(rank: Rank) -> Precision:
    """Return the precision of an unchanged training run: that of autocast, whatever dtype the weights are loaded in,
    unless an argument of the framework sets that dtype, such as Lightning's ``bf16-true`` or DeepSpeed's.
    """
    seen = precision_of(rank)
    stated = [switch.today.get("precision", seen) for switch in rank.switches if "precision" in switch.arguments]
    return seen if seen is not None and seen in stated else autocast_precision(rank)


def _num_parameters(rank: Rank) -> Counter[str]:
    """Count the parameters of all its optimizers, by dtype."""
    return sum((Counter(optimizer.num_parameters) for optimizer in rank.optimizers.values()), Counter())


def _used(rank: Rank) -> Counter[str]:
    """Return how many forward passes of modules used weights of each dtype."""
    return Counter(dtype for step in rank.steps for _, _, dtype in step.forwards)


def _num_frozen(rank: Rank) -> Counter[str]:
    """Count the parameters that its modules keep as they are, by dtype."""
    return sum((Counter(optimizer.num_frozen) for optimizer in rank.optimizers.values()), Counter())


def _most(num_by_dtype: Counter[str]) -> Precision:
    """Return the precision of the most frequent dtype."""
    return _LOW.get(max(num_by_dtype, key=lambda dtype: num_by_dtype[dtype]), "fp32")
