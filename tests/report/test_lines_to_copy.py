"""The lines that a result tells people to copy, run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from report_samples import evidence, recommendation
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autotune_amp
from autotune_amp.core.config import AmpConfig, FallbackPlan, LossScale
from autotune_amp.core.outcome import Accumulation, AccumulationVerdict
from autotune_amp.core.precisions import Precision
from autotune_amp.report.rows import python_lines


@pytest.mark.parametrize("accumulation_steps", [1, 4])
@pytest.mark.parametrize(("precision", "pinned_modules"), [("fp32", ()), ("bf16", ("1",)), ("fp16", ())])
def test_the_lines_to_copy_train(
    precision: Precision, pinned_modules: tuple[str, ...], accumulation_steps: int, tmp_path: Path
) -> None:
    fallback = [FallbackPlan(precision="fp32", batch_size=2, accumulation_steps=2 * accumulation_steps)]
    config = AmpConfig(
        precision=precision,
        batch_size=4,
        accumulation_steps=accumulation_steps,
        loss_scale=LossScale(init_scale=2.0**-20) if precision == "fp16" else None,
        fallback=fallback if precision == "fp16" else [],
        pinned_modules=pinned_modules,
    )
    shown = recommendation(config=config)
    shown.save(tmp_path / "recommendation.json")
    controller = pasted(python_lines(shown, str(tmp_path / "recommendation.json")))["controller"]
    found, num_steps = controller.status(), math.ceil(24 / 4 / accumulation_steps)
    assert (found.precision, found.pinned_modules, found.num_steps) == (precision, pinned_modules, num_steps)
    assert controller.config.loss_scale == config.loss_scale


@pytest.mark.parametrize("verdict", ["mean", "sum", "weighted"])
def test_the_lines_to_copy_step_as_the_whole_batch_would(verdict: AccumulationVerdict, tmp_path: Path) -> None:
    found = Accumulation(
        verdict=verdict, reason="r", next_step="n", batch_size=4, num_micro_batches=3, weighted_by="labels != -100"
    )
    config = AmpConfig(precision="fp32", batch_size=4, accumulation_steps=3)
    shown = recommendation(config=config, evidence=evidence(accumulation=found))
    shown.save(tmp_path / "recommendation.json")
    reduction = "sum" if verdict == "sum" else "mean"
    lines = python_lines(shown, str(tmp_path / "recommendation.json"))
    ran = pasted(lines, reduction=reduction, num_ignored=3 if verdict == "weighted" else 0)
    whole = pasted(
        [
            "for batch in DataLoader(dataset, 12):",
            "    compute_loss(model, batch).backward()",
            "    optimizer.step()",
            "    optimizer.zero_grad()",
        ],
        reduction=reduction,
        num_ignored=3 if verdict == "weighted" else 0,
    )
    for ours, theirs in zip(ran["model"].parameters(), whole["model"].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    said = [f"accumulation: {verdict} by labels != -100", "# Define count(batch) for a batch: labels != -100"]
    assert [line in [*lines, *shown.explain().splitlines()] for line in said] == [True, verdict == "weighted"]


def pasted(lines: list[str], reduction: str = "mean", num_ignored: int = 0) -> dict[str, Any]:
    """The lines, run in a script that has what they leave to it; 24 samples, of which the first have no label."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    labels = torch.randint(2, (24,))
    labels[:num_ignored] = -100
    dataset = TensorDataset(torch.randn(24, 3), labels)

    def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    names = {
        "torch": torch,
        "autotune_amp": autotune_amp,
        "DataLoader": DataLoader,
        "dataset": dataset,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "compute_loss": compute_loss,
        "count": lambda batch: (batch[1] != -100).sum(),
        "batch": dataset[:4],
    }
    exec("\n".join(lines), names)
    return names
