"""What rounding leaves of an optimizer step on weights in half precision."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from autotune_amp.core.fidelity import LowWeights
from autotune_amp.numerics.comparison import lost_updates


class Weights(nn.Module):
    def __init__(self, values: Tensor, *, requires_grad: bool = True) -> None:
        super().__init__()
        self.w = nn.Parameter(values, requires_grad=requires_grad)


def after(weights: Tensor, updates: Tensor) -> LowWeights | None:
    exact = weights.float()
    return lost_updates(Weights(weights), {"w": exact}, {"w": exact + updates})


@pytest.mark.parametrize(("lr", "lost"), [(1e-5, 0.84), (1e-4, 0.12)])
def test_the_figures_of_adam_sized_steps_on_bf16_weights_of_spread_0_02(lr: float, lost: float) -> None:
    torch.manual_seed(0)
    weights = (0.02 * torch.randn(200_000)).bfloat16()
    found = after(weights, lr * torch.randint(0, 2, (200_000,)).mul(2).sub(1))
    assert found is not None
    assert found.weights == "bf16"
    assert found.lost_share == pytest.approx(lost, abs=0.03)


def test_a_mask_of_minus_infinity_and_a_step_past_the_end_of_the_format_do_not_count() -> None:
    weights = torch.tensor([-math.inf, 1.0, 1.0], dtype=torch.float16)
    found = after(weights, torch.tensor([0.0, 1e6, 2.0**-3]))
    assert found is not None
    assert (found.lost_share, found.applied_share, found.stochastic_noise) == (0.0, 1.0, 0.0)


def test_by_hand() -> None:
    # bf16 steps by 2^-7 from 1 on and by 2^-8 below it: the first update is lost, the second rounds up to a whole step.
    step = 2.0**-7
    found = after(torch.tensor([1.0, 1.0, 1.0], dtype=torch.bfloat16), torch.tensor([0.25, 0.75, 0.0]) * step)
    assert found is not None
    assert found.lost_share == 0.5  # of the two that move at all
    assert found.applied_share == pytest.approx(0.75 / (0.25**2 + 0.75**2))
    assert found.stochastic_noise == pytest.approx(math.sqrt((0.25 * 0.75 + 0.75 * 0.25) / (0.25**2 + 0.75**2)))


def test_updates_that_the_format_holds_are_applied_whole_and_without_noise() -> None:
    found = after(torch.ones(4, dtype=torch.bfloat16), torch.full((4,), 2.0**-7))
    assert found == LowWeights(weights="bf16", lost_share=0.0, applied_share=1.0, stochastic_noise=0.0)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_stochastic_rounding_has_the_noise_that_is_said(dtype: torch.dtype, name: Literal["bf16", "fp16"]) -> None:
    torch.manual_seed(1)
    weights = torch.randn(20_000).to(dtype)
    updates = 1e-3 * torch.randn(20_000)
    found = after(weights, updates)
    exact = weights.float() + updates
    nearest = exact.to(dtype)
    other = torch.nextafter(nearest, torch.where(exact > nearest.float(), math.inf, -math.inf).to(dtype))
    distance = (other.float() - nearest.float()).abs()
    takes_other = torch.rand(20_000) < (exact - nearest.float()).abs() / distance
    noise = torch.linalg.vector_norm(torch.where(takes_other, other, nearest).float() - exact)
    assert found is not None
    assert found.weights == name
    assert found.stochastic_noise == pytest.approx(float(noise / torch.linalg.vector_norm(updates)), rel=0.05)


def test_nothing_where_no_trainable_weight_is_in_half_precision_or_none_moves() -> None:
    half, one = torch.ones(2).bfloat16(), {"w": torch.ones(2)}
    assert lost_updates(Weights(torch.ones(2)), one, {"w": torch.full((2,), 2.0)}) is None
    assert lost_updates(Weights(half, requires_grad=False), one, {"w": torch.full((2,), 2.0)}) is None
    assert lost_updates(Weights(half), one, one) is None
