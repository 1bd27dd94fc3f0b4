"""Child process of a profile: warms up a training run, traces a few steps and counts their FLOPs."""

from __future__ import annotations

import inspect
import os
import time
import warnings
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import msgspec
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, record_function
from torch.utils.flop_counter import FlopCounterMode

from autotune_amp.core.job import Phase, Tell
from autotune_amp.core.outcome import Failure, Profiled, Split
from autotune_amp.hardware.measuring import synchronize
from autotune_amp.profile.gap import MARK, Profile, Trace, split, step_mark
from autotune_amp.trial.context import Context, LoopState, each
from autotune_amp.trial.failures import raise_if_failed
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS
from autotune_amp.trial.judge import MAX_SKIPS, RunEvidence, StepLosses
from autotune_amp.trial.timing import num_backoffs, require_step
from autotune_amp.trial.training import BaseTraining, Training, make_training
from autotune_amp.trial.worker import guarded, prepare

NUM_PROFILED_STEPS = 3, 7  # least and most steps, after the first, which starts the profiler and does not count
_ABOVE_ALL_LEVELS = "99"  # Kineto writes a line to standard error at every start and end
PROFILED_SECONDS = 1.0  # no further steps are begun after this time, once the least number is done

Window: TypeAlias = list[Any]  # the batches of one optimizer step


def profile(context: Context, spec: Profile, tell: Tell) -> Profiled | Failure:
    """Profile a few steps of a training run by kind of operation; return a `Failure` if it fails."""
    return guarded(context, spec.trial, lambda: _profile(context, spec, tell))


def _profile(context: Context, spec: Profile, tell: Tell) -> Profiled:
    prepare(context, spec.trial)
    model = context.model(torch.device(spec.device))
    with closing(make_training(context.workload, model, spec.trial)) as training:
        training.start_loading()
        warm_up(training)
        with TemporaryDirectory(prefix="autotune_amp-", ignore_cleanup_errors=True) as folder:
            tell(Phase("profiling"))
            found, problem = _traced(training, spec.trace_file or str(Path(folder, "trace.json")))
        flops = flops_problem = None
        if spec.counts_flops:
            flops, flops_problem = count_flops(partial(_step, training, _next_window(training)), training.device.type)
        return Profiled(
            device_type=training.device.type,
            split=found,
            split_problem=problem,
            flops_per_step=flops,
            flops_problem=flops_problem,
            unfused_optimizer=unfused_optimizer(training),
        )


def _next_window(training: BaseTraining) -> Window:
    return [training.next_batch() for _ in range(training.spec.candidate.accumulation_steps)]


def _step(training: BaseTraining, window: Window) -> None:
    with record_function(f"{MARK} forward and backward"):
        for batch in window:
            training.forward_backward(batch)
    with record_function(f"{MARK} update"):
        training.update()


def warm_up(training: BaseTraining) -> None:
    """Warm up as a trial does: longer while fp16's scale comes down, and until a loop takes its first update."""
    steps: list[StepLosses] = []
    while len(steps) < NUM_WARMUP_STEPS or steps[-1].is_skipped or not training.has_stepped:
        scale = training.loss_scale()
        _step(training, _next_window(training))
        steps.append(StepLosses(is_skipped=num_backoffs(training, scale) > 0))
        raise_if_failed(RunEvidence(steps=tuple(steps), goes_on=True))
        if len(steps) >= NUM_WARMUP_STEPS + MAX_SKIPS:
            require_step(training, len(steps))


def _traced(training: BaseTraining, trace_file: str) -> tuple[Split | None, str | None]:
    """Trace a few steps and divide them by kind of operation; None with the reason if no trace can be written."""
    precision, device = training.spec.candidate.precision, training.device
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    least, most = NUM_PROFILED_STEPS
    os.environ.setdefault("KINETO_LOG_LEVEL", _ABOVE_ALL_LEVELS)
    # Otherwise CUPTI stays active: the next job in a kept process took a third longer (studies/real_card).
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    started = time.perf_counter()
    # Events that are to outlive a cycle become Python objects at its end: for a Llama of 12 layers ten times the size
    # of the trace itself. There is only one cycle.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events at the end of each cycle")
        profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        profiler.start()
    try:
        for number in range(1 + most):
            if number == 1:
                started = time.perf_counter()
            elif number > least and time.perf_counter() - started > PROFILED_SECONDS:
                break
            window = _next_window(training)  # the wait for data was timed without the profiler
            with record_function(step_mark(precision, number)):
                _step(training, window)
                synchronize(device)
    finally:
        profiler.stop()
    try:
        profiler.export_chrome_trace(trace_file)
        trace = msgspec.json.decode(Path(trace_file).read_bytes(), type=Trace)
    except (OSError, msgspec.DecodeError) as error:  # with a full disk the file is missing or incomplete
        return None, f"the profiler's trace could not be written ({error})"
    return split(trace, precision, range(1, 1 + most)), None


def unfused_optimizer(training: BaseTraining) -> str | None:
    """Return the class of the first optimizer that supports fused kernels but does not use them, or None."""
    optimizers: list[torch.optim.Optimizer] = []
    if isinstance(training.model, LoopState):
        optimizers = list(training.model.optimizers.values())
    elif isinstance(training, Training):
        optimizers = list(each(training.optimizer))
    for optimizer in optimizers:
        accepts = "fused" in inspect.signature(type(optimizer)).parameters
        if accepts and not any(group.get("fused") for group in optimizer.param_groups):
            return type(optimizer).__name__
    return None


def count_flops(step: Callable[[], object], device_type: str) -> tuple[int | None, str | None]:
    """Run `step` without compiling and return its FLOPs; None with the reason if they cannot be counted.

    A product of m x k by k x n counts 2mkn, in any format. Recurrent layers run in kernels that torch's counter does
    not know; so does attention on a CPU, which is therefore run as separate products.
    """
    counter = FlopCounterMode(display=False)
    attention = sdpa_kernel(SDPBackend.MATH) if device_type == "cpu" else nullcontext()
    try:
        with torch.compiler.set_stance("force_eager"), attention, counter, warnings.catch_warnings():
            # Caused by the counter's own hooks, which a module that torch.compile wrapped warns of and calls twice.
            warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
            step()
    except Exception as error:  # not every model supports the mode in which the counter runs operations
        return None, (str(error) or type(error).__name__).splitlines()[0]
    flops = counter.get_total_flops()
    return (flops, None) if flops else (None, "torch's FLOP counter knows none of its operations")
