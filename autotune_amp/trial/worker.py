"""What a process does for its jobs: probe the device, describe the workload, run a trial; what errors amount to."""

from __future__ import annotations

import contextlib
import errno
import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import trimmed_interval
from autotune_amp.core.job import Tell
from autotune_amp.core.outcome import Description, Failure, FailureKind, Measurement, Outcome
from autotune_amp.core.setting import Precision, Setting
from autotune_amp.core.workload import Workload
from autotune_amp.hardware import cuda, measure
from autotune_amp.precision import torch_state
from autotune_amp.precision.torch_state import CUDA_FLAGS
from autotune_amp.trial import data
from autotune_amp.trial.context import Context, LoopState
from autotune_amp.trial.energy import Counter, EnergyMeter, counter_of
from autotune_amp.trial.full_run import Ending, Finish, check_signatures
from autotune_amp.trial.heap import hold_heap
from autotune_amp.trial.jobs import Check, Describe, Probe, Trial
from autotune_amp.trial.memory import PeakMemory, is_memory_short
from autotune_amp.trial.optimizers import make_optimizer
from autotune_amp.trial.sizes import Look, look
from autotune_amp.trial.timing import CompileWatch, NonFiniteError, Timing, forget_compiled, time_steps
from autotune_amp.trial.training import BaseTraining, make_training

_OOM_TEXTS = (
    "out of memory",  # CUDA, its driver, Triton, Metal, SYCL
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "bad_alloc",
    "alloc_failed",  # cuBLAS, cuDNN and AMD's
)
# What libraries say where memory is short, and where it is not: after an error of the card, in a broken installation.
_OOM_TEXTS_WHERE_SHORT = (
    "status_not_initialized",  # cuBLAS and cuDNN take memory for a handle
    "cudnn_status_internal_error",  # cuDNN loads kernels late (pytorch#81620); ..._ALLOCATION_FAILED is one of these
    "unable to find an engine",  # no algorithm of a convolution has a workspace that fits
    "unable to find a valid cudnn algorithm",
)
_UNSUPPORTED_TEXTS = (
    "not implemented for 'half'",
    "not implemented for 'bfloat16'",
    "not supported for dtype",
    "could not create a primitive",  # oneDNN
    "no kernel image is available",  # code for other cards than this one
    "flashattention only support",  # "... supports Ampere GPUs or newer", "... support fp16 and bf16 data type"
    "no available kernel",  # attention limited to kernels that this card, or the precision, does not have
    "cublas_status_not_supported",
    "cublas_status_arch_mismatch",
    "out of resource: shared memory",  # a Triton kernel that wants more of it than the card has
)
_OWN_FILES = Path(__file__).parents[1]


def classify(error: BaseException) -> Failure:
    """The failure that an exception from the user's workload amounts to."""
    message = _printable(f"{type(error).__name__}: {error}".splitlines()[0])
    if isinstance(error, AutotuneAmpError):
        return Failure(kind="workload_error", message=error.message, details=error.next_step)
    if isinstance(error, NonFiniteError):
        return Failure(kind="nonfinite", message=str(error))
    return Failure(kind=_kind(error), message=message[:500], details=user_traceback(error))


def _kind(error: BaseException) -> FailureKind:
    text = str(error).lower()
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or getattr(error, "errno", None) == errno.ENOMEM:
        return "oom"
    if isinstance(error, RuntimeError) or type(error).__module__.startswith("triton."):
        if any(part in text for part in _OOM_TEXTS):
            return "oom"
        if any(part in text for part in _OOM_TEXTS_WHERE_SHORT) and is_memory_short():
            return "oom"
        if isinstance(error, NotImplementedError) or any(part in text for part in _UNSUPPORTED_TEXTS):
            return "unsupported"
    return "workload_error"


def user_traceback(error: BaseException) -> str:
    """The traceback without this package's own frames, which tell the user nothing; its last 8,000 characters."""
    summary = traceback.TracebackException.from_exception(error, capture_locals=False)
    kept = [f for f in summary.stack if not Path(f.filename).is_relative_to(_OWN_FILES) or "workloads" in f.filename]
    summary.stack = traceback.StackSummary.from_list(kept)
    return _printable("".join(summary.format())[-8000:])


def _printable(text: str) -> str:
    """`text` as JSON can hold it: a file name of undecodable bytes has surrogates in it."""
    return text.encode(errors="backslashreplace").decode()


# Matrix products are taken to run always.
_MODULES: dict[str, type[nn.Module]] = {"cudnn.conv": _ConvNd, "cudnn.rnn": nn.RNNBase}
_OPERATORS = {"cudnn.conv": "convolution", "cudnn.rnn": "_rnn"}  # cuDNN's RNN and MIOpen's


def as_run(
    workload: Workload,
    model: nn.Module,
    device: torch.device,
    state: Mapping[str, Any],
    batch_size: int | None,
    *,
    has_tf32: bool,
) -> tuple[Precision, bool]:
    """`torch_state.as_found` of the flags that concern a step of `batch_size`; a precision of the workload's own is so.

    One step is taken where that alone can tell; with None for `batch_size` none is, and all flags count.
    """
    if workload.precision is not None:
        return workload.precision, True
    if not has_tf32:
        return torch_state.as_found(state, device.type, CUDA_FLAGS)
    found = torch_state.as_found(state, device.type)
    absent = [flag for flag, kind in _MODULES.items() if not any(isinstance(part, kind) for part in model.modules())]
    _, could_be_strict = torch_state.as_found(state, device.type, absent)
    if batch_size is None or found[1] or not could_be_strict:
        return found
    candidate = Setting(precision=found[0], batch_size=batch_size, as_found=True)
    spec = Trial(candidate=candidate, device=str(device), torch_state=dict(state))
    used = used_flags(workload, model, spec)
    return torch_state.as_found(state, device.type, [flag for flag in absent if flag not in used])


def used_flags(workload: Workload, model: nn.Module, spec: Trial) -> frozenset[str]:
    """Which of cuDNN's flags concern an operator of a step, taken as `spec` says; all of them where it cannot be known.

    It cannot where the step fails, and where an operator that is not PyTorch's own may call any other.
    """
    watch = _Watch()
    try:
        with closing(make_training(workload, model, spec)) as training:
            training.start_loading()
            batch = training.next_batch()
            # Compiled code hides its operators, and compiling takes long.
            with torch.compiler.set_stance("force_eager"), watch:
                training.forward_backward(batch)
    except Exception as error:  # the user's code may raise anything
        traceback.clear_frames(error.__traceback__)
        return frozenset(_OPERATORS)
    return frozenset(watch.used)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.used: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_own = func.namespace in ("aten", "profiler")  # an optimizer tells the profiler of its steps
        self.used |= {flag for flag, name in _OPERATORS.items() if not is_own or name in func.name()}
        return func(*args, **(kwargs or {}))


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
    low = torch_state.HALF_DTYPES
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
