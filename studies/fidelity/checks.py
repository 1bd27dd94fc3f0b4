"""The check of each precision on each case of a zoo, over seeds; appends what is missing to raw/checks_<zoo>.jsonl.

Usage: checks.py --zoo healthy|sick|sick_later|held_out|field [--seeds 10] [--device cpu] [--suffix after]
       [--precisions bf16 ...] [--only NAME ...]
With --steps-before 300 on weights trained in fp32 for so many steps: raw/later_<zoo>.jsonl.
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
from autotune_amp.numerics.paired_runs import train_before

NUM_BATCHES = 8


def precisions(case: Case, device: torch.device) -> list[Precision]:
    """fp32 itself only where low-precision weights make it sick."""
    tried: list[Precision] = ["tf32", "bf16", "fp16"] if device.type == "cuda" else ["bf16", "fp16"]
    return [*tried, "fp32"] if "fp32" in case.sick_in else tried


def outcome(case: Case, precision: Precision, seed: int, device: torch.device, num_steps: int) -> dict[str, Any]:
    """The `Fidelity`, or what was raised."""
    try:
        subject = common.subject(case, seed, NUM_BATCHES + num_steps, device)
        train_before(subject, subject.batches[NUM_BATCHES:])
        found = check(subject, precision, batch_size=case.batch_size, num_steps_before=num_steps)
    except Exception as error:
        return {"error": common.said(error)}
    return {"fidelity": msgspec.to_builtins(found)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zoo", choices=common.ZOOS, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--suffix", default="", help="for a round after a change: checks_<zoo>_<suffix>.jsonl")
    parser.add_argument("--steps-before", type=int, default=0)
    parser.add_argument("--precisions", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    common.quieten()
    device, code = torch.device(options.device), common.code()
    kind, num_steps = "later" if options.steps_before else "checks", options.steps_before
    name = f"{kind}_{options.zoo}{options.suffix and '_' + options.suffix}"
    keys = ("case", "precision", "seed", *(["num_steps"] if num_steps else []))
    raw = common.RawFile(common.raw_path(name, device), keys)
    for case in common.cases(options.zoo, options.only):
        for precision in precisions(case, device):
            if options.precisions and precision not in options.precisions:
                continue
            expected = common.expected(case, precision)
            truth = {"expected": expected, "culprit": case.culprit, "is_healable": case.is_healable}
            for seed in range(options.seeds):
                key = {"case": case.name, "precision": precision, "seed": seed}
                key |= {"num_steps": num_steps} if num_steps else {}
                if raw.has(**key):
                    continue
                found = outcome(case, precision, seed, device, num_steps)
                raw.append({**key, **truth, "code": code, **found})
                verdict = found["fidelity"]["verdict"] if "fidelity" in found else found["error"]
                print(case.name, precision, seed, expected, verdict, flush=True)


if __name__ == "__main__":
    main()
