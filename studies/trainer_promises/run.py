"""Search six trainings of each framework, train the recommendations by their own Trainers, write the table.

Usage: run.py [NAME ...] [table]; without names all, and then the table. What has its attained.json is not run again:
remove its folder. Raw outcomes: results/NAME/. STUDY_BUDGET_SECONDS and STUDY_NUM_STEPS shorten it to try the script,
with STUDY_RESULTS for another folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / os.environ.get("STUDY_RESULTS", "results")
NUM_STEPS = os.environ.get("STUDY_NUM_STEPS", "300")
TRANSFORMERS = ("bert", "gpt2", "t5", "vit", "distilbert", "resnet")
LIGHTNING = ("mlp", "convnet", "resnet_metrics", "lstm", "transformer", "autoencoder")
# Three rounds of confirmation fit into these on two cores: importing a framework takes a process 6 to 10 s.
BUDGET_SECONDS = {**dict.fromkeys(TRANSFORMERS, "200"), **dict.fromkeys(LIGHTNING, "160")}
NUM_TRAININGS = 2  # the first counts; how far the second is from it no promise can be nearer
BEGIN, END = "<!-- table: run.py table -->", "<!-- end of table -->"


def run(name: str) -> None:
    folder = RESULTS / name
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    budget = os.environ.get("STUDY_BUDGET_SECONDS", BUDGET_SECONDS[name])
    subprocess.run([sys.executable, str(HERE / "search.py"), name, str(RESULTS), budget], check=True)
    seconds = time.monotonic() - started
    for path in folder.iterdir():
        if path.name not in ("recommendation.json", "outcomes.jsonl"):
            path.unlink()
    config = json.loads((folder / "recommendation.json").read_text())["config"]
    commit = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    found = {
        "name": name,
        "budget_seconds": budget,
        "search_seconds": seconds,
        "commit": subprocess.run(commit, check=True, capture_output=True, text=True).stdout.strip(),
        "trainings": [train(name, config) for _ in range(NUM_TRAININGS)],
    }
    (folder / "attained.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)


def train(name: str, config: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "train.py"), name, json.dumps(config), NUM_STEPS]
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    done = subprocess.run(command, env={**plain, **config["environment"]}, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return {"failure": f"exit code {done.returncode}: {''.join(last)}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_table() -> None:
    """Put the table of all trainings that there are between the README's markers."""
    rows = [row(name) for name in (*TRANSFORMERS, *LIGHTNING) if (RESULTS / name / "attained.json").exists()]
    held = [cells["within"] for cells in rows]
    lines = [f"Within the promised interval: {held.count('yes')} of {len(held)}.", ""]
    lines += [line(rows[0]), "|---" * len(rows[0]) + "|", *(line(cells.values()) for cells in rows)]
    readme = HERE / "README.md"
    text = readme.read_text()
    readme.write_text(text.split(BEGIN)[0] + "\n".join([BEGIN, *lines, END]) + text.split(END)[1])


def line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


def row(name: str) -> dict[str, str]:
    folder = RESULTS / name
    found = json.loads((folder / "attained.json").read_text())
    document = json.loads((folder / "recommendation.json").read_text())
    evidence, config = document["evidence"], document["config"]
    low, high = evidence["samples_per_second_interval"]
    first, *others = found["trainings"]
    attained = first.get("samples_per_second", 0.0)
    again = [f"{other['samples_per_second'] / attained - 1:+.1%}" for other in others if "failure" not in other]
    accumulation = f" x {config['accumulation_steps']}" if config["accumulation_steps"] > 1 else ""
    searched, own = measured(folder, config)
    return {
        "framework": "Transformers" if name in TRANSFORMERS else "Lightning",
        "training": name,
        "recommended": f"{config['precision']} {config['batch_size']}{accumulation}",
        "processes, of them the Trainer's own": f"{evidence['num_processes']}, {own}",
        "trials, samples/s": "-" if searched is None else f"{searched:.4g}",
        "promised samples/s (95 %)": f"{evidence['samples_per_second']:.4g} ({low:.4g} to {high:.4g})",
        "attained": first.get("failure") or f"{attained:.4g}",
        "error": f"{attained / evidence['samples_per_second'] - 1:+.1%}",
        "within": "yes" if low <= attained <= high else "**no**",
        "again": ", ".join(again) or "-",
    }


def measured(folder: Path, config: dict[str, Any]) -> tuple[float | None, int]:
    """Of the recommended setting: samples per second of the search's trials, and confirmations by its own Trainer."""
    names = ("precision", "batch_size", "accumulation_steps", "num_workers")
    searched, num_own = [], 0
    for text in (folder / "outcomes.jsonl").read_text().splitlines():
        record = json.loads(text)
        outcome, candidate = record.get("outcome", {}), record.get("candidate", {})
        is_same = all(
            candidate.get(key, default) == config[key] for key, default in zip(names, (0, 0, 1, None), strict=True)
        )
        if is_same and outcome.get("outcome") == "measurement":
            if record["purpose"] == "search":
                searched.append(outcome["samples_per_second"])
            is_confirming = record["purpose"] == "confirm" and record["environment"] == config["environment"]
            num_own += is_confirming and bool(outcome.get("is_own_loop"))
    return (median(searched) if searched else None), num_own


if __name__ == "__main__":
    words = sys.argv[1:]
    unknown = set(words) - {*TRANSFORMERS, *LIGHTNING, "table"}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: no training. They are {', '.join((*TRANSFORMERS, *LIGHTNING))}.")
    names = [word for word in words if word != "table"] or ([] if words else [*TRANSFORMERS, *LIGHTNING])
    for name in names:
        if not (RESULTS / name / "attained.json").exists():
            run(name)
    if not words or "table" in words:
        write_table()
