"""The tables of README.md, from the results of run.py: medians, and from least to most over the seeds."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

AS_GOOD_RATIO = 1.1  # of fp32's final loss


def spread(values: list[float], form: str) -> str:
    if not values:
        return "-"
    low, middle, high = (format(value, form) for value in (min(values), statistics.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def tally(values: list[str]) -> str:
    """Each value and how often, the most frequent first; the number left out where all agree."""
    counts = {value: values.count(value) for value in dict.fromkeys(values)}
    ordered = sorted(counts, key=lambda value: -counts[value])
    return "; ".join(value if len(counts) == 1 else f"{value} x{counts[value]}" for value in ordered)


def ending(row: dict[str, Any]) -> str:
    moves = [move["kind"] + (f" to {move['after']}" if move["kind"] == "demotion" else "") for move in row["moves"]]
    told = ", ".join(f"{moves.count(kind)}x {kind}" if moves.count(kind) > 1 else kind for kind in dict.fromkeys(moves))
    parts = [told] if told else []
    if row["ended"]:
        parts.append(f"`{row['ended'].split(':')[0]}`")
    if not row["has_finite_weights"]:
        parts.append("**weights NaN**")
    elif not row["has_finite_buffers"]:
        parts.append("**BatchNorm's statistics NaN**")
    return ", ".join(parts) or "ran to its end"


def is_as_good(row: dict[str, Any]) -> bool:
    return row["survived"] and row["ratio"] is not None and row["ratio"] <= AS_GOOD_RATIO


def summary(rows: list[dict[str, Any]], policies: list[str]) -> list[str]:
    """Survived / as good as fp32, of all seeds."""
    table = ["| case (at fault) | " + " | ".join(policies) + " |", "|---" * (1 + len(policies)) + "|"]

    def cell(group: list[dict[str, Any]]) -> str:
        return f"{sum(row['survived'] for row in group)} / {sum(map(is_as_good, group))}"

    for title in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == title]
        cells = [cell([row for row in of_case if row["policy"] == name]) for name in policies]
        table.append(f"| {title} ({of_case[0]['at_fault']}) | " + " | ".join(cells) + " |")
    num_runs = len(rows) // len(policies)
    totals = [cell([row for row in rows if row["policy"] == name]) for name in policies]
    table.append(f"| **all, of {num_runs}** | " + " | ".join(totals) + " |")
    return table


def details(rows: list[dict[str, Any]], policies: list[str]) -> list[str]:
    table = [
        "| case | policy | final loss / fp32's | skipped / tried steps | precision | verdict | what happened |",
        "|---|---|---|---|---|---|---|",
    ]
    for title in dict.fromkeys(row["case"] for row in rows):
        for name in policies:
            group = [row for row in rows if row["case"] == title and row["policy"] == name]
            ratios = [row["ratio"] for row in group if row["ratio"] is not None]
            ratio = spread(ratios, ".3g") if ratios else "not finite"
            if 0 < len(ratios) < len(group):
                ratio += f", {len(group) - len(ratios)} not finite"
            skipped, tried = (spread([row[key] for row in group], ".0f") for key in ("num_skips", "num_updates"))
            precisions = [
                row["precision"] + (f", {len(row['pinned_modules'])} pinned" if row["pinned_modules"] else "")
                for row in group
            ]
            table.append(
                f"| {title} | {name} | {ratio} | {skipped} / {tried} | {tally(precisions)} "
                f"| {tally([row['verdict'] for row in group]).replace('none', '-')} "
                f"| {tally([ending(row) for row in group])} |"
            )
    return table


def write(readme: Path, hardware: str, rows: list[dict[str, Any]], policies: list[str]) -> None:
    text = readme.read_text()
    parts = {"hardware": [hardware], "summary": summary(rows, policies), "details": details(rows, policies)}
    for name, lines in parts.items():
        begin, end = f"<!-- {name}: run.py -->", "<!-- end -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end, 1)[1]}"
    readme.write_text(text)
