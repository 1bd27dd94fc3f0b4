"""What the rules say breaks in half precision does, on this machine, and with the message that the rule knows."""

from __future__ import annotations

from collections.abc import Callable

import check_samples
import pytest
import torch
from torch import nn

from autotune_amp.precision import rules


def raises(function: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        function()
    return str(caught.value)


HALF = torch.eye(16, dtype=torch.float16)


@pytest.mark.parametrize(
    ("rule", "breaking"),
    [
        (rules.LARGE_CONSTANT, lambda: check_samples.masks_far(HALF + 1)),
        (rules.MIXED_OPERANDS, lambda: check_samples.puts_half_into_fp32(HALF)),
        (rules.MIXED_OPERANDS, lambda: check_samples.scatters_half_into_fp32(HALF)),
        (rules.MIXED_OPERANDS, lambda: HALF @ check_samples.WEIGHT),
        (rules.LINEAR_ALGEBRA, lambda: check_samples.factorises(HALF)),
        (rules.LINEAR_ALGEBRA, lambda: check_samples.inverts(HALF)),
        (rules.LINEAR_ALGEBRA, lambda: torch.linalg.eigh(HALF)),
        (rules.LINEAR_ALGEBRA, lambda: torch.linalg.svd(HALF)),
        (rules.LINEAR_ALGEBRA, lambda: torch.linalg.qr(HALF)),
        (rules.LINEAR_ALGEBRA, lambda: torch.linalg.pinv(HALF)),
    ],
)
def test_what_breaks_raises_in_half_precision_and_its_message_has_the_rule(
    rule: rules.Rule, breaking: Callable[[], object]
) -> None:
    assert rules.rule_of(raises(breaking)) is rule


def test_a_function_without_its_decorators_breaks_under_the_cpus_own_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = check_samples.calls_product(nn.Linear(16, 16)(torch.randn(4, 16)))
    assert rules.rule_of(raises(out.float().sum().backward)) is rules.MIXED_OPERANDS


def test_what_only_hurts_loses_the_number() -> None:
    zeros = torch.zeros(4, dtype=torch.float16)
    assert check_samples.guards_with_little(zeros).isnan().all()
    assert not check_samples.guards_with_enough(zeros).isnan().any()
    assert (torch.full((4,), 2.0, dtype=torch.float16) - 1e9).isinf().all()


def test_a_scaler_refuses_half_weights() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="FP16") as caught:
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    assert rules.rule_of(str(caught.value)) is rules.WEIGHTS
