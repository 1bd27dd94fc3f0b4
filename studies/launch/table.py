"""Writes the table of README.md from results/*.json: `python table.py`."""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- results: table.py -->", "<!-- end of results -->"
HEAD = (
    "| script | answer | promised samples/s (95 %) | attained, each run | within | today, promised (95 %) "
    "| today, each run | within | as a Workload: answer, today | search s |"
)


def row(path: Path) -> str:
    """Of one script; where its search or a run failed, what it said."""
    found = json.loads(path.read_text())
    document = found["document"]
    name = path.stem
    if found["status"]:
        return f"| {name} | failed: {_said(document)} | | | | | | | | {found['seconds']:.0f} |"
    config, evidence = document["config"], document["evidence"]
    cells = [name, _setting(config)]
    for of, promised in (("answer", evidence), ("today", evidence["baseline"])):
        attained = rates(found, of)
        shown = ", ".join(_number(rate) if isinstance(rate, float) else rate for rate in attained)
        if not attained:
            shown = "the edit is left to do by hand"
        cells += [_promised(promised), shown, f"{sum(held(found, of))} of {len(attained)}"]
    cells += [_in_process(found.get("in_process")), f"{found['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


def summary(paths: list[Path]) -> list[str]:
    """Of all scripts: the runs that lie in what was promised, and the promises that a Workload agrees with."""
    all_found = [json.loads(path.read_text()) for path in paths]
    answered = [found for found in all_found if not found["status"]]
    all_held = {of: [each for found in answered for each in held(found, of)] for of in ("answer", "today")}
    agree = []
    for found in answered:
        other = found.get("in_process")
        if other is not None and not other["status"]:
            baselines = [each["evidence"]["baseline"] for each in (found["document"], other["document"])]
            (low, high), (other_low, other_high) = (each["samples_per_second_interval"] for each in baselines)
            agree.append(low <= other_high and other_low <= high)
    num_other = sum(
        _setting(each["document"]["config"]) != _setting(each["document"]["evidence"]["baseline"]["config"])
        for each in answered
    )
    return [
        f"- Scripts answered: {len(answered)} of {len(all_found)}; {num_other} with another setting than today's.",
        f"- Runs within the promised interval: {sum(all_held['answer'])} of {len(all_held['answer'])} of the answers, "
        f"{sum(all_held['today'])} of {len(all_held['today'])} of today's commands.",
        f"- Today's command, and the same as a Workload: their intervals overlap in {sum(agree)} of {len(agree)}.",
    ]


def _in_process(found: dict | None) -> str:
    """What the search of the same training as a Workload recommends and promises."""
    if found is None:
        return "-"
    if found["status"]:
        return f"failed: {_said(found['document'])}"
    config, evidence = found["document"]["config"], found["document"]["evidence"]
    return f"{_setting(config)}: {_promised(evidence)}; {_promised(evidence['baseline'])}"


def _setting(config: dict) -> str:
    return f"{config['precision']} {config['batch_size']} x {config['accumulation_steps']}"


def _promised(evidence: dict) -> str:
    low, high = evidence["samples_per_second_interval"]
    return f"{_number(evidence['samples_per_second'])} ({_number(low)} to {_number(high)})"


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}"


def _said(document: dict) -> str:
    said = document.get("error", {}).get("message", "no document")
    return " ".join(said.split())[:300].replace("|", "\\|")


def rates(found: dict, of: str) -> list[float | str]:
    """Samples a second of every run, those of all ranks together; what ended a run that has none."""
    document = found["document"]
    config = document["config"] if of == "answer" else document["evidence"]["baseline"]["config"]
    samples = config["batch_size"] * config["accumulation_steps"]
    return [
        each["num_ranks"] * samples * each["num_steps"] / each["seconds"]
        if "seconds" in each
        else (each["error"].strip() or "no word").splitlines()[-1]
        for each in found["paces"]
        if each["of"] == of
    ]


def held(found: dict, of: str) -> list[bool]:
    """Whether each run lies in the promised interval."""
    evidence = found["document"]["evidence"]
    low, high = (evidence if of == "answer" else evidence["baseline"])["samples_per_second_interval"]
    return [isinstance(rate, float) and low <= rate <= high for rate in rates(found, of)]


def main() -> None:
    readme = HERE / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    paths = sorted((HERE / "results").glob("*.json"))
    lines = [*summary(paths), "", HEAD, "|" + "---|" * (HEAD.count("|") - 1), *map(row, paths)]
    readme.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
