"""A profile as it is read: in words, and on a terminal of 80 columns."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from autotune_amp.diagnostics.profile_amp import AmpProfile, PrecisionRow
from autotune_amp.report.diagnostics import print_profile
from autotune_amp.trial.step_profile.breakdown import NextStep, Part, StepBreakdown


def part(name: Any, share: float, spread: tuple[float, float] | None = None, **more: Any) -> Part:
    return Part(name=name, seconds=share / 10, share=share, share_range=spread or (share, share), **more)


PARTS = (
    part("matrix_products", 0.1),
    part("slow_matrix_products", 0.3),
    part("fp32_operations", 0.5, (0.46, 0.52), largest=("_softmax", "native_layer_norm")),
    part("rest", 0.1),
)
GAP = StepBreakdown(
    machine_flops_per_second=4e12, attained_flops_per_second=4e11, flops_per_step=40_000_000_000, parts=PARTS
)
BF16: dict[str, Any] = {"precision": "bf16"}
PROFILE = AmpProfile(
    workload="train.py:workload",
    device="cuda:0",
    device_name="A card",
    batch_size=32,
    accumulation_steps=1,
    num_batches=10,
    rows=(
        PrecisionRow(precision="fp32", step_seconds=0.13, num_steps=10, peak_memory_bytes=2**30, gap=GAP),
        PrecisionRow(
            precision="bf16",
            step_seconds=0.1,
            num_steps=10,
            step_seconds_interval=(0.09, 0.11),
            speedup=1.3,
            speedup_interval=(1.15, 1.4),
            verdict="significant",
            verdicts=("modest", "significant"),
            peak_memory_bytes=2**29,
            gap=GAP,
        ),
        PrecisionRow(precision="fp16", speedup=0.1, verdict="slower", was_cut=True, reason="cut: 10 times slower"),
        PrecisionRow(precision="tf32", failure="oom", reason="it took [red]all[/red] there is"),
    ),
    best_precision="bf16",
    speedup=1.3,
    verdict="significant",
    next_steps=(
        NextStep(
            **BF16,
            part="fp32_operations",
            share=0.5,
            share_range=(0.46, 0.52),
            max_speedup=2.0,
            dimensions=("compile",),
        ),
        NextStep(
            **BF16,
            part="optimizer",
            share=0.1,
            share_range=(0.1, 0.1),
            max_speedup=1.11,
            dimensions=("optimizer_impl", "batch_size"),
        ),
    ),
    notes=("Something was assumed.",),
    trace="/tmp/trace.json",
)


def printed(profile: AmpProfile, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        print_profile(profile, console)
    return capture.get()


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("train.py:workload: ", ["10 steps of 32 samples", "cuda:0 (A card)"]),
        ("bf16: ", ["100 ms", "1.30x (1.15 to 1.40)", "512 MiB", "modest to significant"]),
        ("fp16: ", ["<= 0.1x", "cut"]),
        ("tf32: ", ["out of memory", "[red]all[/red]"]),
        ("verdict: ", ["bf16, 1.30x (1.15 to 1.40)", "significant", "modest to significant"]),
        ("rate: bf16: ", ["4.00 TFLOP/s by the machine", "400 GFLOP/s by a step", "10 %"]),
        ("gap: bf16: ", ["50 % (46 to 52) operations kept in fp32 (_softmax", "30 % matrix", "10 % rest"]),
        ("next step: operations", ["kept in fp32, 50 % (46 to 52)", "compile", "at most 2.00x"]),
        ("note: ", ["Something was assumed."]),
    ],
)
def test_in_words_and_on_a_terminal_of_80_columns(start: str, words: list[str]) -> None:
    (line,) = [line for line in PROFILE.explain().splitlines() if line.startswith(start)]
    assert [word for word in words if word not in line] == []
    shown = printed(PROFILE)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert words[-1].split()[0] in shown


def test_where_nothing_could_be_compared_it_says_why() -> None:
    alone = PrecisionRow(precision="fp32", step_seconds=0.13, peak_memory_bytes=2**30)
    lacking = PrecisionRow(precision="bf16", reason="the card has none")
    found = msgspec.structs.replace(
        PROFILE, rows=(alone, lacking), best_precision=None, speedup=None, verdict=None, next_steps=(), trace=None
    )
    assert "none: bf16: the card has none" in found.explain()
    assert found.gap is None
    assert found.next_step is None
    assert "the card has none" in printed(found)
