"""Search each workload, train its recommendation in fresh processes right after, and write the table into README.md.

Usage: run.py [search|train|table] ...; without arguments all three. Raw outcomes: NAME/outcomes.jsonl and
NAME/recommendation.json of the search, NAME/attained.jsonl of the trainings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = ("characters", "digits")
BUDGET_SECONDS = {"characters": 180, "digits": 150}
NUM_TRAININGS = 2
DEVICE = os.environ.get("STUDY_DEVICE", "cpu")
RESULTS = HERE / os.environ.get("STUDY_RESULTS", "results")


def search(name: str) -> None:
    command = [sys.executable, "-m", "autotune_amp", "search", f"{HERE / 'workloads.py'}:{name}", "--fresh"]
    command += ["--budget", str(BUDGET_SECONDS[name]), "--out", str(RESULTS), "--study", name, "--device", DEVICE]
    subprocess.run(command, check=True)


def train(name: str) -> None:
    """Two trainings in the recommended environment, and one in the plain one, of the recommended config."""
    config = recommendation(name)["config"]
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    with (RESULTS / name / "attained.jsonl").open("w") as file:
        for environment in [{**plain, **config["environment"]}] * NUM_TRAININGS + [plain]:
            command = [sys.executable, str(HERE / "train.py"), name, config["precision"]]
            command += [str(config["batch_size"]), str(config["accumulation_steps"]), DEVICE]
            done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            file.write(done.stdout.strip().splitlines()[-1] + "\n")
            print(done.stdout, flush=True)


def recommendation(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name / "recommendation.json").read_text())
    return document


def table() -> None:
    rows = [
        "| workload | recommended | promised samples/s (95 %) | attained, recommended environment | "
        "within interval or 5 % | attained, plain environment | promised plain | speed-up over baseline (95 %) | "
        "peak MiB promised / attained | CPU stolen in training | loss first → last |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in NAMES:
        document = recommendation(name)
        config, evidence = document["config"], document["evidence"]
        runs = [json.loads(line) for line in (RESULTS / name / "attained.jsonl").read_text().splitlines()]
        ours = runs[:NUM_TRAININGS]
        low, high = evidence["samples_per_second_interval"]
        promised = evidence["samples_per_second"]
        rates = [run["samples_per_second"] for run in ours]
        is_kept = all(min(low, 0.95 * promised) <= rate <= max(high, 1.05 * promised) for rate in rates)
        plain = evidence["plain_environment"]
        interval = evidence["speedup_interval"]
        peaks = "/".join(f"{run['peak_memory_bytes'] / 2**20:.0f}" for run in ours)
        rows.append(
            f"| {name} | {config['precision']}, batch {config['batch_size']} "
            f"| {promised:.1f} ({low:.1f} to {high:.1f}) "
            f"| {', '.join(f'{rate:.1f}' for rate in rates)} "
            f"| {'yes' if is_kept else '**no**'} "
            f"| {runs[-1]['samples_per_second']:.1f} "
            f"| {'not run' if plain is None else round(plain['samples_per_second'], 1)} "
            f"| {evidence['speedup']:.2f} ({interval[0]:.2f} to {interval[1]:.2f}) "
            f"| {evidence['peak_memory_bytes'] / 2**20:.0f} / {peaks} "
            f"| {', '.join(format(run['stolen_share'], '.0%') for run in ours)} "
            f"| {ours[0]['first_loss']:.2f} → {ours[0]['last_loss']:.2f} |"
        )
    readme = HERE / "README.md"
    text = readme.read_text()
    begin, end = "<!-- table: run.py table -->", "<!-- end of table -->"
    head, rest = text.split(begin)
    readme.write_text(f"{head}{begin}\n" + "\n".join(rows) + f"\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    steps = sys.argv[1:] or ["search", "train", "table"]
    for workload in NAMES:
        if "search" in steps:
            search(workload)
        if "train" in steps:
            train(workload)
    if "table" in steps:
        table()
