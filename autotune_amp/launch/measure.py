"""What a run that was heard amounts to: a measurement of its setting, or a description of the command. Pure."""

from __future__ import annotations

from statistics import fmean

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.launch.messages import Loader
from autotune_amp.launch.ranks import Heard, Interval, Rank
from autotune_amp.trial.jobs import Trial, stop

MIN_NUM_INTERVALS = 2
_AUTOCAST: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


def slowest(heard: Heard) -> tuple[Rank, list[Interval]] | None:
    """The rank whose steps take longest, with its intervals; None before every rank has `MIN_NUM_INTERVALS`."""
    found = [(rank, list(rank.intervals())) for rank in heard.ranks.values()]
    if not heard.is_whole or not found or min(len(intervals) for _, intervals in found) < MIN_NUM_INTERVALS:
        return None
    return max(found, key=lambda pair: fmean(one.step_seconds for one in pair[1]))


def is_enough(heard: Heard, trial: Trial, began: float) -> bool:
    """Whether its steps are measured as well as the trial asks for, or far too slow."""
    found = slowest(heard)
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


def measurement(heard: Heard, trial: Trial, began: float, memory_bytes: int) -> Measurement | Failure:
    """The job's: samples of all ranks by the time of the slowest, memory of all processes on a CPU, of the largest rank
    on an accelerator."""
    found = slowest(heard)
    if found is None:
        return Failure(kind="workload_error", message="too few optimizer steps were seen to measure it")
    rank, intervals = found
    rate = heard.samples_per_second()
    assert rate is not None
    raw = tuple(one.step_seconds for one in intervals)
    step_seconds = fmean(raw)
    low, high = trimmed_interval(raw)
    peaks = [step.peak_memory_bytes for each in heard.ranks.values() for step in each.steps if step.peak_memory_bytes]
    held = [s.reserved_memory_bytes for each in heard.ranks.values() for s in each.steps if s.reserved_memory_bytes]
    is_cpu = not held
    losses = [loss for step in rank.steps for loss in step.losses if loss is not None]
    first = rank.pace[0].time - began
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_interval=(min(low, step_seconds), max(high, step_seconds)),
        samples_per_second=rate,
        data_seconds=fmean(one.wait_seconds / one.num_steps for one in intervals),
        peak_memory_bytes=memory_bytes if is_cpu else max(peaks),
        reserved_memory_bytes=memory_bytes if is_cpu else max(held),
        raw_step_seconds=raw,
        num_steps_together=max(one.num_steps for one in intervals),
        build_seconds=first,
        context_seconds=0.0,
        first_step_seconds=first,
        num_skips=sum(one.num_skips for one in intervals),
        last_loss=losses[-1] if losses else None,
        was_cut=trial.cut_step_seconds is not None and step_seconds > trial.cut_step_seconds,
        num_steps_taken=len(rank.pace),
    )


def description(rank: Rank, name: str, today: Setting, began: float) -> Description:
    """What the command trains, from a run of what it does `today`."""
    loader = training_loader(rank)
    num_by_dtype: dict[str, int] = {}
    for optimizer in rank.optimizers.values():
        for dtype, num in optimizer.num_parameters.items():
            num_by_dtype[dtype] = num_by_dtype.get(dtype, 0) + num
    largest = max(num_by_dtype, key=lambda dtype: num_by_dtype[dtype])
    return Description(
        name=name,
        batch_size=today.batch_size,
        num_samples=None if loader is None else loader.num_samples,
        data="no DataLoader was seen" if loader is None else f"DataLoader at {loader.line or loader.maker}",
        num_parameters=sum(num_by_dtype.values()),
        num_trainable_parameters=sum(num_by_dtype.values()),
        weights={"bfloat16": "bf16", "float16": "fp16"}.get(largest, "fp32"),  # type: ignore[arg-type]
        as_found_precision=today.precision,
        is_as_found_strict=True,
        build_seconds=rank.pace[0].time - began,
        context_seconds=0.0,
        accumulation_steps=today.accumulation_steps,
        weighs_passes=True,
    )


def training_loader(rank: Rank) -> Loader | None:
    """The loader that its training fetches from, that of the largest dataset where there are several."""
    loaders = [rank.loaders[index] for index in rank.training_loaders if index in rank.loaders]
    return max(loaders, key=lambda each: each.num_samples or 0, default=None)


def samples_per_step(rank: Rank) -> float | None:
    """Samples behind a mean optimizer step of one rank, None where too few steps were seen."""
    intervals = list(rank.intervals())
    if not intervals:
        return None
    return sum(one.num_samples for one in intervals) / sum(one.num_steps for one in intervals)


def precision_of(rank: Rank) -> Precision:
    """What its steps ran in, by the autocast regions that they entered."""
    regions = [region.partition(":")[2] for step in rank.pace for region in step.regions]
    return next((_AUTOCAST[dtype] for dtype in regions if dtype in _AUTOCAST), "fp32")
