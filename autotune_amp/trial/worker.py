"""Work of the jobs in a trial process: probe, description and trials. A trial that fails returns a `Failure`."""

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
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.job import Compilation, FirstStep, PartialResult, Phase, Ready, StepDone, Tell
from autotune_amp.core.outcome import Description, Failure, Measurement, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import LOADER_ARGUMENTS, Setting
from autotune_amp.core.workload import Workload
from autotune_amp.dimensions import VARIANTS
from autotune_amp.dimensions.dimension import APPLIED_ALREADY, Variant
from autotune_amp.dimensions.live_training import LiveTraining
from autotune_amp.hardware import cuda
from autotune_amp.hardware.measuring import measure, synchronize
from autotune_amp.precision import torch_state
from autotune_amp.precision.torch_state import CUDA_FLAGS
from autotune_amp.trial import data, failures, ranks
from autotune_amp.trial.context import Context, LoopState, make_optimizer, move_to_accelerator, users_optimizers
from autotune_amp.trial.energy import EnergyMeter, find_counter
from autotune_amp.trial.jobs import Check, Describe, FollowerMemory, FollowerTrial, ProbeJob, Trial
from autotune_amp.trial.judge import failure_from_memory
from autotune_amp.trial.memory import PeakMemory, allocator_bytes, hold_heap
from autotune_amp.trial.own_loop import time_own_loop
from autotune_amp.trial.timing import CompileWatch, StepCallback, Timing, forget_compiled, time_steps
from autotune_amp.trial.training import BaseTraining, Training, make_training
from autotune_amp.trial.worst_batch import Scan, scan

_FLAG_OPERATORS = {"cudnn.conv": "convolution", "cudnn.rnn": "_rnn"}  # cuDNN's RNN and MIOpen's

Result = TypeVar("Result")


# -- jobs before the first trial ---------------------------------------------------------------------------------------


def probe(context: Context, job: ProbeJob, tell: Tell) -> Hardware:  # noqa: ARG001 - it has no progress to send
    """Return the device's capabilities, measured with the caller's torch state.

    Memory that the workload's own tensors hold on an accelerator counts as free, since its trials train with them.
    """
    torch_state.apply(job.torch_state)
    hardware = measure(job.device)
    device, memory = torch.device(hardware.device), hardware.memory
    free_cached_memory(device)
    held = allocator_bytes(device)
    memory = msgspec.structs.replace(memory, free=memory.free + held, available=memory.available + held)
    return msgspec.structs.replace(hardware, memory=memory)


_ACCUMULATION_IN_LOOP = "train_step takes its own optimizer steps, so gradients cannot be accumulated around it"
_COMPLEX_IN_FP16 = "complex parameters are trained, whose gradients torch.amp.GradScaler cannot unscale"


def describe(context: Context, job: Describe, tell: Tell) -> Description:  # noqa: ARG001 - it has no progress to send
    """Build the workload once and return its description."""
    workload, device, state = context.workload, torch.device(job.device), job.torch_state
    torch_state.apply(state)
    context_seconds = _start_accelerator(device, state)
    data_kind, batch_size, num_samples = data.describe(workload.data)
    started = time.perf_counter()
    model = context.model(device)
    # Building may have set flags, such as those for TF32. An active autocast is the caller's, in another process.
    state = {**torch_state.capture(), **torch_state.autocast_of(state)}
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    if isinstance(model, LoopState):
        trained = [tensor for tensor in model.trained() if not is_lazy(tensor)]
        live_training = model.live_training(device)
    else:
        live_training = LiveTraining([model], users_optimizers(make_optimizer(workload, model)), device)
        trained = [parameter for parameter in parameters if parameter.requires_grad]
    build_seconds = time.perf_counter() - started
    scan_batch_size = job.baseline_batch_size and (batch_size or job.baseline_batch_size)
    precision_of_state, is_strict = users_precision(
        workload, model, device, state, scan_batch_size, has_tf32=job.has_tf32
    )
    if context.is_kept:
        free_cached_memory(device)
    has_unused = False
    if job.is_ranked and scan_batch_size is not None and not workload.is_loop:
        has_unused = has_unused_parameters(
            workload, model, _unchanged_trial(precision_of_state, scan_batch_size, device, state)
        )
    scan_result = Scan() if scan_batch_size is None else scan(workload, scan_batch_size)
    return Description(
        name=workload.name,
        batch_size=batch_size,
        num_samples=num_samples,
        data=data_kind,
        num_parameters=sum(p.numel() for p in parameters),
        num_trainable_parameters=sum(p.numel() for p in trained),
        weights=_weights(parameters, trained),
        as_found_precision=precision_of_state,
        is_as_found_strict=is_strict,
        build_seconds=build_seconds,
        context_seconds=context_seconds,
        has_worst_batch=workload.worst_batch is not None,
        has_ending=workload.evaluate is not None or workload.checkpoint is not None,
        is_loop=workload.is_loop,
        accumulation_steps=workload.accumulation_steps,
        weighs_passes=workload.weighs_passes,
        trainer=workload.trainer,
        trainer_ranks=workload.trainer_ranks,
        unsettable={
            **({"accumulation_steps": _ACCUMULATION_IN_LOOP} if workload.is_loop else {}),
            **({"fp16": _COMPLEX_IN_FP16} if any(tensor.is_complex() for tensor in trained) else {}),
        },
        variants=supported_values(live_training),
        has_unused_parameters=has_unused,
        **scan_result._asdict(),
    )


def supported_values(live: LiveTraining) -> dict[str, dict[str, str | None]]:
    """Return the non-default values of each variant: None if supported, otherwise the reason why not.

    Those of the loader are left out, since they depend on the data.
    """

    def unsupported_reason(variant: Variant, value: str) -> str | None:
        try:
            return APPLIED_ALREADY if variant.is_applied(value, live) else variant.unsupported_reason(value, live)
        except Exception as error:  # user code may raise anything; the search goes on without this variant
            return f"inspecting the model raised {type(error).__name__}: {error}"

    return {
        name: {value: unsupported_reason(variant, value) for value in variant.others}
        for name, variant in VARIANTS.items()
        if name not in LOADER_ARGUMENTS
    }


def users_precision(
    workload: Workload,
    model: nn.Module,
    device: torch.device,
    state: Mapping[str, Any],
    batch_size: int | None,
    *,
    has_tf32: bool,
) -> tuple[Precision, bool]:
    """Return the precision of the user's own run, and whether its flags are those of the strict precision.

    They follow from the torch state, unless the workload sets its own precision. Only flags that affect a step count:
    if cuDNN's flags alone decide, one pass of `batch_size` is run to find out; without a `batch_size` they always
    count.
    """
    if workload.precision is not None:
        return workload.precision, True
    precision_and_is_strict = torch_state.precision_of_state(state, device.type, () if has_tf32 else CUDA_FLAGS)
    if (
        batch_size is None
        or precision_and_is_strict[1]
        or not torch_state.precision_of_state(state, device.type, _FLAG_OPERATORS)[1]
    ):
        return precision_and_is_strict
    used_flags = cudnn_flags_in_use(
        workload, model, _unchanged_trial(precision_and_is_strict[0], batch_size, device, state)
    )
    return torch_state.precision_of_state(state, device.type, _FLAG_OPERATORS.keys() - used_flags)


def cudnn_flags_in_use(workload: Workload, model: nn.Module, spec: Trial) -> frozenset[str]:
    """Return the cuDNN flags that affect an operator of a step with `spec`; all of them if that is unknown.

    It is unknown if the step fails, or has an operator from outside PyTorch, which may call cuDNN itself.
    """
    recorder = _OperatorRecorder()
    return frozenset(recorder.used if _is_pass_successful(workload, model, spec, recorder) else _FLAG_OPERATORS)


def has_unused_parameters(workload: Workload, model: nn.Module, spec: Trial) -> bool:
    """Return whether a pass with `spec` leaves parameters without a gradient, for which DistributedDataParallel has to
    search in every pass.

    False if the pass fails, since the trial will fail too and report why. The model's gradients are cleared.
    """
    has_passed = _is_pass_successful(workload, model, spec, nullcontext())
    has_unused = has_passed and any(p.requires_grad and p.grad is None for p in model.parameters())
    model.zero_grad()
    return has_unused


def _unchanged_trial(precision: Precision, batch_size: int, device: torch.device, state: Mapping[str, Any]) -> Trial:
    candidate = Setting(precision=precision, batch_size=batch_size, as_found=True)
    return Trial(candidate=candidate, device=str(device), torch_state=dict(state))


def _is_pass_successful(
    workload: Workload, model: nn.Module, spec: Trial, watch: AbstractContextManager[object]
) -> bool:
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


class _OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Dispatch mode that records the flags which affect the operators run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.used: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_torch = func.namespace in ("aten", "profiler")  # an optimizer tells the profiler about its steps
        self.used |= {flag for flag, name in _FLAG_OPERATORS.items() if not is_torch or name in func.name()}
        return func(*args, **(kwargs or {}))


def _weights(parameters: Sequence[torch.Tensor], trained: Sequence[torch.Tensor]) -> Any:
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        if any(p.dtype == dtype for p in trained):
            return name
    return "frozen_low" if any(p.dtype in torch_state.HALF_DTYPES for p in parameters) else "fp32"


# -- a trial -----------------------------------------------------------------------------------------------------------


def run(context: Context, spec: Trial, tell: Tell) -> Outcome:
    """Run one trial; an error is returned as a `Failure`."""
    return run_guarded(context, spec, lambda: _measure(context, spec, tell))


def run_guarded(context: Context, spec: Trial | Check, action: Callable[[], Result]) -> Result | Failure:
    """Run `action` in the caller's torch state and return its result; an error is returned as a `Failure`. A kept
    worker frees its cached memory afterwards.
    """
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
            free_cached_memory(torch.device(spec.device))


def prepare_process(context: Context, spec: Trial | Check) -> tuple[PeakMemory, float]:
    """Seed, start the accelerator and limit the memory. Return the `PeakMemory` and the seconds that the start took."""
    device = torch.device(spec.device)
    torch_state.seed(spec.seed + (spec.rank if isinstance(spec, Trial) else 0))  # each rank draws other samples
    context_seconds = _start_accelerator(device, spec.torch_state)
    memory = PeakMemory(device, spec.memory_limit_bytes, context.build_memory, context.template_file_bytes)
    return memory, context_seconds


def _start_accelerator(device: torch.device, state: dict[str, Any]) -> float:
    """Start the device, make it the current one (the "cuda" of the user's code), and move the user's tensors there.

    Apply the flags of the caller's `state` again, since attention backends have their order only on a started device.
    Return the seconds it took.
    """
    if device.type == "cpu":
        return 0.0
    started = time.perf_counter()
    if device.index is not None:
        torch.accelerator.set_device_index(device)
    torch.ones(1, device=device).add_(1)
    move_to_accelerator(device)
    torch_state.apply_flags(state)
    torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def free_cached_memory(device: torch.device) -> None:
    """Free compiled code, whose CUDA graphs hold memory, and the allocator's cache. Otherwise they would count as
    memory of a kept worker's next trial.
    """
    forget_compiled()
    gc.collect()
    if device.type != "cpu":
        with contextlib.suppress(RuntimeError):  # an error of the GPU itself, which all its calls repeat
            torch.get_device_module(device).empty_cache()


def follow(context: Context, spec: FollowerTrial, tell: Tell) -> FollowerMemory | Failure:
    """Take steps as a rank other than 0 of a trial and return its memory; an error is returned as a `Failure`."""
    return run_guarded(context, spec, lambda: _follow(context, spec, tell))


def _follow(context: Context, spec: FollowerTrial, tell: Tell) -> FollowerMemory:
    memory, _ = prepare_process(context, spec)
    with ranks.join_process_group(spec) as peers:
        assert peers is not None
        model = context.model_for(spec.candidate, torch.device(spec.device))
        with closing(make_training(context.workload, model, spec)) as training:
            tell(Ready())  # rank 0 reports the steps
            retries = memory.num_allocator_retries()
            with CompileWatch(peers.count_compilation):
                peers.follow(training, memory.poll)
            peak, reserved = memory.peak_bytes()
            has_flushed = memory.num_allocator_retries() > retries
    return FollowerMemory(peak_memory_bytes=peak, reserved_memory_bytes=reserved, has_flushed=has_flushed)


def _measure(context: Context, spec: Trial, tell: Tell) -> Outcome:
    memory, context_seconds = prepare_process(context, spec)
    is_build_shared = context.build_memory is not None
    started = time.perf_counter()
    with ExitStack() as stack, ExitStack() as ranked:
        peers = ranked.enter_context(ranks.join_process_group(spec))
        model = context.model_for(spec.candidate, torch.device(spec.device))
        training = stack.enter_context(closing(make_training(context.workload, model, spec)))
        build_seconds = time.perf_counter() - started
        if peers is not None:
            ranked.enter_context(peers.lead_steps(training))
        device = training.device
        meter = EnergyMeter(find_counter(device.type, cuda.uuid(device) if device.type == "cuda" else None))
        tell(Ready())
        tell(FirstStep())

        def report(number: int, seconds: float) -> None:
            meter.step(number, compile_watch.count())
            memory.poll()
            tell(StepDone(number, seconds))

        def count_compilations() -> int:
            return compile_watch.count() + (0 if peers is None else peers.num_compilations())

        retries = memory.num_allocator_retries()
        with CompileWatch(lambda: tell(Compilation())) as compile_watch:
            timing, own_loop_problem = None, None
            if isinstance(training, Training) and training.is_in_own_loop:
                timing, own_loop_problem = _time_own_loop(training, report, compile_watch.count)
            if timing is None:
                timing = time_steps(training, report, lambda name: tell(Phase(name)), count_compilations)

        if spec.candidate.is_compiled and not compile_watch.count():
            return Failure(kind="unsupported", message="torch.compile compiled nothing of it")

        def outcome(ending_fields: dict[str, Any]) -> Outcome:
            memory.poll()
            peak, reserved = memory.peak_bytes()
            has_flushed = memory.num_allocator_retries() > retries
            if failure := failure_from_memory(reserved, spec.memory_limit_bytes, has_flushed=has_flushed):
                return failure
            return _measurement(
                spec,
                timing,
                build_seconds=build_seconds,
                context_seconds=context_seconds,
                is_build_shared=is_build_shared,
                peak_memory_bytes=peak,
                reserved_memory_bytes=reserved,
                joules_per_sample=joules_per_sample(spec, timing, meter),
                num_graph_breaks=compile_watch.num_graph_breaks(),
                num_steps_taken=training.num_steps_taken,
                why_not_own_loop=own_loop_problem,
                **ending_fields,
            )

        measurement = outcome({})
        if spec.ending_seconds is None or not isinstance(measurement, Measurement):
            return measurement
        ranked.close()  # the other ranks end before this process may be killed
        return outcome(_run_ending(training, spec.ending_seconds, tell, measurement))


def _time_own_loop(
    training: Training, report: StepCallback, count_compilations: Callable[[], int]
) -> tuple[Timing | None, str | None]:
    """Return the timing of the workload's own loop, or None with the reason if the loop raises an error."""
    try:
        return time_own_loop(training, report, count_compilations), None
    except Exception as error:
        failure = failures.failure_from_exception(error)
        if failure.kind != "workload_error":
            raise
        traceback.clear_frames(error.__traceback__)
        return None, failure.message


def joules_per_sample(spec: Trial, timing: Timing, meter: EnergyMeter) -> float | None:
    """Return the joules per sample of whole windows, of which a search times some passes and the update; None if the
    meter has none.

    The power is taken to be the same in all passes and in the update, as the time of a window is composed of theirs.
    """
    measured = meter.joules_per_sample(spec.candidate.effective_batch_size)
    window_seconds, update_seconds = fmean(timing.raw_step_seconds), timing.update_seconds or 0.0
    timed_share = spec.num_timed_micro_batches / spec.candidate.accumulation_steps
    timed_seconds = update_seconds + timed_share * (window_seconds - update_seconds)
    return None if measured is None else measured * window_seconds / timed_seconds


def _measurement(spec: Trial, timing: Timing, **measured: Any) -> Measurement:
    steps = timing.raw_step_seconds
    # The mean, not the median: the throughput of a long run includes its slow steps.
    step_seconds = sum(steps) / len(steps)
    low, high = trimmed_interval(steps)  # a few slow steps may move the mean out of the interval
    timed = msgspec.structs.asdict(timing)
    tokens_per_step = timed.pop("tokens_per_step")
    return Measurement(
        step_seconds=step_seconds,
        step_seconds_interval=(min(low, step_seconds), max(high, step_seconds)),
        samples_per_second=spec.num_ranks * spec.candidate.effective_batch_size / step_seconds,
        tokens_per_second=None if tokens_per_step is None else spec.num_ranks * tokens_per_step / step_seconds,
        **timed,
        **measured,
    )


def _run_ending(training: BaseTraining, limit_seconds: float, tell: Tell, measured: Measurement) -> dict[str, Any]:
    """Run the workload's own evaluation and then its checkpoint, within `limit_seconds`, and return the fields that
    they add to the measurement.

    The parent process enforces the limit. Before each, send it `measured` with the note that this part did not end: its
    result if it has to kill the process.
    """
    ending_began = time.perf_counter()
    seconds_by_field: dict[str, float] = {}
    problems: list[str] = []

    def fields(seconds: float, *overdue: str) -> dict[str, Any]:
        return {
            **seconds_by_field,
            "ending_seconds": seconds,
            "ending_problem": "; ".join([*problems, *overdue]) or None,
        }

    def attempt(name: str, field: str, action: Callable[[], None], phase: str) -> None:
        action_began = time.perf_counter()
        left_seconds = limit_seconds - (action_began - ending_began)
        if left_seconds <= 0:
            problems.append(f"{name} was not run: no time was left")
            return
        measurement = msgspec.structs.replace(
            measured, **fields(limit_seconds, f"{name} did not end within {left_seconds:.3g} s")
        )
        tell(PartialResult(measurement))
        tell(Phase(phase, left_seconds))
        try:
            action()
            synchronize(training.device)
        except (Exception, SystemExit) as error:
            failure = failures.failure_from_exception(error)
            if failure.kind == "oom":
                raise
            problems.append(f"{name} raised {failure.message}")
        else:
            seconds_by_field[field] = time.perf_counter() - action_began

    if training.workload.evaluate is not None:
        attempt("evaluate", "evaluation_seconds", training.evaluate, "evaluating")
    if training.workload.checkpoint is not None:
        with tempfile.TemporaryDirectory(prefix="autotune-amp-", ignore_cleanup_errors=True) as folder:
            write = partial(training.checkpoint, Path(folder))
            attempt("checkpoint", "checkpoint_seconds", write, "writing a checkpoint")
    return fields(time.perf_counter() - ending_began)


def raise_oom_score() -> None:
    """Make the kernel's OOM killer choose this process first."""
    with contextlib.suppress(OSError):  # not Linux, or not allowed: then the kernel's choice stays
        Path("/proc/self/oom_score_adj").write_text("1000")
