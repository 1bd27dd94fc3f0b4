"""A recorded landscape: what every cell of a grid did, process by process; plain data, one JSON document a line.

The first line of a file is its `Header`, every other one a `Process`. Imports no torch.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import msgspec

from autotune_amp.core.hardware import DeviceIdentity, Hardware
from autotune_amp.core.outcome import Description, Failure, Measurement
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.search.options import SearchOptions
from autotune_amp.search.space import Space, build_space

PROCESSES_A_CELL = 5  # of an exhaustive grid


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes of a landscape have in common.

    `hardware` is what the probe found. `start_seconds` is what a fresh process takes before its first step, as a search
    reckons it. `environment` is what the processes of the stage "pair" that are fresh start with; the others hold their
    heap where `holds_heap`. `settings` are those of the recorder.
    """

    format: int = 1
    workload: str
    hardware: Hardware
    description: Description
    versions: dict[str, str]
    torch_state: dict[str, Any]
    precisions: tuple[Precision, ...]
    batch_sizes: tuple[int, ...]
    todays_batch_size: int
    memory_limit_bytes: int
    start_seconds: float
    holds_heap: bool
    environment: dict[str, str]
    settings: dict[str, Any]

    @property
    def grid(self) -> list[Setting]:
        """Every cell, by precision and batch size."""
        return [Setting(precision=p, batch_size=b) for p in self.precisions for b in self.batch_sizes]


class Cell(NamedTuple):
    """One process to be run; `repetition` counts from 0. The grid is forked, a pair is one forked and one fresh."""

    stage: Literal["grid", "pair"]
    isolation: Literal["fork", "fresh"]
    repetition: int
    precision: Precision
    batch_size: int

    @property
    def candidate(self) -> Setting:
        return Setting(precision=self.precision, batch_size=self.batch_size)

    def __str__(self) -> str:
        return f"{self.stage} {self.isolation} {self.candidate} #{self.repetition}"


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process that was run. `seconds` is all of it, `warmup_step_seconds` the first step and the rest of the
    warm-up. `heard_step_seconds` are the measured steps that one which failed had told of.

    A process is ended as soon as a step shows that it will not keep its deadline, and counts for all of that.
    """

    cell: Cell
    outcome: Measurement | Failure
    seconds: float
    deadline_seconds: float
    warmup_step_seconds: tuple[float, ...] = ()
    heard_step_seconds: tuple[float, ...] = ()

    @property
    def counted_seconds(self) -> float:
        """What it cost, or would have cost if it had been left until its deadline."""
        is_timeout = isinstance(self.outcome, Failure) and self.outcome.kind == "timeout"
        return self.deadline_seconds if is_timeout else self.seconds

    @property
    def setup_seconds(self) -> float:
        """All but the steps; of one that was killed before its first step nobody knows how much that was."""
        if isinstance(self.outcome, Measurement):
            step_seconds = self.outcome.num_steps * self.outcome.step_seconds
        else:
            step_seconds = sum(self.heard_step_seconds)
            if self.outcome.kind == "timeout":
                return 0.0
        return max(0.0, self.seconds - sum(self.warmup_step_seconds) - step_seconds)


class Landscape:
    """All processes of one workload on one machine: those of the grid in `cells`, the pairs apart."""

    def __init__(self, header: Header, processes: Iterable[Process]) -> None:
        # Other numbers of loader workers were not recorded.
        described = msgspec.structs.replace(header.description, num_workers=None)
        self.header = msgspec.structs.replace(header, description=described)
        self.processes = tuple(processes)
        self.cells: dict[Setting, list[Process]] = {}
        for process in self.processes:
            if process.cell.stage == "grid":
                self.cells.setdefault(process.cell.candidate, []).append(process)

    @classmethod
    def load(cls, path: Path) -> Landscape:
        """Read a file; a last line that a kill cut short is left out."""
        header, *lines = path.read_bytes().rpartition(b"\n")[0].splitlines()
        return cls(
            msgspec.json.decode(header, type=Header), [msgspec.json.decode(line, type=Process) for line in lines]
        )

    @property
    def baseline(self) -> Setting:
        """What a user runs today."""
        return Setting(precision="fp32", batch_size=self.header.todays_batch_size)

    def samples_per_second(self, candidate: Setting) -> float:
        """The mean over the cell's processes, 0 where one of them failed."""
        return mean_samples_per_second(self.cells[candidate])

    def space(self) -> Space:
        """The grid as a search has it, the effective batch size free and without accumulation."""
        header = self.header
        options = SearchOptions(
            precisions=header.precisions,
            batch_size=(min(header.batch_sizes), max(header.batch_sizes)),
            effective_batch_size="free",
            baseline=("fp32", header.todays_batch_size),
        )
        space = build_space(header.hardware, header.description, options)
        return msgspec.structs.replace(space, accumulation_withheld="the landscape has no accumulation")

    def draw(self, setting: Setting, chance: random.Random) -> Process:
        """One of the cell's processes; raises `KeyError` for what is not in the grid."""
        if setting not in self.cells:
            raise KeyError(f"{setting} was not recorded; the landscape has {', '.join(map(str, self.cells))}.")
        return chance.choice(self.cells[setting])

    def step_seconds(self, precision: Precision, batch_size: int) -> float:
        """The mean step at the nearest batch size that was measured, in proportion to it; inf where none ran."""
        measured = {
            cell.batch_size: [p.outcome.step_seconds for p in processes if isinstance(p.outcome, Measurement)]
            for cell, processes in self.cells.items()
            if cell.precision == precision
        }
        sizes = [size for size, seconds in measured.items() if seconds]
        if not sizes:
            return math.inf
        nearest = min(sizes, key=lambda size: abs(math.log(size / batch_size)))
        return fmean(measured[nearest]) * batch_size / nearest

    def setup_seconds(self) -> float:
        """The longest that a process of the baseline took before its first step."""
        return max(process.setup_seconds for process in self.cells[self.baseline])

    def best(self) -> Setting:
        """The cell with the highest mean."""
        return max(self.cells, key=self.samples_per_second)


def mean_samples_per_second(processes: Sequence[Process]) -> float:
    """The mean of what was measured, 0 where one of them failed: what fails once in a while is nothing to run."""
    rates = [p.outcome.samples_per_second for p in processes if isinstance(p.outcome, Measurement)]
    return fmean(rates) if rates and len(rates) == len(processes) else 0.0


def forked_grid_seconds(landscape: Landscape) -> float:
    """An exhaustive grid of forked processes as recorded: a timeout counts at its deadline, what was not repeated as if
    it had been.
    """
    return PROCESSES_A_CELL * sum(fmean(p.counted_seconds for p in processes) for processes in landscape.cells.values())


def hardware_slug(identity: DeviceIdentity) -> str:
    """A device in a file's name: ``xeon_2.5ghz_2cpu``."""
    words = re.sub(r"\((r|tm|c)\)", " ", identity.name.lower())
    kept = [w for w in re.findall(r"[\w.+-]+", words) if w not in ("intel", "amd", "nvidia", "cpu", "processor")]
    kept = [re.sub(r"(\.\d*?)0+ghz", r"\1ghz", word).replace(".ghz", "ghz") for word in kept]
    return "_".join([*kept, f"{identity.num_cpus}cpu"] if identity.type == "cpu" else kept)
