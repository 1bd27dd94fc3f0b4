"""Memory profile: its job, the memory of a training step by kind, and possible savings, as plain data and text."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from autotune_amp.core.errors import AutotuneAmpError
from autotune_amp.core.job import Job
from autotune_amp.core.outcome import Failure, FailureKind
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import arguments_label
from autotune_amp.core.text import count, one_line, outcome_name, size
from autotune_amp.trial.jobs import Trial, as_failure

SavingKind: TypeAlias = Literal["precision", "argument", "activation_checkpointing", "optimizer_state", "batch_size"]
_NUM_GROUPS = 8
_OUTSIDE = "outside of modules, e.g. the loss"


class ModuleActivations(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes saved for the backward pass by the forward pass of one module, without its submodules.

    The name is "" for tensors saved outside of all modules, for example by a loss function.
    """

    name: str
    num_bytes: int


class MemoryBreakdown(msgspec.Struct, frozen=True, kw_only=True, tag_field="outcome", tag="memory"):
    """Memory of an optimizer step by kind, in bytes on its device.

    Each storage counts once and whole, however many tensors are views of it. `gradients_bytes` are those of the step's
    parameters, `optimizer_state_bytes` every tensor in the state of the optimizers, `batch_bytes` the tensors of a
    batch, `cast_weights_bytes` the copies of parameters that autocast makes in the compute type. `modules`, in the
    order of the model, hold the activations: other tensors that the forward passes saved for the backward pass. The
    backward pass frees activations while gradients appear: `not_held_together_bytes` is the sum of both less their
    largest sum at one time. `taken_bytes` is the peak of an equal step that was not inspected: the memory that counts
    against a limit, on a CPU the growth of the process (of a command's the whole process), on an accelerator the memory
    reserved by the allocator; of this `allocated_bytes` were in tensors at most, None on a CPU. Compiled models run
    without compiling during the inspection. `optimizers` are the classes of the optimizers. `checkpointable_modules`
    are the repeated blocks that could be recomputed in the backward pass, so that nothing inside them would be saved.
    """

    taken_bytes: int
    allocated_bytes: int | None
    parameters_bytes: int
    buffers_bytes: int
    gradients_bytes: int
    optimizer_state_bytes: int
    batch_bytes: int
    cast_weights_bytes: int
    not_held_together_bytes: int
    modules: tuple[ModuleActivations, ...]
    optimizers: tuple[str, ...] = ()
    checkpointable_modules: tuple[str, ...] = ()

    @property
    def activations_bytes(self) -> int:
        """Return the activations of all modules in bytes."""
        return sum(module.num_bytes for module in self.modules)

    @property
    def rest_bytes(self) -> int:
        """Return the part of the peak in bytes that belongs to no kind; below 0 if a part was not fully resident.

        It consists of temporaries, workspaces of libraries, and memory cached by the allocator.
        """
        held = self.parameters_bytes + self.buffers_bytes + self.gradients_bytes + self.optimizer_state_bytes
        held += self.batch_bytes + self.cast_weights_bytes + self.activations_bytes
        return self.taken_bytes - (held - self.not_held_together_bytes)


class MemoryJob(Job[MemoryBreakdown], frozen=True, kw_only=True):
    """Job that measures the memory of the training step described by `trial`.

    torch's own memory snapshot of the step is written to `snapshot_file`, unless that is None.
    """

    answer: ClassVar[Any] = MemoryBreakdown
    work: ClassVar[str] = "autotune_amp.diagnostics.memory.child:measure_memory"
    command_work: ClassVar[str | None] = "autotune_amp.diagnostics.memory.child:measure_command_memory"

    trial: Trial
    snapshot_file: str | None = None

    def after(
        self, problem: Failure | AutotuneAmpError, so_far: MemoryBreakdown | None
    ) -> MemoryBreakdown | Failure | Job[MemoryBreakdown]:
        """Return a `Failure` for the precision, which the profile reports."""
        del so_far
        return as_failure(problem)


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """Change that frees up to `num_bytes`, described by `what`; measured only for the kinds precision and argument."""

    kind: SavingKind
    num_bytes: int
    what: str


class LargestBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Largest batch size that fits into the limit, by the memory model M(b) = max(m0, m1 + m2 * b).

    The model goes through two of the `measured` (batch size, bytes) pairs: the largest two among those that fit and the
    smallest that does not. `batch_size` is 0 if not even one sample fits, None if the memory does not grow with the
    batch. `model_error` is the relative error, at `checked_batch_size`, of a model fitted without this size, which is
    the nearest to the limit: negative if it predicted too little; None if only two sizes could be measured.
    `cautious_batch_size` allows for an error of that size. `bytes_per_sample` is m2. `is_all_data`: `batch_size` is the
    size of the dataset.
    """

    batch_size: int | None
    cautious_batch_size: int | None
    model_error: float | None
    checked_batch_size: int | None
    bytes_per_sample: float
    measured: tuple[tuple[int, int], ...]
    is_all_data: bool = False


class MemoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one precision: its `breakdown`, or the `reason` why there is none; `failure` is the kind of its
    failure.

    `arguments` are the values of a command's own placeholders that differ from today's. `largest` is None if there is
    no limit, or if too little could be measured, with the reason. `savings` are ways to free memory in this setting,
    the largest first.
    """

    precision: Precision
    arguments: tuple[tuple[str, str], ...] = ()
    breakdown: MemoryBreakdown | None = None
    largest: LargestBatch | None = None
    savings: tuple[Saving, ...] = ()
    failure: FailureKind | None = None
    reason: str | None = None

    @property
    def label(self) -> str:
        """Return the row's name: ``bf16``, or ``bf16 seq=1024`` with another value of an argument."""
        return f"{self.precision} {arguments_label(self.arguments)}".rstrip()


class MemoryProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one training step of `batch_size` samples on one device, in each precision, and with each other value
    of a command's own placeholders.

    A step accumulates `accumulation_steps` such batches. `limit_bytes` is the memory that batches should fit into, None
    without one. `snapshot` is the file of torch's own memory snapshot, for the first precision that ran; None without
    one.
    """

    format: int = 1
    workload: str
    device: str
    device_name: str
    batch_size: int
    accumulation_steps: int
    rows: tuple[MemoryRow, ...]
    limit_bytes: int | None = None
    notes: tuple[str, ...] = ()
    snapshot: str | None = None

    def row(self, precision: str) -> MemoryRow:
        """Return the row of a precision with today's arguments. Raises `KeyError` if there is none."""
        for row in self.rows:
            if row.precision == precision and not row.arguments:
                return row
        raise KeyError(precision)

    def to_json(self) -> str:
        """Return the JSON document; a missing number is null, never NaN."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()

    def explain(self) -> str:
        """Return the parts, the largest modules, the batch sizes that fit and the savings, as lines of plain text."""
        lines = [heading(self)]
        for table in (parts(self), modules(self)):
            lines += [f"{label}: {', '.join(cells)}" for label, *cells in table]
        return "\n".join([*lines, *(f"{label}: {text}" for label, text in facts(self))])


def heading(profile: MemoryProfile) -> str:
    """Return a title that names the workload, the step and the device."""
    batches = "" if profile.accumulation_steps == 1 else f"{profile.accumulation_steps} batches of "
    device = f"{profile.device} ({one_line(profile.device_name)})"
    return f"{one_line(profile.workload)}: a step of {batches}{count(profile.batch_size, 'sample')} on {device}"


def measured_rows(profile: MemoryProfile) -> list[tuple[MemoryRow, MemoryBreakdown]]:
    """Return the rows that have a breakdown."""
    return [(row, row.breakdown) for row in profile.rows if row.breakdown is not None]


def parts(profile: MemoryProfile) -> list[list[str]]:
    """Return a table of the parts' bytes in every row that ran, with the peak last and without empty parts."""
    breakdowns = [breakdown for _, breakdown in measured_rows(profile)]
    table = [
        ("parameters", [b.parameters_bytes for b in breakdowns]),
        ("buffers", [b.buffers_bytes for b in breakdowns]),
        ("gradients", [b.gradients_bytes for b in breakdowns]),
        ("optimizer state", [b.optimizer_state_bytes for b in breakdowns]),
        ("batch", [b.batch_bytes for b in breakdowns]),
        ("weights cast by autocast", [b.cast_weights_bytes for b in breakdowns]),
        ("activations", [b.activations_bytes for b in breakdowns]),
        ("not held at once", [-b.not_held_together_bytes for b in breakdowns]),
        ("the rest", [b.rest_bytes for b in breakdowns]),
        ("peak", [b.taken_bytes for b in breakdowns]),
    ]
    return [[name, *map(_signed, numbers)] for name, numbers in table if any(numbers)]


def modules(profile: MemoryProfile) -> list[list[str]]:
    """Return a table of the modules with the largest activations in every row that ran.

    Modules whose names differ only in an index are one row: ``layers.*.norm (12)``.
    """
    groups = [activations_by_group(breakdown) for _, breakdown in measured_rows(profile)]
    order = sorted({name for group in groups for name in group}, key=lambda name: -max(g[name] for g in groups))
    table = [[name, *(size(group[name]) for group in groups)] for name in order[:_NUM_GROUPS]]
    if rest := order[_NUM_GROUPS:]:
        others = [size(sum(group[name] for name in rest)) for group in groups]
        table.append([f"{count(len(rest), 'other')}", *others])
    return table


def activations_by_group(breakdown: MemoryBreakdown) -> Counter[str]:
    """Return the bytes of activations by module name, with a star for an index and the number of modules."""
    bytes_by_group: Counter[str] = Counter()
    num_modules: Counter[str] = Counter()
    for module in breakdown.modules:
        name = re.sub(r"(?<![^.])\d+(?![^.])", "*", module.name) or _OUTSIDE
        bytes_by_group[name] += module.num_bytes
        num_modules[name] += 1
    return Counter(
        {f"{name} ({num_modules[name]})" if "*" in name else name: num for name, num in bytes_by_group.items()}
    )


def facts(profile: MemoryProfile) -> list[tuple[str, str]]:
    """Return (label, text) pairs for failures, batch sizes that fit and savings."""
    lines: list[tuple[str, str]] = []
    for row in profile.rows:
        if row.reason is not None:
            failed = "" if row.failure is None else f"{outcome_name(row.failure)}: "
            lines.append((row.label, f"{failed}{one_line(row.reason)}"))
    for row, breakdown in measured_rows(profile):
        if breakdown.allocated_bytes is not None:
            unused_bytes = breakdown.taken_bytes - breakdown.allocated_bytes
            lines.append(
                (
                    "rest",
                    f"{row.label}: {size(max(0, unused_bytes))} of it is cached by the allocator, without tensors",
                )
            )
    for row in profile.rows:  # also where today's batch size ran out of memory
        if row.largest is not None and profile.limit_bytes is not None:
            lines.append(("fits", f"{row.label}: {largest_line(row.largest, profile.limit_bytes)}"))
    for number, (row, _) in enumerate(row for row in measured_rows(profile) if not row[0].arguments):
        for saving in row.savings:
            if number == 0 or saving.kind == "argument":
                lines.append(("frees", f"{row.label}: up to {size(saving.num_bytes)} by {saving.what}"))
    if profile.snapshot is not None:
        lines.append(("snapshot", f"{profile.snapshot} opens at https://pytorch.org/memory_viz"))
    return [*lines, *(("note", one_line(note)) for note in profile.notes)]


def largest_line(largest: LargestBatch, limit_bytes: int) -> str:
    """Return a line on the largest batch size that fits, the model's error, and the size that allows for it.

    Example: ``batch 412 in 16 GiB; the prediction was 3 % too low at batch 128; allowing for that error: batch 398``.
    """
    limit = f"in {size(limit_bytes)}"
    if largest.batch_size is None:
        return f"any batch {limit}: the measured memory does not grow with the batch size"
    if largest.batch_size == 0:
        return f"not even one sample {limit}"
    text = f"batch {largest.batch_size} {limit}"
    if dict(largest.measured).get(largest.batch_size, limit_bytes + 1) <= limit_bytes:
        text += ", which was measured"
    if largest.is_all_data:
        text += ", the whole dataset"
    if largest.model_error is None:
        return f"{text}, predicted from two batch sizes; the error is unknown"
    error = f"{abs(100 * largest.model_error):.0f} % too {'low' if largest.model_error < 0 else 'high'}"
    return (
        f"{text}; the prediction was {error} at batch {largest.checked_batch_size}; allowing for that error: batch "
        f"{largest.cautious_batch_size}"
    )


def _signed(num_bytes: int) -> str:
    return f"-{size(-num_bytes)}" if num_bytes < 0 else size(num_bytes)
