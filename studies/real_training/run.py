"""Search each workload, train its recommendation by hand in fresh processes right after, write the table.

Usage: run.py [search|train|table] [NAME ...]; without a step all three, without names all six. Raw outcomes:
results/NAME/outcomes.jsonl and recommendation.json of the search, results/NAME/attained.jsonl of the trainings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
NAMES = ("lengths", "slow_images", "gan", "diffusion", "adapters", "compiled")
BUDGET_SECONDS = {"lengths": 240, "compiled": 240}
DEFAULT_BUDGET_SECONDS = 110
DEVICE = os.environ.get("STUDY_DEVICE", "cpu")
RESULTS = HERE / os.environ.get("STUDY_RESULTS", "results")


def search(name: str) -> None:
    budget = BUDGET_SECONDS.get(name, DEFAULT_BUDGET_SECONDS)
    command = [sys.executable, "-m", "autotune_amp", "search", f"{HERE / 'workloads.py'}:{name}", "--fresh"]
    command += ["--budget", str(budget), "--out", str(RESULTS), "--study", name, "--device", DEVICE]
    started = time.monotonic()
    subprocess.run(command, check=True)
    (RESULTS / name / "search_seconds").write_text(f"{time.monotonic() - started:.1f}\n")


def train(name: str) -> None:
    """The recommended config twice in the recommended environment, and today's in the plain one in between."""
    document = recommendation(name)
    advised, today = document["config"], document["evidence"]["baseline"]["config"]
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    with (RESULTS / name / "attained.jsonl").open("w") as file:
        for config in (advised, today, advised):
            command = [sys.executable, str(HERE / "train.py"), name, json.dumps(config), DEVICE]
            environment = {**plain, **config["environment"]}
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            run = {"is_today": config is today, **json.loads(done.stdout.strip().splitlines()[-1])}
            file.write(json.dumps(run) + "\n")
            print(run, flush=True)


def recommendation(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name / "recommendation.json").read_text())
    return document


def table() -> None:
    rows = [
        "| training | today | recommended | effective batch asked / trained | promised samples/s (95 %) | attained "
        "| within interval or 5 % | speed-up over today (95 %) | by hand | processes behind it "
        "| peak MiB promised / attained | attained over promised | search s (budget) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        document = recommendation(name)
        config, evidence = document["config"], document["evidence"]
        baseline = evidence["baseline"]["config"]
        lines = [json.loads(line) for line in (RESULTS / name / "attained.jsonl").read_text().splitlines()]
        runs = [run for run in lines if not run.get("is_today")]
        low, high = evidence["samples_per_second_interval"]
        promised = evidence["samples_per_second"]
        rates = [run["samples_per_second"] for run in runs]
        today = [run["samples_per_second"] for run in lines if run.get("is_today")]
        by_hand = f"{fmean(rates) / today[0]:.2f}" if today else "-"
        is_kept = all(min(low, 0.95 * promised) <= rate <= max(high, 1.05 * promised) for rate in rates)
        speedup = "-"
        if evidence["speedup"] is not None:
            bounds = evidence["speedup_interval"]
            speedup = f"{evidence['speedup']:.2f} ({bounds[0]:.2f} to {bounds[1]:.2f})"
        peaks = "/".join(f"{run['peak_memory_bytes'] / 2**20:.0f}" for run in runs)
        effective = {f"{run['effective_batch_size']:g}" for run in runs}
        asked = baseline["batch_size"] * baseline["accumulation_steps"]
        seconds = float((RESULTS / name / "search_seconds").read_text())
        rows.append(
            f"| {name} | {plan(baseline)} | {plan(config)} | {asked} / {', '.join(sorted(effective))} "
            f"| {promised:.1f} ({low:.1f} to {high:.1f}) | {', '.join(f'{rate:.1f}' for rate in rates)} "
            f"| {'yes' if is_kept else '**no**'} | {speedup} | {by_hand} | {evidence['num_processes']} "
            f"| {evidence['peak_memory_bytes'] / 2**20:.0f} / {peaks} "
            f"| {max(run['peak_memory_bytes'] for run in runs) / evidence['peak_memory_bytes'] - 1:+.0%} "
            f"| {seconds:.0f} ({BUDGET_SECONDS.get(name, DEFAULT_BUDGET_SECONDS)}) |"
        )
    readme = HERE / "README.md"
    text = readme.read_text()
    begin, end = "<!-- table: run.py table -->", "<!-- end of table -->"
    head, rest = text.split(begin)
    readme.write_text(f"{head}{begin}\n" + "\n".join(rows) + f"\n{end}{rest.split(end)[1]}")


def plan(config: dict[str, Any]) -> str:
    """A config in a few words."""
    words = f"{config['precision']} {config['batch_size']}"
    if config["accumulation_steps"] > 1:
        words += f" x {config['accumulation_steps']}"
    if config["num_workers"] is not None:
        words += f", {config['num_workers']} workers"
    return words


if __name__ == "__main__":
    steps = [word for word in sys.argv[1:] if word not in NAMES] or ["search", "train", "table"]
    for workload in [word for word in sys.argv[1:] if word in NAMES] or NAMES:
        if "search" in steps:
            search(workload)
        if "train" in steps:
            train(workload)
    if "table" in steps:
        table()
