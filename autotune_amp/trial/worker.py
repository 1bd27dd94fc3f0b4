"""Jobs of a trial process: probe, description and trials. A job that fails returns a `Failure`."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.job import Compilation, FirstStep, PartialResult, Phase, Ready, StepDone, Tell
from autotune_amp.core.outcome import Description, Failure, Measurement, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.core.workload import Workload
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.dimensions.prepare import supported_values
from autotune_amp.hardware import cuda, measure
from autotune_amp.hardware.measuring import synchronize
from autotune_amp.precision import torch_state
from autotune_amp.precision.torch_state import CUDA_FLAGS
from autotune_amp.trial import data, failures, ranks
from autotune_amp.trial.context import Context, LoopState, each, make_optimizer
from autotune_amp.trial.energy import EnergyMeter, counter_of
from autotune_amp.trial.jobs import Check, Describe, Follow, Followed, Probe, Trial
from autotune_amp.trial.judge import RunEvidence, judge
from autotune_amp.trial.memory import PeakMemory, hold_heap
from autotune_amp.trial.own_loop import time_own_loop
from autotune_amp.trial.timing import CompileWatch, Report, Timing, forget_compiled, time_steps
from autotune_amp.trial.training import BaseTraining, Training, make_training
from autotune_amp.trial.worst_batch import Scan, scan

_FLAG_OPERATORS = {"cudnn.conv": "convolution", "cudnn.rnn": "_rnn"}  # cuDNN's RNN and MIOpen's

Result = TypeVar("Result")


# -- jobs before the first trial ---------------------------------------------------------------------------------------


def probe(context: Context, job: Probe, tell: Tell) -> Hardware:  # noqa: ARG001 - it takes no steps to tell of
    """Return the device's capabilities, measured with the caller's torch state."""
    torch_state.apply(job.torch_state)
    hardware = measure(job.device)
    clean(torch.device(hardware.device))
    return hardware


_OF_A_LOOP = "train_step takes its own optimizer steps, so nothing can be accumulated around it"
_OF_COMPLEX = "complex parameters are trained, whose gradients torch.amp.GradScaler cannot unscale"


def describe(context: Context, job: Describe, tell: Tell) -> Description:  # noqa: ARG001 - it takes no steps to tell of
    """Build the workload once and return its description."""
    workload, device, state = context.workload, torch.device(job.device), job.torch_state
    torch_state.apply(state)
    context_seconds = _start_accelerator(device)
    kind, batch_size, num_samples = data.describe(workload.data)
    started = time.perf_counter()
    model = context.model(device)
    parameters = list(model.parameters())
    if isinstance(model, LoopState):
        trained, parts = model.trained(), model.live_training(device)
    else:
        parts = LiveTraining([model], each(make_optimizer(workload, model)), device)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
    build_seconds = time.perf_counter() - started
    seen_batch_size = job.baseline_batch_size and (batch_size or job.baseline_batch_size)
    as_found, is_strict = as_run(workload, model, device, state, seen_batch_size, has_tf32=job.has_tf32)
    if context.is_kept:
        clean(device)
    has_unused = False
    if job.is_ranked and seen_batch_size is not None and not workload.is_loop:
        has_unused = has_unused_parameters(workload, model, _trial_as_found(as_found, seen_batch_size, device, state))
    seen = Scan() if seen_batch_size is None else scan(workload, seen_batch_size)
    return Description(
        name=workload.name,
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
        has_worst_batch=workload.worst_batch is not None,
        has_ending=workload.evaluate is not None or workload.checkpoint is not None,
        is_loop=workload.is_loop,
        accumulation_steps=workload.accumulation_steps,
        weighs_passes=workload.weighs_passes,
        trainer=workload.trainer,
        unsettable={
            **({"accumulation_steps": _OF_A_LOOP} if workload.is_loop else {}),
            **({"fp16": _OF_COMPLEX} if any(tensor.is_complex() for tensor in trained) else {}),
        },
        variants=supported_values(parts),
        has_unused_parameters=has_unused,
        **seen._asdict(),
    )


def as_run(
    workload: Workload,
    model: nn.Module,
    device: torch.device,
    state: Mapping[str, Any],
    batch_size: int | None,
    *,
    has_tf32: bool,
) -> tuple[Precision, bool]:
    """Return the precision of the user's own run, and whether it is strict, by the flags that matter for a step.

    This is `torch_state.precision_of_state`, unless the workload has a precision of its own. If cuDNN's flags alone
    decide, one step of `batch_size` is taken to see whether they matter; without a `batch_size` they always count.
    """
    if workload.precision is not None:
        return workload.precision, True
    found = torch_state.precision_of_state(state, device.type, () if has_tf32 else CUDA_FLAGS)
    if batch_size is None or found[1] or not torch_state.precision_of_state(state, device.type, _FLAG_OPERATORS)[1]:
        return found
    used = used_flags(workload, model, _trial_as_found(found[0], batch_size, device, state))
    return torch_state.precision_of_state(state, device.type, _FLAG_OPERATORS.keys() - used)


def used_flags(workload: Workload, model: nn.Module, spec: Trial) -> frozenset[str]:
    """Return those of cuDNN's flags that affect an operator of a step with `spec`; all of them if that is unknown.

    It is unknown if the step fails, and for operators from outside PyTorch, which may call any others.
    """
    watch = _OperatorWatch()
    return frozenset(watch.used if _takes_a_pass(workload, model, spec, watch) else _FLAG_OPERATORS)


def has_unused_parameters(workload: Workload, model: nn.Module, spec: Trial) -> bool:
    """Return whether a pass with `spec` leaves parameters without a gradient, for which DistributedDataParallel has to
    search in every pass.

    False if the pass fails, since the trial will fail too and report why. The model's gradients are cleared.
    """
    is_taken = _takes_a_pass(workload, model, spec, nullcontext())
    found = is_taken and any(p.requires_grad and p.grad is None for p in model.parameters())
    model.zero_grad()
    return found


def _trial_as_found(precision: Precision, batch_size: int, device: torch.device, state: Mapping[str, Any]) -> Trial:
    candidate = Setting(precision=precision, batch_size=batch_size, as_found=True)
    return Trial(candidate=candidate, device=str(device), torch_state=dict(state))


def _takes_a_pass(workload: Workload, model: nn.Module, spec: Trial, watch: AbstractContextManager[object]) -> bool:
    """Take a forward and backward pass inside `watch`, and return whether it succeeded."""
    try:
        with closing(make_training(workload, model, spec)) as training:
            training.start_loading()
            batch = training.next_batch()
            # Compiled code hides its operators, and compiling takes long.
            with torch.compiler.set_stance("force_eager"), watch:
                training.forward_backward(batch)
    except Exception as error:  # the user's code may raise anything
        traceback.clear_frames(error.__traceback__)
        return False
    return True


class _OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.used: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_own = func.namespace in ("aten", "profiler")  # an optimizer tells the profiler about its steps
        self.used |= {flag for flag, name in _FLAG_OPERATORS.items() if not is_own or name in func.name()}
        return func(*args, **(kwargs or {}))


def _weights(parameters: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> Any:
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        if any(p.dtype == dtype for p in trained):
            return name
    return "frozen_low" if any(p.dtype in torch_state.HALF_DTYPES for p in parameters) else "fp32"


# -- a trial -----------------------------------------------------------------------------------------------------------


def run(context: Context, spec: Trial, tell: Tell) -> Outcome:
    """Run one trial; an error is returned as a `Failure`."""
    return guarded(context, spec, lambda: _measure(context, spec, tell))


def guarded(context: Context, spec: Trial | Check, action: Callable[[], Result]) -> Result | Failure:
    """Run `action` in the caller's torch state. Errors are returned as a `Failure`; a kept worker is cleaned up."""
    num_kills_before = failures.num_oom_kills()
    try:
        torch_state.apply(spec.torch_state)
        if spec.hold_heap:
            hold_heap()
        return action()
    except Exception as error:
        is_oom_killed = failures.num_oom_kills() > num_kills_before
        failure = failures.failure_from_exception(error, is_oom_killed=is_oom_killed)
        # A traceback references frames that reference tensors: a kept worker would carry them into its next trial.
        traceback.clear_frames(error.__traceback__)
        return failure
    finally:
        if context.is_kept:
            clean(torch.device(spec.device))


def prepare(context: Context, spec: Trial | Check) -> tuple[PeakMemory, float]:
    """Seed, start the accelerator and limit the memory. Return the memory watch and the seconds that the start took."""
    device = torch.device(spec.device)
    torch_state.seed(spec.seed + (spec.rank if isinstance(spec, Trial) else 0))  # each rank draws other samples
    context_seconds = _start_accelerator(device)
    memory = PeakMemory(device, spec.memory_limit_bytes, context.build_memory, context.template_file_bytes)
    return memory, context_seconds


def _start_accelerator(device: torch.device) -> float:
    """Start the device and return the seconds it took. From then on "cuda" in the user's code means this device."""
    if device.type == "cpu":
        return 0.0
    started = time.perf_counter()
    if device.index is not None:
        torch.accelerator.set_device_index(device)
    torch.ones(1, device=device).add_(1)
    torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def clean(device: torch.device) -> None:
    """Free compiled code, whose graphs hold memory, and the allocator's cache, before a kept worker's next trial, to
    which they would be counted.
    """
    forget_compiled()
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):  # an error of the GPU itself, which all its calls repeat
            torch.get_device_module(device).empty_cache()


def follow(context: Context, spec: Follow, tell: Tell) -> Followed | Failure:
    """Run as a further rank of a trial; an error is returned as a `Failure`."""
    return guarded(context, spec, lambda: _follow(context, spec, tell))


def _follow(context: Context, spec: Follow, tell: Tell) -> Followed:
    memory, _ = prepare(context, spec)
    with ranks.met(spec) as peers:
        assert peers is not None
        model = context.model_for(spec.candidate, torch.device(spec.device))
        with closing(make_training(context.workload, model, spec)) as training:
            tell(Ready())  # rank 0 reports the steps
            retries = memory.num_allocator_retries()
            with CompileWatch(peers.note_compiling):
                peers.follow(training, memory.poll)
            peak, reserved = memory.peak_bytes()
            has_flushed = memory.num_allocator_retries() > retries
    return Followed(peak_memory_bytes=peak, reserved_memory_bytes=reserved, has_flushed=has_flushed)


def _measure(context: Context, spec: Trial, tell: Tell) -> Outcome:
    memory, context_seconds = prepare(context, spec)
    is_build_shared = context.build_memory is not None
    started = time.perf_counter()
    with ExitStack() as stack:
        peers = stack.enter_context(ranks.met(spec))
        model = context.model_for(spec.candidate, torch.device(spec.device))
        training = stack.enter_context(closing(make_training(context.workload, model, spec)))
        build_seconds = time.perf_counter() - started
        if peers is not None:
            stack.enter_context(peers.led(training))
        device = training.device
        meter = EnergyMeter(counter_of(device.type, cuda.uuid(device) if device.type == "cuda" else None))
        tell(Ready())
        tell(FirstStep())

        def report(number: int, seconds: float) -> None:
            meter.step(number, compiling.count())
            memory.poll()
            tell(StepDone(number, seconds))

        def count_compilations() -> int:
            return compiling.count() + (0 if peers is None else peers.num_compilations())

        retries = memory.num_allocator_retries()
        with CompileWatch(lambda: tell(Compilation())) as compiling:
            timing, why_not_own = None, None
            if isinstance(training, Training) and training.is_in_own_loop:
                timing, why_not_own = _in_own_loop(training, report, compiling.count)
            if timing is None:
                timing = time_steps(training, report, lambda name: tell(Phase(name)), count_compilations)

        if spec.candidate.is_compiled and not compiling.count():
            return Failure(kind="unsupported", message="torch.compile compiled nothing of it")

        def outcome(ending: dict[str, Any]) -> Outcome:
            memory.poll()
            peak, reserved = memory.peak_bytes()
            has_flushed = memory.num_allocator_retries() > retries
            limit_bytes = spec.memory_limit_bytes
            evidence = RunEvidence(memory_bytes=reserved, memory_limit_bytes=limit_bytes, has_flushed=has_flushed)
            if failure := judge(evidence):
                return failure
            return _measurement(
                spec,
                timing,
                build_seconds=build_seconds,
                context_seconds=context_seconds,
                is_build_shared=is_build_shared,
                peak_memory_bytes=peak,
                reserved_memory_bytes=reserved,
                joules_per_sample=meter.joules_per_sample(spec.candidate.batch_size * spec.num_timed_micro_batches),
                num_graph_breaks=compiling.num_graph_breaks(),
                num_steps_taken=training.num_steps_taken,
                why_not_own_loop=why_not_own,
                **ending,
            )

        found = outcome({})
        if spec.ending_seconds is None or not isinstance(found, Measurement):
            return found
        return outcome(_ending(training, spec.ending_seconds, tell, found))


def _in_own_loop(
    training: Training, report: Report, count_compilations: Callable[[], int]
) -> tuple[Timing | None, str | None]:
    """Return the timing of the workload's own loop, or None and why it does not run here, as with failing callbacks."""
    try:
        return time_own_loop(training, report, count_compilations), None
    except Exception as error:
        failure = failures.failure_from_exception(error)
        if failure.kind != "workload_error":
            raise
        traceback.clear_frames(error.__traceback__)
        return None, failure.message


def _measurement(spec: Trial, timing: Timing, **measured: Any) -> Measurement:
    steps = timing.raw_step_seconds
    # The mean, not the median: the throughput of a long run includes its slow steps.
    step_seconds = sum(steps) / len(steps)
    low, high = trimmed_interval(steps)  # a few slow steps may move the mean out of the interval
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_interval=(min(low, step_seconds), max(high, step_seconds)),
        samples_per_second=spec.num_ranks * spec.candidate.effective_batch_size / step_seconds,
        **msgspec.structs.asdict(timing),
        **measured,
    )


def _ending(training: BaseTraining, limit_seconds: float, tell: Tell, measured: Measurement) -> dict[str, Any]:
    """Run the workload's own evaluation and then its checkpoint, within `limit_seconds`, and return the measurement's
    fields.

    The parent process enforces the limit. Before each it is sent the measurement that holds if the process does not
    come back.
    """
    began = time.perf_counter()
    taken: dict[str, float] = {}
    problems: list[str] = []

    def fields(seconds: float, *overdue: str) -> dict[str, Any]:
        return {**taken, "ending_seconds": seconds, "ending_problem": "; ".join([*problems, *overdue]) or None}

    def attempt(what: str, field: str, action: Callable[[], None], phase: str) -> None:
        started = time.perf_counter()
        left_seconds = limit_seconds - (started - began)
        if left_seconds <= 0:
            problems.append(f"{what} was not run, for want of time")
            return
        so_far = msgspec.structs.replace(
            measured, **fields(limit_seconds, f"{what} did not end within {left_seconds:.3g} s")
        )
        tell(PartialResult(so_far))
        tell(Phase(phase, left_seconds))
        try:
            action()
            synchronize(training.device)
        except (Exception, SystemExit) as error:
            failure = failures.failure_from_exception(error)
            if failure.kind == "oom":
                raise
            problems.append(f"{what} raised {failure.message}")
        else:
            taken[field] = time.perf_counter() - started

    if training.workload.evaluate is not None:
        attempt("evaluate", "evaluation_seconds", training.evaluate, "evaluating")
    if training.workload.checkpoint is not None:
        with tempfile.TemporaryDirectory(prefix="autotune-amp-", ignore_cleanup_errors=True) as folder:
            write = partial(training.checkpoint, Path(folder))
            attempt("checkpoint", "checkpoint_seconds", write, "writing a checkpoint")
    return fields(time.perf_counter() - began)


def raise_oom_score() -> None:
    """Make the kernel's OOM killer choose this process first."""
    with contextlib.suppress(OSError):  # not Linux, or not allowed: then the kernel's choice stays
        Path("/proc/self/oom_score_adj").write_text("1000")
