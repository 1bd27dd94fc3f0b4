"""Search each workload, train its recommendation by hand in a fresh process, write the table of promised and attained.

Usage: run.py [search|train|table] [NAME ...] [--steps N]; without a step all three, without names all. Raw outcomes:
results/NAME/outcomes.jsonl and recommendation.json of the search, results/NAME/attained.jsonl of the trainings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REAL, LANDSCAPES = ("lengths", "adapters", "slow_images"), ("gpt2", "vit", "convnet")
BUDGET_SECONDS = {"lengths": 240, "adapters": 150}
DEFAULT_BUDGET_SECONDS = 90
MIB = 2**20


def search(name: str) -> None:
    study = "real_training" if name in REAL else "landscapes"
    command = [sys.executable, "-m", "autotune_amp", "search", f"{HERE.parent / study / 'workloads.py'}:{name}"]
    command += ["--fresh", "--device", "cpu", "--out", str(HERE / "results"), "--study", name]
    budget = os.environ.get("STUDY_BUDGET", BUDGET_SECONDS.get(name, DEFAULT_BUDGET_SECONDS))
    subprocess.run([*command, "--budget", str(budget)], check=True)


def recommendation(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((HERE / "results" / name / "recommendation.json").read_text())
    return document


def train(name: str, num_steps: int) -> None:
    """The recommended config in the recommended environment, and in the plain one where that is another."""
    config = recommendation(name)["config"]
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    with (HERE / "results" / name / "attained.jsonl").open("w") as file:
        for variables in (config["environment"], {}) if config["environment"] else ({},):
            command = [sys.executable, str(HERE / "train.py"), name, json.dumps(config), str(num_steps)]
            done = subprocess.run(command, env=plain | variables, check=True, capture_output=True, text=True)
            file.write(done.stdout.strip().splitlines()[-1] + "\n")


def table() -> None:
    rows = [
        "| training | recommended | processes of the confirmation, MiB (steps) | promised | attained, MiB (steps) "
        "| over promised | holes in the heap | plain environment, MiB (steps) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in filter(lambda name: (HERE / "results" / name / "attained.jsonl").exists(), REAL + LANDSCAPES):
        document = recommendation(name)
        config, promised = document["config"], document["evidence"]["peak_memory_bytes"]
        processes = document["evidence"]["memory"]["processes"]
        behind = ", ".join(peak(process["num_steps"], process["peak_memory_bytes"]) for process in processes)
        runs = [json.loads(line) for line in (HERE / "results" / name / "attained.jsonl").read_text().splitlines()]
        attained, plain = runs[0], runs[1] if len(runs) > 1 else None
        reached = attained["peaks"][-1][1]
        words = f"{config['precision']} {config['batch_size']}"
        words += f" x {config['accumulation_steps']}" if config["accumulation_steps"] > 1 else ""
        words += f", {config['num_workers']} workers" if config["num_workers"] is not None else ""
        rows.append(
            f"| {name} | {words}{'' if config['environment'] else ', plain'} "
            f"| {behind} | {promised / MIB:.0f} | {peak(*attained['peaks'][-1])} | {reached / promised - 1:+.1%} "
            f"| {attained['hole_bytes'] / MIB:.0f} of {attained['heap_bytes'] / MIB:.0f} "
            f"| {'-' if plain is None else peak(*plain['peaks'][-1])} |"
        )
    readme = HERE / "README.md"
    begin, end = "<!-- table: run.py table -->", "<!-- end of table -->"
    head, rest = readme.read_text().split(begin)
    readme.write_text(f"{head}{begin}\n" + "\n".join(rows) + f"\n{end}{rest.split(end)[1]}")


def peak(num_steps: int, num_bytes: int) -> str:
    """MiB, and the steps behind it."""
    return f"{num_bytes / MIB:.0f} ({num_steps})"


if __name__ == "__main__":
    words = sys.argv[1:]
    num_steps = int(words.pop(words.index("--steps") + 1)) if "--steps" in words else 300
    names = [word for word in words if word in REAL + LANDSCAPES] or list(REAL + LANDSCAPES)
    steps = [word for word in words if word in ("search", "train", "table")] or ["search", "train", "table"]
    for name in names:
        if "search" in steps:
            search(name)
        if "train" in steps:
            train(name, num_steps)
    if "table" in steps:
        table()
