"""Measure whole grids, every precision and batch size in several processes, and keep every step.

Usage: record.py [NAME ...] [--processes 5] [--device cpu] [--out results]; without names all workloads. One that was
interrupted goes on where it was. `record.py table` writes the README's table from what is in --out.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from landscape import Cell, Header, Landscape, Process, hardware_slug
from parts import PARTS

from autotune_amp.core.job import ResultType
from autotune_amp.core.outcome import Failure, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.fingerprint import versions
from autotune_amp.hardware import identify
from autotune_amp.processes.local import LocalBackend
from autotune_amp.processes.process import Watcher
from autotune_amp.search.ledger import LOSS_SCALE
from autotune_amp.search.source import target
from autotune_amp.trial.jobs import NUM_WARMUP_STEPS, Describe, ProbeJob, Trial
from autotune_amp.trial.memory import recommended_environment

HERE = Path(__file__).parent
NUM_STEPS, MEASURE_SECONDS = (8, 40), 0.7
DEADLINE_RATIO, MIN_DEADLINE_SECONDS = 5.0, 1.0  # of fp32's mean trial at the same batch
FP32_DEADLINE_SECONDS = 60.0
NUM_HOPELESS = 2  # processes of a cell that fails, or whose steps are DEADLINE_RATIO times fp32's; one of a timeout
NUM_PAIRS = 5
MEMORY_SHARE = 0.9  # of what is available, where the workload has no limit: as a search does
START_SECONDS = 120.0  # to load and probe


class Ears(Watcher):
    """Hears the steps of a trial: those of the warm-up, which no outcome has, and those of one that fails."""

    def __init__(self) -> None:
        self.warmup: list[float] = []
        self.measured: list[float] = []

    def forget(self) -> None:
        self.warmup, self.measured = [], []

    def step(self, num_steps: int, step_seconds: float) -> None:
        (self.measured if num_steps else self.warmup).append(round(step_seconds, 7))


def to_record(landscape: Landscape, num_processes: int) -> list[Cell]:
    """What is still to be run, in order: the grid, repetition by repetition, fp32 first in the first of them; then the
    pairs of today's cell and of the fastest. What is hopeless has been run often enough after `NUM_HOPELESS`. Pure.
    """
    header = landscape.header
    done = {process.cell for process in landscape.processes}
    cells: list[Cell] = []
    for repetition in range(num_processes):
        grid = [Cell("grid", "fork", repetition, c.precision, c.batch_size) for c in header.grid]
        random.Random(repetition).shuffle(grid)
        if repetition == 0:
            grid.sort(key=lambda cell: cell.precision != "fp32")
        cells += [cell for cell in grid if cell not in done and not _is_known(landscape, cell)]
    if not landscape.cells:
        return cells
    contenders = dict.fromkeys([landscape.baseline, landscape.best()])
    for repetition in range(NUM_PAIRS):
        for candidate in contenders:
            order: Any = ("fork", "fresh") if repetition % 2 == 0 else ("fresh", "fork")
            cells += [Cell("pair", way, repetition, candidate.precision, candidate.batch_size) for way in order]
    return [cell for cell in cells if cell not in done]


def _is_known(landscape: Landscape, cell: Cell) -> bool:
    ours = landscape.cells.get(cell.candidate, [])
    failures = [p.outcome for p in ours if isinstance(p.outcome, Failure)]
    if any(failure.kind == "timeout" for failure in failures):
        return True
    if len(ours) < NUM_HOPELESS:
        return False
    fp32 = landscape.cells.get(msgspec.structs.replace(cell.candidate, precision="fp32"), [])
    rates = [fmean(_rates(processes)) if _rates(processes) else 0.0 for processes in (ours, fp32)]
    return len(failures) == len(ours) or rates[0] * DEADLINE_RATIO < rates[1]


def _rates(processes: Sequence[Process]) -> list[float]:
    return [p.outcome.samples_per_second for p in processes if isinstance(p.outcome, Measurement)]


def deadline_seconds(landscape: Landscape, precision: Precision, batch_size: int) -> float:
    """What a trial of the cell may take: so many times fp32's at this batch; in proportion where it is larger than any
    that fp32 fits into. Pure.
    """
    if precision == "fp32":
        return FP32_DEADLINE_SECONDS
    measured = {
        candidate.batch_size: fmean(p.seconds for p in processes)
        for candidate, processes in landscape.cells.items()
        if candidate.precision == "fp32" and _rates(processes)
    }
    if not measured:
        return FP32_DEADLINE_SECONDS
    nearest = max((size for size in measured if size <= batch_size), default=min(measured))
    seconds = DEADLINE_RATIO * measured[nearest] * max(1.0, batch_size / nearest)
    return max(MIN_DEADLINE_SECONDS, seconds)


def seconds_left(landscape: Landscape, cells: Sequence[Cell]) -> float:
    """What these cells will take, by what was seen of them, else of all."""
    fresh_seconds = landscape.header.start_seconds + MEASURE_SECONDS + 1.0
    everything = [p.seconds for p in landscape.processes if p.cell.isolation == "fork"] or [1.0]
    total = 0.0
    for cell in cells:
        ours = [p.seconds for p in landscape.cells.get(cell.candidate, [])]
        total += fresh_seconds if cell.isolation == "fresh" else fmean(ours or everything)
    return total


class Recorder:
    """Runs the cells of one workload and appends what became of them to its file."""

    def __init__(self, name: str, device: str, path: Path) -> None:
        self._name = name
        self._device = device
        self._path = path
        self._ears = Ears()
        self._payload = target(f"{HERE / 'workloads.py'}:{name}").payload

    def record(self, num_processes: int) -> None:
        if self._path.exists() and not to_record(whole_lines(self._path), num_processes):
            print(f"{self._path} is complete")
            return
        with LocalBackend(self._payload, "forked", self._ears) as runner:
            header = self._header(runner)
            if not self._path.exists():
                self._append(header)
            landscape = whole_lines(self._path)
            check_same(landscape.header, header)
            started = time.monotonic()
            while cells := to_record(landscape, num_processes):
                process = self._run(runner, landscape, cells[0])
                self._append(process)
                landscape = Landscape(landscape.header, (*landscape.processes, process))
                left = seconds_left(landscape, cells[1:])
                print(f"{self._name} {described(process)}; {time.monotonic() - started:.0f} s, {left:.0f} left")

    def _header(self, runner: LocalBackend) -> Header:
        started = time.monotonic()
        runner.load(START_SECONDS)
        state, why_not_fork = runner.open(self._device, None, START_SECONDS)
        start_seconds = time.monotonic() - started
        if why_not_fork is not None:
            raise SystemExit(f"{self._name} cannot be forked: {why_not_fork}.")
        part = PARTS[self._name]
        probe = ProbeJob(device=self._device, torch_state=state, deadline_seconds=START_SECONDS)
        hardware = _found(runner.submit(probe).result())
        describe = Describe(
            device=hardware.device,
            torch_state=state,
            has_tf32=hardware.has_tf32,
            baseline_batch_size=part.todays_batch_size,
            deadline_seconds=START_SECONDS,
        )
        description = _found(runner.submit(describe).result())
        limit = part.memory_limit_mib
        legal: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
        environment = recommended_environment(hardware.device)
        identity = msgspec.structs.replace(hardware.identity, uuid=None)
        return Header(
            workload=self._name,
            hardware=msgspec.structs.replace(hardware, identity=identity),
            description=description,
            versions={**versions(), "transformers": metadata.version("transformers")},
            torch_state=state,
            precisions=tuple(p for p in legal if hardware.precisions[p].level != "unsupported"),
            batch_sizes=part.batch_sizes,
            todays_batch_size=part.todays_batch_size,
            memory_limit_bytes=limit * 2**20 if limit else int(MEMORY_SHARE * hardware.memory.available),
            start_seconds=start_seconds + description.build_seconds + description.context_seconds,
            holds_heap=bool(environment),
            environment=environment,
            settings={
                "num_warmup_steps": NUM_WARMUP_STEPS,
                "num_steps": list(NUM_STEPS),
                "measure_seconds": MEASURE_SECONDS,
                "deadline_ratio": DEADLINE_RATIO,
                "memory_limit_mib": limit,
            },
        )

    def _run(self, runner: LocalBackend, landscape: Landscape, cell: Cell) -> Process:
        header = landscape.header
        is_fresh = cell.isolation == "fresh"
        deadline = deadline_seconds(landscape, cell.precision, cell.batch_size)
        deadline += header.start_seconds * DEADLINE_RATIO if is_fresh else 0.0
        spec = Trial(
            candidate=cell.candidate,
            device=header.hardware.device,
            loss_scale=LOSS_SCALE if cell.precision == "fp16" else None,
            num_steps=NUM_STEPS,
            interval_share=0.0,  # all steps that there is time for: a replay stops where it likes
            measure_seconds=MEASURE_SECONDS,
            deadline_seconds=deadline,
            first_step_deadline_seconds=deadline / 2,  # two more steps of warm-up and a measured one are to come
            step_deadline_seconds=deadline / 3,
            memory_limit_bytes=header.memory_limit_bytes,
            torch_state=header.torch_state,
            hold_heap=header.holds_heap and not is_fresh,
            is_alone=is_fresh,
        )
        self._ears.forget()
        started = time.monotonic()
        if is_fresh:
            with LocalBackend(self._payload, "kept", self._ears, header.environment) as fresh:
                outcome = fresh.submit(spec).result()
                seconds = time.monotonic() - started
        else:
            outcome = runner.submit(spec).result()
            seconds = time.monotonic() - started
        is_failure = isinstance(outcome, Failure)
        if isinstance(outcome, Failure):
            outcome = msgspec.structs.replace(outcome, details=None)  # a traceback with this machine's paths
        else:
            steps = tuple(round(step, 7) for step in outcome.raw_step_seconds)
            outcome = msgspec.structs.replace(outcome, raw_step_seconds=steps)
        return Process(
            cell=cell,
            outcome=outcome,
            seconds=round(seconds, 4),
            deadline_seconds=round(deadline, 3),
            warmup_step_seconds=tuple(self._ears.warmup),
            heard_step_seconds=tuple(self._ears.measured) if is_failure else (),
        )

    def _append(self, line: Header | Process) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")


def whole_lines(path: Path) -> Landscape:
    """The landscape so far; a last line that a kill cut short is dropped from the file."""
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(data.rfind(b"\n") + 1)
    return Landscape.load(path)


def check_same(there: Header, now: Header) -> None:
    """A file holds one machine's processes, all measured alike."""
    for name in ("workload", "versions", "precisions", "batch_sizes", "settings", "environment"):
        if getattr(there, name) != getattr(now, name):
            raise SystemExit(
                f"The file was recorded with {name} {getattr(there, name)}; now it is {getattr(now, name)}. "
                "Move it away, or give another --out."
            )


def described(process: Process) -> str:
    found = process.outcome
    words = found.kind if isinstance(found, Failure) else f"{1000 * found.step_seconds:.1f} ms a step"
    return f"{process.cell}: {words}, {process.seconds:.1f} s"


def _found(answer: ResultType | Failure) -> ResultType:
    if isinstance(answer, Failure):
        raise SystemExit(f"The workload cannot be probed or built: {answer.kind}: {answer.message}")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PARTS, "table", []], metavar="NAME")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    if asked.names == ["table"]:
        from table import write_table

        write_table(HERE / "README.md", asked.out)
        return
    slug = hardware_slug(identify(asked.device))
    for name in asked.names or PARTS:
        Recorder(name, asked.device, asked.out / f"{name}_{slug}.jsonl").record(asked.processes)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main()
