"""Record the landscapes of all workloads on the virtual card of this process, by its clock: run.py starts this there.

Usage: record.py FOLDER [WORKLOAD ...]. Every legal precision at every batch size is a trial by the package's own code,
one after another in this process; no batch is tried that is larger than one which ran out of memory in its precision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import paths  # noqa: F401 - finds landscape
import torch
import workloads
from landscape import Cell, Header, Process
from workloads import PARTS

from autotune_amp.core.config import LossScale
from autotune_amp.core.hardware import Hardware
from autotune_amp.core.outcome import Failure, Measurement, Outcome
from autotune_amp.core.precisions import Precision
from autotune_amp.fingerprint import versions
from autotune_amp.hardware.measuring import measure
from autotune_amp.precision import torch_state
from autotune_amp.trial import worker
from autotune_amp.trial.context import Context
from autotune_amp.trial.jobs import STEPS_PER_SYNC, Describe, Trial

# The clock knows operators, not processes: these are assumed. A fresh process takes 5 to 8 s to its first step; a
# forked one has torch and the workload, and makes a context.
START_SECONDS, FORKED_START_SECONDS = 6.0, 1.0
MEMORY_SHARE = 0.9  # as a search allows it
PROBE_SECONDS = 0.2  # of the card's time
LOSS_SCALE = LossScale(init_scale=2.0**8)  # so low that no step is skipped, which would be shorter than the others


def record(name: str, hardware: Hardware, path: Path) -> None:
    context = Context(getattr(workloads, name)(), is_kept=True)
    header = _header(context, name, hardware)
    lines: list[Header | Process] = [header]
    for precision in header.precisions:
        outcome: Outcome | None = None
        for batch_size in header.batch_sizes:
            cell = Cell("grid", "fork", 0, precision, batch_size)
            if isinstance(outcome, Failure):  # a smaller batch ran out of memory
                lines.append(msgspec.structs.replace(lines[-1], cell=cell))
                continue
            process = _run(context, header, cell)
            outcome = process.outcome
            lines.append(process)
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    print(f"{path.name}: {len(lines) - 1} cells", flush=True)


def _header(context: Context, name: str, hardware: Hardware) -> Header:
    part, state = PARTS[name], torch_state.capture()
    legal: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
    describe = Describe(
        device=hardware.device,
        torch_state=state,
        has_tf32=hardware.has_tf32,
        baseline_batch_size=part.todays_batch_size,
    )
    return Header(
        workload=name,
        hardware=hardware,
        description=worker.describe(context, describe, print),
        versions=versions(),
        torch_state=state,
        precisions=tuple(p for p in legal if hardware.precisions[p].level != "unsupported"),
        batch_sizes=part.batch_sizes,
        todays_batch_size=part.todays_batch_size,
        memory_limit_bytes=int(MEMORY_SHARE * hardware.memory.available),
        start_seconds=START_SECONDS,
        holds_heap=False,
        environment={},
        settings={"forked_start_seconds": FORKED_START_SECONDS, "magnification": workloads.MAGNIFICATION},
    )


def _run(context: Context, header: Header, cell: Cell) -> Process:
    warmup: list[float] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["number"] == 0:
            warmup.append(event["seconds"])

    spec = Trial(
        candidate=cell.candidate,
        device=header.hardware.device,
        num_warmup_steps=(2, 2),
        num_steps=(STEPS_PER_SYNC, STEPS_PER_SYNC),
        loss_scale=LOSS_SCALE if cell.precision == "fp16" else None,
        memory_limit_bytes=header.memory_limit_bytes,
        torch_state=header.torch_state,
    )
    outcome = worker.run(context, spec, hear)
    if isinstance(outcome, Failure) and outcome.kind != "oom":
        raise SystemExit(f"{header.workload} {cell}: {outcome.kind}: {outcome.message}\n{outcome.details or ''}")
    measured = sum(outcome.raw_step_seconds) * outcome.num_steps_together if isinstance(outcome, Measurement) else 0.0
    return Process(
        cell=cell,
        outcome=_rounded(outcome),
        seconds=_round(FORKED_START_SECONDS + sum(warmup) + measured),
        deadline_seconds=0.0,
        warmup_step_seconds=tuple(map(_round, warmup)),
    )


def _rounded(outcome: Outcome) -> Outcome:
    """To nanoseconds: what is below depends on how long the process had run."""
    if isinstance(outcome, Failure):
        return Failure(kind=outcome.kind, message=outcome.message.splitlines()[0])
    seconds = _round(outcome.step_seconds)
    return msgspec.structs.replace(
        outcome,
        step_seconds=seconds,
        step_seconds_interval=(seconds, seconds),
        samples_per_second=round(outcome.samples_per_second, 3),
        raw_step_seconds=tuple(map(_round, outcome.raw_step_seconds)),
        data_seconds=_round(outcome.data_seconds),
        first_step_seconds=_round(outcome.first_step_seconds),
        build_seconds=0.0,
        context_seconds=FORKED_START_SECONDS,
    )


def _round(seconds: float) -> float:
    return round(seconds, 9)


if __name__ == "__main__":
    card = measure("cuda:0", seconds=PROBE_SECONDS)
    worker.free_cached_memory(torch.device(card.device))
    for name in sys.argv[2:] or PARTS:
        record(name, card, Path(sys.argv[1], f"{name}.jsonl"))
