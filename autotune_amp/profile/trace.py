"""A Chrome trace of torch.profiler, step by step: what the operations of a step take, by kind. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from autotune_amp.core.config import Precision
from autotune_amp.profile.spec import LOW, ProfiledStep, Split

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
        largest={kind: _largest(microseconds) for kind, microseconds in named.items()},
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


def _largest(microseconds: dict[str, float]) -> tuple[str, ...]:
    names = [name for name in microseconds if name.startswith("aten::")]  # not the autograd engine's own
    names.sort(key=lambda name: -microseconds[name])
    return tuple(name.removeprefix("aten::") for name in names[:NUM_NAMED])
