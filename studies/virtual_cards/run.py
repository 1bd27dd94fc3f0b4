"""Landscapes by the clock of virtual cards, and what the package's search and profile make of them.

run.py record [CARD ...]        every cell of every workload; needs what tests/virtual_gpu needs
run.py search                   replays of the search on what was recorded; needs neither a card nor CUDA
run.py rehearse CARD WORKLOAD   a search and a profile through the command line on the virtual machine itself
run.py table                    writes the README's tables
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paths
from named_cards import CARDS

WORKLOADS = ("mlp", "convnet", "gpt2", "vit", "t5", "unet")
MAGNIFICATION = 32
NUM_SEEDS = 5
REHEARSED_BUDGET_SECONDS = 300  # of this machine, whose processors reckon the card's numbers


def on_card(card: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run it where `card` is; one thread, since the matrices are small and others use the machine too."""
    variables = {"VIRTUAL_GPU_CARD": card, "VIRTUAL_GPU_MAGNIFICATION": f"{MAGNIFICATION}", "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, str(paths.VIRTUAL_GPU / "with_virtual_gpu.py")]
    return subprocess.run(
        [*launcher, *command], env=os.environ | variables, check=True, stdout=subprocess.PIPE, text=True
    )


def record(cards: Sequence[str]) -> None:
    for card in cards or CARDS:
        started = time.monotonic()
        folder = paths.RESULTS / "landscapes" / card
        folder.mkdir(parents=True, exist_ok=True)
        print(on_card(card, [sys.executable, str(paths.HERE / "record.py"), str(folder)]).stdout, end="")
        print(f"{card}: {time.monotonic() - started:.0f} s of this machine")


def search() -> None:
    from searches import searched

    lines = [searched(card, workload, seed) for card in CARDS for workload in WORKLOADS for seed in range(NUM_SEEDS)]
    _write("searches.jsonl", lines)


def rehearse(card: str, workload: str) -> None:
    """What came out is added to what was rehearsed before."""
    target = f"{paths.HERE / 'workloads.py'}:{workload}"
    command = [sys.executable, "-m", "autotune_amp"]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        asked = ["--effective-batch-size", "free", "--budget", f"{REHEARSED_BUDGET_SECONDS}", "--out", folder]
        found = json.loads(on_card(card, [*command, "search", target, *asked, "--quiet", "--json"]).stdout)
    search_seconds = time.monotonic() - started
    profiled = json.loads(on_card(card, [*command, "profile", target, "--json"]).stdout)
    config = {name: found["config"][name] for name in ("precision", "batch_size")}
    rows = {row["precision"]: {name: row[name] for name in ("speedup", "verdict")} for row in profiled["rows"]}
    line = {"card": card, "workload": workload, "seconds": round(search_seconds), **config, "profile": rows}
    path = paths.RESULTS / "rehearsals.jsonl"
    before = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [known for known in before if (known["card"], known["workload"]) != (card, workload)]
    _write(path.name, [*kept, line])


def _write(name: str, lines: Sequence[dict[str, Any]]) -> None:
    (paths.RESULTS / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def main(asked: Sequence[str]) -> None:
    what, *names = asked
    if what == "record":
        record(names)
    elif what == "search":
        search()
    elif what == "rehearse":
        rehearse(*names)
    elif what == "table":
        from table import write_tables

        write_tables(Path(paths.HERE, "README.md"))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
