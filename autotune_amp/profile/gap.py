"""Where a step's time goes: torch.profiler's Chrome trace by kind of operation, as shares, and what to try. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean, geometric_mean, median
from typing import Any, ClassVar, Final, Literal, TypeAlias

import msgspec

from autotune_amp.core.dimensions import Precision, autocast_precision
from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure, Measurement, Profiled, ProfiledStep, Split
from autotune_amp.core.setting import Setting
from autotune_amp.precision.modes import MODES
from autotune_amp.profile.results import PART_NAMES, Gap, NextStep, Part, PartName
from autotune_amp.trial.jobs import Trial, as_failure

# What mixed precision means.
LOW = tuple(name for name, mode in MODES.items() if mode.uses_autocast and autocast_precision(name) == name)


class Profile(Job[Profiled], frozen=True, kw_only=True):
    """A few steps, of the training that `trial` describes, under torch.profiler.

    The Chrome trace is kept in `trace_file`, nowhere where that is None. The FLOPs of a step are counted after it,
    where it `counts_flops`.
    """

    answer: ClassVar[Any] = Profiled
    work: ClassVar[str] = "autotune_amp.profile.child:profile"
    what: ClassVar[Literal["profile"]] = "profile"

    trial: Trial
    trace_file: str | None = None
    counts_flops: bool = True

    @property
    def candidate(self) -> Setting:
        """What it trains in."""
        return self.trial.candidate

    def after(self, problem: Failure | AutotuneAmpError, so_far: Profiled | None) -> Failure:  # noqa: ARG002
        """Nothing is known then, which nothing else hangs on."""
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
# torch marks each step of an optimizer, whoever takes it; our own mark has the scaler's work around it too.
_OPTIMIZER_MARKS = ("Optimizer.", f"{MARK} update")
_SECONDS = 1e-6  # the unit of a trace is the microsecond
_start = attrgetter("ts")  # of an event


def step_mark(precision: Precision, number: int) -> str:
    """The name that a profiled step has in the trace."""
    return f"{MARK} {precision} step {number}"


class Event(msgspec.Struct, frozen=True):
    """An event as the trace has it; `ts` and `dur` in microseconds. An operation's tensors are typed by ``Input type``
    in `args`, and ``External id`` joins a kernel to the operation that launched it."""

    ph: str
    name: str = ""
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str = 0
    args: dict[str, Any] = {}

    @property
    def end(self) -> float:
        """Where it ends, in microseconds."""
        return self.ts + self.dur

    @property
    def types(self) -> list[str]:
        """Those of its arguments, as torch names them."""
        return [kind for kind in self.args.get("Input type", ()) if isinstance(kind, str)]


class Trace(msgspec.Struct, frozen=True, rename={"events": "traceEvents"}):
    """A whole trace."""

    events: list[Event]


def split(trace: Trace, precision: Precision, numbers: Iterable[int]) -> Split | None:
    """The profiled steps with these numbers taken apart; None where the trace has none of them."""
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
    """Kind, name and own microseconds of the step's operations; all of the optimizer's time is known by its marks."""
    for node, kind in _classified(inside, precision):
        if node.event.tid == step.tid and kind != "optimizer":  # loader threads take none of the step's own time
            yield kind, node.event.name, node.event.dur - sum(child.event.dur for child in node.children)
    yield "optimizer", "optimizer", sum(end - start for start, end in _updates(inside))


def _on_device(inside: Sequence[Event], _: Event, precision: Precision) -> Iterator[tuple[Kind, str, float]]:
    """Kind and name of what launched each kernel, and the kernel's microseconds; a step ends with a synchronisation."""
    launchers = {
        node.event.args.get("External id"): (kind, node.event.name) for node, kind in _classified(inside, precision)
    }
    for kernel in inside:
        if kernel.cat in _KERNELS:
            # What a CUDA graph launches has no operation.
            yield *launchers.get(kernel.args.get("External id"), ("other", kernel.name)), kernel.dur


def _updates(inside: Sequence[Event]) -> list[tuple[float, float]]:
    return _merged(e for e in inside if e.cat == "user_annotation" and e.name.startswith(_OPTIMIZER_MARKS))


@dataclass
class _Node:
    """An operation and those that it called."""

    event: Event
    children: list[_Node] = field(default_factory=list)

    def converts(self) -> bool:
        """Whether it, or what it calls, copies from one floating format to another."""
        if self.event.name == "aten::copy_":
            into_and_source = set(self.event.types[:2])
            return len(into_and_source) == 2 and into_and_source <= _FLOAT_TYPES
        return self.event.name in _CONVERSIONS and any(child.converts() for child in self.children)


def _classified(inside: Sequence[Event], precision: Precision) -> Iterator[tuple[_Node, Kind]]:
    """Every operation with its kind: its own, else that of the one that called it."""
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
    # Autocast casts the inputs of an operation inside of it, and then calls it again.
    return "other" if is_low and inherited == "fp32_operations" else inherited


def _trees(operations: Iterable[Event]) -> list[_Node]:
    """The operations of each thread as trees: one that begins before another has ended was called by it."""
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
    """The time that they cover, as spans that do not overlap, in microseconds."""
    merged: list[tuple[float, float]] = []
    for event in sorted(events, key=_start):
        if merged and event.ts <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], event.end)
        else:
            merged.append((event.ts, event.end))
    return merged


MIN_SHARE = 0.05  # of the step; less is not worth a change of code
_FROM_PROFILE: tuple[PartName, ...] = ("matrix_products", "casts", "fp32_operations", "optimizer")


def gap(processes: Sequence[Measurement], profiled: Profiled, rate: float | None) -> Gap | None:
    """Take the step of these processes apart: its profile says how to divide the time that it took without one.

    `rate` is the machine's in matrix products, in FLOP/s, None where unknown. On a CPU the profiled operations are
    stretched or shrunk to the step; on an accelerator the time that no kernel fills is idle. None without a profile.
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
    """Of the step, what convolutions take of its matrix products."""
    products = sum(step.operation_seconds.get("matrix_products", 0.0) for step in steps)
    convolutions = sum(step.convolution_seconds for step in steps)
    seconds = parts.get("matrix_products", 0.0) + parts.get("slow_matrix_products", 0.0)
    return convolutions / products * seconds / whole if products else 0.0


def _median(steps: Sequence[ProfiledStep]) -> ProfiledStep:
    """A step whose every part takes the median of what it takes in these; it lasts what they add up to."""
    kinds = {kind for step in steps for kind in step.operation_seconds}
    parts = {kind: median(step.operation_seconds.get(kind, 0.0) for step in steps) for kind in kinds}
    others = median(step.step_seconds - sum(step.operation_seconds.values()) for step in steps)
    return ProfiledStep(
        operation_seconds=parts,
        step_seconds=sum(parts.values()) + others,
        busy_seconds=median(step.busy_seconds for step in steps),
    )


def _compute_parts(seconds: float, step: ProfiledStep, device_type: str) -> dict[PartName, float]:
    """The parts of `seconds` of computing."""
    scale, idle = seconds / step.step_seconds, dict[PartName, float]()
    if device_type != "cpu":
        summed = sum(step.operation_seconds.values())  # kernels side by side count for the time they had together
        busy = min(step.busy_seconds, seconds)
        scale, idle = busy / summed if summed else 0.0, {"idle": seconds - busy}
    return idle | {name: step.operation_seconds.get(name, 0.0) * scale for name in _FROM_PROFILE}


def next_steps(found: Gap, precision: Precision, unfused_optimizer: str | None) -> tuple[NextStep, ...]:
    """What is worth trying, the largest gain first; the gain is what would be left of the step without that part.

    A part that is small in any of the profiled steps is not worth it, and casts are only where autocast makes them.
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


# The parts of a step that a dimension of the search bears on.
_PARTS_OF: dict[str, tuple[PartName, ...]] = {
    "num_workers": ("loader",),
    "optimizer_impl": ("optimizer", "idle"),  # what the host takes to launch its kernels
    "compile": ("casts", "fp32_operations", "idle", "rest"),
}
DIMENSIONS_OF_A_PROFILE: Final = frozenset({*_PARTS_OF, "memory_format", "cudnn_benchmark", "fp8_recipe"})
_FP8_SHARE = 0.5  # of bf16's time, that a product takes on fp8 tensor cores at the least
_MAX_SHARE = 0.99  # a whole step does not vanish


def max_speedups(found: Gap) -> dict[str, float]:
    """By dimension of the search, what a step gains at most by it: what would be left without the parts that it bears
    on. Only of those that a profile says something of."""
    shares = {name: sum(map(found.share, parts)) for name, parts in _PARTS_OF.items()}
    shares["memory_format"] = shares["cudnn_benchmark"] = found.convolution_share
    products = found.share("matrix_products") + found.share("slow_matrix_products") - found.convolution_share
    shares["fp8_recipe"] = shares["compile"] + (1 - _FP8_SHARE) * products
    return {name: 1 / (1 - min(share, _MAX_SHARE)) for name, share in shares.items()}


def _dimensions(part: Part, found: Gap, unfused_optimizer: str | None) -> tuple[str, ...]:
    """Those of the search that bear on a part, in the order in which they are worth a thought."""
    ours = [name for name, parts in _PARTS_OF.items() if part.name in parts]
    if part.name == "optimizer" and unfused_optimizer is None:
        ours = []
    if part.name == "slow_matrix_products" and found.convolution_share >= MIN_SHARE:
        ours.append("memory_format")
    # A larger batch has fewer updates, more for each product and kernel to do, and casts its weights once.
    if part.name in ("optimizer", "slow_matrix_products", "casts", "idle"):
        ours.append("batch_size")
    return tuple(ours)
