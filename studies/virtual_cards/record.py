"""Record the landscape of one workload: run this on a virtual machine (run.py does), which the card's clock times.

Usage: record.py WORKLOAD FILE. Every legal precision at every batch size is one forked trial of the package's own; no
batch is tried that is larger than one which ran out of memory in its precision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import paths
from landscape import Cell, Header, Process
from workloads import PARTS

from autotune_amp.config import Precision
from autotune_amp.fingerprint import versions
from autotune_amp.hardware.types import Hardware
from autotune_amp.search.origin import target
from autotune_amp.search.rerank import LOSS_SCALE
from autotune_amp.trial.outcome import Description, Failure, Measurement
from autotune_amp.trial.process import Watcher
from autotune_amp.trial.runner import Runner
from autotune_amp.trial.spec import STEPS_PER_SYNC, TrialSpec

# The clock knows operators, not processes: these are assumed. A fresh process took 5 to 7.5 s to its first step before
# any real context (issue 13); a forked one has torch and the workload, and makes a context.
START_SECONDS, FORKED_START_SECONDS = 6.0, 1.0
MEMORY_SHARE = 0.9  # as a search allows it
DEADLINE_SECONDS = 300.0  # of this machine, to load, probe or run a trial


class Ears(Watcher):
    """Hears the steps of the warm-up, which no outcome has."""

    def __init__(self) -> None:
        self.warmup: list[float] = []

    def step(self, num_steps: int, step_seconds: float) -> None:
        if not num_steps:
            self.warmup.append(step_seconds)


def record(name: str, path: Path) -> None:
    ears = Ears()
    payload = target(f"{paths.HERE / 'workloads.py'}:{name}").payload()
    with Runner(payload, "kept", ears) as runner:
        header = _header(runner, name)
        lines: list[Header | Process] = [header]
        for precision in header.precisions:
            for number, batch_size in enumerate(header.batch_sizes):
                ears.warmup = []
                process = _run(runner, ears, header, Cell("grid", "fork", 0, precision, batch_size))
                lines.append(process)
                if isinstance(process.outcome, Failure):
                    lines += [_out_too(process, larger) for larger in header.batch_sizes[number + 1 :]]
                    break
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _header(runner: Runner, name: str) -> Header:
    runner.load(DEADLINE_SECONDS)
    state, _ = runner.open("cuda", None, DEADLINE_SECONDS)
    part = PARTS[name]
    where: dict[str, Any] = {"device": "cuda:0", "torch_state": state}
    hardware = msgspec.convert(runner.ask("probe", where, DEADLINE_SECONDS), Hardware)
    where["baseline_batch_size"] = part.todays_batch_size
    description = msgspec.convert(runner.ask("describe", where, DEADLINE_SECONDS), Description)
    legal: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
    return Header(
        workload=name,
        hardware=hardware,
        description=description,
        versions=versions(),
        torch_state=state,
        precisions=tuple(p for p in legal if hardware.precisions[p].level != "unsupported"),
        batch_sizes=part.batch_sizes,
        todays_batch_size=part.todays_batch_size,
        memory_limit_bytes=int(MEMORY_SHARE * hardware.memory.available),
        start_seconds=START_SECONDS,
        holds_heap=False,
        environment={},
        settings={"forked_start_seconds": FORKED_START_SECONDS},
    )


def _run(runner: Runner, ears: Ears, header: Header, cell: Cell) -> Process:
    outcome = runner.run(
        TrialSpec(
            candidate=cell.candidate,
            device=header.hardware.device,
            num_steps=(STEPS_PER_SYNC, STEPS_PER_SYNC),
            loss_scale=LOSS_SCALE if cell.precision == "fp16" else None,
            memory_limit_bytes=header.memory_limit_bytes,
            deadline_seconds=DEADLINE_SECONDS,
            torch_state=header.torch_state,
        )
    )
    if isinstance(outcome, Failure) and outcome.kind != "oom":
        raise SystemExit(f"{cell}: {outcome.kind}: {outcome.message}\n{outcome.details or ''}")
    steps = outcome.raw_step_seconds if isinstance(outcome, Measurement) else ()
    return Process(
        cell=cell,
        outcome=_without_process_times(outcome),
        seconds=FORKED_START_SECONDS + sum(ears.warmup) + sum(steps),
        deadline_seconds=DEADLINE_SECONDS,
        warmup_step_seconds=tuple(ears.warmup),
    )


def _without_process_times(outcome: Measurement | Failure) -> Measurement | Failure:
    if isinstance(outcome, Failure):
        return msgspec.structs.replace(outcome, details=None)
    return msgspec.structs.replace(outcome, build_seconds=0.0, context_seconds=FORKED_START_SECONDS)


def _out_too(process: Process, batch_size: int) -> Process:
    return msgspec.structs.replace(process, cell=process.cell._replace(batch_size=batch_size))


if __name__ == "__main__":
    record(sys.argv[1], Path(sys.argv[2]))
