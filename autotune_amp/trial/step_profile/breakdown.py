"""Division of a training step's time into parts, with advice on the largest ones; and the job that profiles it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean, median
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure, Measurement, Profiled, ProfiledStep
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import times
from autotune_amp.dimensions import BY_NAME, DIMENSIONS
from autotune_amp.dimensions.dimension import Dimension
from autotune_amp.precision.modes import MIXED_PRECISIONS
from autotune_amp.trial.jobs import Trial, as_failure

PartName: TypeAlias = Literal[
    "matrix_products", "slow_matrix_products", "casts", "fp32_operations", "optimizer", "loader", "idle", "rest"
]

PART_NAMES: dict[PartName, str] = {
    "matrix_products": "matrix products",
    "slow_matrix_products": "matrix products below the machine's rate",
    "casts": "casts",
    "fp32_operations": "operations kept in fp32",
    "optimizer": "optimizer",
    "loader": "waiting for the loader",
    "idle": "idle between kernels",
    "rest": "rest of the step",
}


class ProfileJob(Job[Profiled], frozen=True, kw_only=True):
    """Job that runs a few steps of the training run described by `trial` under torch.profiler.

    The Chrome trace is kept in `trace_file`, or discarded if that is None. The FLOPs of a step are counted afterwards.
    """

    answer: ClassVar[Any] = Profiled
    work: ClassVar[str] = "autotune_amp.trial.step_profile.child:profile"
    command_work: ClassVar[str | None] = "autotune_amp.trial.step_profile.child:profile_command"
    what: ClassVar[Literal["profile"]] = "profile"

    trial: Trial
    trace_file: str | None = None

    @property
    def candidate(self) -> Setting:
        """Return the setting of the profiled steps."""
        return self.trial.candidate

    def after(self, problem: Failure | AutotuneAmpError, so_far: Profiled | None) -> Failure:  # noqa: ARG002
        """Return a `Failure`: no other job depends on a profile."""
        return as_failure(problem)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a step: its `seconds` in one step, and their `share` of the step's time; all shares sum to 1.

    ``matrix_products`` is the time that the step's products would take at the machine's measured rate,
    ``slow_matrix_products`` their time beyond that; without a rate or a count the former is all of it. ``casts``
    convert between formats, ``fp32_operations`` are those that autocast keeps in fp32, ``loader`` is the wait for data,
    ``idle`` the time in which an accelerator runs no kernel, and ``rest`` all other time. `largest` names the
    operations that take most time. A part is the median of several profiled steps, `share_range` its smallest and
    largest share in any of them; for the loader, in any of the processes.
    """

    name: PartName
    seconds: float
    share: float
    share_range: tuple[float, float]
    largest: tuple[str, ...] = ()


class StepBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a step's time, which explain why the step is slower than the machine's rate of matrix products.

    Rates are in floating-point operations per second: `machine_flops_per_second` is that of large matrix products in
    this precision, `attained_flops_per_second` is `flops_per_step` over the step's seconds. Each is None if it could
    not be measured or counted. `parts` are in the order of `PartName`; parts that do not apply are left out.
    Convolutions are matrix products, and take `convolution_share` of the step. `note` describes missing information,
    None if there is none.
    """

    machine_flops_per_second: float | None
    attained_flops_per_second: float | None
    flops_per_step: int | None
    parts: tuple[Part, ...]
    convolution_share: float = 0.0
    note: str | None = None

    def share(self, name: PartName) -> float:
        """Return the share of the step that the part `name` takes, 0 if it does not apply."""
        return sum(part.share for part in self.parts if part.name == name)


class NextStep(msgspec.Struct, frozen=True, kw_only=True):
    """Advice on one part of a step. If `part` took no time, the step would be `max_speedup` times as fast.

    `dimensions` are the dimensions of the search that affect the part. `share` and `share_range` are the part's: even
    the smallest share is worth acting on.
    """

    precision: Precision
    part: PartName
    share: float
    share_range: tuple[float, float]
    max_speedup: float
    dimensions: tuple[str, ...]


MIN_SHARE = 0.05  # share of the step; smaller parts are not worth a change of code
_PROFILED_PARTS: tuple[PartName, ...] = ("matrix_products", "casts", "fp32_operations", "optimizer")


def break_down(processes: Sequence[Measurement], profiled: Profiled, rate: float | None) -> StepBreakdown | None:
    """Return the mean step of these `processes`, divided into parts in the proportions of the profile; None without
    one.

    `rate` is the machine's rate of matrix products in FLOP/s, None if unknown. On a CPU the times of the profiled
    operations are scaled to the step; on an accelerator the time without a kernel is the part ``idle``.
    """
    split, flops_per_step, device_type = profiled.split, profiled.flops_per_step, profiled.device_type
    if split is None:
        return None
    step_seconds = geometric_mean(process.step_seconds for process in processes)
    wait_shares = [min(1.0, process.data_seconds / process.step_seconds) for process in processes]
    wait_seconds = step_seconds * fmean(wait_shares)
    has_operations = device_type == "cpu" or split.is_device

    def parts_of_step(step: ProfiledStep) -> dict[PartName, float]:
        parts = _compute_parts(step_seconds - wait_seconds, step, device_type) if has_operations else {}
        products = parts.get("matrix_products", 0.0)
        if flops_per_step and rate and products:
            parts["matrix_products"] = min(products, flops_per_step / rate)
            parts["slow_matrix_products"] = products - parts["matrix_products"]
        parts["loader"] = wait_seconds
        parts["rest"] = max(0.0, step_seconds - sum(parts.values()))
        return parts

    median_parts, parts_of_steps = parts_of_step(_median(split.steps)), [parts_of_step(step) for step in split.steps]

    def part(name: PartName) -> Part:
        shares = [parts.get(name, 0.0) / step_seconds for parts in (median_parts, *parts_of_steps)]
        shares = wait_shares if name == "loader" else shares
        kind = "other" if name == "rest" else name
        return Part(
            name=name,
            seconds=median_parts[name],
            share=median_parts[name] / step_seconds,
            share_range=(min(shares), max(shares)),
            largest=() if name == "optimizer" else split.largest.get(kind, ()),
        )

    return StepBreakdown(
        machine_flops_per_second=rate,
        attained_flops_per_second=flops_per_step / step_seconds if flops_per_step else None,
        flops_per_step=flops_per_step,
        parts=tuple(part(name) for name in PART_NAMES if name in median_parts),
        convolution_share=_convolution_share(split.steps, median_parts, step_seconds),
        note=None if has_operations else f"torch.profiler sees no kernels of {device_type}",
    )


def _convolution_share(steps: Sequence[ProfiledStep], parts: Mapping[PartName, float], whole: float) -> float:
    """Return the share of the step that convolutions take. They are a part of its matrix products."""
    products = sum(step.operation_seconds.get("matrix_products", 0.0) for step in steps)
    convolutions = sum(step.convolution_seconds for step in steps)
    seconds = parts.get("matrix_products", 0.0) + parts.get("slow_matrix_products", 0.0)
    return convolutions / products * seconds / whole if products else 0.0


def _median(steps: Sequence[ProfiledStep]) -> ProfiledStep:
    """Return a step in which every kind of operation takes the median of its times in `steps`."""
    kinds = {kind for step in steps for kind in step.operation_seconds}
    parts = {kind: median(step.operation_seconds.get(kind, 0.0) for step in steps) for kind in kinds}
    others = median(step.step_seconds - sum(step.operation_seconds.values()) for step in steps)
    return ProfiledStep(
        operation_seconds=parts,
        step_seconds=sum(parts.values()) + others,
        busy_seconds=median(step.busy_seconds for step in steps),
    )


def _compute_parts(seconds: float, step: ProfiledStep, device_type: str) -> dict[PartName, float]:
    """Divide `seconds` of computing into parts, in the proportions of a profiled step."""
    scale, idle = seconds / step.step_seconds, dict[PartName, float]()
    if device_type != "cpu":
        summed = sum(step.operation_seconds.values())  # overlapping kernels share the time in which both ran
        busy = min(step.busy_seconds, seconds)
        scale, idle = busy / summed if summed else 0.0, {"idle": seconds - busy}
    return idle | {name: step.operation_seconds.get(name, 0.0) * scale for name in _PROFILED_PARTS}


def next_steps(breakdown: StepBreakdown, precision: Precision, unfused_optimizer: str | None) -> tuple[NextStep, ...]:
    """Return the next steps to try, the largest gain first; the gain is the speed-up if the part took no time.

    Parts that are small in any of the profiled steps are left out, and so are casts except under autocast.
    """
    skipped = ("matrix_products",) if precision in MIXED_PRECISIONS else ("matrix_products", "casts")
    steps = [
        NextStep(
            precision=precision,
            part=part.name,
            share=part.share,
            share_range=part.share_range,
            max_speedup=1 / (1 - part.share),
            dimensions=_dimensions(part, breakdown, unfused_optimizer),
        )
        for part in breakdown.parts
        if part.name not in skipped and part.share_range[0] >= MIN_SHARE and part.share < 1
    ]
    return tuple(sorted(steps, key=lambda step: -step.share))


_MAX_REMOVABLE_SHARE = 0.99  # of the step, so that the speed-up is finite


def max_speedups(breakdown: StepBreakdown) -> dict[str, float]:
    """Return an upper bound of the speed-up for each dimension: the step time if the parts it affects took no time.

    Dimensions whose effect a profile does not show are left out.
    """
    parts: dict[str, float] = {part.name: part.share for part in breakdown.parts}
    parts["convolutions"] = breakdown.convolution_share

    def removable(dimension: Dimension[Any]) -> float:
        own = sum(share * parts.get(name, 0.0) for name, share in dimension.removable.items())
        return own + sum(removable(BY_NAME[name]) for name in dimension.sets_also)

    return {d.name: 1 / (1 - min(removable(d), _MAX_REMOVABLE_SHARE)) for d in DIMENSIONS if d.removable}


def _dimensions(part: Part, breakdown: StepBreakdown, unfused_optimizer: str | None) -> tuple[str, ...]:
    """Return the dimensions of the search that affect a part, the most promising first."""
    names = [dimension.name for dimension in DIMENSIONS if dimension.removable.get(part.name) == 1]
    if part.name == "optimizer" and unfused_optimizer is None:
        names = []
    if part.name == "slow_matrix_products" and breakdown.convolution_share >= MIN_SHARE:
        names.append("memory_format")
    # A larger batch has fewer updates, more work per product and kernel, and casts its weights once.
    if part.name in ("optimizer", "slow_matrix_products", "casts", "idle"):
        names.append("batch_size")
    return tuple(names)


NUM_NEXT_STEPS = 3
_WORDS = {"batch_size": "a larger batch size", "num_workers": "more num_workers"}


def next_step_line(step: NextStep) -> str:
    """Return a line of advice.

    Example: ``optimizer, 17 % (15 to 19) of a step in bf16: optimizer_impl or a larger batch size; at most 1.2x if it
    vanished``.
    """
    share = f"{share_of_step(step)} of a step in {step.precision}"
    tried = " or ".join(_WORDS.get(name, name) for name in step.dimensions)
    return f"{PART_NAMES[step.part]}, {share}: {tried}; at most {times(step.max_speedup)} if it vanished"


def profiled_line(profiled: Profiled) -> str:
    """Return the kinds that took most of the profiled steps: ``41 % matrix products, 22 % optimizer, 9 % casts``."""
    if profiled.split is None:
        return profiled.split_problem or "no step was recorded"
    seconds: Counter[str] = Counter()
    for step in profiled.split.steps:
        seconds.update(step.operation_seconds)
    whole = sum(step.step_seconds for step in profiled.split.steps)
    names = dict[str, str](PART_NAMES.items()) | {"other": "other operations"}
    return ", ".join(
        f"{100 * kind_seconds / whole:.0f} % {names[kind]}"
        for kind, kind_seconds in seconds.most_common(NUM_NEXT_STEPS)
    )


def share_of_step(part: Part | NextStep) -> str:
    """Return the part's share in percent, with its range if that is wider: ``17 % (15 to 19)``."""
    least, largest = (f"{100 * share:.0f}" for share in part.share_range)
    return f"{100 * part.share:.0f} %" + (f" ({least} to {largest})" if least != largest else "")
