"""Predict the peak memory of every cell of the landscapes, compare with what was measured there, write the table.

Usage: run.py [track|returned|table]; without a step all. What was measured is in studies/landscapes/results; `track`
runs the fake-tensor tracker for each part, precision and batch size and writes results/tracker.jsonl; `returned`
measures each part's largest batch again with an allocator that gives freed blocks back, into results/returned.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from autotune_amp.core.intervals import fit_memory
from autotune_amp.core.outcome import Failure, Measurement

HERE = Path(__file__).parent
LANDSCAPES = HERE.parent / "landscapes"
sys.path.insert(0, str(LANDSCAPES))
from landscape import Landscape  # noqa: E402 - beside this folder
from parts import PARTS, Part, of_transformers  # noqa: E402

TRACKED, RETURNED = HERE / "results" / "tracker.jsonl", HERE / "results" / "returned.jsonl"
# Every larger block goes back to the system when it is freed.
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
NUM_STEPS = 4
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
MIB = 2**20


def tracked_bytes(part: Part, dtype: torch.dtype | None, batch_size: int) -> int:
    """The peak of two training steps on fake tensors, of which nothing is computed: parameters, gradients, optimizer
    state, activations and what an operation holds for itself, as far as its fake one makes it. The model is built
    before it is made fake, since its making may look at numbers.
    """
    sample, real = part.data()[0], part.model().train()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = fake(real, mode)
        optimizer = part.optimizer(model.parameters())
        batch = [torch.zeros((batch_size, *value.shape), dtype=value.dtype) for value in sample]
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *batch)
        peaks = []
        with tracker:
            for _ in range(2):  # the optimizer makes its state in the first
                with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
                    loss = part.loss(model, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
                peaks.append(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
                tracker.reset_mod_stats()
    return max(peaks)


def fake(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    return model._apply(mode.from_tensor)


def track() -> None:
    TRACKED.parent.mkdir(exist_ok=True)
    with TRACKED.open("w") as file:
        for name, part in PARTS.items():
            for precision, dtype in PRECISIONS.items():
                for batch_size in part.batch_sizes:
                    started = time.process_time()
                    found: dict[str, Any] = {"workload": name, "precision": precision, "batch_size": batch_size}
                    try:
                        found["bytes"] = tracked_bytes(part, dtype, batch_size)
                    except Exception as error:
                        found["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
                    found["seconds"] = time.process_time() - started
                    file.write(json.dumps(found) + "\n")
                    print(found, flush=True)


def measure_returned() -> None:
    with RETURNED.open("w") as file:
        for row in load_rows():
            cell = {"workload": row.workload, "precision": row.precision, "batch_size": max(row.measured)}
            command = [sys.executable, __file__, "train", *map(str, cell.values())]
            done = subprocess.run(command, env=os.environ | RETURNING, check=True, capture_output=True, text=True)
            file.write(json.dumps(cell | {"bytes": int(done.stdout)}) + "\n")
            file.flush()


def train(part: Part, dtype: torch.dtype | None, batch_size: int) -> int:
    """Peak resident bytes of a few training steps beyond what the process held before the model was built."""
    dataset = part.data()
    batch = [torch.stack(values) for values in zip(*(dataset[number] for number in range(batch_size)), strict=True)]
    if part.loss is of_transformers:
        part.model()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    model = part.model().train()
    optimizer = part.optimizer(model.parameters())
    for _ in range(NUM_STEPS):
        with torch.autocast("cpu", dtype=dtype) if dtype else contextlib.nullcontext():
            loss = part.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


class Row(NamedTuple):
    """One workload and precision; all in bytes by batch size. `out_of_memory` are the batches that no process ran."""

    workload: str
    precision: str
    measured: dict[int, list[int]]
    out_of_memory: list[int]
    limit_bytes: int
    tracked: dict[int, int]
    track_seconds: float

    @property
    def medians(self) -> dict[int, int]:
        return {size: int(median(values)) for size, values in self.measured.items()}


Way = Callable[[Row, int], float | None]


def fit_of_smallest(row: Row, batch_size: int) -> float | None:
    return _fit(row, sorted(row.measured)[:2], batch_size)


def fit_of_middle(row: Row, batch_size: int) -> float | None:
    middle = len(row.measured) // 2
    return _fit(row, sorted(row.measured)[middle - 1 : middle + 1], batch_size)


def _fit(row: Row, sizes: list[int], batch_size: int) -> float | None:
    model = fit_memory((size, row.medians[size]) for size in sizes)
    return None if model is None else model(batch_size)


def tracker(row: Row, batch_size: int) -> float | None:
    return row.tracked.get(batch_size)


def smallest_and_tracker(row: Row, batch_size: int) -> float | None:
    """What the smallest batch takes beyond what the tracker says of it is the process's own, at every batch."""
    smallest = min(row.measured)
    if batch_size not in row.tracked or smallest not in row.tracked:
        return None
    return row.medians[smallest] + row.tracked[batch_size] - row.tracked[smallest]


WAYS: dict[str, Way] = {
    "fit of the two smallest": fit_of_smallest,
    "fit of two middle ones": fit_of_middle,
    "tracker": tracker,
    "smallest measured + tracker's growth": smallest_and_tracker,
}


def load_rows() -> list[Row]:
    lines = [json.loads(line) for line in TRACKED.read_text().splitlines()]
    rows = []
    for path in sorted((LANDSCAPES / "results").glob("*.jsonl")):
        landscape = Landscape.load(path)
        if landscape.header.hardware.device != "cpu":
            continue
        for precision in PRECISIONS:
            name, measured, out_of_memory = landscape.header.workload, {}, []
            for candidate, processes in landscape.cells.items():
                if candidate.precision != precision:
                    continue
                outcomes = [process.outcome for process in processes]
                peaks = [o.reserved_memory_bytes for o in outcomes if isinstance(o, Measurement)]
                if peaks:
                    measured[candidate.batch_size] = peaks
                elif any(isinstance(o, Failure) and o.kind == "oom" for o in outcomes):
                    out_of_memory.append(candidate.batch_size)
            ours = [line for line in lines if (line["workload"], line["precision"]) == (name, precision)]
            rows.append(
                Row(
                    workload=name,
                    precision=precision,
                    measured=measured,
                    out_of_memory=sorted(out_of_memory),
                    limit_bytes=landscape.header.memory_limit_bytes,
                    tracked={line["batch_size"]: line["bytes"] for line in ours if "bytes" in line},
                    track_seconds=median(line["seconds"] for line in ours),
                )
            )
    return [row for row in rows if row.measured]


def load_returned() -> dict[tuple[str, str, int], int]:
    lines = [json.loads(line) for line in RETURNED.read_text().splitlines()]
    return {(line["workload"], line["precision"], line["batch_size"]): line["bytes"] for line in lines}


def table() -> None:
    rows = load_rows()
    lines = [
        f"| workload | precision | largest batch | measured MiB (least to most) | {' | '.join(WAYS)} "
        "| measured MiB, blocks returned | tracker against that | tracker s |",
        f"|---|---|---|---|{'---|' * len(WAYS)}---|---|---|",
    ]
    returned = load_returned()
    errors: dict[str, list[float]] = {name: [] for name in (*WAYS, "returned")}
    for row in rows:
        largest = max(row.measured)
        peaks = row.measured[largest]
        cells = []
        for name, way in WAYS.items():
            predicted = way(row, largest)
            error = None if predicted is None else predicted / row.medians[largest] - 1
            cells.append("-" if error is None else f"{error:+.1%}")
            if error is not None:
                errors[name].append(abs(error))
        peak = returned[row.workload, row.precision, largest]
        errors["returned"].append(abs(row.tracked[largest] / peak - 1))
        cells += [f"{peak / MIB:.0f}", f"{row.tracked[largest] / peak - 1:+.1%}"]
        spread = f"{row.medians[largest] / MIB:.0f} ({min(peaks) / MIB:.0f} to {max(peaks) / MIB:.0f})"
        lines.append(
            f"| {row.workload} | {row.precision} | {largest} | {spread} | {' | '.join(cells)} "
            f"| {row.track_seconds:.1f} |"
        )
    for word, of in (("median", median), ("largest", max)):
        of_ways = " | ".join(f"{of(errors[name]):.1%}" for name in WAYS)
        lines.append(f"| {word} error | | | | {of_ways} | | {of(errors['returned']):.1%} | |")
    walls = [
        f"| {row.workload} | {row.precision} | {size} | {row.limit_bytes / MIB:.0f} "
        + "".join(f"| {(way(row, size) or 0) / MIB:.0f} " for way in WAYS.values())
        + "|"
        for row in rows
        for size in row.out_of_memory
    ]
    if walls:
        lines += [
            "",
            "What ran out of memory, and what was predicted of it, in MiB:",
            "",
            f"| workload | precision | batch | limit | {' | '.join(WAYS)} |",
            f"|---|---|---|---|{'---|' * len(WAYS)}",
            *walls,
        ]
    readme = HERE / "README.md"
    begin, end = "<!-- table: run.py table -->", "<!-- end of table -->"
    head, rest = readme.read_text().split(begin)
    readme.write_text(f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        print(train(PARTS[sys.argv[2]], PRECISIONS[sys.argv[3]], int(sys.argv[4])))
        sys.exit()
    steps = sys.argv[1:] or ["track", "returned", "table"]
    if "track" in steps:
        track()
    if "returned" in steps:
        measure_returned()
    if "table" in steps:
        table()
