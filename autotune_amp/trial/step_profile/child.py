"""Child process of a profile: warms up a training run, traces a few steps, sorts their time by kind of operation, and
counts their FLOPs.
"""

from __future__ import annotations

import inspect
import os
import re
import time
import warnings
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch.profiler import ProfilerActivity, record_function

from autotune_amp.command.agent.flops import count_flops, counting_flops, error_line
from autotune_amp.core.job import Phase, Tell
from autotune_amp.core.outcome import Failure, Profiled, ProfiledStep, StepSplit
from autotune_amp.core.precisions import Precision
from autotune_amp.hardware.measuring import synchronize
from autotune_amp.precision.modes import MIXED_PRECISIONS
from autotune_amp.trial.context import Context
from autotune_amp.trial.failures import raise_if_steps_failed
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS
from autotune_amp.trial.judge import MAX_SKIPS, StepLosses
from autotune_amp.trial.observed_steps import CLOSURE_MARK, ObservedTraining, StepEvent
from autotune_amp.trial.step_profile.breakdown import ProfileJob
from autotune_amp.trial.timing import num_backoffs, raise_if_no_optimizer_step
from autotune_amp.trial.training import BaseTraining, make_training
from autotune_amp.trial.worker import prepare_process, run_guarded

MARK = "autotune_amp"  # first word of the annotations that this package adds to a trace
NUM_PROFILED_STEPS = 3, 7  # least and most steps, after a first one that starts the profiler and is not used
_KINETO_SILENT = "99"  # above all of its log levels: Kineto prints a line at every start and end
PROFILED_SECONDS = 1.0  # take no further steps after this time, beyond the least number

Window: TypeAlias = list[Any]  # the batches of one optimizer step


def profile(context: Context, spec: ProfileJob, tell: Tell) -> Profiled | Failure:
    """Profile a few steps of a training run by kind of operation; return a `Failure` if it fails."""
    return run_guarded(context, spec.trial, lambda: _profile(context, spec, tell))


def _profile(context: Context, spec: ProfileJob, tell: Tell) -> Profiled:
    prepare_process(context, spec.trial)
    model = context.model(torch.device(spec.device))
    with closing(make_training(context.workload, model, spec.trial)) as training:
        training.start_loading()
        warm_up(training)
        with TemporaryDirectory(prefix="autotune_amp-", ignore_cleanup_errors=True) as folder:
            tell(Phase("profiling"))
            profile_split, split_problem = _trace_steps(training, spec.trace_file or str(Path(folder, "trace.json")))
        flops, flops_problem = count_flops(partial(_step, training, _next_window(training)))
        return Profiled(
            device_type=training.device.type,
            split=profile_split,
            split_problem=split_problem,
            flops_per_step=flops,
            flops_problem=flops_problem,
            unfused_optimizer=_unfused_optimizer(training.live.optimizers),
        )


def profile_command(training: ObservedTraining, spec: ProfileJob) -> Generator[StepEvent, None, Profiled]:
    """Profile the next steps of a training command by kind of operation, in its own process."""
    precision, device = spec.trial.candidate.precision, training.device
    flops = flops_problem = None
    assert spec.trace_file is not None  # in a folder of the parent: this process is killed
    with tracing(device, spec.trace_file) as trace:
        for number in trace.step_numbers():
            with record_function(step_mark(precision, number)):
                yield "after step"
                synchronize(device)
    profile_split, split_problem = trace.split(precision)
    try:
        with counting_flops() as counter:
            yield "after step"
        flops, flops_problem = counter.total, counter.problem
    except Exception as error:  # the script raised it in the counter's dispatch mode
        flops_problem = error_line(error)
    return Profiled(
        device_type=device.type,
        split=profile_split,
        split_problem=split_problem,
        flops_per_step=flops,
        flops_problem=flops_problem,
        unfused_optimizer=_unfused_optimizer(training.optimizers),
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
    """Take warm-up steps as a trial does: until fp16's loss scale stops falling and a loop has taken a step."""
    steps: list[StepLosses] = []
    while len(steps) < NUM_WARMUP_STEPS or steps[-1].is_skipped or not training.has_stepped:
        scale = training.loss_scale()
        _step(training, _next_window(training))
        steps.append(StepLosses(is_skipped=num_backoffs(training, scale) > 0))
        raise_if_steps_failed(steps, goes_on=True)
        if len(steps) >= NUM_WARMUP_STEPS + MAX_SKIPS:
            raise_if_no_optimizer_step(training, len(steps))


def _trace_steps(training: BaseTraining, trace_file: str) -> tuple[StepSplit | None, str | None]:
    """Trace a few steps and divide them by kind of operation; None with the reason if no trace can be written."""
    precision = training.spec.candidate.precision
    with tracing(training.device, trace_file) as trace:
        for number in trace.step_numbers():
            window = _next_window(training)  # outside of the step: a trial has timed the wait for data
            with record_function(step_mark(precision, number)):
                _step(training, window)
                synchronize(training.device)
    return trace.split(precision)


class StepTrace:
    """Trace of a few steps by torch.profiler, in the file `path` once the profiler has stopped."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.problem: str | None = None  # why there is no trace

    def step_numbers(self) -> Iterator[int]:
        """Yield the number of each step to trace, until enough were traced: 0 starts the profiler and is not used."""
        least, most = NUM_PROFILED_STEPS
        started = time.perf_counter()
        for number in range(1 + most):
            if number == 1:
                started = time.perf_counter()
            elif number > least and time.perf_counter() - started > PROFILED_SECONDS:
                return
            yield number

    def split(self, precision: Precision) -> tuple[StepSplit | None, str | None]:
        """Return the steps divided by kind of operation; None with the reason if no trace could be written."""
        try:
            trace = msgspec.json.decode(Path(self._path).read_bytes(), type=Trace)
        except (OSError, msgspec.DecodeError) as error:  # with a full disk the file is missing or incomplete
            return None, f"the profiler's trace could not be written ({self.problem or error})"
        return split(trace, precision, range(1, 1 + NUM_PROFILED_STEPS[1])), None


@contextmanager
def tracing(device: torch.device, path: str) -> Iterator[StepTrace]:
    """Run torch.profiler within the context, and write its trace to the file `path` at the end."""
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
    # Otherwise CUPTI stays active, and slows later jobs of a kept process by a third (studies/real_card).
    os.environ.setdefault("TEARDOWN_CUPTI", "1")
    # Ignore the advice to keep events beyond a cycle (acc_events). There is only one cycle, and kept events become
    # Python objects: for a Llama of 12 layers ten times the size of the trace itself.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events at the end of each cycle")
        profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        profiler.start()
    trace = StepTrace(path)
    try:
        yield trace
    finally:
        profiler.stop()
    try:
        profiler.export_chrome_trace(path)
    except OSError as error:
        trace.problem = str(error)


def _unfused_optimizer(optimizers: Iterable[torch.optim.Optimizer]) -> str | None:
    """Return the class of the first optimizer that supports fused kernels but does not use them, or None."""
    for optimizer in optimizers:
        accepts = "fused" in inspect.signature(type(optimizer)).parameters
        if accepts and not any(group.get("fused") for group in optimizer.param_groups):
            return type(optimizer).__name__
    return None


# --- kinds of operations in the trace: pure ---------------------------------------------------------------------------

Kind: TypeAlias = Literal["matrix_products", "casts", "fp32_operations", "optimizer", "other"]

NUM_NAMED = 3

_MATRIX_PRODUCT = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|mv|addmv|_scaled_mm|mkldnn_linear\w*|\w*convolution\w*|\w*rnn\w*"
    r"|_scaled_dot_product_\w+|_(flash|efficient|cudnn)_attention_\w+)"
)
_CONVOLUTION = re.compile(r"aten::\w*convolution\w*")
_CONVERSIONS = ("aten::to", "aten::_to_copy", "aten::copy_")
_LOW_TYPES = {"c10::BFloat16", "c10::Half"}
_FLOAT_TYPES = {*_LOW_TYPES, "float", "double"}
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
# torch annotates each optimizer step itself; the other annotation includes the work of the loss scaler.
_OPTIMIZER_ANNOTATIONS = ("Optimizer.", f"{MARK} update")
# torch annotates each wait for a batch: in a command's step, a trial has timed it.
_LOADER_ANNOTATION = "enumerate(DataLoader)#"
_SECONDS = 1e-6  # the unit of a trace is the microsecond
_start = attrgetter("ts")  # start time of an event


def step_mark(precision: Precision, number: int) -> str:
    """Return the name of a profiled step in the trace."""
    return f"{MARK} {precision} step {number}"


class Event(msgspec.Struct, frozen=True):
    """Event of a Chrome trace; `ts` and `dur` in microseconds.

    In `args`, ``Input type`` lists the types of an operation's tensors, and ``External id`` joins a kernel to the
    operation that launched it.
    """

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        """Return the end of the event in microseconds."""
        return self.ts + self.dur

    @property
    def types(self) -> list[str]:
        """Return the types of the operation's arguments in torch's words."""
        return [kind for kind in self.args.get("Input type", ()) if isinstance(kind, str)]


class Trace(msgspec.Struct, frozen=True, rename={"events": "traceEvents"}):
    """Chrome trace."""

    events: list[Event]


def split(trace: Trace, precision: Precision, numbers: Iterable[int]) -> StepSplit | None:
    """Return the time of the profiled steps with these `numbers` by kind of operation; None if the trace has none."""
    marks = {step_mark(precision, number) for number in numbers}
    spans = sorted((event for event in trace.events if event.ph == "X"), key=_start)
    marked = [event for event in spans if event.cat == "user_annotation" and event.name in marks]
    if not marked:
        return None
    has_kernels = any(event.cat in _KERNELS for event in spans)
    steps = []
    by_name: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for step in marked:
        inside = spans[bisect_left(spans, step.ts, key=_start) : bisect_left(spans, step.end, key=_start)]
        waits = _spans_of(inside, _LOADER_ANNOTATION)
        inside = [
            event if event.end <= step.end else msgspec.structs.replace(event, dur=step.end - event.ts)
            for event in inside
            if event.cat != "cpu_op" or not _is_within(event.ts, waits)
        ]
        seconds: dict[str, float] = defaultdict(float)
        convolution_seconds = 0.0
        for kind, name, microseconds in (_on_device if has_kernels else _on_host)(inside, step, precision):
            seconds[kind] += microseconds * _SECONDS
            by_name[kind][name] += microseconds
            if kind == "matrix_products" and _CONVOLUTION.fullmatch(name):
                convolution_seconds += microseconds * _SECONDS
        busy = _duration(_merge_spans(event for event in inside if event.cat in _KERNELS))
        steps.append(
            ProfiledStep(
                operation_seconds=dict(seconds),
                step_seconds=(step.dur - _duration(waits)) * _SECONDS,
                busy_seconds=busy * _SECONDS,
                convolution_seconds=convolution_seconds,
            )
        )
    return StepSplit(
        steps=tuple(steps),
        largest={kind: _largest_names(names) for kind, names in by_name.items()},
        is_device=has_kernels,
    )


def _largest_names(microseconds: Mapping[str, float]) -> tuple[str, ...]:
    names = [name for name in microseconds if name.startswith("aten::")]  # not the autograd engine's own
    names.sort(key=lambda name: -microseconds[name])
    return tuple(name.removeprefix("aten::") for name in names[:NUM_NAMED])


def _on_host(inside: Sequence[Event], step: Event, precision: Precision) -> Iterator[tuple[Kind, str, float]]:
    """Yield kind, name and own microseconds of the step's operations on the host.

    The optimizer's time is that of its annotations.
    """
    for node, kind in _with_kinds(inside, precision):
        if node.event.tid == step.tid and kind != "optimizer":  # not the threads of a loader
            yield kind, node.event.name, node.event.dur - sum(child.event.dur for child in node.children)
    # A closure, which calls forward and backward, runs inside the optimizer's annotation.
    yield "optimizer", "optimizer", _duration(_optimizer_spans(inside)) - _duration(_spans_of(inside, CLOSURE_MARK))


def _on_device(inside: Sequence[Event], _: Event, precision: Precision) -> Iterator[tuple[Kind, str, float]]:
    """Yield kind and name of the operation that launched each kernel, and the kernel's microseconds.

    A step ends with a synchronisation, so that its kernels end before it does.
    """
    launchers = {
        node.event.args.get("External id"): (kind, node.event.name) for node, kind in _with_kinds(inside, precision)
    }
    for kernel in inside:
        if kernel.cat in _KERNELS:
            # Kernels launched by a CUDA graph have no operation.
            yield *launchers.get(kernel.args.get("External id"), ("other", kernel.name)), kernel.dur


def _optimizer_spans(inside: Sequence[Event]) -> list[tuple[float, float]]:
    return _spans_of(inside, _OPTIMIZER_ANNOTATIONS)


def _spans_of(events: Iterable[Event], annotation: str | tuple[str, ...]) -> list[tuple[float, float]]:
    return _merge_spans(e for e in events if e.cat == "user_annotation" and e.name.startswith(annotation))


def _is_within(time_: float, spans: Iterable[tuple[float, float]]) -> bool:
    return any(start <= time_ < end for start, end in spans)


def _duration(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


@dataclass
class _Node:
    """Operation with the operations that it called."""

    event: Event
    children: list[_Node] = field(default_factory=list)

    def is_cast(self) -> bool:
        """Whether the operation, or one that it calls, copies from one floating-point format to another."""
        if self.event.name == "aten::copy_":
            into_and_source = set(self.event.types[:2])
            return len(into_and_source) == 2 and into_and_source <= _FLOAT_TYPES
        return self.event.name in _CONVERSIONS and any(child.is_cast() for child in self.children)


def _with_kinds(inside: Sequence[Event], precision: Precision) -> Iterator[tuple[_Node, Kind]]:
    """Yield every operation with its kind, which may be that of the operation that called it."""
    updates, closures = _optimizer_spans(inside), _spans_of(inside, CLOSURE_MARK)

    def walk(node: _Node, inherited: Kind) -> Iterator[tuple[_Node, Kind]]:
        kind: Kind = inherited if inherited == "optimizer" else _kind_of_operation(node, precision, inherited)
        yield node, kind
        for child in node.children:
            yield from walk(child, kind)

    for root in _call_trees(event for event in inside if event.cat == "cpu_op"):
        is_update = _is_within(root.event.ts, updates) and not _is_within(root.event.ts, closures)
        yield from walk(root, "optimizer" if is_update else "other")


def _kind_of_operation(node: _Node, precision: Precision, inherited: Kind) -> Kind:
    if node.is_cast():
        return "casts"
    types = _FLOAT_TYPES.intersection(node.event.types)
    is_low = not types.isdisjoint(_LOW_TYPES)
    if types and not is_low and precision in MIXED_PRECISIONS:
        return "fp32_operations"
    if _MATRIX_PRODUCT.fullmatch(node.event.name):
        return "matrix_products"
    # Autocast casts the inputs inside of an operation, and then calls the operation again.
    return "other" if is_low and inherited == "fp32_operations" else inherited


def _call_trees(operations: Iterable[Event]) -> list[_Node]:
    """Return each thread's operations as trees: an operation that begins during another one was called by it."""
    roots: list[_Node] = []
    open_nodes: dict[int | str, list[_Node]] = defaultdict(list)
    for event in sorted(operations, key=lambda event: (event.ts, -event.dur)):
        node, callers = _Node(event), open_nodes[event.tid]
        while callers and callers[-1].event.end <= event.ts:
            callers.pop()
        (callers[-1].children if callers else roots).append(node)
        callers.append(node)
    return roots


def _merge_spans(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the time covered by the events as disjoint spans (start, end) in microseconds."""
    merged: list[tuple[float, float]] = []
    for event in sorted(events, key=_start):
        if merged and event.ts <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], event.end)
        else:
            merged.append((event.ts, event.end))
    return merged
