"""Where a step's time goes: torch.profiler's Chrome trace by kind of operation, as shares, and what to try. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from autotune_amp.core.setting import Precision
from autotune_amp.profile.job import LOW, ProfiledStep, Split
from autotune_amp.profile.results import Gap, NextStep, Part, PartName

Kind: TypeAlias = Literal["matrix_products", "casts", "fp32_operations", "optimizer", "other"]

MARK = "autotune_amp"
NUM_NAMED = 3

_MATRIX_PRODUCT = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|mv|addmv|_scaled_mm|mkldnn_linear\w*|\w*convolution\w*|\w*rnn\w*"
    r"|_scaled_dot_product_\w+|_(flash|efficient|cudnn)_attention_\w+)"
)
_CONVERSIONS = ("aten::to", "aten::_to_copy", "aten::copy_")
_LOW_TYPES = {"c10::BFloat16", "c10::Half"}
_FLOAT_TYPES = {*_LOW_TYPES, "float", "double"}
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
# torch marks each step of an optimizer, whoever takes it; our own mark has the scaler's work around it too.
_OPTIMIZER_MARKS = ("Optimizer.", f"{MARK} update")
_SECONDS = 1e-6  # the unit of a trace is the microsecond


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
    steps = [event for event in spans if event.cat == "user_annotation" and event.name in marks]
    if not steps:
        return None
    has_kernels = any(event.cat in _KERNELS for event in spans)
    tallies = []
    for step in steps:
        inside = spans[bisect_left(spans, step.ts, key=_start) : bisect_left(spans, step.end, key=_start)]
        tallies.append(_tally(inside, step, precision, has_kernels=has_kernels))
    named: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for tally in tallies:
        for (kind, name), microseconds in tally.microseconds.items():
            named[kind][name] += microseconds
    return Split(
        steps=tuple(tally.profiled(step) for step, tally in zip(steps, tallies, strict=True)),
        largest={kind: _largest_names(microseconds) for kind, microseconds in named.items()},
        is_device=has_kernels,
    )


def _start(event: Event) -> float:
    return event.ts


@dataclass
class _Tally:
    """Microseconds of one step by kind and name of the operation, and how long the device was busy."""

    microseconds: dict[tuple[Kind, str], float] = field(default_factory=lambda: defaultdict(float))
    busy: float = 0.0

    def profiled(self, step: Event) -> ProfiledStep:
        by_kind: dict[str, float] = defaultdict(float)
        for (kind, _), microseconds in self.microseconds.items():
            by_kind[kind] += microseconds * _SECONDS
        return ProfiledStep(
            operation_seconds=dict(by_kind), step_seconds=step.dur * _SECONDS, busy_seconds=self.busy * _SECONDS
        )


def _tally(inside: Sequence[Event], step: Event, precision: Precision, *, has_kernels: bool) -> _Tally:
    marks = [e for e in inside if e.cat == "user_annotation" and e.name.startswith(_OPTIMIZER_MARKS)]
    updates = _merged(marks)
    operations = list(_classified(inside, updates, precision))
    tally = _Tally()
    if not has_kernels:
        for node, kind in operations:
            # What loader threads do takes none of the step's own time, and all of the optimizer's is known.
            if node.event.tid == step.tid and kind != "optimizer":
                tally.microseconds[kind, node.event.name] += node.own_microseconds()
        tally.microseconds["optimizer", "optimizer"] += sum(end - start for start, end in updates)
        return tally
    launchers = {node.event.args.get("External id"): (kind, node.event.name) for node, kind in operations}
    kernels = [event for event in inside if event.cat in _KERNELS]  # a step ends with a synchronisation
    for kernel in kernels:
        launcher = launchers.get(kernel.args.get("External id"), ("other", kernel.name))  # a graph has no operation
        tally.microseconds[launcher] += kernel.dur
    tally.busy = sum(end - start for start, end in _merged(kernels))
    return tally


@dataclass
class _Node:
    """An operation and those that it called."""

    event: Event
    children: list[_Node] = field(default_factory=list)

    def own_microseconds(self) -> float:
        return self.event.dur - sum(child.event.dur for child in self.children)

    def converts(self) -> bool:
        """Whether it, or what it calls, copies from one floating format to another."""
        if self.event.name == "aten::copy_":
            into_and_source = set(self.event.types[:2])
            return len(into_and_source) == 2 and into_and_source <= _FLOAT_TYPES
        return self.event.name in _CONVERSIONS and any(child.converts() for child in self.children)


def _classified(
    inside: Sequence[Event], updates: Sequence[tuple[float, float]], precision: Precision
) -> Iterator[tuple[_Node, Kind]]:
    """Every operation with its kind: its own, else that of the one that called it."""

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
    for event in sorted(events, key=lambda event: event.ts):
        if merged and event.ts <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], event.end)
        else:
            merged.append((event.ts, event.end))
    return merged


def _largest_names(microseconds: dict[str, float]) -> tuple[str, ...]:
    names = [name for name in microseconds if name.startswith("aten::")]  # not the autograd engine's own
    names.sort(key=lambda name: -microseconds[name])
    return tuple(name.removeprefix("aten::") for name in names[:NUM_NAMED])


MIN_SHARE = 0.05  # of the step; less is not worth a change of code


class Step(NamedTuple):
    """A step as it was timed, in seconds: the wait for its data, and what came after it, not profiled.

    `data_share_range` is the least and the largest share that the wait had in any process.
    """

    data_seconds: float
    compute_seconds: float
    data_share_range: tuple[float, float]


class Conditions(NamedTuple):
    """What the advice depends on; see `job.Profiled`."""

    unfused_optimizer: str | None
    is_compiled: bool
    num_loader_workers: int | None


def gap(step: Step, split: Split, flops: int | None, rate: float | None, device_type: str) -> Gap:
    """Take a step apart: its profile says how to divide the time that it took without being profiled.

    `flops` are those of its matrix products, `rate` the machine's in FLOP/s; None where unknown. On a CPU the
    profiled operations are stretched or shrunk to the step; on an accelerator the time that no kernel fills is idle.
    """
    whole = step.data_seconds + step.compute_seconds
    is_seen = device_type == "cpu" or split.is_device

    def taken_apart(profiled: ProfiledStep) -> dict[PartName, float]:
        parts = _compute_parts(step.compute_seconds, profiled, device_type) if is_seen else {}
        products = parts.get("matrix_products", 0.0)
        if flops and rate and products:
            parts["matrix_products"] = min(products, flops / rate)
            parts["slow_matrix_products"] = products - parts["matrix_products"]
        parts["loader"] = step.data_seconds
        parts["rest"] = max(0.0, whole - sum(parts.values()))
        return parts

    usual, each = taken_apart(_median(split.steps)), [taken_apart(profiled) for profiled in split.steps]

    def share_range(name: PartName) -> tuple[float, float]:
        if name == "loader":
            return step.data_share_range
        shares = [parts.get(name, 0.0) / whole for parts in (usual, *each)]
        return min(shares), max(shares)

    return Gap(
        machine_flops_per_second=rate,
        attained_flops_per_second=flops / whole if flops else None,
        flops_per_step=flops,
        parts=tuple(
            Part(
                name=name,
                seconds=usual[name],
                share=usual[name] / whole,
                share_range=share_range(name),
                largest=_largest(split, name),
            )
            for name in _ORDER
            if name in usual
        ),
        note=None if is_seen else f"torch.profiler sees no kernels of {device_type}",
    )


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


_ORDER: tuple[PartName, ...] = (
    "matrix_products",
    "slow_matrix_products",
    "casts",
    "fp32_operations",
    "optimizer",
    "loader",
    "idle",
    "rest",
)
_FROM_PROFILE: tuple[PartName, ...] = ("matrix_products", "casts", "fp32_operations", "optimizer")


def _compute_parts(seconds: float, profiled: ProfiledStep, device_type: str) -> dict[PartName, float]:
    """The parts of `seconds` of computing."""
    operation_seconds = profiled.operation_seconds
    if device_type == "cpu":
        return _scaled(operation_seconds, seconds / profiled.step_seconds)
    summed = sum(operation_seconds.values())  # kernels that ran side by side count for the time they had together
    busy = min(profiled.busy_seconds, seconds)
    return {**_scaled(operation_seconds, busy / summed if summed else 0.0), "idle": seconds - busy}


def _scaled(operation_seconds: Mapping[str, float], scale: float) -> dict[PartName, float]:
    return {name: operation_seconds.get(name, 0.0) * scale for name in _FROM_PROFILE}


def _largest(split: Split, name: PartName) -> tuple[str, ...]:
    if name == "optimizer":
        return ()
    return split.largest.get("other" if name == "rest" else name, ())


def next_steps(found: Gap, precision: Precision, conditions: Conditions) -> tuple[NextStep, ...]:
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
            action=_action(part, conditions),
        )
        for part in found.parts
        if part.name not in skipped and part.share_range[0] >= MIN_SHARE and part.share < 1
    ]
    return tuple(sorted(steps, key=lambda step: -step.share))


def _action(part: Part, conditions: Conditions) -> str:
    if part.name == "loader":
        return _loader_action(conditions.num_loader_workers)
    if part.name == "optimizer":
        name = conditions.unfused_optimizer
        return (f"{name}(..., fused=True), or " if name else "") + "fewer updates: a larger batch"
    chiefly = f" ({', '.join(part.largest)})" if part.largest else ""
    compiled = "" if conditions.is_compiled else "torch.compile, which fuses them with their neighbours, or "
    return {
        "slow_matrix_products": "more for each matrix product to do: a larger batch, sizes that are multiples of 8",
        "casts": f"{compiled}a larger batch, over which the weights are cast once",
        "fp32_operations": f"{compiled}fewer of them{chiefly}",
        "idle": 'a larger batch, or torch.compile(mode="reduce-overhead"), which launches kernels together',
        "rest": f"{compiled}fewer small operations{chiefly}",
    }[part.name]


def _loader_action(num_workers: int | None) -> str:
    if num_workers is None:
        return "load batches ahead, as a DataLoader with num_workers does"
    if num_workers == 0:
        return "num_workers=2 or more in the DataLoader, which load batches while a step computes"
    return f"more num_workers than {num_workers} in the DataLoader, or samples that cost less to load"
