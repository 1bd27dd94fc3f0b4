"""The calibrated loss scale against brute force and against GradScaler's default; appends to raw/loss_scales.jsonl.

Usage: loss_scales.py [--zoo healthy sick] [--device cpu] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import common
import msgspec
import torch
from case import Case
from training import train

from autotune_amp.core.config import LossScale
from autotune_amp.core.outcome import Calibration
from autotune_amp.numerics.calibration import calibrate
from autotune_amp.numerics.passes import CheckInputs, Passes
from autotune_amp.numerics.scaler_replay import extend_trace, skipped_steps

NUM_BATCHES = 12  # of the calibration
NUM_REAL_STEPS = 100
NUM_BRUTE_STEPS = 4
BRUTE_EXPONENTS = range(-15, 25)  # up to 2^24, above which no init_scale is recommended
DEFAULT_SCALE = 2.0**16


def brute_steps(log2_scales: Sequence[float | None]) -> list[int]:
    """The first and the last step, and those with the least S*: a wrong answer there is a wrong init_scale."""
    rising = sorted(range(len(log2_scales)), key=lambda step: _number(log2_scales[step]))
    return sorted(list(dict.fromkeys((0, len(log2_scales) - 1, *rising)))[:NUM_BRUTE_STEPS])


def brute_force(subject: CheckInputs, log2_scales: Sequence[float | None]) -> dict[int, int | None]:
    """At each of `brute_steps` of the same stretch the largest exponent at which a real pass stays finite, of all that
    are tried; None where none is.
    """
    passes = Passes(subject)
    optimizer = subject.make_optimizer(passes.model)
    wanted = brute_steps(log2_scales)
    found: dict[int, int | None] = {}
    for step, log2_scale in enumerate(log2_scales):
        if step in wanted:
            finite = [e for e in BRUTE_EXPONENTS if passes.run(step, "fp16", scale=2.0**e).is_finite]
            found[step] = max(finite, default=None)
        if log2_scale is None:
            continue
        done = passes.run(step, "fp16", scale=2.0 ** math.floor(log2_scale - 1))
        passes.step(optimizer, done.gradients)
        passes.keep()
    return found


def foretold(calibration: Calibration, init_scale: float) -> int:
    """Skips that the replay of the calibrated S*(t), extended to the real steps without a burst, counts."""
    trace = extend_trace([_number(s) for s in calibration.log2_scales], NUM_REAL_STEPS, num_burst_steps=0)
    return len(skipped_steps(trace, LossScale(init_scale=init_scale)))


def outcome(case: Case, seed: int, device: torch.device) -> dict[str, Any]:
    started = time.perf_counter()
    subject = common.subject(case, seed, NUM_REAL_STEPS, device)
    stretch = replace(subject, batches=subject.batches[:NUM_BATCHES])
    try:
        calibration = calibrate(stretch, batch_size=case.batch_size)
    except Exception as error:
        return {"error": common.said(error)}
    row: dict[str, Any] = {"calibration": msgspec.to_builtins(calibration)}
    row["brute"] = brute_force(common.subject(case, seed, NUM_BATCHES, device), calibration.log2_scales)
    for name, scale in (("calibrated", calibration.init_scale), ("default", DEFAULT_SCALE)):
        if scale is not None:
            row[f"{name}_foretold"] = foretold(calibration, scale)
            try:
                run = train(subject, "fp16", NUM_REAL_STEPS, init_scale=scale)
            except Exception as error:  # GradScaler refuses gradients in fp16
                row[f"{name}_error"] = common.said(error)
            else:
                row[f"{name}_skips"], row[f"{name}_is_finite"] = run.num_skips, run.is_finite
    return {**row, "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--zoo", nargs="*", choices=common.ZOOS, default=["healthy", "sick"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    common.quieten()
    device = torch.device(options.device)
    raw = common.RawFile(common.raw_path("loss_scales", device), ("case", "seed"))
    for zoo in options.zoo:
        for case in common.cases(zoo, options.only):
            key = {"case": case.name, "seed": 0}
            if not raw.has(**key):
                row = {**key, "zoo": zoo, "expected": common.expected(case, "fp16"), "code": common.code()}
                row |= outcome(case, 0, device)
                raw.append(row)
                print({name: value for name, value in row.items() if name != "calibration"}, flush=True)


def _number(log2_scale: float | None) -> float:
    return -math.inf if log2_scale is None else log2_scale


if __name__ == "__main__":
    main()
