"""The check of each precision on each case of a zoo, over seeds; appends what is missing to raw/checks_<zoo>.jsonl.

Usage: checks.py --zoo healthy|sick|sick_later|held_out|bias|field [--seeds 10] [--device cpu] [--suffix after]
       [--precisions bf16 ...] [--only NAME ...] [--minutes 2]
With --steps-before 300 on weights trained in fp32 for so many steps: raw/later_<zoo>.jsonl.
With --minutes it stops after that time, between two outcomes or in the middle of one, which is then lost; a check gets
30 s, and none looks for the modules responsible.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import signal
import sys
import time
from typing import Any

import common
import msgspec
import torch
from case import Case

from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.fidelity import check
from autotune_amp.numerics.paired_runs import train_in_fp32
from autotune_amp.numerics.passes import CheckInputs

NUM_BATCHES = 8
MAX_SECONDS = 30.0  # of a check where time is short


def precisions(case: Case, device: torch.device) -> list[Precision]:
    """fp32 itself only where low-precision weights make it sick."""
    tried: list[Precision] = ["tf32", "bf16", "fp16"] if device.type == "cuda" else ["bf16", "fp16"]
    return [*tried, "fp32"] if "fp32" in case.sick_in else tried


@functools.lru_cache(maxsize=1)
def prepared(case: Case, seed: int, device: torch.device, num_steps: int) -> CheckInputs:
    """Build the case once for all of its precisions: a check leaves the model as it was."""
    subject = common.subject(case, seed, NUM_BATCHES + num_steps, device)
    train_in_fp32(subject, subject.batches[NUM_BATCHES:])
    return subject


def outcome(
    case: Case, precision: Precision, seed: int, device: torch.device, num_steps: int, is_short: bool
) -> dict[str, Any]:
    """Return the `Fidelity`, or the error that was raised, with the seconds that building and checking took."""
    started = time.perf_counter()
    try:
        subject = prepared(case, seed, device, num_steps)
        built = time.perf_counter()
        seconds = MAX_SECONDS if is_short else math.inf
        found = check(
            subject, precision, batch_size=case.batch_size, num_steps_before=num_steps, seconds=seconds,
            find_pins=not is_short,
        )  # fmt: skip
    except Exception as error:
        return {"error": common.said(error), "seconds": time.perf_counter() - started}
    return {
        "fidelity": msgspec.to_builtins(found),
        "build_seconds": built - started,
        "seconds": time.perf_counter() - started,
    }


def stop_after(minutes: float) -> None:
    """Have this process exit by itself after that time, with status 0."""
    signal.signal(signal.SIGALRM, lambda *_: sys.exit())
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zoo", choices=common.ZOOS, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--suffix", default="", help="for a round after a change: checks_<zoo>_<suffix>.jsonl")
    parser.add_argument("--steps-before", type=int, default=0)
    parser.add_argument("--precisions", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--minutes", type=float)
    options = parser.parse_args()
    is_short = options.minutes is not None
    if is_short:
        stop_after(options.minutes)
    common.quieten()
    device, code = torch.device(options.device), common.code()
    kind, num_steps = "later" if options.steps_before else "checks", options.steps_before
    name = f"{kind}_{options.zoo}{options.suffix and '_' + options.suffix}"
    keys = ("case", "precision", "seed", *(["num_steps"] if num_steps else []))
    raw = common.RawFile(common.raw_path(name, device), keys)
    for case in common.cases(options.zoo, options.only):
        tried = [p for p in precisions(case, device) if not options.precisions or p in options.precisions]
        for seed, precision in itertools.product(range(options.seeds), tried):
            key = {"case": case.name, "precision": precision, "seed": seed}
            key |= {"num_steps": num_steps} if num_steps else {}
            if raw.has(**key):
                continue
            expected = common.expected(case, precision)
            truth = {"expected": expected, "culprit": case.culprit, "is_healable": case.is_healable}
            found = outcome(case, precision, seed, device, num_steps, is_short)
            raw.append({**key, **truth, "code": code, **found})
            verdict = found["fidelity"]["verdict"] if "fidelity" in found else found["error"]
            print(case.name, precision, seed, expected, verdict, f"{found['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
