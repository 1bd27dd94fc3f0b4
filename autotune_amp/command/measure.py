"""Functions that derive a measurement, a description or a setting from the observed steps of a command. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from autotune_amp.command.messages import Loader, Step
from autotune_amp.command.rank_steps import Interval, Rank
from autotune_amp.command.ranks import RunEvents
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.outcome import CountedFlops, Description, Failure, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.processes.ranks import failure_of_rank
from autotune_amp.trial.jobs import MAX_FALLING_SECONDS, NUM_WARMUP_STEPS, Trial, stop_reason
from autotune_amp.trial.judge import failure_from_memory, failure_from_steps

NUM_FIRST_STEPS = 8  # steps whose losses and tokens are kept: small differences grow from step to step
MIN_NUM_INTERVALS = 2  # the least from which an interval of the step time can be given
MAX_RARE_SHARE = 0.1  # numbers of batches in at most this share of the steps are ignored
_PRECISION_BY_DTYPE: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}
FULL_PRECISIONS: frozenset[str] = frozenset({"fp32", "tf32"})  # not distinguished by autocast regions


def slowest_rank(events: RunEvents) -> tuple[Rank, list[Interval]] | None:
    """Return the rank with the longest mean step time and its intervals; None before every rank has
    `MIN_NUM_INTERVALS`.
    """
    intervals_by_rank = [(rank, list(rank.intervals())) for rank in events.ranks.values()]
    least = min((len(intervals) for _, intervals in intervals_by_rank), default=0)
    if not events.has_all_ranks or least < MIN_NUM_INTERVALS:
        return None
    return max(intervals_by_rank, key=lambda pair: _mean_step_seconds(pair[1]))


def _mean_step_seconds(intervals: Sequence[Interval]) -> float:
    """Return the mean duration of the steps in the intervals, which hold different numbers of steps."""
    seconds = sum(interval.step_seconds * interval.num_steps for interval in intervals)
    return seconds / sum(interval.num_steps for interval in intervals)


def is_enough(events: RunEvents, trial: Trial, began: float) -> bool:
    """Whether the run can be ended: its steps are measured as precisely as the trial requires, or are far too slow."""
    slowest = slowest_rank(events)
    if slowest is None:
        return False
    rank, intervals = slowest
    low, high = trial.num_steps
    num_steps = sum(interval.num_steps for interval in intervals)
    measuring_seconds = sum(interval.step_seconds * interval.num_steps for interval in intervals)
    reason = stop_reason(
        trial,
        [interval.step_seconds for interval in intervals],
        is_whole=num_steps >= low,
        is_most=num_steps >= high,
        measure_seconds=trial.measure_seconds or float("inf"),
        measuring_seconds=measuring_seconds,
        training_seconds=rank.steps[-1].time - began,
        num_steps=num_steps,  # the first ones are reported one by one, whatever the device
    )
    return reason is not None


def predicted_measurement_seconds(events: RunEvents, began: float) -> float | None:
    """Return the predicted seconds from `began` until every rank has `MIN_NUM_INTERVALS` intervals; None until every
    rank has taken two steps.
    """
    times = [
        (rank.primary_steps[0].time - began, rank.step_seconds) for rank in events.ranks.values() if rank.primary_steps
    ]
    steps = [seconds for _, seconds in times if seconds is not None]
    if not events.has_all_ranks or len(steps) < len(times) or not steps:
        return None
    num_warmup = 2 if max(steps) >= MAX_FALLING_SECONDS else NUM_WARMUP_STEPS
    return max(first for first, _ in times) + (num_warmup - 1 + MIN_NUM_INTERVALS) * max(steps)


def measurement(events: RunEvents, trial: Trial, began: float, memory_bytes: int) -> Measurement | Failure:
    """Return the measurement of a run, or the `Failure` that shows in the losses or the memory of a rank.

    Samples and tokens per second are those of all ranks, in the step time of the slowest. Memory is that of the largest
    rank, as a controller on each rank compares it with its own. On a CPU, which the ranks share, the reserved memory is
    that of all ranks together, or `memory_bytes`, that of all processes, if it is larger; accelerators that count no
    memory have none.
    """
    slowest = slowest_rank(events)
    if slowest is None:
        return Failure(kind="workload_error", message="too few optimizer steps were seen to measure it")
    rank, intervals = slowest
    rate, tokens = events.samples_per_second(), events.tokens()
    assert rate is not None
    raw = tuple(interval.step_seconds for interval in intervals)
    step_seconds, num_steps = _mean_step_seconds(intervals), sum(interval.num_steps for interval in intervals)
    low, high = trimmed_interval(raw)
    peaks = [each.peak_memory_bytes or 0 for each in events.ranks.values()]
    reserved = [each.reserved_memory_bytes for each in events.ranks.values() if each.reserved_memory_bytes is not None]
    losses = [float(loss) for step in rank.steps for loss in step.losses]
    is_on_cpu = all(optimizer.devices == ("cpu",) for optimizer in rank.optimizers.values())
    reserved_bytes = max(reserved) if reserved else max(memory_bytes if is_on_cpu else 0, sum(peaks))
    # On a CPU the limit was already enforced while the run was going on.
    limit_bytes = None if trial.device == "cpu" else trial.memory_limit_bytes
    if failure := failure_from_memory(reserved_bytes, limit_bytes):
        return failure
    for each in events.ranks.values():
        for steps in each.warm_losses:
            if failure := failure_from_steps(steps):
                return failure_of_rank(failure, each.rank, each.world)
    first = rank.primary_steps[0].time - began
    first_steps = min(events.ranks.values(), key=lambda each: each.rank).primary_steps[:NUM_FIRST_STEPS]
    first_losses = tuple(float(loss) for step in first_steps for loss in step.losses)
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_interval=(min(low, step_seconds), max(high, step_seconds)),
        samples_per_second=rate,
        tokens_per_second=tokens and tokens[0],
        padded_share=tokens and tokens[1],
        data_seconds=sum(interval.wait_seconds for interval in intervals) / num_steps,
        peak_memory_bytes=max(peaks),
        reserved_memory_bytes=reserved_bytes,
        raw_step_seconds=raw,
        num_steps_together=round(num_steps / len(intervals)),
        build_seconds=first,
        context_seconds=0.0,
        first_step_seconds=first,
        num_skips=sum(interval.num_skips for interval in intervals),
        last_loss=losses[-1] if losses and math.isfinite(losses[-1]) else None,
        was_cut=trial.cut_step_seconds is not None and step_seconds > trial.cut_step_seconds,
        num_compiling_steps=rank.num_compiling_steps,
        num_steps_taken=len(rank.primary_steps),
        first_losses=first_losses if all(map(math.isfinite, first_losses)) else (),
        num_first_tokens=_num_tokens(first_steps) if len(first_steps) == NUM_FIRST_STEPS else None,
        counted_flops=_counted_flops(rank, max(1, round(rate * step_seconds / len(events.ranks)))),
    )


def _num_tokens(first_steps: list[Step]) -> int | None:
    """Return the number of tokens without padding in the first steps of a run; None without token ids."""
    by_loader = first_steps[-1].tokens_by_loader
    if by_loader:
        return sum(num for num, _ in by_loader.values())
    counts = [step.tokens[0] for step in first_steps if step.tokens is not None]
    return sum(counts) if counts else None


def description(rank: Rank, name: str, today: Setting, began: float, num_sharing: int = 1) -> Description:
    """Return the description of a command from a rank of its unchanged run, whose setting is `today`.

    `num_sharing` ranks divide a batch among them.
    """
    loader = training_loader(rank)
    num_by_dtype = _num_parameters(rank)
    weights = _most_frequent_precision(num_by_dtype)
    has_frozen_low = any(dtype in _PRECISION_BY_DTYPE for dtype in _num_parameters(rank, are_frozen=True))
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
        num_sharing=num_sharing,
        counted_flops=_counted_flops(rank, today.effective_batch_size // num_sharing),
    )


def _counted_flops(rank: Rank, num_samples: int) -> CountedFlops | None:
    """Return the floating-point operations of a step of one rank, which is of `num_samples` where no loader yields
    them; None without a count.
    """
    counted = rank.flops
    if counted is None:
        return None
    return CountedFlops(
        flops=None if counted.problem else counted.flops,
        num_samples=counted.num_samples or num_samples,
        num_positions=counted.num_positions or None,
        problem=counted.problem,
    )


def training_loader(rank: Rank) -> Loader | None:
    """Return the loader that yields the training batches; of several, the one with the largest dataset. None if there
    is none.
    """
    loaders = [rank.loaders[index] for index in rank.training_loaders if index in rank.loaders]
    return max(loaders, key=lambda each: each.num_samples or 0, default=None)


def samples_per_step(rank: Rank) -> float | None:
    """Return the number of samples in an optimizer step of one rank: the same in at least half of the intervals (the
    last batch of an epoch may be smaller), else the mean. None without intervals.
    """
    intervals = list(rank.intervals())
    return _most_frequent_quotient([(interval.num_samples, interval.num_steps) for interval in intervals])


def batch_sizes(rank: Rank) -> frozenset[float]:
    """Return the candidates for the batch size of one rank, in samples: that of the loaders' batches, of each loader
    where several sizes are drawn together, and that of the model's inputs, which is smaller if the script splits its
    batches. Empty if none was observed.
    """
    intervals = [interval for interval in rank.intervals() if interval.num_batches]
    handed_out = _most_frequent_quotient([(interval.num_samples, interval.num_batches) for interval in intervals])
    of_loaders = {rank.loaders[index].batch_size for index in rank.training_loaders if index in rank.loaders}
    drawn = of_loaders if len(of_loaders) > 1 else set()
    return frozenset(filter(None, (handed_out, rank.entered_batches.batch_size if rank.steps else None, *drawn)))


def batch_size(rank: Rank) -> int:
    """Return the batch size of the rank's training loader; without a loader, that of the inputs of its model."""
    loader = training_loader(rank)
    return (loader and loader.batch_size) or round(min(batch_sizes(rank), default=1)) or 1


def passes_per_step(rank: Rank) -> tuple[float, float] | None:
    """Return the least and the largest number of batches in an optimizer step. Numbers that are rare, as at the end of
    an epoch, are ignored. None without intervals.
    """
    nums = [interval.num_batches / interval.num_steps for interval in rank.intervals() if interval.num_batches]
    counted = Counter(nums)
    usual = [num for num in nums if counted[num] > max(1, MAX_RARE_SHARE * len(nums))] or nums
    return (min(usual), max(usual)) if usual else None


def _most_frequent_quotient(amounts: list[tuple[float, float]]) -> float | None:
    """Return the quotient a/b that at least half of the pairs have, else the quotient of the sums; None
    without pairs.
    """
    if not amounts:
        return None
    usual, num = Counter(a / b for a, b in amounts).most_common(1)[0]
    return usual if 2 * num >= len(amounts) else sum(a for a, _ in amounts) / sum(b for _, b in amounts)


def autocast_precision(rank: Rank) -> Precision:
    """Return the precision set by autocast or by FSDP's mixed precision: "fp32" or "tf32" if neither is used, whatever
    the dtype of the weights.
    """
    devices = {device.partition(":")[0] for optimizer in rank.optimizers.values() for device in optimizer.devices}
    regions = [region.partition(":") for step in rank.steps for region in step.regions]
    low = Counter(
        _PRECISION_BY_DTYPE[dtype] for device, _, dtype in regions if device in devices and dtype in _PRECISION_BY_DTYPE
    )
    if low:
        return max(low, key=lambda precision: low[precision])
    num_forwards = _num_forwards_by_dtype(rank)
    kept_dtypes = _num_parameters(rank) + _num_parameters(rank, are_frozen=True)
    if num_forwards and max(num_forwards, key=lambda dtype: num_forwards[dtype]) not in kept_dtypes:
        return _most_frequent_precision(num_forwards)  # no parameter has this dtype: FSDP casts them
    return "tf32" if any(optimizer.uses_tf32 for optimizer in rank.optimizers.values()) else "fp32"


def weights_of(rank: Rank) -> Precision | None:
    """Return the precision in which most weights are used; None if it was not observed, because the whole model was
    compiled without an autocast region.
    """
    num_forwards = _num_forwards_by_dtype(rank)
    is_compiled = any(step.num_compilations for step in rank.steps)
    if not num_forwards and is_compiled and not any(step.regions for step in rank.steps):
        return None
    return _most_frequent_precision(num_forwards or _num_parameters(rank))


def precision_of(rank: Rank) -> Precision | None:
    """Return the precision of the steps: that of autocast, else that of the weights; None if neither was observed."""
    precision, weights = autocast_precision(rank), weights_of(rank)
    if precision not in FULL_PRECISIONS or weights is None:
        return None if precision in FULL_PRECISIONS else precision
    return precision if weights in FULL_PRECISIONS else weights


def todays_precision(rank: Rank) -> Precision:
    """Return the precision of the unchanged training: that of autocast, not of the weights, unless an argument of the
    framework sets the weights' dtype (Lightning's ``bf16-true``, DeepSpeed).
    """
    observed = precision_of(rank)
    configured = [
        switch.today.get("precision", observed) for switch in rank.switches if "precision" in switch.arguments
    ]
    return observed if observed is not None and observed in configured else autocast_precision(rank)


def _num_parameters(rank: Rank, *, are_frozen: bool = False) -> Counter[str]:
    """Return the number of parameters by dtype: of the optimizers that take steps in the rank, or those not trained."""
    optimizers = rank.running_optimizers
    return sum((Counter(each.num_frozen if are_frozen else each.num_parameters) for each in optimizers), Counter())


def _num_forwards_by_dtype(rank: Rank) -> Counter[str]:
    """Return the number of recorded forwards that used weights of each dtype."""
    return Counter(dtype for step in rank.steps for _, _, dtype in step.forwards)


def _most_frequent_precision(num_by_dtype: Counter[str]) -> Precision:
    """Return the precision of the most frequent dtype; fp32 without any, as of an optimizer of ZeRO-3 between steps."""
    return _PRECISION_BY_DTYPE.get(max(num_by_dtype, key=lambda dtype: num_by_dtype[dtype], default=""), "fp32")
