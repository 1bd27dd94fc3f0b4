"""The check of each precision on each case of a zoo, over seeds; appends what is missing to raw/checks_<zoo>.jsonl.

Usage: checks.py --zoo healthy|sick|held_out [--seeds 10] [--device cpu] [--suffix after] [--only NAME ...]
"""

from __future__ import annotations

import argparse
from typing import Any

import common
import msgspec
import torch
from case import Case

from autotune_amp.core.dimensions import Precision
from autotune_amp.numerics.fidelity import check

NUM_BATCHES = 8


def precisions(case: Case, device: torch.device) -> list[Precision]:
    """fp32 itself only where low-precision weights make it sick."""
    tried: list[Precision] = ["tf32", "bf16", "fp16"] if device.type == "cuda" else ["bf16", "fp16"]
    return [*tried, "fp32"] if "fp32" in case.sick_in else tried


def outcome(case: Case, precision: Precision, seed: int, device: torch.device) -> dict[str, Any]:
    """The `Fidelity`, or what was raised."""
    try:
        found = check(common.subject(case, seed, NUM_BATCHES, device), precision, batch_size=case.batch_size)
    except Exception as error:
        return {"error": common.said(error)}
    return {"fidelity": msgspec.to_builtins(found)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zoo", choices=common.ZOOS, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--suffix", default="", help="for a round after a change: checks_<zoo>_<suffix>.jsonl")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    common.quieten()
    device, code = torch.device(options.device), common.code()
    name = f"checks_{options.zoo}{options.suffix and '_' + options.suffix}"
    raw = common.RawFile(common.raw_path(name, device), ("case", "precision", "seed"))
    for case in common.cases(options.zoo, options.only):
        for precision in precisions(case, device):
            expected = common.expected(case, precision)
            truth = {"expected": expected, "culprit": case.culprit, "is_healable": case.is_healable}
            for seed in range(options.seeds):
                key = {"case": case.name, "precision": precision, "seed": seed}
                if raw.has(**key):
                    continue
                found = outcome(case, precision, seed, device)
                raw.append({**key, **truth, "code": code, **found})
                verdict = found["fidelity"]["verdict"] if "fidelity" in found else found["error"]
                print(case.name, precision, seed, expected, verdict, flush=True)


if __name__ == "__main__":
    main()
