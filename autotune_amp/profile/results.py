"""AmpProfile: the result of a profile, as plain data and text. No torch."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

import msgspec

from autotune_amp.core import pieces
from autotune_amp.core.dimensions import Precision
from autotune_amp.core.outcome import FailureKind, Profiled
from autotune_amp.core.text import count, duration, flops, number, one_line, outcome_name, size, times

Verdict: TypeAlias = Literal["excellent", "significant", "modest", "negligible", "slower"]
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
_NUM_NEXT_STEPS = 3


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a step: `seconds` of one step and their `share` of it; the shares of a step sum to 1.

    ``matrix_products`` is the time that the step's products would take at the machine's measured rate,
    ``slow_matrix_products`` their time beyond that; without a rate or a count the former is all of it. ``casts``
    convert between formats, ``fp32_operations`` are those that autocast leaves in fp32, ``loader`` is the wait for
    data, ``idle`` the time in which an accelerator has no kernel to run, and ``rest`` all else. `largest` names the
    operations that take most time. A part is the median of several profiled steps, `share_range` its smallest and
    largest share in any of them; for the loader, in any of the processes.
    """

    name: PartName
    seconds: float
    share: float
    share_range: tuple[float, float]
    largest: tuple[str, ...] = ()


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Difference between the machine's matrix rate and the rate that a step attains, divided into parts of the step.

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
        """Return the part's share of the step, 0 if it does not apply."""
        return sum(part.share for part in self.parts if part.name == name)


class NextStep(msgspec.Struct, frozen=True, kw_only=True):
    """Advice on one part of a step: without `part` the step would be at most `max_speedup` times as fast.

    `dimensions` are the dimensions of the search that affect the part. `share` and `share_range` are the part's: even
    the smallest share is worth acting on.
    """

    precision: Precision
    part: PartName
    share: float
    share_range: tuple[float, float]
    max_speedup: float
    dimensions: tuple[str, ...]


class PrecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one precision. Numbers that were not measured are None; `failure` is the kind of failure if it ran.

    `reason` says why numbers are missing. `num_steps` training steps were timed, in the processes of
    `process_step_seconds`, the mean step in each including the wait for its data. `step_seconds` is their geometric
    mean, `step_seconds_interval` its 95 % interval (`intervals.ratio_interval`). `speedup` over fp32 is the geometric
    mean over pairs of processes in one round, which trained on the same batches, `speedup_interval` its 95 % interval
    with the process as its unit, `verdicts` those on the two ends of the interval. A precision that failed has none of
    these. `was_cut`: it was stopped after a few steps as hopelessly slow; without an interval `speedup` is an upper
    bound. `peak_memory_bytes` was measured in a separate process: resident memory on a CPU, allocated on an
    accelerator.
    """

    precision: Precision
    step_seconds: float | None = None
    step_seconds_interval: tuple[float, float] | None = None
    speedup: float | None = None
    speedup_interval: tuple[float, float] | None = None
    verdict: Verdict | None = None
    verdicts: tuple[Verdict, Verdict] | None = None
    peak_memory_bytes: int | None = None
    process_step_seconds: tuple[float, ...] = ()
    num_steps: int = 0
    was_cut: bool = False
    failure: FailureKind | None = None
    reason: str | None = None
    gap: Gap | None = None


class AmpProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile of one workload on one device: the gain of mixed precision, and the step's time by kind of operation.

    A step trains `accumulation_steps` batches of `batch_size` samples; `num_batches` steps of each precision were
    requested, and each row gives the number timed. `rows` begin with fp32. `best_precision` is the fastest of bf16 and
    fp16, with `speedup` and `verdict`; None if neither could be compared with fp32. `next_steps` are for
    `gap_precision`, the largest gain first. `trace` is the file written for Perfetto, None without one.
    """

    format: int = 1
    workload: str
    device: str
    device_name: str
    batch_size: int
    accumulation_steps: int
    num_batches: int
    rows: tuple[PrecisionRow, ...]
    best_precision: Precision | None
    speedup: float | None
    verdict: Verdict | None
    next_steps: tuple[NextStep, ...]
    notes: tuple[str, ...] = ()
    trace: str | None = None

    def row(self, precision: str) -> PrecisionRow:
        """Return the row of a precision. Raises `KeyError` if there is none."""
        for row in self.rows:
            if row.precision == precision:
                return row
        raise KeyError(precision)

    @property
    def gap(self) -> Gap | None:
        """Return the parts of `gap_precision`'s step; None if unknown."""
        return self.row(self.gap_precision).gap

    @property
    def gap_precision(self) -> Precision:
        """Return the precision whose step needs advice: the best low one if it is faster than fp32, otherwise fp32."""
        best = self.best_precision
        return best if best is not None and (self.speedup or 0.0) > 1 else "fp32"

    @property
    def next_step(self) -> str | None:
        """Return the most promising advice, with its possible gain; None if no part is large in every profiled step."""
        return next_step_line(self.next_steps[0]) if self.next_steps else None

    def _repr_html_(self) -> str:
        cells = ([row.precision, *row_cells(row)] for row in self.rows)
        return pieces.fragment(
            heading(self), pieces.table(ROW_COLUMNS, cells, num_numeric=3), pieces.facts(facts(self))
        )

    def to_json(self) -> str:
        """Return the JSON document; a missing number is null, never NaN."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def explain(self) -> str:
        """Return the verdict, the numbers, the parts of the step and the advice, as a few lines of plain text."""
        lines = [heading(self)]
        lines += [f"{row.precision}: {', '.join(filter(None, row_cells(row)))}" for row in self.rows]
        return "\n".join([*lines, *(f"{label}: {text}" for label, text in facts(self))])


def facts(profile: AmpProfile) -> list[tuple[str, str]]:
    """Return (label, text) pairs for the verdict, the rates, the parts of the step and the advice."""
    lines = [("verdict", _verdict(profile))]
    for row in profile.rows:
        if row.gap is not None and row.precision in ("fp32", profile.best_precision):
            if row.gap.attained_flops_per_second is not None:
                lines.append(("rate", f"{row.precision}: {_rate(row.gap, row.gap.attained_flops_per_second)}"))
            lines.append(("gap", f"{row.precision}: {_gap(row.gap)}"))
    lines += [("next step", next_step_line(step)) for step in profile.next_steps[:_NUM_NEXT_STEPS]]
    if profile.next_steps:
        lines.append(("search", "autotune-amp search tries them, and says what each gained"))
    if profile.trace is not None:
        lines.append(("trace", f"{profile.trace} opens at https://ui.perfetto.dev"))
    return [*lines, *(("note", one_line(note)) for note in profile.notes)]


_WORDS = {"batch_size": "a larger batch size", "num_workers": "more num_workers"}


def next_step_line(step: NextStep) -> str:
    """Return a line of advice.

    Example: ``optimizer, 17 % (15 to 19) of a step in bf16: optimizer_impl or a larger batch size; at most 1.2x if it
    vanished``.
    """
    share = f"{_percent(step)} of a step in {step.precision}"
    tried = " or ".join(_WORDS.get(name, name) for name in step.dimensions)
    return f"{PART_NAMES[step.part]}, {share}: {tried}; at most {times(step.max_speedup)} if it vanished"


def profiled_line(found: Profiled) -> str:
    """Return the kinds that took most of the profiled steps: ``41 % matrix products, 22 % optimizer, 9 % casts``."""
    if found.split is None:
        return found.split_problem or "no step was seen"
    seconds: Counter[str] = Counter()
    for step in found.split.steps:
        seconds.update(step.operation_seconds)
    whole = sum(step.step_seconds for step in found.split.steps)
    names = dict[str, str](PART_NAMES.items()) | {"other": "other operations"}
    return ", ".join(
        f"{100 * taken / whole:.0f} % {names[kind]}" for kind, taken in seconds.most_common(_NUM_NEXT_STEPS)
    )


def heading(profile: AmpProfile) -> str:
    """Return a title that names the workload, the number and size of the steps, and the device."""
    steps = count(max((row.num_steps for row in profile.rows), default=0), "step")
    batches = "" if profile.accumulation_steps == 1 else f"{profile.accumulation_steps} batches of "
    of_what = f"{batches}{count(profile.batch_size, 'sample')} in each precision"
    device = f"{profile.device} ({one_line(profile.device_name)})"
    return f"{one_line(profile.workload)}: {steps} of {of_what} on {device}"


ROW_COLUMNS = ("precision", "step", "speed-up", "memory", "verdict")


def row_cells(row: PrecisionRow) -> tuple[str, str, str, str]:
    """Return the table cells for step, speed-up, memory and verdict; "" for missing ones."""
    step = "" if row.step_seconds is None else duration(row.step_seconds)
    memory = "" if row.peak_memory_bytes is None else size(row.peak_memory_bytes)
    return step, _speedup(row), memory, _row_verdict(row)


def _speedup(row: PrecisionRow) -> str:
    """Return the speed-up with its interval, or as an upper bound without one."""
    if row.speedup is None:
        return ""
    if row.speedup_interval is None:
        return f"<= {number(row.speedup)}x"
    low, high = row.speedup_interval
    return f"{times(row.speedup)} ({low:.2f} to {high:.2f})"


def _row_verdict(row: PrecisionRow) -> str:
    if row.reason is not None:
        reason = one_line(row.reason)
        return reason if row.failure is None else f"{outcome_name(row.failure)}: {reason}"
    if row.precision == "fp32":
        return "reference"
    if row.verdict is None:
        return "no fp32 to compare with"
    low, high = row.verdicts or (row.verdict, row.verdict)
    return row.verdict if low == high else f"{row.verdict}; the interval spans {low} to {high}"


def _verdict(profile: AmpProfile) -> str:
    if profile.best_precision is None:
        reasons = "; ".join(f"{row.precision}: {_row_verdict(row)}" for row in profile.rows if row.reason)
        return f"none: {reasons or 'only fp32 was run'}"
    row = profile.row(profile.best_precision)
    return f"{row.precision}, {_speedup(row)} over fp32: {_row_verdict(row)}"


def _rate(gap: Gap, attained: float) -> str:
    if gap.machine_flops_per_second is None:
        return f"{flops(attained)} by a step; the machine's own rate could not be measured"
    share = 100 * attained / gap.machine_flops_per_second
    return f"{flops(gap.machine_flops_per_second)} by the machine, {flops(attained)} by a step, {share:.2g} %"


def _percent(part: Part | NextStep) -> str:
    """Return the part's share, with its range if the ends differ."""
    least, largest = (f"{100 * share:.0f}" for share in part.share_range)
    return f"{100 * part.share:.0f} %" + (f" ({least} to {largest})" if least != largest else "")


def _gap(gap: Gap) -> str:
    """Return the parts of a step that take at least 1 %, the largest first."""
    return ", ".join(
        f"{_percent(part)} {PART_NAMES[part.name]}" + (f" ({', '.join(part.largest)})" if part.largest else "")
        for part in sorted(gap.parts, key=lambda part: -part.seconds)
        if part.share >= 0.01
    )
