"""Writes the table of README.md from results/*.json: `python table.py`."""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: table.py -->", "<!-- end of results -->"
HEAD = "| script | answer | promised samples/s (95 %) | attained, each run | within | today, each run | search s |"


def row(path: Path) -> str:
    """Of one script; where its search or a run failed, what it said."""
    found = json.loads(path.read_text())
    document = found["document"]
    if found["status"]:
        said = document.get("error", {}).get("message", "no document")
        return f"| {path.stem} | failed: {said} | | | | | {found['seconds']:.0f} |"
    config, evidence = document["config"], document["evidence"]
    low, high = evidence["samples_per_second_interval"]
    attained = {of: rates(found["paces"], of, document) for of in ("answer", "today")}
    num_within = sum(isinstance(rate, float) and low <= rate <= high for rate in attained["answer"])
    shown = {of: ", ".join(f"{r:.1f}" if isinstance(r, float) else r for r in all_) for of, all_ in attained.items()}
    return (
        f"| {path.stem} | {config['precision']} {config['batch_size']} x {config['accumulation_steps']} "
        f"| {evidence['samples_per_second']:.1f} ({low:.1f} to {high:.1f}) | {shown['answer']} "
        f"| {num_within} of {len(attained['answer'])} | {shown['today']} | {found['seconds']:.0f} |"
    )


def rates(paces: list[dict], of: str, document: dict) -> list[float | str]:
    """Samples a second of every run, those of all ranks together; what ended a run that has none."""
    config = document["config"] if of == "answer" else document["evidence"]["baseline"]["config"]
    samples = config["batch_size"] * config["accumulation_steps"]
    return [
        each["num_ranks"] * samples * each["num_steps"] / each["seconds"]
        if "seconds" in each
        else each["error"].strip().splitlines()[-1]
        for each in paces
        if each["of"] == of
    ]


def main() -> None:
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1), *map(row, sorted((HERE / "results").glob("*.json")))]
    readme.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
