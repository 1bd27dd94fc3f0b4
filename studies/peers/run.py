"""Ask every tool for advice on every workload, train what each advised by hand, write the table.

Usage: run.py [advise|check|attain|table] [NAME ...]; without a step all four, without names all six. Raw outcomes in
results/NAME/: advice.jsonl (a line for a tool), fidelity.json, attained.jsonl (a line for a training). The peers are
asked by PEERS_PYTHON, which is .venv/bin/python unless the environment says otherwise (setup.sh makes it).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import psutil
from table import SEARCHES, Found, write_tables
from user import LIMIT, PARTS

from autotune_amp import check_fidelity

HERE = Path(__file__).parent
WORKLOADS = HERE.parent / "landscapes" / "workloads.py"
NAMES = ("mlp", "convnet", "transformer_small", "transformer_medium", "lstm", "vit")
PEERS = ("pytorch_autotune", "lightning", "accelerate", "toma")
PEERS_PYTHON = os.environ.get("PEERS_PYTHON", str(HERE / ".venv" / "bin" / "python"))
RESULTS = HERE / os.environ.get("STUDY_RESULTS", "results")
BUDGET_SECONDS = os.environ.get("STUDY_BUDGET_SECONDS", "110")  # the default
SECONDS = os.environ.get("STUDY_SECONDS", "5")
NUM_ROUNDS = int(os.environ.get("STUDY_ROUNDS", "3"))
ASKED_SECONDS = 600.0
HOPELESS_RATIO = 0.5  # of ours in the first round: not repeated


def advise(name: str) -> None:
    today = {"precision": "fp32", "batch_size": PARTS[name].todays_batch_size, "accumulation_steps": 1}
    RESULTS.joinpath(name).mkdir(parents=True, exist_ok=True)
    with RESULTS.joinpath(name, "advice.jsonl").open("w") as file:

        def keep(tool: str, found: dict[str, Any]) -> None:
            file.write(json.dumps({"tool": tool, **found}) + "\n")
            file.flush()
            print(name, tool, found.get("setting", found.get("failure")), found.get("search_seconds"), flush=True)

        keep("defaults", {"setting": today})
        keep("bf16", {"setting": {**today, "precision": "bf16"}})
        keep("compile", {"setting": {**today, "compile": "default"}})
        for tool in PEERS:
            keep(tool, ask(tool, name))
        for tool, options in SEARCHES.items():
            keep(tool, search(tool, name, options))


def ask(tool: str, name: str) -> dict[str, Any]:
    command = [PEERS_PYTHON, str(HERE / f"advise_{tool}.py"), name]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**limited(name), "TORCHINDUCTOR_CACHE_DIR": folder}
        found = run(command, environment, folder, ASKED_SECONDS)
    return {**found, "search_seconds": time.monotonic() - started}


def search(tool: str, name: str, options: list[str]) -> dict[str, Any]:
    folder = RESULTS / name
    command = [sys.executable, "-m", "autotune_amp", "search", f"{WORKLOADS}:{name}", "--fresh", "--device", "cpu"]
    command += ["--budget", BUDGET_SECONDS, "--out", str(folder), "--study", tool, *options]
    limit = PARTS[name].memory_limit_mib
    if limit is not None:
        command += ["--memory-fraction", f"{limit * 2**20 / psutil.virtual_memory().available:.6f}"]
    shutil.rmtree(folder / tool, ignore_errors=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:  # of the compiler, as for the others
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        return {"failure": f"exit code {done.returncode}: {last_words(done.stderr)}", "search_seconds": seconds}
    document = json.loads((folder / tool / "recommendation.json").read_text())
    for path in (folder / tool).iterdir():
        if path.name not in ("recommendation.json", "outcomes.jsonl"):
            path.unlink()
    config = document["config"]
    assert not config["pinned_modules"], "attain.py pins no modules"
    assert not config["num_workers"], "attain.py has no loader workers"
    assert config["weights"] == "as_found", "attain.py keeps weights in fp32"
    words = ("precision", "batch_size", "accumulation_steps", "loss_scale", "environment")
    further = ("memory_format", "activation_checkpointing", "optimizer_impl", "compile")
    chosen = {word: config[word] for word in further if config[word] not in ("contiguous", "off", "as_found")}
    return {
        "setting": {**{word: config[word] for word in words}, **chosen},
        "search_seconds": seconds,
        "promised_samples_per_second": document["evidence"]["samples_per_second"],
        "is_confirmed": document["evidence"]["is_confirmed"],
        "warnings": document["warnings"],
    }


@cache
def limited(name: str) -> dict[str, str]:
    """The memory limit of the workload, where it has one, on top of what a process holds before it trains."""
    limit = PARTS[name].memory_limit_mib
    if limit is None:
        return {}
    command = [sys.executable, str(HERE / "user.py"), name]
    held = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {LIMIT: str(held + limit * 2**20)}


def run(command: list[str], environment: dict[str, str], folder: str | None, timeout: float) -> dict[str, Any]:
    """What the command prints as its last line, a JSON document; or else why there is none."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    environment = {**plain, **environment}
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer within {timeout:.0f} s"}
    if done.returncode:
        return {"failure": f"exit code {done.returncode}: {last_words(done.stderr)}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def last_words(text: str) -> str:
    return " ".join(text.strip().splitlines()[-2:])


def advice(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name / "advice.jsonl").read_text().splitlines()]


def check(name: str) -> None:
    """Whether the precisions advised learn what fp32 learns."""
    advised = {found["setting"]["precision"] for found in advice(name) if "setting" in found}
    fidelities = {
        precision: msgspec.to_builtins(check_fidelity(f"{WORKLOADS}:{name}", precision, device="cpu", quiet=True))
        for precision in sorted(advised - {"fp32", "tf32"})
    }
    (RESULTS / name / "fidelity.json").write_text(json.dumps(fidelities, indent=1) + "\n")


def attain(names: list[str]) -> None:
    """Rounds outermost and settings shuffled, so that the machine's drift falls on all alike."""
    for name in names:
        (RESULTS / name / "attained.jsonl").write_text("")
    for number in range(NUM_ROUNDS):
        for name in names:
            settings: dict[str, list[str]] = {}  # the same advice of two tools is trained once
            for found in advice(name):
                if "setting" in found:
                    said = {word: value for word, value in found["setting"].items() if value and value != "off"}
                    settings.setdefault(json.dumps(said, sort_keys=True), []).append(found["tool"])
            shuffled = list(settings.items())
            random.Random(f"{name} {number}").shuffle(shuffled)
            for setting, tools in shuffled:
                if not is_hopeless(name, tools[0]):
                    train(name, setting, tools, number)


def is_hopeless(name: str, tool: str) -> bool:
    """Whether the first round, once it is over, leaves no doubt that this is far behind ours."""
    found = Found(RESULTS / name)
    rates, ours = found.rates(tool), found.rates("ours_kept")
    return bool(rates and ours) and rates[0] < HOPELESS_RATIO * ours[0]


def train(name: str, setting: str, tools: list[str], number: int) -> None:
    environment = {**limited(name), **json.loads(setting).get("environment", {})}
    command = [sys.executable, str(HERE / "attain.py"), name, setting, SECONDS]
    line = {"round": number, "tools": tools, "setting": json.loads(setting), **run(command, environment, None, 600.0)}
    with (RESULTS / name / "attained.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(name, number, tools, line.get("samples_per_second", line.get("failure")), flush=True)


if __name__ == "__main__":
    words = sys.argv[1:]
    names = [word for word in words if word in NAMES] or list(NAMES)
    asked = [word for word in words if word not in NAMES] or ["advise", "check", "attain", "table"]
    if unknown := set(asked) - {"advise", "check", "attain", "table"}:
        sys.exit(f"{', '.join(sorted(unknown))}: neither a step nor a workload. Workloads: {', '.join(NAMES)}.")
    for name in names:
        if "advise" in asked:
            advise(name)
        if "check" in asked:
            check(name)
    if "attain" in asked:
        attain(names)
    if "table" in asked:
        write_tables(RESULTS, NAMES, HERE / "README.md")
