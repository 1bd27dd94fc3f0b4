"""What more devices do to a search: seconds and choice on scripted landscapes.

Usage: run.py scripted | table. Raw outcomes: results/scripted.jsonl.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
STUDIES = HERE.parent
sys.path[:0] = [str(STUDIES / "landscapes")]

from closed_form import Repeated, landscapes  # noqa: E402 - found by the line above
from search_replay import search_replay, setting_of  # noqa: E402

SCRIPTED = HERE / "results/scripted.jsonl"
NUM_SLOTS, NUM_SEEDS = (1, 2, 4, 8), 3
BUDGET_SECONDS = 200.0
BEGIN, END = "<!-- run.py table -->\n", "<!-- end of table -->"


def scripted() -> None:
    """Every landscape without further dimensions, seed and number of slots: seconds, choice and what it misses."""
    with SCRIPTED.open("w") as file:
        for name, form in landscapes().items():
            for seed in range(NUM_SEEDS if form.noise else 1):
                for num_slots in NUM_SLOTS:
                    began = time.process_time()  # of this process alone, on a machine that others use
                    found = search_replay(Repeated(form, seed), seed, BUDGET_SECONDS, num_slots)
                    deciding_seconds = time.process_time() - began
                    assert found.decision is not None, name
                    chosen = setting_of(found.decision)
                    row = {
                        "landscape": name,
                        "noise": form.noise,
                        "seed": seed,
                        "num_slots": num_slots,
                        "seconds": found.records[-1][0],
                        "searched_seconds": found.searched_seconds,
                        "num_jobs": len(found.records),
                        "deciding_seconds": deciding_seconds,
                        "chosen": str(chosen),
                        "missed": form.regret(chosen),
                    }
                    file.write(json.dumps(row) + "\n")


def table() -> str:
    lines = [
        "| noise between processes | slots | seconds before the confirmation, mean | times those of one slot "
        "| seconds of a search, mean | times those of one slot | jobs "
        "| same choice as on one slot | misses the best by, mean |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = [json.loads(line) for line in SCRIPTED.read_text().splitlines()]
    for noise in sorted({row["noise"] for row in found}):
        of_noise = [row for row in found if row["noise"] == noise]
        alone = {(row["landscape"], row["seed"]): row for row in of_noise if row["num_slots"] == 1}
        for num_slots in NUM_SLOTS:
            ours = [row for row in of_noise if row["num_slots"] == num_slots]
            same = fmean(row["chosen"] == alone[row["landscape"], row["seed"]]["chosen"] for row in ours)
            times = [
                f"{mean(ours, name):.0f} | {mean(ours, name) / mean(alone.values(), name):.2f}"
                for name in ("searched_seconds", "seconds")
            ]
            lines.append(
                f"| {100 * noise:.0f} % | {num_slots} | {' | '.join(times)} "
                f"| {mean(ours, 'num_jobs'):.0f} | {100 * same:.0f} % | {100 * mean(ours, 'missed'):.1f} % |"
            )
    lines += ["", "| deciding, of all noises | slots | seconds a job, mean |", "|---|---|---|"]
    for num_slots in NUM_SLOTS:
        ours = [row for row in found if row["num_slots"] == num_slots]
        each = sum(row["deciding_seconds"] for row in ours) / sum(row["num_jobs"] for row in ours)
        lines.append(f"| scripted | {num_slots} | {each:.4f} |")
    return "\n".join(lines) + "\n"


def mean(found: Iterable[dict[str, Any]], name: str) -> float:
    return fmean(row[name] for row in found)


if __name__ == "__main__":
    (what,) = sys.argv[1:]
    work: dict[str, Callable[[], None]] = {"scripted": scripted, "table": lambda: None}
    work[what]()
    readme = HERE / "README.md"
    readme.write_text(re.sub(f"(?<={BEGIN}).*?(?={END})", lambda _: table(), readme.read_text(), flags=re.DOTALL))
