"""Child side of a trial: build, warm up, run, report."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.job import Tell
from autotune_amp.core.outcome import Description, Failure, Measurement, Outcome
from autotune_amp.hardware import cuda, measure
from autotune_amp.precision import mode as precision
from autotune_amp.precision import torch_state
from autotune_amp.trial import data
from autotune_amp.trial.as_run import as_run
from autotune_amp.trial.compiling import CompileWatch, forget_compiled
from autotune_amp.trial.context import Context
from autotune_amp.trial.energy import Counter, EnergyMeter, counter_of
from autotune_amp.trial.failures import classify
from autotune_amp.trial.heap import hold_heap
from autotune_amp.trial.jobs import Check, Describe, Probe, Trial
from autotune_amp.trial.memory import PeakMemory
from autotune_amp.trial.miniature import Ending, Finish, check_signatures
from autotune_amp.trial.optimizers import make_optimizer
from autotune_amp.trial.sizes import Look, look
from autotune_amp.trial.state import LoopState
from autotune_amp.trial.step import BaseTraining, make_training
from autotune_amp.trial.timing import Timing, time_steps

Result = TypeVar("Result")


def probe(context: Context, job: Probe, tell: Tell) -> Hardware:  # noqa: ARG001 - it takes no steps to tell of
    """What the device can do, measured in the caller's torch state."""
    torch_state.apply(job.torch_state)
    hardware = measure(job.device)
    clean(torch.device(hardware.device))
    return hardware


def describe(context: Context, job: Describe, tell: Tell) -> Description:  # noqa: ARG001 - it takes no steps to tell of
    """What the workload is, from building it once."""
    device, state = torch.device(job.device), job.torch_state
    torch_state.apply(state)
    check_signatures(context.workload)
    context_seconds = _start_accelerator(device)
    kind, batch_size, num_samples = data.describe(context.workload.data)
    started = time.perf_counter()
    model = context.model(device)
    parameters = list(model.parameters())
    if isinstance(model, LoopState):
        trained = model.trained()
    else:
        make_optimizer(context.workload, model)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
    build_seconds = time.perf_counter() - started
    seen_batch_size = job.baseline_batch_size and (batch_size or job.baseline_batch_size)
    as_found, is_strict = as_run(context.workload, model, device, state, seen_batch_size, has_tf32=job.has_tf32)
    if context.is_kept:
        clean(device)
    seen = Look() if seen_batch_size is None else look(context.workload, seen_batch_size)
    return Description(
        name=context.workload.name,
        batch_size=batch_size,
        num_samples=num_samples,
        data=kind,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable_parameters=sum(p.numel() for p in trained),
        weights=_weights(parameters, trained),
        as_found_precision=as_found,
        is_as_found_strict=is_strict,
        build_seconds=build_seconds,
        context_seconds=context_seconds,
        num_workers=seen.num_workers,
        sample_sizes=seen.sample_sizes,
        batch_sizes_seen=seen.batch_sizes_seen,
        scan_problem=seen.scan_problem,
        has_worst_batch=context.workload.worst_batch is not None,
        has_ending=context.workload.evaluate is not None or context.workload.checkpoint is not None,
        is_loop=context.workload.is_loop,
        accumulation_steps=context.workload.accumulation_steps,
        weighs_passes=context.workload.weighs_passes,
    )


def run(context: Context, spec: Trial, tell: Tell) -> Outcome:
    """Run one trial; whatever goes wrong comes back as a `Failure`."""
    return guarded(context, spec, lambda: _measure(context, spec, tell))


def guarded(context: Context, spec: Trial | Check, action: Callable[[], Result]) -> Result | Failure:
    """Do it in the caller's torch state; what it raises comes back as a `Failure`, a kept worker is left clean."""
    try:
        torch_state.apply(spec.torch_state)
        if spec.hold_heap:
            hold_heap()
        return action()
    except Exception as error:
        failure = classify(error)
        # A traceback holds the frames that hold the tensors: a kept worker would carry them into its next trial.
        traceback.clear_frames(error.__traceback__)
        return failure
    finally:
        if context.is_kept:
            clean(torch.device(spec.device))


def prepare(context: Context, spec: Trial | Check) -> tuple[PeakMemory, float]:
    """Seed, start the accelerator and limit the memory; returns what watches it, and the start's seconds."""
    device = torch.device(spec.device)
    torch_state.seed(spec.seed)
    context_seconds = _start_accelerator(device)
    memory = PeakMemory(device, spec.memory_limit_bytes, context.build_memory, context.template_file_bytes)
    return memory, context_seconds


def clean(device: torch.device) -> None:
    """Let go what a kept worker must not carry into its next trial: what was compiled, whose graphs hold memory, and
    the allocator's cache, which would count as that one's."""
    forget_compiled()
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):  # an error of the card itself, which all its calls repeat
            torch.get_device_module(device).empty_cache()


def _measure(context: Context, spec: Trial, tell: Tell) -> Outcome:
    memory, context_seconds = prepare(context, spec)
    is_build_shared = context.is_build_shared
    started = time.perf_counter()
    training = make_training(context.workload, context.model(torch.device(spec.device)), spec)
    building = {
        "build_seconds": time.perf_counter() - started,
        "context_seconds": context_seconds,
        "is_build_shared": is_build_shared,
    }
    with contextlib.closing(training):
        return _train(training, memory, tell, building)


def _train(training: BaseTraining, memory: PeakMemory, tell: Tell, building: dict[str, Any]) -> Outcome:
    spec = training.spec
    meter = EnergyMeter(_energy_counter(torch.device(spec.device)))
    tell({"event": "first step"})

    def report(number: int, seconds: float) -> None:
        meter.step(number, compiling.count())
        memory.poll()
        tell({"event": "step", "number": number, "seconds": seconds})

    def enter(name: str) -> None:
        tell({"event": "phase", "name": name})

    retries = memory.num_allocator_retries()
    with CompileWatch(lambda: tell({"event": "compiling"})) as compiling:
        timing = time_steps(training, report, enter, compiling.count)

    def outcome(ending: Ending) -> Outcome:
        memory.poll()
        peak, reserved = memory.peak_bytes()
        if memory.is_over_limit():
            limit = _mib(spec.memory_limit_bytes)
            return Failure(kind="oom", message=f"it took {reserved / 2**20:.0f} MiB, over the limit of {limit}")
        if memory.num_allocator_retries() > retries:
            return Failure(kind="oom", message="the allocator had to flush its cache to make room: memory is full")
        return _measurement(
            spec,
            timing,
            peak_memory_bytes=peak,
            reserved_memory_bytes=reserved,
            joules_per_sample=meter.joules_per_sample(spec.candidate.batch_size * spec.num_timed_micro_batches),
            num_steps_taken=training.num_steps_taken,
            **building,
            **ending._asdict(),
        )

    found = outcome(Ending())
    if spec.ending_seconds is not None and isinstance(found, Measurement):
        measured = found

        def keep(ending: Ending) -> None:
            value = msgspec.structs.replace(measured, **ending._asdict())
            tell({"event": "so far", "value": msgspec.to_builtins(value)})

        found = outcome(Finish(training, spec.ending_seconds, tell, keep, classify).run())
    return found


def _measurement(spec: Trial, timing: Timing, **measured: Any) -> Measurement:
    steps = timing.raw_step_seconds
    # The mean, not the median: what a long run reaches includes its slow steps.
    step_seconds = sum(steps) / len(steps)
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_interval=trimmed_interval(steps),
        samples_per_second=spec.candidate.effective_batch_size / step_seconds,
        data_seconds=timing.data_seconds,
        raw_step_seconds=steps,
        num_steps_together=timing.num_steps_together,
        first_step_seconds=timing.first_step_seconds,
        num_skips=timing.num_skips,
        last_loss=timing.last_loss,
        was_cut=timing.was_cut,
        update_seconds=timing.update_seconds,
        num_compiling_steps=timing.num_compiling_steps,
        **measured,
    )


def _energy_counter(device: torch.device) -> Counter | None:
    return counter_of(device.type, cuda.uuid(device) if device.type == "cuda" else None)


def _start_accelerator(device: torch.device) -> float:
    """Seconds to bring the device up, which no step should pay for; from then on "cuda" in the user's code means it."""
    if device.type == "cpu":
        return 0.0
    started = time.perf_counter()
    if device.index is not None:
        torch.accelerator.set_device_index(device)
    torch.ones(1, device=device).add_(1)
    torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def _weights(parameters: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> Any:
    low = precision.HALF_DTYPES
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        if any(p.dtype == dtype for p in trained):
            return name
    return "frozen_low" if any(p.dtype in low for p in parameters) else "fp32"


def _mib(num_bytes: int | None) -> str:
    return "none" if num_bytes is None else f"{num_bytes / 2**20:.0f} MiB"


def raise_oom_score() -> None:
    """Offer this process to the kernel's OOM killer before anybody else's."""
    with contextlib.suppress(OSError):  # not Linux, or not allowed: then the kernel chooses as it would have
        Path("/proc/self/oom_score_adj").write_text("1000")
