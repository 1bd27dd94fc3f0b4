"""Search with and without further dimensions, train both recommendations and today's config by hand, write the table.

Usage: run.py [table] [NAME ...]; without names all. What has its attained.json is not run again: remove its folder.
Raw outcomes: results/NAME/.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from trainings import TRAININGS

HERE = Path(__file__).parent
RESULTS = HERE / "results"
# The default, and what leaves time to compile, at 20 to 60 s each on this machine.
BUDGETS = {"none": 110, "auto": 240}
NUM_STEPS, NUM_ROUNDS = 30, 2
BEGIN, END = "<!-- table: run.py -->\n", "<!-- end of table -->"
FURTHER = ("compile", "memory_format", "optimizer_impl", "activation_checkpointing", "weights")


def run_case(name: str, cache: str) -> None:
    """One training; the compiler's `cache` begins empty, and what the search compiled is there for the trainings."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    folder = RESULTS / name
    shutil.rmtree(folder, ignore_errors=True)
    seconds = {tried: search(name, folder, tried) for tried in BUDGETS}
    documents = {tried: json.loads((folder / tried / "recommendation.json").read_text()) for tried in BUDGETS}
    today = documents["none"]["evidence"]["baseline"]["config"]
    configs = {"today": today, **{tried: document["config"] for tried, document in documents.items()}}
    trained: dict[str, list[dict[str, Any]]] = {which: [] for which in configs}
    for _ in range(NUM_ROUNDS):  # one after the other, so that a machine that drifts does so for all
        for which, config in configs.items():
            trained[which].append(train(name, config))
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    found = {"name": name, "commit": commit, "search_seconds": seconds, "trainings": trained}
    (folder / "attained.json").write_text(json.dumps(found, indent=1) + "\n")


def search(name: str, folder: Path, tried: str) -> float:
    command = [sys.executable, "-m", "autotune_amp", "search", f"{HERE / 'workloads.py'}:{name}", "--fresh"]
    command += ["--try", tried, "--budget", str(BUDGETS[tried]), "--out", str(folder), "--study", tried]
    started = time.monotonic()
    subprocess.run(command, check=True)
    seconds = time.monotonic() - started
    for path in (folder / tried).iterdir():
        if path.name not in ("recommendation.json", "outcomes.jsonl"):
            path.unlink()
    return seconds


def train(name: str, config: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, str(HERE / "train.py"), name, json.dumps(config), str(NUM_STEPS)],
        env={**plain, **config["environment"]}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"failure": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table() -> list[str]:
    titles = [
        "training",
        "recommended without",
        "recommended with",
        "promised over today (95 %)",
        "attained over today",
    ]
    titles += ["attained over the one without", "peak MiB, today / with", "first steps, s", "search s, without / with"]
    lines, gains = [titles, ["---"] * len(titles)], []
    for name in TRAININGS:
        path = RESULTS / name / "attained.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        documents = {t: json.loads((path.parent / t / "recommendation.json").read_text()) for t in BUDGETS}
        evidence, trained = documents["auto"]["evidence"], found["trainings"]
        failures = [run["failure"] for runs in trained.values() for run in runs if "failure" in run]
        if failures:
            lines.append([name, *["-"] * 7, failures[0]])
            continue
        rates = {which: fmean(run["samples_per_second"] for run in runs) for which, runs in trained.items()}
        peaks = {which: max(run["peak_memory_bytes"] for run in runs) / 2**20 for which, runs in trained.items()}
        gains.append(rates["auto"] / rates["none"])
        low, high = evidence["speedup_interval"] or (math.nan, math.nan)
        attained = rates["auto"] / rates["today"]
        lines.append(
            [
                name,
                words(documents["none"]["config"]),
                words(documents["auto"]["config"]),
                f"{evidence['speedup']:.2f} ({low:.2f} to {high:.2f})",
                f"{attained:.2f}" if low <= attained <= high else f"**{attained:.2f}**",
                f"{gains[-1]:.2f}",
                f"{peaks['today']:.0f} / {peaks['auto']:.0f}",
                f"{max(run['warmup_seconds'] for run in trained['auto']):.1f}",
                f"{found['search_seconds']['none']:.0f} / {found['search_seconds']['auto']:.0f}",
            ]
        )
    mean = math.exp(fmean(map(math.log, gains)))
    return [*map(line, lines), "", f"Geometric mean of the gain by further dimensions: {mean:.2f}."]


def words(config: dict[str, Any]) -> str:
    size = f"{config['batch_size']}" + (f" x {n}" if (n := config["accumulation_steps"]) > 1 else "")
    further = [f"{config[key]}" if key != "compile" else f"compile {config[key]}" for key in FURTHER]
    usual = ("as_found", "contiguous", "off", "compile off")
    return ", ".join([f"{config['precision']} {size}", *(word for word in further if word not in usual)])


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word != "table"]
    if "table" not in sys.argv:
        for name in names or TRAININGS:
            if not (RESULTS / name / "attained.json").exists():
                with TemporaryDirectory() as cache:
                    run_case(name, cache)
    readme = HERE / "README.md"
    text = readme.read_text()
    filled = BEGIN + "\n".join(table()) + "\n" + END
    readme.write_text(re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: filled, text, flags=re.DOTALL))
