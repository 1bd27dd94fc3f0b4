"""The golden files beside this one, made anew where a change of them is meant, by
`PYTHONPATH=studies/landscapes python tests/golden/golden.py`.

`study` is the folder of a real search: its outcomes.jsonl stays as it was written, its recommendation.json is what
these records are ranked to. `replays.json` holds eight searches on recorded landscapes: what each tried, in order, and
what it decided.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from landscape import Landscape
from search_replay import search_replay

from autotune_amp.core.outcome import Measurement, Record
from autotune_amp.core.recommendation import Recommendation
from autotune_amp.search.answer.decide import rerank_with_options

HERE = Path(__file__).parent
STUDIES = HERE.parents[1] / "studies"
STUDY = HERE / "study"
REPLAYS = HERE / "replays.json"

_CPU, _CARDS = STUDIES / "landscapes/results", STUDIES / "virtual_cards/results/landscapes"
LANDSCAPES = {
    "mlp on a CPU": _CPU / "mlp_xeon_2.5ghz_2cpu.jsonl",
    "lstm on a CPU, no fp16": _CPU / "lstm_xeon_2.5ghz_2cpu.jsonl",
    "transformer on a CPU, memory wall": _CPU / "transformer_medium_xeon_2.5ghz_2cpu.jsonl",
    "vit on a CPU, memory wall": _CPU / "vit_xeon_2.5ghz_2cpu.jsonl",
    "gpt2 on a T4": _CARDS / "T4/gpt2.jsonl",
    "t5 on a T4": _CARDS / "T4/t5.jsonl",
    "unet on a V100": _CARDS / "V100/unet.jsonl",
    "convnet on an A100": _CARDS / "A100/convnet.jsonl",
}


def ranked() -> Recommendation:
    """The study's records, ranked for what they were searched for."""
    path = STUDY / "recommendation.json"
    return rerank_with_options(Recommendation.load(path), path)


def played(name: str) -> dict[str, Any]:
    """A whole search of a landscape: what it ran, and its decision."""
    found = search_replay(Landscape.load(LANDSCAPES[name]), seed=0)
    assert found.decision is not None
    decision = json.loads(msgspec.json.encode(found.decision))
    return {
        "jobs": [_said(record) for _, record in found.records],
        "seconds": found.records[-1][0],
        "config": decision["config"],
        "evidence": decision["evidence"],
        "excluded": [[e["precision"], e["batch_size"]] for e in decision["excluded"]],
        "candidates": [{k: v for k, v in row.items() if k != "reason"} for row in decision["candidates"]],
    }


def _said(record: Record) -> str:
    became = "ran" if isinstance(record.outcome, Measurement) else getattr(record.outcome, "kind", "judged")
    return f"{record.purpose} {record.candidate}: {became}"


if __name__ == "__main__":
    ranked().save(STUDY / "recommendation.json")
    REPLAYS.write_text(json.dumps({name: played(name) for name in LANDSCAPES}, indent=1) + "\n")
