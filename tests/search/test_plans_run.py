"""What a search plans to step down to is what the runtime can make of the chosen config's own loader."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from scripted_backend import accumulation
from test_decide import Log, at, decided

from autotune_amp.core.precisions import Precision
from autotune_amp.runtime.controller import PrecisionController

LOWER: tuple[Precision, ...] = ("bf16", "fp32")


@given(
    batch_size=st.integers(1, 24),
    accumulation_steps=st.integers(1, 4),
    speeds=st.randoms(use_true_random=False),
    is_exact=st.booleans(),
)
def test_every_plan_can_be_stepped_down_to(
    batch_size: int, accumulation_steps: int, speeds: Random, is_exact: bool
) -> None:
    """Whatever else of the same effective batch the search measured, and found faster."""
    whole = batch_size * accumulation_steps
    log = Log().add(at("fp16", batch_size, accumulation_steps=accumulation_steps), 1000.0)
    baseline = at("fp32", batch_size, accumulation_steps=accumulation_steps)
    for size in (n for n in range(1, whole + 1) if whole % n == 0):
        for precision in LOWER:
            log.add(at(precision, size, accumulation_steps=whole // size), speeds.uniform(1.0, 500.0))
    if is_exact:
        log.add(at("fp32", whole), accumulation(), "accumulation")
    config = decided(log, baseline).config
    assert (config.precision, config.batch_size) == ("fp16", batch_size)
    assert [plan.precision for plan in config.plans] == list(LOWER)
    loader = [torch.ones(batch_size, 1)] * (2 * accumulation_steps)
    for plan in config.plans:
        assert is_exact or plan.accumulation_steps == accumulation_steps
        controller = PrecisionController(config, device="cpu")
        controller.set_precision(plan.precision)
        passes = list(controller.windows(loader))
        assert {len(batch) for batch, _ in passes} == {plan.batch_size}
        assert [is_last for _, is_last in passes] == 2 * ([False] * (plan.accumulation_steps - 1) + [True])
