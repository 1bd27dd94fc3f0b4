"""A fidelity check as it is read on a terminal of 80 columns."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autotune_amp.core.outcome import Fidelity, GradientDamage
from autotune_amp.report.diagnostics import print_fidelity

FIDELITY = Fidelity(
    precision="fp16",
    batch_size=16,
    verdict="unfaithful",
    reason="fp16 is unfaithful: [red]half[/red] of the gradient is lost.",
    next_step="Keep head in fp32.",
    noise_ratio=0.57,
    loss_error=0.001,
    flushed_share=0.91,
    forward_max=70_000.0,
    format_max=65_504.0,
    training_gap=12.0,
    num_paired_steps=8,
    num_skips=3,
    modules=tuple(
        GradientDamage(
            name=name,
            noise_ratio=noise,
            common_error=0.01,
            common_error_interval=(0.0, 0.02),
            cosine=0.9,
            norm_ratio=0.5,
            flushed_share=0.25,
        )
        for name, noise in (("encoder", 0.01), ("head", 0.9), ("", 0.2))
    ),
    culprits=("head",),
    healing_pins=("head",),
    pinned_modules=("norm",),
)
UNCHECKED = Fidelity(precision="bf16", batch_size=1, verdict="unchecked", reason="oom.", next_step="Give more memory.")


def printed(fidelity: Fidelity) -> str:
    console = Console(file=io.StringIO(), width=80)
    with console.capture() as capture:
        print_fidelity(fidelity, console)
    return capture.get()


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("verdict", ["[red]half[/red]"]),
        ("next step", ["Keep head in fp32."]),
        ("noise", ["0.57"]),
        ("flushed", ["91 %"]),
        ("training", ["12.0", "8 paired steps", "3"]),
        ("largest", ["70,000", "65,504"]),
        ("pinned", ["norm in fp32"]),
        ("culprits", ["head"]),
        ("healed by", ["head in fp32"]),
    ],
)
def test_each_number_stands_with_what_it_means(label: str, words: list[str]) -> None:
    text = dict(FIDELITY.facts())[label]
    assert [word for word in words if word not in text] == []
    shown = printed(FIDELITY)
    assert label in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80


def test_the_most_damaged_module_is_first() -> None:
    lines = [line.split() for line in printed(FIDELITY).splitlines()]
    order = [line[0] for line in lines if line and line[0] in ("encoder", "head", "the")]
    assert order == ["head", "the", "encoder"]  # "the model itself"


def test_what_could_not_be_had_is_left_out() -> None:
    assert [label for label, _ in UNCHECKED.facts()] == ["verdict", "next step"]
    assert "unchecked" in printed(UNCHECKED)
