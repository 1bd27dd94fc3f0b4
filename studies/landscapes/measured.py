"""Landscapes of ten trainings on a real card, fitted to settings that were measured there by hand. Imports no torch.

The settings stand in ../real_card/results/by_hand.jsonl: every precision at two batch sizes, and for bf16 further
dimensions at both. A step takes a + c·b, with a and c of each precision; fp32, which was measured at one size alone,
has tf32's a. What a further dimension gains in bf16 at a
batch size it gains in every precision, between the two sizes in proportion to their logarithm; gains multiply.
Left out is what was not measured by hand: dimensions that a training has no row of, and the seconds of the optimizer
alone, so that every pass of an accumulation window is charged an update.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from closed_form import Shape

from autotune_amp.core.precisions import Precision
from autotune_amp.core.setting import Setting
from autotune_amp.search.options import SearchOptions

BY_HAND = Path(__file__).parents[1] / "real_card" / "results" / "by_hand.jsonl"
CARD = "NVIDIA H200"
PRECISIONS: tuple[Precision, ...] = ("fp32", "tf32", "bf16", "fp16")
# Dense TFLOPS by the card's data sheet, as multiples of fp32's.
MATMUL_RATES: Mapping[Precision, float] = {"fp32": 1.0, "tf32": 7.4, "bf16": 14.8, "fp16": 14.8}
# PyTorch computes convolutions in TF32 unless told otherwise, as the rows in fp32 do. With strict flags a search of
# ResNet-50 on this card measured 796 samples/s, as found 1,785.
STRICT_CONVOLUTION_TIMES = 1785 / 796
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeasuredShape(Shape):
    """A training whose steps, first steps and memory follow what was measured at two batch sizes.

    `value_gains` holds the factor of a step at each size for each value of a further dimension, `first_steps` the
    seconds of the first step at each size by precision and by value; `strict_fp32_times` is how much longer a step
    takes in fp32 with strict flags than as found.
    """

    value_gains: Mapping[str, Mapping[int, float]]
    first_steps: Mapping[str, Mapping[int, float]]
    strict_fp32_times: float = 1.0
    update_seconds: float = 0.0
    held_bytes: float = 0.0
    device: str = "cuda"
    sizes: tuple[int, int] | None = None
    is_as_found_strict: bool = False
    matmul_rates: Mapping[Precision, float] = field(default_factory=lambda: MATMUL_RATES)

    def step_seconds(self, setting: Setting) -> float:
        """Return the seconds of one optimizer step."""
        seconds = self.pass_seconds(setting.precision, setting.batch_size)
        if setting.precision == "fp32" and not setting.as_found:
            seconds *= self.strict_fp32_times
        gains = (_between(self.value_gains[value], setting.batch_size) for value in setting.active_variants.values())
        return setting.accumulation_steps * seconds * math.prod(gains)

    def first_step_seconds(self, setting: Setting) -> float:
        """Return the seconds of a process's first step: the longest that its precision or one of its values took."""
        names = setting.precision, *setting.active_variants.values()
        found = (_between(self.first_steps[name], setting.batch_size) for name in names)
        return max(*found, self.step_seconds(setting))


@cache
def measured_shapes() -> tuple[Shape, ...]:
    """Return every training twice: with its effective batch size kept, and free."""
    lines = [json.loads(line) for line in BY_HAND.read_text().splitlines()]
    header = next(line for line in lines if line["kind"] == "header" and line["device"] == CARD)
    total_mib = int(header["driver_and_memory"].split(",")[1].split()[0])
    limit_bytes = SearchOptions().limit_bytes(total_mib * 2**20)
    by_training: dict[str, list[Row]] = defaultdict(list)
    for line in lines:
        if line["kind"] == "outcome" and line["device"] == CARD:
            by_training[line["training"]].append(line)
    return tuple(
        _shape(name, rows, limit_bytes, is_kept=is_kept)
        for name, rows in by_training.items()
        for is_kept in (True, False)
    )


def _shape(name: str, rows: list[Row], limit_bytes: int, *, is_kept: bool) -> Shape:
    by_key = {(row["setting"], row["batch_size"]): row for row in rows}
    today = min(row["batch_size"] for row in rows)
    plain = {p: {size: row for (label, size), row in by_key.items() if label == p} for p in PRECISIONS}
    times = {p: _line({size: row["step_ms"] / 1000 for size, row in ours.items()}) for p, ours in plain.items()}
    times["fp32"] = _through(times["tf32"][0], today, by_key["fp32", today]["step_ms"] / 1000)
    memory = {p: _line({size: row["peak_reserved_bytes"] for size, row in ours.items()}) for p, ours in plain.items()}
    memory["fp32"] = _through(memory["tf32"][0], today, by_key["fp32", today]["peak_reserved_bytes"])
    first_steps: dict[str, dict[int, float]] = {
        p: {size: row["first_step_seconds"] for size, row in ours.items()} for p, ours in plain.items()
    }
    gains: dict[str, dict[int, float]] = defaultdict(dict)
    variants: dict[str, tuple[str, ...]] = {}
    for row in rows:
        dimension, value, without = _last_change(row)
        if dimension:
            size = row["batch_size"]
            gains[value][size] = row["step_ms"] / by_key[without, size]["step_ms"]
            first_steps.setdefault(value, {})[size] = row["first_step_seconds"]
            variants[dimension] = tuple(dict.fromkeys((*variants.get(dimension, ()), value)))
    has_convolutions = any(row["is_channels_last"] for row in rows)
    return MeasuredShape(
        name=f"{name}, batch {'kept' if is_kept else 'free'}",
        pass_seconds=lambda precision, size: times[precision][0] + times[precision][1] * size,
        pass_bytes=lambda precision, size: memory[precision][0] + memory[precision][1] * size,
        value_gains=gains,
        first_steps=first_steps,
        strict_fp32_times=STRICT_CONVOLUTION_TIMES if has_convolutions else 1.0,
        variants=variants,
        limit_bytes=limit_bytes,
        todays_batch_size=today,
        effective_batch_size=today if is_kept else None,
    )


def _last_change(row: Row) -> tuple[str, str, str]:
    """Return the dimension and the value that a row changes last, and the label of the row without it.

    The dimension is empty for a precision alone, and for what no setting has, or is the product of two others.
    """
    label = row["setting"]
    if row["compile_mode"]:
        return "compile", row["compile_mode"], label[: label.index("+compile")]
    if row["is_fused"] != row["is_channels_last"]:
        if row["is_fused"]:
            return "optimizer_impl", "fused", label.removesuffix("+fused")
        return "memory_format", "channels_last", label.removesuffix("+channels_last")
    return "", "", label


def _line(values: Mapping[int, float]) -> tuple[float, float]:
    """Return a and c of a + c·b through two points, or of the nearest line through the last without a negative one."""
    low, high = min(values), max(values)
    if low == high:
        return _through(0.0, low, values[low])
    slope = max(0.0, (values[high] - values[low]) / (high - low))
    return _through(values[high] - slope * high, high, values[high])


def _through(intercept: float, size: int, value: float) -> tuple[float, float]:
    """Return a and c of the line through a point whose a is the intercept, where neither becomes negative by that."""
    intercept = min(max(0.0, intercept), value)
    return intercept, (value - intercept) / size


def _between(values: Mapping[int, float], size: int) -> float:
    """Return the value at a batch size in proportion to its logarithm, beyond the ends that of the nearest end."""
    low, high = min(values), max(values)
    if low == high:
        return values[low]
    share = min(1.0, max(0.0, math.log(size / low) / math.log(high / low)))
    return math.exp((1 - share) * math.log(values[low]) + share * math.log(values[high]))
