"""How soon are steps steady? Holds the rule that ends a trial's warm-up against recorded steps; `steady.py` writes the
README's table. Imports no torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from autotune_amp.core.outcome import Measurement
from autotune_amp.core.setting import Setting
from autotune_amp.trial.jobs import Trial, should_continue_warmup, stop_reason

sys.path.insert(0, str(Path(__file__).parent.parent / "landscapes"))
from landscape import Landscape

BEGIN, END = "<!-- steady.py table -->", "<!-- end of steady.py's table -->"
MEASURE_SECONDS = 2.0
MIN_GROUPS = 4
DEVICES = ((1, "cpu"), (4, "cuda"))  # by the steps that are timed together there
STEADY_SPREAD = 0.02  # between the fastest and the slowest tenth of the groups in the last half
SPECS = {num: Trial(candidate=Setting(precision="fp32", batch_size=1), device=device) for num, device in DEVICES}
Rule = Callable[[Sequence[float], int], int]


class Recorded(NamedTuple):
    """One process: the seconds of a mean step in each group of steps, from the second step on."""

    group_seconds: tuple[float, ...]
    steps_per_group: int

    @property
    def last_half(self) -> tuple[float, ...]:
        return self.group_seconds[len(self.group_seconds) // 2 :]

    @property
    def is_steady(self) -> bool:
        ordered = sorted(self.last_half)
        tenth = len(ordered) // 10
        return ordered[-1 - tenth] < (1 + STEADY_SPREAD) * ordered[tenth]


def on_card(path: Path) -> Iterator[Recorded]:
    """Yield the settings of by_hand.py that ran."""
    for line in path.read_text().splitlines():
        milliseconds = json.loads(line).get("group_step_ms", ())
        if len(milliseconds) >= MIN_GROUPS:
            yield Recorded(tuple(value / 1000 for value in milliseconds), 4)


def on_cpu(folder: Path) -> Iterator[Recorded]:
    """Yield the processes of the recorded landscapes that took 20 steps at least after their first."""
    for path in sorted(folder.glob("*.jsonl")):
        for process in Landscape.load(path).processes:
            found = process.outcome
            if isinstance(found, Measurement) and len(found.raw_step_seconds) >= 18:
                yield Recorded((*process.warmup_step_seconds[1:], *found.raw_step_seconds), 1)


def three_steps(_: Sequence[float], steps_per_group: int) -> int:
    """Return how many groups two steps after the first are in: a group of four stands for both."""
    return 2 if steps_per_group == 1 else 1


def until_steady(group_seconds: Sequence[float], steps_per_group: int) -> int:
    """Return how many groups the warm-up takes, as `autotune_amp.trial.timing` warms up."""
    num_least = three_steps((), steps_per_group)
    seconds = [group_seconds[min(step, num_least - 1)] for step in range(2)]
    warming_seconds = sum(seconds)
    num_steps = 1 + num_least * steps_per_group
    for num, mean_seconds in enumerate(group_seconds[num_least:-1], num_least):
        if not should_continue_warmup(seconds, num_steps=num_steps, warming_seconds=warming_seconds):
            return num
        num_steps += steps_per_group
        seconds.append(mean_seconds)
        warming_seconds += steps_per_group * mean_seconds
    return len(group_seconds) - 1


def measured(recorded: Recorded, num_warmup: int) -> float:
    """Return the mean step seconds that a search's trial would find after so many groups."""
    spec = SPECS[recorded.steps_per_group]
    groups: list[float] = []
    for seconds in recorded.group_seconds[num_warmup:]:
        groups.append(seconds)
        num_steps = len(groups) * recorded.steps_per_group
        ended = stop_reason(
            spec,
            groups,
            is_whole=num_steps >= spec.num_steps[0],
            is_most=num_steps >= spec.num_steps[1],
            measure_seconds=MEASURE_SECONDS,
            measuring_seconds=recorded.steps_per_group * sum(groups),
            training_seconds=0.0,
            num_steps=num_steps,
        )
        if ended:
            break
    return fmean(groups)


def row(name: str, processes: Sequence[Recorded], label: str, rule: Rule) -> str:
    """Return a line of the table."""
    warm = [rule(one.group_seconds, one.steps_per_group) for one in processes]
    logs = [math.log(measured(one, n) / fmean(one.last_half)) for one, n in zip(processes, warm, strict=True)]
    steps = [1 + n * one.steps_per_group for one, n in zip(processes, warm, strict=True)]
    took = [one.steps_per_group * sum(one.group_seconds[:n]) for one, n in zip(processes, warm, strict=True)]
    spread = math.sqrt(fmean(log * log for log in logs))
    return (
        f"| {name} | {len(processes)} | {label} | {fmean(steps):.1f} | {max(steps)} | {fmean(took):.2f} "
        f"| {100 * math.expm1(fmean(logs)):+.1f} % | {100 * spread:.1f} % "
        f"| {sum(log > 0.1 for log in logs)} | {sum(log < -0.1 for log in logs)} |"
    )


def table() -> list[str]:
    """Return the lines of the table."""
    here = Path(__file__).parent
    card = list(on_card(here / "results/by_hand.jsonl"))
    kinds = [
        ("H200, steady steps", [one for one in card if one.is_steady]),
        ("H200, other steps", [one for one in card if not one.is_steady]),
        ("CPU", list(on_cpu(here.parent / "landscapes/results"))),
    ]
    rules: list[tuple[str, Rule]] = [
        ("none", lambda *_: 0),
        ("3 steps", three_steps),
        ("until they stop falling", until_steady),
    ]
    return [
        "| recorded on | processes | warm-up | its steps, mean | most | its seconds after the first step "
        "| measured over the last half's steps, mean | root mean square | more than 10 % above | below |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row(name, processes, label, rule) for name, processes in kinds for label, rule in rules),
    ]


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md")
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n" + "\n".join(table()) + f"\n{END}{rest.split(END)[1]}")
