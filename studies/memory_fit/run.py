"""Hold the largest batch that `autotune-amp memory --fit` says against the largest that fits when it is tried.

Usage: run.py [measure|table]; without a step both. `measure` writes results/fits.jsonl.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec

from autotune_amp import profile_memory
from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.diagnostics.memory.profile_memory import memory_job
from autotune_amp.diagnostics.memory.results import MemoryBreakdown
from autotune_amp.search.planner import Budget
from autotune_amp.search.progress import Progress
from autotune_amp.search.run import ProgressWatcher
from autotune_amp.search.source import open_workload, target

HERE = Path(__file__).parent
WORKLOADS = HERE.parent / "landscapes" / "workloads.py"
FITS = HERE / "results" / "fits.jsonl"
BEGIN, END = "<!-- table: run.py table -->", "<!-- end of table -->"
MIB = 2**20
LIMITS_MIB = {"mlp": 256, "convnet": 384, "transformer_small": 384}
PRECISIONS: tuple[Precision, ...] = ("fp32",)
NEAR = 1.06  # the largest that fits is known to a factor of so much


def largest_tried(name: str, precision: Precision, limit_bytes: int, first: int) -> tuple[int, list[tuple[int, int]]]:
    """The largest batch size that took no more than the limit, and all that was tried with the bytes taken."""
    source, watcher = target(f"{WORKLOADS}:{name}"), ProgressWatcher(Progress(), Budget(math.inf))
    tried: list[tuple[int, int]] = []
    with source.backend(watcher) as backend:
        backend.load(math.inf)
        opened = open_workload(backend, source, "cpu", watcher, baseline_batch_size=first)

        def fits(size: int) -> bool:
            found = backend.submit(memory_job(Setting(precision=precision, batch_size=size), opened, None)).result()
            assert isinstance(found, MemoryBreakdown), found
            tried.append((size, found.taken_bytes))
            return found.taken_bytes <= limit_bytes

        low, high = 0, first
        while fits(high):
            low, high = high, math.ceil(1.25 * high)
        while low == 0 or high / low > NEAR:
            middle = round(math.sqrt(low * high)) if low else high // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
    return low, tried


def measure() -> None:
    FITS.parent.mkdir(exist_ok=True)
    with FITS.open("w") as file:
        for name, limit_mib in LIMITS_MIB.items():
            limit_bytes = limit_mib * MIB
            said = profile_memory(
                f"{WORKLOADS}:{name}", precision=PRECISIONS, device="cpu", fit=limit_bytes, quiet=True
            )
            for row in said.rows:
                assert row.largest is not None, row.reason
                first = row.largest.batch_size or 1
                largest, tried = largest_tried(name, row.precision, limit_bytes, first)
                line = {
                    "workload": name,
                    "precision": row.precision,
                    "limit_mib": limit_mib,
                    "batch_size": said.batch_size,
                    "said": msgspec.to_builtins(row.largest),
                    "largest": largest,
                    "tried": tried,
                }
                file.write(f"{json.dumps(line)}\n")
                file.flush()


def table() -> None:
    lines = [
        "| workload | precision | today's batch | limit MiB | measured | said | with the error allowed for "
        "| model's error | fits when tried | said over that |",
        f"|{'---|' * 10}",
    ]
    lines += [_row(json.loads(line)) for line in FITS.read_text().splitlines()]
    readme = HERE / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")


def _row(line: dict[str, Any]) -> str:
    said = line["said"]
    error = "-" if said["model_error"] is None else f"{said['model_error']:+.0%} at {said['checked_batch_size']}"
    cells = (
        line["workload"],
        line["precision"],
        line["batch_size"],
        line["limit_mib"],
        ", ".join(f"{size}: {taken / MIB:.0f}" for size, taken in said["measured"]),
        said["batch_size"],
        said["cautious_batch_size"],
        error,
        line["largest"],
        f"{said['batch_size'] / line['largest'] - 1:+.0%}",
    )
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    steps = {"measure": measure, "table": table}
    for step in sys.argv[1:] or steps:
        steps[step]()
