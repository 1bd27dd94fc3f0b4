"""Write the table of README.md from results/outcomes.jsonl: `python table.py`."""

import json
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: table.py -->", "<!-- end of results -->"
HEAD = (
    "| cell | device, size | answer | verdict | promised samples/s (95 %) | attained samples/s | within | "
    "attained tokens/s | today's samples/s | memory MiB | search s |"
)


def row(outcome: dict) -> str:
    """Return the row of a cell; of one whose search failed, with its error."""
    document = outcome["document"]
    cells = [outcome["cell"], f"{outcome['device']}, {outcome['size']}"]
    if outcome["status"]:
        return f"| {' | '.join([*cells, 'failed: ' + document['error']['message'][:120]])} | | | | | | | | |"
    evidence = document["evidence"]
    low, high = evidence["samples_per_second_interval"]
    rates = attained(outcome, "answer", "samples_per_second")
    fidelity = evidence.get("fidelity") or {}
    cells += [
        setting(document["config"]),
        fidelity.get("verdict", "-"),
        f"{evidence['samples_per_second']:.4g} ({low:.4g} to {high:.4g})",
        ", ".join(f"{rate:.4g}" for rate in rates),
        f"{sum(low <= rate <= high for rate in rates)} of {len(rates)}",
        number(attained(outcome, "answer", "tokens_per_second")),
        number(attained(outcome, "today", "samples_per_second")),
        f"{evidence['peak_memory_bytes'] / 2**20:.0f}",
        f"{outcome['seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def attained(outcome: dict, of: str, rate: str) -> list[float]:
    """Return a rate of each training by hand that ended well."""
    return [run[rate] for run in outcome["runs"] if run["of"] == of and rate in run]


def number(rates: list[float]) -> str:
    """Return the median of the rates as text."""
    return f"{median(rates):.4g}" if rates else "-"


def setting(config: dict) -> str:
    """Return a setting in short."""
    further = [
        f"{name} {config[name]}"
        for name in ("compile", "activation_checkpointing", "optimizer_impl")
        if config.get(name) not in (None, "off", "as_found")
    ]
    return " ".join([config["precision"], f"{config['batch_size']} x {config['accumulation_steps']}", *further])


def main() -> None:
    """Replace the table in README.md."""
    outcomes = [json.loads(line) for line in (HERE / "results" / "outcomes.jsonl").read_text().splitlines()]
    rule = "|".join(["---"] * HEAD.count(" | ")) + "|---|"
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    table = "\n".join([HEAD, f"|{rule}", *map(row, outcomes)])
    readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
