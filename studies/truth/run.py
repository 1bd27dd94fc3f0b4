"""Search, train the recommendation by hand right after, write the table.

Usage: run.py [idle|loaded|bf16_cpu|table] [ID ...]; twenty searches on an idle machine, the same with a core kept busy,
and as idle on a CPU that has bf16 arithmetic; without IDs all. A case that has its attained.json is not run again:
remove its folder. Raw outcomes: results/RUN/ID/.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases import CASES, Case
from table import RUNS, write_table

HERE = Path(__file__).parent
RESULTS = HERE / os.environ.get("STUDY_RESULTS", "results")
DEVICE = os.environ.get("STUDY_DEVICE", "cpu")
BUDGET_SECONDS = os.environ.get("STUDY_BUDGET_SECONDS")
# Trained twice: the second time, shorter, tells how far one and the same training is from itself.
NUM_STEPS = [int(number) for number in os.environ.get("STUDY_NUM_STEPS", "300,60").split(",")]


class Load:
    """Another process that loads one core, while it is started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, str(HERE / "busy.py")])

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def run_case(case: Case, run: str) -> None:
    folder = RESULTS / run / case.id
    shutil.rmtree(folder, ignore_errors=True)
    kind = case.load if run == "loaded" else None
    with Load() as load:
        if kind in ("throughout", "search"):
            load.start()
        started = time.monotonic()
        search(case, folder, load.start if kind == "from confirmation" else None)
        seconds = time.monotonic() - started
        if kind == "search":
            load.stop()
        found = {
            "id": case.id,
            "workload": case.workload,
            "options": case.options,
            "budget_seconds": BUDGET_SECONDS or case.budget_seconds,
            "load": kind,
            "commit": commit(),
            "search_seconds": seconds,
            "trainings": [train(case, folder, num_steps) for num_steps in NUM_STEPS],
        }
    (folder / "attained.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)


def search(case: Case, folder: Path, when_confirming: Callable[[], None] | None) -> None:
    target = HERE.parent / "landscapes" / "workloads.py"
    command = [sys.executable, "-m", "autotune_amp", "search", f"{target}:{case.workload}", "--fresh"]
    command += ["--budget", str(BUDGET_SECONDS or case.budget_seconds), "--device", DEVICE]
    command += ["--out", str(folder.parent), "--study", case.id, *case.options]
    process = subprocess.Popen(command)
    is_confirming = False
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if when_confirming is not None and not is_confirming and '"round":0' in outcomes(folder):
                is_confirming = True
                when_confirming()
    finally:
        process.terminate()
        process.wait()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    for path in folder.iterdir():
        if path.name not in ("recommendation.json", "outcomes.jsonl"):
            path.unlink()


def commit() -> str:
    """The code that was measured."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def outcomes(folder: Path) -> str:
    path = folder / "outcomes.jsonl"
    return path.read_text() if path.exists() else ""


def train(case: Case, folder: Path, num_steps: int) -> dict[str, Any]:
    document = json.loads((folder / "recommendation.json").read_text())
    config = document["config"]
    limit = "-"
    if "--memory-fraction" in case.options:
        limit = str(int(document["options"]["memory_fraction"] * document["hardware"]["memory"]["available"]))
    command = [sys.executable, str(HERE / "train.py"), case.workload, json.dumps(config), DEVICE]
    command += [str(num_steps), limit]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(command, env={**plain, **config["environment"]}, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        return {"failure": f"exit code {done.returncode}: {''.join(last)}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    words = sys.argv[1:]
    ids = [word for word in words if word in {case.id for case in CASES}]
    runs = [word for word in words if word not in ids] or ["idle", "loaded", "table"]
    unknown = set(runs) - {*RUNS, "table"}
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: neither a run nor a case. Runs: {', '.join(RUNS)}, table.")
    for run in runs:
        for case in CASES:
            is_wanted = run != "table" and (not ids or case.id in ids)
            if is_wanted and not (RESULTS / run / case.id / "attained.json").exists():
                run_case(case, run)
    if "table" in runs:
        write_table(RESULTS, HERE / "README.md")
