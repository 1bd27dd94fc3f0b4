"""What more slots do to a search: seconds and choice on scripted landscapes, and on two shares of a real CPU.

Usage: run.py scripted | real | table. Raw outcomes: results/scripted.jsonl, results/real.jsonl.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
STUDIES = HERE.parent
sys.path[:0] = [str(STUDIES / "landscapes"), str(STUDIES / "variants")]

from closed_form import Repeated, landscapes  # noqa: E402 - found by the line above
from search_replay import search_replay, setting_of  # noqa: E402

SCRIPTED, REAL = HERE / "results/scripted.jsonl", HERE / "results/real.jsonl"
NUM_SLOTS, NUM_SEEDS = (1, 2, 4, 8), 50
BUDGET_SECONDS = 200.0
REAL_NAMES, NUM_ROUNDS, REAL_BUDGET_SECONDS = ("lstm", "convnet"), 2, 110
BEGIN, END = "<!-- run.py table -->\n", "<!-- end of table -->"


def scripted() -> None:
    """Every landscape without further dimensions, seed and number of slots: seconds, choice and what it misses."""
    with SCRIPTED.open("w") as file:
        for name, form in landscapes().items():
            for seed in range(NUM_SEEDS if form.noise else 1):
                for num_slots in NUM_SLOTS:
                    began = time.perf_counter()
                    found = search_replay(Repeated(form, seed), seed, BUDGET_SECONDS, num_slots)
                    deciding_seconds = time.perf_counter() - began
                    assert found.decision is not None, name
                    chosen, slots = setting_of(found.decision), found.decision.evidence.slots
                    row = {
                        "landscape": name,
                        "noise": form.noise,
                        "seed": seed,
                        "num_slots": num_slots,
                        "seconds": found.records[-1][0],
                        "searched_seconds": found.searched_seconds,
                        "num_jobs": len(found.records),
                        "deciding_seconds": deciding_seconds,
                        "is_beside": slots is not None and slots.is_confirmed_beside,
                        "chosen": str(chosen),
                        "missed": form.regret(chosen),
                    }
                    file.write(json.dumps(row) + "\n")


def real() -> None:
    """Searches with one process at a time and on two shares of the CPU, in turn; both have one thread a trial."""
    with REAL.open("w") as file:
        for name in REAL_NAMES * NUM_ROUNDS:
            for options in ((), ("--slots", "2")):
                file.write(json.dumps(real_search(name, *options)) + "\n")
                file.flush()


def real_search(name: str, *options: str) -> dict[str, Any]:
    target = f"{STUDIES / 'variants/workloads.py'}:{name}"
    command = [sys.executable, "-m", "autotune_amp", "search", target, "--try", "none", "--device", "cpu", "--json"]
    with TemporaryDirectory() as out:
        budget = ("--budget", str(REAL_BUDGET_SECONDS))
        done = subprocess.run([*command, *options, *budget, "--out", out], check=True, capture_output=True)
        document = json.loads(done.stdout)
        (path,) = Path(out).glob("*/outcomes.jsonl")
        records = [json.loads(line) for line in path.read_text().splitlines()]
    before = [record for record in records if record["round"] is None and record["purpose"] != "outlook"]
    confirmed = [record for record in records if record["round"] is not None]
    return {
        "name": name,
        "slots": 2 if options else 1,
        "seconds": document["search"]["seconds"],
        "num_searched": len(before),
        "searched_seconds": sum(r["seconds"] for r in before) / (2 if options else 1),
        "confirmed_seconds": sum(r["seconds"] for r in confirmed),
        "chosen": f"{document['config']['precision']} batch {document['config']['batch_size']}",
        "samples_per_second": document["evidence"]["samples_per_second"],
    }


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table() -> str:
    lines = [
        "| noise between processes | slots | seconds of a search, mean | times those of one slot | jobs "
        "| same choice as on one slot | misses the best by, mean | rounds beside one another counted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = rows(SCRIPTED)
    for noise in sorted({row["noise"] for row in found}):
        of_noise = [row for row in found if row["noise"] == noise]
        alone = {(row["landscape"], row["seed"]): row for row in of_noise if row["num_slots"] == 1}
        for num_slots in NUM_SLOTS:
            ours = [row for row in of_noise if row["num_slots"] == num_slots]
            same = fmean(row["chosen"] == alone[row["landscape"], row["seed"]]["chosen"] for row in ours)
            seconds, seconds_alone = mean(ours, "seconds"), mean(alone.values(), "seconds")
            beside = "-" if num_slots == 1 else f"{100 * mean(ours, 'is_beside'):.0f} %"
            lines.append(
                f"| {100 * noise:.0f} % | {num_slots} | {seconds:.0f} | {seconds / seconds_alone:.2f} "
                f"| {mean(ours, 'num_jobs'):.0f} | {100 * same:.0f} % | {100 * mean(ours, 'missed'):.1f} % | {beside} |"
            )
    lines += ["", "| deciding, of all noises | slots | seconds a job, mean |", "|---|---|---|"]
    for num_slots in NUM_SLOTS:
        ours = [row for row in found if row["num_slots"] == num_slots]
        each = sum(row["deciding_seconds"] for row in ours) / sum(row["num_jobs"] for row in ours)
        lines.append(f"| scripted | {num_slots} | {each:.4f} |")
    if REAL.exists():
        lines += [
            "",
            "| real training | shares of the CPU | whole search, s | jobs before the confirmation "
            "| their seconds, over the shares | chosen | confirmed at, samples/s |",
            "|---|---|---|---|---|---|---|",
        ]
        for name in REAL_NAMES:
            for slots in (1, 2):
                ours = [row for row in rows(REAL) if (row["name"], row["slots"]) == (name, slots)]
                lines.append(
                    f"| {name} | {slots} | {each_of(ours, 'seconds', '{:.0f}')} "
                    f"| {each_of(ours, 'num_searched', '{}')} "
                    f"| {each_of(ours, 'searched_seconds', '{:.0f}')} | {each_of(ours, 'chosen', '{}')} "
                    f"| {median(row['samples_per_second'] for row in ours):,.0f} |"
                )
    return "\n".join(lines) + "\n"


def mean(found: Iterable[dict[str, Any]], name: str) -> float:
    return fmean(row[name] for row in found)


def each_of(found: list[dict[str, Any]], name: str, form: str) -> str:
    return ", ".join(dict.fromkeys(form.format(row[name]) for row in found))


if __name__ == "__main__":
    (what,) = sys.argv[1:]
    work: dict[str, Callable[[], None]] = {"scripted": scripted, "real": real, "table": lambda: None}
    work[what]()
    readme = HERE / "README.md"
    readme.write_text(re.sub(f"(?<={BEGIN}).*?(?={END})", lambda _: table(), readme.read_text(), flags=re.DOTALL))
