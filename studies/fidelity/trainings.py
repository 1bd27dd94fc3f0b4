"""What training really does in a precision, beside what the check says of it; appends to raw/trainings_*.jsonl.

Usage: trainings.py --zoo healthy|sick|sick_later|held_out|bias|field [--steps 500] [--seeds 1] [--device cpu]
       [--precisions bf16 ...] [--only NAME ...]
       trainings.py --long [--minutes 4] [--device cpu] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import common
import torch
from case import Case
from checks import precisions
from training import Trained, train

from autotune_amp.core.precisions import Precision
from autotune_amp.numerics.calibration import calibrate
from autotune_amp.precision.forward_wrapper import has_half_weights
from autotune_amp.precision.modes import MODES

LONG = ("gpt2", "resnet", "bert_classes", "large_offset", "t5_feed_forward")  # the last two are sick
MAX_LONG_STEPS = 5000
NUM_PERTURBED = 2
NUM_CALIBRATION_BATCHES = 12
UNCALIBRATED_SCALE = 2.0**12
MAX_DISTANCES = 3.0  # times the largest distance among the fp32 runs
MIN_EXCESS = 0.02  # of the loss's fall in fp32


class Judged(NamedTuple):
    """Whether training was harmed, and by what measure; `excess` is over fp32's fall, None where not finite."""

    is_harmed: bool
    why: str
    excess: float | None


def judge(low: Trained, fp32: Trained, perturbed: list[Trained]) -> Judged:
    if not low.is_finite:
        return Judged(True, "not finite", None)
    if low.num_skips == low.num_steps:
        return Judged(True, "every step skipped", None)
    tails = [fp32.tail, *(run.tail for run in perturbed)]
    distance = max(tails) - min(tails)
    excess, fall = low.tail - fp32.tail, abs(fp32.first - fp32.tail)
    is_harmed = excess > MAX_DISTANCES * distance and excess > MIN_EXCESS * fall
    share = excess / fall if fall else 0.0
    return Judged(is_harmed, "worse than fp32" if is_harmed else "as fp32", share)


class Trainings:
    """All trainings of one case, on the same batches and draws; those in fp32 once."""

    def __init__(self, case: Case, seed: int, num_steps: int, device: torch.device) -> None:
        self._subject = common.subject(case, seed, num_steps, device)
        self._batch_size, self._num_steps = case.batch_size, num_steps
        self._has_half_weights = has_half_weights(self._subject.model)

    @functools.cached_property
    def fp32(self) -> Trained:
        return self._in_fp32(0.0, 0)

    @functools.cache  # noqa: B019 - lives as long as the case
    def perturbed(self, precision: Precision) -> list[Trained]:
        """fp32 from first weights that are moved by one rounding of the precision."""
        return [self._in_fp32(MODES[precision].unit_roundoff, seed) for seed in range(1, NUM_PERTURBED + 1)]

    def row(self, precision: Precision, pinned_modules: tuple[str, ...] = ()) -> dict[str, Any]:
        started = time.perf_counter()
        scale = self._init_scale(pinned_modules) if precision == "fp16" else None
        low = train(self._subject, precision, self._num_steps, init_scale=scale or 1.0, pinned_modules=pinned_modules)
        perturbed = self.perturbed(precision)
        return {
            "judged": judge(low, self.fp32, perturbed)._asdict(),
            "low": low._asdict(),
            "fp32": self.fp32._asdict(),
            "perturbed_tails": [run.tail for run in perturbed],
            "init_scale": scale,
            "seconds": time.perf_counter() - started,
        }

    def _in_fp32(self, perturbation: float, seed: int) -> Trained:
        return train(
            self._subject, "fp32", self._num_steps, perturbation=perturbation, seed=seed,
            with_fp32_weights=self._has_half_weights,
        )  # fmt: skip

    def _init_scale(self, pinned_modules: tuple[str, ...]) -> float:
        stretch = replace(self._subject, batches=self._subject.batches[:NUM_CALIBRATION_BATCHES])
        found = calibrate(stretch, batch_size=self._batch_size, pinned_modules=pinned_modules).init_scale
        return UNCALIBRATED_SCALE if found is None else found


@functools.lru_cache(maxsize=1)
def trainings_of(case: Case, seed: int, num_steps: int, device: torch.device) -> Trainings:
    """The latest: what fp32 does serves all precisions."""
    return Trainings(case, seed, num_steps, device)


def pins_to_try(case: Case, precision: Precision, zoo: str, device: torch.device) -> list[tuple[str, ...]]:
    """None, and those that the check of seed 0 found to heal it."""
    for row in common.read(common.raw_path(f"checks_{zoo}", device)):
        if (row["case"], row["precision"], row["seed"]) == (case.name, precision, 0) and "fidelity" in row:
            healing = tuple(row["fidelity"]["healing_pins"])
            return [(), healing] if healing else [()]
    return [()]


def affordable_steps(case: Case, minutes: float, device: torch.device) -> int:
    """As many as the slowest precision takes in that time, in hundreds."""
    num_tried, slowest = 5, 0.0
    subject = common.subject(case, 0, num_tried, device)
    for precision in precisions(case, device):
        train(subject, precision, 1)
        started = time.perf_counter()
        train(subject, precision, num_tried)
        slowest = max(slowest, (time.perf_counter() - started) / num_tried)
    return min(MAX_LONG_STEPS, max(100, int(60 * minutes / slowest) // 100 * 100))


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    if not options.long:
        yield from ((options.zoo, case) for case in common.cases(options.zoo, options.only))
        return
    for zoo in ("healthy", "sick"):
        yield from ((zoo, case) for case in common.cases(zoo, [n for n in LONG if n in (options.only or LONG)]))


def main() -> None:
    parser = argparse.ArgumentParser()
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--zoo", choices=common.ZOOS)
    which.add_argument("--long", action="store_true")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--precisions", nargs="*", default=[])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    common.quieten()
    device = torch.device(options.device)
    name = "trainings_long" if options.long else f"trainings_{options.zoo}"
    raw = common.RawFile(common.raw_path(name, device), ("case", "precision", "seed", "pinned_modules"))
    for zoo, case in wanted(options):
        num_steps = affordable_steps(case, options.minutes, device) if options.long else options.steps
        for seed, precision in itertools.product(range(options.seeds), precisions(case, device)):
            if options.precisions and precision not in options.precisions:
                continue
            trainings = trainings_of(case, seed, num_steps, device)
            for pins in pins_to_try(case, precision, zoo, device):
                key = {"case": case.name, "precision": precision, "seed": seed, "pinned_modules": list(pins)}
                if raw.has(**key):
                    continue
                try:
                    found = trainings.row(precision, pins)
                except Exception as error:  # what this precision cannot run
                    found = {"error": common.said(error)}
                expected = common.expected(case, precision)
                raw.append({**key, "zoo": zoo, "expected": expected, "num_steps": num_steps, **found})
                print(case.name, precision, seed, pins, expected, found.get("judged", found), flush=True)


if __name__ == "__main__":
    main()
