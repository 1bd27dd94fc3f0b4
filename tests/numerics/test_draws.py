"""Draws made alike: dropout taken out wherever it is, and noise in half precision drawn in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from subjects import subject
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autotune_amp.numerics.draws import Fp32RandomMode, comparable_draws, without_dropout
from autotune_amp.numerics.fidelity import check

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Drops(nn.Module):
    """In every way that torch knows; `once` is its forward pass computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lstm = nn.TransformerEncoderLayer(8, 2, 16, 0.5), nn.LSTM(8, 8, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        p = 0.5 if self.training else 0.0
        x = functional.dropout2d(functional.feature_alpha_dropout(x, p, self.training), p=p, training=self.training)
        x = functional.scaled_dot_product_attention(x, x, x, None, p)
        x = functional.scaled_dot_product_attention(x, x, x, dropout_p=p)
        out: Tensor = self.lstm(self.layer(functional.dropout(x[0], p, self.training)))[0]
        return out


@pytest.mark.parametrize("wrap", [None, False, True])
def test_dropout_taken_out_drops_nothing_also_where_a_checkpoint_computes_again(wrap: bool | None) -> None:
    torch.manual_seed(0)
    model = Drops()

    def gradient(*, are_alike: bool) -> Tensor:
        x = X.clone().requires_grad_()
        with comparable_draws(model, are_alike=are_alike):
            out = model(x) if wrap is None else checkpoint(model, x, use_reentrant=wrap)
            out.square().sum().backward()
        assert x.grad is not None
        return x.grad

    before = vars(functional).copy()
    with pytest.raises(KeyError), comparable_draws(model, are_alike=False):
        raise KeyError
    assert (vars(functional), model.lstm.dropout) == (before, 0.5), "put back where a pass raises, too"
    plain = gradient(are_alike=False)
    assert not torch.allclose(gradient(are_alike=True), plain, rtol=0.1), "one seed gives the same draws on a CPU"
    torch.testing.assert_close(gradient(are_alike=False), plain)
    model.eval()
    torch.testing.assert_close(gradient(are_alike=True), plain)


def test_dropout_is_taken_out_of_compiled_code_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(4, 8)
    compiled(x)
    with without_dropout(model):
        assert torch.equal(compiled(x), model[0](x))
    assert not torch.equal(compiled(x), model[0](x))
    torch._dynamo.reset()


# -- noise in half precision -------------------------------------------------------------------------------------------


def empty(dtype: torch.dtype) -> Tensor:
    return torch.empty(1000, dtype=dtype)


DRAWS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "randn": lambda dtype: torch.randn(1000, dtype=dtype),
    "randn_like": lambda dtype: torch.randn_like(empty(dtype)),
    "rand": lambda dtype: torch.rand(1000, dtype=dtype),
    "rand_like": lambda dtype: torch.rand_like(empty(torch.float32), dtype=dtype),
    "normal_": lambda dtype: empty(dtype).normal_(1.0, 2.0),
    "normal": lambda dtype: torch.normal(torch.zeros(1000, dtype=dtype), torch.ones(1000, dtype=dtype)),
    "uniform_": lambda dtype: empty(dtype).uniform_(-2.0, 3.0),
    "exponential_": lambda dtype: empty(dtype).exponential_(),
    "bernoulli_": lambda dtype: empty(dtype).bernoulli_(0.3),
    "randint": lambda dtype: torch.randint(0, 100, (1000,), dtype=dtype),
    "multinomial": lambda dtype: torch.multinomial(torch.ones(1000, dtype=dtype), 500),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DRAWS)
def test_half_precision_gets_the_numbers_of_fp32_and_what_follows_does_too(name: str, dtype: torch.dtype) -> None:
    def drawn(of: torch.dtype) -> tuple[Tensor, Tensor]:
        torch.manual_seed(7)
        return DRAWS[name](of), torch.rand(3)

    expected, follows = drawn(torch.float32)
    with Fp32RandomMode() as counted:
        found, then = drawn(dtype)
        assert counted.num_drawn == 1
        torch.testing.assert_close(drawn(torch.float32)[0], expected, rtol=0, atol=0)
        assert counted.num_drawn == 1, "fp32 draws as ever"
    assert found.dtype == (dtype if name != "multinomial" else torch.int64)
    torch.testing.assert_close(found.float(), expected.float(), rtol=torch.finfo(dtype).eps, atol=0)
    torch.testing.assert_close(then, follows, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_end_of_a_range_is_not_rounded_to(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with Fp32RandomMode():
        assert torch.rand(100_000, dtype=dtype).max() < 1
        assert torch.empty(100_000, dtype=dtype).uniform_(2.0, 8.0).max() < 8
        assert torch.empty(100_000, dtype=dtype).uniform_(-8.0, -2.0).max() < -2


class Latent(nn.Module):
    """Draws its noise in the precision of what it has computed, then drops out: 8 x 5 numbers are no groups of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 5), nn.Sequential(nn.Linear(5, 32), nn.Dropout(0.3), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.encode(x)
        out: Tensor = self.decode(mean + self.noise(mean))
        return out

    def noise(self, mean: Tensor) -> Tensor:
        return 0.5 * torch.randn_like(mean)


class Gumbel(Latent):
    """What it takes the logarithm of rounds to 0, whatever the draws."""

    def noise(self, mean: Tensor) -> Tensor:
        return torch.log(1 - (1 - 1e-4 * (1 + torch.rand_like(mean))))


@pytest.mark.parametrize(("made", "verdict"), [(Latent, "faithful"), (Gumbel, "unfaithful")])
def test_other_draws_alone_are_no_harm_and_are_named(made: type[nn.Module], verdict: str) -> None:
    torch.manual_seed(0)
    found = check(subject(made()), "bf16", batch_size=8, find_pins=False)
    assert (found.verdict, "random numbers" in found.reason) == (verdict, True)


def test_what_draws_in_half_precision_in_fp32_too_is_left_alone() -> None:
    class Sick(Latent):
        def noise(self, mean: Tensor) -> Tensor:
            drawn = 0.5 * torch.randn(mean.shape, dtype=torch.bfloat16)
            return torch.log(1 - (1 - 1e-4 * (1 + drawn.to(mean.dtype).abs())))

    torch.manual_seed(0)
    found = check(subject(Sick()), "bf16", batch_size=8, find_pins=False)
    assert (found.verdict, "random numbers" in found.reason) == ("unfaithful", False)


def test_code_that_cannot_be_run_so_keeps_its_verdict() -> None:
    class Refuses(Latent):
        def noise(self, mean: Tensor) -> Tensor:
            drawn: Tensor = super().noise(mean)
            if mean.dtype != torch.float32 and torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise RuntimeError("not with a mode")
            return drawn

    torch.manual_seed(0)
    found = check(subject(Refuses()), "bf16", batch_size=8, find_pins=False)
    assert (found.verdict, "random numbers" in found.reason) == ("unfaithful", False)
