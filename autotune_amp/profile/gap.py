"""From the machine's matrix rate down to what a step attains, and what to try. Pure."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from autotune_amp.profile.results import Gap, NextStep, Part, PartName
from autotune_amp.profile.spec import LOW, ProfiledStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autotune_amp.core.config import Precision
    from autotune_amp.profile.spec import Split

MIN_SHARE = 0.05  # of the step; less is not worth a change of code


class Step(NamedTuple):
    """A step as it was timed, in seconds: the wait for its data, and what came after it, not profiled.

    `data_share_range` is the least and the largest share that the wait had in any process.
    """

    data_seconds: float
    compute_seconds: float
    data_share_range: tuple[float, float]


class Conditions(NamedTuple):
    """What the advice depends on; see `spec.Profiled`."""

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
