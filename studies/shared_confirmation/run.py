"""Does an interval from shared processes hold what hand-written trainings attain? Measures, trains, writes the table.

Usage: run.py [NAME ...] [--measure-seconds S] [--num-steps N] [--minutes M] [--table-only]; without names all workloads
of studies/landscapes. One that has its results/NAME.jsonl is not run again: remove the file. None begins after M
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "landscapes"))
from parts import PARTS

from autotune_amp.core.intervals import prediction_interval
from autotune_amp.core.outcome import Failure
from autotune_amp.core.setting import Setting
from autotune_amp.processes.local import LocalBackend
from autotune_amp.processes.process import Watcher
from autotune_amp.search.planner import CONFIRM_SECONDS, MAX_CONFIRM_STEPS
from autotune_amp.search.source import target
from autotune_amp.trial.jobs import Trial
from autotune_amp.trial.memory import recommended_environment

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NUM_ROUNDS = 3
DEADLINE_SECONDS = 120.0
BEGIN, END = "<!-- run.py table -->", "<!-- end of table -->"
Line = dict[str, Any]


def settings(name: str) -> list[Setting]:
    """Three that a confirmation might hold against each other."""
    size = PARTS[name].todays_batch_size
    return [
        Setting(precision="fp32", batch_size=size),
        Setting(precision="fp32", batch_size=2 * size),
        Setting(precision="bf16", batch_size=size),
    ]


class Measuring:
    """Runs settings of one workload in processes, and writes a line for each."""

    def __init__(self, name: str, measure_seconds: float) -> None:
        self._payload = target(f"{HERE.parent / 'landscapes' / 'workloads.py'}:{name}").payload
        self._environment = recommended_environment("cpu")
        self._measure_seconds = measure_seconds
        self.lines: list[Line] = []
        with self._runner() as runner:
            runner.load(DEADLINE_SECONDS)
            self._state, *_ = runner.open("cpu", None, DEADLINE_SECONDS)

    def _runner(self) -> LocalBackend:
        return LocalBackend(self._payload, "kept", Watcher(), self._environment)

    def shared(self, candidates: Sequence[Setting], number: int) -> float:
        """All of them in one fresh process; gives its seconds."""
        began = time.monotonic()
        with self._runner() as runner:
            for position, candidate in enumerate(candidates):
                self._measure(runner, candidate, how="shared", round=number, position=position)
        return time.monotonic() - began

    def unshared(self, candidate: Setting) -> float:
        """One of them in a fresh process of its own; gives its seconds."""
        began = time.monotonic()
        with self._runner() as runner:
            self._measure(runner, candidate, how="unshared")
        return time.monotonic() - began

    def _measure(self, runner: LocalBackend, candidate: Setting, **about: Any) -> None:
        spec = Trial(
            candidate=candidate,
            device="cpu",
            purpose="confirm",
            num_steps=(MAX_CONFIRM_STEPS, MAX_CONFIRM_STEPS),
            measure_seconds=self._measure_seconds,
            deadline_seconds=DEADLINE_SECONDS,
            torch_state=self._state,
            is_alone=about["how"] == "unshared",
        )
        found = runner.submit(spec).result()
        if isinstance(found, Failure):
            raise SystemExit(f"{candidate} failed: {found.kind}: {found.message}")
        self.lines.append({**about, "setting": str(candidate), "samples_per_second": found.samples_per_second})


def measure(name: str, measure_seconds: float, num_steps: int) -> list[Line]:
    """Three rounds, each one shared process and then as many of a single setting as end within its seconds; then one
    hand-written training of each setting."""
    ours, candidates = Measuring(name, measure_seconds), settings(name)
    left, num_unshared = 0.0, 0
    for number in range(NUM_ROUNDS):
        left += ours.shared(candidates if number % 2 == 0 else candidates[::-1], number)
        while left > 0:
            left -= ours.unshared(candidates[num_unshared % len(candidates)])
            num_unshared += 1
    return [*ours.lines, *(train(name, candidate, num_steps) for candidate in candidates)]


def train(name: str, candidate: Setting, num_steps: int) -> Line:
    """By the script of studies/truth, which imports nothing of autotune_amp."""
    config = {
        "precision": candidate.precision,
        "batch_size": candidate.batch_size,
        "accumulation_steps": 1,
        "pinned_modules": [],
        "loss_scale": None,
        "num_workers": None,
    }
    script = HERE.parent / "truth" / "train.py"
    command = [sys.executable, str(script), name, json.dumps(config), "cpu", str(num_steps), "-"]
    environment = {**os.environ, **recommended_environment("cpu")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {"how": "training", "setting": str(candidate), "samples_per_second": found["samples_per_second"]}


class Promise(NamedTuple):
    """An interval, and what a training attained; `num` processes stand behind it."""

    low: float
    high: float
    promised: float
    attained: float
    num: int


def promises(lines: Sequence[Line], how: str, *, pools: bool) -> list[Promise]:
    """One for each setting; `pools`: the other settings' values count too, as if they were other processes'."""
    values: dict[str, list[float]] = {}
    for line in lines:
        if line["how"] == how:
            values.setdefault(line["setting"], []).append(line["samples_per_second"])
    found = []
    for line in lines:
        if line["how"] == "training" and line["setting"] in values:
            ours = values[line["setting"]]
            others = [theirs for setting, theirs in values.items() if setting != line["setting"]]
            low, high = prediction_interval(ours, others if pools else ())
            middle = median(ours)
            promise = Promise(min(low, middle), max(high, middle), middle, line["samples_per_second"], len(ours))
            found.append(promise)
    return found


KINDS: dict[str, Callable[[Sequence[Line]], list[Promise]]] = {
    "three shared processes": lambda lines: promises(lines, "shared", pools=False),
    "the same, the other settings' spread counted as if of other processes": lambda lines: promises(
        lines, "shared", pools=True
    ),
    "processes of one setting each, in the same seconds": lambda lines: promises(lines, "unshared", pools=True),
}


def table() -> list[str]:
    """All workloads together, and what being later in a process does."""
    known = [list(map(json.loads, path.read_text().splitlines())) for path in sorted(RESULTS.glob("*.jsonl"))]
    rows = [
        "| interval from | processes of a setting | holds the training | upper end over lower | median off by |",
        "|---|---|---|---|---|",
    ]
    for kind, of in KINDS.items():
        found = [promise for lines in known for promise in of(lines)]
        num_held = sum(p.low <= p.attained <= p.high for p in found)
        errors = [abs(p.attained / p.promised - 1) for p in found]
        width = median(p.high / p.low for p in found)
        processes = fmean(p.num for p in found)
        rows.append(
            f"| {kind} | {processes:.1f} | {num_held} of {len(found)} | {width:.2f} | {100 * median(errors):.1f} % |"
        )
    ratios = [ratio for lines in known for ratio in _later_over_first(lines)]
    rows += ["", f"A setting last in its process over the same first in one: {median(ratios):.3f} in the median of "]
    rows[-1] += f"{len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f}."
    return rows


def _later_over_first(lines: Sequence[Line]) -> list[float]:
    shared = [line for line in lines if line["how"] == "shared"]
    found = []
    for setting in {line["setting"] for line in shared}:
        at = {
            position: [x["samples_per_second"] for x in shared if (x["setting"], x["position"]) == (setting, position)]
            for position in (0, 2)
        }
        if all(at.values()):
            found.append(fmean(at[2]) / fmean(at[0]))
    return found


def write_table() -> None:
    """Into the README, between its marks."""
    readme = HERE / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n" + "\n".join(table()) + f"\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--measure-seconds", type=float, default=CONFIRM_SECONDS)
    parser.add_argument("--num-steps", type=int, default=60)
    parser.add_argument("--minutes", type=float, default=13.0)
    parser.add_argument("--table-only", action="store_true")
    args = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    started = time.monotonic()
    for name in [] if args.table_only else args.names or PARTS:
        path, began = RESULTS / f"{name}.jsonl", time.monotonic()
        if not path.exists() and began - started < 60 * args.minutes:
            lines = measure(name, args.measure_seconds, args.num_steps)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    write_table()
