"""What a run that was heard amounts to: a measurement of its setting, or a description of the command. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from autotune_amp.core.dimensions import Precision
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.launch.ranks import Heard, Interval, Rank
from autotune_amp.trial.jobs import Trial, stop

MIN_NUM_INTERVALS = 2
_LOW: dict[str, Precision] = {"bfloat16": "bf16", "float16": "fp16"}


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
    """The job's: samples of all ranks by the time of the slowest, memory of all ranks together on a CPU, of the
    largest on an accelerator. What counts against a CPU's limit is `memory_bytes`, of all processes, where that is
    more. A batch other than the setting's is a `Failure`."""
    found = slowest(heard)
    if found is None:
        return Failure(kind="workload_error", message="too few optimizer steps were seen to measure it")
    rank, intervals = found
    setting, per_step = trial.candidate, _samples_per_step(intervals)
    if not setting.as_found and abs(per_step - setting.effective_batch_size) > 0.02 * setting.effective_batch_size:
        return Failure(
            kind="workload_error",
            message=f"a step took {per_step:g} samples on each rank, not the {setting.effective_batch_size} asked for",
            details="See that the command passes {batch_size} and {accumulation_steps} on, and adapts neither.",
        )
    rate = heard.samples_per_second()
    assert rate is not None
    raw = tuple(one.step_seconds for one in intervals)
    step_seconds = fmean(raw)
    low, high = trimmed_interval(raw)
    peaks = [each.peak_memory_bytes or 0 for each in heard.ranks.values()]
    reserved = [each.reserved_memory_bytes for each in heard.ranks.values() if each.reserved_memory_bytes is not None]
    losses = [loss for step in rank.steps for loss in step.losses]
    first = rank.pace[0].time - began
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_interval=(min(low, step_seconds), max(high, step_seconds)),
        samples_per_second=rate,
        data_seconds=fmean(one.wait_seconds / one.num_steps for one in intervals),
        peak_memory_bytes=max(peaks) if reserved else sum(peaks),
        reserved_memory_bytes=max(reserved) if reserved else max(memory_bytes, sum(peaks)),
        raw_step_seconds=raw,
        num_steps_together=max(one.num_steps for one in intervals),
        build_seconds=first,
        context_seconds=0.0,
        first_step_seconds=first,
        num_skips=sum(one.num_skips for one in intervals),
        last_loss=losses[-1] if losses else None,
        was_cut=trial.cut_step_seconds is not None and step_seconds > trial.cut_step_seconds,
        num_compiling_steps=rank.num_compiling_steps,
        num_steps_taken=len(rank.pace),
    )


def description(heard: Heard, name: str, began: float, *, is_strict: bool) -> Description | Failure:
    """What the command trains, from a run of what it does today."""
    found = slowest(heard)
    if found is None:
        return Failure(
            kind="workload_error", message="too few optimizer steps were seen to say what the command trains"
        )
    rank, intervals = found
    loaders = [rank.loaders[index] for index in rank.training_loaders if index in rank.loaders]
    loader = max(loaders, key=lambda each: each.num_samples or 0, default=None)
    per_step = round(_samples_per_step(intervals))
    batch_size = per_step if loader is None or not loader.batch_size else loader.batch_size
    num_by_dtype = _num_parameters(rank)
    largest = max(num_by_dtype, key=lambda dtype: num_by_dtype[dtype])
    return Description(
        name=name,
        batch_size=batch_size,
        num_samples=None if loader is None else loader.num_samples,
        data="no DataLoader was seen" if loader is None else f"DataLoader at {loader.line or loader.maker}",
        num_parameters=sum(num_by_dtype.values()),
        num_trainable_parameters=sum(num_by_dtype.values()),
        weights=_LOW.get(largest, "fp32"),  # type: ignore[arg-type]
        as_found_precision=precision_of(rank) or "fp32",
        is_as_found_strict=is_strict,
        build_seconds=rank.pace[0].time - began,
        context_seconds=0.0,
        num_workers=None if loader is None else loader.num_workers,
        accumulation_steps=max(1, round(per_step / batch_size)),
        weighs_passes=True,
    )


def precision_of(rank: Rank) -> Precision | None:
    """What its steps ran in: by the autocast regions that they entered on its device, else by what the weights of its
    modules were used in. None where nothing of that could be seen: all of it was compiled, without a region.
    """
    devices = {device.partition(":")[0] for optimizer in rank.optimizers.values() for device in optimizer.devices}
    regions = [region.partition(":") for step in rank.steps for region in step.regions]
    low = Counter(_LOW[dtype] for device, _, dtype in regions if device in devices and dtype in _LOW)
    if low:
        return max(low, key=lambda precision: low[precision])
    used = Counter(dtype for step in rank.steps for _, _, dtype in step.forwards)
    if not used and any(step.num_compilations for step in rank.steps) and not regions:
        return None
    weights = used or _num_parameters(rank)
    is_tf32 = any(optimizer.uses_tf32 for optimizer in rank.optimizers.values())
    return _LOW.get(max(weights, key=lambda dtype: weights[dtype]), "tf32" if is_tf32 else "fp32")


def _num_parameters(rank: Rank) -> Counter[str]:
    """By dtype, of all its optimizers."""
    return sum((Counter(optimizer.num_parameters) for optimizer in rank.optimizers.values()), Counter())


def _samples_per_step(intervals: Sequence[Interval]) -> float:
    return sum(one.num_samples for one in intervals) / sum(one.num_steps for one in intervals)
