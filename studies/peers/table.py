"""The README's tables, from what run.py left in results/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from autotune_amp.core.intervals import ratio_interval

SEARCHES: dict[str, list[str]] = {"ours_kept": [], "ours_free": ["--effective-batch-size", "free"]}
WORDS = {
    "defaults": "PyTorch defaults",
    "bf16": "bf16 autocast",
    "compile": "`torch.compile`",
    "pytorch_autotune": "pytorch-autotune",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "toma": "toma",
    "ours_kept": "**ours, effective batch kept**",
    "ours_free": "**ours, batch free**",
}
_MARKS = re.compile(r"\s*\^{3,}")  # under the line of a traceback
OTHERS = [tool for tool in WORDS if tool not in SEARCHES]
KEEPING = ["defaults", "bf16", "compile", "pytorch_autotune"]  # the batch, and no accumulation
GOAL = 1.15


class Found:
    """What is known of one workload."""

    def __init__(self, folder: Path) -> None:
        self.advice = {found["tool"]: found for found in lines(folder / "advice.jsonl")}
        self.trainings: dict[str, list[dict[str, Any]]] = {tool: [] for tool in self.advice}
        for training in lines(folder / "attained.jsonl"):
            for tool in training["tools"]:
                self.trainings[tool].append(training)
        fidelity = folder / "fidelity.json"
        self.fidelity = json.loads(fidelity.read_text()) if fidelity.exists() else {}

    def rates(self, tool: str) -> list[float]:
        """Samples per second in each round; empty where no advice came or any training of it failed."""
        trainings = self.trainings.get(tool, [])
        if any("failure" in training for training in trainings):
            return []
        return [training["samples_per_second"] for training in trainings]

    def ratios(self, ours: str, tool: str) -> list[float]:
        return [a / b for a, b in zip(self.rates(ours), self.rates(tool), strict=False)]

    def interval(self, ours: str, tool: str) -> tuple[float, float]:
        num = len(self.ratios(ours, tool))
        return ratio_interval(self.rates(ours)[:num], self.rates(tool)[:num])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_tables(results: Path, names: tuple[str, ...], readme: Path) -> None:
    founds = {name: Found(results / name) for name in names if (results / name / "attained.jsonl").exists()}
    text = readme.read_text()
    for title, rows in (
        ("summary", [*summary(founds), coverage(results, founds)]),
        ("workloads", per_workload(founds)),
    ):
        begin, end = f"<!-- {title}: run.py table -->", f"<!-- end of {title} -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n" + "\n".join(rows) + f"\n{end}{rest.split(end)[1]}"
    readme.write_text(text)


def summary(founds: dict[str, Found]) -> list[str]:
    """Per tool over all workloads: ours over it, where it led, how often it ran out of memory, what it cost."""
    rows = [
        "| tool | keeps the effective batch | ours kept / it | ours free / it | ours kept behind | ours free behind "
        "| advice ran out of memory or failed | search s, mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tool in OTHERS:
        behind = {ours: [n for n, f in founds.items() if is_behind(f, ours, tool)] for ours in SEARCHES}
        failed = [name for name, found in founds.items() if not found.rates(tool)]
        seconds = [found.advice[tool].get("search_seconds", 0.0) for found in founds.values()]
        rows.append(
            f"| {WORDS[tool]} | {'yes' if tool in KEEPING else 'no'} | {mean_words(founds, 'ours_kept', tool)} "
            f"| {mean_words(founds, 'ours_free', tool)} | {', '.join(behind['ours_kept']) or '-'} "
            f"| {', '.join(behind['ours_free']) or '-'} | {', '.join(failed) or '-'} | {fmean(seconds):.0f} |"
        )
    for ours in SEARCHES:
        seconds = [found.advice[ours]["search_seconds"] for found in founds.values()]
        rows.append(f"| {WORDS[ours]} | {'yes' if ours == 'ours_kept' else 'no'} | | | | | | {fmean(seconds):.0f} |")
    rows.append("")
    rows.append(goal(founds, "ours_kept", KEEPING, "those that keep the effective batch too"))
    rows.append(goal(founds, "ours_free", OTHERS, "all"))
    return rows


def goal(founds: dict[str, Found], ours: str, tools: list[str], whom: str) -> str:
    ahead = {tool: geometric_mean(ratios) for tool in tools if (ratios := all_ratios(founds, ours, tool))}
    if not ahead:
        return f"* {WORDS[ours]}: no training to compare."
    nearest = min(ahead, key=lambda tool: ahead[tool])
    least = [
        min(geometric_mean(ratios) for tool in tools if (ratios := found.ratios(ours, tool)))
        for found in founds.values()
        if found.rates(ours)
    ]
    is_met = "met" if ahead[nearest] >= GOAL else "**not met**"
    return (
        f"* {WORDS[ours]}, beside {whom}: the best of them in the geometric mean is {WORDS[nearest]}, ours over it "
        f"{ahead[nearest]:.2f} (goal {GOAL}: {is_met}), over {len(all_ratios(founds, ours, nearest))} of {len(founds)} "
        "workloads; over the best on each workload, whichever that is, "
        f"{geometric_mean(least):.2f}."
    )


def coverage(results: Path, founds: dict[str, Found]) -> str:
    """How many trainings of our advice were in the interval that it promised; the first round of each apart."""
    held: list[tuple[int, bool]] = []
    for name, found in founds.items():
        for ours in SEARCHES:
            evidence = json.loads((results / name / ours / "recommendation.json").read_text())["evidence"]
            low, high = evidence["samples_per_second_interval"]
            held += [(number, low <= rate <= high) for number, rate in enumerate(found.rates(ours))]
    first = [is_within for number, is_within in held if number == 0]
    return (
        f"* Trainings of our advice within the 95 % interval that it promised: {sum(w for _, w in held)} of "
        f"{len(held)}, of the first round {sum(first)} of {len(first)}."
    )


def all_ratios(founds: dict[str, Found], ours: str, tool: str) -> list[float]:
    """Of each workload the geometric mean over rounds; without those that the advice failed on."""
    return [geometric_mean(ratios) for found in founds.values() if (ratios := found.ratios(ours, tool))]


def mean_words(founds: dict[str, Found], ours: str, tool: str) -> str:
    ratios = all_ratios(founds, ours, tool)
    if not ratios:
        return "-"
    of = "" if len(ratios) == len(founds) else f" (over {len(ratios)} of {len(founds)})"
    return f"{geometric_mean(ratios):.2f}{of}"


def is_behind(found: Found, ours: str, tool: str) -> bool:
    """Beyond noise: the whole 95 % interval of ours over it lies below 1."""
    return bool(found.ratios(ours, tool)) and found.interval(ours, tool)[1] < 1


def effective(found: Found, tool: str) -> int | None:
    setting = found.advice[tool].get("setting")
    return setting and setting["batch_size"] * setting["accumulation_steps"]


def per_workload(founds: dict[str, Found]) -> list[str]:
    rows = [
        "| workload | tool | advice | effective batch | search s | attained samples/s, each round "
        "| ours kept / it (95 %) | ours free / it (95 %) | peak MiB | ran out of memory or failed | changed | sound "
        "| loss in fp32: start, after (samples) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in founds.items():
        rows += [f"| {name} {row(found, tool)}" for tool in WORDS if tool in found.advice]
    return rows


def row(found: Found, tool: str) -> str:
    advice, trainings = found.advice[tool], found.trainings[tool]
    rates = found.rates(tool)
    failures = [training["failure"] for training in trainings if "failure" in training]
    trained = [training for training in trainings if "failure" not in training]
    peak = f"{max(t['peak_memory_bytes'] for t in trained) / 2**20:.0f}" if trained else "-"
    losses = "-"
    if trained:
        first = trained[0]
        after = "not finite" if first["loss_after"] is None else f"{first['loss_after']:.3f}"
        losses = f"{first['loss_at_start']:.3f}, {after} ({first['num_samples_of_loss_after']})"
    ratios = [ratio_words(found, ours, tool) for ours in SEARCHES]
    failure = _MARKS.sub("", advice.get("failure", "")) or (
        f"{len(failures)} of {len(trainings)}: {failures[0][:90]}" if failures else "-"
    )
    changed = ", ".join(advice.get("changed", [])) or ("nothing" if "changed" in advice else "-")
    unsure = "" if advice.get("is_confirmed", True) else ", unconfirmed"
    seconds = f"{advice['search_seconds']:.0f}" if "search_seconds" in advice else "0"
    return (
        f"| {WORDS[tool]} | {plan(advice.get('setting'))}{unsure} | {effective(found, tool) or '-'} | {seconds} "
        f"| {', '.join(f'{rate:.1f}' for rate in rates) or '-'} | {ratios[0]} | {ratios[1]} | {peak} | {failure} "
        f"| {changed} | {soundness(found, tool)} | {losses} |"
    )


def ratio_words(found: Found, ours: str, tool: str) -> str:
    if ours == tool or not found.ratios(ours, tool):
        return "-"
    low, high = found.interval(ours, tool)
    words = f"{geometric_mean(found.ratios(ours, tool)):.2f} ({low:.2f} to {high:.2f})"
    return f"**{words}**" if high < 1 else words


def soundness(found: Found, tool: str) -> str:
    setting = found.advice[tool].get("setting")
    if setting is None:
        return "-"
    if not all(training.get("is_loss_finite", True) for training in found.trainings[tool]):
        return "**the loss is not finite**"
    verdict: str = found.fidelity.get(setting["precision"], {}).get("verdict", "is fp32")
    times = (effective(found, tool) or 0) / (effective(found, "defaults") or 1)
    return verdict if times == 1 else f"{verdict}; {times:.3g} x the batch at the same learning rate"


def plan(setting: dict[str, Any] | None) -> str:
    """A setting in a few words."""
    if setting is None:
        return "none"
    words = f"{setting['precision']} {setting['batch_size']}"
    if setting["accumulation_steps"] > 1:
        words += f" x {setting['accumulation_steps']}"
    if setting.get("compile", "off") != "off":
        words += f", compile {setting['compile']}"
    if implementation := setting.get("optimizer_impl"):
        words += f", {implementation} optimizer"
    if setting.get("activation_checkpointing"):
        words += ", checkpointed"
    if setting.get("channels_last") or setting.get("memory_format"):
        words += ", channels last"
    if setting.get("environment"):
        words += " + environment"
    return words
