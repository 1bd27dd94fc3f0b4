"""Time of a step by kind of operation from torch.profiler's Chrome trace, as shares, with advice. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean, geometric_mean, median
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from autotune_amp.core.dimensions import Precision, autocast_precision
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure, Measurement, Profiled, ProfiledStep, Split
from autotune_amp.core.setting import Setting
from autotune_amp.dimensions import BY_NAME, DIMENSIONS
from autotune_amp.dimensions.dimension import Dimension
from autotune_amp.precision.modes import MODES
from autotune_amp.profile.results import PART_NAMES, Gap, NextStep, Part, PartName
from autotune_amp.trial.jobs import Trial, as_failure

# The mixed precisions.
LOW = tuple(name for name, mode in MODES.items() if mode.uses_autocast and autocast_precision(name) == name)


class Profile(Job[Profiled], frozen=True, kw_only=True):
    """Job that runs a few steps of the training run described by `trial` under torch.profiler.

    The Chrome trace is kept in `trace_file`, or discarded if that is None. With `counts_flops` the FLOPs of a step are
    counted afterwards.
    """

    answer: ClassVar[Any] = Profiled
    work: ClassVar[str] = "autotune_amp.profile.child:profile"
    what: ClassVar[Literal["profile"]] = "profile"

    trial: Trial
    trace_file: str | None = None
    counts_flops: bool = True

    @property
    def candidate(self) -> Setting:
        """Return the setting of the profiled steps."""
        return self.trial.candidate

    def after(self, problem: Failure | AutotuneAmpError, so_far: Profiled | None) -> Failure:  # noqa: ARG002
        """Return a `Failure`: no other job depends on a profile."""
        return as_failure(problem)


Kind: TypeAlias = Literal["matrix_products", "casts", "fp32_operations", "optimizer", "other"]

MARK = "autotune_amp"
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
# torch marks each step of an optimizer, whoever calls it; our own mark includes the scaler's work.
_OPTIMIZER_MARKS = ("Optimizer.", f"{MARK} update")
_SECONDS = 1e-6  # the unit of a trace is the microsecond
_start = attrgetter("ts")  # start time of an event


def step_mark(precision: Precision, number: int) -> str:
    """Return the name of a profiled step in the trace."""
    return f"{MARK} {precision} step {number}"


class Event(msgspec.Struct, frozen=True):
    """An event of a Chrome trace; `ts` and `dur` in microseconds.

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
    """A whole Chrome trace."""

    events: list[Event]


def split(trace: Trace, precision: Precision, numbers: Iterable[int]) -> Split | None:
    """Return the time of these profiled steps by kind of operation; None if the trace has none of them."""
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
        seconds: dict[str, float] = defaultdict(float)
        convolution_seconds = 0.0
        for kind, name, microseconds in (_on_device if has_kernels else _on_host)(inside, step, precision):
            seconds[kind] += microseconds * _SECONDS
            by_name[kind][name] += microseconds
            if kind == "matrix_products" and _CONVOLUTION.fullmatch(name):
                convolution_seconds += microseconds * _SECONDS
        busy = sum(end - start for start, end in _merged(event for event in inside if event.cat in _KERNELS))
        steps.append(
            ProfiledStep(
                operation_seconds=dict(seconds),
                step_seconds=step.dur * _SECONDS,
                busy_seconds=busy * _SECONDS,
                convolution_seconds=convolution_seconds,
            )
        )
    return Split(
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

    The optimizer's time is that of its marks.
    """
    for node, kind in _classified(inside, precision):
        if node.event.tid == step.tid and kind != "optimizer":  # loader threads take none of the step's own time
            yield kind, node.event.name, node.event.dur - sum(child.event.dur for child in node.children)
    yield "optimizer", "optimizer", sum(end - start for start, end in _updates(inside))


def _on_device(inside: Sequence[Event], _: Event, precision: Precision) -> Iterator[tuple[Kind, str, float]]:
    """Yield kind and name of the operation that launched each kernel, and the kernel's microseconds.

    A step ends with a synchronisation, so that its kernels end before it does.
    """
    launchers = {
        node.event.args.get("External id"): (kind, node.event.name) for node, kind in _classified(inside, precision)
    }
    for kernel in inside:
        if kernel.cat in _KERNELS:
            # Kernels launched by a CUDA graph have no operation.
            yield *launchers.get(kernel.args.get("External id"), ("other", kernel.name)), kernel.dur


def _updates(inside: Sequence[Event]) -> list[tuple[float, float]]:
    return _merged(e for e in inside if e.cat == "user_annotation" and e.name.startswith(_OPTIMIZER_MARKS))


@dataclass
class _Node:
    """An operation and the operations that it called."""

    event: Event
    children: list[_Node] = field(default_factory=list)

    def converts(self) -> bool:
        """Return whether the operation, or one that it calls, copies from one floating-point format to another."""
        if self.event.name == "aten::copy_":
            into_and_source = set(self.event.types[:2])
            return len(into_and_source) == 2 and into_and_source <= _FLOAT_TYPES
        return self.event.name in _CONVERSIONS and any(child.converts() for child in self.children)


def _classified(inside: Sequence[Event], precision: Precision) -> Iterator[tuple[_Node, Kind]]:
    """Yield every operation with its kind: its own, or that of the calling operation."""
    updates = _updates(inside)

    def walk(node: _Node, inherited: Kind) -> Iterator[tuple[_Node, Kind]]:
        kind: Kind = inherited if inherited == "optimizer" else _kind(node, precision, inherited)
        yield node, kind
        for child in node.children:
            yield from walk(child, kind)

    for root in _trees(event for event in inside if event.cat == "cpu_op"):
        is_update = any(start <= root.event.ts < end for start, end in updates)
        yield from walk(root, "optimizer" if is_update else "other")


def _kind(node: _Node, precision: Precision, inherited: Kind) -> Kind:
    if node.converts():
        return "casts"
    types = _FLOAT_TYPES.intersection(node.event.types)
    is_low = not types.isdisjoint(_LOW_TYPES)
    if types and not is_low and precision in LOW:
        return "fp32_operations"
    if _MATRIX_PRODUCT.fullmatch(node.event.name):
        return "matrix_products"
    # Autocast casts the inputs inside of an operation, and then calls the operation again.
    return "other" if is_low and inherited == "fp32_operations" else inherited


def _trees(operations: Iterable[Event]) -> list[_Node]:
    """Return each thread's operations as trees: one that begins before another has ended was called by it."""
    roots: list[_Node] = []
    open_nodes: dict[int | str, list[_Node]] = defaultdict(list)
    for event in sorted(operations, key=lambda event: (event.ts, -event.dur)):
        node, callers = _Node(event), open_nodes[event.tid]
        while callers and callers[-1].event.end <= event.ts:
            callers.pop()
        (callers[-1].children if callers else roots).append(node)
        callers.append(node)
    return roots


def _merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Return the time covered by the events as disjoint spans in microseconds."""
    merged: list[tuple[float, float]] = []
    for event in sorted(events, key=_start):
        if merged and event.ts <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], event.end)
        else:
            merged.append((event.ts, event.end))
    return merged


MIN_SHARE = 0.05  # share of the step; smaller parts are not worth a change of code
_FROM_PROFILE: tuple[PartName, ...] = ("matrix_products", "casts", "fp32_operations", "optimizer")


def gap(processes: Sequence[Measurement], profiled: Profiled, rate: float | None) -> Gap | None:
    """Divide the mean step of these processes into parts, in the proportions of the profile.

    `rate` is the machine's rate of matrix products in FLOP/s, None if unknown. On a CPU the profiled operations are
    scaled to the step; on an accelerator the time without a kernel is idle. None without a profile.
    """
    split, flops, device_type = profiled.split, profiled.flops_per_step, profiled.device_type
    if split is None:
        return None
    whole = geometric_mean(process.step_seconds for process in processes)
    waits = [min(1.0, process.data_seconds / process.step_seconds) for process in processes]
    wait = whole * fmean(waits)
    is_seen = device_type == "cpu" or split.is_device

    def taken_apart(step: ProfiledStep) -> dict[PartName, float]:
        parts = _compute_parts(whole - wait, step, device_type) if is_seen else {}
        products = parts.get("matrix_products", 0.0)
        if flops and rate and products:
            parts["matrix_products"] = min(products, flops / rate)
            parts["slow_matrix_products"] = products - parts["matrix_products"]
        parts["loader"] = wait
        parts["rest"] = max(0.0, whole - sum(parts.values()))
        return parts

    usual, each = taken_apart(_median(split.steps)), [taken_apart(step) for step in split.steps]

    def part(name: PartName) -> Part:
        shares = waits if name == "loader" else [parts.get(name, 0.0) / whole for parts in (usual, *each)]
        kind = "other" if name == "rest" else name
        return Part(
            name=name,
            seconds=usual[name],
            share=usual[name] / whole,
            share_range=(min(shares), max(shares)),
            largest=() if name == "optimizer" else split.largest.get(kind, ()),
        )

    return Gap(
        machine_flops_per_second=rate,
        attained_flops_per_second=flops / whole if flops else None,
        flops_per_step=flops,
        parts=tuple(part(name) for name in PART_NAMES if name in usual),
        convolution_share=_convolution_share(split.steps, usual, whole),
        note=None if is_seen else f"torch.profiler sees no kernels of {device_type}",
    )


def _convolution_share(steps: Sequence[ProfiledStep], parts: Mapping[PartName, float], whole: float) -> float:
    """Return the share of the step that convolutions take, as part of its matrix products."""
    products = sum(step.operation_seconds.get("matrix_products", 0.0) for step in steps)
    convolutions = sum(step.convolution_seconds for step in steps)
    seconds = parts.get("matrix_products", 0.0) + parts.get("slow_matrix_products", 0.0)
    return convolutions / products * seconds / whole if products else 0.0


def _median(steps: Sequence[ProfiledStep]) -> ProfiledStep:
    """Return a step in which every part takes the median of its times in these steps, and the whole their sum."""
    kinds = {kind for step in steps for kind in step.operation_seconds}
    parts = {kind: median(step.operation_seconds.get(kind, 0.0) for step in steps) for kind in kinds}
    others = median(step.step_seconds - sum(step.operation_seconds.values()) for step in steps)
    return ProfiledStep(
        operation_seconds=parts,
        step_seconds=sum(parts.values()) + others,
        busy_seconds=median(step.busy_seconds for step in steps),
    )


def _compute_parts(seconds: float, step: ProfiledStep, device_type: str) -> dict[PartName, float]:
    """Return the parts of `seconds` of computing, in the proportions of a profiled step."""
    scale, idle = seconds / step.step_seconds, dict[PartName, float]()
    if device_type != "cpu":
        summed = sum(step.operation_seconds.values())  # overlapping kernels share the time in which both ran
        busy = min(step.busy_seconds, seconds)
        scale, idle = busy / summed if summed else 0.0, {"idle": seconds - busy}
    return idle | {name: step.operation_seconds.get(name, 0.0) * scale for name in _FROM_PROFILE}


def next_steps(found: Gap, precision: Precision, unfused_optimizer: str | None) -> tuple[NextStep, ...]:
    """Return the next steps to try, the largest gain first; the gain is the speed-up if the part took no time.

    Parts that are small in any of the profiled steps are left out, and so are casts except under autocast.
    """
    skipped = ("matrix_products",) if precision in LOW else ("matrix_products", "casts")
    steps = [
        NextStep(
            precision=precision,
            part=part.name,
            share=part.share,
            share_range=part.share_range,
            max_speedup=1 / (1 - part.share),
            dimensions=_dimensions(part, found, unfused_optimizer),
        )
        for part in found.parts
        if part.name not in skipped and part.share_range[0] >= MIN_SHARE and part.share < 1
    ]
    return tuple(sorted(steps, key=lambda step: -step.share))


_MAX_SHARE = 0.99  # upper bound of a share: a whole step does not vanish


def max_speedups(found: Gap) -> dict[str, float]:
    """Return an upper bound of the speed-up for each dimension: the step time if the parts it affects took no time.

    Dimensions about which a profile says nothing are left out.
    """
    parts: dict[str, float] = {part.name: part.share for part in found.parts}
    parts["convolutions"] = found.convolution_share

    def removable(dimension: Dimension[Any]) -> float:
        own = sum(share * parts.get(name, 0.0) for name, share in dimension.removable.items())
        return own + sum(removable(BY_NAME[name]) for name in dimension.sets_also)

    return {d.name: 1 / (1 - min(removable(d), _MAX_SHARE)) for d in DIMENSIONS if d.removable}


def _dimensions(part: Part, found: Gap, unfused_optimizer: str | None) -> tuple[str, ...]:
    """Return the dimensions of the search that affect a part, the most promising first."""
    ours = [dimension.name for dimension in DIMENSIONS if dimension.removable.get(part.name) == 1]
    if part.name == "optimizer" and unfused_optimizer is None:
        ours = []
    if part.name == "slow_matrix_products" and found.convolution_share >= MIN_SHARE:
        ours.append("memory_format")
    # A larger batch has fewer updates, more work per product and kernel, and casts its weights once.
    if part.name in ("optimizer", "slow_matrix_products", "casts", "idle"):
        ours.append("batch_size")
    return tuple(ours)
