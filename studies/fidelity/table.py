"""Writes the tables of README.md from the raw outcomes: one for each marker there, named after its raw file.

Usage: table.py
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import common

README = Path(__file__).parent / "README.md"
MARKER = re.compile(r"<!-- (\w+): table\.py -->\n.*?<!-- end -->", re.DOTALL)
Row = dict[str, Any]


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def spread(values: Iterable[float | None]) -> str:
    """Median, and least to most in brackets where they differ."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, middle, high = map(number, (min(known), statistics.median(known), max(known)))
    return middle if low == high else f"{middle} ({low} to {high})"


def tally(values: Iterable[str]) -> str:
    found = list(values)
    counts = {value: found.count(value) for value in dict.fromkeys(found)}
    return ", ".join(f"{value} {count}" for value, count in sorted(counts.items(), key=lambda item: -item[1]))


def table(titles: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [" | ".join(row) for row in (titles, ["---"] * len(titles), *rows)]
    return [f"| {line} |" for line in lines]


def groups(rows: list[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def verdict(row: Row) -> str:
    return row["fidelity"]["verdict"] if "fidelity" in row else "unsupported"


def is_right(row: Row) -> bool:
    if row["expected"] == "sick":
        return verdict(row) in ("doubtful", "unfaithful")
    if row["expected"] == "healthy" and verdict(row) == "undecided":
        return True
    return verdict(row) == ("faithful" if row["expected"] == "healthy" else "unsupported")


def checked(rows: list[Row], field: str) -> list[Any]:
    return [row["fidelity"][field] for row in rows if "fidelity" in row]


def has_right_culprit(row: Row) -> bool:
    return any(re.search(row["culprit"], name) for name in row["fidelity"]["culprits"])


def costs(rows: list[Row]) -> list[float]:
    pairs = zip(checked(rows, "seconds"), checked(rows, "fp32_step_seconds"), strict=True)
    return [seconds / step for seconds, step in pairs if step]


def share(hits: Iterable[bool]) -> str:
    found = list(hits)
    return f"{sum(found)} of {len(found)}" if found else "-"


def blamed(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["expected"] == "sick" and row["culprit"] and "fidelity" in row]


def healable(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["expected"] == "sick" and row["is_healable"] and "fidelity" in row]


def checks(rows: list[Row]) -> list[str]:
    titles = [
        "case", "precision", "expected", "verdicts", "right", "noise ratio", "common error", "at most", "flushed",
        "training gap", "culprit right", "healed", "passes", "cost, fp32 steps",
    ]  # fmt: skip
    return table(
        titles,
        (
            [
                case,
                precision,
                group[0]["expected"],
                tally(map(verdict, group)),
                share(map(is_right, group)),
                spread(checked(group, "noise_ratio")),
                spread(checked(group, "common_error")),
                spread(pair and pair[1] for pair in checked(group, "common_error_interval")),
                spread(checked(group, "flushed_share")),
                spread(checked(group, "training_gap")),
                share(map(has_right_culprit, blamed(group))),
                share(bool(row["fidelity"]["healing_pins"]) for row in healable(group)),
                spread(checked(group, "num_passes")),
                spread(costs(group)),
            ]
            for (case, precision), group in groups(rows, "case", "precision").items()
        ),
    )


def totals(_: list[Row]) -> list[str]:
    """Over every file of checks that there is."""
    lines = []
    for path in sorted(common.RAW.glob("checks_*.jsonl")):
        rows = common.read(path)
        per_case = groups(rows, "case", "precision").values()
        usual = [max(map(list(map(verdict, group)).count, map(verdict, group))) for group in per_case]
        lines.append(
            [
                path.stem.removeprefix("checks_"),
                str(len({row["case"] for row in rows})),
                str(len(per_case)),
                share(map(is_right, rows)),
                share(not is_right(row) for row in rows if row["expected"] == "healthy"),
                share(not is_right(row) for row in rows if row["expected"] == "sick"),
                f"{100 * sum(usual) / len(rows):.1f} %",
                share(number == len(group) for number, group in zip(usual, per_case, strict=True)),
                share(map(has_right_culprit, blamed(rows))),
                share(bool(row["fidelity"]["healing_pins"]) for row in healable(rows)),
                spread(costs(rows)),
                tally(row["code"] for row in rows),
            ]
        )
    titles = [
        "zoo", "cases", "with precision", "verdicts right", "healthy lost wrongly", "sick missed",
        "verdicts that are the case's usual one", "the same over all seeds", "culprit right", "healed",
        "cost, fp32 steps", "digest of the code, checks",
    ]  # fmt: skip
    return table(titles, lines)


def octave(log2_scale: float | None) -> str:
    return "none" if log2_scale is None else f"2^{log2_scale:g}"


def least(octaves: Iterable[float | None]) -> float | None:
    """None where no step is safe at any scale; single bad steps are left out, as `starting_scale` does."""
    return min((value for value in octaves if value is not None), default=None)


def agree(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else math.floor(one) == math.floor(other)


def skipped(row: Row, start: str) -> str:
    if f"{start}_error" in row:
        return "GradScaler raises"
    if f"{start}_skips" not in row:
        return "-"
    ending = "" if row[f"{start}_is_finite"] else ", ends not finite"
    return f"{row[f'{start}_skips']} / {row[f'{start}_foretold']}{ending}"


def loss_scales(rows: list[Row]) -> list[str]:
    lines, num_within, num_steps, num_agreeing = [], 0, 0, 0
    for row in rows:
        if "error" in row:
            lines.append([row["case"], row["expected"], row["error"].split(":")[0], *["-"] * 6])
            continue
        found = row["calibration"]
        per_step = found["log2_scales"]
        start = None if found["init_scale"] is None else math.log2(found["init_scale"])
        brute = least(row["brute"].values())
        difference = None if start is None or brute is None else start - brute
        is_same = [agree(per_step[int(step)], answer) for step, answer in row["brute"].items()]
        bisected = [
            agree(per_step[int(step)], answer) for step, answer in found.get("bisected_log2_scales", {}).items()
        ]
        num_within += start == brute if difference is None else abs(difference) <= 1
        num_steps, num_agreeing = num_steps + len(is_same), num_agreeing + sum(is_same)
        lines.append(
            [
                row["case"],
                row["expected"],
                octave(start),
                octave(brute),
                number(difference),
                share(is_same),
                share(bisected),
                skipped(row, "calibrated"),
                skipped(row, "default"),
            ]
        )
    titles = [
        "case", "expected", "init_scale", "brute force", "octaves between", "steps in one octave",
        "backward as bisection", "calibrated: skips / foretold", "default 2^16: skips / foretold",
    ]  # fmt: skip
    num_run = sum("error" not in row for row in rows)
    summary = (
        f"init_scale within one octave of brute force, or both none: {num_within} of {num_run} cases; "
        f"S* and brute force in one octave: {num_agreeing} of {num_steps} steps."
    )
    return [summary, "", *table(titles, lines)]


def checks_of(row: Row) -> str:
    """What the check says of that case and precision: of these pins it says faithful, or it would not name them."""
    if row["pinned_modules"]:
        return "faithful with these"
    found = common.read(common.RAW / f"checks_{row['zoo']}.jsonl")
    return tally(verdict(c) for c in found if (c["case"], c["precision"]) == (row["case"], row["precision"])) or "-"


def trainings(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        names = [
            row["case"],
            row["precision"],
            str(row.get("seed", 0)),
            ", ".join(f"`{name}`" for name in row["pinned_modules"]) or "-",
        ]
        if "error" in row:
            lines.append([*names, row["expected"], checks_of(row), row["error"].split(":")[0], *["-"] * 5])
            continue
        judged, low, fp32 = row["judged"], row["low"], row["fp32"]
        tails = [fp32["tail"], *row["perturbed_tails"]]
        harm = f"**harmed**: {judged['why']}" if judged["is_harmed"] else judged["why"]
        excess = None if judged["excess"] is None else 100 * judged["excess"]
        lines.append(
            [
                *names,
                row["expected"],
                checks_of(row),
                harm,
                f"{number(fp32['first'])} to {number(fp32['tail'])}",
                number(low["tail"]),
                number(excess),
                number(max(tails) - min(tails)),
                f"{low['num_skips']} of {low['num_steps']}",
            ]
        )
    titles = [
        "case", "precision", "seed", "pinned", "expected", "check's verdicts", "training",
        "fp32 loss, first to last tenth", "loss in the precision", "excess, % of fp32's fall", "fp32 runs apart",
        "skips of steps",
    ]  # fmt: skip
    return table(titles, lines)


def later(_: list[Row]) -> list[str]:
    """Over every file of checks of trained weights; only an unfaithful verdict of those changes a search's choice."""
    lines = []
    for path in sorted(common.RAW.glob("later_*.jsonl")):
        for (num_steps,), rows in groups(common.read(path), "num_steps").items():
            healthy, sick = (
                [verdict(row) == "unfaithful" for row in rows if row["expected"] == expected]
                for expected in ("healthy", "sick")
            )
            doubted = {f"{row['case']} {row['precision']}" for row in rows if verdict(row) == "doubtful"}
            lines.append(
                [
                    path.stem.removeprefix("later_"),
                    str(num_steps),
                    str(len(groups(rows, "case", "precision"))),
                    share(healthy),
                    share(sick),
                    ", ".join(sorted(doubted)) or "-",
                    tally(row["code"] for row in rows),
                ]
            )
    titles = [
        "zoo", "fp32 steps before", "cases with precision", "healthy ruled out", "sick ruled out", "doubtful",
        "digest of the code, checks",
    ]  # fmt: skip
    return table(titles, lines)


KINDS: dict[str, Callable[[list[Row]], list[str]]] = {
    "totals": totals, "later_": checks, "later": later, "checks": checks, "loss_scales": loss_scales,
    "trainings": trainings,
}  # fmt: skip


def filled(match: re.Match[str]) -> str:
    name = match[1]
    rows = common.read(common.RAW / f"{name}.jsonl")
    make = next(make for kind, make in KINDS.items() if name.startswith(kind))
    lines = make(rows) if rows or name in ("totals", "later") else ["Not measured yet."]
    return f"<!-- {name}: table.py -->\n" + "\n".join(lines) + "\n<!-- end -->"


def main() -> None:
    README.write_text(MARKER.sub(filled, README.read_text()))


if __name__ == "__main__":
    main()
