"""What a search takes with and without further dimensions, both within the default budget, where nothing is to gain.

Usage: cost.py [table]. Raw outcomes: results/cost.jsonl.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
OUTCOMES = HERE / "results" / "cost.jsonl"
NAMES = ("lstm", "vit")
NUM_ROUNDS = 3
BEGIN, END = "<!-- table: cost.py -->\n", "<!-- end of cost -->"


def search_seconds(name: str, tried: str) -> float:
    with TemporaryDirectory() as out:
        command = [sys.executable, "-m", "autotune_amp", "search", f"{HERE / 'workloads.py'}:{name}", "--try", tried]
        started = time.monotonic()
        subprocess.run([*command, "--out", out], check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - started


def table() -> str:
    found: dict[str, dict[str, list[float]]] = {}
    for row in map(json.loads, OUTCOMES.read_text().splitlines()):
        found.setdefault(row["name"], {}).setdefault(row["tried"], []).append(row["seconds"])
    lines = ["| training | `--try none`, s | `--try auto`, s | medians, times as long |", "|---|---|---|---|"]
    for name, seconds in found.items():
        none, auto = seconds["none"], seconds["auto"]
        each = (", ".join(f"{s:.0f}" for s in several) for several in (none, auto))
        lines.append(f"| {name} | {' | '.join(each)} | {median(auto) / median(none):.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["table"]:
        OUTCOMES.write_text("")
        for training, tried in product(NAMES * NUM_ROUNDS, ("none", "auto")):
            row = {"name": training, "tried": tried, "seconds": search_seconds(training, tried)}
            with OUTCOMES.open("a") as file:
                file.write(json.dumps(row) + "\n")
    readme = HERE / "README.md"
    readme.write_text(re.sub(f"(?<={BEGIN}).*?(?={END})", lambda _: table(), readme.read_text(), flags=re.DOTALL))
