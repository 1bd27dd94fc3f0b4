"""The README's tables from the raw outcomes: what was promised, what was attained, and how often the promise held."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from cases import CASES

RUNS = ("idle", "loaded", "bf16_cpu")
MAX_ERROR, MAX_MEMORY_ERROR = 0.03, 0.05
BUSY = re.compile(r"\bbusy\b|hypervisor|other processes", re.IGNORECASE)


class Pair(NamedTuple):
    """One search and the trainings of its recommendation, the first of which counts."""

    found: dict[str, Any]
    document: dict[str, Any]

    @property
    def evidence(self) -> dict[str, Any]:
        evidence: dict[str, Any] = self.document["evidence"]
        return evidence

    @property
    def promised(self) -> float:
        return float(self.evidence["samples_per_second"])

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The trainings that came to their end."""
        return [training for training in self.found["trainings"] if "failure" not in training]

    @property
    def has_failed(self) -> bool:
        return len(self.trained) < len(self.found["trainings"])

    @property
    def error(self) -> float:
        """Of the first training: attained over promised, less 1; a training that failed attained nothing."""
        first = self.found["trainings"][0]
        return float(first.get("samples_per_second", 0.0) / self.promised - 1)

    @property
    def is_within(self) -> bool:
        return self.holds(self.promised * (1 + self.error))

    def holds(self, samples_per_second: float) -> bool:
        """Whether the promised interval holds it."""
        low, high = self.evidence["samples_per_second_interval"]
        return bool(low <= samples_per_second <= high)

    @property
    def width(self) -> float:
        """The promised interval's upper end over its lower."""
        low, high = self.evidence["samples_per_second_interval"]
        return float(high / low)

    @property
    def drift(self) -> float | None:
        """How far the second training is from the first: the same config minutes later."""
        rates = [training["samples_per_second"] for training in self.trained]
        return rates[1] / rates[0] - 1 if len(rates) > 1 else None

    @property
    def memory_error(self) -> float | None:
        """Of the first training: the attained peak over the promised, less 1."""
        peak = self.found["trainings"][0].get("peak_memory_bytes")
        return None if peak is None else float(peak / self.evidence["peak_memory_bytes"] - 1)

    @property
    def busy_warnings(self) -> list[str]:
        """What the recommendation says of a busy machine."""
        said = dict.fromkeys((*self.document["warnings"], *self.document["search"]["warnings"]))
        return [warning for warning in said if BUSY.search(warning)]

    @property
    def early_warnings(self) -> list[str]:
        """What was said of a busy machine before the first trial."""
        return [warning for warning in self.document["search"]["warnings"] if BUSY.search(warning)]

    @property
    def others_seen(self) -> str:
        """Cores that others used before the first trial, and on the mean of the search's and the confirmation's."""
        load = self.evidence["load"] or {}
        seen = [(self.document["search"]["load"] or {}).get("others_num_cores")]
        seen += [load.get("search_others_num_cores"), load.get("others_num_cores")]
        return " / ".join("-" if cores is None else f"{cores:.1f}" for cores in seen)


def write_table(results: Path, readme: Path) -> None:
    """Put the tables of all runs that there are between the README's markers."""
    text = readme.read_text()
    for run in RUNS:
        pairs = load_pairs(results / run)
        if pairs:
            begin, end = f"<!-- {run}: run.py table -->", f"<!-- end of {run} -->"
            head, rest = text.split(begin)
            lines = [*totals(pairs, is_loaded=run == "loaded"), "", *rows(pairs, is_loaded=run == "loaded")]
            text = f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end)[1]}"
    readme.write_text(text)


def load_pairs(folder: Path) -> list[Pair]:
    """The finished cases, in the order of the list."""
    pairs = []
    for case in CASES:
        path = folder / case.id / "attained.json"
        if path.exists():
            document = json.loads((path.parent / "recommendation.json").read_text())
            pairs.append(Pair(json.loads(path.read_text()), document))
    return pairs


def totals(pairs: Sequence[Pair], *, is_loaded: bool) -> list[str]:
    """How often the promises held, against the goals."""
    within = [pair.is_within for pair in pairs]
    known = [abs(error) for pair in pairs if (error := pair.memory_error) is not None]
    drifts = [abs(drift) for pair in pairs if (drift := pair.drift) is not None]
    confirmed = sum(bool(pair.evidence["is_confirmed"]) for pair in pairs)
    warned = [bool(pair.busy_warnings) for pair in pairs]
    seconds = [pair.holds(pair.trained[1]["samples_per_second"]) for pair in pairs if len(pair.trained) > 1]
    if is_loaded:
        noticed = [bool(pair.early_warnings) for pair in pairs if pair.found["load"] != "from confirmation"]
        held = [is_within or is_warned for is_within, is_warned in zip(within, warned, strict=True)]
        lines = [
            f"- Within the promised 95 % interval, or warned that the machine was busy (goal: all): {share(held)}.",
            f"- Within the interval: {share(within)}. Warned: {share(warned)}.",
            f"- Loaded before the search began, and said so before the first trial (goal: all): {share(noticed)}.",
        ]
    else:
        lines = [
            f"- Within the promised 95 % interval (goal: 90 %): {share(within)}.",
            f"- The second training, which does not count, within it: {share(seconds)}.",
            f"- Said to be on a busy machine, where no load of this study's ran: {share(warned)}.",
        ]
    widths = [pair.width for pair in pairs]
    lines += [f"- Upper end of the interval over its lower: median {median(widths):.2f}, largest {max(widths):.1f}."]
    errors = [abs(pair.error) for pair in pairs]
    goal = "" if is_loaded else f" (goal: {MAX_ERROR:.0%})"
    lines += [f"- Error of the promised median{goal}: median {median(errors):.1%}, largest {max(errors):.1%}."]
    if drifts:
        lines += [
            f"- The same training again, at once: differs from the first by {median(drifts):.1%} in the median, "
            f"{max(drifts):.1%} at most."
        ]
    lines += [
        f"- Peak memory within {MAX_MEMORY_ERROR:.0%} of the promised (goal: all): "
        f"{share([error <= MAX_MEMORY_ERROR for error in known])}; largest error {max(known, default=0.0):.1%}.",
        f"- Trainings that failed or ran out of memory: {sum(pair.has_failed for pair in pairs)}. "
        f"Searches that confirmed in three rounds: {confirmed} of {len(pairs)}; "
        f"the searches took {sum(pair.found['search_seconds'] for pair in pairs) / 60:.0f} minutes in all.",
    ]
    return lines


def share(held: Sequence[bool]) -> str:
    return f"{sum(held)} of {len(held)} ({sum(held) / len(held):.0%})" if held else "none"


def rows(pairs: Sequence[Pair], *, is_loaded: bool) -> list[str]:
    """One row for each pair."""
    table = [cells(pair, is_loaded=is_loaded) for pair in pairs]
    return [line(table[0]), "|---" * len(table[0]) + "|", *(line(row.values()) for row in table)]


def cells(pair: Pair, *, is_loaded: bool) -> dict[str, str]:
    """A row by column."""
    found, evidence, first = pair.found, pair.evidence, pair.found["trainings"][0]
    low, high = evidence["samples_per_second_interval"]
    row = {"search": found["id"], "asked": " ".join(found["options"]) or "-"}
    if is_loaded:
        row["core loaded"] = found["load"]
        row["others seen, cores: first / searching / confirming"] = pair.others_seen
    row["recommended"] = plan(pair.document["config"])
    row["processes"] = str(evidence["num_processes"]) + ("" if evidence["is_confirmed"] else ", unconfirmed")
    row["promised samples/s (95 %)"] = f"{pair.promised:.4g} ({low:.4g} to {high:.4g})"
    if is_loaded:
        factors = (evidence["load"] or {}).get("interval_factors", (1.0, 1.0))
        row["ends multiplied by"] = ", ".join(f"{factor:.2f}" for factor in factors)
    if "failure" in first:
        row["attained (steps)"] = f"**{first['failure']}**"
    else:
        row["attained (steps)"] = f"{first['samples_per_second']:.4g} ({first['num_steps']})"
    row["error"] = f"{pair.error:+.1%}"
    row["within"] = "yes" if pair.is_within else "**no**"
    if is_loaded:
        row["warned"] = "yes" if pair.busy_warnings else "no" if pair.is_within else "**no**"
    row["again"] = "-" if pair.drift is None else f"{pair.drift:+.1%}"
    memory, peak = pair.memory_error, first.get("peak_memory_bytes", 0)
    row["peak MiB promised / attained"] = f"{evidence['peak_memory_bytes'] / 2**20:.0f} / {peak / 2**20:.0f}"
    row["memory error"] = "-"
    if memory is not None:
        row["memory error"] = f"{memory:+.1%}" if abs(memory) <= MAX_MEMORY_ERROR else f"**{memory:+.1%}**"
    row["stolen"] = f"{max((training['stolen_share'] for training in pair.trained), default=0.0):.0%}"
    row["search s (budget)"] = f"{found['search_seconds']:.0f} ({found['budget_seconds']})"
    return row


def plan(config: dict[str, Any]) -> str:
    """A config in a few words."""
    words = f"{config['precision']} {config['batch_size']}"
    if config["accumulation_steps"] > 1:
        words += f" x {config['accumulation_steps']}"
    if config["num_workers"]:
        words += f", {config['num_workers']} workers"
    return words


def line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"
