"""One real card: search through the command line, train what is recommended by hand, write the table.

Usage: run.py run | table. Raw outcomes: results/CARD/NAME/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"
AMP = [sys.executable, "-m", "autotune_amp"]
NUM_TRAININGS = 2
BEGIN, END = "<!-- run.py table -->\n", "<!-- end of table -->"


def run(name: str) -> None:
    card = torch.cuda.get_device_name()
    folder, target = RESULTS / card.replace(" ", "_") / name, f"{HERE / 'workloads.py'}:{name}"
    options = ["--effective-batch-size", "free"]
    began = time.monotonic()
    search = [*AMP, "search", target, "--device", "cuda", "--out", str(folder.parent), "--study", name, *options]
    done = subprocess.run(search, check=False)
    found: dict[str, Any] = {"name": name, "search_seconds": time.monotonic() - began, "exit_code": done.returncode}
    found |= {"device": card, "torch": torch.__version__}
    if done.returncode == 0:
        config = json.loads((folder / "recommendation.json").read_text())["config"]
        train = [sys.executable, str(HERE / "train.py"), name, json.dumps(config)]
        environment = {**os.environ, **config["environment"]}
        trainings = [
            subprocess.run(train, env=environment, capture_output=True, text=True) for _ in range(NUM_TRAININGS)
        ]
        found["trainings"] = [
            json.loads(one.stdout.splitlines()[-1]) if one.returncode == 0 else {"failure": one.stderr[-2000:]}
            for one in trainings
        ]
    (folder / "attained.json").write_text(json.dumps(found, indent=1) + "\n")


def table() -> str:
    lines = [
        "| card | torch | workload | recommended | promised, samples/s | trained by hand | its place in the interval "
        "| over fp32 as found | peak promised, MiB | peak trained | search, s | fresh processes | confirmed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("*/*/attained.json")):
        found = json.loads(path.read_text())
        about = f"| {found['device']} | {found['torch']} | {found['name']} "
        failures = [one["failure"] for one in found.get("trainings", ()) if "failure" in one]
        if found["exit_code"] or failures:
            why = f"the search ended with {found['exit_code']}" if found["exit_code"] else failures[0].splitlines()[-1]
            lines.append(about + f"| failed: {why} |" + " |" * 9)
            continue
        document = json.loads((path.parent / "recommendation.json").read_text())
        config, evidence = document["config"], document["evidence"]
        low, high = evidence["samples_per_second_interval"]
        attained = [one["samples_per_second"] for one in found["trainings"]]
        inside = sum(low <= rate <= high for rate in attained)
        peaks = ", ".join(f"{one['peak_memory_bytes'] / 2**20:,.1f}" for one in found["trainings"])
        lines.append(
            f"{about}| {config['precision']} batch "
            f"{config['batch_size']} | {evidence['samples_per_second']:.1f} ({low:.1f} to {high:.1f}) "
            f"| {', '.join(f'{rate:.1f}' for rate in attained)} | {inside} of {len(attained)} inside "
            f"| {evidence['speedup']:.2f} | {evidence['peak_memory_bytes'] / 2**20:,.1f} | {peaks} "
            f"| {document['search']['seconds']:.0f} | {evidence['num_processes']} "
            f"| {'yes' if evidence['is_confirmed'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def write_table() -> None:
    path = HERE / "README.md"
    before, after = path.read_text().split(BEGIN)
    path.write_text(before + BEGIN + table() + END + after.split(END)[1])


if __name__ == "__main__":
    (what,) = sys.argv[1:]
    {"run": lambda: run("gpt2"), "table": write_table}[what]()
