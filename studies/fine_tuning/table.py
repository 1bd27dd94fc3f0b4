"""Write the table of README.md from results/outcomes.jsonl: `python table.py`."""

import json
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: table.py -->", "<!-- end of results -->"
HEAD = (
    "| cell | device, size | answer | verdict | tried, times as fast | promised samples/s (95 %) | "
    "attained samples/s | within | promised tokens/s | attained tokens/s | MFU | today's samples/s | memory MiB | "
    "search s |"
)


def row(outcome: dict) -> str:
    """Return the row of a cell; of one whose search failed, with its error."""
    document = outcome["document"]
    cells = [outcome["cell"], f"{outcome['device']}, {outcome['size']}"]
    if outcome["status"]:
        return f"| {' | '.join([*cells, 'failed: ' + document['error']['message'][:120]])} |{' |' * 11}"
    evidence = document["evidence"]
    low, high = evidence["samples_per_second_interval"]
    rates = attained(outcome, "answer", "samples_per_second")
    fidelity = evidence.get("fidelity") or {}
    cells += [
        setting(document["config"]),
        fidelity.get("verdict", "-"),
        ", ".join(tried(each) for each in document["variants"] if each["status"] != "untried") or "-",
        f"{evidence['samples_per_second']:.4g} ({low:.4g} to {high:.4g})",
        ", ".join(f"{rate:.4g}" for rate in rates),
        f"{sum(low <= rate <= high for rate in rates)} of {len(rates)}",
        number([tokens] if (tokens := evidence.get("tokens_per_second")) else []),
        number(attained(outcome, "answer", "tokens_per_second")),
        f"{100 * mfu:.0f} %" if (mfu := (document["utilization"] or {}).get("mfu")) else "-",
        number(attained(outcome, "today", "samples_per_second")),
        f"{evidence['peak_memory_bytes'] / 2**20:.0f}",
        f"{outcome['seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def attained(outcome: dict, of: str, rate: str) -> list[float]:
    """Return a rate of each training by hand that ended well."""
    return [run[rate] for run in outcome["runs"] if run["of"] == of and rate in run]


def tried(row: dict) -> str:
    """Return a value that was tried beside the leader, and its speed-up."""
    return f"{row['name']} {row['value']} {row['speedup']:.2f}" if row["speedup"] else f"{row['name']} {row['value']} -"


def number(rates: list[float]) -> str:
    """Return the median of the rates as text."""
    return f"{median(rates):.4g}" if rates else "-"


def setting(config: dict) -> str:
    """Return a setting in short."""
    further = [
        f"{name} {config[name]}"
        for name in ("attention", "compile", "activation_checkpointing", "optimizer_impl", "memory_format")
        if config.get(name) not in (None, "off", "as_found")
    ]
    own = [f"{name} {value}" for name, value in config["arguments"]]
    return " ".join([config["precision"], f"{config['batch_size']} x {config['accumulation_steps']}", *further, *own])


def main() -> None:
    """Replace the table in README.md."""
    results = HERE / "results" / "outcomes.jsonl"
    outcomes = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    rule = "|".join(["---"] * HEAD.count(" | ")) + "|---|"
    readme = HERE / "README.md"
    before, rest = readme.read_text().split(BEGIN)
    table = "\n".join([HEAD, f"|{rule}", *map(row, outcomes)])
    readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
