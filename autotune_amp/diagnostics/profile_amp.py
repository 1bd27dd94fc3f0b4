"""Profile of a training step: mixed precision against fp32, the step's time by kind of operation, and possible gains.

```python
import torch
from torch import nn
from autotune_amp import Workload, profile_amp

workload = Workload(
    model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    data=lambda size: (torch.randn(size, 64), torch.randint(10, (size,))),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)
profile = profile_amp(workload, num_batches=20, batch_size=32)
print(profile.best_precision, profile.speedup, profile.verdict, profile.next_step)
```

A quick answer without a search: fp32 is compared with bf16 and fp16 (and TF32 on a GPU that has it) on the same batches
in turn, with step time, speed-up and its interval, memory, and a verdict. Then the step's time is divided into parts,
from the machine's measured matrix rate down to the rate attained, with the next steps to try, which a search tries
too. The step is that of the best low precision if it is faster than fp32, otherwise that of fp32. Parts are medians
over several profiled steps, shown with the smallest and the largest share, and advice is given only on parts that are
large in all of them. The timed steps are divided among three fresh processes, whose spread gives the interval; of a
training command (`profile -- COMMAND`) among fewer if its starts are long. None of your objects is changed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from autotune_amp.core import markup
from autotune_amp.core.config import LossScale
from autotune_amp.core.errors import InvalidRequestError, WorkloadError
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.intervals import ratio_interval
from autotune_amp.core.outcome import Description, Failure, FailureKind, Measurement, Outcome, Profiled, Record
from autotune_amp.core.precisions import Precision, product_precision
from autotune_amp.core.recommendation import Exclusion, NothingWorksError
from autotune_amp.core.setting import Setting
from autotune_amp.core.text import count, duration, flops, number, one_line, outcome_name, percent, size, times
from autotune_amp.hardware import identify, machine_load
from autotune_amp.hardware.data_sheets import data_sheet_flops_per_second
from autotune_amp.hardware.machine_load import LoadMeter
from autotune_amp.precision.modes import MIXED_PRECISIONS, MODES
from autotune_amp.processes.local import Handle
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.planner import Budget
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import OpenedWorkload, Source, failure_message, loaded_backend, open_workload
from autotune_amp.search.space import ASSUMED_BATCH_SIZE, Space, build_space
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.step_profile.breakdown import (
    NUM_NEXT_STEPS,
    PART_NAMES,
    NextStep,
    ProfileJob,
    StepBreakdown,
    break_down,
    next_step_line,
    next_steps,
    share_of_step,
)

Verdict: TypeAlias = Literal["excellent", "significant", "modest", "negligible", "slower"]

# A precision is cut (stopped early) if its steps take this many times fp32's and longer than `LONG_STEP_SECONDS`: the
# first steps of a small model in another format are many times slower than later ones.
CUT_RATIO, LONG_STEP_SECONDS = 5.0, 1.0
DEADLINE_RATIO = 10.0  # deadline of one step, in steps of fp32
MIN_STEP_DEADLINE_SECONDS = 5.0
FIRST_STEP_RATIO = 3.0  # deadline of the first step, in first steps of fp32; the same as in a search
MIN_FIRST_STEP_DEADLINE_SECONDS = 30.0  # the first step may compile, unlike fp32's
DEADLINE_SECONDS = 600.0  # of one process; far above the time that any takes
NUM_ROUNDS = 3  # processes of each precision: fewer give no spread for the interval
COMMAND_SECONDS = 300.0  # for all rounds of a command: beyond it fewer are run, and the interval is wider


class PrecisionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Result for one precision. Numbers that were not measured are None; `failure` is the kind of the trial's failure.

    `reason` says why numbers are missing. `num_steps` training steps were timed, in the processes of
    `process_step_seconds`, the mean step in each including the wait for its data. `step_seconds` is their geometric
    mean, `step_seconds_interval` its 95 % interval (`intervals.ratio_interval`). `speedup` over fp32 is the geometric
    mean over pairs of processes in one round, which trained on the same batches, `speedup_interval` its 95 % interval
    with the process as its unit, `verdicts` those on the two ends of the interval; all None if the precision
    failed. `was_cut`: it was stopped after a few steps as hopelessly slow; without an interval `speedup` is an upper
    bound. `peak_memory_bytes` was measured in a separate process: resident memory on a CPU, allocated on an
    accelerator. `product_precision` is the precision of the step's matrix products, None if unknown.
    """

    precision: Precision
    product_precision: Precision | None = None
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
    gap: StepBreakdown | None = None


class AmpProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Profile of one workload on one device: the gain of mixed precision, and the step's time by kind of operation.

    A step trains `accumulation_steps` batches of `batch_size` samples; `num_batches` steps of each precision were
    requested, and each row gives the number timed. `rows` begin with fp32. `best_precision` is the fastest of bf16 and
    fp16, with `speedup` and `verdict`; None if neither could be compared with fp32. `next_steps` are for
    `gap_precision`, the largest gain first. `trace` is the file written for Perfetto, None without one. `is_command`:
    the steps are those of a training command.
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
    is_command: bool = False

    def row(self, precision: str) -> PrecisionRow:
        """Return the row of a precision. Raises `KeyError` if there is none."""
        for row in self.rows:
            if row.precision == precision:
                return row
        raise KeyError(precision)

    @property
    def gap(self) -> StepBreakdown | None:
        """Return the time of `gap_precision`'s step by kind of operation; None if unknown."""
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
        return markup.notebook_box(
            heading(self), markup.table(ROW_COLUMNS, cells, num_numeric=3), markup.definition_list(facts(self))
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
    lines = [("verdict", _verdict_text(profile))]
    for row in profile.rows:
        if row.gap is not None and row.precision in ("fp32", profile.best_precision):
            if row.gap.attained_flops_per_second is not None:
                product = row.product_precision
                sheet = None if product is None else data_sheet_flops_per_second(profile.device_name, product)
                rate = _rate_text(row.gap, row.gap.attained_flops_per_second, sheet)
                lines.append(("rate", f"{row.precision}: {rate}"))
            lines.append(("gap", f"{row.precision}: {_parts_text(row.gap)}"))
    lines += [("next step", next_step_line(step)) for step in profile.next_steps[:NUM_NEXT_STEPS]]
    if profile.next_steps:
        tried = "precision, batch size and what else the command takes" if profile.is_command else "these"
        lines.append(("search", f"autotune-amp search tries {tried} and reports the gain of each"))
    if profile.trace is not None:
        lines.append(("trace", f"{profile.trace} opens at https://ui.perfetto.dev"))
    return [*lines, *(("note", one_line(note)) for note in profile.notes)]


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
    return step, _speedup_text(row), memory, _row_verdict_text(row)


def _speedup_text(row: PrecisionRow) -> str:
    """Return the speed-up with its interval, or as an upper bound without one."""
    if row.speedup is None:
        return ""
    if row.speedup_interval is None:
        return f"<= {number(row.speedup)}x"
    low, high = row.speedup_interval
    return f"{times(row.speedup)} ({low:.2f} to {high:.2f})"


def _row_verdict_text(row: PrecisionRow) -> str:
    if row.reason is not None:
        reason = one_line(row.reason)
        return reason if row.failure is None else f"{outcome_name(row.failure)}: {reason}"
    if row.precision == "fp32":
        return "reference"
    if row.verdict is None:
        return "no fp32 to compare with"
    low, high = row.verdicts or (row.verdict, row.verdict)
    return row.verdict if low == high else f"{row.verdict}; the interval spans {low} to {high}"


def _verdict_text(profile: AmpProfile) -> str:
    if profile.best_precision is None:
        reasons = "; ".join(f"{row.precision}: {_row_verdict_text(row)}" for row in profile.rows if row.reason)
        return f"none: {reasons or 'only fp32 was run'}"
    row = profile.row(profile.best_precision)
    return f"{row.precision}, {_speedup_text(row)} over fp32: {_row_verdict_text(row)}"


def _rate_text(gap: StepBreakdown, attained: float, data_sheet: float | None) -> str:
    """Return the rate of the machine and of a step, and the share that the step attains (MFU).

    `data_sheet` is the GPU's rate by its data sheet in FLOP/s, None if unknown.
    """
    of_sheet = (
        "" if data_sheet is None else f"; {percent(attained / data_sheet)} of the data sheet's {flops(data_sheet)}"
    )
    if gap.machine_flops_per_second is None:
        return f"{flops(attained)} by a step; the machine's own rate could not be measured{of_sheet}"
    share = attained / gap.machine_flops_per_second
    by_machine = f"{flops(gap.machine_flops_per_second)} by the machine, {flops(attained)} by a step"
    return f"{by_machine}, {percent(share)} (MFU){of_sheet}"


def _parts_text(gap: StepBreakdown) -> str:
    """Return the parts of a step that take at least 1 %, the largest first."""
    return ", ".join(
        f"{share_of_step(part)} {PART_NAMES[part.name]}" + (f" ({', '.join(part.largest)})" if part.largest else "")
        for part in sorted(gap.parts, key=lambda part: -part.seconds)
        if part.share >= 0.01
    )


# --- measurement ----------------------------------------------------------------------------------------------------


def run_profile(
    source: Source,
    progress: Progress,
    num_batches: int,
    device: str,
    precision: Sequence[str] | str | None,
    batch_size: int | None,
    trace: str | os.PathLike[str] | None,
) -> AmpProfile:
    """Time and profile each precision in child processes; see `autotune_amp.profile_amp` for the arguments."""
    for name, value in (("--batches", num_batches), ("--batch-size", 1 if batch_size is None else batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidRequestError(
                f"{name} is {value!r}; it must be a whole number from 1 up.", f"Give {name} 32, for example."
            )
    path = None if trace is None else Path(trace).absolute()
    if path is not None and (path.suffix == ".gz" or path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise InvalidRequestError(
            f"--trace is {str(trace)!r}; it must be an uncompressed file in a writable folder.",
            "Give for example --trace trace.json.",
        )
    precisions = SearchOptions.from_user(device=device, precision=precision).precisions
    clock = Budget(math.inf)
    meter = LoadMeter(identify(device).uuid)  # before this process has a context on the GPU
    watcher = ProgressWatcher(progress, clock, meter)
    progress.work_started(None)
    with loaded_backend(source, watcher, clock.left()) as backend:
        is_batch_free = source.command_template is None or batch_size is not None
        opened = open_workload(backend, source, device, watcher, is_batch_free=is_batch_free)
        progress.found_hardware(opened.hardware)
        requested = _precisions_to_profile(precisions, opened.hardware)
        space = space_at_batch_size(batch_size, opened, requested)
        reasons = excluded_reasons(space)
        trials = {p: _trial(p, space, opened) for p in requested if p not in reasons}
        meter.start()
        num_rounds = NUM_ROUNDS if source.command_template is None else _num_command_rounds(len(trials), opened)
        outcomes = time_in_turns(backend.submit, trials, num_batches, progress, num_rounds)
        load = machine_load.evidence([meter.stop()])
        if load is not None:  # the rows' intervals come from the processes themselves
            load = msgspec.structs.replace(load, interval_factors=(1.0, 1.0))
        load_notes = machine_load.load_warnings(load, "profile again")
        notes = [*_assumption_notes(batch_size, opened.description), *load_notes, *command_notes(source, opened)]
        if not any(isinstance(outcome, Measurement) for outcome in itertools.chain(*outcomes.values())):
            firsts = {p: rounds[0] for p, rounds in outcomes.items() if rounds}
            failures = {p: first for p, first in firsts.items() if isinstance(first, Failure)}
            advice = "Fix the first error above, or give a smaller --batch-size."
            raise nothing_works_error(reasons, failures, advice)
        with TemporaryDirectory(prefix="autotune_amp-") as folder:
            watcher.phase("profiling steps")
            profiled = {}
            for precision in _remaining_precisions(outcomes):
                trial, part_file = trials[precision], str(Path(folder, f"{precision}.json"))
                result = backend.submit(
                    ProfileJob(
                        device=trial.device, trial=trial, trace_file=part_file, deadline_seconds=DEADLINE_SECONDS
                    )
                ).result()
                if isinstance(result, Profiled):
                    profiled[precision] = result
                else:
                    notes.append(f"{precision} could not be profiled: {result.message}.")
            parts = [Path(folder, f"{p}.json") for p, result in profiled.items() if result.split is not None]
            problem = None if path is None else write_trace(parts, path)
        notes += source.leftovers()
    results = ProfileResults(opened.hardware, reasons, outcomes, profiled, opened.description.weights)
    return make_profile(
        make_rows(requested, results),
        results,
        workload=source.name,
        setting=space.baseline,
        num_batches=num_batches,
        trace=None if path is None or problem is not None else str(path),
        notes=notes if problem is None else [*notes, problem],
        is_command=source.command_template is not None,
    )


def _num_command_rounds(num_precisions: int, opened: OpenedWorkload) -> int:
    """Return the number of rounds of a command, whose start may take minutes: one at least."""
    num_in_time = COMMAND_SECONDS / max(1.0, num_precisions * opened.description.build_seconds)
    return max(1, min(NUM_ROUNDS, int(num_in_time)))


def time_in_turns(
    submit: Callable[[Trial], Handle[Outcome]],
    trials: Mapping[Precision, Trial],
    num_batches: int,
    progress: Progress,
    num_rounds: int = NUM_ROUNDS,
) -> dict[Precision, list[Outcome]]:
    """Run every precision once per round, each in its own process on the same batches, and return the outcomes.

    The `num_batches` are divided among the rounds. A precision that fails or is cut is left out of later rounds.
    Raises `WorkloadError` if the workload does not run in fp32.
    """
    progress.phase(f"timing {', '.join(trials)} in turns on the same batches")
    outcomes: dict[Precision, list[Outcome]] = {precision: [] for precision in trials}
    num_rounds, numbers = min(num_rounds, num_batches), itertools.count(1)
    for round_index in range(num_rounds):
        num_steps = num_batches // num_rounds + (round_index < num_batches % num_rounds)
        names = _remaining_precisions(outcomes)
        first = round_index % max(1, len(names))
        for precision in (*names[first:], *names[:first]):  # the order rotates
            trial, fp32 = trials[precision], outcomes.get("fp32")
            trial = msgspec.structs.replace(trial, seed=trial.seed + round_index, num_steps=(num_steps, num_steps))
            if precision != "fp32" and fp32 and isinstance(fp32[0], Measurement):
                trial = msgspec.structs.replace(trial, **trial_limits(fp32[0]))
            outcome = _run_trial(submit, trial, next(numbers), progress)
            if isinstance(outcome, Failure) and outcome.kind == "workload_error" and precision == "fp32":
                raise WorkloadError(*failure_message(outcome))
            outcomes[precision].append(outcome)
    return outcomes


def _run_trial(submit: Callable[[Trial], Handle[Outcome]], trial: Trial, number: int, progress: Progress) -> Outcome:
    progress.trial_started(number, trial.candidate, trial.purpose)
    started = time.monotonic()
    outcome = submit(trial).result()
    record = Record(
        search_id="profile",
        number=number,
        candidate=trial.candidate,
        purpose=trial.purpose,
        outcome=outcome,
        seconds=time.monotonic() - started,
    )
    progress.trial_ended(record, None)
    return outcome


def _remaining_precisions(outcomes: Mapping[Precision, Sequence[Outcome]]) -> list[Precision]:
    """Return the precisions that have neither failed nor been cut so far."""
    fp32 = outcomes.get("fp32")
    return [
        precision
        for precision, results in outcomes.items()
        if not results or (isinstance(results[-1], Measurement) and not (fp32 and is_cut(results[-1], fp32[0])))
    ]


def trial_limits(fp32: Measurement) -> dict[str, float]:
    """Return the time limits for steps of another precision, as fields of a `Trial`."""
    step = max(DEADLINE_RATIO * fp32.step_seconds, MIN_STEP_DEADLINE_SECONDS)
    first_step = FIRST_STEP_RATIO * fp32.first_step_seconds + step
    return {
        "cut_step_seconds": max(CUT_RATIO * fp32.step_seconds, LONG_STEP_SECONDS),
        "first_step_deadline_seconds": max(first_step, MIN_FIRST_STEP_DEADLINE_SECONDS),
        "step_deadline_seconds": step,
    }


def is_cut(outcome: Outcome, fp32: Outcome) -> bool:
    """Whether a trial was so much slower than fp32's that the precision is not run again."""
    if not isinstance(outcome, Measurement) or not isinstance(fp32, Measurement):
        return False
    return outcome.was_cut or outcome.step_seconds > trial_limits(fp32)["cut_step_seconds"]


def _precisions_to_profile(precisions: tuple[Precision, ...] | None, hardware: Hardware) -> tuple[Precision, ...]:
    """Return the precisions to profile, fp32 first. TF32 is not mixed precision, so it is included only if the device
    has it or the user names it.
    """
    usual: tuple[Precision, ...] = ("tf32", *MIXED_PRECISIONS) if hardware.has_tf32 else MIXED_PRECISIONS
    return tuple(dict.fromkeys(("fp32", *(precisions or usual))))


def space_at_batch_size(size: int | None, opened: OpenedWorkload, precisions: tuple[Precision, ...]) -> Space:
    """Return the search space at the given batch size, or at the user's own batch size and accumulation steps."""
    if size is None and opened.description.batch_size is None:
        size = ASSUMED_BATCH_SIZE
    reason = opened.description.unsettable.get("batch_size")
    if size is not None and size != opened.description.batch_size and reason is not None:
        raise InvalidRequestError(
            f"--batch-size is {size}, which cannot be set: {reason}.",
            "Write {batch_size=N} where the command takes it, or leave --batch-size out.",
        )
    overrides: dict[str, Any] = {} if size is None else {"baseline": ("fp32", size), "effective_batch_size": "free"}
    return build_space(
        opened.hardware, opened.description, SearchOptions.from_user(precision=precisions, try_="none", **overrides)
    )


def command_notes(source: Source, opened: OpenedWorkload) -> list[str]:
    """Return notes on what the steps of a command do not show; empty for a Workload."""
    if source.command_template is None:
        return []
    num_ranks = opened.description.num_ranks
    return [
        "The command's first steps were observed: later steps, evaluations and checkpoints are not known.",
        *([f"Of {num_ranks} ranks rank 0 was examined."] if num_ranks > 1 else []),
    ]


def excluded_reasons(space: Space) -> dict[Precision, str]:
    """Return the precisions that cannot run at the space's batch size, with the reason."""
    runnable = {c.precision for c in space.candidates if c.batch_size == space.baseline.batch_size}
    return {e.precision: e.reason for e in space.excluded if e.precision not in runnable}


def _trial(precision: Precision, space: Space, opened: OpenedWorkload) -> Trial:
    return Trial(
        candidate=Setting(
            precision=precision,
            batch_size=space.baseline.batch_size,
            accumulation_steps=space.baseline.accumulation_steps,
        ),
        device=opened.hardware.device,
        loss_scale=LossScale() if MODES[precision].takes_scaler else None,
        deadline_seconds=DEADLINE_SECONDS,
        loading_seconds=DEADLINE_SECONDS,
        memory_limit_bytes=SearchOptions().limit_bytes(opened.hardware.memory.available),
        torch_state=opened.torch_state,
    )


def assumed_size_notes(batch_size: int | None, description: Description) -> list[str]:
    """Return a note if neither the caller nor the data named a batch size; no note otherwise."""
    if batch_size is not None or description.batch_size is not None:
        return []
    return [f"The data has no batch size of its own: {ASSUMED_BATCH_SIZE} is assumed. To change it, give --batch-size."]


def _assumption_notes(batch_size: int | None, description: Description) -> list[str]:
    """Return notes on the assumptions about the workload."""
    notes = assumed_size_notes(batch_size, description)
    if (weights := description.weights) in MIXED_PRECISIONS:
        notes.append(f"The weights are kept in {weights}: fp32 runs the model as it is, without autocast.")
    elif not description.is_as_found_strict:
        notes.append("fp32 is strict here: the TF32 and reduced-precision flags that you enabled are off in it.")
    return notes


def nothing_works_error(
    reasons_not_run: Mapping[Precision, str], failures: Mapping[Precision, Failure], next_step: str
) -> NothingWorksError:
    """Return the error for a profile in which no precision could be measured, with the reason for each."""
    reasons = {**reasons_not_run, **{name: f"{failure.kind}: {failure.message}" for name, failure in failures.items()}}
    excluded = (Exclusion(precision=name, batch_size=None, reason=why) for name, why in reasons.items())
    return NothingWorksError("No precision could be measured.", next_step, tuple(excluded))


def write_trace(parts: Sequence[Path], trace: Path) -> str | None:
    """Merge the trace files `parts` into `trace`, one process each. Return None, or why no trace was written."""
    if not parts:
        return "No trace was written: no precision could be profiled."
    try:
        traces = [json.loads(part.read_text()) for part in parts]
        events = [event for trace_document in traces for event in trace_document["traceEvents"]]
        trace.write_text(json.dumps({**traces[0], "traceEvents": events}))
    except (OSError, json.JSONDecodeError) as error:
        return f"No complete trace was written to {trace}: {error}."
    return None


# --- evaluation of the outcomes: pure -------------------------------------------------------------------------------

_MIN_SPEEDUPS: tuple[tuple[float, Verdict], ...] = ((1.2, "significant"), (1.05, "modest"), (0.95, "negligible"))


class ProfileResults(NamedTuple):
    """Results of a profile.

    `refused` are the precisions that cannot run here, with the reason; `outcomes` those of the others, one per round
    until one failed or was cut; `profiled` holds the profile of a step. `weights` are those of the `Description`.
    """

    hardware: Hardware
    refused: Mapping[Precision, str]
    outcomes: Mapping[Precision, Sequence[Outcome]]
    profiled: Mapping[Precision, Profiled]
    weights: str = "fp32"


def verdict(speedup: float) -> Verdict:
    """Return the verdict on a speed-up: ``excellent`` above 1.5, ``significant`` from 1.2, ``modest`` from 1.05,
    ``negligible`` from 0.95, else ``slower``.
    """
    if speedup > 1.5:
        return "excellent"
    return next((name for minimum, name in _MIN_SPEEDUPS if speedup >= minimum), "slower")


def make_rows(precisions: Sequence[Precision], results: ProfileResults) -> tuple[PrecisionRow, ...]:
    """Return a row for each precision in the given order, compared with fp32 if that ran."""
    reference = _measured_row("fp32", results)
    return tuple(
        reference if precision == "fp32" else _with_speedup(_measured_row(precision, results), reference, results)
        for precision in precisions
    )


def _measured_row(precision: Precision, results: ProfileResults) -> PrecisionRow:
    if precision in results.refused:
        return PrecisionRow(precision=precision, reason=results.refused[precision])
    outcomes = results.outcomes[precision]
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    last = outcomes[-1]
    failed: dict[str, Any] = {"failure": last.kind, "reason": last.message} if isinstance(last, Failure) else {}
    if not measured:
        return PrecisionRow(precision=precision, **failed)
    steps = tuple(outcome.step_seconds for outcome in measured)
    product = product_precision(precision, results.weights)
    profiled = results.profiled.get(precision)
    capability = None if product is None else results.hardware.precisions.get(product)
    rate = None if capability is None else capability.peak_flops_per_second
    return PrecisionRow(
        precision=precision,
        product_precision=product,
        step_seconds=geometric_mean(steps),  # the same mean as for the speed-up: one slow process changes it little
        step_seconds_interval=ratio_interval(steps, [1.0] * len(steps)),
        process_step_seconds=steps,
        num_steps=sum(outcome.num_steps for outcome in measured),
        peak_memory_bytes=measured[0].peak_memory_bytes,
        gap=None if profiled is None else break_down(measured, profiled, rate),
        **failed,
    )


def _with_speedup(row: PrecisionRow, reference: PrecisionRow, results: ProfileResults) -> PrecisionRow:
    """Return the row with its speed-up over fp32, from pairs of processes of one round; unchanged if either failed."""
    pairs = list(zip(reference.process_step_seconds, row.process_step_seconds, strict=False))
    if not pairs or row.failure is not None or reference.failure is not None:
        return row
    speedup = geometric_mean(fp32_seconds / seconds for fp32_seconds, seconds in pairs)
    if is_cut(results.outcomes[row.precision][-1], results.outcomes["fp32"][0]):
        return msgspec.structs.replace(
            row,
            step_seconds_interval=None,
            speedup=speedup,
            verdict="slower",
            was_cut=True,
            reason=f"cut: at least {number(1 / speedup)} times slower than fp32",
        )
    interval = ratio_interval(*zip(*pairs, strict=True))
    return msgspec.structs.replace(
        row,
        speedup=speedup,
        speedup_interval=interval,
        verdict=verdict(speedup),
        verdicts=(verdict(interval[0]), verdict(interval[1])),
    )


def make_profile(
    rows: tuple[PrecisionRow, ...],
    results: ProfileResults,
    *,
    workload: str,
    setting: Setting,
    num_batches: int,
    trace: str | None = None,
    notes: Sequence[str] = (),
    is_command: bool = False,
) -> AmpProfile:
    """Return the profile made of these rows, fp32's first. `notes` are put before those that the rows give rise to.

    `setting` gives the batch size and the accumulation steps.
    """
    compared = [r for r in rows if r.precision in MIXED_PRECISIONS and r.speedup is not None]
    best = max(compared, key=lambda row: row.speedup or 0.0, default=PrecisionRow(precision="fp32"))
    profile = AmpProfile(
        workload=workload,
        device=results.hardware.device,
        device_name=results.hardware.identity.name,
        batch_size=setting.batch_size,
        accumulation_steps=setting.accumulation_steps,
        num_batches=num_batches,
        rows=rows,
        best_precision=best.precision if compared else None,
        speedup=best.speedup,
        verdict=best.verdict,
        next_steps=(),
        notes=(*notes, *_notes(rows, results)),
        trace=trace,
        is_command=is_command,
    )
    if profile.gap is None:
        return profile
    precision = profile.gap_precision
    steps = next_steps(profile.gap, precision, results.profiled[precision].unfused_optimizer)
    return msgspec.structs.replace(profile, next_steps=steps)


def _notes(rows: Sequence[PrecisionRow], results: ProfileResults) -> list[str]:
    notes = []
    for row in rows:
        capability = results.hardware.precisions.get(row.precision)
        if row.speedup is not None and capability is not None and capability.level == "emulated":
            notes.append(f"{row.precision} is emulated: {capability.reason}")
    for profiled in results.profiled.values():
        if profiled.split_problem is not None:
            notes.append(f"The step could not be divided into parts: {profiled.split_problem}.")
        if profiled.flops_problem is not None:
            notes.append(f"The step's floating-point operations could not be counted: {profiled.flops_problem}.")
    notes += [f"{row.precision}: {row.gap.note}." for row in rows if row.gap is not None and row.gap.note]
    return list(dict.fromkeys(notes))
